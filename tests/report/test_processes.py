"""Which events belong to one start of a process."""

from __future__ import annotations

import pytest

from checkmate.events.event import Event
from checkmate.report.deaths import deaths
from checkmate.report.processes import merge_events, processes


def event(time: float, number: int, name: str = "node.stalled", source: str = "shadow node 0") -> Event:
    return Event(time, source, name, job="gpt", host="h", pid=1, number=number)


NODE_STARTED = "node.started"


@pytest.mark.parametrize(
    ("events", "starts"),
    [
        ([event(0, 1), event(1, 2, NODE_STARTED), event(5, 3)], [3]),
        ([event(0, 2, NODE_STARTED), event(1, 3), event(5, 1), event(5.1, 2, NODE_STARTED)], [2, 2]),
        ([event(0, 1, NODE_STARTED), event(5, 7, NODE_STARTED)], [1, 1]),
        ([event(0, 1), event(5, 1), event(6, 2)], [1, 2]),
        ([event(0, 1), event(5, 2), event(6, 2)], [2, 1]),
        ([event(0, 1, NODE_STARTED), event(7, 2), event(9, 3), event(8, 4), event(10, 5)], [5]),
    ],
)
def test_a_start_in_a_container_has_the_pid_of_the_one_before(events: list[Event], starts: list[int]) -> None:
    by_process = processes(merge_events(events, "gpt"), [("shadow node 0", "h", 1)])
    assert [len(process.events) for process in by_process] == starts
    assert [process.is_live for process in by_process] == [False] * (len(starts) - 1) + [True]


@pytest.mark.parametrize("source", ["shadow node 0", "rank 0"])
def test_who_was_killed_in_a_container_has_died(source: str) -> None:
    events = merge_events(
        [event(at, n, source=source) for at, n in ((0, 1), (5, 2), (60, 1), (61, 2))], "gpt"
    )
    by_process = processes(events, [(source, "h", 1)])
    (death,) = deaths(by_process, events, [0])
    assert (death.who, death.last[14:19], death.back[14:19]) == (source, "00:05", "01:00")


def test_a_controller_that_was_killed_in_a_container_has_died() -> None:
    rows = [(0, 1, "controller.started"), (1, 2, "controller.primary")]
    rows += [(60, 1, "controller.started"), (61, 2, "controller.primary")]
    events = merge_events([event(*row, source="controller") for row in rows], "gpt")
    (death,) = deaths(processes(events), events, [0])
    assert (death.last[14:19], death.back[14:19]) == ("00:01", "01:01")
