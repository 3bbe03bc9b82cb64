from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_UNSPECIFIED: _ClassVar[Verdict]
    VERDICT_SCORED: _ClassVar[Verdict]
    VERDICT_UNGRADABLE: _ClassVar[Verdict]
    VERDICT_TIMEOUT: _ClassVar[Verdict]
    VERDICT_ERROR: _ClassVar[Verdict]

class VerdictReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_REASON_UNSPECIFIED: _ClassVar[VerdictReason]
    VERDICT_REASON_CORRECT: _ClassVar[VerdictReason]
    VERDICT_REASON_WRONG: _ClassVar[VerdictReason]
    VERDICT_REASON_NO_ANSWER: _ClassVar[VerdictReason]
    VERDICT_REASON_NO_THINK_TAG: _ClassVar[VerdictReason]
    VERDICT_REASON_TRUNCATED: _ClassVar[VerdictReason]
VERDICT_UNSPECIFIED: Verdict
VERDICT_SCORED: Verdict
VERDICT_UNGRADABLE: Verdict
VERDICT_TIMEOUT: Verdict
VERDICT_ERROR: Verdict
VERDICT_REASON_UNSPECIFIED: VerdictReason
VERDICT_REASON_CORRECT: VerdictReason
VERDICT_REASON_WRONG: VerdictReason
VERDICT_REASON_NO_ANSWER: VerdictReason
VERDICT_REASON_NO_THINK_TAG: VerdictReason
VERDICT_REASON_TRUNCATED: VerdictReason

class GradeItem(_message.Message):
    __slots__ = ("response", "label", "truncated", "grader", "metadata", "prompt", "group_id")
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    GRADER_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    response: str
    label: str
    truncated: bool
    grader: str
    metadata: str
    prompt: str
    group_id: str
    def __init__(self, response: _Optional[str] = ..., label: _Optional[str] = ..., truncated: _Optional[bool] = ..., grader: _Optional[str] = ..., metadata: _Optional[str] = ..., prompt: _Optional[str] = ..., group_id: _Optional[str] = ...) -> None: ...

class GradeRequest(_message.Message):
    __slots__ = ("run_id", "grader", "items")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GRADER_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    grader: str
    items: _containers.RepeatedCompositeFieldContainer[GradeItem]
    def __init__(self, run_id: _Optional[str] = ..., grader: _Optional[str] = ..., items: _Optional[_Iterable[_Union[GradeItem, _Mapping]]] = ...) -> None: ...

class GradedItem(_message.Message):
    __slots__ = ("verdict", "value", "reason", "seconds", "grader", "grader_version")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    GRADER_FIELD_NUMBER: _ClassVar[int]
    GRADER_VERSION_FIELD_NUMBER: _ClassVar[int]
    verdict: Verdict
    value: float
    reason: VerdictReason
    seconds: float
    grader: str
    grader_version: str
    def __init__(self, verdict: _Optional[_Union[Verdict, str]] = ..., value: _Optional[float] = ..., reason: _Optional[_Union[VerdictReason, str]] = ..., seconds: _Optional[float] = ..., grader: _Optional[str] = ..., grader_version: _Optional[str] = ...) -> None: ...

class GradeResponse(_message.Message):
    __slots__ = ("items", "grader_version")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    GRADER_VERSION_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[GradedItem]
    grader_version: str
    def __init__(self, items: _Optional[_Iterable[_Union[GradedItem, _Mapping]]] = ..., grader_version: _Optional[str] = ...) -> None: ...

class ListGradersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Grader(_message.Message):
    __slots__ = ("name", "version", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class ListGradersResponse(_message.Message):
    __slots__ = ("graders",)
    GRADERS_FIELD_NUMBER: _ClassVar[int]
    graders: _containers.RepeatedCompositeFieldContainer[Grader]
    def __init__(self, graders: _Optional[_Iterable[_Union[Grader, _Mapping]]] = ...) -> None: ...
