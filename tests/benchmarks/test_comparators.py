"""Each comparator recovers what it promises: a broken one would flatter Checkmate."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.comparators.checkfreq import CheckFreq, Frequency, interval_for
from benchmarks.comparators.gemini import Copy, holder_of, newest_of, peers
from benchmarks.comparators.system import CheckpointFolders
from tests.benchmarks.comparing import SYSTEMS, train, train_with_late_copies
from tests.support.training.rank_processes import RankProcesses

_UNTIL = 9


@pytest.fixture(scope="module")
def reference(ranks: RankProcesses, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final state without an interruption."""
    folder = str(tmp_path_factory.mktemp("reference"))
    (_, first), (_, second) = ranks.run(2, train, "none", folder, 1, _UNTIL)
    assert first != second, "ranks have different buffers"
    return str(first)


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize(("interval", "first"), [(1, 5), (3, 3), (20, 0)])
def test_a_job_resumes_with_its_newest_checkpoint(
    ranks: RankProcesses,
    reference: str,
    tmp_path: Path,
    name: str,
    interval: int,
    first: int,
) -> None:
    expected = 0 if name == "none" else first
    ranks.run(2, train, name, str(tmp_path), interval, 5)
    (resumed, state), _ = ranks.run(2, train, name, str(tmp_path), interval, _UNTIL)
    assert (resumed, state) == (expected, reference)


@pytest.mark.parametrize("name", ["CheckFreq", "PCcheck"])
def test_a_copy_in_the_background_is_of_one_iteration(
    ranks: RankProcesses, reference: str, tmp_path: Path, name: str
) -> None:
    ranks.run(2, train_with_late_copies, name, str(tmp_path), 2, 5)
    (resumed, state), _ = ranks.run(2, train, name, str(tmp_path), 1, _UNTIL)
    assert (resumed, state) == (4, reference), "the next forward changes buffers while the state is copied"


@pytest.mark.parametrize("name", ["Gemini", "Gemini, blocking"])
def test_gemini_recovers_a_host_from_its_peer(
    ranks: RankProcesses, reference: str, tmp_path: Path, name: str
) -> None:
    ranks.run(2, train, name, str(tmp_path), 1, 5)
    for file in (tmp_path / "memory0").iterdir():
        file.unlink()
    (resumed, state), _ = ranks.run(2, train, name, str(tmp_path), 1, _UNTIL)
    assert (resumed, state) == (5, reference)
    for host in ("memory0", "memory1"):
        for file in (tmp_path / host).iterdir():
            file.unlink()
    assert ranks.run(2, train, name, str(tmp_path), 1, 1)[0][0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SYSTEMS)
def test_kill_in_the_middle_of_a_checkpoint(reference: str, tmp_path: Path, name: str) -> None:
    """A checkpoint that is half written when all processes die is not used; the one before it is complete."""
    killed = 5
    with RankProcesses() as rank_processes, pytest.raises(AssertionError, match="its process ended"):
        rank_processes.run(2, train, name, str(tmp_path), 1, _UNTIL, killed)
    with RankProcesses() as rank_processes:
        (resumed, state), _ = rank_processes.run(2, train, name, str(tmp_path), 1, _UNTIL)
    newest = {"none": 0, "torch.save": killed + 1, "DCP": killed + 1, "Gemini, blocking": killed + 1}
    in_progress = 2 if name == "PCcheck" else 1
    is_lost = (
        name == "lm-resiliency" and resumed == 0
    )  # only ranks that SIGTERM ends first write their memory
    assert is_lost or newest.get(name, killed + 1 - in_progress) <= resumed <= newest.get(name, killed + 1)
    assert state == reference


@given(st.integers(2, 40))
def test_each_rank_has_one_peer_each_way(ranks: int) -> None:
    sends, receives = zip(*(peers(ranks, rank) for rank in range(ranks)), strict=True)
    assert sorted(sends) == sorted(receives) == [*range(ranks)]
    assert all(rank != peer and receives[peer] == rank for rank, peer in enumerate(sends))


def test_gemini_takes_the_newest_iteration_of_which_every_part_is_left() -> None:
    copies = [[Copy(0, 4, 0), Copy(1, 4, 0), Copy(0, 5, 1)], [Copy(1, 5, 1), Copy(1, 4, 0)]]
    assert newest_of(copies) == 5
    assert [holder_of(copies, rank, 5) for rank in (0, 1)] == [0, 1]
    assert newest_of([copies[0], []]) == 4
    assert newest_of([[], copies[1]]) is None


def test_checkfreq_hides_the_writing_behind_iterations() -> None:
    assert interval_for([0.1, 0.1], 0.05, 0.56) == 6
    assert interval_for([1.0], 0.1, 0.2) == 1


def test_checkfreq_saves_less_often_if_that_costs_too_much() -> None:
    frequency = Frequency(profiled=range(2, 4))
    assert [frequency.add_iteration(1.0) for _ in range(4)] == [False, False, False, True]
    frequency.add_checkpoint(0.5, 2.5)
    assert frequency.interval == 2
    for seconds in (1.0, 1.0, 1.0, 1.2):  # nothing, then a tenth more over two iterations
        frequency.add_iteration(seconds)
    assert frequency.interval == 4


def test_checkfreq_does_not_count_its_profile_as_an_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("benchmarks.comparators.checkfreq.time", SimpleNamespace(monotonic=lambda: now))
    system = CheckFreq(CheckpointFolders(Path(), Path(), 0), Frequency(profiled=range(1, 3)))
    system.rank, system._last_step_end = 0, now

    def profile(_: int) -> None:
        nonlocal now
        now += 5.0
        system.frequency.add_checkpoint(0.5, 1.5)

    monkeypatch.setattr(system, "_profile", profile)
    monkeypatch.setattr(system, "_begin", lambda _: None)
    for iteration in range(6):
        now += 1.0
        system.after_step(iteration)
    assert system.frequency.interval == 1
