"""Who may call a shadow node and send it step records: attacks, roles, hosts and half-open connections."""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from checkmate.job.addresses import split_address
from checkmate.job.schema import Job
from checkmate.keys.access import INSECURE
from checkmate.keys.contexts import channel_credentials, server_credentials
from checkmate.keys.errors import KeysError
from checkmate.keys.folder import RoleKeys
from checkmate.keys.roles import Role
from checkmate.nodes.stubs import Stubs, reason
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc import shadow_pb2_grpc as rpc
from checkmate.rpc.channels import OPTIONS, open_channel
from checkmate.rpc.protocol import PROTOCOL
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.shadow import admission
from checkmate.shadow.admission import Addresses, CallerCheck
from checkmate.shadow.process import Serving
from checkmate.training.start.places import Place
from testbed.copies import Copies, local_job
from testbed.jobs import keys_of
from testbed.record_line import RecordLine
from testbed.small_training import SmallTraining, status
from tests.shadow.test_service import expect_refusal, request_of
from tests.support.keys import role_keys, secured, served_job
from tests.support.labs.end_hosts import needs_buffers
from tests.support.shadow.processes import NodeProcess
from tests.support.shadow.recording_node import RecordingNode
from tests.support.waiting import wait_until

pytestmark = needs_buffers


