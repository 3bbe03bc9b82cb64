import datetime

from flotilla.common.v1 import common_pb2 as _common_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TrainerPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRAINER_PHASE_UNSPECIFIED: _ClassVar[TrainerPhase]
    TRAINER_PHASE_STARTING: _ClassVar[TrainerPhase]
    TRAINER_PHASE_WAITING: _ClassVar[TrainerPhase]
    TRAINER_PHASE_TRAINING: _ClassVar[TrainerPhase]
    TRAINER_PHASE_PUBLISHING: _ClassVar[TrainerPhase]
    TRAINER_PHASE_SAVING: _ClassVar[TrainerPhase]
    TRAINER_PHASE_PAUSED: _ClassVar[TrainerPhase]
    TRAINER_PHASE_DONE: _ClassVar[TrainerPhase]
TRAINER_PHASE_UNSPECIFIED: TrainerPhase
TRAINER_PHASE_STARTING: TrainerPhase
TRAINER_PHASE_WAITING: TrainerPhase
TRAINER_PHASE_TRAINING: TrainerPhase
TRAINER_PHASE_PUBLISHING: TrainerPhase
TRAINER_PHASE_SAVING: TrainerPhase
TRAINER_PHASE_PAUSED: TrainerPhase
TRAINER_PHASE_DONE: TrainerPhase

class GetTrainerStatusRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class GetTrainerStatusResponse(_message.Message):
    __slots__ = ("phase", "version", "committed_step", "last_step")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    phase: TrainerPhase
    version: _common_pb2.PolicyVersion
    committed_step: int
    last_step: StepMetrics
    def __init__(self, phase: _Optional[_Union[TrainerPhase, str]] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., committed_step: _Optional[int] = ..., last_step: _Optional[_Union[StepMetrics, _Mapping]] = ...) -> None: ...

class StepMetrics(_message.Message):
    __slots__ = ("step", "values")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    step: int
    values: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class WatchStepsRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class WatchStepsResponse(_message.Message):
    __slots__ = ("metrics",)
    METRICS_FIELD_NUMBER: _ClassVar[int]
    metrics: StepMetrics
    def __init__(self, metrics: _Optional[_Union[StepMetrics, _Mapping]] = ...) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ("run_id", "request_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class SaveCheckpointResponse(_message.Message):
    __slots__ = ("step", "checkpoint")
    STEP_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    step: int
    checkpoint: str
    def __init__(self, step: _Optional[int] = ..., checkpoint: _Optional[str] = ...) -> None: ...

class PauseTrainingRequest(_message.Message):
    __slots__ = ("run_id", "request_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class PauseTrainingResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeTrainingRequest(_message.Message):
    __slots__ = ("run_id", "request_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class ResumeTrainingResponse(_message.Message):
    __slots__ = ("paused_for",)
    PAUSED_FOR_FIELD_NUMBER: _ClassVar[int]
    paused_for: _duration_pb2.Duration
    def __init__(self, paused_for: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
