"""A trainer's line to a shadow node, over real sockets: breaks lose no records, and sending never blocks."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import threading
import time
from dataclasses import replace

import pytest
import torch

from checkmate import state
from checkmate.job.schema import ShadowNode
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.frames import ANSWER, GREETING, FrameError, Unpacker, pack
from checkmate.rpc.protocol import ANSWER_BYTES
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.training.exclusion import StepExclusion
from checkmate.training.lines import line as line_module
from checkmate.training.lines.line import ANSWERED_EVERY, ATTENTIVE, QUEUED_BYTES, QUEUED_RECORDS, Line
from checkmate.training.record.capture import IterationEnd, RecordDraft
from checkmate.training.record.publisher import DEPARTURE_SECONDS, MAX_HELD_BACK, Publisher
from testbed.jobs import job
from tests.support.shadow.recording_node import SECONDS, RecordingNode
from tests.support.waiting import wait_until


def shadow_node(node: RecordingNode) -> ShadowNode:
    return replace(job().shadow_nodes[0], mgmt=node.address, records=node.records_at)


def part(iteration: int, extra: bytes = b"") -> tuple[int, bytes]:
    return iteration, pb.RecordPart(job="demo", iteration=iteration, extra=extra).SerializeToString()


def test_records_arrive_in_order_and_are_answered(node: RecordingNode, stub: ShadowStub) -> None:
    begin = pb.BeginRequest(job="demo", incarnation=7)
    answers: list[tuple[int, int]] = []
    line = Line(shadow_node(node), stub, lambda: begin, lambda n, r: answers.append((n, r.iteration)))
    line.start()
    for iteration in range(50):
        line.send(*part(iteration))
    assert line.finish(SECONDS)
    line.close()
    assert node.begins == [begin]
    assert [record.iteration for record in node.records] == list(range(50))
    iterations = [
        iteration for iteration in range(50) if iteration < ATTENTIVE or (iteration + 1) % ANSWERED_EVERY == 0
    ]
    assert answers == [(0, iteration) for iteration in [*iterations, 49]]  # and at the end


def test_a_node_that_wants_something_is_asked_more_often(node: RecordingNode, stub: ShadowStub) -> None:
    answers: list[int] = []
    line = Line(shadow_node(node), stub, None, lambda _, reply: answers.append(reply.iteration))
    line.start()
    for iteration in range(100):
        line.send(*part(iteration))
    wait_until(lambda: len(node.records) == 100 and answers[-1] == 99)
    node.wanted_seeds = [pb.SeedWanted(shard=0)]
    answers.clear()
    for iteration in range(100, 120):
        line.send(*part(iteration))
        wait_until(lambda now=iteration: len(node.records) > now)  # type: ignore[misc]
        time.sleep(0.02)
    assert line.finish(SECONDS)
    line.close()
    assert answers[:3] == [103, 104, 105]


def test_what_a_broken_connection_left_unanswered_is_sent_again(
    node: RecordingNode, stub: ShadowStub, caplog: pytest.LogCaptureFixture
) -> None:
    is_answered = threading.Event()
    line = Line(shadow_node(node), stub, pb.BeginRequest, lambda *_: is_answered.set())
    line.start()
    line.send(*part(0))
    assert is_answered.wait(SECONDS)
    node.answering.clear()
    line.send(*part(1))
    line.send(*part(2))
    wait_until(lambda: len(node.records) >= 2)
    with caplog.at_level(logging.INFO):
        node.stop()
        node.records.clear()
        line.send(*part(3))
        node.start()
        assert line.finish(SECONDS)
    line.close()
    assert [record.iteration for record in node.records][-3:] == [1, 2, 3]
    assert len(node.begins) == 2
    assert caplog.text.count("training continues") == 1
    assert "shadow node 0 is back" in caplog.text


def test_what_comes_after_a_break_reaches_the_node_in_the_end(node: RecordingNode, stub: ShadowStub) -> None:
    """Even if nothing was sent between the break and the last record."""
    is_answered = threading.Event()
    line = Line(shadow_node(node), stub, pb.BeginRequest, lambda *_: is_answered.set())
    line.start()
    line.send(*part(0))
    assert is_answered.wait(SECONDS)
    node.stop()
    node.start()
    line.send(*part(1))
    assert line.finish(SECONDS)
    line.close()
    assert [record.iteration for record in node.records][-1] == 1


def test_what_a_node_has_not_read_yet_outlives_the_trainer(node: RecordingNode) -> None:
    """The node stops for a while; meanwhile the trainer is killed with replies that it never read."""
    node.answering.clear()
    child = multiprocessing.get_context("fork").Process(target=send_and_wait, args=(shadow_node(node), 150))
    child.start()
    wait_until(lambda: len(node.records) == 1)
    time.sleep(0.5)
    child.kill()
    child.join()
    time.sleep(0.1)
    node.answering.set()
    wait_until(lambda: len(node.records) == 150)
    assert [record.iteration for record in node.records] == list(range(150))


def send_and_wait(node: ShadowNode, count: int) -> None:
    """A trainer that sends records and then runs until it is killed."""
    sock = socket.create_connection(node.records_at)
    sock.sendall(GREETING)
    for iteration in range(count):
        sock.sendall(pack(part(iteration, bytes(10_000))[1], ANSWER))
    time.sleep(60)


def test_a_reconnect_is_told_once_the_node_has_accepted_it(node: RecordingNode, stub: ShadowStub) -> None:
    requests: list[pb.BeginRequest] = []
    line = Line(shadow_node(node), stub, pb.BeginRequest, lambda *_: None, requests.append)
    line.start()
    wait_until(lambda: len(requests) == 1)
    node.stop()
    time.sleep(0.3)
    assert len(requests) == 1
    node.start()
    wait_until(lambda: len(requests) == 2)
    line.close()
    assert len(node.begins) == 2


def test_a_node_that_comes_and_goes_warns_once(
    node: RecordingNode, stub: ShadowStub, caplog: pytest.LogCaptureFixture
) -> None:
    node.warnings = ["trainers have torch 1, this node 2"]
    line = Line(shadow_node(node), stub, pb.BeginRequest, lambda *_: None)
    line.start()
    for count in (1, 2):
        wait_until(lambda count=count: len(node.begins) == count and line.begin_accepted.is_set())  # type: ignore[misc]
        time.sleep(0.3)
        node.stop()
        node.start()
    line.close()
    assert caplog.text.count("trainers have torch 1, this node 2") == 1


def test_a_node_that_is_away_costs_nothing(
    node: RecordingNode, stub: ShadowStub, caplog: pytest.LogCaptureFixture
) -> None:
    node.stop()
    line = Line(shadow_node(node), stub, pb.BeginRequest, lambda *_: None)
    with caplog.at_level(logging.WARNING):
        line.start()
        start = time.monotonic()
        for iteration in range(100):
            line.send(*part(iteration, bytes(QUEUED_BYTES // 50)))
        assert time.monotonic() - start < 1
        assert len(line._parts) == 49
        assert caplog.text.count("the oldest are dropped") == 1
        assert "shadow node 0 is away: 64 MiB wait (1.3 MiB each)" in caplog.text
        assert "too slowly" not in caplog.text and "until it has been seeded again" in caplog.text
        assert not line.finish(0.1)
        start = time.monotonic()
        line.close()
        assert time.monotonic() - start < 2
    node.start()


def test_large_records_are_answered_one_by_one(
    node: RecordingNode, stub: ShadowStub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a few of them would fill the queue, although the node has them."""
    monkeypatch.setattr(line_module, "_LARGE", QUEUED_BYTES >> 10)
    line = Line(shadow_node(node), stub, pb.BeginRequest, lambda *_: None)
    line.start()
    for iteration in range(ATTENTIVE + 2 * ANSWERED_EVERY):
        line.send(*part(iteration, bytes(QUEUED_BYTES >> 9)))
        wait_until(lambda: not line._parts)
    line.close()
    assert [record.iteration for record in node.records] == list(range(ATTENTIVE + 2 * ANSWERED_EVERY))


