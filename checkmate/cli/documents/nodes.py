"""Documents of commands about shadow nodes."""

from __future__ import annotations

from typing import Any, Final, Literal, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from pydantic import ConfigDict, RootModel, create_model

from checkmate.cli.documents.base import DocumentPart, JsonDocument
from checkmate.report.records import Absence, Death, NodeClock, Recovery, Trouble
from checkmate.rpc import shadow_pb2 as pb

_TYPES: Final[dict[int, type]] = {
    FieldDescriptor.CPPTYPE_BOOL: bool,
    FieldDescriptor.CPPTYPE_DOUBLE: float,
    FieldDescriptor.CPPTYPE_FLOAT: float,
    FieldDescriptor.CPPTYPE_STRING: str,  # bytes as hexadecimal digits
}
"""All others are integers."""


def of_message(message: Descriptor, base: type[DocumentPart] = DocumentPart) -> type[DocumentPart]:
    """Return a model of a message as `shadow --json` prints it."""
    fields: dict[str, Any] = {}
    for field in message.fields:
        kind: Any = _TYPES.get(field.cpp_type, int)
        if field.message_type and field.message_type.GetOptions().map_entry:
            value = field.message_type.fields_by_name["value"]
            fields[field.name] = (dict[str, _TYPES.get(value.cpp_type, int)], ...)  # type: ignore[misc]
            continue
        if field.message_type:
            kind = of_message(
                field.message_type, _Hold if field.message_type.name == "HoldStatus" else DocumentPart
            )
        if field.containing_oneof:  # `optional`
            kind |= None
        fields[field.name] = (list[kind] if field.is_repeated else kind, ...)
    return cast("type[DocumentPart]", create_model(message.name, __base__=base, **fields))


class _Hold(DocumentPart):
    """A hold. `lag`: the number of iterations by which trainers are ahead of it."""

    lag: int


class _Line(JsonDocument):
    """A line. `time`: UTC, ISO 8601."""

    time: str = ""


class ReadyLine(_Line):
    """The first line, once the node serves."""

    ready: Literal[True]
    job: str
    node: int


class _Rates(_Line):
    bytes_per_second: dict[str, int]


StatusLine: Final = of_message(pb.NodeStatus.DESCRIPTOR, _Rates)
"""A line each second."""


class ShadowLine(RootModel[Any]):
    """A line of `shadow`."""

    model_config = ConfigDict(title="ShadowLine")
    root: ReadyLine | StatusLine  # type: ignore[valid-type]


class ConsolidateDocument(JsonDocument):
    """`consolidate`; with --every, each line."""

    path: str
    job: str
    run: str
    generation: int
    iteration: int
    shards: int
    nbytes: int
    seconds: float


class ShardPart(DocumentPart):
    """A shard of a DP group."""

    group: int
    shard: int


class DrainDocument(JsonDocument):
    """`drain`: the shards of which the node had state."""

    job: str
    node: int
    held: list[ShardPart]
    forced: bool


class ResetDocument(JsonDocument):
    """What `reset` discarded: the newest iteration, if there was any, and which nodes took part."""

    job: str
    iteration: int | None
    nodes: list[int]
    silent: dict[str, str]
    """Why a node did not answer, by its id."""


class EventPart(DocumentPart):
    """An event, as in event logs; what `fields` has depends on the event (docs/operating.md)."""

    time: str
    source: str
    job: str
    host: str
    pid: int
    number: int
    level: str
    event: str
    message: str
    fields: dict[str, Any]


class ReportDocument(JsonDocument):
    """`report`. Times are RFC 3339, each by the clock of the host that it comes from."""

    job: str
    since: str
    until: str
    deaths: list[Death]
    stopped: list[str]
    recoveries: list[Recovery]
    absences: list[Absence]
    troubles: list[Trouble]
    committed: int | None
    unknown: list[str]
    clocks: list[NodeClock]
    events: list[EventPart]
