"""Step records on the wire: frames over a TCP connection of their own (design, section 7, *Records*).

When a sender dies, gRPC drops received data that it has not delivered yet, but a socket keeps its receive
buffer. A shadow node that was stopped therefore still gets every record of trainers that died meanwhile.

A trainer first sends `GREETING`, with its protocol in the last four bytes. Then each side sends frames: 4
bytes length, big-endian, 1 byte flags, and a message: `RecordPart` from trainers, `RecordReply` from shadow
nodes. An empty frame from a trainer only requests a reply.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from checkmate.rpc.channels import MESSAGE_BYTES
from checkmate.rpc.protocol import PROTOCOL, mismatch

_MAGIC: Final = bytes.fromhex("c4ec0003")
_OLD_MAGIC: Final = bytes.fromhex("c4ec0002")
"""The whole greeting before it had a protocol."""
GREETING: Final = _MAGIC + PROTOCOL.to_bytes(4, "big")
"""The first bytes from a trainer."""
ANSWER: Final = 1
"""Flag that requests a reply, which also answers all parts before it."""
_HEADER: Final = struct.Struct(">IB")


class FrameError(ValueError):
    """Bytes that are not frames."""


class OtherProtocol(FrameError):
    """The greeting of a trainer of another version. The message says which side is older."""


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
    """Splits received bytes into frames."""

    def __init__(self, *, greeted: bool, most: int = MESSAGE_BYTES) -> None:
        """Start; the bytes begin with a trainer's greeting unless `greeted`. `most`: bytes of a message."""
        self._greeted = greeted
        self._most = most
        self._bytes = bytearray()

    @property
    def held(self) -> int:
        """The number of bytes that it holds of what is not complete."""
        return len(self._bytes)

    def feed(self, data: bytes | memoryview) -> Iterator[RecordFrame]:
        """Yield the frames that `data` completes.

        Raises `FrameError` if it is not the greeting or a frame, and `OtherProtocol` if it is a greeting of
        another version.
        """
        self._bytes += data
        if not self._greeted and not self._take_greeting():
            return
        while len(self._bytes) >= _HEADER.size:
            length, flags = _HEADER.unpack_from(self._bytes)
            if length > self._most or flags & ~ANSWER:
                raise FrameError(f"not a frame: {bytes(self._bytes[:8]).hex(' ')}")
            end = _HEADER.size + length
            if len(self._bytes) < end:
                return
            frame = RecordFrame(bytes(self._bytes[_HEADER.size : end]), flags)
            del self._bytes[:end]
            yield frame

    def _take_greeting(self) -> bool:
        """Remove the greeting. Return whether all of it has come."""
        start = bytes(self._bytes[: len(_MAGIC)])
        if start == _OLD_MAGIC:
            raise OtherProtocol(mismatch(0, "the trainer", "this shadow node"))
        if not _MAGIC.startswith(start) and not _OLD_MAGIC.startswith(start):
            raise FrameError(f"not a trainer's greeting: {bytes(self._bytes[:8]).hex(' ')}")
        if len(self._bytes) < len(GREETING):
            return False
        protocol = int.from_bytes(self._bytes[len(_MAGIC) : len(GREETING)], "big")
        if different := mismatch(protocol, "the trainer", "this shadow node"):
            raise OtherProtocol(different)
        del self._bytes[: len(GREETING)]
        self._greeted = True
        return True