def test_records_that_the_node_has_are_dropped_without_a_word(
    node: RecordingNode, stub: ShadowStub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_module, "QUEUED_BYTES", 1)
    node.answering.clear()
    line = Line(shadow_node(node), stub, pb.BeginRequest, lambda *_: None)
    line.start()
    for iteration in range(3 * QUEUED_RECORDS):
        line.send(*part(iteration, b"extra"))
        wait_until(lambda iteration=iteration: line.departed(iteration) and line.connected)  # type: ignore[misc]
    assert len(line._parts) == QUEUED_RECORDS
    assert "dropped" not in caplog.text
    node.stop()  # now nobody knows whether it has read what was dropped
    node.start()
    wait_until(lambda: "shadow node 0 has not answered the records up to iteration 7" in caplog.text)
    line.close()


def test_a_node_that_is_too_slow_is_named_as_such_each_time(
    node: RecordingNode, stub: ShadowStub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_module, "QUEUED_BYTES", 1)
    line = Line(shadow_node(node), stub, pb.BeginRequest, lambda *_: None)
    line.start()
    line.send(*part(0))
    wait_until(lambda: not line._parts)
    for iteration in (1, 101):
        with line._condition:  # the line's thread sends nothing meanwhile
            for offset in range(QUEUED_RECORDS + 2):
                line.send(*part(iteration + offset))
        wait_until(lambda: not line._parts)
    line.close()
    assert caplog.text.count("shadow node 0 takes step records too slowly") == 2


