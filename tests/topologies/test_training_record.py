"""Evaluation of the ranks' records: losses, repeated iterations, recoveries, costs; and digests of states."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topologies.describe import topology
from topologies.training import demo
from topologies.training.orders import PHASES, Kill, Orders, read
from topologies.training.record import JobRecord, RankEvent, interval, read_events, read_losses
from topologies.training.verdict import cost, differences, digest, promises

RANKS = 2


def event(name: str, at: float, attempt: int = 0, pid: int = 0, **more: Any) -> RankEvent:
    """Return an event of a process, by default of the start's."""
    return RankEvent(name, attempt, pid or 1 + attempt, at, more)


def run(iterations: int, seconds: float, begin: float = 0.0, waits: float = 0.0, block: int = 5) -> JobRecord:
    """Return the record of a run with iterations of `seconds`; each block's first one waits for `waits`."""
    events: dict[int, list[RankEvent]] = {}
    for rank in range(RANKS):
        now = begin
        events[rank] = []
        for i in range(iterations):
            began = now
            now += seconds + (waits if i % block == 0 else 0.0)
            events[rank].append(event("iteration", now, iteration=i, began=began, processor=seconds / 4))
        events[rank].append(event("ended", now, digest="d"))
    losses = [(i, 1 / (i + 1)) for i in range(iterations)]
    return JobRecord(events, dict.fromkeys(range(RANKS), losses))


@given(
    st.builds(
        Orders,
        module=st.text(),
        arguments=st.lists(st.text()).map(tuple),
        events=st.text(),
        reduce=st.sampled_from(["checkmate", "untagged", "gloo"]),
        gate=st.none() | st.text(),
        kills=st.lists(
            st.builds(Kill, rank=st.integers(0, 9), iteration=st.integers(0), phase=st.sampled_from(PHASES))
        ).map(tuple),
        cpus=st.none() | st.lists(st.integers(0)).map(tuple),
        extension=st.none() | st.text(),
    )
)
def test_orders_arrive_as_they_were_given(orders: Orders) -> None:
    assert read(orders.to_json()) == orders


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_losses_keep_every_bit_and_half_a_line_is_left_out(losses: list[float]) -> None:
    lines = [json.dumps({"iteration": i, "loss": loss}) + "\n" for i, loss in enumerate(losses)]
    assert read_losses([*lines, '{"iteration": 7, "lo']) == [(i, loss) for i, loss in enumerate(losses)]


def test_events_are_read() -> None:
    entry = {"event": "killed", "attempt": 1, "pid": 7, "at": 2.5, "phase": "forward"}
    assert read_events([json.dumps(entry) + "\n", "{"]) == [
        RankEvent("killed", 1, 7, 2.5, {"phase": "forward"})
    ]


def test_repeated_iterations_are_counted_and_compared() -> None:
    first = [(0, 1.0), (1, 0.5), (2, 0.25)]
    job_record = JobRecord({0: [], 1: []}, {0: [*first, (2, 0.25)], 1: [*first[:2], (2, 0.25)]})
    assert job_record.repeated == {2: 2}
    assert job_record.changed_when_repeated == []
    changed_record = JobRecord({0: []}, {0: [*first, (2, 0.125)]})
    assert changed_record.changed_when_repeated == [(0, 2)]
    assert changed_record.losses == {0: {0: 1.0, 1: 0.5, 2: 0.125}}


def test_a_recovery_is_split_into_its_parts() -> None:
    events = {}
    for rank in range(RANKS):
        late = 0.25 * rank
        marks = [
            event("started", 12 + late, 1, process=11 + late, torch=11.25 + late, checkmate=11.75 + late),
            event("group_ready", 14 + late, 1),
            event("restored", 17 + late, 1, iteration=6),
            event("protected", 18 + late, 1),
            event("iteration", 20 + late, 1, iteration=6, began=19.0),
        ]
        died = [event("killed", 10.0, iteration=6, phase="forward")] if rank == 1 else []
        events[rank] = [event("started", 1.0), event("iteration", 9.0, iteration=5, began=8.0), *died, *marks]
    (recovery,) = JobRecord(events, {}).recoveries()
    assert (recovery.rank, recovery.iteration, recovery.resumed_with) == (1, 6, 6)
    assert list(recovery.parts.values()) == [1.25, 0.25, 0.5, 2.25, 3.0, 1.0, 2.0]
    assert recovery.seconds == 10.25
    assert not recovery.in_place


