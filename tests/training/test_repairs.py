"""A rank sends again what shadow nodes lack, whatever becomes of the next rank. Over real tagged sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from checkmate.ring.connections import Ring
from checkmate.ring.place import RingPlace
from checkmate.rpc import shadow_pb2 as pb
from checkmate.tagger import TaggedSocket, Tagger
from checkmate.training.gradients.repairs import SENT_AGAIN_MOST, Repairs
from checkmate.wire.repair import MAX_BYTES, digest_of
from tests.support.labs.end_hosts import needs_root
from tests.support.waiting import wait_until

pytestmark = needs_root

FIRST_ID = 3
NBYTES = 1 << 20
STREAM = (1, 2)


@dataclass
class RepairingRank:
    """A rank whose next one reads what it is sent again, as long as `reads` is set."""

    repairs: Repairs
    next_rank: socket.socket
    previous_rank: socket.socket
    reads: threading.Event
    received: bytearray = field(default_factory=bytearray)
    answers: list[pb.RepairedRange] = field(default_factory=list)

    def train(self, iterations: int = 1) -> None:
        for number in range(iterations):
            self.repairs.keep(STREAM[0], FIRST_ID + STREAM[1], memoryview(bytes([number]) * NBYTES))

    def ask(self, start: int, missing: int, stop: int, node: int = 0, shard: int = STREAM[1]) -> None:
        missing_range = pb.MissingRange(
            channel=STREAM[0], shard=shard, start=start, missing=missing, stop=stop
        )
        self.repairs.ask(node, missing_range, self.answers.append)

    def read(self) -> None:
        while self.reads.wait(10):
            try:
                data = self.next_rank.recv(1 << 16)
            except OSError:
                return
            if not data:
                return
            self.received += data


@pytest.fixture(scope="module")
def tagger() -> Iterator[Tagger]:
    with Tagger.attach() as attached:
        yield attached


@pytest.fixture
def rank(tagger: Tagger) -> Iterator[RepairingRank]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        outgoing = socket.socket()
        sender = TaggedSocket(tagger, outgoing, 0, 7)
        outgoing.connect(server.getsockname())
        next_rank, _ = server.accept()
        previous_rank = socket.create_connection(server.getsockname())
        incoming, _ = server.accept()
    place = RingPlace(0, ["127.0.0.1", "127.0.0.1"], 1)
    ring = Ring(place, [sender], [incoming])
    reads = threading.Event()
    reads.set()
    repairing = RepairingRank(Repairs(ring, {STREAM: NBYTES}, 10, FIRST_ID), next_rank, previous_rank, reads)
    thread = threading.Thread(target=repairing.read)
    thread.start()
    yield repairing
    repairing.repairs.close()
    previous_rank.close()
    ring.close()
    reads.set()
    thread.join()
    next_rank.close()


def test_what_is_missing_is_sent_and_its_digest_told(rank: RepairingRank) -> None:
    rank.train(3)
    assert rank.repairs.oldest == 10
    rank.ask(NBYTES - 10, NBYTES, 2 * NBYTES)
    wait_until(lambda: bool(rank.answers), "an answer")
    (repaired,) = rank.answers
    expected = bytes(10) + bytes([1]) * NBYTES
    assert (repaired.start, repaired.stop, repaired.digest) == (NBYTES - 10, 2 * NBYTES, digest_of(expected))
    assert (repaired.channel, repaired.shard) == STREAM
    wait_until(lambda: rank.received == expected[10:], "what was sent again")


def test_what_is_not_its_own_is_not_sent_and_said_once(
    rank: RepairingRank, caplog: pytest.LogCaptureFixture
) -> None:
    rank.train()
    for _ in range(5):
        rank.ask(0, 0, 5, shard=9)
        rank.ask(0, 6, 5)
        rank.ask(0, 0, 2 * MAX_BYTES)
    rank.ask(0, NBYTES, NBYTES + 1)  # not sent yet
    rank.ask(0, 0, 5)
    wait_until(lambda: bool(rank.answers), "an answer")
    assert len(rank.answers) == 1
    assert caplog.text.count("shadow node 0 asks for bytes that this rank has not sent") == 1


def test_a_node_that_asks_without_end_gets_no_more(
    rank: RepairingRank, caplog: pytest.LogCaptureFixture
) -> None:
    rank.train()
    most = SENT_AGAIN_MOST * NBYTES + MAX_BYTES
    for number in range(most // NBYTES + 20):
        rank.ask(0, 0, NBYTES)
        wait_until(lambda n=number: len(rank.answers) > n or "can have lost" in caplog.text, "an answer")  # type: ignore[misc]
    assert most // NBYTES <= len(rank.answers) <= most // NBYTES + 2
    assert caplog.text.count("more than it can have lost") == 1
    before = len(rank.answers)
    rank.ask(0, 0, NBYTES, node=1)
    wait_until(lambda: len(rank.answers) > before, "another node's")


def test_a_next_rank_that_stands_for_a_while_ends_nothing(rank: RepairingRank) -> None:
    rank.train(20)
    rank.reads.clear()
    rank.ask(0, 0, 15 * NBYTES)
    time.sleep(3.0)  # longer than it waits for the acknowledgement
    assert rank.repairs.oldest == 10
    rank.reads.set()
    wait_until(lambda: len(rank.received) >= 15 * NBYTES, "all of it")
    rank.ask(0, 0, 10)
    wait_until(lambda: any(answer.stop == 10 for answer in rank.answers), "an answer")


def test_a_next_rank_that_takes_nothing_holds_up_no_end(rank: RepairingRank) -> None:
    rank.train(20)
    rank.reads.clear()
    rank.ask(0, 0, 15 * NBYTES)
    time.sleep(0.3)
    before = time.monotonic()
    rank.repairs.close()
    assert time.monotonic() - before < 1.0


def test_a_connection_that_breaks_ends_repairs_and_says_so(
    rank: RepairingRank, caplog: pytest.LogCaptureFixture
) -> None:
    rank.train()
    rank.next_rank.shutdown(socket.SHUT_RDWR)
    rank.next_rank.close()
    wait_until(lambda: rank.ask(0, 0, 100) or rank.repairs.oldest is None, "a broken connection")  # type: ignore[func-returns-value]
    assert caplog.text.count("lost copies can't be sent again from now on") == 1


def test_the_end_waits_for_the_rank_before(rank: RepairingRank) -> None:
    threading.Timer(0.5, rank.previous_rank.close).start()
    before = time.monotonic()
    rank.repairs.linger(20.0)
    assert 0.4 < time.monotonic() - before < 10
