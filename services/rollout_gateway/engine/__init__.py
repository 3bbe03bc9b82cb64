"""One vLLM engine behind EngineService.

    EngineService.Generate ──► generation.generate_group ──► VllmEngine.generate ──► AsyncLLM ─ ─► EngineCore, workers
    EngineService.*WeightUpdate ──► WeightUpdates ──► VllmEngine.on_workers ──────────────────────► WeightReceiver
    Heartbeat ──► RolloutGatewayService.RegisterEngine, RenewEngine

vLLM's own processes are children of ours and die with it. If one of them dies, we exit with an error.
"""
