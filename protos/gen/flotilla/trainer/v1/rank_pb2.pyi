import datetime

from flotilla.buffer.v1 import buffer_pb2 as _buffer_pb2
from flotilla.common.v1 import common_pb2 as _common_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetRankStatusRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class GetRankStatusResponse(_message.Message):
    __slots__ = ("fleet_id", "doing", "since", "progress")
    FLEET_ID_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    fleet_id: str
    doing: str
    since: _duration_pb2.Duration
    progress: int
    def __init__(self, fleet_id: _Optional[str] = ..., doing: _Optional[str] = ..., since: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., progress: _Optional[int] = ...) -> None: ...

class LoadStateRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "fleet_id", "step")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FLEET_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    fleet_id: str
    step: int
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., fleet_id: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class LoadStateResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TrainBatchRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "fleet_id", "manifest")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FLEET_ID_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    fleet_id: str
    manifest: _buffer_pb2.BatchManifest
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., fleet_id: _Optional[str] = ..., manifest: _Optional[_Union[_buffer_pb2.BatchManifest, _Mapping]] = ...) -> None: ...

class MicroBatchId(_message.Message):
    __slots__ = ("optimizer_step", "index")
    OPTIMIZER_STEP_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    optimizer_step: int
    index: int
    def __init__(self, optimizer_step: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class TrainBatchResponse(_message.Message):
    __slots__ = ("tokens", "masked_tokens", "entropy", "gap", "gap_max", "loss", "pg_clipfrac", "ppo_kl", "grad_norms", "lr", "skipped_steps", "not_finite", "seconds", "busy_seconds", "mtp_loss", "mtp_grad_norm")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MASKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    GAP_MAX_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    PG_CLIPFRAC_FIELD_NUMBER: _ClassVar[int]
    PPO_KL_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORMS_FIELD_NUMBER: _ClassVar[int]
    LR_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_STEPS_FIELD_NUMBER: _ClassVar[int]
    NOT_FINITE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MTP_LOSS_FIELD_NUMBER: _ClassVar[int]
    MTP_GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    masked_tokens: float
    entropy: float
    gap: float
    gap_max: float
    loss: float
    pg_clipfrac: float
    ppo_kl: float
    grad_norms: _containers.RepeatedScalarFieldContainer[float]
    lr: float
    skipped_steps: _containers.RepeatedScalarFieldContainer[int]
    not_finite: _containers.RepeatedCompositeFieldContainer[MicroBatchId]
    seconds: float
    busy_seconds: float
    mtp_loss: float
    mtp_grad_norm: float
    def __init__(self, tokens: _Optional[int] = ..., masked_tokens: _Optional[float] = ..., entropy: _Optional[float] = ..., gap: _Optional[float] = ..., gap_max: _Optional[float] = ..., loss: _Optional[float] = ..., pg_clipfrac: _Optional[float] = ..., ppo_kl: _Optional[float] = ..., grad_norms: _Optional[_Iterable[float]] = ..., lr: _Optional[float] = ..., skipped_steps: _Optional[_Iterable[int]] = ..., not_finite: _Optional[_Iterable[_Union[MicroBatchId, _Mapping]]] = ..., seconds: _Optional[float] = ..., busy_seconds: _Optional[float] = ..., mtp_loss: _Optional[float] = ..., mtp_grad_norm: _Optional[float] = ...) -> None: ...

class ExportVersionRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "fleet_id", "version")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FLEET_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    fleet_id: str
    version: _common_pb2.PolicyVersion
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., fleet_id: _Optional[str] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ...) -> None: ...

class ExportVersionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BeginSaveRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "fleet_id", "step", "batch_digests")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FLEET_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BATCH_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    fleet_id: str
    step: int
    batch_digests: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., fleet_id: _Optional[str] = ..., step: _Optional[int] = ..., batch_digests: _Optional[_Iterable[str]] = ...) -> None: ...

class BeginSaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FinishSaveRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "fleet_id", "wait")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FLEET_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    fleet_id: str
    wait: bool
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., fleet_id: _Optional[str] = ..., wait: _Optional[bool] = ...) -> None: ...

class FinishSaveResponse(_message.Message):
    __slots__ = ("final",)
    FINAL_FIELD_NUMBER: _ClassVar[int]
    final: bool
    def __init__(self, final: _Optional[bool] = ...) -> None: ...

class ExportModelRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "fleet_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FLEET_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    fleet_id: str
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., fleet_id: _Optional[str] = ...) -> None: ...

class ExportModelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndRankRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "fleet_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FLEET_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    fleet_id: str
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., fleet_id: _Optional[str] = ...) -> None: ...

class EndRankResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
