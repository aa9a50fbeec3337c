"""A shadow node leaves and another joins its streams midway, while rings gather, on real sockets."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.support.labs.live import needs_bmv2, needs_clang, needs_root
from tests.support.labs.made import on_one_switch
from topologies.crew import Crew, Member, serving, status
from topologies.describe.job_files import Target
from topologies.describe.topology import build
from topologies.kernel import processes
from topologies.lab import Lab
from topologies.traffic import orders
from topologies.traffic.digests import Tail
from topologies.traffic.orders import Load
from topologies.traffic.run import Traffic, TrafficOutcome, received_by

pytestmark = [needs_root, needs_clang]

AHEAD = Tail(26, 12_345)
"""In the middle of a segment, so that the first copy may begin before it."""
LOAD = Load(nbytes=32_000_000, iterations=32, pause=0.2, tails=(AHEAD,))
SLOWLY = replace(LOAD, nbytes=6_400_000)
LEAVER, STAYER = "shadow0", "shadow1"
TOPOLOGY = on_one_switch(2, (2, 2), channels=2)
Key = tuple[int, int, int]


class Brake(threading.Thread):
    """Brake that stops the ranks at an iteration if others are not ready yet on a busy machine.

    Their position is determined from the bytes read by the remaining shadow node, some iterations late.
    """

    def __init__(self, run: Traffic, after: int) -> None:
        super().__init__()
        self._run = run
        self._after: float = after
        self._end_event = threading.Event()
        keys = [
            (s["boundary"], s["channel"], s["shadow_id"])
            for s in orders.sinks(run.job, run.lab.topology, run.load)[STAYER]["streams"]
        ]
        self._share = sum(orders.base(run.job, run.load, *key, Tail(1)) for key in keys)

    def iteration(self) -> float:
        (stayer,) = (member for member in self._run.shadows if member.name == STAYER)
        return received_by(stayer) / self._share

    def go(self, after: float = math.inf) -> None:
        """Let the ranks continue to another iteration."""
        self._after = after
        self._signal(signal.SIGCONT)

    def run(self) -> None:
        while not self._end_event.wait(0.02):
            if self.iteration() > self._after:
                self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        ranks = (rank.process for rank in self._run.ranks)
        processes.kill((process.pid for process in ranks if process.returncode is None), number)

    def __enter__(self) -> Brake:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_event.set()
        self.join()
        self.go()


def gather_and(run: Traffic, change: Callable[[Member, Brake], None]) -> TrafficOutcome:
    """Run the rings, and change the leaving node after the third iteration."""
    has_changed = False
    with Brake(run, 8) as brake:

        def tick(_: int) -> None:
            nonlocal has_changed
            if not has_changed and brake.iteration() > 3:
                has_changed = True
                change(next(member for member in run.shadows if member.name == LEAVER), brake)
                brake.go()

        run.gather(tick)
    assert has_changed
    return run.finish()


def streams_of(result: dict[str, Any]) -> dict[Key, dict[str, Any]]:
    return {(s["boundary"], s["channel"], s["shadow_id"]): s for s in result["streams"]}


def check_joined(run: Traffic, outcome: TrafficOutcome) -> None:
    """Check that the joined node has read all bytes that the ranks report as tagged from there on."""
    (joined,) = (run.result(member) for member in run.shadows if member.name == LEAVER)
    tagged = {key: s["tails"] for rank in outcome.ranks for key, s in streams_of(rank).items()}
    assert len(joined["streams"]) == 4
    for key, read in streams_of(joined).items():
        # Its base is computed from the schedule; that of the tagging side is counted.
        (tail,) = tagged[key]
        assert read["base"] == tail["base"]
        assert read["bytes"] == tail["bytes"] > 10_000
        assert read["sha256"] == tail["sha256"]


def copies_not_connected(crew: Crew) -> int:
    """Return the number of copies without a connected stream."""
    (switch,) = status(crew)
    return int(switch["losses"]["not_connected"]["packets"])


def check_stayer(outcome: TrafficOutcome) -> None:
    """Check that the remaining node has all bytes, from the first one."""
    assert [row.equal for row in outcome.verdict.rows if row.node == 1] == [True] * 4
    assert not outcome.faults
    assert {rank["verified"] for rank in outcome.ranks} == {LOAD.iterations}


@pytest.mark.parametrize(
    ("target", "share", "killed"),
    [
        pytest.param("softswitch", 0.0, False, marks=pytest.mark.slow),
        pytest.param("softswitch", 0.01, True, marks=pytest.mark.slow),
        pytest.param("softswitch", 0.0, True, marks=pytest.mark.slow),
        pytest.param("softswitch", 0.01, False, marks=pytest.mark.slow),
        pytest.param("bmv2", 0.0, False, marks=[needs_bmv2, pytest.mark.slow]),
        pytest.param("bmv2", 0.01, True, marks=[needs_bmv2, pytest.mark.slow]),
    ],
)
def test_what_is_read_from_the_base_on_is_what_was_tagged(
    name: str, target: Target, share: float, killed: bool
) -> None:
    """The node leaves at a tenth, by closing or by kill -9; another process joins well ahead of the data."""
    work = LOAD if target == "softswitch" else SLOWLY
    with Lab(build("pair", TOPOLOGY), target, name=name, loss=share) as lab, Crew(lab) as crew, serving(crew):
        run = Traffic(crew, work)
        run.connect()

        def change(leaver: Member, brake: Brake) -> None:
            crew.kill(leaver) if killed else crew.stop(leaver)
            brake.go(14)
            crew.wait(lambda: copies_not_connected(crew) > 0, "copies to find no stream", 20)
            brake.go(20)
            run.join(leaver, AHEAD)

        outcome = gather_and(run, change)
        check_joined(run, outcome)
    check_stayer(outcome)
    if share:
        assert outcome.retransmitted > 0


@pytest.mark.slow
def test_no_byte_is_read_behind_a_gap(name: str) -> None:
    """A node that joins behind the first data reads nothing; one that then joins ahead reads everything."""
    with Lab(build("pair", TOPOLOGY), name=name) as lab, Crew(lab) as crew, serving(crew):
        run = Traffic(crew, LOAD)
        run.connect()
        behind: list[dict[str, Any]] = []

        def change(leaver: Member, brake: Brake) -> None:
            crew.kill(leaver)
            copies = run.copies
            late = run.join(leaver, Tail(1, 99))
            brake.go(14)
            crew.wait(lambda: fewest_copies(crew) > 2, "copies to be sent to the late node", 20)
            brake.go(20)
            crew.stop(late)
            behind.append(run.result(late))
            run.copies = copies
            run.join(late, AHEAD)

        outcome = gather_and(run, change)
        check_joined(run, outcome)
    check_stayer(outcome)
    assert [(stream["bytes"], stream["error"]) for stream in behind[0]["streams"]] == [(0, None)] * 4


def fewest_copies(crew: Crew) -> int:
    """Return the smallest number of copies sent to one of the leaving node's connected streams."""
    (switch,) = status(crew)
    return int(min(s["packets"] for s in switch["streams"] if s["shadow_node"] == 0))
