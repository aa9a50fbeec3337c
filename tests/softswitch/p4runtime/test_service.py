"""Pipeline configs, capabilities and packet I/O of the P4Runtime service."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from finsy.proto import p4r, rpc_code

from softswitch.p4runtime import service
from tests.softswitch.support.client import (
    KINDS,
    Client,
    Config,
    Failure,
    Running,
    insert,
    modify,
    read_p4info,
    wait_for,
)
from tests.softswitch.support.scenarios import CPU_PORT

FRAME = bytes.fromhex("02000000000102000000000288b5") + b"payload of a frame"
Get = p4r.GetForwardingPipelineConfigRequest


def test_without_pipeline(running: Running) -> None:
    client = running.client()
    client.arbitration()
    assert not client.get_pipeline().HasField("p4info")
    for call in (client.read, client.write):
        with pytest.raises(Failure, match="No forwarding pipeline config") as failure:
            call()
        assert failure.value.code == "FAILED_PRECONDITION"


def test_get_pipeline(primary: Client) -> None:
    config = KINDS.with_suffix(".json").read_bytes()
    whole = primary.get_pipeline()
    assert (whole.p4info, whole.p4_device_config, whole.cookie.cookie) == (read_p4info(), config, 77)
    cookie = primary.get_pipeline(Get.COOKIE_ONLY)
    assert (cookie.HasField("p4info"), cookie.p4_device_config, cookie.cookie.cookie) == (False, b"", 77)
    info = primary.get_pipeline(Get.P4INFO_AND_COOKIE)
    assert (info.p4info, info.p4_device_config, info.cookie.cookie) == (read_p4info(), b"", 77)
    device = primary.get_pipeline(Get.DEVICE_CONFIG_AND_COOKIE)
    assert (device.HasField("p4info"), device.p4_device_config) == (False, config)
    with pytest.raises(Failure) as unknown:
        primary.get_pipeline(device=8)
    assert unknown.value.code == "NOT_FOUND"


def test_commit_clears_state(primary: Client) -> None:
    primary.write(insert(primary.mac_entry(1, 1, "punt")), insert(primary.group(1, (1, 1))))
    primary.set_pipeline()
    assert primary.read(primary.entry("by_mac"), primary.group(0)) == []


def test_verify_changes_nothing(primary: Client) -> None:
    primary.write(insert(primary.mac_entry(1, 1, "punt")))
    primary.set_pipeline(Config.VERIFY)
    assert len(primary.read(primary.entry("by_mac"))) == 1


def test_save_then_commit(running: Running, primary: Client) -> None:
    primary.write(insert(primary.mac_entry(0x020000000001, 1, "counted", 2)))
    primary.set_pipeline(Config.VERIFY_AND_SAVE)
    # Writes are for the saved pipeline, packets still for the previous one.
    assert primary.read(primary.entry("by_mac")) == []
    primary.write(insert(primary.mac_entry(0x020000000001, 1, "counted", 3)))
    running.ports[1].inject(FRAME)
    wait_for(lambda: list(running.ports[2].output) == [FRAME], "the frame by the old pipeline")
    primary.set_pipeline(Config.COMMIT, program=None)
    running.ports[1].inject(FRAME)
    wait_for(lambda: list(running.ports[3].output) == [FRAME], "the frame by the new pipeline")
    with pytest.raises(Failure) as nothing:
        primary.set_pipeline(Config.COMMIT, program=None)
    assert nothing.value.code == "NOT_FOUND"


def test_reconcile_keeps_state(primary: Client) -> None:
    entity = primary.mac_entry(1, 1, "counted", 2)
    entity.table_entry.counter_data.packet_count = 4
    keyless = primary.entry("keyless", "forward", 4)
    keyless.table_entry.is_default_action = True
    primary.write(insert(entity), insert(primary.group(1, (1, 1))), modify(keyless))
    queries = [primary.entry("by_mac"), primary.group(0), primary.entry("keyless"), primary.entry("fixed")]
    queries[0].table_entry.counter_data.SetInParent()
    queries[2].table_entry.is_default_action = True
    before = primary.read(*queries)
    assert len(before) == 4
    primary.set_pipeline(Config.RECONCILE_AND_COMMIT)
    assert primary.read(*queries) == before


def test_reconcile_names_what_has_no_place(primary: Client) -> None:
    primary.write(insert(primary.mac_entry(1, 1, "counted", 2)))

    def smaller(request: p4r.SetForwardingPipelineConfigRequest) -> None:
        program = json.loads(request.config.p4_device_config)
        for table in (table for pipeline in program["pipelines"] for table in pipeline["tables"]):
            if table["name"] == "by_mac":
                table["key"] = table["key"][:1]
        request.config.p4_device_config = json.dumps(program).encode()
        del request.config.p4info.tables[0].match_fields[1]

    assert read_p4info().tables[0].preamble.name == "by_mac"
    with pytest.raises(Failure, match="by_mac") as failure:
        primary.set_pipeline(Config.RECONCILE_AND_COMMIT, change=smaller)
    assert failure.value.code == "INVALID_ARGUMENT"
    assert len(primary.read(primary.entry("by_mac"))) == 1


def config(**fields: object) -> Callable[[p4r.SetForwardingPipelineConfigRequest], None]:
    def change(request: p4r.SetForwardingPipelineConfigRequest) -> None:
        for name, value in fields.items():
            setattr(request.config, name, value)

    return change


def unsupported(request: p4r.SetForwardingPipelineConfigRequest) -> None:
    request.config.p4_device_config = request.config.p4_device_config.replace(
        b'"op" : "mark_to_drop"', b'"op" : "mark_to_dance"'
    )


@pytest.mark.parametrize(
    ("action", "change", "says"),
    [
        (Config.VERIFY, config(p4_device_config=b""), "p4_device_config is empty"),
        (Config.VERIFY, config(p4_device_config=b"{"), ""),
        (Config.VERIFY, lambda request: request.config.ClearField("p4info"), "p4info is missing"),
        (Config.VERIFY_AND_COMMIT, lambda request: request.ClearField("config"), "needs a config"),
        (Config.COMMIT, lambda request: None, "must not have a config"),
        (Config.UNSPECIFIED, lambda request: None, "unspecified"),
        (Config.VERIFY_AND_COMMIT, unsupported, "mark_to_dance"),
    ],
)
def test_pipeline_refused(
    primary: Client,
    action: p4r.SetForwardingPipelineConfigRequest.Action.ValueType,
    change: Callable[[p4r.SetForwardingPipelineConfigRequest], None],
    says: str,
) -> None:
    primary.write(insert(primary.mac_entry(1, 1, "punt")))
    with pytest.raises(Failure) as failure:
        primary.set_pipeline(action, change=change)
    assert failure.value.code == "INVALID_ARGUMENT"
    assert says in failure.value.message
    assert len(primary.read(primary.entry("by_mac"))) == 1


def test_capabilities(running: Running) -> None:
    answer = running.client().stub.Capabilities(p4r.CapabilitiesRequest())
    assert answer.p4runtime_api_version == "1.4.1"


def test_packet_in_goes_to_the_primary(running: Running, primary: Client) -> None:
    backup = running.client(0)
    backup.arbitration()
    primary.write(insert(primary.mac_entry(0x020000000001, 3, "punt")))
    running.ports[3].inject(FRAME)
    message = primary.receive()
    assert message.packet.payload == FRAME
    assert [(m.metadata_id, m.value) for m in message.packet.metadata] == [
        (1, b"\0"),
        (2, b"\3"),
    ]
    primary.close()
    # The backup's next message is an arbitration: it got no packet.
    assert backup.arbitration() == (rpc_code.NOT_FOUND, 1)
    running.ports[3].inject(FRAME)
    wait_for(lambda: running.service.sessions.unheard == 1, "a packet that no controller hears")


def packet_out(*metadata: tuple[int, bytes]) -> p4r.StreamMessageRequest:
    message = p4r.StreamMessageRequest()
    message.packet.payload = FRAME
    for number, value in metadata:
        message.packet.metadata.add(metadata_id=number, value=value)
    return message


def test_packet_out(running: Running, primary: Client) -> None:
    primary.send(packet_out((1, b"\0"), (2, b"\4")))
    wait_for(lambda: list(running.ports[4].output) == [FRAME], "the packet-out")
    primary.send(packet_out((2, b"\0\2"), (1, b"\0")))
    wait_for(lambda: list(running.ports[2].output) == [FRAME], "the packet-out")


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ([(2, b"\4")], "padding"),
        ([(1, b"\0"), (2, b"\4\0")], "more than 9 bits"),
        ([(1, b"\0"), (2, b"\4"), (3, b"\4")], "unknown metadata id 3"),
        ([(1, b"\0"), (2, b"\4"), (2, b"\4")], "comes twice"),
        ([(1, b"\0"), (2, b"")], "missing or empty"),
    ],
)
def test_malformed_packet_out(
    running: Running, primary: Client, metadata: list[tuple[int, bytes]], says: str
) -> None:
    primary.send(packet_out(*metadata))
    error = primary.receive().error
    assert (error.canonical_code, says in error.message) == (rpc_code.INVALID_ARGUMENT, True), error
    assert error.packet_out.packet_out.payload == FRAME
    assert not any(port.output for port in running.ports.values())


def test_backup_may_not_send_packets(running: Running, primary: Client) -> None:
    backup = running.client(0)
    backup.arbitration()
    backup.send(packet_out((1, b"\0"), (2, b"\4")))
    assert backup.receive().error.canonical_code == rpc_code.PERMISSION_DENIED
    assert not running.ports[4].output


def test_packet_in_is_bounded(running: Running, primary: Client) -> None:
    """A controller that does not read needs bounded memory; its lost packets are counted."""
    primary.write(insert(primary.mac_entry(0x020000000001, 3, "punt")))
    large = FRAME + bytes(8000)
    count = 6000
    for _ in range(count):
        running.ports[3].inject(large)
    wait_for(lambda: running.ports[3].stats.rx_packets == count, "all frames taken", 30)
    dropped = running.service.sessions.dropped
    assert 0 < dropped < count
    for _ in range(count - dropped):
        assert primary.receive().packet.payload == large
    assert CPU_PORT not in running.ports


def without_actions(request: p4r.SetForwardingPipelineConfigRequest) -> None:
    del request.config.p4info.actions[:]


def narrow(request: p4r.SetForwardingPipelineConfigRequest) -> None:
    request.config.p4info.controller_packet_metadata[0].metadata[0].bitwidth = -1


def another_action(request: p4r.SetForwardingPipelineConfigRequest) -> None:
    request.config.p4info.tables[0].action_refs.add(id=5)


@pytest.mark.parametrize("change", [without_actions, narrow, another_action])
def test_a_p4info_that_is_not_consistent_is_invalid(
    primary: Client, change: Callable[[p4r.SetForwardingPipelineConfigRequest], None]
) -> None:
    with pytest.raises(Failure) as failure:
        primary.set_pipeline(change=change)
    assert failure.value.code == "INVALID_ARGUMENT"


def test_numbers_that_name_nothing_are_invalid(primary: Client) -> None:
    with pytest.raises(Failure, match="atomicity 9 does not exist") as write:
        primary.write(insert(primary.mac_entry(1, 1, "punt")), atomicity=9)
    with pytest.raises(Failure, match="response_type 9 does not exist") as get:
        primary.get_pipeline(9)
    assert write.value.code == get.value.code == "INVALID_ARGUMENT"
    assert primary.read(primary.entry("by_mac")) == []


def test_a_read_is_bounded(primary: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "RESPONSE_ENTITIES", 1)
    monkeypatch.setattr(service, "MAX_RESPONSES", 2)
    entries = [primary.mac_entry(number, 1, "punt") for number in range(4)]
    primary.write(*map(insert, entries[:2]))
    assert len(primary.read(primary.entry("by_mac"))) == 2
    primary.write(*map(insert, entries[2:]))
    with pytest.raises(Failure) as large:
        primary.read(primary.entry("by_mac"))
    assert large.value.codes == [rpc_code.RESOURCE_EXHAUSTED]
    with pytest.raises(Failure) as many:
        primary.read(*entries[:1] * (service.MAX_QUERIES + 1))
    assert many.value.code == "INVALID_ARGUMENT"