@pytest.fixture(autouse=True)
def secure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INSECURE, raising=False)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Return a job of two shadow nodes, with keys."""
    return secured(local_job(nodes=2), tmp_path / "ours")


@pytest.fixture
def trained(job: Job) -> Iterator[SmallTraining]:
    """Yield a training that has done one iteration, with both nodes of the job."""
    with ExitStack() as stack:
        yield train(job, stack)


def train(job: Job, stack: ExitStack) -> SmallTraining:
    copies = Copies(job)
    stack.callback(copies.close)
    for node in (0, 1):
        stack.enter_context(Serving(job, node, insecure=job.keys is None))
    training = SmallTraining(job, copies)
    stack.callback(training.close)
    training.begin([0, 1])
    training.seed_all()
    wait_until(lambda: all(status(job, n).holds[0].live for n in (0, 1)), "live")
    training.iterate()
    wait_until(lambda: all(status(job, n).holds[0].stepped == 0 for n in (0, 1)), "committed")
    return training


def attack(job: Job, keys: RoleKeys | None) -> list[str]:
    """Read parameters, empty a node, take the job over, and forge a record. Return what succeeded."""
    successes = []
    fetch = pb.FetchRequest(job=job.job, shard=pb.Shard(), iteration=0)
    reserve = pb.ReserveRequest(job=job.job, iteration=0, seconds=5)
    fence = pb.FenceRequest(protocol=PROTOCOL, job=job.job, timeout=1)
    begin = request_of(job, incarnation=9, run="theirs")
    calls: dict[str, Callable[[ShadowStub], object]] = {
        "Reserve": lambda stub: stub.Reserve(reserve, timeout=5),
        "Fetch": lambda stub: list(stub.Fetch(fetch, timeout=5)),
        "Fence": lambda stub: stub.Fence(fence, timeout=5),
        "Begin": lambda stub: stub.Begin(begin, timeout=5),
    }
    with open_channel(job, 0, keys) as channel:
        for name, call in calls.items():
            try:
                call(ShadowStub(channel))
            except grpc.RpcError:
                continue
            successes.append(name)
    try:
        line = RecordLine(job, 0, keys)
    except OSError:
        return successes
    part = pb.RecordPart(job=job.job, incarnation=9, run="theirs", start=begin.start, iteration=0)
    line.send(part)
    wait_until(lambda: bool(line.replies) or line.closed.is_set(), "an answer")
    if line.replies and not line.refusal:
        successes.append("record")
    line.close()
    return successes


def test_a_stranger_owns_a_checkpoint_without_keys_and_gets_nothing_with_them(
    job: Job, tmp_path: Path
) -> None:
    victim = local_job(nodes=2)
    with ExitStack() as stack:
        train(victim, stack)
        assert attack(victim, None) == ["Reserve", "Fetch", "Fence", "Begin", "record"]
    open_job = replace(job, keys=None)
    other_job = secured(open_job, tmp_path / "theirs")
    with ExitStack() as stack:
        training = train(job, stack)
        assert attack(open_job, None) == []
        assert attack(other_job, keys_of(other_job, Role.TRAINER)) == []
        training.iterate()  # undisturbed
        wait_until(lambda: status(job, 0).holds[0].stepped == 1, "committed")


def denied(call: Callable[[], object], rpc_name: str, role: Role) -> None:
    with expect_refusal(
        grpc.StatusCode.PERMISSION_DENIED, f"role {role} may not call {rpc_name}, which is for"
    ):
        call()


def test_each_role_does_its_own_part_and_no_more(trained: SmallTraining, job: Job) -> None:
    shard, name = pb.Shard(), job.job
    of_role = {role: keys_of(job, role) for role in Role}
    with ExitStack() as stack:
        stubs = {r: ShadowStub(stack.enter_context(open_channel(job, 0, k))) for r, k in of_role.items()}
        for role in (Role.READER, Role.CONTROLLER):
            stub = stubs[role]
            assert stub.Status(pb.StatusRequest(protocol=PROTOCOL, job=name), timeout=5).holds
            denied(lambda: stub.Begin(request_of(job), timeout=5), "Begin", role)  # noqa: B023
            denied(lambda: stub.Fence(pb.FenceRequest(protocol=PROTOCOL, job=name), timeout=5), "Fence", role)  # noqa: B023
            denied(lambda: stub.Settle(pb.SettleRequest(job=name), timeout=5), "Settle", role)  # noqa: B023
            denied(lambda: stub.Seed(iter([pb.Seeds()]), timeout=5), "Seed", role)  # noqa: B023
        fetch = pb.FetchRequest(job=name, shard=shard, iteration=0)
        reserve = pb.ReserveRequest(job=name, iteration=0, seconds=5)
        assert stubs[Role.READER].Reserve(reserve, timeout=5).granted
        assert list(stubs[Role.READER].Fetch(fetch, timeout=5))
        denied(lambda: list(stubs[Role.CONTROLLER].Fetch(fetch, timeout=5)), "Fetch", Role.CONTROLLER)
        trainer = stubs[Role.TRAINER]
        denied(lambda: list(trainer.Commit(iter([pb.Progress()]), timeout=5)), "Commit", Role.TRAINER)
        denied(lambda: list(trainer.Parts(pb.PartsRequest(), timeout=5)), "Parts", Role.TRAINER)
        denied(lambda: trainer.Reserve(pb.ReserveRequest(job=name), timeout=5), "Reserve", Role.TRAINER)
        denied(lambda: stubs[Role.SHADOW].Begin(request_of(job), timeout=5), "Begin", Role.SHADOW)


def test_only_trainers_send_step_records(trained: SmallTraining, job: Job) -> None:
    for role in (Role.READER, Role.SHADOW, Role.CONTROLLER):
        line = RecordLine(job, 0, keys_of(job, role))
        assert line.closed.wait(5)
        assert line.refusal == f"role {role} may not call step records, which is for trainer"
        line.close()
    line = RecordLine(job, 0, keys_of(job, Role.TRAINER))
    assert not line.answer(trained.part(1)).refused
    line.close()


def test_a_shadow_node_of_another_host_is_refused(tmp_path: Path) -> None:
    here, elsewhere = served_job("gpt", "127.0.0.1"), served_job("gpt", "192.0.2.7")
    keys = role_keys(here, tmp_path, Role.SHADOW)
    server = grpc.server(ThreadPoolExecutor(2), interceptors=[CallerCheck(elsewhere)], options=OPTIONS)
    node = RecordingNode()
    rpc.add_ShadowServicer_to_server(node, server)
    port = server.add_secure_port("127.0.0.1:0", server_credentials(keys))
    server.start()
    try:
        with grpc.secure_channel(f"127.0.0.1:{port}", channel_credentials(keys), options=OPTIONS) as channel:
            why = "Release came with a certificate of role shadow from 127.0.0.1, which is not a host"
            with expect_refusal(grpc.StatusCode.PERMISSION_DENIED, why):
                ShadowStub(channel).Release(pb.ReleaseRequest(job="gpt"), timeout=5)
    finally:
        server.stop(0).wait()
        node.stop()


def test_refusals_are_one_sentence(trained: SmallTraining, job: Job, tmp_path: Path) -> None:
    other_job = secured(job, tmp_path / "theirs")
    fence = pb.FenceRequest(protocol=PROTOCOL, job=job.job)
    sentences = {}
    for name, keys in (
        ("role", keys_of(job, Role.READER)),
        ("authority", keys_of(other_job, Role.TRAINER)),
        ("none", None),
    ):
        with Stubs(job, keys) as stubs:
            sentences[name] = stubs.ask([0], lambda stub: stub.Fence, fence)[0]
    assert sentences == {
        "role": "role reader may not call Fence, which is for trainer",
        "authority": "can't be reached (its certificate is not one for this address by the authority in this "
        "host's folder of keys)",
        "none": "can't be reached (it closed the connection: if it uses TLS, this process needs keys too)",
    }
    with pytest.raises(OSError, match="CERTIFICATE") as info:
        RecordLine(job, 0, keys_of(other_job, Role.TRAINER))
    assert reason(info.value).startswith("its certificate is not one for this address")


def test_a_node_without_tls_is_named(job: Job) -> None:
    words = "it does not use TLS: it runs with --insecure, or is an older version"
    keys = keys_of(job, Role.TRAINER)
    with Serving(job, 0, insecure=True), Stubs(job, keys) as stubs:
        status_of = stubs.ask([0], lambda stub: stub.Status, pb.StatusRequest(protocol=PROTOCOL, job=job.job))
        assert status_of[0] == f"can't be reached ({words})"
        with pytest.raises(OSError, match="SSL") as info:
            RecordLine(job, 0, keys)
        assert reason(info.value) == words


def test_half_open_handshakes_hold_neither_workers_nor_trainers(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "HANDSHAKE_SECONDS", 1)
    node = job.node(0)
    mgmt = ("127.0.3.1", int(node.mgmt.rpartition(":")[2]))
    hello = bytes.fromhex("160301020001")  # the beginning of a ClientHello
    with ExitStack() as stack:
        stack.enter_context(Serving(job, 0))
        silent = []
        for address in (mgmt, node.records_at):
            for number in range(150):
                sock = stack.enter_context(socket.create_connection(address, 5))
                sock.sendall(hello[: number % 7])
                silent.append((address, sock))
        before = time.monotonic()
        line = RecordLine(job, 0, keys_of(job, Role.TRAINER))
        stack.callback(line.close)
        fence = pb.FenceRequest(protocol=PROTOCOL, job=job.job, timeout=1)
        with Stubs(job, keys_of(job, Role.TRAINER)) as stubs:
            assert isinstance(stubs.ask([0], lambda stub: stub.Fence, fence)[0], pb.NodeStatus)
        assert "is not a start" in line.answer(pb.RecordPart(job=job.job)).refused or line.refusal
        assert time.monotonic() - before < 5
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("records of")]
        assert len(threads) <= 130
        for address, sock in silent:
            if address == node.records_at:
                sock.settimeout(5)
                with_end(sock)


def with_end(sock: socket.socket) -> None:
    """Check that the other side ends a connection, in whatever way, within the socket's timeout."""
    try:
        while sock.recv(1 << 10):
            pass
    except ConnectionError:
        return


