import datetime

from flotilla.common.v1 import common_pb2 as _common_pb2
from flotilla.rollout_gateway.v1 import engine_pb2 as _engine_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ShardSlice(_message.Message):
    __slots__ = ("name", "full_shape", "begin", "shape", "dtype", "offset_bytes", "strides")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FULL_SHAPE_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    name: str
    full_shape: _containers.RepeatedScalarFieldContainer[int]
    begin: _containers.RepeatedScalarFieldContainer[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    offset_bytes: int
    strides: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., full_shape: _Optional[_Iterable[int]] = ..., begin: _Optional[_Iterable[int]] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., offset_bytes: _Optional[int] = ..., strides: _Optional[_Iterable[int]] = ...) -> None: ...

class CudaMemory(_message.Message):
    __slots__ = ("handle", "offset_bytes", "size_bytes", "gpu_uuid")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    offset_bytes: int
    size_bytes: int
    gpu_uuid: str
    def __init__(self, handle: _Optional[bytes] = ..., offset_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ..., gpu_uuid: _Optional[str] = ...) -> None: ...

class RegisterShardsRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "rank", "shared_memory_path", "shared_memory_bytes", "slices", "cuda_memory")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_PATH_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    CUDA_MEMORY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    rank: int
    shared_memory_path: str
    shared_memory_bytes: int
    slices: _containers.RepeatedCompositeFieldContainer[ShardSlice]
    cuda_memory: CudaMemory
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., rank: _Optional[int] = ..., shared_memory_path: _Optional[str] = ..., shared_memory_bytes: _Optional[int] = ..., slices: _Optional[_Iterable[_Union[ShardSlice, _Mapping]]] = ..., cuda_memory: _Optional[_Union[CudaMemory, _Mapping]] = ...) -> None: ...

class RegisterShardsResponse(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    def __init__(self, incarnation: _Optional[str] = ...) -> None: ...

class AnnounceVersionRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "version")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    version: _common_pb2.PolicyVersion
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ...) -> None: ...

class AnnounceVersionResponse(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    def __init__(self, incarnation: _Optional[str] = ...) -> None: ...

class WaitReadRequest(_message.Message):
    __slots__ = ("run_id", "version", "wait_timeout")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    version: _common_pb2.PolicyVersion
    wait_timeout: _duration_pb2.Duration
    def __init__(self, run_id: _Optional[str] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., wait_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WaitReadResponse(_message.Message):
    __slots__ = ("read", "version", "slices", "rendezvous_address", "read_quantise_seconds", "incarnation")
    READ_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    READ_QUANTISE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    read: bool
    version: _common_pb2.PolicyVersion
    slices: _containers.RepeatedCompositeFieldContainer[ShardSlice]
    rendezvous_address: str
    read_quantise_seconds: float
    incarnation: str
    def __init__(self, read: _Optional[bool] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., slices: _Optional[_Iterable[_Union[ShardSlice, _Mapping]]] = ..., rendezvous_address: _Optional[str] = ..., read_quantise_seconds: _Optional[float] = ..., incarnation: _Optional[str] = ...) -> None: ...

class RunTransferRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "session_id", "version", "rendezvous_address", "world_size", "rank", "buckets", "session_timeout")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    SESSION_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    session_id: str
    version: _common_pb2.PolicyVersion
    rendezvous_address: str
    world_size: int
    rank: int
    buckets: _containers.RepeatedCompositeFieldContainer[_engine_pb2.WireBucket]
    session_timeout: _duration_pb2.Duration
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., session_id: _Optional[str] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., rendezvous_address: _Optional[str] = ..., world_size: _Optional[int] = ..., rank: _Optional[int] = ..., buckets: _Optional[_Iterable[_Union[_engine_pb2.WireBucket, _Mapping]]] = ..., session_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RunTransferResponse(_message.Message):
    __slots__ = ("digest", "wire_seconds", "connect_seconds")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WIRE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CONNECT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    wire_seconds: float
    connect_seconds: float
    def __init__(self, digest: _Optional[str] = ..., wire_seconds: _Optional[float] = ..., connect_seconds: _Optional[float] = ...) -> None: ...

class AbortTransferRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "session_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    session_id: str
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class AbortTransferResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
