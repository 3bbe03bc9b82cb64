"""What groups, their samples, their saved tokens and the manifests of batches must be like. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from flotilla.buffer.v1 import buffer_pb2 as pb
from services.buffer.audit_laws import Discrepancy, is_over
from services.buffer.audit_snapshot import Batch, Snapshot
from services.buffer.records import Group
from services.buffer.seal import batch_digest
from services.buffer.states import IN_PLAY, State

UNFINISHED = (State.WAITING, State.GENERATING, State.PARTIAL)
"""States in which samples may be missing."""
REASONED = (State.DROPPED, State.STALE, State.FAILED)
UNGRADED = (*UNFINISHED, State.GENERATED, State.STALE, State.FAILED)
"""States in which rewards may be missing."""
NUMBERS = (b"issue", b"prompt", b"finished", b"batch", b"oldest", b"partial_oldest", b"newest")
"""Fields of a group's hash, beside `p:<i>`."""


@dataclass(frozen=True, slots=True)
class Indices:
    """Samples of a group, by what its hash has of them."""

    headers: set[int]
    hashes: set[int]
    saved: set[int]
    """With saved tokens."""


def indices(group: Group) -> Indices:
    """Samples of a group."""
    found: dict[bytes, set[int]] = {b"h": set(), b"hash": set(), b"p": set()}
    for name in group.fields:
        kind, _, index = name.partition(b":")
        if kind in found and index.isdigit():
            found[kind].add(int(index))
    return Indices(found[b"h"], found[b"hash"], found[b"p"])


def is_released(group_id: str, snapshot: Snapshot) -> bool:
    """True if the content of a group is gone, as it should be."""
    return is_over(group_id, snapshot.state_of[group_id]) and group_id not in snapshot.ordered["retained"]


def is_readable(group: Group) -> bool:
    """True if the numbers in a group's hash are numbers."""
    return all(
        value.lstrip(b"-").isdigit()
        for name, value in group.fields.items()
        if name in NUMBERS or name.startswith(b"p:")
    )


def check_groups(groups: Sequence[Group], snapshot: Snapshot) -> list[Discrepancy]:
    """Hashes of groups against the sets. Fields may be newer than the snapshot."""
    return [one for group in groups for one in _check_group(group, snapshot)]


def _check_group(group: Group, snapshot: Snapshot) -> Iterator[Discrepancy]:
    state = snapshot.state_of[group.group_id]
    if not group.fields:
        yield Discrepancy(group.group_id, f"is in {state}, but its hash does not exist")
    elif group.text("state") != state:
        yield Discrepancy(group.group_id, f"is in {state}, its hash says {group.text('state') or 'nothing'}")
    elif not is_readable(group):
        yield Discrepancy(group.group_id, "has a number in its hash that cannot be read")
    else:
        yield from (Discrepancy(group.group_id, problem) for problem in _problems(group, state, snapshot))


def _problems(group: Group, state: State, snapshot: Snapshot) -> Iterator[str]:
    samples = indices(group)
    yield from _identity(group, state, snapshot)
    yield from _lease_and_age(group, state, snapshot)
    yield from _finished(group, state, snapshot, samples)
    if samples.saved or state is State.PARTIAL:
        yield from _unfinished(group, state, snapshot, samples)
    if state in REASONED and not group.text("reason"):
        yield f"is {state} without a reason"


def _identity(group: Group, state: State, snapshot: Snapshot) -> Iterator[str]:
    issue = group.number("issue", -1)
    order = snapshot.sets["eval"][state].get(group.group_id, 0)
    if issue != (order or issue) if group.is_evaluation else group.group_id != f"g{issue:08d}":
        yield f"has issue number {issue} in its hash"
    batch = snapshot.batch_of.get(group.group_id)
    if group.number("batch", -1) != (batch.number if batch else -1):
        yield f"is in {f'batch {batch.name}' if batch else 'no batch'}, its hash says {group.number('batch', -1)}"


def _lease_and_age(group: Group, state: State, snapshot: Snapshot) -> Iterator[str]:
    if state is State.GENERATING and not group.text("token"):
        yield "is GENERATING without a token"
    if state is not State.GENERATING and group.text("token"):
        yield f"has a token, though it is {state}"
    oldest, aging = group.number("oldest", -1), snapshot.ordered["aging"].get(group.group_id, -1)
    if state in IN_PLAY and not group.is_evaluation and oldest != aging:
        yield f"has tokens of step {oldest} in its hash, of step {aging} in aging"


def _finished(group: Group, state: State, snapshot: Snapshot, samples: Indices) -> Iterator[str]:
    size, count, rewards = snapshot.group_size(group.group_id), group.number("finished"), group.rewards()
    if samples.headers != samples.hashes:
        yield f"has headers of samples {sorted(samples.headers)}, hashes of {sorted(samples.hashes)}"
    if max(samples.headers, default=0) >= size:
        yield f"has samples {sorted(samples.headers)}, though it is a group of {size}"
    if is_released(group.group_id, snapshot) and not group.is_evaluation:
        if samples.headers:
            yield f"is {state} and released, but its samples are still there"
    elif count != len(samples.headers):
        yield f"counts {count} finished samples, but has {len(samples.headers)}"
    if state not in UNFINISHED and state not in REASONED and count != size:
        yield f"is {state} with {count} samples of {size}"
    if state not in UNGRADED and len(rewards) != size:
        yield f"is {state} with {len(rewards)} rewards of {size}"


