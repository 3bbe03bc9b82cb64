"""RunRegistryService over the ledger."""

from __future__ import annotations

import grpc

from flotilla.buffer.v1 import registry_pb2 as pb
from flotilla.buffer.v1 import registry_pb2_grpc
from services.buffer import codec
from services.buffer.evaluation import Evaluations
from services.buffer.requests import page_size
from services.buffer.run import Run
from services.common.errors import InvalidArgument

MAX_PAGE = 10_000
DEFAULT_PAGE = 100

Context = grpc.aio.ServicerContext


class RegistryServicer(registry_pb2_grpc.RunRegistryServiceServicer):
    """Passive: answers and records, calls nobody."""

    def __init__(self, run: Run, evaluations: Evaluations) -> None:
        self._run = run
        self._ledger = run.ledger
        self._evaluations = evaluations

    async def RegisterRun(self, request: pb.RegisterRunRequest, context: Context) -> pb.RegisterRunResponse:
        """Make the run known, or check that it is the same one."""
        self._run.check_run_id(request.run_id)
        if not request.spec_digest:
            raise InvalidArgument("spec_digest is empty", "spec_digest")
        await self._ledger.register(request.spec_digest)
        return pb.RegisterRunResponse(run=await self._facts())

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        """The facts of the run."""
        self._run.check_run_id(request.run_id)
        return pb.GetRunResponse(run=await self._facts())

    async def BeginEpoch(self, request: pb.BeginEpochRequest, context: Context) -> pb.BeginEpochResponse:
        """Open a new epoch."""
        self._run.check_run_id(request.run_id)
        if not request.request_id:
            raise InvalidArgument("request_id is empty", "request_id")
        if len(request.batch_digests) != request.checkpoint_step:
            raise InvalidArgument(
                f"batch_digests has {len(request.batch_digests)} entries for checkpoint_step "
                f"{request.checkpoint_step}; give one for each batch",
                "batch_digests",
            )
        epoch = await self._ledger.begin_epoch(
            request.request_id, request.checkpoint_step, request.checkpoint, request.batch_digests
        )
        self._run.turn()
        return pb.BeginEpochResponse(run_epoch=epoch)

    async def RewindRun(self, request: pb.RewindRunRequest, context: Context) -> pb.RewindRunResponse:
        """Go back below the committed step."""
        self._run.check_run_id(request.run_id)
        if not request.request_id:
            raise InvalidArgument("request_id is empty", "request_id")
        if request.step < 0:
            raise InvalidArgument("step is negative", "step")
        lineage, reissued = await self._ledger.rewind(request.request_id, request.step)
        self._run.turn()
        return pb.RewindRunResponse(lineage=lineage, reissued_groups=reissued)

    async def SetDesiredState(self, request: pb.SetDesiredStateRequest, context: Context) -> pb.SetDesiredStateResponse:
        """Record what the run should do."""
        self._run.check_run_id(request.run_id)
        name = codec.enum_name(pb.DesiredState, request.desired_state, "desired_state").removeprefix("DESIRED_STATE_")
        await self._ledger.set_desired_state(name)
        self._run.turn()
        return pb.SetDesiredStateResponse()

    async def RecordVersion(self, request: pb.RecordVersionRequest, context: Context) -> pb.RecordVersionResponse:
        """Record a version; LIVE opens the admission of its step and its evaluation."""
        self._run.check_run_id(request.run_id)
        version = request.version
        name = codec.enum_name(pb.VersionState, version.state, "version.state").removeprefix("VERSION_STATE_")
        step = version.version.step
        if not 0 <= step <= self._run.spec.rollout.num_rollout:
            raise InvalidArgument(f"version.version.step = {step} is no step of this run", "version.version.step")
        due = self._evaluations.due_sets(step) if name == "LIVE" else {}
        await self._ledger.record_version(version.version.run_epoch, step, name, version.SerializeToString(), due)
        self._run.turn()
        return pb.RecordVersionResponse()

    async def ListVersions(self, request: pb.ListVersionsRequest, context: Context) -> pb.ListVersionsResponse:
        """Versions, newest first."""
        self._run.check_run_id(request.run_id)
        size = page_size(request.page_size, DEFAULT_PAGE, MAX_PAGE)
        versions: list[pb.Version] = []
        for record, state in (await self._ledger.versions())[:size]:
            kept = pb.Version.FromString(record)
            versions.append(
                pb.Version(
                    version=kept.version, state=f"VERSION_STATE_{state}", digest=kept.digest, timings=kept.timings
                )
            )
        return pb.ListVersionsResponse(versions=versions)

    async def _facts(self) -> pb.Run:
        return codec.run_to_pb(self._run.spec.run_id, await self._ledger.run_facts())
