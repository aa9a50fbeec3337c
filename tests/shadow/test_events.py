"""A shadow node's events: who may ask for them, what is answered, and what `checkmate report` makes of it."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import yaml

from checkmate.events.event_log import EventLog
from checkmate.events.kinds import NODE_TROUBLE
from checkmate.events.process_log import keep_in
from checkmate.events.reading import parse_event
from checkmate.job.schema import Job
from checkmate.job.validation import data_of
from checkmate.keys.access import INSECURE
from checkmate.keys.roles import Role
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.channels import open_channel
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.shadow.calls import events as answering
from checkmate.shadow.process import Serving
from testbed.copies import Copies, local_job
from testbed.jobs import keys_of
from testbed.small_training import SmallTraining, status
from tests.shadow.test_service import expect_refusal
from tests.support.cli import invoke
from tests.support.documents import check_document
from tests.support.keys import secured
from tests.support.labs.end_hosts import needs_buffers
from tests.support.shadow.processes import NodeProcess
from tests.support.waiting import wait_until

pytestmark = needs_buffers


@pytest.fixture(autouse=True)
def keep_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "checkmate.cli.report.keep_only", lambda *capabilities: None
    )  # for good, in this process


@pytest.fixture
def log() -> Iterator[EventLog]:
    """Yield the event log of this process, which is a node."""
    job = local_job()
    event_log = EventLog("shadow node 0", job.job).start()
    keep_in(event_log)
    yield event_log
    keep_in(None)
    event_log.close()


def ask_events(job: Job, role: Role | None = None, **more: float) -> pb.EventsReply:
    keys = None if role is None else keys_of(job, role)
    with open_channel(job, 0, keys) as channel:
        reply: pb.EventsReply = ShadowStub(channel).Events(pb.EventsRequest(job=job.job, **more), timeout=5)
        return reply


def names(reply: pb.EventsReply) -> list[str]:
    return [parse_event(line).name for line in reply.events]


def write_job(job: Job, folder: Path) -> str:
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(data_of(job, exclude_none=True, exclude={"keys"})))
    return str(file)


def test_a_start_of_training_is_told(log: EventLog, tmp_path: Path) -> None:
    job = local_job(nodes=1)
    with closing(Copies(job)) as copies, Serving(job, 0, events=log) as serving:
        training = SmallTraining(job, copies)
        training.begin([0])
        training.seed_all()
        wait_until(lambda: status(job, 0).holds[0].live, "live")
        training.iterate()
        wait_until(lambda: status(job, 0).holds[0].stepped == 0, "committed")
        wait_until(lambda: "stream.connected" in names(ask_events(job)), "streams")
        kept_events = [parse_event(line) for line in ask_events(job).events]
        fields = {event.name: dict(event.fields) for event in kept_events}
        assert fields["training.begun"]["iteration"] == 0
        assert fields["shard.seeded"] == {"group": 0, "shard": 0, "iteration": -1}
        assert fields["hold.changed"]["state"] == "live"
        assert fields["stream.connected"]["count"] >= 1
        reached = serving.reached()
        assert reached is not None and reached.fields["iteration"] == 0
        assert names(ask_events(job, since=kept_events[-1].time + 1)) == []
        file = write_job(job, tmp_path)
        code, page = invoke("report", file, "--insecure")
        assert code == 0
        assert "no events of ranks" in page and "shadow node 0" in page
        code, text = invoke("report", file, "--insecure", "--json")
        check_document("report", document := json.loads(text[text.index("{") :]))
        assert {event["event"] for event in document["events"]} >= {"training.begun", "hold.changed"}
        assert document["deaths"] == [] and len(document["clocks"]) == 1
        assert abs(document["clocks"][0]["ahead"]) < 1
        training.close()
    code, page = invoke("report", file, "--insecure")
    assert code == 0, "a report of nobody is a report"
    assert "can't be reached" in page and "no events of ranks" in page


def test_all_roles_may_ask_and_strangers_may_not(
    log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(INSECURE, raising=False)
    job = secured(local_job(nodes=1), tmp_path / "ours")
    foreign_job = secured(replace(local_job(nodes=1), keys=None), tmp_path / "theirs")
    log.keep(NODE_TROUBLE(why="x"), logging.ERROR, "x")
    with Serving(job, 0, events=log):
        for role in Role:
            assert names(ask_events(job, role)) == ["node.trouble"]
        at_ours = replace(foreign_job, shadow_nodes=job.shadow_nodes)
        for role in Role:
            with pytest.raises(grpc.RpcError):
                ask_events(at_ours, role)
        with pytest.raises(grpc.RpcError):
            ask_events(job)


def test_a_request_that_does_not_fit_is_refused(log: EventLog) -> None:
    job = local_job(nodes=1)
    with Serving(job, 0, events=log), open_channel(job, 0, None) as channel:
        stub = ShadowStub(channel)
        with expect_refusal(grpc.StatusCode.INVALID_ARGUMENT, "`since` is not a time"):
            stub.Events(pb.EventsRequest(job=job.job, since=float("nan")), timeout=5)
        with expect_refusal(grpc.StatusCode.INVALID_ARGUMENT, "other"):
            stub.Events(pb.EventsRequest(job="other"), timeout=5)


def test_an_answer_is_bounded_and_has_the_newest(log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    job = local_job(nodes=1)
    monkeypatch.setattr(answering, "ANSWER_BYTES", 5000)
    for number in range(100):
        log.keep(NODE_TROUBLE(why=str(number)), logging.ERROR, "")
    with Serving(job, 0, events=log):
        reply = ask_events(job)
    assert reply.older
    numbers = [int(parse_event(line).fields["why"]) for line in reply.events]
    assert 5 < len(numbers) < 50
    assert numbers == list(range(numbers[0], 100))


@pytest.mark.slow
def test_a_node_that_was_killed_is_in_the_report(
    start: Callable[..., NodeProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next process answers for it; its log is read from the folder if there is none."""
    job, folder = local_job(nodes=1), tmp_path / "events"
    options = ("--no-view", "--log-format", "json", "--events", str(folder))
    first = start(job, 0, *options)
    assert first.line().startswith("ready")
    file = str(tmp_path / "job.yaml")
    wait_until(lambda: list(folder.glob("*.jsonl")), "the log")
    wait_until(lambda: any(path.stat().st_size for path in folder.glob("*.jsonl")), "an event")
    code, words = first.end(signal.SIGKILL)
    lines = [json.loads(line) for line in words.splitlines()]
    assert (code, [line.get("event") for line in lines]) == (-9, [None, "node.started"])
    _, page = invoke("report", file, "--insecure", "--events", str(folder))
    assert "shadow node 0, process " in page and "has not begun again" in page
    second = start(job, 0, *options)
    assert second.line().startswith("ready")
    code, text = invoke("report", file, "--insecure", "--json")
    (died,) = json.loads(text[text.index("{") :])["deaths"]
    assert (died["who"], died["pid"]) == ("shadow node 0", first.process.pid)
    assert died["back"]
    code, words = second.end(signal.SIGTERM)
    assert (code, json.loads(words.splitlines()[-1])["event"]) == (0, "node.ended")
    _, page = invoke("report", file, "--insecure", "--events", str(folder))
    assert "Who was stopped" in page and f"process {second.process.pid}" in page


@pytest.mark.slow
def test_bad_input_is_one_clear_error(start: Callable[..., NodeProcess], tmp_path: Path) -> None:
    job = local_job(nodes=1)
    (tmp_path / "file").write_text("")
    node = start(job, 0, "--no-view", "--log-format", "json", "--events", str(tmp_path / "file"))
    code, words = node.end(signal.SIGCONT)
    (error,) = [line for line in map(json.loads, words.splitlines()) if line["level"] == "error"]
    assert code == 2
    assert error["message"] == f"events can't be kept in {tmp_path}/file: it is not a folder"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--since", "yesterday"], "--since: 'yesterday' is not a time; write"),
        (["--events", "nowhere"], "nowhere: No such file or directory"),
        (["--events", "EMPTY"], "no event log (*.jsonl) in this folder"),
    ],
)
def test_bad_input_of_a_report_says_what_would_be_right(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    file = write_job(local_job(nodes=1), tmp_path)
    (tmp_path / "empty").mkdir()
    texts = [str(tmp_path / "empty") if argument == "EMPTY" else argument for argument in arguments]
    code, output = invoke("report", file, "--insecure", *texts)
    assert code == 2
    assert words in output
