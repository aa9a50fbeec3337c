"""Meetings of ranks on a node: when they begin and end, and their store against one of PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.logic.group import CallRefused
from checkmate.shadow.logic.meeting import Meetings, Quorum, RankStore, Seat

RANKS = 3


def sit(meetings: Meetings, rank: int, process: int = 0, *, trained: bool = False) -> Seat:
    return meetings.sit(rank, bytes([rank, process]), trained=trained)


def met(meetings: Meetings) -> list[Seat]:
    """Return the seats of a meeting that has begun."""
    seats = [sit(meetings, rank) for rank in range(RANKS)]
    for seat in seats:
        assert [event.WhichOneof("kind") for event in seat.take()] == ["meeting"]
    return seats


def meeting_id(seat: Seat) -> bytes:
    assert seat.session is not None
    return seat.session.id


def test_a_meeting_begins_once_all_ranks_have_come() -> None:
    meetings = Meetings(range(RANKS))
    seats = [sit(meetings, rank, trained=rank == 1) for rank in (1, 0)]
    assert meetings.missing == [2]
    assert not any(seat.take() for seat in seats)
    seats.append(sit(meetings, 2))
    events = [seat.take() for seat in seats]
    assert len({event.meeting.id for (event,) in events}) == 1
    assert all(list(event.meeting.trained) == [1] for (event,) in events)


def test_a_rank_of_another_job_has_no_seat() -> None:
    with pytest.raises(CallRefused, match="rank 3 is not in the job"):
        sit(Meetings(range(RANKS)), 3)


def test_all_others_hear_of_a_lost_rank_once_and_meet_again() -> None:
    meetings = Meetings(range(RANKS))
    seats = met(meetings)
    store = meetings.session(meeting_id(seats[0])).store
    meetings.leave(seats[1])
    for seat in (seats[0], seats[2]):
        assert [(event.lost.rank, "process has ended" in event.lost.why) for event in seat.take()] == [
            (1, True)
        ]
    with pytest.raises(CallRefused, match="over: rank 1: its process has ended"):
        meetings.session(meeting_id(seats[0]))
    again = [sit(meetings, rank, trained=True) for rank in (0, 2)]
    for seat in (seats[0], seats[2]):  # late, as the new calls have come first
        meetings.leave(seat)
    assert meetings.missing == [1]
    again.append(sit(meetings, 1, process=1))
    assert all(list(seat.take()[-1].meeting.trained) == [0, 2] for seat in again)
    assert meetings.session(meeting_id(again[0])).store is not store


def test_a_second_process_of_a_rank_takes_its_place() -> None:
    meetings = Meetings(range(RANKS))
    seats = met(meetings)
    sit(meetings, 2, process=1)
    assert all(seat.take()[0].lost.why == "another process has taken its place" for seat in seats)
    assert not any(seat.take() for seat in seats)


def test_a_process_that_waits_makes_way_for_its_successor() -> None:
    meetings = Meetings(range(RANKS))
    first = sit(meetings, 0)
    second = sit(meetings, 0, process=1)
    assert first.take()[0].lost.rank == 0
    meetings.leave(first)
    assert meetings.missing == [1, 2]
    assert not second.take()


def test_a_meeting_ends_when_all_ranks_are_done_or_one_cannot_go_on() -> None:
    meetings = Meetings(range(RANKS))
    seats = met(meetings)
    for rank in range(RANKS):
        assert not any(seat.take() for seat in seats)
        meetings.conclude(meeting_id(seats[0]), rank, "")
    assert all(seat.take() == [pb.MeetEvent(concluded=pb.Concluded(rank=2))] for seat in seats)
    meetings.leave(seats[0])  # who is done may go
    assert not any(seat.take() for seat in seats)
    seats = met(meetings)
    meetings.conclude(meeting_id(seats[0]), 1, "RefusedError: no")
    assert all(seat.take()[0].concluded.why == "RefusedError: no" for seat in seats)


def test_a_store_has_a_limit_that_deleted_keys_do_not_use_up() -> None:
    store = RankStore(1000)
    for _ in range(20):
        store.set("key", b"x" * 800)
        assert store.delete("key")
    store.set("key", b"x" * 800)
    with pytest.raises(CallRefused, match="may have 1000 bytes"):
        store.set("other", b"y" * 100)
    assert store.get(["key"]) == [b"x" * 800]
    with pytest.raises(CallRefused, match="is not a number"):
        store.add("key", 1)


KEYS = st.sampled_from(["a", "b"])
VALUES = st.binary(min_size=1, max_size=3).filter(lambda value: not value.isdigit())
OPERATIONS = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES),
    st.tuples(st.just("swap"), KEYS, VALUES | st.just(b""), VALUES),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("append"), KEYS, VALUES),
    st.tuples(st.just("add"), st.just("number"), st.integers(-5, 5)),
)


@settings(max_examples=200)
@given(st.lists(OPERATIONS, max_size=12))
def test_a_store_does_what_one_of_pytorch_does(operations: list[tuple[object, ...]]) -> None:
    ours = RankStore(1 << 20)
    theirs: Any = HashStore()
    for name, *arguments in operations:
        match name, arguments:
            case "set", [str(key), bytes(value)]:
                ours.set(key, value)
                theirs.set(key, value)
            case "swap", [str(key), bytes(expected), bytes(desired)]:
                theirs_value = theirs.compare_set(key, expected, desired)
                assert ours.swap(key, expected, desired) == theirs_value
            case "delete", [str(key)]:
                assert ours.delete(key) == theirs.delete_key(key)
            case "append", [str(key), bytes(value)]:
                ours.append(key, value)
                theirs.set(key, (theirs.get(key) if theirs.check([key]) else b"") + value)
            case "add", [str(key), int(amount)]:
                assert ours.add(key, amount) == theirs.add(key, amount)
        for key in ("a", "b"):
            assert ours.has([key]) == theirs.check([key])
            if ours.has([key]):
                assert ours.get([key]) == [theirs.get(key)]


REPLICAS = [frozenset((0, 1)), frozenset((2, 3)), frozenset((4, 5))]
QUORUM = Quorum(REPLICAS, least=2, seconds=10.0)


def come(meetings: Meetings, now: float, *ranks: int) -> list[Seat]:
    return [meetings.sit(rank, bytes([rank]), trained=False, now=now) for rank in ranks]


def kinds(seat: Seat) -> list[str | None]:
    return [event.WhichOneof("kind") for event in seat.take()]


def test_enough_replicas_begin_after_a_while() -> None:
    """One of which a rank is missing waits; it is told of the others, and they of it once it is whole."""
    meetings = Meetings(range(6), QUORUM)
    first = come(meetings, 0.0, 0, 1, 2, 4, 5)
    meetings.tick(9.9)
    assert not any(kinds(seat) for seat in first)
    assert meetings.missing == [3]
    meetings.tick(10.0)
    (two,) = [seat for seat in first if seat.rank == 2]
    assert [list(seat.take()[0].meeting.ranks) for seat in first if seat is not two] == [[0, 1, 4, 5]] * 4
    assert kinds(two) == []
    assert meetings.others_train
    come(meetings, 20.0, 3)
    returned = [seat.take() for seat in first if seat is not two]
    assert [list(event.returned.ranks) for events in returned for event in events] == [[2, 3]] * 4
    meetings.tick(21.0)
    assert not any(kinds(seat) for seat in first)
    last = come(meetings, 22.0, 0, 1, 4, 5)
    assert [list(seat.take()[-1].meeting.ranks) for seat in last] == [[*range(6)]] * 4


def test_those_who_were_away_before_are_not_waited_for() -> None:
    """A rank of the last meeting is, because it is started again."""
    meetings = Meetings(range(6), QUORUM)
    come(meetings, 0.0, 0, 1, 2, 3)
    meetings.tick(10.0)
    assert list(meetings.session(_present(meetings)).seats) == [0, 1, 2, 3]
    come(meetings, 30.0, 0, 1, 2)
    assert not meetings.others_train
    meetings.tick(31.0)
    assert not meetings.others_train
    come(meetings, 32.0, 3)
    assert meetings.others_train


def _present(meetings: Meetings) -> bytes:
    assert meetings._session is not None
    return meetings._session.id


def test_too_few_replicas_wait_for_ever() -> None:
    meetings = Meetings(range(6), QUORUM)
    come(meetings, 0.0, 0, 1, 2)
    meetings.tick(1e6)
    assert not meetings.others_train


def test_those_who_wait_hear_that_training_has_ended() -> None:
    meetings = Meetings(range(6), QUORUM)
    seats = come(meetings, 0.0, 0, 1, 2, 3, 4)
    meetings.tick(10.0)
    for seat in seats:
        seat.take()
    for rank in range(4):
        meetings.conclude(_present(meetings), rank, "")
    assert [kinds(seat) for seat in seats] == [["concluded"]] * 5


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["come", "leave", "tick"])), max_size=60))
def test_a_meeting_is_of_whole_replicas_and_nobody_is_forgotten(acts: list[tuple[int, str]]) -> None:
    meetings, now = Meetings(range(6), QUORUM), 0.0
    waiting: dict[int, Seat] = {}

    def check() -> None:
        session = meetings._session
        if session is not None and not session.over:
            whole = [replica for replica in REPLICAS if replica <= session.seats.keys()]
            assert set().union(*whole) == session.seats.keys()
            assert len(whole) >= QUORUM.least

    for rank, act in acts:
        now += 3.0
        if act == "come":
            (waiting[rank],) = come(meetings, now, rank)
        elif act == "leave" and rank in waiting:
            meetings.leave(waiting.pop(rank))
        else:
            meetings.tick(now)
        check()
    # All come again, each time that it hears of a loss or of others who are back.
    for _ in range(3):
        for rank in range(6):
            now += 1.0
            seat = waiting.get(rank)
            if seat is None or seat.session is None or seat.session.over or "returned" in kinds(seat):
                (waiting[rank],) = come(meetings, now, rank)
            check()
    assert meetings._session is not None
    assert meetings._session.seats.keys() == set(range(6))
    assert not meetings.missing or len(meetings.missing) == 6
