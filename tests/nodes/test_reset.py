"""`checkmate reset`, over real gRPC: crash-safe, repeatable, and final for nodes that were away."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import yaml

from checkmate.job.validation import data_of
from checkmate.nodes import reset
from checkmate.nodes.reset import Discard, NoNode, NotReset
from checkmate.nodes.standing import Lacking
from checkmate.nodes.stubs import Stubs
from checkmate.nodes.target import find_source
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.start import fence, from_disk
from testbed.jobs import job_data
from testbed.small_training import SmallTraining
from tests.support.cli import COMMAND, invoke
from tests.support.labs.end_hosts import needs_buffers
from tests.support.shadow.standings import JOB, hold, node
from tests.support.shadow.world import World
from tests.support.waiting import wait_until

TIMEOUT = 20.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as exit_stack:
        yield exit_stack


def two_nodes(stack: ExitStack) -> tuple[World, SmallTraining, Stubs]:
    """Return two nodes of which each holds everything, after iteration 0 of generation 3."""
    here = World(stack, nodes=2, replicas=2, ranks=2)
    training = here.training()
    training.begin([0, 1], generation=3)
    training.seed_all()
    here.ready()
    training.iterate()
    here.stepped(0)
    stubs = Stubs(here.job, None)
    stack.callback(stubs.close)
    return here, training, stubs


def leave(here: World, training: SmallTraining) -> None:
    """End the trainers' connections."""
    training.close()
    wait_until(lambda: not any(here.status(number).trainers for number in here.nodes), "trainers to leave")


@needs_buffers
def test_it_waits_for_the_end_of_training(stack: ExitStack) -> None:
    here, training, stubs = two_nodes(stack)
    with pytest.raises(NotReset, match=r"runs: 2 ranks are connected to shadow node 0 \(127"):
        reset.ask(here.job, stubs)
    leave(here, training)
    plan = reset.ask(here.job, stubs)
    assert plan == Discard(3, 0, (0, 1))
    assert here.status(0).holds
    for _ in range(2):
        reset.discard(here.job, stubs, plan)
        for number in (0, 1):
            answer = here.status(number)
            assert (answer.holds_nothing, list(answer.holds), answer.generation, answer.discarded) == (
                True,
                [],
                3,
                3,
            )
        assert not here.nodes[0].node.resources
        plan = reset.ask(here.job, stubs)
        assert plan == Discard(3, None, (0, 1))


@needs_buffers
def test_the_next_start_begins_anew_and_the_discarded_run_cannot(stack: ExitStack) -> None:
    here, training, stubs = two_nodes(stack)
    leave(here, training)
    reset.discard(here.job, stubs, reset.ask(here.job, stubs))
    again = here.training()
    with pytest.raises(grpc.RpcError, match="generation 3 was discarded by `checkmate reset`"):
        again.begin([0], generation=3, start=b"the second start")
    plan = fence.plan_restore(here.job, stubs, TIMEOUT, lambda: 5)
    assert (plan.kind, plan.generation, plan.discarded) == ("reset", 6, 5)
    assert plan.incarnation == training.incarnation + 1
    again.incarnation = plan.incarnation
    again.begin([0, 1], generation=plan.generation, start=plan.start, run=plan.run)
    wait_until(lambda: here.status(0).trainers == 2, "trainers to be counted")
    with pytest.raises(NotReset, match="runs: 2 ranks"):
        reset.ask(here.job, stubs)
    answer = stubs.reset([0], 5)[0]
    assert isinstance(answer, str)
    assert "generation 6 has begun here" in answer
    plan = fence.plan_restore(
        here.job, stubs, TIMEOUT
    )  # before anything is seeded: checkpoints stay discarded
    assert (plan.kind, plan.generation, plan.discarded) == ("nothing", 7, 5)


@needs_buffers
def test_a_node_that_was_away_does_not_bring_the_old_state_back(stack: ExitStack) -> None:
    here, training, stubs = two_nodes(stack)
    leave(here, training)
    away = replace(here.job, shadow_nodes=here.job.shadow_nodes[:1])
    reset.discard(away, stubs, reset.ask(away, stubs))  # node 1 is not asked
    assert here.status(1).holds
    plan = fence.plan_restore(here.job, stubs, TIMEOUT)
    assert (plan.kind, plan.generation) == ("reset", 4)
    with pytest.raises(Lacking, match="holds nothing"):
        find_source(here.job, {number: here.status(number) for number in here.nodes})


def test_what_to_discard() -> None:
    answers: dict[int, pb.NodeStatus | str] = {
        0: node(0, hold((0, 0), 5, generation=3)),
        1: node(1, hold((0, 1), 7, generation=4)),
        2: "can't be reached",
    }
    assert reset.decide(JOB, answers) == Discard(4, 7, (0, 1), {2: "can't be reached"})
    with pytest.raises(NoNode, match=r"answer hold nothing, and others may hold a run: shadow node 2 \("):
        reset.decide(JOB, {0: node(0), 1: node(1), 2: "can't be reached"})
    with pytest.raises(NoNode, match="no shadow node of job demo answers"):
        reset.decide(JOB, dict.fromkeys(range(3), "can't be reached"))
    assert reset.decide(JOB, {number: node(number) for number in range(3)}) == Discard(1, None, (0, 1, 2))


