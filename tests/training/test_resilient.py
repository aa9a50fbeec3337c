"""Pieces of recovery in place: meetings at several nodes, their store, gloo's sockets, attempts, DDP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import grpc
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkmate.job.schema import Job
from checkmate.launch.word import Speaker
from checkmate.nodes.stubs import Stubs
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import PROTOCOL
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.shadow.calls import meet
from checkmate.shadow.calls.meet import MeetingRoom
from checkmate.shadow.logic.group import CallRefused
from checkmate.shadow.logic.meeting import RankStore
from checkmate.training.errors import RefusedError, SessionError
from checkmate.training.in_place.attendance import (
    PREFERENCE_SECONDS,
    Attendance,
    MeetingError,
    NodeStore,
    wrong_event,
)
from checkmate.training.in_place.groups import ProcessGroups, Wrappers
from checkmate.training.in_place.resilient import Attempt, FailedAttempts, resilient
from checkmate.training.protect import Protection
from checkmate.training.start.survivor import Loss
from testbed.jobs import job as job_of
from testbed.ports import free_port
from tests.support.fuzz import fuzz, messages
from tests.support.shadow.recording_node import RecordingNode
from tests.support.waiting import wait_until

RANKS = 3


class HostNode(RecordingNode):
    """A node that does nothing but host meetings."""

    def __init__(self, job: Job, address: str) -> None:
        self._room = MeetingRoom(job)
        super().__init__(address)

    def Meet(self, request: pb.MeetRequest, context: grpc.ServicerContext) -> Iterator[pb.MeetEvent]:
        yield from self._room.meet(request, context.is_active, context.add_callback)

    def Store(self, request: pb.StoreRequest, context: grpc.ServicerContext) -> pb.StoreReply:
        try:
            return self._room.store(request)
        except CallRefused as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    def Conclude(self, request: pb.ConcludeRequest, context: grpc.ServicerContext) -> pb.ConcludeReply:
        return self._room.conclude(request)

    def stop(self) -> None:
        self._room.stop()
        super().stop()


class Hosts:
    """The nodes of a job of three ranks, and the ranks that attend."""

    def __init__(self, nodes: int) -> None:
        whole = job_of("mine", ranks=RANKS, nodes=nodes)
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(nodes)]
        shadow_nodes = [
            replace(node, mgmt=address) for node, address in zip(whole.shadow_nodes, addresses, strict=True)
        ]
        self.job = replace(whole, shadow_nodes=tuple(shadow_nodes))
        self.nodes: dict[int, HostNode] = {}
        self._stubs: list[Stubs] = []
        self._attendances: list[Attendance] = []

    def serve(self, node: int) -> HostNode:
        """Serve a node."""
        self.nodes[node] = HostNode(self.job, self.job.node(node).mgmt)
        return self.nodes[node]

    def attend(self, rank: int, *, trained: bool = False) -> Attendance:
        """Have a new process of a rank wait."""
        stubs = Stubs(self.job, None)
        token = bytes([rank, len(self._stubs)] * 8)
        attendance = Attendance(self.job, rank, stubs, token, trained=trained)
        self._stubs.append(stubs)
        self._attendances.append(attendance)
        return attendance

    def meet(self) -> list[Attendance]:
        """Have all ranks meet; fail unless they have met in the same place."""
        attendances = [self.attend(rank) for rank in range(RANKS)]
        with ThreadPoolExecutor(RANKS) as pool:
            meetings = [*pool.map(lambda attendance: attendance.await_meeting(20), attendances)]
        assert len({meeting.id for meeting in meetings}) == 1
        return attendances

    def close(self) -> None:
        """End all."""
        for attendance in self._attendances:
            attendance.close()
        for stubs in self._stubs:
            stubs.close()
        for node in self.nodes.values():
            node.stop()


@contextmanager
def hosts(nodes: int, without: int | None = None) -> Iterator[Hosts]:
    here = Hosts(nodes)
    try:
        for node in range(nodes):
            if node != without:
                here.serve(node)
        yield here
    finally:
        here.close()


@pytest.mark.parametrize("without", [None, 0, 1])
def test_ranks_meet_at_the_first_node_that_all_reach(without: int | None) -> None:
    with hosts(2, without) as here:
        attendances = here.meet()
        stores = [attendance.store(20) for attendance in attendances]
        stores[0].set("key", b"value")
        assert [store.get("key") for store in stores] == [b"value"] * RANKS
        stores[1].multi_set(["a", "b"], [b"1", b"2"])
        assert stores[2].multi_get(["a", "b"]) == [b"1", b"2"]
        assert stores[2].add("count", 2) + stores[1].add("count", 3) == 7
        assert stores[0].compare_set("key", b"value", b"other") == b"other"
        assert stores[0].check(["key"]) and not stores[0].check(["none"])
        assert stores[0].delete_key("key") and stores[0].num_keys() == 3
        with pytest.raises(MeetingError, match=r"no value for none within 0.3 s"):
            stores[0].wait(["none"], timedelta(seconds=0.3))


def test_survivors_hear_of_a_loss_and_their_store_fails() -> None:
    with hosts(1) as here:
        attendances = here.meet()
        heard = [threading.Event() for _ in attendances]
        for attendance, event in zip(attendances, heard, strict=True):
            attendance.when_lost(event.set)
        store = attendances[1].store(30)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.get, "never")
            attendances[0].close()
            assert heard[1].wait(10)
            assert heard[2].wait(10)
            with pytest.raises(MeetingError, match="rank 0: its process has ended"):
                waiting.result(10)
        assert attendances[1].loss == "rank 0: its process has ended, or its host is away"
        assert attendances[2].await_loss(5)


def test_a_loss_before_a_meeting_is_taken_has_ranks_come_again() -> None:
    with hosts(1) as here:
        first, second, third = (here.attend(rank) for rank in range(RANKS))
        third.await_meeting(20)
        calls = [attendance._tables[0].call for attendance in (first, second)]
        third.close()  # before the others have looked
        wait_until(lambda: first._tables[0].call is not calls[0], "rank 0 to come again")
        wait_until(lambda: second._tables[0].call is not calls[1], "rank 1 to come again")
        with ThreadPoolExecutor(RANKS) as pool:
            waiting = [pool.submit(attendance.await_meeting, 20) for attendance in (first, second)]
            meetings = [here.attend(2).await_meeting(20), *(future.result() for future in waiting)]
        assert len({meeting.id for meeting in meetings}) == 1


def test_a_second_process_of_a_rank_ends_the_first() -> None:
    with hosts(1) as here:
        first, *_ = here.meet()
        here.attend(0)
        wait_until(lambda: first.verdict, "the first to be told")
        assert first.verdict == "rank 0: another process has taken its place"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": pb.StoreRequest.GET, "keys": ["k", "k"]}, "a key is there twice"),
        (
            {"kind": pb.StoreRequest.SET, "keys": ["k"], "values": [b"x" * (1 << 20) + b"x"]},
            "bytes of a value",
        ),
        ({"kind": pb.StoreRequest.APPEND, "keys": ["big"], "values": [b"x"]}, "bytes of a value"),
        ({"kind": pb.StoreRequest.GET, "keys": [f"big{n}" for n in range(5)]}, "bytes of all values"),
        ({"kind": pb.StoreRequest.SWAP, "keys": ["k"], "values": [b""]}, "number of values"),
        ({"kind": pb.StoreRequest.ADD, "keys": ["k"], "amount": 1 << 41}, "the amount"),
    ],
)
def test_a_store_refuses_what_would_not_end_well(fields: dict[str, Any], words: str) -> None:
    job = job_of("mine", ranks=2)
    room = MeetingRoom(job)
    calls = []
    for rank in range(2):
        request = pb.MeetRequest(job=job.job, protocol=PROTOCOL, rank=rank, token=b"t" * 16)
        calls.append(room.meet(request, lambda: True, lambda _: None))
        event = next(calls[-1])
    meeting = event.meeting.id
    large = b"x" * (1 << 20)
    for key in ("big", *(f"big{n}" for n in range(5))):
        store = pb.StoreRequest(job=job.job, meeting=meeting, keys=[key], values=[large])
        room.store(store)
    with pytest.raises(CallRefused, match=words):
        room.store(pb.StoreRequest(job=job.job, meeting=meeting, **fields))


def test_the_end_of_a_host_is_no_loss_but_leaves_ranks_blind() -> None:
    with hosts(2) as here:
        attendances = here.meet()
        here.nodes.pop(0).stop()
        wait_until(lambda: all(attendance.is_blind for attendance in attendances), "the end to be noticed")
        assert [attendance.loss for attendance in attendances] == [None] * RANKS
        for attendance in attendances:
            attendance.close()
        here.meet()


def test_ranks_that_do_not_come_are_named() -> None:
    with hosts(2, without=1) as here, pytest.raises(MeetingError) as error:
        here.attend(1).await_meeting(2.0)
    assert "not met within 2 s: shadow node 0" in str(error.value)
    assert "waiting for ranks 0, 2; shadow node 1" in str(error.value)
    assert "can't be reached" in str(error.value)


def test_a_collective_fails_once_groups_are_aborted() -> None:
    """gloo has no abort: a rank waits for one that never comes, until another thread ends the wait."""
    with hosts(1) as here:
        attendance, *_ = here.meet()
        store = attendance.store(60)
        peers = dist.ProcessGroupGloo

        def peer() -> Any:
            prefix = dist.PrefixStore("checkmate/0//cpu/", there)  # type: ignore[attr-defined]
            return peers(prefix, 1, 2, timedelta(seconds=60))

        there = attendance.store(60)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(peer)
            groups = ProcessGroups(store, 0, 2, "gloo", 60)
            other_group = other.result(60)
            timer = threading.Timer(0.5, groups.abort)
            timer.start()
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(3))
            timer.join()
            groups.release()
            del other_group
        assert not dist.is_initialized()


def test_attempts_in_a_row_are_limited_unless_one_completes_an_iteration() -> None:
    failures = FailedAttempts(3)
    for iteration in (-1, 5, 5, 6, 6):
        failures.add(Loss("rank 1 is lost", iteration, 0.0))
    with pytest.raises(MeetingError, match="3 attempts in a row have failed .* rank 1 is lost"):
        failures.add(Loss("rank 1 is lost", 6, 0.0))
    assert failures.count == 6


@pytest.fixture
def alone(tmp_path: Any) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_ddp_does_not_broadcast_what_a_new_process_has(alone: None) -> None:
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.parallel.distributed, "_sync_module_states", lambda **_: calls.append(1))
        for broadcast in (False, True):
            with Wrappers().watch(broadcast=broadcast):
                DistributedDataParallel(nn.Linear(2, 2))
                DistributedDataParallel(nn.Linear(2, 2), init_sync=True)
    assert len(calls) == 1 + 2, "what the script asks for counts"


def fail(_: torch.Tensor) -> None:
    raise RuntimeError("a rank is lost")


def test_a_script_may_hold_a_wrapper_whose_backward_was_cut_off(alone: None) -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2)
    wrappers = Wrappers()
    with wrappers.watch(broadcast=True):
        first = DistributedDataParallel(model)
    cut = model[0].bias.register_hook(fail)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="a rank is lost"):
        first(x).sum().backward()
    cut.remove()
    with pytest.raises(RuntimeError, match="ready only once"):
        model(x).sum().backward()
    wrappers.release()
    second = DistributedDataParallel(model)
    for _ in range(2):
        second(x).sum().backward()


def test_an_environment_that_contradicts_the_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("mine", ranks=RANKS)
    monkeypatch.setattr("checkmate.training.in_place.resilient.whole_job", lambda: job)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SessionError, match="WORLD_SIZE 2, but the job mine has 3 ranks"):
        resilient(lambda: None)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(SessionError, match="use `checkmate launch`, or an agent for each rank"):
        resilient(lambda: None)


ID = b"m" * 16


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (pb.MeetEvent(meeting=pb.Meeting(id=ID, ranks=[0, 1, 7])), "it names 3 ranks, of which the job"),
        (pb.MeetEvent(meeting=pb.Meeting(id=ID, ranks=[0, 1, 1])), "it names 3 ranks, of which the job"),
        (pb.MeetEvent(meeting=pb.Meeting(id=ID, ranks=[0, 1])), "a meeting of 2 ranks, which are not all"),
        (pb.MeetEvent(meeting=pb.Meeting(id=ID, ranks=[1, 2])), "a meeting without rank 0"),
        (pb.MeetEvent(meeting=pb.Meeting(id=b"m", ranks=[0, 1, 2])), "a meeting without rank 0, or without"),
        (pb.MeetEvent(meeting=pb.Meeting(id=ID * 2, ranks=[0, 1, 2])), "id has 32 bytes, and may have 16"),
        (pb.MeetEvent(meeting=pb.Meeting(id=ID)), "a meeting without rank 0"),
        (pb.MeetEvent(meeting=pb.Meeting(id=ID, ranks=range(1 << 19))), "ranks has 524288 numbers"),
        (pb.MeetEvent(meeting=pb.Meeting(id=ID, ranks=[0, 1, 2], trained=[5])), "it names 1 rank, of which"),
        (pb.MeetEvent(returned=pb.Returned(ranks=[4])), "it names 1 rank, of which the job"),
        (pb.MeetEvent(waiting=pb.Waiting(ranks=[4])), "it names 1 rank, of which the job"),
    ],
    ids=str,
)
def test_an_event_that_no_meeting_explains_is_none(event: pb.MeetEvent, words: str) -> None:
    assert wrong_event(event, job_of("mine", ranks=RANKS), 0).startswith(words)


def test_a_meeting_is_of_whole_replicas_and_not_of_too_few() -> None:
    job = replace(job_of("mine", ranks=RANKS), min_replicas=2)

    def wrong(*ranks: int) -> str:
        return wrong_event(pb.MeetEvent(meeting=pb.Meeting(id=ID, ranks=ranks)), job, 0)

    assert not (wrong(0, 1, 2) or wrong(0, 2))
    assert "not all of the replicas that it needs" in wrong(0)


@fuzz(100, event=messages(pb.MeetEvent, ranks=st.integers(0, 3), id=st.just(ID), trained=st.just(0)))
def test_any_event_of_a_node_is_taken_or_named(event: pb.MeetEvent) -> None:
    job = replace(job_of("mine", ranks=RANKS), min_replicas=2)
    if not wrong_event(event, job, 0) and event.HasField("meeting"):
        assert set(event.meeting.ranks) in ({0, 1}, {0, 2}, {0, 1, 2})


def test_a_node_that_tells_nonsense_is_left_and_named() -> None:
    with hosts(2) as here:
        said = iter([pb.MeetEvent(meeting=pb.Meeting(id=ID, ranks=[0, 1, 2, 3]))])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(here.nodes[0]._room, "meet", lambda *_: said)
            attendance = here.attend(0)
            wait_until(lambda: attendance._tables[0].is_refused, "the event")
        assert "its answer is not a shadow node's: it names 4 ranks" in attendance._tables[0].why
        others = [here.attend(rank) for rank in range(1, RANKS)]
        for other in others:
            other._tables[0].why = "away for this test"
        with ThreadPoolExecutor(RANKS) as pool:
            meetings = pool.map(lambda rank: rank.await_meeting(20), [attendance, *others])
        assert len({meeting.id for meeting in meetings}) == 1


def test_ranks_that_return_before_the_meeting_is_taken_are_heard_of() -> None:
    """A node may tell of them right behind the meeting, while this process still prefers another node."""
    with hosts(2, without=0) as here:
        attendances = [here.attend(rank) for rank in range(RANKS)]
        first = attendances[0]
        table = first._tables[1]
        wait_until(lambda: table.meeting is not None)
        assert first._chosen is None
        first._hear(table, pb.MeetEvent(returned=pb.Returned(ranks=[2])))
        with ThreadPoolExecutor(RANKS) as pool:
            list(pool.map(lambda attendance: attendance.await_meeting(20), attendances))
        told = threading.Event()
        first.when_returned(told.set)
        assert told.is_set() and first.returned == [2]


class LocalStore(NodeStore):
    """A store in this process, as a node would keep it."""

    def __init__(self) -> None:
        super().__init__(cast(ShadowStub, None), "mine", b"", 0.3)
        self.values = RankStore(1 << 20)
        self.keys: set[str] = set()

    def _ask(
        self, kind: Any, keys: Any, values: Any = (), *, amount: int = 0, timeout: float = 0.0
    ) -> pb.StoreReply:
        self.keys.update(keys)
        time.sleep(0.01)
        request = pb.StoreRequest(kind=kind, keys=keys, values=values, amount=amount, timeout=timeout)
        return meet._carry_out(self.values, request)


def test_a_group_whose_making_failed_does_not_count_for_the_next_one() -> None:
    """Survivors and new processes must use the same keys, or they would never meet."""
    names = []
    for world in (2, 1):  # of two, the second one never comes
        store = LocalStore()
        with suppress(MeetingError):
            ProcessGroups(store, 0, world, "gloo", 0.3).end()
        names.append({key.partition("//")[0] for key in store.keys if "//" in key})
    assert names[0] == names[1] != set()


class RankThere:
    """An attendance whose meeting has begun, and in which no rank is lost."""

    def __init__(self) -> None:
        self.loss: str | None = None
        self.lost_rank: int | None = None
        self.verdict, self.is_blind = "", False
        self.returned = [2]
        self.concluded: list[str] = []

    def await_meeting(self, timeout: float) -> pb.Meeting:
        return pb.Meeting(id=ID, ranks=range(RANKS))

    def when_lost(self, act: Any) -> None: ...

    def when_returned(self, act: Any) -> None:
        act()

    def store(self, timeout: float) -> None: ...

    def await_loss(self, timeout: float) -> bool:
        return self.loss is not None

    def conclude(self, why: str = "") -> None:
        self.concluded.append(why)

    def await_all_done(self) -> bool:
        return True

    def close(self) -> None: ...


class NoGroups:
    """In place of process groups."""

    is_aborted = False

    def __init__(self, *_: object) -> None: ...

    def abort(self) -> None:
        self.is_aborted = True

    release = end = abort


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempt]:
    """An attempt in whose meeting rank 2 is back at once."""
    monkeypatch.setattr("checkmate.training.in_place.resilient.ProcessGroups", NoGroups)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    attendance = cast(Attendance, RankThere())
    made = Attempt(attendance, job_of("mine", ranks=RANKS), 1, 60.0, Speaker())
    yield made
    made.close()


def leave() -> None:
    Protection.leave_if_wanted()


def leave_and_catch() -> None:
    with suppress(Exception):
        leave()


def leave_and_fail() -> None:
    try:
        leave()
    except Exception:  # noqa: BLE001 - as a script may
        raise KeyError("a clean-up that fails")  # noqa: B904


@pytest.mark.parametrize("train", [leave, leave_and_catch, leave_and_fail])
def test_a_function_that_was_told_to_leave_is_called_again_whatever_it_makes_of_that(
    attempt: Attempt, train: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    outcome = attempt.run(train, None, 1.0, 1.0)
    assert isinstance(outcome, Loss)
    assert outcome.words == "rank 2 is back, and takes part from now on"
    assert cast(RankThere, attempt._attendance).concluded == []
    assert ("KeyError: 'a clean-up that fails'" in caplog.text) == (train is leave_and_fail)


@pytest.mark.parametrize(
    "error",
    [ValueError("of the script"), RuntimeError("shapes"), RefusedError("can't be repeated")],
    ids=repr,
)
def test_an_error_of_the_script_is_its_own_also_while_ranks_are_back(
    attempt: Attempt, error: Exception
) -> None:
    def train() -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        attempt.run(train, None, 1.0, 1.0)
    is_refused = isinstance(error, RefusedError)
    assert cast(RankThere, attempt._attendance).concluded == [f"RefusedError: {error}"] * is_refused


def test_a_collective_that_was_broken_off_is_no_error_of_the_script(attempt: Attempt) -> None:
    def train() -> None:
        attempt._leave_at_once()
        raise RuntimeError("Connection closed by peer")

    outcome = attempt.run(train, None, 1.0, 1.0)
    assert isinstance(outcome, Loss) and "is back" in outcome.words


def test_an_attempt_has_one_timer_of_a_kind_and_none_once_it_is_closed(attempt: Attempt) -> None:
    """One that was left over would break off the next attempt, or end the process."""

    def timers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)}

    before = timers()  # of other tests, which may end meanwhile
    for _ in range(3):
        attempt._on_return()
        attempt._on_loss()
    assert len(timers() - before) == 2
    attempt.close()
    attempt._on_return()
    attempt._on_loss()
    wait_until(lambda: timers() <= before, "the end of timers")


def test_a_rank_that_returns_does_not_begin_alone_at_a_node_without_the_meeting() -> None:
    """The other nodes do not know of those that train, and would have it begin after a while."""
    here = Hosts(2)
    here.job = replace(here.job, min_replicas=1, replacement_seconds=1)
    try:
        for node in range(2):
            here.serve(node)
        first = [here.attend(rank) for rank in range(2)]
        with ThreadPoolExecutor(2) as pool:
            meetings = [*pool.map(lambda attendance: attendance.await_meeting(20), first)]
        assert [list(meeting.ranks) for meeting in meetings] == [[0, 1]] * 2
        third = here.attend(2)
        wait_until(lambda: third._tables[1].meeting is not None, "a meeting of one", 20)
        time.sleep(PREFERENCE_SECONDS + 0.2)
        with third._changed:
            assert third._tables[0].others_train and third._choice() is None
        wait_until(lambda: [list(attendance.returned) for attendance in first] == [[2]] * 2, "its return")
        for attendance in first:
            attendance.close()
        again = [here.attend(rank, trained=True) for rank in range(2)]
        with ThreadPoolExecutor(RANKS) as pool:
            meetings = [*pool.map(lambda attendance: attendance.await_meeting(20), [*again, third])]
        assert [list(meeting.ranks) for meeting in meetings] == [[0, 1, 2]] * RANKS
    finally:
        here.close()
