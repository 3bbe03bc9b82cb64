"""One rank of the trainer: does what rank 0 tells all ranks, one thing at a time; see rank.proto."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from flotilla.trainer.v1 import rank_pb2 as pb
from flotilla.trainer.v1 import rank_pb2_grpc
from services.common.errors import Aborted, NotFound
from services.common.logs import get_logger
from services.common.rpc import duration, new_request_id, open_channel
from services.common.run_checkpoints import CHECKPOINTS, checkpoint_path
from services.common.service import ServiceHost, now_s
from services.common.spec import SpecError
from services.common.threads import in_thread
from services.trainer import checkpoint, megatron
from services.trainer.batch import Batch, Sample
from services.trainer.buffer_client import BufferClient
from services.trainer.checkpoint import RunState
from services.trainer.codec import batch_from_proto, sample_from_bytes
from services.trainer.export import export_hf, share_weights, shared_memory_path
from services.trainer.exporter import Exporter
from services.trainer.progress import Progress
from services.trainer.ranks import all_ranks, on_first_rank
from services.trainer.replica import Replica
from services.trainer.run_model import run_model
from services.trainer.saving import WRITE_POLL_S, Saving
from services.trainer.step import Learner
from services.trainer.watch import IDLE, watch
from services.trainer.worker import Worker

RANK_SERVICE = "flotilla.trainer.v1.TrainerRankService"

log = get_logger(__name__)


class Rank(rank_pb2_grpc.TrainerRankServiceServicer):
    """Model, optimizer and exported weights of one rank. Lives in one event loop; torch has a thread of its own."""

    def __init__(self, host: ServiceHost) -> None:
        self._host, self._spec = host, host.spec
        self._rank = megatron.rank()
        self._root = host.spec.run_dir / CHECKPOINTS
        self._channels = [
            open_channel(one.grpc) for one in (host.spec.services.buffer, host.spec.services.weight_agents[self._rank])
        ]
        self._buffer = BufferClient(host.spec, host.board, self._channels[0])
        self._worker = Worker(host.spec.trainer.num_threads)
        self.progress = Progress()
        self.fleet_id = ""
        """Empty until the ranks have met."""
        self.learner: Learner
        self._replica: Replica
        self._exporter: Exporter
        self._saving: Saving

    async def open(self) -> None:
        """Meet the other ranks, and build the model. Raises SpecError if the run has another number of ranks."""
        ranks = len(self._spec.services.trainers)
        if megatron.world_size() != ranks:
            raise SpecError(
                f"services.trainer_ranks: the trainer of the run has {ranks} ranks, and this process was started as "
                f"one of {megatron.world_size()} (WORLD_SIZE); start it by `flotilla up`, or torchrun with as many"
            )
        self.progress.begin("meeting the other ranks")
        with self._host.board.waiting("the other ranks of the trainer"):
            # The worker stays free: a process that is stopped meanwhile has nothing to wait for.
            met, _ = in_thread(partial(megatron.meet, self._spec.trainer.hang_timeout_s), "meeting")
            await met
            await self._worker.run(self._open)
        self.progress.begin(IDLE)

    async def follow(self) -> None:
        """Open, and watch rank 0. Raises RankFailed or DeadlineExceeded when that ends or stands still."""
        await self.open()
        leader = open_channel(self._spec.services.trainer.grpc)
        self._channels.append(leader)
        ranks = {0: rank_pb2_grpc.TrainerRankServiceStub(leader)}
        await watch(self._spec.run_id, self.fleet_id, ranks, self._spec.trainer.hang_timeout_s)

    def _open(self) -> None:
        hang_timeout_s = self._spec.trainer.hang_timeout_s
        megatron.open_groups(self._spec.trainer.seed, self._spec.parallel, hang_timeout_s)
        self._replica = Replica(hang_timeout_s)
        self.learner = Learner(self._spec, run_model(self._spec), self.progress)
        self.fleet_id = on_first_rank(new_request_id)  # drawn anew whenever the ranks meet
        all_ranks(self.fleet_id)  # rank 0 asks nothing of a rank that does not know it yet

    async def close(self) -> None:
        """Leave nothing behind but the files of the run; nor what a life before was killed with."""
        shared_memory_path(self._spec.run_id, self._rank).unlink(missing_ok=True)
        for channel in self._channels:
            await channel.close()
        await self._worker.close(megatron.destroy)

    # ----------------------------------------------------------------------------------------- what rank 0 may ask

    async def GetRankStatus(self, request: pb.GetRankStatusRequest, context: Any) -> pb.GetRankStatusResponse:
        """What it does."""
        self._check_run(request.run_id)
        at = self.progress
        since = duration(now_s() - at.since_s)
        return pb.GetRankStatusResponse(fleet_id=self.fleet_id, doing=at.doing, since=since, progress=at.count)

    async def LoadState(self, request: pb.LoadStateRequest, context: Any) -> pb.LoadStateResponse:
        """Fill the model, and make room for the weights that others read."""
        step = request.step if request.HasField("step") else None
        with self._doing(request, "loading"):
            await self._worker.run(self._load, step)
            memory = await self._worker.run(share_weights, self._spec.run_id, self._rank, self.learner)
        write = partial(self._worker.run, memory.write)
        self._exporter = Exporter(self._spec.run_id, self._rank, self._host.board, self._channels[1], memory, write)
        self._host.spawn(self._exporter.beat(), "agent heartbeat")
        return pb.LoadStateResponse()

    def _load(self, step: int | None) -> None:
        if step is None:
            self.learner.load_initial_weights()
        else:
            checkpoint.load(checkpoint_path(self._root, step), self.learner, self._spec.digest())

    async def TrainBatch(self, request: pb.TrainBatchRequest, context: Any) -> pb.TrainBatchResponse:
        """Train on this rank's micro-batches."""
        with self._doing(request, "fetching samples"):
            batch = batch_from_proto(request.manifest, self._replica.number)
            samples = await self._fetch(batch)
            report = await self._worker.run(self.learner.train, batch, samples)
        return pb.TrainBatchResponse(**asdict(report))

    async def _fetch(self, batch: Batch) -> dict[int, Sample]:
        """The samples of this rank's rows; one rank of each copy of the model asks the buffer for them."""
        rows = sorted({row for one in batch.micro_batches for row in one.rows})
        payloads = await self._buffer.fetch_rows(batch.number, rows) if self._replica.is_first else []
        payloads = await self._worker.run(self._replica.share, payloads)
        return {row: sample_from_bytes(payload) for row, payload in zip(rows, payloads, strict=True)}

    async def ExportVersion(self, request: pb.ExportVersionRequest, context: Any) -> pb.ExportVersionResponse:
        """Hand the weights to the agent."""
        with self._doing(request, "exporting weights"):
            await self._exporter.export(request.version)
        return pb.ExportVersionResponse()

    async def BeginSave(self, request: pb.BeginSaveRequest, context: Any) -> pb.BeginSaveResponse:
        """Begin a checkpoint."""
        state = RunState(request.step, self._spec.digest(), tuple(request.batch_digests))
        with self._doing(request, "copying a checkpoint"):
            self._saving = await self._worker.run(checkpoint.begin_save, self._root, self.learner, state)
        return pb.BeginSaveResponse()

    async def FinishSave(self, request: pb.FinishSaveRequest, context: Any) -> pb.FinishSaveResponse:
        """Finish the checkpoint that was begun."""
        with self._doing(request, "finishing a checkpoint"):
            wait_s = WRITE_POLL_S if request.wait else 0.0
            while not (final := await self._worker.run(self._saving.written, wait_s)) and request.wait:
                self.progress.begin("finishing a checkpoint")  # a slow disk is no rank that stands still
            if final:
                await self._worker.run(self._saving.finish)
        return pb.FinishSaveResponse(final=final)

    async def ExportModel(self, request: pb.ExportModelRequest, context: Any) -> pb.ExportModelResponse:
        """Write a Hugging Face checkpoint."""
        model, target = self._spec.model, self._spec.run_dir / "hf"
        with self._doing(request, "exporting the model"):
            await self._worker.run(export_hf, self.learner, model.hf_checkpoint, target, model.overrides)
        return pb.ExportModelResponse()

    async def EndRank(self, request: pb.EndRankRequest, context: Any) -> pb.EndRankResponse:
        """Stop the process."""
        self._check(request)
        self._host.stopping.set()
        return pb.EndRankResponse()

    @contextmanager
    def _doing(self, request: Any, what: str) -> Iterator[None]:
        """A rank that cannot do its part is of no use to the others: it ends."""
        self._check(request)
        self.progress.begin(what)
        try:
            yield
        except Exception as error:
            log.error("the rank failed", doing=self.progress.doing, exc_info=error)
            self._host.fail(error)
            raise
        finally:
            self.progress.begin(IDLE)

    def _check(self, request: Any) -> None:
        self._check_run(request.run_id)
        if request.fleet_id != self.fleet_id:
            raise Aborted(f"rank {self._rank} belongs to another fleet")

    def _check_run(self, run_id: str) -> None:
        if run_id != self._spec.run_id:
            raise NotFound(f"this trainer runs {self._spec.run_id}, not {run_id}")
