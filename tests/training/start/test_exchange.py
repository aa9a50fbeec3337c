"""Messages between ranks: JSON of bounded size; a rank with another version is named, and runs no code."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from checkmate.training.start import exchange, plans
from checkmate.training.start.exchange import VERSION, ExchangeError
from checkmate.training.start.from_disk import OnDisk
from checkmate.training.start.plans import (
    AfterReset,
    FromNodes,
    NewRun,
    RefusedStart,
    WithoutState,
)
from tests.support.training.rank_processes import RankProcesses


def _exchanged(rank: int, count: int, length: int) -> tuple[list[Any], Any]:
    gathered = exchange.gather({"rank": rank, "text": "é" * rank * length})
    answer = exchange.broadcast(["from", rank, "x" * length] if rank == 1 else None, 1)
    assert count == 3
    return gathered, answer


@pytest.mark.parametrize("length", [0, 1, 4000, 100_000])
def test_messages_arrive_whatever_their_length(ranks: RankProcesses, length: int) -> None:
    for gathered, answer in ranks.run(3, _exchanged, length):
        assert gathered == [{"rank": rank, "text": "é" * rank * length} for rank in range(3)]
        assert answer == ["from", 1, "x" * length]


def _rounds(rank: int, _: int, length: int) -> list[int]:
    """Return how many rounds each message takes. Rank 1 sends one of `length` bytes."""
    took = []
    text = "x" * (length - len('""'))
    with (
        mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as gathers,
        mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcasts,
    ):
        exchange.gather(None)
        took.append(gathers.call_count)
        assert exchange.gather(text if rank == 1 else None) == [None, text]
        took.append(gathers.call_count - took[0])
        assert exchange.broadcast(text, 1) == text
        took.append(broadcasts.call_count)
    return took


def test_a_short_message_takes_one_round(ranks: RankProcesses) -> None:
    """Each takes milliseconds at a restart, while ranks compete for their cores.

    The first message in each process group compares versions before.
    """
    for length in (exchange._ROOM - 1, exchange._ROOM):
        assert ranks.run(2, _rounds, length) == [[2, 1, 1]] * 2
    for length in (exchange._ROOM + 1, exchange._SLOT_BYTES, exchange._SLOT_BYTES + 1):
        assert ranks.run(2, _rounds, length) == [[2, 2, 2]] * 2


def _meets_an_old_version(rank: int, count: int, call: str) -> str:
    """Rank 1 begins as version 7 does: with the mark of its version and a length."""
    if rank == 1:
        mark = torch.tensor([exchange._MAGIC + 7, 2])
        dist.all_gather([torch.empty_like(mark) for _ in range(count)], mark)
        return ""
    with pytest.raises(ExchangeError) as excinfo:
        exchange.gather("here") if call == "gather" else exchange.broadcast("here", 0)
    return str(excinfo.value)


@pytest.mark.parametrize("call", ["gather", "broadcast"])
def test_an_older_version_is_named(ranks: RankProcesses, call: str) -> None:
    error, _ = ranks.run(2, _meets_an_old_version, call)
    assert error == "rank 1: an older version of Checkmate than rank 0's; all ranks need the same one"


def _fails(rank: int, _: int, version: int, size: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(exchange, "VERSION", version)
            patch.setattr(exchange, "_encoded", lambda _: b" " * size)
        try:
            exchange.gather("here")
        except ExchangeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("version", "size", "words"),
    [
        (VERSION - 1, 2, "rank 1: an older version of Checkmate than rank 0's; all ranks need the same one"),
        (
            VERSION + 1,
            2,
            "rank 0, rank 2: an older version of Checkmate than rank 1's; all ranks need the same one",
        ),
        (VERSION, (16 << 20) + 1, "rank 1 has a message of more than 16 MiB"),
        (VERSION, 2, "rank 1 sent a message that is not JSON"),
    ],
)
def test_all_ranks_end_with_the_same_error(ranks: RankProcesses, version: int, size: int, words: str) -> None:
    assert ranks.run(3, _fails, version, size) == [words] * 3


class _Attack:
    """An object that runs a command when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self._file),)


def _attacked(rank: int, _: int, file: Path) -> str:
    data = pickle.dumps(_Attack(file))
    if rank == 1:
        exchange._encoded = lambda _: data  # type: ignore[assignment]
    try:
        exchange.gather(None)
    except ExchangeError as error:
        return str(error)
    return ""


def _attacked_objects(rank: int, count: int, file: Path) -> None:
    dist.all_gather_object([None] * count, _Attack(file) if rank == 1 else None)


def test_a_message_runs_no_code() -> None:
    """Torch's own collective for objects does: that is what it is compared with."""
    with RankProcesses() as fresh, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "made by rank 1"
        assert fresh.run(2, _attacked, file) == ["rank 1 sent a message that is not JSON"] * 2
        assert not file.exists()
        with pytest.raises(AssertionError, match="FileExistsError"):
            fresh.run(2, _attacked_objects, file)
        assert file.exists()


def test_a_plan_survives() -> None:
    common: dict[str, Any] = {"incarnation": 7, "run": "run", "generation": 5, "generation_seen": 4}
    for plan in (
        FromNodes(**common, iteration=41, holders={(0, 1): [2, 3], (1, 0): []}, continued=b"1" * 16),
        NewRun(**common, trouble="iteration 3"),
        AfterReset(**common, discarded=4),
        WithoutState(**common, trouble="why", marks=True),
        RefusedStart(**common, trouble="why"),
    ):
        message = json.loads(json.dumps(plan.message()))
        copy = plans.from_message(message)
        assert (copy, copy.start) == (plan, plan.start)
        assert message.keys() == plans._MESSAGE.keys()
    on_disk = OnDisk((Path("/a/b"), Path("/c")), 9)
    assert OnDisk.from_message(on_disk.message()) == on_disk


@pytest.mark.parametrize(
    "change",
    [
        {"incarnation": 256},
        {"incarnation": True},
        {"holders": [[0]]},
        {"holders": [["a", 1]]},
        {"start": "zz"},
        {"kind": "?"},
        {"start": "A" * 32},
        {"continued": "0" * 31},
        {"iteration": -2},
        {"iteration": 1.0},
        {"run": None},
        {"holders": {}},
        {"more": 1},
    ],
)
def test_a_malformed_plan_is_refused(change: dict[str, Any]) -> None:
    right = FromNodes(incarnation=7, run="run", iteration=41, holders={(0, 1): [2, 3]}).message()
    with pytest.raises(ValueError, match="not a plan: "):
        plans.from_message({**right, **change})
    messages: tuple[Any, ...] = (None, [], {}, {key: value for key, value in right.items() if key != "run"})
    for message in messages:
        with pytest.raises(ValueError, match="not a plan"):
            plans.from_message(message)


def test_malformed_paths_are_refused() -> None:
    messages: tuple[Any, ...] = (None, [], ["a"], {})
    for message in messages:
        with pytest.raises(ValueError, match="must be a generation and paths"):
            OnDisk.from_message(message)
