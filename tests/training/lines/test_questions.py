"""When a line asks its node what it lacks, without sockets and clocks."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.lines.questions import AGAIN_SECONDS, SOON_SECONDS, Questions

AUTHOR = pb.RecordPart(job="demo", run="one", position=1)
REPAIRED = pb.RepairedRange(start=1, stop=5)


def quiet() -> Questions:
    """Return questions of which the first one is answered, at time 0: the node awaits nothing."""
    questions = Questions(AUTHOR)
    assert questions.ask(0.0) is not None
    questions.hear_answer(awaits_copies=False)
    return questions


def test_nothing_is_asked_of_a_node_that_asks_for_nothing_itself() -> None:
    questions = Questions(None)
    questions.note_record(0.0)
    assert questions.seconds_left(10.0) == math.inf
    assert questions.ask(10.0) is None


def test_a_connection_begins_with_a_question_and_then_asks_once_more_for_each_record() -> None:
    questions = quiet()
    assert questions.seconds_left(100.0) == math.inf
    questions.note_record(100.0)
    questions.note_record(100.004)  # which does not put it off
    assert questions.ask(100.0) is None
    assert math.isclose(questions.seconds_left(100.0), SOON_SECONDS)
    part = questions.ask(100.01)
    assert part == pb.RecordPart(job="demo", run="one", position=1, iteration=-1, repair=pb.RepairTalk())
    questions.hear_answer(awaits_copies=False)
    assert questions.seconds_left(1000.0) == math.inf
    questions.begin_again()
    assert questions.seconds_left(1000.0) == 0


def test_a_node_that_awaits_copies_is_asked_again_and_again() -> None:
    questions, now = quiet(), 0.0
    questions.note_record(now)
    for _ in range(3):
        now += AGAIN_SECONDS
        assert questions.ask(now) is not None
        questions.hear_answer(awaits_copies=True)
        assert math.isclose(questions.seconds_left(now), AGAIN_SECONDS)


def test_one_question_is_open_at_a_time() -> None:
    questions = Questions(AUTHOR)
    assert questions.ask(0.0) is not None
    questions.note_record(0.0)
    questions.note_repaired(REPAIRED)
    assert questions.seconds_left(10.0) == math.inf and questions.ask(10.0) is None
    questions.hear_answer(awaits_copies=False)
    part = questions.ask(10.0)
    assert part is not None and list(part.repair.repaired) == [REPAIRED]


def test_after_a_repair_the_next_question_comes_soon_and_does_not_repeat_it() -> None:
    questions = quiet()
    questions.note_repaired(REPAIRED)
    assert questions.ask(1.0) is not None
    questions.hear_answer(awaits_copies=True)
    assert math.isclose(questions.seconds_left(1.0), SOON_SECONDS)
    part = questions.ask(2.0)
    assert part is not None and not part.repair.repaired


def test_a_record_during_a_question_has_another_one_asked() -> None:
    """The answer may not know of it."""
    questions = Questions(AUTHOR)
    assert questions.ask(0.0) is not None
    questions.note_record(0.0)
    questions.hear_answer(awaits_copies=False)
    assert questions.ask(1.0) is not None


@given(st.lists(st.sampled_from(["record", "repaired", "ask", "answer", "again"]), max_size=40))
def test_what_was_told_is_asked_about_in_the_end_and_each_repair_told_once(acts: list[str]) -> None:
    questions, now, is_open = Questions(AUTHOR), 0.0, False
    stops: list[int] = []
    for number, act in enumerate(acts):
        now += 0.01
        match act:
            case "record":
                questions.note_record(now)
            case "repaired":
                questions.note_repaired(pb.RepairedRange(start=number, stop=number + 1))
            case "ask" if (part := questions.ask(now)) is not None:
                assert not is_open
                is_open = True
                stops += [repaired.stop for repaired in part.repair.repaired]
            case "answer" if is_open:
                questions.hear_answer(awaits_copies=False)
                is_open = False
            case "again":
                questions.begin_again()
                is_open = False
    if is_open:
        questions.hear_answer(awaits_copies=False)
    if (part := questions.ask(now + 1)) is not None:
        stops += [repaired.stop for repaired in part.repair.repaired]
    assert stops == [number + 1 for number, act in enumerate(acts) if act == "repaired"]