def test_only_the_dead_rank_starts_if_it_is_recovered_in_place() -> None:
    events = {}
    for rank in range(RANKS):
        pid = 7 + rank
        before = [event("started", 1.0, pid=pid), event("iteration", 9.0, pid=pid, iteration=5, began=8.0)]
        if rank == 1:
            before.append(event("killed", 10.0, pid=pid, iteration=6, phase="forward"))
            pid = 100
            before.append(event("started", 12.0, pid=pid, process=11.0, torch=11.25, checkmate=11.75))
        marks = [
            event("group_ready", 14.0, pid=pid),
            event("restored", 17.0, pid=pid, iteration=6),
            event("protected", 18.0, pid=pid),
            event("iteration", 20.0, pid=pid, iteration=6, began=19.0),
        ]
        events[rank] = [*before, *marks]
    (recovery,) = JobRecord(events, {}).recoveries()
    assert recovery.in_place
    assert list(recovery.parts.values()) == [1.0, 0.25, 0.5, 2.25, 3.0, 1.0, 2.0]


def test_a_kill_from_which_nothing_has_resumed_is_no_recovery() -> None:
    job_record = JobRecord({0: [event("killed", 1.0, iteration=3, phase="forward")], 1: []}, {})
    assert job_record.recoveries() == []


@given(st.floats(0.01, 10), st.floats(0.5, 2), st.floats(0, 5))
def test_the_cost_is_the_difference_without_what_blocks_wait(
    seconds: float, factor: float, waits: float
) -> None:
    extra_cost = cost(run(30, seconds, waits=waits), run(30, seconds * factor, 1e3), 30, 5)
    assert len(extra_cost.seconds.reference) == 4  # all of six blocks except the first and the last
    assert extra_cost.seconds.ratio.mean == pytest.approx(factor)
    assert extra_cost.seconds.difference.mean == pytest.approx(seconds * (factor - 1), abs=1e-9)
    assert extra_cost.processor.difference.mean == pytest.approx(RANKS / 4 * seconds * (factor - 1), abs=1e-9)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=40))
def test_an_interval_is_round_the_mean(samples: list[float]) -> None:
    confidence = interval(samples)
    assert confidence.low <= statistics.fmean(samples) + 1e-9
    assert confidence.high >= statistics.fmean(samples) - 1e-9


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (4, 2.776), (5, 2.571), (10, 2.228), (30, 2.042), (120, 1.980)]
)
def test_the_interval_is_students(freedom: int, quantile: float) -> None:
    """The reference is a table of quantiles."""
    samples = [float(i) for i in range(freedom + 1)]
    error = statistics.stdev(samples) / math.sqrt(len(samples))
    assert interval(samples).half / error == pytest.approx(quantile, abs=4e-3)


def test_one_sample_has_no_interval() -> None:
    with pytest.raises(ValueError, match="1 samples have no interval"):
        interval([1.0])


def test_promises_are_kept_by_equal_runs() -> None:
    state = {"model": {"w": torch.ones(3)}}
    verdicts = promises(
        run(10, 1.0), run(10, 1.0), 10, 0, {"one": state, "other": {"model": {"w": torch.ones(3)}}}
    )
    assert [promise.is_kept for promise in verdicts] == [True] * 5


def test_promises_that_are_broken_are_told() -> None:
    reference = run(10, 1.0)
    broken = JobRecord(
        {**reference.events, 1: [event("ended", 1.0, digest="e")]},
        {**reference.completed, 1: [(i, 1 / (i + 1) + (i == 7) * 1e-16) for i in range(10)] + [(9, 0.1)]},
    )
    states = {"one": {"w": torch.zeros(2)}, "other": {"w": torch.tensor([0.0, 1e-30])}}
    verdicts = promises(reference, broken, 10, 0, states)
    assert [promise.is_kept for promise in verdicts] == [False] * 4 + [True]
    assert verdicts[0].observation.startswith("19 of 20")
    assert verdicts[2].observation == "other differs at w"
    assert verdicts[3].observation == "repeated: 9, in 0 crashes"


def test_differences_names_what_differs() -> None:
    first = {"a": [torch.ones(2), 1.0], "b": {"c": torch.zeros(1)}}
    assert differences(first, first) == []
    second = {"a": [torch.ones(2).double(), 1], "b": {"d": torch.zeros(1)}}
    assert differences(first, second) == ["a.0", "a.1", "b.c", "b.d"]


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=8))
def test_a_digest_tells_bits_apart(values: list[float]) -> None:
    tensor = torch.tensor(values)
    assert digest({"w": tensor}) == digest({"w": tensor.clone()})
    flipped = tensor.clone()
    flipped.view(torch.int32)[0] ^= 1
    assert digest({"w": flipped}) != digest({"w": tensor})
    assert digest({"v": tensor}) != digest({"w": tensor})
    assert digest([tensor, tensor]) != digest([tensor])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kill", "4:20:forward"],
        ["--kill", "2:20:lunch"],
        ["--kill", "2"],
        ["--iterations", "10"],
        ["--kill", "1:60:forward"],
        ["--target", "tofin"],
    ],
)
def test_the_demo_says_what_is_wrong(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(arguments) == topology.BadDescription.exit_code
    words = capsys.readouterr().err
    assert words.startswith("error: ")
    assert "use " in words or "there are" in words
