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

class WireFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WIRE_FORMAT_UNSPECIFIED: _ClassVar[WireFormat]
    WIRE_FORMAT_PLAIN: _ClassVar[WireFormat]
    WIRE_FORMAT_FP8_BLOCK_128: _ClassVar[WireFormat]
WIRE_FORMAT_UNSPECIFIED: WireFormat
WIRE_FORMAT_PLAIN: WireFormat
WIRE_FORMAT_FP8_BLOCK_128: WireFormat

class SampleRequest(_message.Message):
    __slots__ = ("sample_index", "response_token_ids", "seed")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    response_token_ids: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    def __init__(self, sample_index: _Optional[int] = ..., response_token_ids: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ...) -> None: ...

class EngineServiceGenerateRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "group_id", "prompt_token_ids", "sampling_params", "samples", "required_version")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_VERSION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    group_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: _common_pb2.SamplingParams
    samples: _containers.RepeatedCompositeFieldContainer[SampleRequest]
    required_version: _common_pb2.PolicyVersion
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., group_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., samples: _Optional[_Iterable[_Union[SampleRequest, _Mapping]]] = ..., required_version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ...) -> None: ...

class SampleDelta(_message.Message):
    __slots__ = ("sample_index", "token_ids", "log_probs", "policy_spans", "finish_reason")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    POLICY_SPANS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    policy_spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.PolicySpan]
    finish_reason: _common_pb2.FinishReason
    def __init__(self, sample_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[float]] = ..., policy_spans: _Optional[_Iterable[_Union[_common_pb2.PolicySpan, _Mapping]]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ...) -> None: ...

class EngineServiceGenerateResponse(_message.Message):
    __slots__ = ("deltas",)
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[SampleDelta]
    def __init__(self, deltas: _Optional[_Iterable[_Union[SampleDelta, _Mapping]]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "group_ids")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_IDS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    group_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., group_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted_count",)
    ABORTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    aborted_count: int
    def __init__(self, aborted_count: _Optional[int] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("run_id", "request_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("run_id", "request_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WireTensor(_message.Message):
    __slots__ = ("name", "shape", "dtype", "format", "wire_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    format: WireFormat
    wire_bytes: int
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., format: _Optional[_Union[WireFormat, str]] = ..., wire_bytes: _Optional[int] = ...) -> None: ...

class WireBucket(_message.Message):
    __slots__ = ("source_rank", "tensors", "wire_bytes")
    SOURCE_RANK_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    source_rank: int
    tensors: _containers.RepeatedCompositeFieldContainer[WireTensor]
    wire_bytes: int
    def __init__(self, source_rank: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[WireTensor, _Mapping]]] = ..., wire_bytes: _Optional[int] = ...) -> None: ...

class StartWeightUpdateRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "session_id", "version", "rendezvous_address", "world_size", "first_rank", "buckets", "session_timeout")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    SESSION_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    session_id: str
    version: _common_pb2.PolicyVersion
    rendezvous_address: str
    world_size: int
    first_rank: int
    buckets: _containers.RepeatedCompositeFieldContainer[WireBucket]
    session_timeout: _duration_pb2.Duration
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., session_id: _Optional[str] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., rendezvous_address: _Optional[str] = ..., world_size: _Optional[int] = ..., first_rank: _Optional[int] = ..., buckets: _Optional[_Iterable[_Union[WireBucket, _Mapping]]] = ..., session_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class StartWeightUpdateResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReceiveWeightsRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "session_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    session_id: str
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class ReceiveWeightsResponse(_message.Message):
    __slots__ = ("digests", "wire_seconds")
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    WIRE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[str]
    wire_seconds: float
    def __init__(self, digests: _Optional[_Iterable[str]] = ..., wire_seconds: _Optional[float] = ...) -> None: ...

class FinishWeightUpdateRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "session_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    session_id: str
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class FinishWeightUpdateResponse(_message.Message):
    __slots__ = ("load_seconds", "pause_seconds")
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    load_seconds: float
    pause_seconds: float
    def __init__(self, load_seconds: _Optional[float] = ..., pause_seconds: _Optional[float] = ...) -> None: ...

class AbortWeightUpdateRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "session_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    session_id: str
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class AbortWeightUpdateResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWeightVersionRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class GetWeightVersionResponse(_message.Message):
    __slots__ = ("version", "digest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.PolicyVersion
    digest: str
    def __init__(self, version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., digest: _Optional[str] = ...) -> None: ...

class GetParameterManifestRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class ManifestParameter(_message.Message):
    __slots__ = ("name", "shape", "dtype", "quantisable")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTISABLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    quantisable: bool
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., quantisable: _Optional[bool] = ...) -> None: ...

class GetParameterManifestResponse(_message.Message):
    __slots__ = ("parameters",)
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    parameters: _containers.RepeatedCompositeFieldContainer[ManifestParameter]
    def __init__(self, parameters: _Optional[_Iterable[_Union[ManifestParameter, _Mapping]]] = ...) -> None: ...

class GetEngineStatsRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class GetEngineStatsResponse(_message.Message):
    __slots__ = ("running_samples", "generated_tokens", "paused", "weight_updates")
    RUNNING_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_UPDATES_FIELD_NUMBER: _ClassVar[int]
    running_samples: int
    generated_tokens: int
    paused: bool
    weight_updates: int
    def __init__(self, running_samples: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., paused: _Optional[bool] = ..., weight_updates: _Optional[int] = ...) -> None: ...
