"""The rollout gateway: `python -m services.rollout_gateway --run RUN.toml`.

    buffer ◄── LeaseWork, RenewLease, SubmitSamples, ReleaseLease ──┐
                                                           ┌────────┴────────┐
                                                           │ work: one task  │
                                                           │ for each lease  │
    engines ── RegisterEngine, RenewEngine ──► registry ──►│ generator: one  │── Generate (stream) ──► engine
    weight_sync ── ListEngines ──────────────► registry    │ group, to the   │
                                                           │ end             │
                                                           └─────────────────┘

Who waits for what: LeaseWork waits for work, at the buffer; a group waits for an engine that serves, until one
registers, finishes its weight update or has a free place; a submit waits for the buffer to come back. While a group
waits, its lease is renewed; when the lease is lost, the group is dropped.

The engine process is in the package `engine`.
"""
