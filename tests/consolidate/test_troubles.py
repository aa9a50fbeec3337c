"""`consolidate` if nodes can't be reached: it reports that once and plainly, and reports when it is over."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml

from checkmate.cli.consolidate import _print_saved, _waiting
from checkmate.consolidate import checkpoint_folder, disk
from checkmate.consolidate.follow import FollowListener, SavedCheckpoint, _Waiting, follow, take
from checkmate.consolidate.snapshot import SnapshotReader
from checkmate.nodes.standing import Lacking, NoAnswer
from testbed.jobs import job, job_data
from testbed.small_training import RUN
from tests.support.checkpoints import half_way, hidden, mounted
from tests.support.cli import COMMAND
from tests.support.labs.end_hosts import needs_buffers
from tests.support.shadow.consolidated import ConsolidatePlace, kept_in
from tests.support.shadow.world import going_on
from tests.support.waiting import wait_until

pytestmark = needs_buffers


def test_a_time_without_nodes_is_told_when_it_begins_and_when_it_is_over(
    place: Callable[..., ConsolidatePlace], tmp_path: Path
) -> None:
    """Nothing is reported in between, although nodes come back one by one with different messages."""
    here = place(nodes=2, ranks=2)
    here.iterate()
    stopped, messages = threading.Event(), list[str]()
    iterations: list[int] = []
    tries = 0

    class CountingReader(SnapshotReader):
        def source(self):  # type: ignore[no-untyped-def]
            nonlocal tries
            tries += 1
            return super().source()

    def tried_again() -> None:
        before = tries
        wait_until(lambda: tries >= before + 3, "three more attempts")

    with CountingReader(here.job, stopped=stopped) as nodes, ThreadPoolExecutor(1) as pool:
        following = pool.submit(
            follow,
            *(nodes, tmp_path, "torch", 5.0, 1, 5, stopped),
            FollowListener(
                lambda checkpoint: iterations.append(checkpoint.iteration),
                messages.append,
                messages.append,
                lambda: messages.append("over"),
            ),
        )
        try:
            wait_until(lambda: iterations == [0], "the first")
            for node in (0, 1):
                here.world.stop(node)
            wait_until(lambda: messages[-1:] != [] and messages[-1].startswith("no shadow"), "the trouble")
            first = len(messages)
            tried_again()
            for node in (0, 1):
                here.world.start(node)
                tried_again()  # the nodes hold nothing
            (training,) = here.trainings
            training.begin([0, 1])
            with going_on(training):
                wait_until(lambda: messages[-1] == "over", "the end of it")
                wait_until(lambda: len(iterations) > 1, "the next")
        finally:
            stopped.set()
            following.result()
    assert messages[first:] == ["over"]
    assert first <= 2  # an attempt may fall between the two stops
    assert messages[first - 1].startswith("no shadow node of job demo can be reached: shadow node 0 (")
    assert messages[first - 1].count(": can't be reached") == 2


@contextmanager
def following(
    here: ConsolidatePlace, folder: Path, kind: disk.Format, keep: int = 5
) -> Iterator[tuple[list[int], list[str]]]:
    """Run `--every 1` in the background; yield the iterations saved and the messages."""
    stopped, iterations, troubles = threading.Event(), list[int](), list[str]()
    with SnapshotReader(here.job, stopped=stopped) as nodes, ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            follow,
            *(nodes, folder, kind, 10.0, 1, keep, stopped),
            FollowListener(
                lambda checkpoint: iterations.append(checkpoint.iteration),
                troubles.append,
                troubles.append,
            ),
        )
        try:
            yield iterations, troubles
        finally:
            stopped.set()
            running.result()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_what_cant_be_removed_is_told_each_time_and_ends_nothing(
    place: Callable[..., ConsolidatePlace], tmp_path: Path
) -> None:
    """Something is mounted at the remains of a killed writer, and at an old checkpoint."""
    here = place(nodes=2, ranks=2)
    folder = tmp_path / "kept"
    folder.mkdir()
    with half_way(folder / "left", "torch", tmp_path) as killed:
        killed.kill()
    (leftover,) = hidden(folder)
    here.iterate()
    with ExitStack() as mounts:
        mounts.enter_context(mounted(leftover))
        with following(here, folder, "torch", keep=1) as (iterations, troubles):
            wait_until(lambda: iterations == [0], "the first")
            (first,) = kept_in(folder)
            mounts.enter_context(mounted(first, "--bind", str(first)))
            for iteration in (1, 2):
                here.iterate()
                wait_until(lambda: iterations[-1] == iteration, "the next")  # noqa: B023
        with SnapshotReader(here.job) as nodes:
            once = list[str]()
            assert take(nodes, folder / "once.pt", "torch", 10.0, once.append).iteration == 2
    assert iterations == [0, 1, 2]
    assert once == [f"can't clear {leftover}: Device or resource busy"]
    assert troubles.count(f"can't clear {leftover}: Device or resource busy") == 3
    assert troubles.count(f"can't remove {first}: Device or resource busy") == 2
    assert [path.name for path in kept_in(folder)] == [
        checkpoint_folder.checkpoint_path(folder, 1, iteration, "torch").name for iteration in (2, 0)
    ]


def test_a_folder_that_cant_be_looked_into_ends_nothing(
    place: Callable[..., ConsolidatePlace], tmp_path: Path
) -> None:
    here = place(nodes=2, ranks=2)
    here.iterate()
    folder = tmp_path / ("x" * 300)
    with following(here, folder, "torch") as (iterations, troubles):
        for count in (1, 2):
            wait_until(lambda: sum(f"can't list {folder}" in trouble for trouble in troubles) >= count)  # noqa: B023
            here.iterate()
    assert iterations == []
    assert all(trouble.endswith("File name too long") for trouble in troubles)


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_what_was_just_written_is_the_newest_whatever_clocks_say(
    place: Callable[..., ConsolidatePlace], kind: disk.Format, tmp_path: Path
) -> None:
    """The folder has checkpoints of an earlier training, of later iterations and dated tomorrow."""
    here = place(nodes=2, ranks=2)
    here.iterate()
    with following(here, tmp_path, kind, keep=2) as (iterations, _):
        wait_until(lambda: iterations == [0], "the first")
        (first,) = kept_in(tmp_path)
        old = first.with_name(first.name.replace("iteration-00000000", "iteration-00005000"))
        subprocess.run(["cp", "-r", str(first), str(old)], check=True)
        tomorrow = time.time() + 86400
        for path in (old, *old.rglob("*")):
            os.utime(path, (tomorrow, tomorrow))
    here.begin_again("another")
    with following(here, tmp_path, kind, keep=2) as (iterations, troubles):
        for iteration in (0, 1, 2):
            here.iterate()
            wait_until(lambda: iterations[-1:] == [iteration], "the next")  # noqa: B023
    assert not troubles
    documents = [disk.load(path) for path in kept_in(tmp_path)]
    keys = [(document["run"], document["generation"], document["iteration"]) for document in documents]
    assert keys == [("another", 2, 2), ("another", 2, 1), (RUN, 1, 0)]
    assert sorted(kept_in(tmp_path)) == sorted(tmp_path.iterdir())


def test_another_trouble_with_a_shard_is_told_while_it_waits() -> None:
    """Even if no node could be reached before. Changes while nodes come back are not reported."""
    demo_job, shard, messages = job(nodes=2), (0, 1), list[str]()
    waiting = _Waiting(demo_job, messages.append, lambda: messages.append("over"))
    waiting.for_(NoAnswer({(0, 0): ["can't be reached"], shard: ["can't be reached"]}))
    first = len(messages)
    waiting.for_(Lacking({shard: ["holds nothing"]}))
    waiting.for_(Lacking({shard: ["is not live yet, at iteration 3"]}))
    assert len(messages) == first == 1
    for iteration in (4, 5):
        waiting.for_(Lacking({shard: [f"w differs at iteration {iteration}"]}, frozenset({shard})))
        waiting.for_(Lacking({shard: ["has another model"]}, frozenset({shard})))
    waiting.end()
    assert messages[first:] == [
        "shard 1 of DP group 0: w differs at iteration 4",
        "shard 1 of DP group 0: has another model",
        "over",
    ]


def test_a_path_with_markup_is_told_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    message = "can't write kept/[red]:smile:/iteration-00000001: No space left on device"
    _waiting(message)
    path = Path("kept/[red]:smile:")
    _print_saved(SavedCheckpoint(path, "demo", "run", 1, 1, 1, 1000, 0.1))
    out, error = capsys.readouterr()
    assert error == f"waiting: {message}\n"
    assert out.startswith(f"{path}: iteration 1 of job demo, 1 shard")


def test_the_command_waits_in_plain_words(tmp_path: Path) -> None:
    data = job_data()
    data["shadow_nodes"][0]["mgmt"] = "127.0.0.1:1"  # refused
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(data))
    argv = [*COMMAND, "consolidate", str(file), "--out", str(tmp_path / "kept"), "--every", "5"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            assert "without keys: " in process.stderr.readline()
            line = process.stderr.readline()
        finally:
            process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait() == 0
    assert line == (
        "waiting: no shadow node of job demo can be reached: "
        "shadow node 0 (127.0.0.1:1): can't be reached (Connection refused); "
        "a lab's shadow nodes can be reached from its controller namespace only\n"
    )
    assert rest == ""
