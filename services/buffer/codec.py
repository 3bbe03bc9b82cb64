"""Between protobuf and what the buffer works with; checks what comes in."""

from __future__ import annotations

import math
from typing import Any

from flotilla.buffer.v1 import buffer_pb2 as pb
from flotilla.buffer.v1 import registry_pb2 as registry_pb
from flotilla.common.v1 import common_pb2
from services.buffer.ledger import FinishedSample, Group, SampleHeader
from services.buffer.states import State
from services.common.errors import InvalidArgument

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
    length, log_probs = len(sample.response_token_ids), sample.rollout_log_probs
    checks = {
        "group_id": sample.group_id == group_id,
        "sample_index": 0 <= sample.sample_index < group_size,
        "prompt_token_ids": list(sample.prompt_token_ids) == prompt,
        "response_token_ids": length > 0 and min(sample.response_token_ids) >= 0,
        "rollout_log_probs": len(log_probs) == length and all(map(math.isfinite, log_probs)),
        "loss_mask": len(sample.loss_mask) == length and set(sample.loss_mask) <= {0, 1},
        "policy_spans": _covers(sample, length),
        "finish_reason": sample.finish_reason in FINISHED,
    }
    for field, right in checks.items():
        if not right:
            raise InvalidArgument(f"{where}.{field} of group {group_id} does not fit the sample", f"{where}.{field}")
    versions = [(span.version.run_epoch, span.version.step) for span in sample.policy_spans]
    header = SampleHeader(
        prompt_tokens=len(prompt),
        response_tokens=length,
        loss_tokens=sum(sample.loss_mask),
        finish_reason=sample.finish_reason,
        oldest_step=min(step for _, step in versions),
        versions=sorted({f"{epoch}:{step}" for epoch, step in versions}),
    )
    return FinishedSample(sample.sample_index, header, sample.SerializeToString(deterministic=True))


def _covers(sample: common_pb2.Sample, length: int) -> bool:
    end = 0
    for span in sample.policy_spans:
        known = span.version.run_epoch >= 1 and span.version.step >= 0
        if not known or span.begin != end or span.end <= span.begin:
            return False
        end = span.end
    return end == length


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
        kind=pb.WORK_KIND_EVALUATION if group.is_evaluation else pb.WORK_KIND_TRAINING,
    )


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
