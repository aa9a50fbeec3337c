"""Arbitration (P4Runtime specification, section 5)."""

from __future__ import annotations

import grpc
import pytest
from finsy.proto import U128, p4r, p4r_grpc, rpc_code

from softswitch.p4runtime.arbitration import MAX_EMPTY_ROLES, MAX_ROLE_NAME, Arbitration
from softswitch.p4runtime.arbitration import Client as Peer
from softswitch.p4runtime.session import MAX_HOST_STREAMS
from softswitch.program.state import StatusError
from tests.softswitch.support.client import Client, Failure, Running, insert

OK, BACKUP, NOBODY = rpc_code.OK, rpc_code.ALREADY_EXISTS, rpc_code.NOT_FOUND


def test_highest_election_id_is_primary(running: Running) -> None:
    first = running.client(10)
    assert first.arbitration() == (OK, 10)
    lower = running.client(5)
    assert lower.arbitration() == (BACKUP, 10)
    higher = running.client(20)
    assert higher.arbitration() == (OK, 20)
    assert first.arbitration() == (BACKUP, 20)
    assert lower.arbitration() == (BACKUP, 20)


def test_lost_primary_promotes_nobody(running: Running) -> None:
    primary, backup = running.client(10), None
    assert primary.arbitration() == (OK, 10)
    backup = running.client(5)
    assert backup.arbitration() == (BACKUP, 10)
    primary.close()
    assert backup.arbitration() == (NOBODY, 10)
    with pytest.raises(Failure) as refusal:
        backup.set_pipeline()
    assert refusal.value.code == "PERMISSION_DENIED"
    # The highest id so far still excludes lower ones; an equal one is accepted.
    backup.arbitrate(9)
    assert backup.arbitration() == (NOBODY, 10)
    backup.arbitrate(10)
    assert backup.arbitration() == (OK, 10)
    backup.set_pipeline()


def test_downgraded_primary_leaves_none(running: Running) -> None:
    primary = running.client(10)
    assert primary.arbitration() == (OK, 10)
    backup = running.client(5)
    assert backup.arbitration() == (BACKUP, 10)
    primary.arbitrate(4)
    assert primary.arbitration() == (NOBODY, 10)
    assert backup.arbitration() == (NOBODY, 10)


def test_unset_election_id_is_never_primary(running: Running) -> None:
    standby = running.client(None)
    assert standby.arbitration() == (NOBODY, None)
    zero = running.client(0)
    assert zero.arbitration() == (OK, 0)
    assert standby.arbitration() == (BACKUP, 0)


def test_election_ids_above_64_bits(running: Running) -> None:
    low, high = running.client((1 << 64) - 1), running.client(1 << 64)
    assert low.arbitration()[1] in ((1 << 64) - 1, 1 << 64)
    assert high.arbitration() == (OK, 1 << 64)


def test_roles_are_independent(running: Running) -> None:
    default, client = running.client(10), running.client(5, role="other")
    assert default.arbitration() == (OK, 10)
    assert client.arbitration() == (OK, 5)
    client.set_pipeline()
    client.write(insert(client.mac_entry(1, 1, "punt")))
    stranger = Client(running.address, 5, role="other")
    with pytest.raises(Failure) as refusal:
        stranger.arbitration()
    assert refusal.value.code == "INVALID_ARGUMENT"
    stranger.role = "unknown"
    with pytest.raises(Failure) as unknown:
        stranger.write()
    assert unknown.value.code == "NOT_FOUND"
    stranger.close()


@pytest.mark.parametrize(
    ("device", "election_id", "code"), [(9, 1, "NOT_FOUND"), (3, 10, "INVALID_ARGUMENT")]
)
def test_stream_refused(running: Running, device: int, election_id: int, code: str) -> None:
    assert running.client(10).arbitration() == (OK, 10)
    with pytest.raises(Failure) as refusal:
        running.client(election_id, device=device).receive()
    assert refusal.value.code == code


def test_election_id_in_use_is_said_so_that_finsy_understands(running: Running) -> None:
    assert running.client(10).arbitration() == (OK, 10)
    with pytest.raises(Failure, match="election id 10 is already used"):
        running.client(10).receive()


@pytest.mark.parametrize(("device", "role"), [(9, ""), (3, "other")])
def test_stream_keeps_device_and_role(running: Running, device: int, role: str) -> None:
    client = running.client(10)
    client.arbitration()
    client.arbitrate(11, device, role)
    with pytest.raises(Failure) as refusal:
        client.receive()
    assert refusal.value.code == "FAILED_PRECONDITION"


def test_only_primary_writes(running: Running, primary: Client) -> None:
    backup = running.client(0)
    assert backup.arbitration() == (BACKUP, 1)
    entry = primary.mac_entry(1, 1, "punt")
    for client in (backup, running.client(None)):
        with pytest.raises(Failure) as denied:
            client.write(insert(entry))
        assert (denied.value.code, denied.value.errors) == ("PERMISSION_DENIED", [])
    with pytest.raises(Failure) as unknown:
        primary.write(insert(entry), device_id=8)
    assert unknown.value.code == "NOT_FOUND"
    primary.write(insert(entry))
    assert len(backup.read(primary.entry("by_mac"))) == 1


def test_stream_limit(running: Running) -> None:
    clients = [running.client(election_id) for election_id in range(1, MAX_HOST_STREAMS + 1)]
    for client in clients:
        assert client.receive().WhichOneof("update") == "arbitration"
    with pytest.raises(Failure) as refusal:
        running.client(99).receive()
    assert refusal.value.code == "RESOURCE_EXHAUSTED"


class Silent(Peer):
    """A client that takes no notice of what it is sent."""

    def send(self, message: p4r.StreamMessageResponse) -> None:
        """Discard a message."""


def hello(role: str, election_id: int) -> p4r.MasterArbitrationUpdate:
    return p4r.MasterArbitrationUpdate(role=p4r.Role(name=role), election_id=U128.encode(election_id))


def test_roles_without_clients_are_forgotten() -> None:
    arbitration = Arbitration(0)
    stays, visitor = Silent(), Silent()
    arbitration.update(stays, hello("stays", 1))
    for number in range(1000):
        visitor = Silent()
        arbitration.update(visitor, hello(f"role {number}", 9))
        arbitration.leave(visitor)
    assert len(arbitration.roles) == MAX_EMPTY_ROLES + 2
    assert arbitration.is_primary(stays)
    # One of those that left last still excludes lower election ids.
    assert arbitration.update(Silent(), hello("role 999", 8)) is None
    with pytest.raises(StatusError, match="a role's name has at most"):
        arbitration.update(Silent(), hello("r" * (MAX_ROLE_NAME + 1), 1))


def test_a_stream_begins_with_arbitration(running: Running) -> None:
    with grpc.insecure_channel(running.address) as channel:
        answers = p4r_grpc.P4RuntimeStub(channel).StreamChannel(iter([p4r.StreamMessageRequest()]))
        with pytest.raises(grpc.RpcError) as refusal:
            next(answers)
        assert refusal.value.code() == grpc.StatusCode.FAILED_PRECONDITION
