"""Step records on the wire: frames over a TCP connection of their own (design, section 7, *Records*).

gRPC drops what it has received and not yet handed over when the sender dies; a socket's receive buffer stays.
So a shadow node that was stopped for a while still gets every record of trainers that have died meanwhile.

A trainer begins with `GREETING`. Then each side sends frames: 4 bytes length, big-endian, 1 byte flags, and
a message: `RecordPart` from trainers, `RecordReply` from shadow nodes. An empty frame of a trainer only asks
for a reply.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from checkmate.rpc.channels import MESSAGE_BYTES

GREETING: Final = bytes.fromhex("c4ec0002")
"""What a trainer sends first. The hello of a shadow stream begins with c4ec0001."""
ANSWER: Final = 1
"""A flag: a reply is wanted, which answers all parts before it too."""
_HEADER: Final = struct.Struct(">IB")


class FrameError(ValueError):
    """Bytes that are not frames."""


class RecordFrame(NamedTuple):
    """One message, serialized; empty: none."""

    data: bytes
    flags: int = 0

    @property
    def wants_answer(self) -> bool:
        """Whether a reply is wanted."""
        return bool(self.flags & ANSWER)


def pack(data: bytes, flags: int = 0) -> bytes:
    """Return a message as a frame. `FrameError` if it has more than `MESSAGE_BYTES`."""
    if len(data) > MESSAGE_BYTES:
        raise FrameError(f"a message of {len(data)} bytes; a frame has {MESSAGE_BYTES} at most")
    return _HEADER.pack(len(data), flags) + data


class Unpacker:
    """Takes bytes as they come, and gives the frames in them. `greeting`: what must come first."""

    def __init__(self, greeting: bytes = b"") -> None:
        self._awaited = greeting
        self._bytes = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[RecordFrame]:
        """Yield the frames that `data` completes. `FrameError` for what isn't the greeting or a frame."""
        self._bytes += data
        if not self._greeted():
            return
        while len(self._bytes) >= _HEADER.size:
            length, flags = _HEADER.unpack_from(self._bytes)
            if length > MESSAGE_BYTES or flags & ~ANSWER:
                raise FrameError(f"not a frame: {bytes(self._bytes[:8]).hex(' ')}")
            end = _HEADER.size + length
            if len(self._bytes) < end:
                return
            frame = RecordFrame(bytes(self._bytes[_HEADER.size : end]), flags)
            del self._bytes[:end]
            yield frame

    def _greeted(self) -> bool:
        count = min(len(self._awaited), len(self._bytes))
        if self._bytes[:count] != self._awaited[:count]:
            raise FrameError(f"not a trainer's greeting: {bytes(self._bytes[:8]).hex(' ')}")
        del self._bytes[:count]
        self._awaited = self._awaited[count:]
        return not self._awaited
