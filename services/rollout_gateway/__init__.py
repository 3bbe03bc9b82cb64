"""The rollout gateway: `python -m services.rollout_gateway --run RUN.toml`.

    buffer ◄── LeaseWork ────────────────────────────── work: takes what there is room for
       │  ◄── RenewLease, SubmitSamples, ReleaseLease ── lease: one task for each lease, saves tokens as they come
       └───── WatchWork ───────────────────────────────► stops: ends the tasks of leases that must stop
                                                            │
    engines ── RegisterEngine, RenewEngine ──► registry ──► generator: one group, to the end
       ▲                                          ▲         │
       │                    ListEngines ── weight_sync      │
       └───────────────────────── Generate (stream), Abort ─┘

Who waits for what: LeaseWork waits for work, at the buffer; a group waits for an engine that serves, until one
registers, finishes its weight update or has a free place; a submit waits for the buffer to come back. While a group
waits, its lease is renewed; when the lease is lost, the group is dropped; when it must stop, the engine is told first,
so that the release brings every token.

The engine process is in the package `engine`.
"""
