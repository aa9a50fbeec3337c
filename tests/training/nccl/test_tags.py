"""What a reducer over NCCL does when tagging ends, when a connection breaks, and when NCCL fails."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pytest
import torch

from checkmate.ring.place import RingError
from checkmate.training.gradients.nccl_reducer import NcclReducer
from checkmate.wire.layout import Layout, make_layout
from checkmate.wire.parameter import Parameter

STREAMS = {(0, 0): 24, (1, 0): 16}


@dataclass
class ToldTags:
    """The plugin's answers."""

    trouble: str = ""
    broken: str = ""
    acknowledged: int = 0

    def count(self, channel: int, shadow_id: int) -> tuple[int, int]:
        """Return the same number for each stream."""
        return self.acknowledged, self.acknowledged


@dataclass
class CountingCommunicator:
    """A communicator that counts calls."""

    device = torch.device("cpu")
    stream = None
    fails: bool = False
    calls: list[str] = field(default_factory=list)

    def all_reduce(self, tensor: torch.Tensor, *, average: bool) -> None:
        """Count a launch."""
        if self.fails:
            raise RuntimeError("NCCL error 6")
        self.calls.append(f"{len(tensor)} {average}")

    def synchronize(self) -> None:
        """Do nothing."""

    def abort(self) -> None:
        """Count it."""
        self.calls.append("abort")

    def close(self) -> None:
        """Do nothing."""


def layout_of() -> Layout:
    return make_layout([Parameter(f"p{i}", (size,), "float32") for i, size in enumerate((3, 7))], 1, 4)


class OpenReducer:
    """A reducer in use."""

    def __init__(self, *, required: bool = False) -> None:
        self.tags, self.communicator = ToldTags(), CountingCommunicator()
        self.reduced: list[int] = []
        self.errors: list[RingError] = []
        self.reducer = NcclReducer(
            layout_of(), self.communicator, self.tags, STREAMS, "rank 3 (gpu3)", required=required
        )
        self.reducer.open(self.reduced.append, self.errors.append)

    def iterate(self) -> None:
        for index in range(2):
            self.reducer.submit(index)


def test_each_bucket_is_launched_once_and_ends_follow_from_launches() -> None:
    session = OpenReducer()
    assert session.reducer.ends() == {(0, 0): 0, (1, 0): 0}
    session.iterate()
    session.iterate()
    assert session.communicator.calls == ["7 True", "3 True"] * 2
    assert session.reduced == [0, 1] * 2
    assert session.reducer.ends() == {(0, 0): 48, (1, 0): 32}
    session.tags.acknowledged = 47
    assert not session.reducer.is_acknowledged(session.reducer.ends())
    session.tags.acknowledged = 48
    assert session.reducer.is_acknowledged(session.reducer.ends())


def test_training_continues_when_tagging_ends(caplog: pytest.LogCaptureFixture) -> None:
    session = OpenReducer()
    session.iterate()
    session.tags.trouble = "step 3: NCCL sends 8 bytes, and not 16"
    with caplog.at_level(logging.WARNING, "checkmate"):
        assert session.reducer.is_acknowledged(session.reducer.ends())
        session.iterate()
        assert session.reducer.is_acknowledged(session.reducer.ends())
    (message,) = caplog.messages
    assert message.startswith("rank 3 (gpu3): gradients are not tagged any more: step 3: NCCL sends 8 bytes")
    assert not session.errors


def test_the_end_of_tagging_is_an_error_if_tags_are_required() -> None:
    session = OpenReducer(required=True)
    session.iterate()
    session.tags.trouble = "step 3"
    with pytest.raises(RingError, match=r"rank 3 \(gpu3\): gradients are not tagged any more: step 3"):
        session.reducer.submit(0)


def test_no_record_follows_a_broken_connection() -> None:
    session = OpenReducer()
    session.iterate()
    session.tags.trouble = session.tags.broken = "the connection to 10.0.0.2 broke"
    session.tags.acknowledged = 1000
    for _ in range(2):
        assert not session.reducer.is_acknowledged(session.reducer.ends())
    assert session.communicator.calls[2:] == ["abort"]
    assert [str(error) for error in session.errors] == ["rank 3 (gpu3): the connection to 10.0.0.2 broke"]
    with pytest.raises(RingError, match="the connection to 10"):
        session.reducer.submit(0)


def test_an_error_of_nccl_is_one_for_good() -> None:
    session = OpenReducer()
    session.communicator.fails = True
    with pytest.raises(RingError, match=r"rank 3 \(gpu3\): NCCL: NCCL error 6"):
        session.reducer.submit(0)
    session.communicator.fails = False
    with pytest.raises(RingError, match="NCCL has failed before"):
        session.reducer.submit(0)
    assert session.reducer.failed


def test_without_a_plugin_nothing_is_awaited() -> None:
    reducer = NcclReducer(layout_of(), CountingCommunicator(), None, {}, "rank 0")
    reducer.open(lambda index: None, lambda error: None)
    reducer.submit(0)
    assert reducer.ends() == {}
    assert reducer.is_acknowledged({})
