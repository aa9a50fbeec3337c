"""What `lab train` tells of ranks' lines: errors, deaths, and when no restart will help."""

from __future__ import annotations

import pytest

from topologies.logs import LogLine
from topologies.training.notices import Notices


def error(text: str, node: str = "host0") -> LogLine:
    return LogLine(node, True, text)


NCCL = "[rank0]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94,"
REFUSAL = "checkmate.training.errors.RefusedError: no cats over NCCL"


@pytest.mark.parametrize(
    ("text", "notice"),
    [
        (f"[rank2]: {REFUSAL}", "rank 2: RefusedError: no cats over NCCL"),
        (REFUSAL, "host 0: RefusedError: no cats over NCCL"),
        ("[rank0]: ValueError: the cat sleeps", "rank 0: ValueError: the cat sleeps"),
        ("KeyError: 'cat'", "host 0: KeyError: 'cat'"),
        ("[rank0]: AssertionError", "rank 0: AssertionError"),
        ("[rank0]: torch.OutOfMemoryError: CUDA", "rank 0: OutOfMemoryError: CUDA"),
        (
            "E1127 12:00:00.1 7 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: -9) "
            "local_rank: 0 (pid: 71) of binary: python",
            "host 0: process 71 was ended by SIGKILL",
        ),
        (
            "x failed (exitcode: -35) local_rank: 0 (pid: 71) of binary: y",
            "host 0: process 71 was ended by signal 35",
        ),
        ("[rank0]: Traceback (most recent call last):", None),
        ("[rank0]:   File 'train.py', line 7, in main", None),
        ("[rank0]: checkmate.ring.place.RingError: rank 1 is gone", None),
        ("[rank0]: checkmate.ring.place.RingTimeout: rank 1 is silent", None),
        (f"{NCCL} remote process exited or there was a network error, NCCL version 2.28.9", None),
        (f"{NCCL} unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9", None),
        (
            f"{NCCL} invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9",
            "rank 0: DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, invalid usage "
            "(run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9",
        ),
        ("[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer", None),
        ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", None),
        ("Iteration: 5", None),
    ],
)
def test_errors_and_deaths_are_told(text: str, notice: str | None) -> None:
    assert Notices().of(error(text)) == notice
    assert Notices().of(LogLine("host0", False, text)) is None


def test_an_error_is_told_once_in_a_start_of_training() -> None:
    notices = Notices()
    lines = [f"[rank{rank}]: ValueError: no" for _ in range(2) for rank in range(3)]
    texts = [notices.of(error(line)) for line in lines]
    assert texts == ["rank 0: ValueError: no", "", "", "rank 0: ValueError as above, 2 times so far", "", ""]


def begin(notices: Notices, iteration: int) -> None:
    notices.of(
        error(f"2026-11-22 15:10:02 checkmate: resumed from the nodes: iteration {iteration} comes next (x)")
    )


def fail(notices: Notices, *texts: str) -> str:
    """Let the script of a host end with an error; return what has repeated."""
    for text in texts:
        notices.of(error(text))
    notices.of(error(f"E1127 torch/distributed/elastic: {FAILED}"))
    return notices.repeated


FAILED = "failed (exitcode: 1) local_rank: 0 (pid: 71) of binary: python"
BOOM = "[rank0]: RuntimeError: CUDA error: unspecified launch failure"


@pytest.mark.parametrize("text", [f"[rank0]: {REFUSAL}", "[rank0]: ValueError: no"])
def test_the_same_error_twice_ends_training(text: str) -> None:
    notices = Notices()
    begin(notices, 4)
    assert not fail(notices, text, text.replace("rank0", "rank1"))
    begin(notices, 4)
    assert fail(notices, text) == text.rpartition("]: ")[2].removeprefix("checkmate.training.errors.")


def test_a_refusal_ends_training_wherever_it_comes_again() -> None:
    notices = Notices()
    assert not fail(notices, f"[rank0]: {REFUSAL}")
    begin(notices, 9)
    assert fail(notices, f"[rank0]: {REFUSAL}")


def test_an_error_after_more_iterations_is_not_the_same() -> None:
    notices = Notices()
    for iteration in (4, 7, 11):
        begin(notices, iteration)
        assert not fail(notices, BOOM)
    begin(notices, 11)
    assert not fail(notices, "[rank0]: ValueError: another")
    assert fail(notices, BOOM)


def test_nodes_that_are_away_may_come_back() -> None:
    notices = Notices()
    for _ in range(3):
        begin(notices, 4)
        assert not fail(notices, "[rank0]: checkmate.training.errors.RestoreError: no node has shard 1")


def test_errors_that_a_script_survives_end_nothing() -> None:
    notices = Notices()
    texts = [notices.of(error("ValueError: a bad row")) for _ in range(50)]
    assert len([text for text in texts if text]) == 3
    assert not notices.repeated


def test_checkmate_is_heard() -> None:
    notices = Notices()
    notices.of(LogLine("host0", False, "iteration 1: loss 2"))
    assert not notices.has_checkmates_lines
    begin(notices, 0)
    assert notices.has_checkmates_lines


def test_a_script_that_does_not_fit_the_state_ends_the_second_time() -> None:
    """Nodes that are away may be back later; another model stays another model."""
    failure = "failed (exitcode: 1) local_rank: 0 (pid: 71) of binary: python"
    for text, final in (
        ("the shadow nodes hold another model: it has w [2] float32 in place of w [4] float32", True),
        ("rank 0: the state has a scheduler, a StepLR: pass scheduler= to checkmate.restore", True),
        ("no shadow node answers", False),
    ):
        notices = Notices()
        for _ in range(2):
            assert not notices.repeated
            notices.of(error(f"[rank0]: checkmate.training.start.all_ranks.RestoreError: {text}"))
            notices.of(error("[rank0]: x"))
            notices.of(error(failure))
        assert bool(notices.repeated) is final, text
        assert notices.has_checkmates_lines  # an error of Checkmate's is a line of Checkmate's