def _unfinished(group: Group, state: State, snapshot: Snapshot, samples: Indices) -> Iterator[str]:
    if both := samples.saved & samples.headers:
        yield f"has saved tokens of samples {sorted(both)}, which are finished"
    if max(samples.saved, default=0) >= snapshot.group_size(group.group_id):
        yield f"has saved tokens of samples {sorted(samples.saved)}"
    if not samples.saved:
        yield "is PARTIAL without saved tokens"
    may_hold = (State.GENERATING, State.WAITING if group.is_evaluation else State.PARTIAL)
    if state not in may_hold and group.group_id not in snapshot.ordered["retained"]:
        yield f"has saved tokens, though it is {state}"


@dataclass(frozen=True, slots=True)
class SavedTokens:
    """Saved tokens of an unfinished sample, and what its group's hash says of them."""

    group_id: str
    index: int
    tokens: int
    begins: str
    oldest: int
    """Lower bound of the policy steps."""
    newest: int
    """Upper bound of the policy steps."""
    fragments: Sequence[bytes]


def check_samples(rows: Sequence[tuple[Group, int]], payloads: Sequence[bytes | None]) -> list[Discrepancy]:
    """Finished samples, by group and index, against the hashes in the ledger."""
    found = []
    for (group, index), payload in zip(rows, payloads, strict=True):
        if payload is None:
            found.append(Discrepancy(group.group_id, f"sample {index} is gone, its hash is still there"))
        elif hashlib.sha256(payload).hexdigest() != group.content_hash(index):
            found.append(Discrepancy(group.group_id, f"sample {index} does not have the content of its hash"))
    return found


def check_saved(saved: Sequence[SavedTokens]) -> list[Discrepancy]:
    """Fragments of unfinished samples against what their groups say of them."""
    return [one for sample in saved for one in _check_saved(sample)]


def _check_saved(saved: SavedTokens) -> list[Discrepancy]:
    try:
        fragments = [pb.SampleFragment.FromString(one) for one in saved.fragments]
    except DecodeError:
        problems = ["has a fragment that cannot be read"]
    else:
        problems = [*_fragment_problems(saved, fragments)]
    return [Discrepancy(saved.group_id, f"unfinished sample {saved.index} {problem}") for problem in problems]


def _fragment_problems(saved: SavedTokens, fragments: Sequence[pb.SampleFragment]) -> Iterator[str]:
    end = 0
    for one in fragments:
        if one.begin != end or one.sample_index != saved.index:
            yield f"has a fragment of sample {one.sample_index} at token {one.begin}, not at {end}"
        if len(one.rollout_log_probs) != len(one.response_token_ids):
            yield f"lacks log-probs from token {one.begin} on"
        end = one.begin + len(one.response_token_ids)
    if end != saved.tokens or " ".join(str(one.begin) for one in fragments) != saved.begins:
        yield f"has {end} saved tokens in {len(fragments)} fragments, its group says {saved.tokens} from {saved.begins}"
    steps = [span.version.step for one in fragments for span in one.policy_spans]
    if steps and not saved.oldest <= min(steps) <= max(steps) <= saved.newest:
        yield f"has tokens of steps {min(steps)} to {max(steps)}, its group says {saved.oldest} to {saved.newest}"


def check_manifest(batch: Batch, content: bytes | None, groups: Sequence[Group]) -> list[Discrepancy]:
    """A manifest against its batch.

    Args:
        batch: The batch.
        content: Serialized BatchManifest.
        groups: Those of the batch, for the digest; their hashes are gone some time after the commit.
    """
    try:
        manifest = pb.BatchManifest.FromString(content or b"")
    except DecodeError:
        problems = ["has a manifest that cannot be read"]
    else:
        problems = [*_manifest_problems(batch, manifest, groups)]
    return [Discrepancy(f"batch:{batch.name}", problem) for problem in problems]


def _manifest_problems(batch: Batch, manifest: pb.BatchManifest, groups: Sequence[Group]) -> Iterator[str]:
    if (manifest.batch, manifest.digest) != (batch.number, batch.digest):
        yield f"has a manifest of batch {manifest.batch} with digest {manifest.digest or 'none'}"
    if {row.group_id for row in manifest.rows} != set(batch.groups):
        yield "has a manifest with other groups"
        return
    has_hashes = groups and all(
        group.content_hash(index) for group in groups for index in range(group.number("finished"))
    )
    if has_hashes and batch_digest(batch.number, manifest.rows, groups) != batch.digest:
        yield "does not have the content of its digest"


def check_key(name: str, snapshot: Snapshot, held: Mapping[str, int]) -> Iterator[Discrepancy]:
    """A key of the ledger, without prefix, that may belong to nothing.

    Args:
        name: The key.
        snapshot: One instant.
        held: Content that groups account for: by `payload:<group>` and `partial:<group>`, samples as a bit mask.
    """
    kind, _, rest = name.partition(":")
    if kind == "group" and rest not in snapshot.state_of:
        yield Discrepancy(name, "exists, but is in no state")
    elif kind == "batch" and rest not in snapshot.batch_names:
        yield Discrepancy(name, "exists, but was never sealed")
    elif kind in ("payload", "partial"):
        owner, _, index = name.rpartition(":")
        if not index.isdigit() or not held.get(owner, 0) >> int(index) & 1:
            yield Discrepancy(name, "belongs to no sample that is kept")