def test_closing_does_not_wait_for_a_node_that_hangs(node: RecordingNode, stub: ShadowStub) -> None:
    node.hanging = True
    line = Line(shadow_node(node), stub, pb.BeginRequest, lambda *_: None)
    line.start()
    wait_until(lambda: bool(node.begins))
    start = time.monotonic()
    line.close()
    assert time.monotonic() - start < 5


def test_closing_does_not_wait_for_a_begin_that_is_just_about_to_be_said(
    node: RecordingNode, stub: ShadowStub
) -> None:
    node.hanging = True

    def begin() -> pb.BeginRequest:
        assert line._closing.wait(10)
        time.sleep(0.2)  # `close` has found no call to cancel
        return pb.BeginRequest()

    line = Line(shadow_node(node), stub, begin, lambda node, reply: None)
    line.start()
    start = time.monotonic()
    line.close()
    assert time.monotonic() - start < 10


def test_a_record_waits_until_the_switch_has_had_its_bytes(node: RecordingNode, stub: ShadowStub) -> None:
    line = Line(shadow_node(node), stub, None, lambda *_: None)
    line.start()
    acknowledged = {(0, 0): 0}
    author = pb.RecordPart(job="demo", incarnation=7, run="first", start=b"start", group=1, position=3)
    publisher = Publisher(
        author, [line], lambda node, iteration, ends: all(acknowledged[k] >= e for k, e in ends.items())
    )
    for iteration in range(2):
        publisher.put(
            RecordDraft(
                iteration, {(0, 0): 100 * iteration}, IterationEnd({"torch": torch.zeros(1)}, {"at": 4})
            )
        )
    assert_only = [0]
    wait_until(lambda: [record.iteration for record in node.records] == assert_only)
    time.sleep(0.1)
    assert [record.iteration for record in node.records] == assert_only
    acknowledged[0, 0] = 100
    wait_until(lambda: len(node.records) == 2)
    publisher.close(SECONDS)
    line.close()
    part = node.records[1]
    assert (part.job, part.incarnation, part.group, part.position) == ("demo", 7, 1, 3)
    assert (part.run, part.start) == ("first", b"start")
    assert [(e.channel, e.shard, e.end) for e in part.ends] == [(0, 0, 100)]
    assert state.loads(part.extra) == {"at": 4}
    assert not part.HasField("step")  # it isn't the group's first rank


