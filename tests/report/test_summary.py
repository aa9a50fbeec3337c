"""A report's conclusions from written events: who died, what was committed, how long recovery took."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from checkmate.cli.report import parse_since
from checkmate.events.event import Event, timestamp
from checkmate.events.kinds import (
    CONTROLLER_CLAIMS,
    CONTROLLER_PRIMARY,
    CONTROLLER_STANDBY,
    CONTROLLER_STARTED,
    HOLD_CHANGED,
    ITERATION_COMMITTED,
    NODE_DRAINED,
    NODE_ENDED,
    NODE_FENCED,
    NODE_STARTED,
    NODE_TROUBLE,
    PEER_BACK,
    PEER_LOST,
    PROTECT_ENDED,
    PROTECT_STARTED,
    RESTORE_AGREED,
    RESTORE_ENDED,
    RESTORE_FAILED,
    RESTORE_FETCHED,
    RESTORE_STARTED,
    STREAM_GAP,
    TRAINER_ENDED,
    TRAINER_FIRST,
    TRAINER_NODE_LOST,
    TRAINER_RANK_LOST,
    TRAINER_RING_BROKEN,
    TRAINING_REFUSED,
    Occurrence,
)
from checkmate.report.page import page
from checkmate.report.processes import merge_events
from checkmate.report.records import JobReport, NodeClock
from checkmate.report.summary import summary
from testbed.copies import local_job

JOB = local_job(nodes=2, ranks=2)
START = 1_700_000_000.0


def at(seconds: float) -> str:
    return timestamp(START + seconds)


class History:
    """Events as processes have written them. Seconds count from `START`."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def say(self, seconds: float, source: str, occurrence: Occurrence, pid: int = 1, host: str = "h") -> None:
        name, fields = occurrence
        number, time = len(self.events), START + seconds
        self.events.append(Event(time, source, name, "", fields, "info", JOB.job, host, pid, number))

    def rank(self, seconds: float, rank: int, pid: int, iteration: int, incarnation: int) -> None:
        """A rank restores, protects, and does its first iteration: 6 s."""
        process = f"rank {rank}"
        kind = "nodes" if iteration else "nothing"
        self.say(seconds, process, RESTORE_STARTED(), pid)
        agreed = RESTORE_AGREED(
            kind=kind,
            iteration=iteration - 1,
            incarnation=incarnation,
            generation=1,
            why="",
            seconds=1 + rank,
        )
        self.say(seconds + 2, process, agreed, pid)
        if iteration:
            self.say(seconds + 3, process, RESTORE_FETCHED(iteration=iteration - 1, seconds=0.5), pid)
        source = "nodes" if iteration else "start"
        self.say(seconds + 4, process, RESTORE_ENDED(from_=source, iteration=iteration, seconds=4.0), pid)
        self.say(seconds + 4, process, PROTECT_STARTED(), pid)
        protected = PROTECT_ENDED(iteration=iteration, incarnation=incarnation, waiting="", seconds=1.0)
        self.say(seconds + 5, process, protected, pid)
        self.say(seconds + 6, process, TRAINER_FIRST(iteration=iteration, seconds=0.8), pid)

    def report(self, **more: object) -> JobReport:
        events = merge_events(self.events, JOB.job)
        return summary(JOB, events, since=START, until=START + 1000, **more)  # type: ignore[arg-type]


def text(report: JobReport) -> str:
    console = Console(width=300, file=io.StringIO())
    with console.capture() as capture:
        for part in page(report):
            console.print(part, markup=False)
    return capture.get()


@pytest.fixture
def crash() -> History:
    """Rank 1 dies at 100 s, after it has completed iteration 40; rank 0 notices it; both begin again."""
    history = History()
    for rank in (0, 1):
        history.rank(0, rank, pid=10 + rank, iteration=0, incarnation=7)
    for node in (0, 1):
        history.say(-5, f"shadow node {node}", NODE_STARTED(version="0", shards=1))
        history.say(60, f"shadow node {node}", ITERATION_COMMITTED(incarnation=7, iteration=30))
    history.say(100.2, "rank 0", TRAINER_RING_BROKEN(iteration=41, why="rank 1 (h1): connection reset"), 10)
    history.say(100.9, "rank 0", TRAINER_ENDED(iteration=40, completed=False, why="RingError: rank 1"), 10)
    for node in (0, 1):
        history.say(111, f"shadow node {node}", NODE_FENCED(incarnation=7, iteration=40, why=""))
    for rank in (0, 1):
        history.rank(110 + rank, rank, pid=20 + rank, iteration=41, incarnation=8)
    return history


