import datetime

from flotilla.common.v1 import common_pb2 as _common_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GroupState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GROUP_STATE_UNSPECIFIED: _ClassVar[GroupState]
    GROUP_STATE_WAITING: _ClassVar[GroupState]
    GROUP_STATE_GENERATING: _ClassVar[GroupState]
    GROUP_STATE_PARTIAL: _ClassVar[GroupState]
    GROUP_STATE_GENERATED: _ClassVar[GroupState]
    GROUP_STATE_SCORED: _ClassVar[GroupState]
    GROUP_STATE_KEPT: _ClassVar[GroupState]
    GROUP_STATE_READY: _ClassVar[GroupState]
    GROUP_STATE_IN_TRAINING: _ClassVar[GroupState]
    GROUP_STATE_TRAINED: _ClassVar[GroupState]
    GROUP_STATE_COMMITTED: _ClassVar[GroupState]
    GROUP_STATE_DROPPED: _ClassVar[GroupState]
    GROUP_STATE_STALE: _ClassVar[GroupState]
    GROUP_STATE_FAILED: _ClassVar[GroupState]

class BatchState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BATCH_STATE_UNSPECIFIED: _ClassVar[BatchState]
    BATCH_STATE_READY: _ClassVar[BatchState]
    BATCH_STATE_IN_TRAINING: _ClassVar[BatchState]
    BATCH_STATE_TRAINED: _ClassVar[BatchState]
    BATCH_STATE_COMMITTED: _ClassVar[BatchState]

class WorkKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORK_KIND_UNSPECIFIED: _ClassVar[WorkKind]
    WORK_KIND_TRAINING: _ClassVar[WorkKind]
    WORK_KIND_EVALUATION: _ClassVar[WorkKind]

class StopReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STOP_REASON_UNSPECIFIED: _ClassVar[StopReason]
    STOP_REASON_RUN_STOPPED: _ClassVar[StopReason]
    STOP_REASON_VERSION_GONE: _ClassVar[StopReason]
    STOP_REASON_SEALED: _ClassVar[StopReason]
    STOP_REASON_DRAINING: _ClassVar[StopReason]
    STOP_REASON_TOO_OLD: _ClassVar[StopReason]

class NoBatchReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NO_BATCH_REASON_UNSPECIFIED: _ClassVar[NoBatchReason]
    NO_BATCH_REASON_NOT_SEALED: _ClassVar[NoBatchReason]
    NO_BATCH_REASON_RUN_COMPLETE: _ClassVar[NoBatchReason]
GROUP_STATE_UNSPECIFIED: GroupState
GROUP_STATE_WAITING: GroupState
GROUP_STATE_GENERATING: GroupState
GROUP_STATE_PARTIAL: GroupState
GROUP_STATE_GENERATED: GroupState
GROUP_STATE_SCORED: GroupState
GROUP_STATE_KEPT: GroupState
GROUP_STATE_READY: GroupState
GROUP_STATE_IN_TRAINING: GroupState
GROUP_STATE_TRAINED: GroupState
GROUP_STATE_COMMITTED: GroupState
GROUP_STATE_DROPPED: GroupState
GROUP_STATE_STALE: GroupState
GROUP_STATE_FAILED: GroupState
BATCH_STATE_UNSPECIFIED: BatchState
BATCH_STATE_READY: BatchState
BATCH_STATE_IN_TRAINING: BatchState
BATCH_STATE_TRAINED: BatchState
BATCH_STATE_COMMITTED: BatchState
WORK_KIND_UNSPECIFIED: WorkKind
WORK_KIND_TRAINING: WorkKind
WORK_KIND_EVALUATION: WorkKind
STOP_REASON_UNSPECIFIED: StopReason
STOP_REASON_RUN_STOPPED: StopReason
STOP_REASON_VERSION_GONE: StopReason
STOP_REASON_SEALED: StopReason
STOP_REASON_DRAINING: StopReason
STOP_REASON_TOO_OLD: StopReason
NO_BATCH_REASON_UNSPECIFIED: NoBatchReason
NO_BATCH_REASON_NOT_SEALED: NoBatchReason
NO_BATCH_REASON_RUN_COMPLETE: NoBatchReason

