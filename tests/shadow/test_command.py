"""`checkmate shadow` as a process: output, exit status, and nodes that are killed or stopped."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from checkmate.cli.main import app
from checkmate.job.addresses import split_address
from checkmate.job.schema import Job
from checkmate.job.validation import data_of, of_data
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.channels import open_channel
from checkmate.shadow.logic.commit import MAX_SILENCE
from checkmate.shadow.process import Serving
from checkmate.shadow.service import GROWTH, max_connections
from testbed.copies import Copies, local_job
from testbed.small_training import SmallTraining, status
from tests.support.documents import check_document
from tests.support.keys import without_warning
from tests.support.labs.end_hosts import needs_buffers
from tests.support.shadow.processes import NodeProcess
from tests.support.waiting import wait_until

pytestmark = needs_buffers


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_the_command_serves_until_it_is_told_to_end(
    start: Callable[..., NodeProcess], number: signal.Signals
) -> None:
    job = local_job(nodes=1)
    process = start(job, 0, "--no-view")
    assert process.line() == f"ready: shadow node 0 of job {job.job}; stop with Ctrl-C\n"
    node_status = status(job, 0)
    assert (node_status.node, node_status.holds_nothing, node_status.fenced) == (0, True, False)
    with open_channel(job, 0, None) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(service="checkmate.v1.Shadow"), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    code, words = process.end(number)
    assert (code, without_warning(words)) == (0, "")


@pytest.mark.slow
def test_json_says_where_the_node_stands_each_second(start: Callable[..., NodeProcess]) -> None:
    job = local_job(nodes=1)
    process = start(job, 0, "--json", "--threads", "1")
    check_document("shadow", ready := json.loads(process.line()))
    assert (ready["ready"], ready["job"], ready["node"]) == (True, job.job, 0)
    with ExitStack() as stack:
        copies = Copies(job)
        stack.callback(copies.close)
        training = SmallTraining(job, copies)
        stack.callback(training.close)
        training.begin([0])
        training.seed_all()
        wait_until(lambda: status(job, 0).holds[0].live, "live")
        training.iterate()
        wait_until(lambda: status(job, 0).holds[0].stepped == 0, "stepped")
    while not (document := json.loads(process.line()))["holds"]:
        pass  # of seconds before that
    check_document("shadow", document := json.loads(process.line()))
    then, now = (datetime.fromisoformat(line_document["time"]) for line_document in (ready, document))
    assert now.utcoffset() == timedelta(0)
    assert then < now < then + timedelta(minutes=2)
    hold = document["holds"][0]
    assert (hold["stepped"], hold["live"], hold["lag"]) == (0, True, 0)
    assert hold["bytes"] == sum(nic["bytes"] for nic in document["nics"])
    assert set(document["bytes_per_second"]) == {nic["ip"] for nic in document["nics"]}
    assert document["memory_bytes"] > 50_000_000
    code, errors = process.end(signal.SIGINT)
    assert code == 0
    lines = errors.splitlines()
    assert any(line.endswith("DP group 0, shard 0: live before iteration 0") for line in lines)
    for line in lines:
        log_time = datetime.strptime(line[:19], "%Y-%m-%d %H:%M:%S")
        assert abs(datetime.now() - log_time) < timedelta(minutes=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--id", "3"], "has no shadow node 3; its ids are 0, 1"),
        ([], "this machine has the NICs of shadow nodes 0, 1: use --id"),
        (["--id", "0", "--grace", "0"], "grace"),
        (["--id", "0", "--threads", "0"], "threads"),
        (["--id", "0", "--receive-buffer", "2000"], "receive-buffer"),
    ],
)
def test_the_command_explains_bad_input(tmp_path: Path, arguments: list[str], message: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(data_of(local_job(nodes=2), exclude_none=True)))
    result = CliRunner().invoke(app, ["shadow", str(file), *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert isinstance(result.exception, SystemExit)


@pytest.mark.slow
def test_without_an_id_the_machines_addresses_tell_the_node(start: Callable[..., NodeProcess]) -> None:
    data = data_of(local_job(nodes=2), exclude_none=True)
    for nic in data["shadow_nodes"][0]["nics"]:
        nic["ip"] = nic["ip"].replace("127.", "198.", 1)
    process = start(of_data(Job, data), None, "--no-view")
    assert process.line().startswith("ready: shadow node 1 ")
    data["shadow_nodes"][1]["nics"][1]["ip"] = "198.0.5.2"
    _, words = start(of_data(Job, data), None).process.communicate(timeout=60)
    assert words == (
        "error: this machine has the NICs of no shadow node of job demo; their addresses are "
        "0: 198.0.4.1 and 198.0.5.1; 1: 127.0.4.2 and 198.0.5.2\n"
    )


def test_why_a_node_cannot_serve_is_one_clear_line(start: Callable[..., NodeProcess]) -> None:
    job = local_job(nodes=1)
    first = start(job, 0, "--no-view")
    assert first.line().startswith("ready")
    second = start(job, 0, "--no-view")
    _, words = second.process.communicate(timeout=60)
    address = job.node(0).mgmt
    assert second.process.returncode == 1
    assert without_warning(words) == (
        f"error: {address}, the mgmt address of shadow node 0, is in use; is shadow node 0 running already?\n"
    )
    assert first.end(signal.SIGINT)[0] == 0


@pytest.mark.slow
def test_an_address_of_another_machine_is_one_clear_line(start: Callable[..., NodeProcess]) -> None:
    data = data_of(local_job(nodes=1), exclude_none=True)
    data["shadow_nodes"][0]["mgmt"] = "192.0.2.7:7000"
    foreign = start(of_data(Job, data), 0, "--no-view")
    _, words = foreign.process.communicate(timeout=60)
    assert foreign.process.returncode == 1
    words = without_warning(words)
    assert words.startswith("error: 192.0.2.7:7000, the mgmt address of shadow node 0, is not an address")
    assert words.count("\n") == 1


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_node_that_is_killed_holds_nobody_up_and_no_shard_is_lost_with_replicas(
    start: Callable[..., NodeProcess], victim: int
) -> None:
    """Kill the decider or a follower during iterations: the others' checkpoint is complete."""
    job = local_job(nodes=3, ranks=2, replicas=2)
    process = start(job, victim, "--no-view")
    assert process.line().startswith("ready")
    with ExitStack() as stack:
        for node in set(range(3)) - {victim}:
            stack.enter_context(Serving(job, node))
        copies = Copies(job)
        stack.callback(copies.close)
        training = SmallTraining(job, copies)
        stack.callback(training.close)
        training.begin([0, 1, 2])
        training.seed_all()
        wait_until(lambda: all(h.live for n in range(3) for h in status(job, n).holds), "live")
        for _ in range(3):
            training.iterate()
        wait_until(lambda: all(h.stepped == 2 for n in range(3) for h in status(job, n).holds), "stepped")
        process.end(signal.SIGKILL)
        killed = time.monotonic()
        survivors = [node for node in range(3) if node != victim]
        for _ in range(10):
            training.iterate()
            time.sleep(0.01)
        wait_until(lambda: all(h.stepped == 12 for n in survivors for h in status(job, n).holds), "stepped")
        assert time.monotonic() - killed < 3 * MAX_SILENCE, "waited for the dead"
        reserved = pb.ReserveRequest(job=job.job, iteration=13, seconds=10)
        assert all(training.stubs[node].Reserve(reserved, timeout=5).granted for node in survivors)
        training.iterate()
        for shard in range(3):
            for node in set(training.holders(shard)) - {victim}:
                training.check(node, shard, 13)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_node_that_is_stopped_for_long_is_passed_over_and_counts_again_when_it_has_caught_up(
    start: Callable[..., NodeProcess], replicas: int
) -> None:
    """Another node has its shards; otherwise the others would wait for it."""
    job = local_job(nodes=2, ranks=2, replicas=replicas)
    process = start(job, 0, "--no-view")
    assert process.line().startswith("ready")
    with ExitStack() as stack:
        stack.enter_context(Serving(job, 1))
        copies = Copies(job)
        stack.callback(copies.close)
        training = SmallTraining(job, copies)
        stack.callback(training.close)
        training.begin([0, 1])
        training.seed_all()
        wait_until(lambda: all(h.live for n in range(2) for h in status(job, n).holds), "live")
        training.iterate()
        wait_until(lambda: status(job, 1).holds[0].stepped == 0, "stepped")
        process.process.send_signal(signal.SIGSTOP)
        training.iterate()
        training.iterate()
        if replicas > 1:
            wait_until(lambda: status(job, 1).holds[0].stepped == 2, "the decider was silent", 15)
        else:
            time.sleep(2 * MAX_SILENCE)
            assert status(job, 1).holds[0].stepped == 0
        process.process.send_signal(signal.SIGCONT)
        wait_until(lambda: all(status(job, n).holds[0].stepped == 2 for n in range(2)), "caught up")
        training.iterate()
        wait_until(lambda: all(status(job, n).holds[0].stepped == 3 for n in range(2)), "together again")
        for node in range(2):
            request = pb.ReserveRequest(job=job.job, iteration=3, seconds=10)
            assert training.stubs[node].Reserve(request, timeout=5).granted
            training.check(node, node, 3)