LIVE = [("shadow node 0", "h", 1), ("shadow node 1", "h", 1)]


def test_a_rank_that_was_killed_and_the_start_after_it(crash: History) -> None:
    report = crash.report(live=LIVE)
    (death,) = report.deaths
    assert (death.who, death.pid, death.last, death.noticed) == ("rank 1", 11, at(6), at(100.2))
    assert death.by == "rank 0: rank 1 (h1): connection reset"
    assert death.back == at(111)
    first, second = report.recoveries
    assert (first.source, first.next, first.repeated, first.after) == ("start", 0, None, "")
    assert (second.source, second.incarnation, second.committed) == ("nodes", 8, 40)
    assert (second.next, second.trained, second.repeated) == (41, 40, 0)
    assert second.time == at(110)
    assert second.after.startswith("rank 1 died, which rank 0 noticed at")
    assert second.first == at(116)
    steps = {step.name: (step.seconds, step.who) for step in second.steps}
    assert steps["until the first rank begins again"] == (9.8, "rank 0")
    assert steps["all ranks know what to resume from"] == (2.0, "rank 1"), "the slowest"
    assert steps["state is read"] == (0.5, "rank 1")
    assert steps["all of it, until the first iteration"] == (16.8, "rank 1")
    assert report.committed == 40
    assert report.unknown == ["no events of a controller: add the folder of its event log with --events"]


def test_a_rank_that_dies_after_others_have_gone_on_in_place(crash: History) -> None:
    """Rank 0 goes on in its process after rank 1's death, and is killed itself later."""
    crash.events = [event for event in crash.events if event.time < START + 110 or event.source != "rank 0"]
    crash.say(100.5, "rank 0", TRAINER_RANK_LOST(rank=1, why="its process has ended"), 10)
    crash.rank(110, 0, pid=10, iteration=41, incarnation=8)
    crash.say(200, "rank 1", TRAINER_RANK_LOST(rank=0, why="its process has ended"), 21)
    crash.say(200.1, "rank 1", TRAINER_ENDED(iteration=60, completed=False, why="RingError"), 21)
    crash.rank(201, 0, pid=30, iteration=61, incarnation=9)
    crash.rank(201, 1, pid=21, iteration=61, incarnation=9)
    report = crash.report(live=LIVE)
    assert [(death.who, death.pid, death.noticed) for death in report.deaths] == [
        ("rank 1", 11, at(100.2)),
        ("rank 0", 10, at(200)),
    ]
    last = report.recoveries[-1]
    assert last.after.startswith("rank 0 died, which rank 1 noticed at")
    assert (last.next, last.trained, last.repeated) == (61, 60, 0)


def test_who_lost_the_connection_to_the_dead_rank_knows_most(crash: History) -> None:
    earlier = TRAINER_RING_BROKEN(iteration=41, why="rank 2 (h2), channel 0, from rank 0 (h0): ended")
    crash.say(100.1, "rank 2", earlier, 12)
    (death,) = crash.report(live=LIVE).deaths
    assert (death.noticed, death.by) == (at(100.2), "rank 0: rank 1 (h1): connection reset")


def test_the_page_has_it_in_words(crash: History) -> None:
    page_text = text(crash.report(live=LIVE, clocks=[NodeClock(0, 1.25, 0.002)]))
    assert "rank 1, process 11 on h\n" in page_text
    assert "last committed iteration: 40" in page_text
    assert "first iteration trained after: 41" in page_text
    assert "repeated: nothing" in page_text
    assert "shadow node 0: 1.250 s ahead of this host's, within 0.002 s" in page_text
    assert "iteration.committed" not in page_text
    assert page_text.index("Starts of training") < page_text.index("Timeline")


def test_what_was_repeated_is_counted(crash: History) -> None:
    crash.events = [
        event for event in crash.events if (event.pid < 20 or event.name != "trainer.restore.ended")
    ]
    for rank in (0, 1):
        crash.say(114, f"rank {rank}", RESTORE_ENDED(from_="disk", iteration=20, seconds=4.0), 20 + rank)
    report = crash.report(live=LIVE)
    assert (report.recoveries[1].source, report.recoveries[1].repeated) == ("disk", 21)
    assert "repeated: 21 iterations, 20 to 40" in text(report)


