"""Frames of step records that never end, or are many at once: bounded time and memory."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.frames import ANSWER, GREETING, pack
from checkmate.shadow import inbox as module
from checkmate.shadow.inbox import Inbox
from tests.support.waiting import wait_until

MIB = 1 << 20


class Records:
    """An inbox, and what it was sent."""

    def __init__(self) -> None:
        self.parts: list[pb.RecordPart] = []
        listener = socket.create_server(("127.0.0.1", 0))
        self._address = listener.getsockname()
        self.inbox = Inbox(listener, self._take)
        self.inbox.start()

    def _take(self, part: pb.RecordPart, has_answer: bool, host: str) -> pb.RecordReply:
        self.parts.append(part)
        return pb.RecordReply(iteration=part.iteration)

    def connected(self) -> socket.socket:
        """Return a trainer's connection that has greeted."""
        sock = socket.create_connection(self._address)
        sock.settimeout(20)
        sock.sendall(GREETING)
        return sock


@pytest.fixture
def records() -> Iterator[Records]:
    here = Records()
    yield here
    here.inbox.stop()


def frame(iteration: int, nbytes: int) -> bytes:
    part = pb.RecordPart(job="demo", iteration=iteration, extra=bytes(nbytes))
    return pack(part.SerializeToString(), ANSWER)


def nbytes_held(records: Records) -> int:
    return sum(records.inbox._frames._bytes.values())


def test_a_frame_that_does_not_end_in_time_ends_its_connection(
    records: Records, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "FRAME_SECONDS", 0.5)
    with records.connected() as slow, records.connected() as calm:
        start = time.monotonic()
        with pytest.raises(OSError):
            for byte in frame(1, 1000):
                slow.sendall(bytes([byte]))  # each on its own within the limit
                time.sleep(0.05)
        assert time.monotonic() - start < 20
        wait_until(lambda: "a step record did not end within 0.5 s" in caplog.text)
        assert nbytes_held(records) == 0
        calm.sendall(frame(2, 10))  # between frames, a connection may be silent
        wait_until(lambda: [part.iteration for part in records.parts] == [2])
        calm.sendall(frame(3, 10)[:-1])
        wait_until(lambda: records.inbox.trainers() == 0)


def test_frames_that_are_not_complete_are_bounded_together(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the limit only the oldest is read on, so that each is taken in the end."""
    monkeypatch.setattr(module, "HELD_BYTES", 4 * MIB)
    trainers = [records.connected() for _ in range(6)]
    whole = [frame(number, 8 * MIB) for number in range(6)]
    go_on = threading.Event()

    def send(number: int) -> None:
        trainers[number].sendall(whole[number][: 7 * MIB])  # waits while the inbox does not read
        go_on.wait(20)
        trainers[number].sendall(whole[number][7 * MIB :])

    with ThreadPoolExecutor(6) as pool:
        for number in range(6):
            pool.submit(send, number)
        wait_until(lambda: nbytes_held(records) > 7 * MIB)
        most = 0
        for _ in range(100):
            most = max(most, nbytes_held(records))
            time.sleep(0.01)
        assert most <= 4 * MIB + 8 * MIB + 6 * module._READ_BYTES
        assert records.parts == []
        go_on.set()
        wait_until(lambda: len(records.parts) == 6)
    assert sorted(part.iteration for part in records.parts) == list(range(6))
    wait_until(lambda: nbytes_held(records) == 0)
    for sock in trainers:
        sock.close()


def test_what_waits_for_room_ends_with_its_connection(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HELD_BYTES", 100)
    with records.connected() as first, records.connected() as second:
        first.sendall(frame(0, 1000)[:-1])
        wait_until(lambda: nbytes_held(records) > 900)
        second.sendall(frame(1, 1000)[:-1])
        wait_until(lambda: nbytes_held(records) > 1800)
        records.inbox.stop()  # although one of them waits
        assert nbytes_held(records) == 0