class WorkLease(_message.Message):
    __slots__ = ("lease_token", "group_id", "attempt", "ttl", "kind", "prompt_token_ids", "sampling_params", "pending_samples", "seed", "required_version", "continue_across_versions", "mask_offpolicy_tokens")
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    PENDING_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_ACROSS_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    MASK_OFFPOLICY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    lease_token: bytes
    group_id: str
    attempt: int
    ttl: _duration_pb2.Duration
    kind: WorkKind
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: _common_pb2.SamplingParams
    pending_samples: _containers.RepeatedCompositeFieldContainer[_common_pb2.Sample]
    seed: int
    required_version: _common_pb2.PolicyVersion
    continue_across_versions: bool
    mask_offpolicy_tokens: bool
    def __init__(self, lease_token: _Optional[bytes] = ..., group_id: _Optional[str] = ..., attempt: _Optional[int] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., kind: _Optional[_Union[WorkKind, str]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., pending_samples: _Optional[_Iterable[_Union[_common_pb2.Sample, _Mapping]]] = ..., seed: _Optional[int] = ..., required_version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., continue_across_versions: _Optional[bool] = ..., mask_offpolicy_tokens: _Optional[bool] = ...) -> None: ...

class SampleFragment(_message.Message):
    __slots__ = ("sample_index", "begin", "response_token_ids", "rollout_log_probs", "policy_spans")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    POLICY_SPANS_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    begin: int
    response_token_ids: _containers.RepeatedScalarFieldContainer[int]
    rollout_log_probs: _containers.RepeatedScalarFieldContainer[float]
    policy_spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.PolicySpan]
    def __init__(self, sample_index: _Optional[int] = ..., begin: _Optional[int] = ..., response_token_ids: _Optional[_Iterable[int]] = ..., rollout_log_probs: _Optional[_Iterable[float]] = ..., policy_spans: _Optional[_Iterable[_Union[_common_pb2.PolicySpan, _Mapping]]] = ...) -> None: ...

class LeaseWorkRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "worker_id", "max_groups", "wait_timeout")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_GROUPS_FIELD_NUMBER: _ClassVar[int]
    WAIT_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    worker_id: str
    max_groups: int
    wait_timeout: _duration_pb2.Duration
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., max_groups: _Optional[int] = ..., wait_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class LeaseWorkResponse(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[WorkLease]
    def __init__(self, leases: _Optional[_Iterable[_Union[WorkLease, _Mapping]]] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "lease_token", "group_id", "progress")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    lease_token: bytes
    group_id: str
    progress: _containers.RepeatedCompositeFieldContainer[SampleFragment]
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., lease_token: _Optional[bytes] = ..., group_id: _Optional[str] = ..., progress: _Optional[_Iterable[_Union[SampleFragment, _Mapping]]] = ...) -> None: ...

class RenewLeaseResponse(_message.Message):
    __slots__ = ("ttl", "stop_reason")
    TTL_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    ttl: _duration_pb2.Duration
    stop_reason: StopReason
    def __init__(self, ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., stop_reason: _Optional[_Union[StopReason, str]] = ...) -> None: ...

class SubmitSamplesRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "lease_token", "group_id", "samples")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    lease_token: bytes
    group_id: str
    samples: _containers.RepeatedCompositeFieldContainer[_common_pb2.Sample]
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., lease_token: _Optional[bytes] = ..., group_id: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[_common_pb2.Sample, _Mapping]]] = ...) -> None: ...

class SubmitSamplesResponse(_message.Message):
    __slots__ = ("group_complete",)
    GROUP_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    group_complete: bool
    def __init__(self, group_complete: _Optional[bool] = ...) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "lease_token", "group_id", "error", "progress")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    lease_token: bytes
    group_id: str
    error: str
    progress: _containers.RepeatedCompositeFieldContainer[SampleFragment]
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., lease_token: _Optional[bytes] = ..., group_id: _Optional[str] = ..., error: _Optional[str] = ..., progress: _Optional[_Iterable[_Union[SampleFragment, _Mapping]]] = ...) -> None: ...

class ReleaseLeaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchWorkRequest(_message.Message):
    __slots__ = ("run_id", "worker_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    worker_id: str
    def __init__(self, run_id: _Optional[str] = ..., worker_id: _Optional[str] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("lease_token", "group_id", "reason")
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease_token: bytes
    group_id: str
    reason: StopReason
    def __init__(self, lease_token: _Optional[bytes] = ..., group_id: _Optional[str] = ..., reason: _Optional[_Union[StopReason, str]] = ...) -> None: ...

class WatchWorkResponse(_message.Message):
    __slots__ = ("stops",)
    STOPS_FIELD_NUMBER: _ClassVar[int]
    stops: _containers.RepeatedCompositeFieldContainer[Stop]
    def __init__(self, stops: _Optional[_Iterable[_Union[Stop, _Mapping]]] = ...) -> None: ...

class DrainWorkRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "worker_id", "wait_timeout")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    worker_id: str
    wait_timeout: _duration_pb2.Duration
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., wait_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainWorkResponse(_message.Message):
    __slots__ = ("remaining_leases",)
    REMAINING_LEASES_FIELD_NUMBER: _ClassVar[int]
    remaining_leases: int
    def __init__(self, remaining_leases: _Optional[int] = ...) -> None: ...

class BatchRow(_message.Message):
    __slots__ = ("group_id", "sample_index", "prompt_tokens", "response_tokens", "reward", "advantage", "loss_denominator", "optimizer_step")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGE_FIELD_NUMBER: _ClassVar[int]
    LOSS_DENOMINATOR_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_STEP_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    sample_index: int
    prompt_tokens: int
    response_tokens: int
    reward: float
    advantage: float
    loss_denominator: int
    optimizer_step: int
    def __init__(self, group_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., response_tokens: _Optional[int] = ..., reward: _Optional[float] = ..., advantage: _Optional[float] = ..., loss_denominator: _Optional[int] = ..., optimizer_step: _Optional[int] = ...) -> None: ...

class MicroBatch(_message.Message):
    __slots__ = ("optimizer_step", "data_parallel_rank", "rows")
    OPTIMIZER_STEP_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    optimizer_step: int
    data_parallel_rank: int
    rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, optimizer_step: _Optional[int] = ..., data_parallel_rank: _Optional[int] = ..., rows: _Optional[_Iterable[int]] = ...) -> None: ...

class RolloutStats(_message.Message):
    __slots__ = ("mean_reward", "kept_groups", "dropped_groups", "mean_response_tokens", "truncated_ratio", "rollout_seconds", "generated_tokens", "max_age", "mixed_version_samples", "dead_epoch_samples")
    class DroppedGroupsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MEAN_REWARD_FIELD_NUMBER: _ClassVar[int]
    KEPT_GROUPS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_GROUPS_FIELD_NUMBER: _ClassVar[int]
    MEAN_RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_RATIO_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_AGE_FIELD_NUMBER: _ClassVar[int]
    MIXED_VERSION_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    DEAD_EPOCH_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    mean_reward: float
    kept_groups: int
    dropped_groups: _containers.ScalarMap[str, int]
    mean_response_tokens: float
    truncated_ratio: float
    rollout_seconds: float
    generated_tokens: int
    max_age: int
    mixed_version_samples: int
    dead_epoch_samples: int
    def __init__(self, mean_reward: _Optional[float] = ..., kept_groups: _Optional[int] = ..., dropped_groups: _Optional[_Mapping[str, int]] = ..., mean_response_tokens: _Optional[float] = ..., truncated_ratio: _Optional[float] = ..., rollout_seconds: _Optional[float] = ..., generated_tokens: _Optional[int] = ..., max_age: _Optional[int] = ..., mixed_version_samples: _Optional[int] = ..., dead_epoch_samples: _Optional[int] = ...) -> None: ...

class ScheduleStats(_message.Message):
    __slots__ = ("packing_efficiency", "imbalance")
    PACKING_EFFICIENCY_FIELD_NUMBER: _ClassVar[int]
    IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    packing_efficiency: float
    imbalance: float
    def __init__(self, packing_efficiency: _Optional[float] = ..., imbalance: _Optional[float] = ...) -> None: ...

class BatchManifest(_message.Message):
    __slots__ = ("batch", "digest", "rows", "optimizer_steps", "rollouts_per_step", "micro_batches", "stats", "schedule")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_STEPS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    batch: int
    digest: str
    rows: _containers.RepeatedCompositeFieldContainer[BatchRow]
    optimizer_steps: int
    rollouts_per_step: _containers.RepeatedScalarFieldContainer[int]
    micro_batches: _containers.RepeatedCompositeFieldContainer[MicroBatch]
    stats: RolloutStats
    schedule: ScheduleStats
    def __init__(self, batch: _Optional[int] = ..., digest: _Optional[str] = ..., rows: _Optional[_Iterable[_Union[BatchRow, _Mapping]]] = ..., optimizer_steps: _Optional[int] = ..., rollouts_per_step: _Optional[_Iterable[int]] = ..., micro_batches: _Optional[_Iterable[_Union[MicroBatch, _Mapping]]] = ..., stats: _Optional[_Union[RolloutStats, _Mapping]] = ..., schedule: _Optional[_Union[ScheduleStats, _Mapping]] = ...) -> None: ...

class LeaseBatchRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "run_epoch", "data_parallel_size", "max_tokens_per_micro_batch", "wait_timeout", "context_parallel_size", "micro_batch_multiple", "balance_data", "flops_per_token", "flops_per_token_squared")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_PER_MICRO_BATCH_FIELD_NUMBER: _ClassVar[int]
    WAIT_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_MULTIPLE_FIELD_NUMBER: _ClassVar[int]
    BALANCE_DATA_FIELD_NUMBER: _ClassVar[int]
    FLOPS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FLOPS_PER_TOKEN_SQUARED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    run_epoch: int
    data_parallel_size: int
    max_tokens_per_micro_batch: int
    wait_timeout: _duration_pb2.Duration
    context_parallel_size: int
    micro_batch_multiple: int
    balance_data: bool
    flops_per_token: float
    flops_per_token_squared: float
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., run_epoch: _Optional[int] = ..., data_parallel_size: _Optional[int] = ..., max_tokens_per_micro_batch: _Optional[int] = ..., wait_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., context_parallel_size: _Optional[int] = ..., micro_batch_multiple: _Optional[int] = ..., balance_data: _Optional[bool] = ..., flops_per_token: _Optional[float] = ..., flops_per_token_squared: _Optional[float] = ...) -> None: ...

class LeaseBatchResponse(_message.Message):
    __slots__ = ("manifest", "no_batch_reason", "commit_requested")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    NO_BATCH_REASON_FIELD_NUMBER: _ClassVar[int]
    COMMIT_REQUESTED_FIELD_NUMBER: _ClassVar[int]
    manifest: BatchManifest
    no_batch_reason: NoBatchReason
    commit_requested: bool
    def __init__(self, manifest: _Optional[_Union[BatchManifest, _Mapping]] = ..., no_batch_reason: _Optional[_Union[NoBatchReason, str]] = ..., commit_requested: _Optional[bool] = ...) -> None: ...

class FetchSamplesRequest(_message.Message):
    __slots__ = ("run_id", "batch", "rows", "page_token")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    batch: int
    rows: _containers.RepeatedScalarFieldContainer[int]
    page_token: str
    def __init__(self, run_id: _Optional[str] = ..., batch: _Optional[int] = ..., rows: _Optional[_Iterable[int]] = ..., page_token: _Optional[str] = ...) -> None: ...

class FetchSamplesResponse(_message.Message):
    __slots__ = ("payloads", "next_page_token")
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    payloads: _containers.RepeatedScalarFieldContainer[bytes]
    next_page_token: str
    def __init__(self, payloads: _Optional[_Iterable[bytes]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class AckBatchRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "run_epoch", "batch", "digest")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    run_epoch: int
    batch: int
    digest: str
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., run_epoch: _Optional[int] = ..., batch: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class AckBatchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "run_epoch", "step", "checkpoint")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    run_epoch: int
    step: int
    checkpoint: str
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., run_epoch: _Optional[int] = ..., step: _Optional[int] = ..., checkpoint: _Optional[str] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetBufferStatsRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class StateCount(_message.Message):
    __slots__ = ("state", "count")
    STATE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    state: GroupState
    count: int
    def __init__(self, state: _Optional[_Union[GroupState, str]] = ..., count: _Optional[int] = ...) -> None: ...

