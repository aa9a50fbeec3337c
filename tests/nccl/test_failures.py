"""Refused and failing sends, aborts, and a new start in the same process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable

import pytest

from checkmate.nccl.library import NcclBucket, NcclPlace
from tests.support.nccl.calls import RELEASES, REMOTE_ERROR
from tests.support.nccl.sender import JOB_COMM_HASH, LOOPBACK, SendingRank, address, buffer, until
from tests.support.nccl.traces import TracedCollective

Make = Callable[..., SendingRank]

BUCKET = NcclBucket(address(0), 10_000, 4, 0)


def until_acknowledged(sender: SendingRank) -> int:
    def acknowledgement() -> int | None:
        tagged, acknowledged = sender.library.count(0, 0)
        return tagged if tagged == acknowledged else None

    return until(acknowledgement)


@pytest.mark.parametrize("release", RELEASES)
def test_tagged_bytes_are_acknowledged_without_the_tagger_too(make: Make, release: str) -> None:
    sender = make(release, 1, 2, 1)
    sender.library.set_buckets([BUCKET])
    for times in range(1, 4):
        with sender.library.expected():
            sender.reduce(0, BUCKET)
        assert until_acknowledged(sender) == times * 20_000


@pytest.mark.parametrize("release", ["2.26", "2.30"])
def test_a_refused_send_leaves_nothing_behind(make: Make, release: str) -> None:
    """After a refusal, NCCL announces the send again; a send of another communicator may come first."""
    sender = make(release, 0, 2, 1)
    sender.library.set_buckets([BUCKET])
    (comm,) = sender.connections
    data, caller = buffer(20_000), sender.caller
    with sender.library.expected():
        (op,) = sender.collective(0, TracedCollective(10_000, "ncclFloat32", 1))
    waiting = [caller.isend(comm, data, 1, None)[1] for _ in range(32)]
    sends = list(sender.slicing.sends(range(10_000), 4, 2, 0))
    step = caller.proxy_step(op, 0)
    assert caller.isend(comm, data, len(sends[0].where) * 4, step) == (0, None)
    for request in waiting:
        assert request is not None
        until(lambda request=request: caller.test(request)[1])  # type: ignore[misc]
    sender.send(0, 20_000, None)
    for send in sends:
        sender.send(0, len(send.where) * 4, caller.proxy_step(op, send.step))
    assert sender.library.trouble == ""
    assert sender.library.count(0, 0)[0] == 20_000


@pytest.mark.parametrize("release", RELEASES)
def test_a_connection_that_broke_never_works_again(make: Make, release: str) -> None:
    sender = make(release, 0, 2, 1)
    sender.library.set_buckets([BUCKET])
    (comm,) = sender.connections
    data = buffer(8 << 20)
    sender.stop_receiving()

    def failed() -> int | None:
        result, request = sender.caller.isend(comm, data, 8 << 20, None)
        time.sleep(0.01)
        return (result or None) if request is None else sender.caller.test(request)[0] or None

    assert until(failed) == REMOTE_ERROR
    for _ in range(3):
        assert sender.caller.isend(comm, data, 1, None) == (REMOTE_ERROR, None)
    assert "the connection of rank 0 to 127.0.0.1 broke: " in sender.library.broken
    assert sender.library.trouble == sender.library.broken


def test_a_new_job_may_begin_while_sends_of_an_earlier_one_are_under_way(make: Make) -> None:
    """`make sanitize` finds what one thread rewrites while others read it."""
    sender = make("2.30", 0, 2, 1)
    sender.library.set_buckets([BUCKET])
    has_begun = threading.Event()

    place = NcclPlace(0, 2, LOOPBACK, "lo")

    def begin() -> None:
        for number in range(2000):
            sender.library.begin(place, channels=1, slicing=sender.slicing, incarnation=number % 256)
            sender.library.set_buckets([BUCKET])
            has_begun.set()

    thread = threading.Thread(target=begin)
    thread.start()
    has_begun.wait()
    while thread.is_alive():
        for _ in range(20):
            sender.caller.close_listen(sender.caller.listen()[1])
        sender.send(0, 20_000, None)
    thread.join()
    assert sender.library.broken == ""


def test_an_abort_is_no_break_and_a_new_job_begins_from_zero(make: Make) -> None:
    sender = make("2.30", 0, 2, 1)
    sender.library.set_buckets([BUCKET])
    sender.reduce(0, BUCKET)
    assert until_acknowledged(sender) == 20_000
    (old,) = sender.collective(0, TracedCollective(10_000, "ncclFloat32", 1))
    library = sender.library
    library.begin(NcclPlace(0, 2, LOOPBACK, "lo"), channels=1, slicing=sender.slicing, incarnation=2)
    library.set_buckets([BUCKET])
    with library.expected():
        assert sender.caller.init(JOB_COMM_HASH + 1, 2, 2, 0) == 0
    for send in sender.slicing.sends(range(10_000), 4, 2, 0):  # of the earlier job, in flight
        sender.send(0, len(send.where) * 4, sender.caller.proxy_step(old, send.step))
    assert library.count(0, 0) == (0, 0)
    sender.stop_receiving()
    data = buffer(8 << 20)
    until(lambda: sender.caller.isend(sender.connections[0], data, 8 << 20, None)[0] or None)
    assert (library.broken, library.trouble) == ("", "")


def test_closing_with_sends_in_flight_is_no_break(make: Make) -> None:
    sender = make("2.30", 0, 2, 1)
    data = buffer(64 << 20)
    assert sender.caller.isend(sender.connections[0], data, 64 << 20, None)[1] is not None
    start = time.monotonic()
    sender.close()
    assert time.monotonic() - start < 2
    assert sender.library.broken == ""


def test_a_peer_that_aborts_is_noticed_although_nothing_follows(make: Make) -> None:
    sender = make("2.27", 0, 2, 1, receives=False)
    sender.send(0, 100, None)  # into the kernel
    sender.stop_receiving()
    assert until(lambda: 1 if sender.library.broken else None)
    assert "Connection reset by peer" in sender.library.broken


@pytest.mark.slow
def test_a_peer_that_ends_is_no_break(make: Make) -> None:
    sender = make("2.30", 0, 2, 1)
    sender.send(0, 100, None)
    until(lambda: 1 if sender.received_sizes else None)
    sender.stop_receiving()
    time.sleep(3)
    assert sender.library.broken == ""


def test_acknowledgements_of_an_earlier_job_do_not_count(make: Make) -> None:
    sender = make("2.30", 1, 2, 1)
    sender.library.set_buckets([BUCKET])
    sender.reduce(0, BUCKET)
    place = NcclPlace(1, 2, LOOPBACK, "lo")
    sender.library.begin(place, channels=1, slicing=sender.slicing, incarnation=2)
    time.sleep(0.05)
    assert sender.library.count(0, 0) == (0, 0)


def sockets_to(port: int) -> list[socket.socket]:
    """Return this process's connections to a port, which stay the plugin's."""
    sockets = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            connection = socket.socket(fileno=os.dup(int(entry)))
            if connection.family == socket.AF_INET and connection.getpeername()[1] == port:
                sockets.append(connection)
    return sockets


def unacknowledged(connection: socket.socket) -> int:
    return int(struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0])


def test_bytes_that_wait_in_the_kernel_are_not_acknowledged(make: Make) -> None:
    """The third of three equal sends is tagged, and blocks in the middle."""
    sender = make("2.30", 1, 2, 2, receives=False)
    filled, tagged = (sockets_to(port)[0] for port in sender.ports)
    for connection in (filled, tagged):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    data = buffer(8 << 20)
    sender.caller.isend(sender.connections[0], data, 8 << 20, None)
    time.sleep(0.2)
    third = unacknowledged(filled) * 2 // 5 // 4 // 64 * 64
    sender.library.set_buckets([bucket := NcclBucket(address(0), 4 * third, 4, 0, 1)])
    ops = sender.collective(0, TracedCollective(bucket.elements, "ncclFloat32", 1))
    for send in list(sender.slicing.sends(range(bucket.elements), 4, 2, 1))[:3]:
        step = sender.caller.proxy_step(ops[0], send.step)
        sender.caller.isend(sender.connections[1], data, 4 * len(send.where), step)
    time.sleep(0.2)
    assert unacknowledged(tagged) > 8 * third  # more than the plugin has counted
    assert sender.library.count(0, 0) == (4 * third, 0)
