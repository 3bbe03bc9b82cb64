from flotilla.common.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DesiredState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DESIRED_STATE_UNSPECIFIED: _ClassVar[DesiredState]
    DESIRED_STATE_RUNNING: _ClassVar[DesiredState]
    DESIRED_STATE_PAUSED: _ClassVar[DesiredState]
    DESIRED_STATE_STOPPED: _ClassVar[DesiredState]

class VersionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERSION_STATE_UNSPECIFIED: _ClassVar[VersionState]
    VERSION_STATE_PUBLISHING: _ClassVar[VersionState]
    VERSION_STATE_LIVE: _ClassVar[VersionState]
    VERSION_STATE_RETIRED: _ClassVar[VersionState]
    VERSION_STATE_FAILED: _ClassVar[VersionState]
DESIRED_STATE_UNSPECIFIED: DesiredState
DESIRED_STATE_RUNNING: DesiredState
DESIRED_STATE_PAUSED: DesiredState
DESIRED_STATE_STOPPED: DesiredState
VERSION_STATE_UNSPECIFIED: VersionState
VERSION_STATE_PUBLISHING: VersionState
VERSION_STATE_LIVE: VersionState
VERSION_STATE_RETIRED: VersionState
VERSION_STATE_FAILED: VersionState

class RegisterRunRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "spec_digest")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    spec_digest: str
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., spec_digest: _Optional[str] = ...) -> None: ...

class RegisterRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: Run
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("run_id", "spec_digest", "run_epoch", "desired_state", "committed_step", "checkpoint", "live_version", "num_rollout")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RUN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DESIRED_STATE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    LIVE_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    spec_digest: str
    run_epoch: int
    desired_state: DesiredState
    committed_step: int
    checkpoint: str
    live_version: _common_pb2.PolicyVersion
    num_rollout: int
    def __init__(self, run_id: _Optional[str] = ..., spec_digest: _Optional[str] = ..., run_epoch: _Optional[int] = ..., desired_state: _Optional[_Union[DesiredState, str]] = ..., committed_step: _Optional[int] = ..., checkpoint: _Optional[str] = ..., live_version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., num_rollout: _Optional[int] = ...) -> None: ...

class GetRunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class GetRunResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: Run
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class BeginEpochRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "checkpoint_step", "checkpoint", "batch_digests")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    BATCH_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    checkpoint_step: int
    checkpoint: str
    batch_digests: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., checkpoint_step: _Optional[int] = ..., checkpoint: _Optional[str] = ..., batch_digests: _Optional[_Iterable[str]] = ...) -> None: ...

class BeginEpochResponse(_message.Message):
    __slots__ = ("run_epoch",)
    RUN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    run_epoch: int
    def __init__(self, run_epoch: _Optional[int] = ...) -> None: ...

class RewindRunRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "step")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    step: int
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class RewindRunResponse(_message.Message):
    __slots__ = ("lineage", "reissued_groups")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    REISSUED_GROUPS_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    reissued_groups: int
    def __init__(self, lineage: _Optional[int] = ..., reissued_groups: _Optional[int] = ...) -> None: ...

class SetDesiredStateRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "desired_state")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DESIRED_STATE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    desired_state: DesiredState
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., desired_state: _Optional[_Union[DesiredState, str]] = ...) -> None: ...

class SetDesiredStateResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VersionTimings(_message.Message):
    __slots__ = ("read_quantise_seconds", "wire_seconds", "load_seconds", "pause_seconds", "total_seconds", "wire_bytes", "connect_seconds")
    READ_QUANTISE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WIRE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONNECT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    read_quantise_seconds: float
    wire_seconds: float
    load_seconds: float
    pause_seconds: float
    total_seconds: float
    wire_bytes: int
    connect_seconds: float
    def __init__(self, read_quantise_seconds: _Optional[float] = ..., wire_seconds: _Optional[float] = ..., load_seconds: _Optional[float] = ..., pause_seconds: _Optional[float] = ..., total_seconds: _Optional[float] = ..., wire_bytes: _Optional[int] = ..., connect_seconds: _Optional[float] = ...) -> None: ...

class Version(_message.Message):
    __slots__ = ("version", "state", "digest", "timings")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.PolicyVersion
    state: VersionState
    digest: str
    timings: VersionTimings
    def __init__(self, version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., state: _Optional[_Union[VersionState, str]] = ..., digest: _Optional[str] = ..., timings: _Optional[_Union[VersionTimings, _Mapping]] = ...) -> None: ...

class RecordVersionRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "version")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    version: Version
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., version: _Optional[_Union[Version, _Mapping]] = ...) -> None: ...

class RecordVersionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListVersionsRequest(_message.Message):
    __slots__ = ("run_id", "page_size")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    page_size: int
    def __init__(self, run_id: _Optional[str] = ..., page_size: _Optional[int] = ...) -> None: ...

class ListVersionsResponse(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[Version]
    def __init__(self, versions: _Optional[_Iterable[_Union[Version, _Mapping]]] = ...) -> None: ...
