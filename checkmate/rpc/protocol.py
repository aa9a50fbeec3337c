"""The version of what trainers, shadow nodes and checkpoints on disk exchange, and its limits. Pure."""

from __future__ import annotations

import math
from typing import Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from checkmate.base.wording import shortened
from checkmate.wire.tag import SHARDS_MAX

PROTOCOL: Final = 12
"""The version of messages, records, layouts and checkpoints. What lacks a version has 0, and is older.

Version 1 had no `Reset`, layouts of version 2 no slicing, and those of version 3 no chunks, no
shares and no types of gradients. Version 4 did not tell meshes apart, in
version 5 seeds had another checksum, in version 6 plain state was an archive of `torch.save`, in
version 7 ends of streams named a side, in version 8 ranks did not meet at nodes, version 9 had no
copies of optimizer state, in version 10 only the same ranks could resume from nodes, and in version 11
nodes did not ask for copies again.
"""

TEXT_MAX: Final = 256
"""Characters of names of runs, of ranks and of software."""
REFUSAL_MAX: Final = 4096
"""Characters of the text of a `RefusedRequest`. Trainers cut it, and nodes refuse a longer one."""
ITERATIONS_MAX: Final = 1 << 40
"""The greatest iteration: thirty thousand years at one a second."""
GENERATIONS_MAX: Final = 1 << 31
"""The greatest generation of runs: far from what the messages can carry, because the next run adds 1."""
GENERATIONS_AHEAD: Final = 1 << 20
"""How far a generation may be beyond the greatest one that a shadow node knows: each new run adds 1."""
INCARNATIONS: Final = 256
"""Incarnations wrap here."""
START_BYTES: Final = 16
"""Bytes of what identifies a start of training, a UUID."""
ANSWER_BYTES: Final = 4 << 20
"""Bytes of an answer that is one message, and of a reply to step records."""
PARTS_MAX: Final = 1 << 20
"""Parts of step records that an answer to `Fence` reports, in all."""
_TEXTS_MAX: Final = 64
"""Texts in one list of an answer, such as a node's troubles."""
_MESSAGES_MAX: Final = 1 << 16
"""Messages in one list of an answer, such as a node's shards."""
_NUMBERS_MAX: Final = 1 << 18
"""Numbers in one list of an answer: the ranks of a job, or the parameters of a layout."""


def mismatch(version: int, them: str, us: str) -> str:
    """Return in one sentence which side is older, or "" if both have the same version.

    Args:
        version: the other side's version.
        them: what the other side is, such as `the caller`.
        us: what this side is.
    """
    if version == PROTOCOL:
        return ""
    older = them if version < PROTOCOL else us
    return (
        f"{them} has protocol {version}, {us} has {PROTOCOL}: {older} has an older version of Checkmate; "
        "install the same version on all hosts"
    )


def bounded(answer: Message) -> str:
    """Cut the texts of a shadow node's answer, in place, and return what is wrong with its numbers, or "".

    All signed numbers of answers are iterations, and all bytes name starts of training: a caller adds to the
    former, sorts them and tells others, so one that no training can reach would outlast the node's error.
    """
    for field, value in answer.ListFields():
        repeated = not isinstance(value, str | bytes | int | float | Message)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue  # the ranks of a mesh, by dimension: compared with the caller's, and not used
        if field.type == FieldDescriptor.TYPE_UINT32 and repeated:
            if len(value) > _NUMBERS_MAX:
                return f"{field.name} has {len(value)} numbers, and may have {_NUMBERS_MAX}"
            continue  # ranks and parameters, which callers look up in the job and the layout
        if field.type == FieldDescriptor.TYPE_STRING and repeated:
            texts = [shortened(text, REFUSAL_MAX) for text in value[:_TEXTS_MAX]]
            left_out = len(value) - len(texts)
            value[:] = [*texts, f"and {left_out} more"] if left_out else texts
            continue
        if field.type == FieldDescriptor.TYPE_STRING:
            setattr(answer, field.name, shortened(value, REFUSAL_MAX))
            continue
        if repeated and len(value) > _MESSAGES_MAX:
            return f"{field.name} has {len(value)} entries, and may have {_MESSAGES_MAX}"
        for message in value if repeated else [value]:
            if wrong := bounded(message) if isinstance(message, Message) else _wrong(field, message):
                return wrong
    return ""


def _wrong(field: FieldDescriptor, value: object) -> str:
    """Return what is wrong with a number or bytes in an answer, or ""."""
    if isinstance(value, bytes):
        most = START_BYTES
        return f"{field.name} has {len(value)} bytes, and may have {most}" if len(value) > most else ""
    if field.type == FieldDescriptor.TYPE_INT64:
        low, high = -1, ITERATIONS_MAX
    elif field.name == "incarnation":
        low, high = 0, INCARNATIONS - 1
    elif field.name in ("generation", "discarded"):
        low, high = 0, GENERATIONS_MAX
    elif field.name == "replicas":
        low, high = 0, SHARDS_MAX
    elif isinstance(value, float) and not math.isfinite(value):
        return f"{field.name} is {value}"
    else:
        return ""
    in_range = isinstance(value, int) and low <= value <= high
    return "" if in_range else f"{field.name} is {value}, and can be {low} to {high}"