class Carrier:
    """A sink whose records depart when the test says so."""

    def __init__(self, node: int = 0) -> None:
        self.node = ShadowNode(id=node, mgmt="127.0.0.1:7000", nics=())
        self.waiting: list[int] = []
        self.newest_departed = -1
        self.progress = pb.RankProgress()

    def send(self, iteration: int, data: bytes) -> None:
        self.waiting.append(iteration)
        self.progress = pb.RecordPart.FromString(data).progress

    def departed(self, iteration: int) -> bool:
        return self.newest_departed >= iteration

    def leave(self) -> None:
        self.newest_departed = max(self.waiting, default=-1)


def test_a_step_waits_until_the_record_before_it_has_left_but_not_for_a_node_that_takes_nothing() -> None:
    swift, stuck = Carrier(0), Carrier(1)
    publisher = Publisher(pb.RecordPart(job="demo", position=1), [swift, stuck], lambda *_: True)
    publisher.await_departed()  # nothing was put
    for iteration in range(3):
        publisher.put(RecordDraft(iteration, {}, IterationEnd({"torch": torch.zeros(1)})))
        wait_until(lambda now=iteration: now in stuck.waiting)  # type: ignore[misc]
        timer = threading.Timer(0.05, swift.leave)
        timer.start()
        start = time.monotonic()
        publisher.await_departed()
        waited = time.monotonic() - start
        assert waited > 0.04
        assert (waited >= DEPARTURE_SECONDS) == (iteration == 0)
        assert swift.departed(iteration)
        timer.join()
    publisher.put(RecordDraft(3, {}, IterationEnd({"torch": torch.zeros(1)})))
    publisher.close(SECONDS)
    assert (swift.progress.trained, stuck.progress.trained) == (3, 3)
    assert swift.progress.waited_seconds > 3 * 0.04
    assert stuck.progress.waited_seconds >= DEPARTURE_SECONDS / 2


def test_a_record_is_held_back_for_one_node_alone() -> None:
    """Whose copies have not arrived, for a while: then it gets the oldest, without its copies."""
    swift, slow = Carrier(0), Carrier(1)
    arrived = -1
    publisher = Publisher(
        pb.RecordPart(job="demo", position=1),
        [swift, slow],
        lambda node, iteration, ends: node == 0 or iteration <= arrived,
    )
    count = MAX_HELD_BACK + 3
    for iteration in range(count):
        publisher.put(RecordDraft(iteration, {}, IterationEnd({"torch": torch.zeros(1)})))
    wait_until(lambda: swift.waiting == [*range(count)])
    wait_until(lambda: slow.waiting == [0, 1, 2])
    assert publisher.newest == count - 1
    arrived = 9
    wait_until(lambda: slow.waiting == [*range(10)])
    arrived = count
    publisher.close(SECONDS)
    assert slow.waiting == [*range(count)]


def test_what_has_departed_is_in_the_kernels_hands(node: RecordingNode, stub: ShadowStub) -> None:
    line = Line(shadow_node(node), stub, None, lambda *_: None)
    assert line.departed(0)  # the node is considered away
    line.start()
    node.answering.clear()
    wait_until(line.begin_accepted.is_set)
    for iteration in range(4):
        line.send(*part(iteration, bytes(100_000)))
        wait_until(lambda now=iteration: line.departed(now))  # type: ignore[misc]
    assert not line.departed(4)
    node.answering.set()
    assert line.finish(SECONDS)
    line.close()


class Unwilling:
    """Can't be pickled, and raises an error without a message."""

    def __reduce__(self) -> str:
        raise KeyError


@pytest.mark.parametrize("extra", [object(), Unwilling()])
def test_extra_that_cannot_be_kept_is_reported(node: RecordingNode, extra: object) -> None:
    publisher = Publisher(pb.RecordPart(job="demo", position=1), [], lambda *_: True)
    publisher.put(RecordDraft(100, {}, IterationEnd({}, extra)))
    publisher.close(SECONDS)
    with pytest.raises(state.StateError) as caught:
        publisher.await_departed()
    assert (caught.value.iteration, publisher.failed_iteration) == (100, 100)