class GetBufferStatsResponse(_message.Message):
    __slots__ = ("issued", "groups", "conserved", "sealed_batches", "committed_step", "live_version", "admission_credit", "dropped", "failed", "evaluation_issued", "evaluation_groups", "evaluation_conserved", "overlong_prompts", "last_mean_reward", "stale", "discarded_tokens", "memory_bytes", "memory_limit_bytes", "back_pressure", "keep_rate", "leases", "lineage")
    class DroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class FailedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class StaleEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class DiscardedTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ISSUED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    CONSERVED_FIELD_NUMBER: _ClassVar[int]
    SEALED_BATCHES_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    LIVE_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_CREDIT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_ISSUED_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_GROUPS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_CONSERVED_FIELD_NUMBER: _ClassVar[int]
    OVERLONG_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    LAST_MEAN_REWARD_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    DISCARDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BACK_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    KEEP_RATE_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    issued: int
    groups: _containers.RepeatedCompositeFieldContainer[StateCount]
    conserved: bool
    sealed_batches: int
    committed_step: int
    live_version: _common_pb2.PolicyVersion
    admission_credit: int
    dropped: _containers.ScalarMap[str, int]
    failed: _containers.ScalarMap[str, int]
    evaluation_issued: int
    evaluation_groups: _containers.RepeatedCompositeFieldContainer[StateCount]
    evaluation_conserved: bool
    overlong_prompts: int
    last_mean_reward: float
    stale: _containers.ScalarMap[str, int]
    discarded_tokens: _containers.ScalarMap[str, int]
    memory_bytes: int
    memory_limit_bytes: int
    back_pressure: bool
    keep_rate: float
    leases: int
    lineage: int
    def __init__(self, issued: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[StateCount, _Mapping]]] = ..., conserved: _Optional[bool] = ..., sealed_batches: _Optional[int] = ..., committed_step: _Optional[int] = ..., live_version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., admission_credit: _Optional[int] = ..., dropped: _Optional[_Mapping[str, int]] = ..., failed: _Optional[_Mapping[str, int]] = ..., evaluation_issued: _Optional[int] = ..., evaluation_groups: _Optional[_Iterable[_Union[StateCount, _Mapping]]] = ..., evaluation_conserved: _Optional[bool] = ..., overlong_prompts: _Optional[int] = ..., last_mean_reward: _Optional[float] = ..., stale: _Optional[_Mapping[str, int]] = ..., discarded_tokens: _Optional[_Mapping[str, int]] = ..., memory_bytes: _Optional[int] = ..., memory_limit_bytes: _Optional[int] = ..., back_pressure: _Optional[bool] = ..., keep_rate: _Optional[float] = ..., leases: _Optional[int] = ..., lineage: _Optional[int] = ...) -> None: ...

class GroupSummary(_message.Message):
    __slots__ = ("group_id", "state", "reason", "prompt_index", "attempts", "finished_samples", "batch", "rewards", "kind", "oldest_step", "partial_tokens", "worker_id")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    OLDEST_STEP_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    state: GroupState
    reason: str
    prompt_index: int
    attempts: int
    finished_samples: int
    batch: int
    rewards: _containers.RepeatedScalarFieldContainer[float]
    kind: WorkKind
    oldest_step: int
    partial_tokens: int
    worker_id: str
    def __init__(self, group_id: _Optional[str] = ..., state: _Optional[_Union[GroupState, str]] = ..., reason: _Optional[str] = ..., prompt_index: _Optional[int] = ..., attempts: _Optional[int] = ..., finished_samples: _Optional[int] = ..., batch: _Optional[int] = ..., rewards: _Optional[_Iterable[float]] = ..., kind: _Optional[_Union[WorkKind, str]] = ..., oldest_step: _Optional[int] = ..., partial_tokens: _Optional[int] = ..., worker_id: _Optional[str] = ...) -> None: ...

