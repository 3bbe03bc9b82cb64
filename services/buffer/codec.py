"""Between protobuf and what the buffer works with; checks what comes in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from flotilla.buffer.v1 import buffer_pb2 as pb
from flotilla.buffer.v1 import registry_pb2 as registry_pb
from flotilla.common.v1 import common_pb2
from services.buffer.records import FinishedSample, Fragment, Group, Lease, SampleHeader, Stop
from services.buffer.states import State
from services.common.errors import InvalidArgument
from services.common.rpc import duration

MAX_VERSION = 1 << 31
"""Epochs and steps beyond it are mistakes; Redis's scripts keep integers up to 2^53."""
FINISHED = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)


def state_to_pb(state: State) -> str:
    """The proto's name of a state."""
    return f"GROUP_STATE_{state}"


def state_from_pb(state: pb.GroupState) -> State:
    """The state of the proto's value, which must not be UNSPECIFIED. Raises InvalidArgument for an unknown value."""
    return State(enum_name(pb.GroupState, state, "state").removeprefix("GROUP_STATE_"))


def enum_name(enum: Any, value: int, field: str) -> str:
    """The name of an enum's value. Raises InvalidArgument for a value that the contract does not have, or for 0."""
    if value not in enum.values() or not value:
        raise InvalidArgument(f"{field} = {value} is not a value that can be asked for", field)
    return enum.Name(value)


def finished_sample(sample: common_pb2.Sample, group_id: str, group_size: int, prompt: list[int]) -> FinishedSample:
    """A finished sample as it goes into the ledger. Raises InvalidArgument that names the field."""
    where = f"samples[{sample.sample_index}]"
    token_ids, loss_mask = np.asarray(sample.response_token_ids), np.asarray(sample.loss_mask)
    log_probs, length = np.asarray(sample.rollout_log_probs), len(token_ids)
    checks = {
        "group_id": sample.group_id == group_id,
        "sample_index": 0 <= sample.sample_index < group_size,
        "prompt_token_ids": list(sample.prompt_token_ids) == prompt,
        "response_token_ids": length > 0 and token_ids.min() >= 0,
        "rollout_log_probs": len(log_probs) == length and np.isfinite(log_probs).all(),
        "loss_mask": len(loss_mask) == length and (loss_mask & 1 == loss_mask).all(),
        "policy_spans": _covers(sample.policy_spans, 0, length),
        "finish_reason": sample.finish_reason in FINISHED,
    }
    for field, right in checks.items():
        if not right:
            raise InvalidArgument(f"{where}.{field} of group {group_id} does not fit the sample", f"{where}.{field}")
    versions = [(span.version.run_epoch, span.version.step) for span in sample.policy_spans]
    header = SampleHeader(
        prompt_tokens=len(prompt),
        response_tokens=length,
        loss_tokens=int(loss_mask.sum()),
        finish_reason=sample.finish_reason,
        oldest_step=min(step for _, step in versions),
        versions=sorted({f"{epoch}:{step}" for epoch, step in versions}),
    )
    return FinishedSample(sample.sample_index, header, sample.SerializeToString(deterministic=True))


def fragment(message: pb.SampleFragment, group_id: str, group_size: int) -> Fragment:
    """Tokens of an unfinished sample as they go into the ledger. Raises InvalidArgument that names the field."""
    where = f"progress[{message.sample_index}]"
    token_ids, log_probs = np.asarray(message.response_token_ids), np.asarray(message.rollout_log_probs)
    count = len(token_ids)
    checks = {
        "sample_index": 0 <= message.sample_index < group_size,
        "begin": message.begin >= 0,
        "response_token_ids": count > 0 and token_ids.min() >= 0,
        "rollout_log_probs": len(log_probs) == count and np.isfinite(log_probs).all(),
        "policy_spans": _covers(message.policy_spans, message.begin, message.begin + count),
    }
    for field, right in checks.items():
        if not right:
            raise InvalidArgument(f"{where}.{field} of group {group_id} does not fit the fragment", f"{where}.{field}")
    steps = [span.version.step for span in message.policy_spans]
    return Fragment(
        message.sample_index,
        message.begin,
        count,
        min(steps),
        max(steps),
        message.SerializeToString(deterministic=True),
    )


