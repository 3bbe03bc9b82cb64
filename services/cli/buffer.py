"""`flotilla buffer`: look into the ledger of a run, empty a gateway, go back to an earlier step. Asks the buffer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from rich.console import Console, RenderableType

from flotilla.buffer.v1 import buffer_pb2 as pb
from flotilla.buffer.v1 import buffer_pb2_grpc, registry_pb2, registry_pb2_grpc
from services.cli import buffer_tables as tables
from services.cli.run_argument import Overrides, RunArgument, spec_of_run
from services.common.errors import DeadlineExceeded, FlotillaError, Unavailable
from services.common.rpc import call, duration, new_request_id, open_channel
from services.common.spec import RunSpec

ANSWER_TIMEOUT_S = 10.0
AUDIT_TIMEOUT_S = 600.0
"""It reads the whole ledger."""
DRAIN_POLL_S = 10.0
PAGE = 1000
PIPE_WIDTH = 200
"""Columns when nobody looks, so that nothing is cut."""

app = typer.Typer(no_args_is_help=True, help="Look into the ledger of a run.")

AsJson = Annotated[bool, typer.Option("--json", help="Print protobuf JSON, for scripts.")]
Limit = Annotated[int, typer.Option("--limit", min=1, help="At most so many.")]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Peer:
    """The buffer, as a command asks it."""

    run_id: str
    buffer: buffer_pb2_grpc.BufferServiceAsyncStub
    registry: registry_pb2_grpc.RunRegistryServiceAsyncStub


@app.command()
def stats(run: RunArgument, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Groups by state, the conservation law, admission, memory, and what was dropped, stale, failed or discarded."""

    async def question(peer: Peer) -> pb.GetBufferStatsResponse:
        request = pb.GetBufferStatsRequest(run_id=peer.run_id)
        return await call(peer.buffer.GetBufferStats, request, timeout_s=ANSWER_TIMEOUT_S)

    _show(_ask(run, overrides, question), tables.stats_view, as_json)


@app.command()
def groups(
    run: RunArgument,
    overrides: Overrides = None,
    state: Annotated[str, typer.Option("--state", help="Only groups in this state, as KEPT.")] = "",
    kind: Annotated[Literal["training", "evaluation"], typer.Option("--kind", help="Which ledger.")] = "training",
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """Groups, oldest first."""
    request = pb.ListGroupsRequest(state=_state(state), kind=f"WORK_KIND_{kind.upper()}")

    async def question(peer: Peer) -> pb.ListGroupsResponse:
        return pb.ListGroupsResponse(groups=await _groups(peer, request, limit))

    _show(_ask(run, overrides, question), lambda found: tables.groups_table(found.groups), as_json)


@app.command()
def show(
    run: RunArgument,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="As g00000042.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """One group: prompt and responses as text, rewards, verdicts, and which weights produced which tokens."""

    async def question(peer: Peer) -> pb.GetGroupResponse:
        request = pb.GetGroupRequest(run_id=peer.run_id, group_id=group)
        return await call(peer.buffer.GetGroup, request, timeout_s=ANSWER_TIMEOUT_S)

    _show(_ask(run, overrides, question), tables.group_view, as_json)


@app.command()
def leases(run: RunArgument, overrides: Overrides = None, limit: Limit = 100, as_json: AsJson = False) -> None:
    """Work leases, the first to lapse first."""

    async def question(peer: Peer) -> pb.ListLeasesResponse:
        request = pb.ListLeasesRequest(run_id=peer.run_id)
        return pb.ListLeasesResponse(leases=await _pages(peer.buffer.ListLeases, request, "leases", limit))

    _show(_ask(run, overrides, question), lambda found: tables.leases_table(found.leases), as_json)


@app.command()
def dead_letters(run: RunArgument, overrides: Overrides = None, limit: Limit = 100, as_json: AsJson = False) -> None:
    """Groups that FAILED for good, with their last error; training first, then evaluation."""

    async def question(peer: Peer) -> pb.ListGroupsResponse:
        found: list[pb.GroupSummary] = []
        for kind in (pb.WORK_KIND_TRAINING, pb.WORK_KIND_EVALUATION):
            request = pb.ListGroupsRequest(state=pb.GROUP_STATE_FAILED, kind=kind)
            found += await _groups(peer, request, limit - len(found))
        return pb.ListGroupsResponse(groups=found)

    _show(_ask(run, overrides, question), lambda found: tables.dead_letters_table(found.groups), as_json)


@app.command()
def audit(run: RunArgument, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Recompute the ledger's laws from the raw keys. Exit code 1 if anything does not add up."""

    async def question(peer: Peer) -> pb.AuditLedgerResponse:
        request = pb.AuditLedgerRequest(run_id=peer.run_id)
        return await call(peer.buffer.AuditLedger, request, timeout_s=AUDIT_TIMEOUT_S)

    found = _ask(run, overrides, question)
    _show(found, tables.audit_view, as_json)
    raise typer.Exit(1 if found.discrepancies else 0)


@app.command()
def drain(
    run: RunArgument,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="As `flotilla buffer leases` shows it.")],
    overrides: Overrides = None,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait for its leases.")] = 600.0,
) -> None:
    """Empty a gateway before it is taken away; its tokens are kept. Exit code 1 if it still holds leases in the end."""
    give_up = time.monotonic() + timeout_s

    async def question(peer: Peer) -> int:
        while True:
            wait_s = min(DRAIN_POLL_S, max(0.0, give_up - time.monotonic()))
            request = pb.DrainWorkRequest(
                run_id=peer.run_id, request_id=new_request_id(), worker_id=worker, wait_timeout=duration(wait_s)
            )
            answer = await call(peer.buffer.DrainWork, request, timeout_s=wait_s + ANSWER_TIMEOUT_S)
            typer.echo(f"{worker} holds {answer.remaining_leases} leases")
            if not answer.remaining_leases or time.monotonic() >= give_up:
                return answer.remaining_leases

    raise typer.Exit(1 if _ask(run, overrides, question) else 0)