class ListGroupsRequest(_message.Message):
    __slots__ = ("run_id", "state", "page_size", "page_token", "kind")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    state: GroupState
    page_size: int
    page_token: str
    kind: WorkKind
    def __init__(self, run_id: _Optional[str] = ..., state: _Optional[_Union[GroupState, str]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., kind: _Optional[_Union[WorkKind, str]] = ...) -> None: ...

class ListGroupsResponse(_message.Message):
    __slots__ = ("groups", "next_page_token")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[GroupSummary]
    next_page_token: str
    def __init__(self, groups: _Optional[_Iterable[_Union[GroupSummary, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetGroupRequest(_message.Message):
    __slots__ = ("run_id", "group_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    group_id: str
    def __init__(self, run_id: _Optional[str] = ..., group_id: _Optional[str] = ...) -> None: ...

class GetGroupResponse(_message.Message):
    __slots__ = ("summary", "samples", "prompt", "responses", "label", "verdicts")
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    summary: GroupSummary
    samples: _containers.RepeatedCompositeFieldContainer[_common_pb2.Sample]
    prompt: str
    responses: _containers.RepeatedScalarFieldContainer[str]
    label: str
    verdicts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, summary: _Optional[_Union[GroupSummary, _Mapping]] = ..., samples: _Optional[_Iterable[_Union[_common_pb2.Sample, _Mapping]]] = ..., prompt: _Optional[str] = ..., responses: _Optional[_Iterable[str]] = ..., label: _Optional[str] = ..., verdicts: _Optional[_Iterable[str]] = ...) -> None: ...

class BatchSummary(_message.Message):
    __slots__ = ("batch", "state", "digest", "run_epoch", "commits", "mean_reward", "group_ids")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RUN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    MEAN_REWARD_FIELD_NUMBER: _ClassVar[int]
    GROUP_IDS_FIELD_NUMBER: _ClassVar[int]
    batch: int
    state: BatchState
    digest: str
    run_epoch: int
    commits: int
    mean_reward: float
    group_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, batch: _Optional[int] = ..., state: _Optional[_Union[BatchState, str]] = ..., digest: _Optional[str] = ..., run_epoch: _Optional[int] = ..., commits: _Optional[int] = ..., mean_reward: _Optional[float] = ..., group_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ListBatchesRequest(_message.Message):
    __slots__ = ("run_id", "page_size", "page_token")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    page_size: int
    page_token: str
    def __init__(self, run_id: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListBatchesResponse(_message.Message):
    __slots__ = ("batches", "next_page_token")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedCompositeFieldContainer[BatchSummary]
    next_page_token: str
    def __init__(self, batches: _Optional[_Iterable[_Union[BatchSummary, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ListLeasesRequest(_message.Message):
    __slots__ = ("run_id", "page_size", "page_token")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    page_size: int
    page_token: str
    def __init__(self, run_id: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class LeaseSummary(_message.Message):
    __slots__ = ("group_id", "worker_id", "kind", "attempt", "expires_in", "finished_samples", "partial_tokens", "stop_reason")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_FIELD_NUMBER: _ClassVar[int]
    FINISHED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    worker_id: str
    kind: WorkKind
    attempt: int
    expires_in: _duration_pb2.Duration
    finished_samples: int
    partial_tokens: int
    stop_reason: StopReason
    def __init__(self, group_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., kind: _Optional[_Union[WorkKind, str]] = ..., attempt: _Optional[int] = ..., expires_in: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., finished_samples: _Optional[int] = ..., partial_tokens: _Optional[int] = ..., stop_reason: _Optional[_Union[StopReason, str]] = ...) -> None: ...

class ListLeasesResponse(_message.Message):
    __slots__ = ("leases", "next_page_token")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[LeaseSummary]
    next_page_token: str
    def __init__(self, leases: _Optional[_Iterable[_Union[LeaseSummary, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class AuditLedgerRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class Discrepancy(_message.Message):
    __slots__ = ("subject", "problem")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    subject: str
    problem: str
    def __init__(self, subject: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...

class AuditLedgerResponse(_message.Message):
    __slots__ = ("groups", "evaluation_groups", "batches", "samples", "committed_groups", "discrepancies")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_GROUPS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_GROUPS_FIELD_NUMBER: _ClassVar[int]
    DISCREPANCIES_FIELD_NUMBER: _ClassVar[int]
    groups: int
    evaluation_groups: int
    batches: int
    samples: int
    committed_groups: int
    discrepancies: _containers.RepeatedCompositeFieldContainer[Discrepancy]
    def __init__(self, groups: _Optional[int] = ..., evaluation_groups: _Optional[int] = ..., batches: _Optional[int] = ..., samples: _Optional[int] = ..., committed_groups: _Optional[int] = ..., discrepancies: _Optional[_Iterable[_Union[Discrepancy, _Mapping]]] = ...) -> None: ...

class GetEvaluationRequest(_message.Message):
    __slots__ = ("run_id", "step", "wait_timeout")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WAIT_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    wait_timeout: _duration_pb2.Duration
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., wait_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class EvaluationResult(_message.Message):
    __slots__ = ("name", "version", "mean_reward", "issued", "scored", "failed", "mean_response_tokens", "mixed_versions")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEAN_REWARD_FIELD_NUMBER: _ClassVar[int]
    ISSUED_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    MEAN_RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIXED_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: _common_pb2.PolicyVersion
    mean_reward: float
    issued: int
    scored: int
    failed: int
    mean_response_tokens: float
    mixed_versions: bool
    def __init__(self, name: _Optional[str] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., mean_reward: _Optional[float] = ..., issued: _Optional[int] = ..., scored: _Optional[int] = ..., failed: _Optional[int] = ..., mean_response_tokens: _Optional[float] = ..., mixed_versions: _Optional[bool] = ...) -> None: ...

class GetEvaluationResponse(_message.Message):
    __slots__ = ("results", "complete")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[EvaluationResult]
    complete: bool
    def __init__(self, results: _Optional[_Iterable[_Union[EvaluationResult, _Mapping]]] = ..., complete: _Optional[bool] = ...) -> None: ...
