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

class EngineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STATE_UNSPECIFIED: _ClassVar[EngineState]
    ENGINE_STATE_STALE: _ClassVar[EngineState]
    ENGINE_STATE_SERVING: _ClassVar[EngineState]
    ENGINE_STATE_PAUSED: _ClassVar[EngineState]
ENGINE_STATE_UNSPECIFIED: EngineState
ENGINE_STATE_STALE: EngineState
ENGINE_STATE_SERVING: EngineState
ENGINE_STATE_PAUSED: EngineState

class GenerateRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "prompt_token_ids", "sampling_params", "sample_count", "seed")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: _common_pb2.SamplingParams
    sample_count: int
    seed: int
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., sample_count: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[_common_pb2.Sample]
    def __init__(self, samples: _Optional[_Iterable[_Union[_common_pb2.Sample, _Mapping]]] = ...) -> None: ...

class AbortGenerationsRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "group_ids")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_IDS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    group_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., group_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortGenerationsResponse(_message.Message):
    __slots__ = ("aborted_count",)
    ABORTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    aborted_count: int
    def __init__(self, aborted_count: _Optional[int] = ...) -> None: ...

class PauseGenerationRequest(_message.Message):
    __slots__ = ("run_id", "request_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class PauseGenerationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeGenerationRequest(_message.Message):
    __slots__ = ("run_id", "request_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class ResumeGenerationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Engine(_message.Message):
    __slots__ = ("engine_id", "incarnation", "address", "state", "version", "worker_count")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_COUNT_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    incarnation: str
    address: str
    state: EngineState
    version: _common_pb2.PolicyVersion
    worker_count: int
    def __init__(self, engine_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[_Union[EngineState, str]] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., worker_count: _Optional[int] = ...) -> None: ...

class RegisterEngineRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "engine")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    engine: Engine
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., engine: _Optional[_Union[Engine, _Mapping]] = ...) -> None: ...

class RegisterEngineResponse(_message.Message):
    __slots__ = ("ttl",)
    TTL_FIELD_NUMBER: _ClassVar[int]
    ttl: _duration_pb2.Duration
    def __init__(self, ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RenewEngineRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "engine")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    engine: Engine
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., engine: _Optional[_Union[Engine, _Mapping]] = ...) -> None: ...

class RenewEngineResponse(_message.Message):
    __slots__ = ("ttl",)
    TTL_FIELD_NUMBER: _ClassVar[int]
    ttl: _duration_pb2.Duration
    def __init__(self, ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ListEnginesRequest(_message.Message):
    __slots__ = ("run_id", "known_revision", "wait_timeout")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    KNOWN_REVISION_FIELD_NUMBER: _ClassVar[int]
    WAIT_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    known_revision: int
    wait_timeout: _duration_pb2.Duration
    def __init__(self, run_id: _Optional[str] = ..., known_revision: _Optional[int] = ..., wait_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ListEnginesResponse(_message.Message):
    __slots__ = ("engines", "revision")
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[Engine]
    revision: int
    def __init__(self, engines: _Optional[_Iterable[_Union[Engine, _Mapping]]] = ..., revision: _Optional[int] = ...) -> None: ...

class SetConcurrencyRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "server_concurrency")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    server_concurrency: int
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., server_concurrency: _Optional[int] = ...) -> None: ...

class SetConcurrencyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetGatewayStatsRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class EngineLoad(_message.Message):
    __slots__ = ("engine_id", "running_samples", "server_concurrency")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SERVER_CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    running_samples: int
    server_concurrency: int
    def __init__(self, engine_id: _Optional[str] = ..., running_samples: _Optional[int] = ..., server_concurrency: _Optional[int] = ...) -> None: ...

class GetGatewayStatsResponse(_message.Message):
    __slots__ = ("running_groups", "engines", "finished_samples", "generated_tokens", "lost_leases", "paused")
    RUNNING_GROUPS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    FINISHED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOST_LEASES_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    running_groups: int
    engines: _containers.RepeatedCompositeFieldContainer[EngineLoad]
    finished_samples: int
    generated_tokens: int
    lost_leases: int
    paused: bool
    def __init__(self, running_groups: _Optional[int] = ..., engines: _Optional[_Iterable[_Union[EngineLoad, _Mapping]]] = ..., finished_samples: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., lost_leases: _Optional[int] = ..., paused: _Optional[bool] = ...) -> None: ...
