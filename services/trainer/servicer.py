"""TrainerService over the trainer's control state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from flotilla.common.v1 import common_pb2
from flotilla.trainer.v1 import trainer_pb2 as pb
from flotilla.trainer.v1 import trainer_pb2_grpc
from services.common.errors import NotFound
from services.common.rpc import duration
from services.trainer.control import Control, FinishedStep, Phase

TRAINER_SERVICE = "flotilla.trainer.v1.TrainerService"


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """One run's trainer."""

    def __init__(self, run_id: str, control: Control, stopping: asyncio.Event) -> None:
        self._run_id, self._control, self._stopping = run_id, control, stopping

    async def GetTrainerStatus(self, request: pb.GetTrainerStatusRequest, context: Any) -> pb.GetTrainerStatusResponse:
        """Where it is."""
        self._check_run(request.run_id)
        now = self._control
        phase = Phase.PAUSED if now.paused_at_s else now.phase
        response = pb.GetTrainerStatusResponse(phase=f"TRAINER_PHASE_{phase.name}", committed_step=now.committed_step)
        if now.run_epoch:
            response.version.CopyFrom(common_pb2.PolicyVersion(run_epoch=now.run_epoch, step=now.step))
        if now.last:
            response.last_step.CopyFrom(_metrics(now.last))
        return response

    async def WatchSteps(self, request: pb.WatchStepsRequest, context: Any) -> AsyncIterator[pb.WatchStepsResponse]:
        """Every step, as it finishes."""
        self._check_run(request.run_id)
        async for finished in self._control.watch(self._stopping):
            yield pb.WatchStepsResponse(metrics=_metrics(finished))

    async def SaveCheckpoint(self, request: pb.SaveCheckpointRequest, context: Any) -> pb.SaveCheckpointResponse:
        """Save after the step that runs."""
        self._check_run(request.run_id)
        saved = await self._control.saved()
        return pb.SaveCheckpointResponse(step=saved.step, checkpoint=saved.path)

    async def PauseTraining(self, request: pb.PauseTrainingRequest, context: Any) -> pb.PauseTrainingResponse:
        """Start no further step."""
        self._check_run(request.run_id)
        self._control.pause()
        return pb.PauseTrainingResponse()

    async def ResumeTraining(self, request: pb.ResumeTrainingRequest, context: Any) -> pb.ResumeTrainingResponse:
        """Go on."""
        self._check_run(request.run_id)
        return pb.ResumeTrainingResponse(paused_for=duration(self._control.resume()))

    def _check_run(self, run_id: str) -> None:
        if run_id != self._run_id:
            raise NotFound(f"this trainer runs {self._run_id}, not {run_id}")


def _metrics(finished: FinishedStep) -> pb.StepMetrics:
    return pb.StepMetrics(step=finished.step, values=finished.values)
