"""The errors of scripts are found in what torchrun and ranks have written, and told without noise."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from topologies.describe.topology import LabError, load
from topologies.logs import LogLine
from topologies.training.attached import LabTraining
from topologies.training.job_processes import JobProcesses, script_errors

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    checkmate.protect(model, optimizer)
{}
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
checkmate: a line of the log
"""


@pytest.mark.parametrize("rank", ["", "[rank0]: "])
@pytest.mark.parametrize(
    "error",
    [
        "ValueError: no",
        "checkmate.training.errors.SessionError: no",
        "checkmate.optim.supported.UnsupportedOptimizer: Adafactor can't be followed",
        "checkmate.tagger.errors.TaggerUnavailable: no",
        "KeyboardInterrupt",
    ],
)
def test_an_error_is_found_whatever_its_class_is_called(rank: str, error: str) -> None:
    assert script_errors(TRACEBACK.format(rank + error)) == [error]


REFUSAL = "checkmate.training.errors.RefusedError: a hook changes p0: use protect's extra"
BROKEN = "checkmate.ring.place.RingError: rank 1 (h1), channel 0, to rank 2 (h2): Broken pipe"
TIMED_OUT = "checkmate.ring.place.RingTimeout: rank 1 (h1) timed out waiting for rank 0 (h0) on channel 0"


def write_error(folder: Path, node: str, error: str, prefix: str = "") -> None:
    """Append a traceback that ends with an error to a host's log, as a rank on it writes it."""
    with (folder / f"{node}.log").open("a") as file:
        file.writelines(f"{prefix}{line}\n" for line in TRACEBACK.format(error).splitlines()[:-3])
        file.write(
            "E1127 torch/distributed/elastic: failed (exitcode: 1) local_rank: 0 (pid: 7) of binary: x\n"
        )


class Followed:
    """A training in a lab that is only files: what is shown and told of it."""

    def __init__(self, folder: Path, topology: str) -> None:
        lab = SimpleNamespace(name="mine", directory=folder, topology=load(topology), dead_switches=list)
        self.folder = folder
        self.lines_shown: list[str] = []
        self.alarms: list[str] = []
        self.news: list[str] = []
        self.ticks: list[list[tuple[str, str, str]]] = []
        ranks = {"rank0": SimpleNamespace(error_text=lambda: "", children=lambda: [4711])}
        job: Any = SimpleNamespace(crew=SimpleNamespace(lab=lab), ranks=ranks, finish=self._finish)
        self.training = LabTraining(job)

    def run(self, *ticks: list[tuple[str, str, str]]) -> None:
        """Follow a training that writes some tracebacks (host, prefix, error), a list at a time."""
        self.ticks += ticks
        self.training.follow(self._show, self.news.append, self.alarms.append)

    def _show(self, line: LogLine) -> None:
        self.lines_shown.append(line.text)

    def _finish(self, seconds: float, tick: Any) -> None:
        while self.ticks:
            for node, prefix, error in self.ticks.pop(0):
                write_error(self.folder, node, error, prefix)
            tick()


def test_errors_of_checkmate_are_told_at_once_on_whichever_rank(tmp_path: Path) -> None:
    lab = Followed(tmp_path, "single_tor")
    attempt = [
        ("rank2", "[rank2]: ", REFUSAL),
        ("rank0", "[rank0]: ", BROKEN),
        ("rank1", "[rank1]: ", TIMED_OUT),
        ("rank3", "[rank3]: ", REFUSAL),
    ]
    state = ("rank1", "", "checkmate.state.StateError: extra(): a socket can't be stored")
    text = REFUSAL.partition(": ")[2]
    twice = f"^the script has failed twice in the same way: RefusedError: {re.escape(text)}$"
    with pytest.raises(LabError, match=twice):  # no restart ends it
        lab.run(attempt, [state], [("rank3", "[rank3]: ", "ValueError: it sleeps")], attempt)
    assert lab.alarms == [
        f"rank 2: RefusedError: {text}",
        "rank 1: StateError: extra(): a socket can't be stored",
        "rank 3: ValueError: it sleeps",
        "rank 2: RefusedError as above, 2 times so far",
    ]
    assert not lab.lines_shown, "rank 0 has only tracebacks"


def test_ranks_of_a_host_are_told_apart_and_an_error_is_not_shown_twice(tmp_path: Path) -> None:
    lab = Followed(tmp_path, "two_hosts")
    (tmp_path / "host0.log").write_text("2026-11-23 00:02:16 checkmate: a line of the log\n")
    second_error = REFUSAL.replace("a hook", "a loss")
    lab.run(
        [("host0", "[rank1]: ", REFUSAL), ("host0", "[rank0]: ", second_error), ("host1", "", second_error)]
    )
    assert [line.partition(" changes")[0] for line in lab.alarms] == [
        "rank 1: RefusedError: a hook",
        "rank 0: RefusedError: a loss",
    ]
    assert lab.lines_shown == ["2026-11-23 00:02:16 checkmate: a line of the log"]


FOLLOWED = "2026-11-23 00:02:16 checkmate: shadow nodes follow, from iteration 3 on\n"


@pytest.mark.parametrize("failed", [False, True])
def test_the_process_to_kill_is_named_unless_it_has_failed_and_the_end_is_told(
    tmp_path: Path, failed: bool
) -> None:
    lab = Followed(tmp_path, "single_tor")
    (tmp_path / "rank0.log").write_text(FOLLOWED)
    lab.run([("rank1", "[rank1]: ", REFUSAL)] if failed else [])
    *processes, end = lab.news
    assert end == "training has ended; the lab stays, until `checkmate lab down mine`"
    assert processes == ([] if failed else ["rank0 is process 4711; after kill -9 4711, training resumes"])


LOST_CONNECTION = "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes"


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        (([REFUSAL], [LOST_CONNECTION], [LOST_CONNECTION]), f"rank0 failed with: {REFUSAL}"),
        (([REFUSAL], [BROKEN], [BROKEN]), f"rank0 failed with: {REFUSAL}"),
        (([REFUSAL, BROKEN], [BROKEN, REFUSAL], [BROKEN]), f"rank0, rank1 failed with: {REFUSAL}"),
        (([BROKEN], [TIMED_OUT], []), f"rank0 failed with: {BROKEN}; rank1 failed with: {TIMED_OUT}"),
        (([REFUSAL, "ValueError: no"], [BROKEN], []), "rank0 failed with: ValueError: no"),
    ],
)
def test_the_final_message_has_what_caused_the_others(errors: tuple[list[str], ...], message: str) -> None:
    job = JobProcesses.__new__(JobProcesses)
    job.shadows = {}
    job.ranks = {
        f"rank{number}": SimpleNamespace(  # type: ignore[misc]
            error_text=lambda own_errors=own_errors: "".join(TRACEBACK.format(error) for error in own_errors),
            process=SimpleNamespace(poll=lambda: 1),
        )
        for number, own_errors in enumerate(errors)
    }
    with pytest.raises(LabError) as excinfo, job.explained():
        raise LabError("torchrun has failed")
    assert str(excinfo.value) == message
    with pytest.raises(LabError, match="^a shadow node has failed; rank0"), job.explained():
        job.ranks["rank2"].process = SimpleNamespace(poll=lambda: None)  # type: ignore[assignment]
        job.shadows["shadow0"] = SimpleNamespace(running=False)  # type: ignore[assignment]
        raise LabError("a shadow node has failed")