def test_idle_connections_leave_descriptors_for_the_node(start: Callable[..., NodeProcess]) -> None:
    """Strangers may open as many as they like. Calls succeed once their time for the greeting is over."""
    job = local_job(nodes=1)
    process = start(job, 0, "--no-view")
    assert process.line().startswith("ready")
    pid = process.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    assert soft == min(hard, 65536)
    before = len(os.listdir(f"/proc/{pid}/fd"))
    most = max_connections(GROWTH * job.rank_count)
    address = split_address(job.node(0).mgmt)
    with ExitStack() as stack:
        for _ in range(most + 200):
            stack.enter_context(contextlib.closing(socket.create_connection(address)))
        assert len(os.listdir(f"/proc/{pid}/fd")) <= before + most + 50
        wait_until(lambda: answers(job), "an answer", 30)


def answers(job: Job) -> bool:
    try:
        return status(job, 0).node == 0
    except grpc.RpcError:
        return False


def test_many_signals_at_once_end_a_node_like_one() -> None:
    """A handler may run while the main thread has a lock, also that of the event for which it waits."""
    script = """
import time
from checkmate.cli.shadow import stopping
with stopping() as stopped:
    print("ready", flush=True)
    while not stopped.wait(0.0001):
        pass
    end = time.monotonic() + 1
    while time.monotonic() < end:
        stopped.wait(0.0001)
print("ended", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    end = time.monotonic() + 0.7
    while time.monotonic() < end:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.0002)  # else handlers run within handlers, as deep as Python lets them
    try:
        assert process.communicate(timeout=20)[0] == "ended\n"
    finally:
        process.kill()
