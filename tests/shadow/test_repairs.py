"""A shadow node asks for bytes that its streams lack, and counts them once they are right."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

import pytest
import torch

from checkmate import state
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.calls import transfer
from checkmate.shadow.logic.group import CallRefused
from checkmate.wire.repair import MAX_BYTES, digest_of
from testbed.small_training import SmallTraining
from tests.support.shadow.world import World
from tests.support.waiting import wait_until

HOLE = 100


class RepairingTraining:
    """A training whose boundary ranks have sent each byte, and can send it again."""

    def __init__(self, here: World, training: SmallTraining) -> None:
        self.here, self.training = here, training
        self.history = dict.fromkeys(training.layouts, b"")
        send, part = training.send, training.part

        def keep_and_send(buckets: Mapping[int, torch.Tensor]) -> None:
            self._keep(buckets)
            send(buckets)

        training.send = keep_and_send  # type: ignore[method-assign]
        training.part = lambda position: self._with_progress(part(position))  # type: ignore[method-assign]

    def poll(self, position: int = 0, *repaired: pb.RepairedRange, **fields: object) -> list[pb.MissingRange]:
        """Ask node 0, as the rank at a position of the ring, what is missing."""
        part = self.training.author(position)
        part.iteration = -1
        part.repair.CopyFrom(pb.RepairTalk(repaired=repaired))
        for name, value in fields.items():
            setattr(part, name, value)
        reply = transfer.take(self.here.nodes[0].node, part, True, "127.0.0.1")
        assert reply is not None and reply.iteration == -1
        return list(reply.missing)

    def missing(self, position: int = 0) -> pb.MissingRange:
        """Ask until something is missing."""
        ranges: list[pb.MissingRange] = []

        def ask() -> bool:
            ranges.extend(self.poll(position))
            return bool(ranges)

        wait_until(ask, "a request")
        (missing,) = ranges
        return missing

    def send_again(self, missing: pb.MissingRange, side: int = 0) -> pb.RepairedRange:
        """Send what was asked for, and all behind it, and return what tells of it."""
        key = (2 * self.training.group + side, missing.channel, missing.shard)
        data = self.history[key]
        self.training.copies.send_tagged(
            key, self.training.incarnation, missing.missing, data[missing.missing :]
        )
        return pb.RepairedRange(
            channel=missing.channel,
            shard=missing.shard,
            start=missing.start,
            stop=missing.stop,
            digest=digest_of(data[missing.start : missing.stop]),
        )

    def tell(self, repaired: pb.RepairedRange, until: Callable[[], bool], position: int = 0) -> None:
        """Tell of a repair until something has become of it: the bytes may be still on their way."""

        def has_told() -> bool:
            self.poll(position, repaired)
            return until()

        wait_until(has_told, "what a repair leads to")

    def _keep(self, buckets: Mapping[int, torch.Tensor]) -> None:
        for key, layout in self.training.layouts.items():
            for piece in layout.pieces:
                where = piece.where
                data = bytes(state.bytes_of(buckets[piece.bucket]))
                self.history[key] += data[where.start * 4 : where.stop * 4]

    def _with_progress(self, part: pb.RecordPart) -> pb.RecordPart:
        if part.position in (0, self.training.ranks - 1):
            part.progress.trained = self.training.iteration
            part.progress.repairs_from = self.training.first
        return part


@pytest.fixture
def repairing() -> Iterator[Callable[..., RepairingTraining]]:
    """Yield a function that starts a world, and a training of it."""
    with ExitStack() as stack:

        def start(**kwargs: object) -> RepairingTraining:
            here = World(stack, **kwargs)
            training = RepairingTraining(here, here.started())
            training.training.iterate()
            here.stepped(0)
            return training

        yield start


def lose(training: RepairingTraining, key: tuple[int, int, int] = (0, 0, 0)) -> None:
    """Lose some bytes in the middle of the next iteration of a stream."""
    training.here.copies.lose(0, HOLE, key)
    training.training.iterate()


def hold_of(training: RepairingTraining) -> pb.HoldStatus:
    return training.here.status(0).holds[0]


def test_what_is_lost_is_asked_for_until_it_is_right(repairing: Callable[..., RepairingTraining]) -> None:
    training = repairing(lossless=False)
    lose(training)
    training.training.iterate()
    nbytes = training.training.layouts[0, 0, 0].nbytes
    missing = training.missing()
    assert (missing.missing, missing.channel, missing.shard) == (nbytes, 0, 0)
    assert missing.stop <= 2 * nbytes
    assert not training.poll()  # not again at once
    repaired = training.send_again(missing)
    time.sleep(0.2)
    assert hold_of(training).stepped == 0  # all has come, but nobody has said that it is right
    assert not training.poll(0, repaired)
    training.here.stepped(2)
    hold = hold_of(training)
    assert hold.live and not hold.trouble
    assert (hold.repairs, hold.repair_bytes >= missing.stop - missing.missing) == (1, True)
    assert training.here.status(0).holds[0].stepped == 2


def test_the_other_side_is_asked_for_its_own(repairing: Callable[..., RepairingTraining]) -> None:
    training = repairing(lossless=False)
    lose(training, (1, 0, 0))
    last = training.training.ranks - 1
    missing = training.missing(last)
    assert not training.poll(0)
    training.tell(training.send_again(missing, side=1), lambda: hold_of(training).stepped == 1, last)


def test_a_request_that_was_lost_is_repeated(repairing: Callable[..., RepairingTraining]) -> None:
    training = repairing(lossless=False)
    lose(training)
    first = training.missing()
    again = training.missing()
    assert (again.start, again.missing, again.stop) == (first.start, first.missing, first.stop)


def test_other_bytes_are_a_gap(repairing: Callable[..., RepairingTraining]) -> None:
    """A digest that is not that of what has come: nothing of it is stepped, and the shard joins again."""
    training = repairing(lossless=False)
    lose(training)
    repaired = training.send_again(training.missing())
    repaired.digest = bytes(16)
    training.tell(repaired, lambda: not hold_of(training).live)
    assert "differs from what has come" in hold_of(training).trouble
    assert hold_of(training).stepped == 0


def test_what_the_rank_has_dropped_is_a_gap(repairing: Callable[..., RepairingTraining]) -> None:
    training = repairing(lossless=False)
    lose(training)
    training.training.first = 2  # for what records say of repairs alone
    part = training.training.part

    def later(position: int) -> pb.RecordPart:
        training.training.first = 0
        record = part(position)
        if record.HasField("progress"):
            record.progress.repairs_from = 2
        return record

    training.training.part = later  # type: ignore[method-assign]
    training.training.iterate()
    wait_until(lambda: not hold_of(training).live, "a gap")
    assert "does not have them any more" in hold_of(training).trouble


def test_without_repair_nothing_is_asked_for(repairing: Callable[..., RepairingTraining]) -> None:
    training = repairing()
    lose(training)
    wait_until(lambda: bool(training.poll()) or not hold_of(training).live, "a gap")
    assert "not come" in hold_of(training).trouble and not hold_of(training).repairs


def repaired_range(start: int = 0, stop: int = 10, digest: bytes = bytes(16)) -> pb.RepairedRange:
    return pb.RepairedRange(start=start, stop=stop, digest=digest)


@pytest.mark.parametrize(
    ("position", "repaired", "why"),
    [
        (1, [], "sends no streams"),
        (7, [], "position"),
        (0, [repaired_range(10, 10)], "bytes 10 to 10"),
        (0, [repaired_range(0, 2 * MAX_BYTES)], "bytes 0 to"),
        (0, [repaired_range(digest=b"short")], "digest of 5 bytes"),
    ],
)
def test_what_cannot_be_true_is_refused(
    repairing: Callable[..., RepairingTraining], position: int, repaired: list[pb.RepairedRange], why: str
) -> None:
    training = repairing(lossless=False)
    with pytest.raises(CallRefused, match=why):
        training.poll(position, *repaired)
    assert hold_of(training).live


def test_what_nobody_has_asked_for_changes_nothing(repairing: Callable[..., RepairingTraining]) -> None:
    """Nor do another start's questions, and digests of streams that the node does not have."""
    training = repairing(lossless=False)
    assert not training.poll(
        0, repaired_range(), pb.RepairedRange(channel=9, shard=9, stop=1, digest=bytes(16))
    )
    lose(training)
    time.sleep(0.2)
    assert not training.poll(0, start=b"another start...")
    missing = training.missing()
    training.poll(0, repaired_range(missing.start, missing.stop - 1))
    assert hold_of(training).live
    training.tell(training.send_again(missing), lambda: hold_of(training).stepped == 1)