def test_no_event_of_ranks_means_that_it_is_not_known() -> None:
    history = History()
    history.say(0, "shadow node 0", NODE_STARTED(version="0", shards=1))
    report = history.report(live=LIVE[:1], silent={1: "can't be reached (Connection refused)"})
    assert report.recoveries == []
    assert any(gap.startswith("no events of ranks: when one died") for gap in report.unknown)
    (away,) = [gap for gap in report.unknown if "can't be reached" in gap]
    assert "what it did is not known; read its event log, copied from its host" in away
    assert [death.who for death in report.deaths] == []


def test_a_shadow_node_that_others_miss_is_dead_although_its_log_is_gone() -> None:
    history = History()
    history.say(50, "shadow node 0", PEER_LOST(node=1, why="its process has ended"))
    history.say(50.5, "rank 0", TRAINER_NODE_LOST(node=1, why="it closed the connection"))
    history.say(70, "shadow node 0", PEER_BACK(node=1))
    report = history.report(live=LIVE)
    (death,) = report.deaths
    assert (death.who, death.last, death.noticed, death.back) == ("shadow node 1", "", at(50), at(70))
    assert death.by == "shadow node 0: its process has ended"


def test_a_node_that_the_job_does_not_have_is_not_looked_for() -> None:
    history = History()
    for number in range(20_000):
        history.say(1 + number / 1000, "shadow node 0", PEER_LOST(node=10 + number, why=""))
    start = time.monotonic()
    assert history.report(live=LIVE).deaths == []
    assert time.monotonic() - start < 20, "not a pass over all events for each name"


def test_a_node_that_names_thousands_of_processes_does_not_stop_the_report() -> None:
    history = History()
    for number in range(8_000):
        history.say(number, "shadow node 0", NODE_STARTED(version="0", shards=1), pid=number)
    start = time.monotonic()
    assert len(history.report(live=LIVE).deaths) == 7_998
    assert time.monotonic() - start < 6


def test_a_shadow_node_that_has_kept_its_events_is_dead_once() -> None:
    history = History()
    history.say(0, "shadow node 1", NODE_STARTED(version="0", shards=1), pid=5)
    live = HOLD_CHANGED(group=0, shard=1, state="live", iteration=3, why="")
    history.say(49, "shadow node 1", live, pid=5)
    history.say(50, "shadow node 0", PEER_LOST(node=1, why="its process has ended"))
    history.say(51, "rank 0", TRAINER_NODE_LOST(node=1, why="it closed the connection"))
    history.say(60, "shadow node 1", NODE_STARTED(version="0", shards=1), pid=6)
    report = history.report(live=[("shadow node 1", "h", 6), LIVE[0]])
    (death,) = report.deaths
    assert (death.who, death.pid, death.last) == ("shadow node 1", 5, at(49))
    assert (death.noticed, death.back) == (at(50), at(60))


def test_a_node_that_is_away_for_good_died_after_its_last_event() -> None:
    history = History()
    history.say(0, "shadow node 1", NODE_STARTED(version="0", shards=1))
    report = history.report(live=LIVE[:1], silent={1: "can't be reached"})
    (death,) = report.deaths
    assert (death.last, death.noticed, death.back) == (at(0), "", "")
    assert any(f"what it did after {at(0)} is not known" in gap for gap in report.unknown)


def hold(state: str, iteration: int = 0, shard: int = 0) -> Occurrence:
    return HOLD_CHANGED(group=0, shard=shard, state=state, iteration=iteration, why="")


def test_a_shard_has_no_holder_from_a_death_until_another_node_is_live() -> None:
    history = History()
    for node in (0, 1):
        history.say(node, f"shadow node {node}", hold("live", shard=node), pid=5)
    history.say(49, "shadow node 1", hold("live", 40, shard=1), pid=5)
    history.say(50, "shadow node 0", PEER_LOST(node=1, why="its process has ended"), pid=5)
    history.say(60, "shadow node 1", NODE_STARTED(version="0", shards=1), pid=6)
    history.say(70, "shadow node 1", hold("live", 60, shard=1), pid=6)
    gap = STREAM_GAP(group=0, shard=0, iteration=70, joins=73, why="9 bytes have not come")
    history.say(80, "shadow node 0", gap, pid=5)
    report = history.report(live=[("shadow node 0", "h", 5), ("shadow node 1", "h", 6)])
    assert [(absence.shard, absence.since, absence.until) for absence in report.absences] == [
        (1, at(50), at(70)),
        (0, at(80), ""),
    ]
    assert "DP group 0, shard 0, and still" in text(report)