def test_a_step_waits_for_one_copy_at_most() -> None:
    steps = StepExclusion(0)
    cancelled = threading.Event()
    copies: list[float] = []

    def copy_all() -> None:
        for _ in range(200):
            with steps.still(cancelled) as iteration:
                assert iteration is not None
                time.sleep(0.01)
                copies.append(time.monotonic())

    copier = threading.Thread(target=copy_all)
    copier.start()
    waits = []
    for iteration in range(20):
        time.sleep(0.005)
        before, had = time.monotonic(), len(copies)
        steps.begin()
        waits.append(len(copies) - had)
        assert time.monotonic() - before < 1
        steps.end(iteration)
    cancelled.set()
    copier.join()
    assert max(waits) <= 2  # the one in progress; rarely one more that began meanwhile
    assert steps.stepped == 19


def test_a_step_that_failed_does_not_block_the_next() -> None:
    steps = StepExclusion(0)
    steps.begin()
    steps.begin()
    steps.end(0)
    with steps.still(threading.Event()) as iteration:
        assert iteration == 0
    steps.begin()
    cancelled = threading.Event()
    cancelled.set()
    with steps.still(cancelled) as iteration:
        assert iteration is None


def test_a_reply_that_no_training_explains_is_named(
    node: RecordingNode, stub: ShadowStub, caplog: pytest.LogCaptureFixture
) -> None:
    """An iteration of years to come would answer all records that are ever sent."""
    node.reply = lambda part: pb.RecordReply(iteration=1 << 62)
    line = Line(shadow_node(node), stub, pb.BeginRequest, lambda *_: None)
    with caplog.at_level(logging.WARNING):
        line.start()
        line.send(*part(0))
        wait_until(lambda: "iteration is 4611686018427387904, and can be" in caplog.text)
    line.close()


