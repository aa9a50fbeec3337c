"""Arbitration (P4Runtime specification, section 5)."""

from __future__ import annotations

import pytest
from finsy.proto import rpc_code

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
    with pytest.raises(Failure) as refused:
        backup.set_pipeline()
    assert refused.value.code == "PERMISSION_DENIED"
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
    default, other = running.client(10), running.client(5, role="other")
    assert default.arbitration() == (OK, 10)
    assert other.arbitration() == (OK, 5)
    other.set_pipeline()
    other.write(insert(other.mac_entry(1, 1, "punt")))
    stranger = Client(running.address, 5, role="other")
    with pytest.raises(Failure) as used:
        stranger.arbitration()
    assert used.value.code == "INVALID_ARGUMENT"
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
    with pytest.raises(Failure) as refused:
        running.client(election_id, device=device).receive()
    assert refused.value.code == code


def test_election_id_in_use_is_said_so_that_finsy_understands(running: Running) -> None:
    assert running.client(10).arbitration() == (OK, 10)
    with pytest.raises(Failure, match="election id 10 is already used"):
        running.client(10).receive()


@pytest.mark.parametrize(("device", "role"), [(9, ""), (3, "other")])
def test_stream_keeps_device_and_role(running: Running, device: int, role: str) -> None:
    client = running.client(10)
    client.arbitration()
    client.arbitrate(11, device, role)
    with pytest.raises(Failure) as refused:
        client.receive()
    assert refused.value.code == "FAILED_PRECONDITION"


def test_only_primary_writes(running: Running, primary: Client) -> None:
    backup = running.client(0)
    assert backup.arbitration() == (BACKUP, 1)
    entry = primary.mac_entry(1, 1, "punt")
    for refused in (backup, running.client(None)):
        with pytest.raises(Failure) as denied:
            refused.write(insert(entry))
        assert (denied.value.code, denied.value.errors) == ("PERMISSION_DENIED", [])
    with pytest.raises(Failure) as unknown:
        primary.write(insert(entry), device_id=8)
    assert unknown.value.code == "NOT_FOUND"
    primary.write(insert(entry))
    assert len(backup.read(primary.entry("by_mac"))) == 1


def test_stream_limit(running: Running) -> None:
    clients = [running.client(each) for each in range(1, 33)]
    for client in clients:
        assert client.receive().WhichOneof("update") == "arbitration"
    with pytest.raises(Failure) as refused:
        running.client(99).receive()
    assert refused.value.code == "RESOURCE_EXHAUSTED"