@pytest.mark.parametrize(
    "payload", [b"neither TLS nor a greeting" * 100, b"\x16\x03\x01\x00\x04junk"], ids=["text", "junk"]
)
def test_a_stranger_leaves_bounded_lines(job: Job, payload: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with Serving(job, 0), caplog.at_level(logging.INFO, "checkmate"):
        for number in range(40):
            with socket.create_connection(job.node(0).records_at, 5) as sock:
                sock.sendall(payload)
                sock.settimeout(5)
                with_end(sock)
            if number == 0:
                wait_until(lambda: "step records from 127.0.0.1: " in caplog.text, "a line")
        lines = [
            record.getMessage() for record in caplog.records if "step records from" in record.getMessage()
        ]
        assert 1 <= len(lines) <= 15
        assert max(map(len, lines)) < 400
        line = RecordLine(job, 0, keys_of(job, Role.TRAINER))
        line.close()


@pytest.mark.slow
def test_failed_handshakes_leave_no_lines_of_grpc(job: Job, start: Callable[..., NodeProcess]) -> None:
    node = start(job, 0, "--no-view")
    assert node.line().startswith("ready")
    for _ in range(20):
        with socket.create_connection(split_address(job.node(0).mgmt), 5) as sock:
            sock.sendall(b"neither TLS nor HTTP/2" * 100)
            sock.settimeout(5)
            with_end(sock)
    code, errors = node.end(signal.SIGINT)
    assert (code, "ssl_transport" in errors, "andshake" in errors) == (0, False, False)


def test_a_name_is_looked_up_once_and_again_when_that_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def look_up(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        names.append(host)
        if host == "gone":
            raise socket.gaierror("no such name")
        return [(0, 0, 0, "", (f"192.0.2.{len(names)}", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    addresses = Addresses(seconds=60)
    assert [addresses.lookup(host) for host in ("one", "gone", "one", "gone")] == [
        ["192.0.2.1"],
        [],
        ["192.0.2.1"],
        [],
    ]
    assert names == ["one", "gone"]
    brief = Addresses(seconds=0)
    assert [brief.lookup("one"), brief.lookup("one")] == [["192.0.2.3"], ["192.0.2.4"]]


def test_without_keys_nothing_starts_and_the_error_has_the_remedy(tmp_path: Path) -> None:
    job = replace(local_job(nodes=1), keys=tmp_path)
    with pytest.raises(KeysError, match=r"role shadow: run `checkmate keys FILE`.*demo/shadow"):
        Serving(job, 0)
    with pytest.raises(KeysError, match=r"role trainer: run `checkmate keys FILE`.*demo/trainer"):
        Place(job, 0, 0, 0).keys()