def test_a_node_that_was_drained_holds_nothing() -> None:
    history = History()
    history.say(0, "shadow node 1", hold("live"))
    history.say(50, "shadow node 1", NODE_DRAINED())
    assert [(absence.since, absence.until) for absence in history.report(live=LIVE).absences] == [
        (at(50), "")
    ]


def test_what_was_before_counts_but_is_not_reported(crash: History) -> None:
    events = merge_events(crash.events, JOB.job)
    for since, counts in ((0, (1, 2)), (50, (1, 1)), (105, (0, 1)), (200, (0, 0))):
        report = summary(JOB, events, since=START + since, until=START + 1000, live=LIVE)
        assert (len(report.deaths), len(report.recoveries)) == counts
        assert all(event["time"] >= at(since) for event in report.events)
        if report.recoveries:
            assert (report.recoveries[-1].trained, report.recoveries[-1].repeated) == (40, 0)


def test_with_replicas_a_shard_keeps_a_holder() -> None:
    history = History()
    for node in (0, 1):
        history.say(node, f"shadow node {node}", hold("live"))
    history.say(50, "shadow node 1", hold("dropped"))
    assert history.report(live=LIVE).absences == []


def controllers(*, claims: bool) -> History:
    """A controller serves at host a and says nothing after 5 s; at 60 s, another one serves at host b."""
    history = History()
    serves = CONTROLLER_PRIMARY(switches=["s1"], updates=0, seconds=0.1)
    history.say(0, "controller", CONTROLLER_STARTED(version="0", jobs=["demo"]), 1, "a")
    history.say(5, "controller", serves, 1, "a")
    history.say(2, "controller", CONTROLLER_STANDBY(), 2, "b")
    if claims:
        history.say(59, "controller", CONTROLLER_CLAIMS(switch="s1"), 2, "b")
        history.say(60, "controller", serves, 2, "b")
    return history


def test_a_controller_that_another_one_had_to_replace_has_died() -> None:
    (death,) = controllers(claims=True).report(live=LIVE).deaths
    assert (death.who, death.host, death.last, death.back) == ("controller", "a", at(5), at(60))
    assert death.by == "a controller on b: switch s1 has no primary controller"


def test_the_timeline_tells_controllers_apart() -> None:
    page_text = text(controllers(claims=True).report(live=[]))
    assert "controller, process 1 on a" in page_text and "controller, process 2 on b" in page_text
    alone = History()
    alone.say(0, "controller", CONTROLLER_STARTED(version="0", jobs=["demo"]), 1, "a")
    assert "controller, process" not in text(alone.report(live=[]))


def test_controllers_that_serve_and_stand_by_live() -> None:
    assert controllers(claims=False).report(live=LIVE).deaths == []


def test_who_was_stopped_has_not_died() -> None:
    history = History()
    history.say(0, "shadow node 1", NODE_STARTED(version="0", shards=1))
    history.say(40, "shadow node 1", NODE_ENDED())
    history.say(40.1, "shadow node 0", PEER_LOST(node=1, why="its process has ended"))
    report = history.report(live=LIVE[:1], silent={1: "can't be reached"})
    assert report.deaths == []
    assert report.stopped == [f"shadow node 1, process 1 on h, at {at(40)}"]


def test_a_start_that_failed_says_why() -> None:
    history = History()
    for rank in (0, 1):
        history.say(rank, f"rank {rank}", RESTORE_STARTED())
        why = "RestoreError: shard 1 is lost"
        history.say(30 + rank, f"rank {rank}", RESTORE_FAILED(why=why, seconds=30.0))
    report = history.report(live=LIVE)
    (start,) = report.recoveries
    assert (start.source, start.why, start.next) == ("failed", "RestoreError: shard 1 is lost", None)


def test_starts_that_fail_one_after_another_are_several_and_nobody_has_died() -> None:
    """torchrun starts all again after each, within seconds, and no rank knows an incarnation."""
    history = History()
    for attempt in range(3):
        for rank in (0, 1):
            began = 20 * attempt + rank
            history.say(began, f"rank {rank}", RESTORE_STARTED(), pid=10 * attempt + rank)
            failed = RESTORE_FAILED(why="RestoreError: shard 1 is lost", seconds=1.0)
            history.say(began + 1, f"rank {rank}", failed, pid=10 * attempt + rank)
    report = history.report(live=LIVE)
    assert [start.source for start in report.recoveries] == ["failed"] * 3
    assert report.deaths == []


