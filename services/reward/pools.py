"""The worker pools of a run: one for the built-in graders, one for its own grader if it has one."""

from __future__ import annotations

from services.common.spec import RewardSpec, SpecError
from services.reward.custom import VERSION, custom_pool
from services.reward.graders import Grader
from services.reward.pool import WorkerPool


class Pools:
    """Use from one event loop."""

    def __init__(self, spec: RewardSpec) -> None:
        self.built_in = WorkerPool(spec.workers, spec.timeout_s, spec.max_queue)
        self.custom = custom_pool(spec) if spec.is_custom else None
        self.all = [self.built_in, self.custom] if self.custom else [self.built_in]

    def of(self, grader: Grader) -> WorkerPool:
        """The pool that a grader's questions go to."""
        return self.custom if self.custom and grader.version == VERSION else self.built_in

    async def start(self) -> None:
        """Start all workers.

        Raises:
            OSError: They do not start.
            SpecError: The run's own grader cannot be loaded.
        """
        for pool in self.all:
            await pool.start()
        if self.custom and self.custom.failure:
            raise SpecError(f"reward.grader: {self.custom.failure}")

    async def stop(self) -> None:
        """Kill all workers; returns when they are gone."""
        for pool in self.all:
            await pool.stop()