@app.command()
def rewind(
    run: RunArgument,
    to_step: Annotated[int, typer.Option("--to-step", min=0, max=1 << 31, help="Rollout steps that stay committed.")],
    overrides: Overrides = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Go back below the committed step: later batches no longer count, and their prompts are generated again."""
    if not yes:
        typer.confirm(f"Take every committed batch from {to_step} on back? This cannot be undone.", abort=True)

    async def question(peer: Peer) -> registry_pb2.RewindRunResponse:
        request = registry_pb2.RewindRunRequest(run_id=peer.run_id, request_id=new_request_id(), step=to_step)
        return await call(peer.registry.RewindRun, request, timeout_s=ANSWER_TIMEOUT_S, patience_s=ANSWER_TIMEOUT_S)

    done = _ask(run, overrides, question)
    typer.echo(f"lineage {done.lineage}: {done.reissued_groups} groups are issued again")
    typer.echo(f"remove the checkpoints after step {to_step} before the trainer starts: it takes the newest")


def _ask(run: Path, overrides: list[str] | None, question: Callable[[Peer], Awaitable[T]]) -> T:
    """Put a question to the buffer of a run; an error ends the command."""
    spec = spec_of_run(run, overrides)
    try:
        return asyncio.run(_answer(spec, question))
    except (Unavailable, DeadlineExceeded) as error:
        problem = f"no answer from the buffer at {spec.services.buffer.grpc}: {error}"
    except FlotillaError as error:
        problem = str(error)
    typer.echo(" ".join(problem.split()), err=True)
    raise typer.Exit(1)


async def _answer(spec: RunSpec, question: Callable[[Peer], Awaitable[T]]) -> T:
    channel = open_channel(spec.services.buffer.grpc)
    try:
        registry = registry_pb2_grpc.RunRegistryServiceStub(channel)
        return await question(Peer(spec.run_id, buffer_pb2_grpc.BufferServiceStub(channel), registry))
    finally:
        await channel.close()


async def _groups(peer: Peer, request: pb.ListGroupsRequest, limit: int) -> list[pb.GroupSummary]:
    request.run_id = peer.run_id
    return await _pages(peer.buffer.ListGroups, request, "groups", limit)


async def _pages(method: Callable[..., Awaitable[Any]], request: Any, field: str, limit: int) -> list[Any]:
    """The items of as many pages as it takes."""
    found: list[Any] = []
    while len(found) < limit:
        request.page_size = min(PAGE, limit - len(found))
        answer = await call(method, request, timeout_s=ANSWER_TIMEOUT_S)
        found += getattr(answer, field)
        request.page_token = answer.next_page_token
        if not answer.next_page_token:
            break
    return found[:limit]


def _state(name: str) -> str:
    known = [tables.short(pb.GroupState, value) for value in pb.GroupState.values() if value]
    if name and name.upper() not in known:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint="--state")
    return f"GROUP_STATE_{name.upper() or 'UNSPECIFIED'}"


def _show(message: Message, view: Callable[[Any], RenderableType], as_json: bool) -> None:
    if as_json:
        typer.echo(MessageToJson(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    console.print(view(message))