def resumed_sample(group_id: str, index: int, fragments: Iterable[bytes]) -> common_pb2.Sample:
    """An unfinished sample with what is saved of it; its prompt stands in the lease."""
    sample = common_pb2.Sample(group_id=group_id, sample_index=index)
    for one in map(pb.SampleFragment.FromString, fragments):
        sample.response_token_ids.extend(one.response_token_ids)
        sample.rollout_log_probs.extend(one.rollout_log_probs)
        for span in one.policy_spans:
            if sample.policy_spans and sample.policy_spans[-1].version == span.version:
                sample.policy_spans[-1].end = span.end
            else:
                sample.policy_spans.append(span)
    sample.loss_mask.extend([1] * len(sample.response_token_ids))
    return sample


def _covers(spans: Iterable[common_pb2.PolicySpan], begin: int, end: int) -> bool:
    for span in spans:
        known = 1 <= span.version.run_epoch <= MAX_VERSION and 0 <= span.version.step <= MAX_VERSION
        if not known or span.begin != begin or span.end <= span.begin:
            return False
        begin = span.end
    return begin == end


def group_summary(group: Group, prompt_row: int) -> pb.GroupSummary:
    """A group as ListGroups shows it."""
    return pb.GroupSummary(
        group_id=group.group_id,
        state=state_to_pb(group.state),
        reason=group.text("reason"),
        prompt_index=prompt_row,
        attempts=group.number("attempts"),
        finished_samples=group.number("finished"),
        batch=group.number("batch", -1),
        rewards=group.rewards(),
        kind=work_kind(group),
        oldest_step=group.number("oldest", -1),
        partial_tokens=sum(group.partial_tokens().values()),
        worker_id=group.text("worker"),
    )


def lease_summary(lease: Lease, group: Group) -> pb.LeaseSummary:
    """A lease as ListLeases shows it."""
    return pb.LeaseSummary(
        group_id=lease.group_id,
        worker_id=group.text("worker"),
        kind=work_kind(group),
        attempt=group.number("attempts"),
        expires_in=duration(lease.expires_in_ms / 1000),
        finished_samples=group.number("finished"),
        partial_tokens=sum(group.partial_tokens().values()),
        stop_reason=stop_reason(lease.stop_reason),
    )


def work_kind(group: Group) -> pb.WorkKind:
    """Training or evaluation."""
    return pb.WORK_KIND_EVALUATION if group.is_evaluation else pb.WORK_KIND_TRAINING


def stop_reason(name: str) -> str:
    """The proto's name of a reason of the ledger's; '' is UNSPECIFIED."""
    return f"STOP_REASON_{name or 'UNSPECIFIED'}"


def stop_to_pb(stop: Stop) -> pb.Stop:
    """A stop as WatchWork sends it."""
    return pb.Stop(lease_token=stop.token.encode(), group_id=stop.group_id, reason=stop_reason(stop.reason))


def run_to_pb(run_id: str, facts: dict[str, str]) -> registry_pb.Run:
    """The facts of a run."""
    run = registry_pb.Run(
        run_id=run_id,
        spec_digest=facts["spec_digest"],
        run_epoch=int(facts.get("run_epoch", 0)),
        desired_state=f"DESIRED_STATE_{facts['desired_state']}",
        committed_step=int(facts.get("committed_step", 0)),
        checkpoint=facts.get("checkpoint", ""),
        num_rollout=int(facts["num_rollout"]),
    )
    if (live := live_version(facts)) is not None:
        run.live_version.CopyFrom(live)
    return run


def live_version(facts: dict[str, str]) -> common_pb2.PolicyVersion | None:
    """The weights that serve; None before the first."""
    if int(facts.get("live_step", -1)) < 0:
        return None
    return common_pb2.PolicyVersion(run_epoch=int(facts["live_epoch"]), step=int(facts["live_step"]))