@pytest.mark.parametrize(
    ("filled", "words"),
    [
        ([pb.FilledShard(parameters=range(300_000))], "parameters has 300000 numbers, and may have 262144"),
        ([pb.FilledShard()] * 70_000, "filled has 70000 entries, and may have 65536"),
    ],
    ids=["numbers", "shards"],
)
def test_an_answer_with_more_parameters_than_a_layout_has_is_none(
    node: RecordingNode,
    stub: ShadowStub,
    filled: list[pb.FilledShard],
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All ranks would be told of them."""
    node.filled = filled
    line = Line(shadow_node(node), stub, pb.BeginRequest, lambda *_: None)
    with caplog.at_level(logging.WARNING):
        line.start()
        wait_until(lambda: f"its answer to `Begin` is not a shadow node's: {words}" in caplog.text)
    assert not (line.filled or line.begin_accepted.is_set())
    line.close()


def test_a_node_that_sends_for_ever_does_not_keep_a_line_from_closing(stub: ShadowStub) -> None:
    """Nor does it take more memory than a reply may have."""
    stopped = threading.Event()
    server = socket.create_server(("127.0.0.1", 0))

    def flood() -> None:
        connection, _ = server.accept()
        connection.settimeout(0.2)
        frame = pack(pb.RecordReply(iteration=-1).SerializeToString())
        while not stopped.is_set():
            try:
                connection.sendall(frame * 4096)
            except TimeoutError:
                continue
            except OSError:
                return

    thread = threading.Thread(target=flood)
    thread.start()
    address = f"127.0.0.1:{server.getsockname()[1]}"
    flooded = threading.Event()
    described = replace(job().shadow_nodes[0], mgmt=address, records=address)
    line = Line(described, stub, None, lambda *_: flooded.set())
    line.start()
    line.send(*part(0))
    assert flooded.wait(SECONDS)
    start = time.monotonic()
    line.close()
    assert time.monotonic() - start < SECONDS / 2
    stopped.set()
    thread.join()
    server.close()


def test_a_reply_may_have_as_many_bytes_as_any_answer() -> None:
    with pytest.raises(FrameError, match="not a frame"):
        list(Unpacker(greeted=True, most=ANSWER_BYTES).feed((ANSWER_BYTES + 1).to_bytes(4, "big") + b"\0"))


def test_a_reply_answers_no_record_that_was_not_sent(node: RecordingNode, stub: ShadowStub) -> None:
    """However far it says that records have arrived."""
    node.reply = lambda part: pb.RecordReply(iteration=1 << 40)
    line = Line(shadow_node(node), stub, pb.BeginRequest, lambda *_: None)
    line.start()
    for iteration in range(30):
        line.send(*part(iteration))
    assert line.finish(SECONDS)
    line.close()
    assert [record.iteration for record in node.records] == list(range(30))


def test_what_a_node_lacks_is_asked_for_and_what_was_sent_again_is_told(
    node: RecordingNode, stub: ShadowStub
) -> None:
    """Also while nothing is trained; a question is not a record."""
    author = pb.RecordPart(job="demo", position=3)
    missing = pb.MissingRange(channel=1, shard=2, start=5, missing=7, stop=9)
    replies: list[pb.RecordReply] = []

    def reply(part: pb.RecordPart) -> pb.RecordReply:
        is_question = part.HasField("repair")
        return pb.RecordReply(missing=[missing] if is_question and not part.repair.repaired else [])

    node.reply = reply
    line = Line(shadow_node(node), stub, None, lambda _, answer: replies.append(answer), repairs=author)
    line.start()
    wait_until(lambda: any(answer.missing for answer in replies))
    told = pb.RepairedRange(channel=1, shard=2, start=5, stop=9, digest=bytes(16))
    line.tell_repaired(told)
    wait_until(lambda: any(part.repair.repaired for part in node.records))
    line.send(*part(0))
    assert line.finish(SECONDS)
    line.close()
    questions = [record for record in node.records if record.HasField("repair")]
    assert {(record.job, record.position, record.iteration) for record in questions} == {("demo", 3, -1)}
    assert [list(record.repair.repaired) for record in questions if record.repair.repaired] == [[told]]
    assert [record.iteration for record in node.records if not record.HasField("repair")] == [0]


def test_ranks_without_repairs_ask_nothing(node: RecordingNode, stub: ShadowStub) -> None:
    line = Line(shadow_node(node), stub, None, lambda *_: None)
    line.start()
    line.send(*part(0))
    time.sleep(0.3)
    assert line.finish(SECONDS)
    line.close()
    assert [record.iteration for record in node.records] == [0]


def test_what_is_told_after_the_end_reaches_nothing(
    node: RecordingNode, stub: ShadowStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor may be another file's by then."""
    line = Line(shadow_node(node), stub, None, lambda *_: None, repairs=pb.RecordPart(job="demo"))
    line.start()
    line.close()
    monkeypatch.setattr(os, "eventfd_write", lambda *_: pytest.fail("it was written to"))
    line.tell_repaired(pb.RepairedRange(stop=1))


def test_a_node_that_stands_is_asked_once(node: RecordingNode, stub: ShadowStub) -> None:
    """Or its records would wait behind many questions."""
    node.answering.clear()
    line = Line(shadow_node(node), stub, None, lambda *_: None, repairs=pb.RecordPart(job="demo"))
    line.start()
    time.sleep(0.5)
    line.send(*part(0))
    time.sleep(0.2)
    node.answering.set()
    assert line.finish(SECONDS)
    line.close()
    assert [record.HasField("repair") for record in node.records][:2] == [True, False]


def test_questions_follow_records_and_what_is_awaited(node: RecordingNode, stub: ShadowStub) -> None:
    """There are none while a node has all that was recorded, however long that is."""
    awaits = [True]
    node.reply = lambda part: pb.RecordReply(awaits_copies=part.HasField("repair") and awaits[0])
    line = Line(shadow_node(node), stub, None, lambda *_: None, repairs=pb.RecordPart(job="demo"))

    def questions() -> int:
        return sum(record.HasField("repair") for record in node.records)

    line.start()
    wait_until(lambda: questions() > 3)
    awaits[0] = False
    time.sleep(0.3)
    before = questions()
    time.sleep(0.5)
    assert questions() == before
    line.send(*part(0))
    wait_until(lambda: questions() > before)
    time.sleep(0.3)
    assert questions() <= before + 2
    assert line.finish(SECONDS)
    line.close()
