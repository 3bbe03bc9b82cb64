from flotilla.common.v1 import common_pb2 as _common_pb2
from flotilla.rollout_gateway.v1 import engine_pb2 as _engine_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PublishVersionRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "version")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    version: _common_pb2.PolicyVersion
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ...) -> None: ...

class PublishVersionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSyncStatusRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class EngineSync(_message.Message):
    __slots__ = ("engine_id", "version", "failures", "last_error")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    version: _common_pb2.PolicyVersion
    failures: int
    last_error: str
    def __init__(self, engine_id: _Optional[str] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., failures: _Optional[int] = ..., last_error: _Optional[str] = ...) -> None: ...

class GetSyncStatusResponse(_message.Message):
    __slots__ = ("target", "settled", "engines", "sessions", "digest_mismatches")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    target: _common_pb2.PolicyVersion
    settled: bool
    engines: _containers.RepeatedCompositeFieldContainer[EngineSync]
    sessions: int
    digest_mismatches: int
    def __init__(self, target: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., settled: _Optional[bool] = ..., engines: _Optional[_Iterable[_Union[EngineSync, _Mapping]]] = ..., sessions: _Optional[int] = ..., digest_mismatches: _Optional[int] = ...) -> None: ...

class GetTransferPlanRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class GetTransferPlanResponse(_message.Message):
    __slots__ = ("buckets", "wire_bytes", "plain_bytes")
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLAIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    buckets: _containers.RepeatedCompositeFieldContainer[_engine_pb2.WireBucket]
    wire_bytes: int
    plain_bytes: int
    def __init__(self, buckets: _Optional[_Iterable[_Union[_engine_pb2.WireBucket, _Mapping]]] = ..., wire_bytes: _Optional[int] = ..., plain_bytes: _Optional[int] = ...) -> None: ...
