"""How the ledger looks: from a message of the buffer to something that rich can print. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flotilla.buffer.v1 import buffer_pb2 as pb
from flotilla.common.v1 import common_pb2
from services.cli.view import duration_text, memory_text
from services.common.rpc import seconds

CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}
"""Characters that could take over a terminal; responses hold whatever a model says."""


def short(enum: Any, value: int) -> str:
    """The name of a proto value without its prefix; '' for UNSPECIFIED."""
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    return enum.Name(value).removeprefix(prefix) if value else ""


def plain(text: str) -> Text:
    """Text of a stranger: no markup, no control characters."""
    return Text(text.translate(CONTROL))


def stats_view(stats: pb.GetBufferStatsResponse) -> RenderableType:
    """Counts by state, the conservation law, and what admission and memory say."""
    headline = f"{stats.issued} issued  ·  {stats.sealed_batches} batches sealed  ·  committed {stats.committed_step}"
    if stats.HasField("live_version"):
        headline += f"  ·  live weights {stats.live_version.step} (epoch {stats.live_version.run_epoch})"
    if stats.lineage:
        headline += f"  ·  lineage {stats.lineage}"
    return Group(Text(headline, style="bold"), _law(stats), "", _states(stats), "", _facts(stats))


def _law(stats: pb.GetBufferStatsResponse) -> Text:
    if stats.conserved and stats.evaluation_conserved:
        return Text("every group is accounted for", style="green")
    return Text("the states do not add up to the groups issued: run `flotilla buffer audit`", style="bold red")


def _states(stats: pb.GetBufferStatsResponse) -> Table:
    evaluation = {one.state: one.count for one in stats.evaluation_groups}
    table = _table("state", "training", "evaluation", right=("training", "evaluation"))
    for one in stats.groups:
        if one.count or evaluation.get(one.state):
            table.add_row(short(pb.GroupState, one.state), f"{one.count:,}", f"{evaluation.get(one.state, 0):,}")
    table.add_row("issued", f"{stats.issued:,}", f"{stats.evaluation_issued:,}", style="bold")
    return table


def _facts(stats: pb.GetBufferStatsResponse) -> Table:
    memory = memory_text(stats.memory_bytes)
    if stats.memory_limit_bytes:
        share = stats.memory_bytes / stats.memory_limit_bytes
        memory += f" of {memory_text(stats.memory_limit_bytes)} ({share:.0%})"
    if stats.back_pressure:
        memory += "; nearly full: no fresh group until the trainer commits"
    return _grid(
        ("admission credit", f"{stats.admission_credit} groups"),
        ("keep rate", f"{stats.keep_rate:.0%}"),
        ("leases", str(stats.leases)),
        ("last mean reward", f"{stats.last_mean_reward:.3f}"),
        ("memory", memory),
        ("dropped", _counts(stats.dropped)),
        ("stale", _counts(stats.stale)),
        ("failed", _counts(stats.failed)),
        ("discarded tokens", _counts(stats.discarded_tokens)),
        ("overlong prompts", str(stats.overlong_prompts)),
    )


def _counts(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {reason}" for reason, count in ordered) or "none"


def groups_table(groups: Sequence[pb.GroupSummary]) -> Table:
    """One line a group."""
    numbers = ("prompt", "attempts", "finished", "partial", "oldest", "batch")
    table = _table("group", "state", *numbers, "worker", "rewards", "reason", right=numbers)
    for one in groups:
        table.add_row(
            one.group_id,
            short(pb.GroupState, one.state),
            *map(str, (one.prompt_index, one.attempts, one.finished_samples, one.partial_tokens)),
            _or_dash(one.oldest_step),
            _or_dash(one.batch),
            plain(one.worker_id),
            " ".join(f"{reward:g}" for reward in one.rewards),
            plain(one.reason),
        )
    return table


def leases_table(leases: Sequence[pb.LeaseSummary]) -> Table:
    """One line a lease, the first to lapse first."""
    numbers = ("attempt", "finished", "partial", "lapses in")
    table = _table("group", "worker", "kind", *numbers, "must stop", right=numbers)
    for one in leases:
        left = seconds(one.expires_in)
        table.add_row(
            one.group_id,
            plain(one.worker_id),
            short(pb.WorkKind, one.kind).lower(),
            *map(str, (one.attempt, one.finished_samples, one.partial_tokens)),
            duration_text(left) if left >= 0 else "lapsed",
            short(pb.StopReason, one.stop_reason),
        )
    return table


def dead_letters_table(groups: Sequence[pb.GroupSummary]) -> Table:
    """One line a group that failed for good, with its last error."""
    table = _table("group", "prompt", "attempts", "worker", "last error", right=("prompt", "attempts"))
    for one in groups:
        table.add_row(
            one.group_id, str(one.prompt_index), str(one.attempts), plain(one.worker_id), plain(one.reason)
        )  # fmt: skip
    return table


def group_view(group: pb.GetGroupResponse) -> RenderableType:
    """A group with its text."""
    summary = group.summary
    facts = [
        ("state", short(pb.GroupState, summary.state) + (f": {summary.reason}" if summary.reason else "")),
        ("prompt", f"row {summary.prompt_index}, label {group.label}"),
        ("batch", _or_dash(summary.batch)),
        ("attempts", f"{summary.attempts}, last by {summary.worker_id or 'nobody'}"),
        ("samples", f"{summary.finished_samples} finished, {summary.partial_tokens} tokens of unfinished ones saved"),
        ("oldest weights", _or_dash(summary.oldest_step)),
    ]
    parts: list[RenderableType] = [Text(summary.group_id, style="bold"), _grid(*facts), "", plain(group.prompt)]
    for sample, response in zip(group.samples, group.responses, strict=True):
        parts += ["", Text(_sample_line(group, sample), style="bold"), plain(response)]
    return Group(*parts)


def _sample_line(group: pb.GetGroupResponse, sample: common_pb2.Sample) -> str:
    at, parts = sample.sample_index, [f"{len(sample.response_token_ids)} tokens"]
    if at < len(group.summary.rewards):
        parts.append(f"reward {group.summary.rewards[at]:g}")
    if at < len(group.verdicts):
        parts.append(group.verdicts[at])
    parts.append(short(common_pb2.FinishReason, sample.finish_reason))
    parts.append("weights " + spans_text(sample.policy_spans))
    return f"sample {at}  ·  " + "  ·  ".join(parts)


def spans_text(spans: Iterable[common_pb2.PolicySpan]) -> str:
    """Which weights produced which tokens: `1:4 [0,30) 1:5 [30,64)`."""
    return " ".join(f"{one.version.run_epoch}:{one.version.step} [{one.begin},{one.end})" for one in spans)


def audit_view(audit: pb.AuditLedgerResponse) -> RenderableType:
    """Counts, and every discrepancy."""
    counts = (
        f"{audit.groups:,} training and {audit.evaluation_groups:,} evaluation groups, {audit.batches:,} batches, "
        f"{audit.samples:,} samples checked; {audit.committed_groups:,} groups trained and committed"
    )
    if not audit.discrepancies:
        return Group(counts, Text("everything adds up", style="green"))
    table = _table("subject", "problem")
    for one in audit.discrepancies:
        table.add_row(plain(one.subject), plain(one.problem))
    return Group(counts, table, Text(f"{len(audit.discrepancies)} discrepancies", style="bold red"))


def _or_dash(number: int) -> str:
    return str(number) if number >= 0 else "-"


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    """The last column takes the rest of the line, the others what they need."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        last = column == columns[-1]
        table.add_column(column, no_wrap=not last, overflow="fold", justify="right" if column in right else "left")
    return table


def _grid(*rows: tuple[str, str]) -> Table:
    grid = Table(box=None, show_header=False, pad_edge=False)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(name, plain(text))
    return grid
