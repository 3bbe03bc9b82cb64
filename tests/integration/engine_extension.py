"""An engine whose workers load weights from a checkpoint on disk, named by the session, instead of from the network.

`python -m tests.integration.engine_extension` is the engine with this extension; everything else of it is real.
"""

from __future__ import annotations

from typing import Any

from flotilla.rollout_gateway.v1 import engine_pb2
from services.rollout_gateway.engine.children import die_with_parent_if_spawned
from services.rollout_gateway.engine.main import main
from services.weight_sync import vllm_cpu_fixes


class DiskReceiver:
    """Mixed into vLLM's worker. A session named `fail...` never receives; one with no such directory fails to load."""

    model_runner: Any
    sessions: set[str]

    def weight_sync_start(self, request: bytes) -> None:
        session = engine_pb2.StartWeightUpdateRequest.FromString(request).session_id
        self.sessions = {session}

    def weight_sync_poll(self, session_id: str) -> dict[str, Any]:
        assert session_id in self.sessions
        if session_id.startswith("fail"):
            return {"state": "failed", "digest": "", "wire_seconds": 0.0, "error": "the sender is gone"}
        return {"state": "received", "digest": "00ff", "wire_seconds": 0.25, "error": ""}

    def weight_sync_finish(self, session_id: str) -> dict[str, Any]:
        vllm_cpu_fixes.apply()
        path = session_id.partition("@")[0]
        self.model_runner.reload_weights(weights_path=path)
        return {"load_seconds": 0.5}

    def weight_sync_abort(self, session_id: str) -> None:
        self.sessions.discard(session_id)

    def weight_sync_manifest(self) -> list[dict[str, Any]]:
        return [{"name": "model.norm.weight", "shape": [128], "dtype": "float32", "quantisable": False}]


die_with_parent_if_spawned(__name__)
if __name__ == "__main__":
    main("tests.integration.engine_extension.DiskReceiver")
