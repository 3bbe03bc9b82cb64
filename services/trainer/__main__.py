"""`python -m services.trainer --run RUN.toml`: the trainer, one process for each rank."""

from __future__ import annotations

from flotilla.trainer.v1 import trainer_pb2_grpc
from services.common.service import ServiceHost, run_service
from services.trainer.control import Control
from services.trainer.loop import TrainingRun
from services.trainer.servicer import TRAINER_SERVICE, TrainerServicer


async def setup(host: ServiceHost) -> None:
    """Serve TrainerService, and train in the background."""
    control = Control()
    servicer = TrainerServicer(host.spec.run_id, control, host.stopping)
    host.serve(TRAINER_SERVICE, trainer_pb2_grpc.add_TrainerServiceServicer_to_server, servicer)
    host.board.details = lambda: {
        "phase": control.phase.name,
        "run_epoch": control.run_epoch,
        "step": control.step,
        "committed_step": control.committed_step,
    }
    training = TrainingRun(host, control)
    host.on_stop.append(training.close)
    host.spawn(training.run(), "training")


if __name__ == "__main__":
    run_service("trainer", setup, lambda spec: spec.services.trainer)