def test_checkpoints_of_discarded_runs_stay_but_are_not_used(tmp_path: Path) -> None:
    for name in (
        "iteration-00000007",
        "generation-0002-iteration-00000005",
        "generation-0003-iteration-00000001",
    ):
        (tmp_path / f"{name}.pt").write_bytes(b"x")
    assert [len(from_disk.list_checkpoints(tmp_path, discarded).paths) for discarded in (0, 1, 2, 3)] == [
        3,
        2,
        1,
        0,
    ]
    assert from_disk.list_checkpoints(tmp_path, 3).generation == 3


@needs_buffers
def test_the_command(stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "checkmate.cli.reset.keep_only", lambda *capabilities: None
    )  # for good, in this process
    here, training, _ = two_nodes(stack)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(data_of(here.job, exclude_none=True)))
    arguments = ("reset", file, "--insecure")
    status, output = invoke(*arguments, "--yes")
    assert (status, "runs: 2 ranks are connected" in output) == (1, True)
    leave(here, training)
    status, output = invoke(*arguments)
    assert status == 2
    assert "iteration 0 and all before it are about to be discarded: add --yes" in output
    assert here.status(0).holds
    here.stop(1)
    status, output = invoke(*arguments, "--yes", "--json")
    assert status == 0
    document = json.loads(output[output.index("{") :])
    assert (document["job"], document["iteration"], document["nodes"], list(document["silent"])) == (
        "demo",
        0,
        [0],
        ["1"],
    )
    assert here.status(0).holds_nothing
    status, output = invoke(*arguments, "--yes")
    assert "Job demo: all earlier runs are discarded. The next start of training begins" in output
    here.stop(0)
    status, output = invoke(*arguments, "--yes")
    assert (status, "no shadow node of job demo answers" in output) == (3, True)


def test_a_server_that_is_not_a_shadow_node_causes_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CHECKMATE_INSECURE", raising=False)
    plain = grpc.server(ThreadPoolExecutor(1))
    data = job_data(nodes=1)
    data["shadow_nodes"][0]["mgmt"] = f"127.0.0.1:{plain.add_insecure_port('127.0.0.1:0')}"
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({**data, "keys": "keys"}))
    subprocess.run([*COMMAND, "keys", file], check=True, capture_output=True)
    plain.start()
    result = subprocess.run([*COMMAND, "reset", file], capture_output=True, text=True, check=False)
    plain.stop(None)
    assert (result.returncode, result.stderr.splitlines()[:-1]) == (3, [])
    assert "it does not use TLS" in result.stderr


@needs_buffers
@pytest.mark.parametrize(
    ("typed", "status", "words"),
    [
        (b"\n", 1, "nothing was discarded"),
        (b"n\n", 1, "nothing was discarded"),
        (b"\x04", 1, "nothing was discarded"),
        (b"\x03", 130, ""),
        (b"y\n", 0, "discarded. The next start of training begins with iteration 0."),
    ],
)
def test_on_a_terminal_it_asks(
    typed: bytes, status: int, words: str, stack: ExitStack, tmp_path: Path
) -> None:
    here, training, _ = two_nodes(stack)
    leave(here, training)
    process, terminal = _start_reset(stack, here, tmp_path / "job.yaml")
    screen = _until(terminal, b"[y/N]")
    assert b"iteration 0 and all before it are about to be discarded" in b" ".join(screen.split())
    os.write(terminal, typed)
    screen += _until(terminal, again=b"\x03" if typed == b"\x03" else b"")
    assert process.wait(10) == status
    assert words in " ".join(screen.decode().split())
    assert here.status(0).holds_nothing == (status == 0)


@needs_buffers
def test_training_that_begins_while_it_asks_is_not_discarded(stack: ExitStack, tmp_path: Path) -> None:
    here, training, _ = two_nodes(stack)
    leave(here, training)
    process, terminal = _start_reset(stack, here, tmp_path / "job.yaml")
    _until(terminal, b"[y/N]")
    again = here.training()
    again.incarnation = training.incarnation + 1
    again.begin([0, 1], generation=3, start=b"the second start")
    wait_until(lambda: all(here.status(number).trainers for number in here.nodes), "trainers to connect")
    os.write(terminal, b"y\n")
    screen = " ".join(_until(terminal).decode().split())
    assert (process.wait(10), "runs: 2 ranks are connected" in screen) == (1, True)
    assert all(here.status(number).holds for number in here.nodes)


def _start_reset(stack: ExitStack, here: World, file: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start `checkmate reset` on a terminal; return the process, and our end of the terminal."""
    file.write_text(yaml.safe_dump(data_of(here.job, exclude_none=True)))
    terminal, child_terminal = pty.openpty()
    stack.callback(os.close, terminal)
    command = ["setsid", "--ctty", "--wait", *COMMAND, "reset", str(file)]
    process = subprocess.Popen(command, stdin=child_terminal, stdout=child_terminal, stderr=child_terminal)
    os.close(child_terminal)
    return process, terminal


def _until(terminal: int, end: bytes | None = None, again: bytes = b"") -> bytes:
    """Return what appears on a terminal, up to `end` or until nobody has it open.

    `again` is typed each second: a Ctrl-C between a prompt and Python's read has no effect before the next.
    """
    screen = b""
    while end is None or end not in screen:
        if again and not select.select([terminal], [], [], 1)[0]:
            os.write(terminal, again)
            continue
        try:
            screen += os.read(terminal, 4096)
        except OSError:  # the process has ended
            break
    return screen
