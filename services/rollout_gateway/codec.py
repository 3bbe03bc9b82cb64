"""Between protobuf and our own records."""

from __future__ import annotations

from collections.abc import Iterable

from flotilla.buffer.v1 import buffer_pb2
from flotilla.common.v1 import common_pb2
from flotilla.rollout_gateway.v1 import engine_pb2, gateway_pb2
from services.common.errors import InvalidArgument
from services.common.rpc import new_request_id
from services.rollout_gateway.group import Finish, Fragment, Group, SampleProgress, SamplingParams
from services.rollout_gateway.registry import Engine, EngineState
from services.rollout_gateway.spans import Span, Version, loss_mask


def version_from(message: common_pb2.PolicyVersion) -> Version:
    """A version that is set."""
    return Version(message.run_epoch, message.step)


def version_to(version: Version) -> common_pb2.PolicyVersion:
    """As a message."""
    return common_pb2.PolicyVersion(run_epoch=version.run_epoch, step=version.step)


def spans_from(messages: Iterable[common_pb2.PolicySpan]) -> list[Span]:
    """Spans in order."""
    return [Span(message.begin, message.end, version_from(message.version)) for message in messages]


def spans_to(spans: Iterable[Span]) -> list[common_pb2.PolicySpan]:
    """As messages."""
    return [common_pb2.PolicySpan(begin=span.begin, end=span.end, version=version_to(span.version)) for span in spans]


STATE_FROM = {
    gateway_pb2.ENGINE_STATE_STALE: EngineState.STALE,
    gateway_pb2.ENGINE_STATE_SERVING: EngineState.SERVING,
    gateway_pb2.ENGINE_STATE_PAUSED: EngineState.PAUSED,
}
STATE_TO = {state: number for number, state in STATE_FROM.items()}
FINISH_FROM = {
    common_pb2.FINISH_REASON_STOP: Finish.STOP,
    common_pb2.FINISH_REASON_LENGTH: Finish.LENGTH,
}
"""An aborted response is not finished: its tokens are kept and continued."""
FINISH_TO = {finish: number for number, finish in FINISH_FROM.items()}


def engine_from(message: gateway_pb2.Engine) -> Engine:
    """An engine as it describes itself. Raises InvalidArgument."""
    if not message.engine_id or not message.incarnation or not message.address:
        raise InvalidArgument("engine_id, incarnation and address must be set", field="engine")
    if message.state not in STATE_FROM:
        raise InvalidArgument(f"unknown state {message.state}", field="engine.state")
    return Engine(
        message.engine_id,
        message.incarnation,
        message.address,
        STATE_FROM[message.state],
        version_from(message.version) if message.HasField("version") else None,
        message.worker_count,
    )


def engine_to(engine: Engine) -> gateway_pb2.Engine:
    """As a message."""
    return gateway_pb2.Engine(
        engine_id=engine.engine_id,
        incarnation=engine.incarnation,
        address=engine.address,
        state=STATE_TO[engine.state],
        version=version_to(engine.version) if engine.version else None,
        worker_count=engine.worker_count,
    )


def params_from(message: common_pb2.SamplingParams) -> SamplingParams:
    """How to draw tokens."""
    return SamplingParams(
        message.temperature,
        message.top_p,
        message.top_k,
        message.max_response_tokens,
        tuple(message.stop_token_ids),
    )


def group_from(lease: buffer_pb2.WorkLease) -> Group:
    """The work of a lease."""
    return Group(
        lease.group_id,
        tuple(lease.prompt_token_ids),
        params_from(lease.sampling_params),
        [_progress_from(sample, lease.seed + sample.sample_index) for sample in lease.pending_samples],
        version_from(lease.required_version) if lease.HasField("required_version") else None,
        lease.continue_across_versions,
        lease.mask_offpolicy_tokens,
    )


def _progress_from(sample: common_pb2.Sample, seed: int) -> SampleProgress:
    return SampleProgress(
        sample.sample_index,
        seed,
        list(sample.response_token_ids),
        list(sample.rollout_log_probs),
        spans_from(sample.policy_spans),
        kept=len(sample.response_token_ids),
        saved=len(sample.response_token_ids),
    )


def fragment_to(fragment: Fragment) -> buffer_pb2.SampleFragment:
    """Tokens of an unfinished sample."""
    return buffer_pb2.SampleFragment(
        sample_index=fragment.index,
        begin=fragment.begin,
        response_token_ids=fragment.token_ids,
        rollout_log_probs=fragment.log_probs,
        policy_spans=spans_to(fragment.spans),
    )


def sample_to(group: Group, sample: SampleProgress) -> common_pb2.Sample:
    """A finished sample."""
    assert sample.finish, "only finished samples are handed in"
    return common_pb2.Sample(
        group_id=group.group_id,
        sample_index=sample.index,
        prompt_token_ids=group.prompt,
        response_token_ids=sample.token_ids,
        rollout_log_probs=sample.log_probs,
        loss_mask=loss_mask(sample.spans, mask_offpolicy=group.mask_offpolicy),
        policy_spans=spans_to(sample.spans),
        finish_reason=FINISH_TO[sample.finish],
    )


def generate_request(run_id: str, group: Group, version: Version | None) -> engine_pb2.EngineServiceGenerateRequest:
    """What an engine with `version` is asked for: the unfinished samples of the group."""
    params = group.params
    return engine_pb2.EngineServiceGenerateRequest(
        run_id=run_id,
        request_id=new_request_id(),
        group_id=group.group_id,
        prompt_token_ids=group.prompt,
        sampling_params=common_pb2.SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            max_response_tokens=params.max_response_tokens,
            stop_token_ids=params.stop_token_ids,
        ),
        samples=[
            engine_pb2.SampleRequest(sample_index=one.index, response_token_ids=one.token_ids, seed=one.seed)
            for one in group.unfinished()
        ],
        required_version=version_to(version) if version and group.required_version else None,
    )
