"""Step records on the wire: frames over a TCP connection of their own (design, section 7, *Records*).

When a sender dies, gRPC drops received data that it has not delivered yet, but a socket keeps its receive
buffer. A shadow node that was stopped therefore still gets every record of trainers that died meanwhile.

A trainer first sends `GREETING`. Then each side sends frames: 4 bytes length, big-endian, 1 byte flags, and
a message: `RecordPart` from trainers, `RecordReply` from shadow nodes. An empty frame from a trainer only
requests a reply.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from checkmate.rpc.channels import MESSAGE_BYTES

GREETING: Final = bytes.fromhex("c4ec0002")
"""The first bytes from a trainer. The hello of a shadow stream begins with c4ec0002."""
ANSWER: Final = 1
"""Flag that requests a reply, which also answers all parts before it."""
_HEADER: Final = struct.Struct(">IB")


class FrameError(ValueError):
    """Bytes that are not frames."""


class RecordFrame(NamedTuple):
    """One serialized message, or none if empty."""

    data: bytes
    flags: int = 0

    @property
    def wants_answer(self) -> bool:
        """Whether a reply is requested."""
        return bool(self.flags & ANSWER)


def pack(data: bytes, flags: int = 0) -> bytes:
    """Return a message as a frame. Raise `FrameError` if it is longer than `MESSAGE_BYTES`."""
    if len(data) > MESSAGE_BYTES:
        raise FrameError(f"a message of {len(data)} bytes; a frame has at most {MESSAGE_BYTES}")
    return _HEADER.pack(len(data), flags) + data


class Unpacker:
    """Splits received bytes, which must begin with `greeting`, into frames."""

    def __init__(self, greeting: bytes = b"") -> None:
        self._awaited = greeting
        self._bytes = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[RecordFrame]:
        """Yield the frames that `data` completes. Raise `FrameError` if it is not the greeting or a frame."""
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
