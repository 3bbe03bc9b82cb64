"""`python -m services.trainer --run RUN.toml`: one rank of the trainer, RANK of WORLD_SIZE as torchrun sets them."""

from __future__ import annotations

from flotilla.trainer.v1 import rank_pb2_grpc, trainer_pb2_grpc
from services.common.service import ServiceHost, run_service
from services.common.spec import Endpoint, RunSpec, SpecError
from services.trainer import megatron
from services.trainer.control import Control
from services.trainer.loop import TrainingRun
from services.trainer.rank import RANK_SERVICE, Rank
from services.trainer.servicer import TRAINER_SERVICE, TrainerServicer


async def setup(host: ServiceHost) -> None:
    """Serve the rank; on rank 0 serve TrainerService too, and lead the training."""
    rank = Rank(host)
    host.on_stop.append(rank.close)
    host.serve(RANK_SERVICE, rank_pb2_grpc.add_TrainerRankServiceServicer_to_server, rank)
    if megatron.rank():
        host.board.details = lambda: {"fleet": rank.fleet_id, "doing": rank.progress.doing}
        host.spawn(rank.open(), "start")
        return
    control = Control()
    servicer = TrainerServicer(host.spec.run_id, control, host.stopping)
    host.serve(TRAINER_SERVICE, trainer_pb2_grpc.add_TrainerServiceServicer_to_server, servicer)
    host.board.details = lambda: {
        "phase": control.phase.name,
        "run_epoch": control.run_epoch,
        "step": control.step,
        "committed_step": control.committed_step,
        "doing": rank.progress.doing,
    }
    training = TrainingRun(host, control, rank)
    host.on_stop.append(training.close)
    host.spawn(training.run(), "training")


def endpoint_of(spec: RunSpec) -> Endpoint:
    """Where this rank listens. Raises SpecError if the run has no such rank."""
    if megatron.rank() >= len(spec.services.trainers):
        raise SpecError(
            f"RANK is {megatron.rank()}, and the run has {len(spec.services.trainers)} ranks of the trainer"
        )
    return spec.services.trainers[megatron.rank()]


if __name__ == "__main__":
    run_service("trainer", setup, endpoint_of)