def test_troubles_are_listed_and_strange_fields_do_no_harm() -> None:
    history = History()
    gap = STREAM_GAP(group=0, shard=0, iteration=7, joins=11, why="9 bytes have not come")
    history.say(0, "shadow node 0", gap)
    for name in ("trainer.ended", "node.fenced", "trainer.restore.agreed", "peer.lost", "trainer.first"):
        for value in (None, "x", [1], {"a": 1}, 1e300, True):
            fields = {"iteration": value, "incarnation": value, "node": value, "seconds": value, "why": value}
            history.say(1, "rank 0", Occurrence(name, fields))
    report = history.report()
    assert report.troubles[0].event == "stream.gap"
    assert "9 bytes have not come" in text(report)


def test_nothing_that_others_have_said_steers_the_terminal(crash: History) -> None:
    strange = "\x1b]0;owned\x07"
    history = History()
    for event in crash.events:
        fields = {
            **event.fields,
            **{key: strange for key in ("why", "from") if key in event.fields},
            strange: strange,
        }
        history.say(event.time - START, event.source, Occurrence(event.name, fields), event.pid, strange)
    history.say(200, f"rank {strange}", RESTORE_STARTED())
    history.say(201, f"rank {strange}", RESTORE_ENDED(from_=strange, iteration=2, seconds=4.0))
    history.say(202, strange, NODE_TROUBLE(why=strange))
    history.say(203, f"shadow {strange}", NODE_ENDED())
    report = history.report(live=LIVE, notes=[strange])
    assert "owned" in text(report)
    assert not {"\x1b", "\x07"} & set(text(report))


def test_events_are_merged_by_time_and_each_counts_once() -> None:
    history = History()
    history.say(2, "shadow node 0", NODE_ENDED())
    history.say(1, "shadow node 1", NODE_ENDED())
    of_another_job = Event(START, "rank 0", "trainer.first", job="other")
    of_every_job = Event(START + 3, "controller", "controller.ended")
    events = merge_events([*history.events, *history.events, of_another_job, of_every_job], JOB.job)
    assert [event.source for event in events] == ["shadow node 1", "shadow node 0", "controller"]


@pytest.mark.parametrize(
    ("words", "seconds"),
    [("90min", 5400), ("2h", 7200), ("1.5 d", 129600), ("30s", 30)],
)
def test_since_is_how_long_ago(words: str, seconds: float) -> None:
    assert parse_since(words, 1_000_000.0) == 1_000_000.0 - seconds


def test_since_is_a_time() -> None:
    assert parse_since("2023-11-14T22:13:20Z", 0) == START
    assert parse_since("2023-11-14T23:13:20+01:00", 0) == START
    for wrong in ("yesterday", "", "2h30", "-3h", "2023-13-01", "9999-12-31T23:59:59-23:59", "9" * 400 + "d"):
        with pytest.raises(ValueError, match="write 2026-11-23T21:00:00Z, or how long ago: 90min"):
            parse_since(wrong, 0)


def test_a_refusal_is_what_the_next_start_follows(crash: History) -> None:
    """Both nodes have it; the broken ring of the other rank is its consequence."""
    for node in (0, 1):
        refusal = TRAINING_REFUSED(incarnation=7, iteration=41, rank="rank 1 (h1)", why="a hook changes p0")
        crash.say(100.1, f"shadow node {node}", refusal)
    (_, again) = crash.report(live=LIVE).recoveries
    assert again.after == "the script was refused in iteration 41 on rank 1 (h1): a hook changes p0"
    assert [trouble.event for trouble in crash.report(live=LIVE).troubles] == ["training.refused"] * 2
    assert "after the script was refused in iteration 41 on rank 1 (h1)" in text(crash.report(live=LIVE))


def test_starts_that_fail_alike_are_one_paragraph() -> None:
    history = History()
    for number, why in enumerate(["StateError: x", "StateError: x", "StateError: x", "StateError: y"]):
        history.say(10.0 * number, "rank 0", RESTORE_STARTED(), pid=number)
        failed = RESTORE_FAILED(why=why, seconds=1.0)
        history.say(10.0 * number + 1, "rank 0", failed, pid=number)
    report = history.report()
    assert len(report.recoveries) == 4, "--json has all"
    starts, _ = text(report).split("Last committed iteration")
    assert starts.count("StateError: x") == 1
    assert starts.count("StateError: y") == 1
    last = report.recoveries[2].time[11:23]
    assert f"2 more starts failed in this way, the last at {report.recoveries[2].time[5:10]} {last}" in starts
