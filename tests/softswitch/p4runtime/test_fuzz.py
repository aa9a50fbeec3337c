"""Any P4Runtime message is answered, or refused with a status of the specification."""

from __future__ import annotations

from typing import Any, Final

import grpc
from finsy.proto import p4r, rpc_code
from hypothesis import strategies as st

from tests.softswitch.support.client import DEVICE, KINDS, Client, Failure, Running, read_p4info
from tests.support.fuzz import damaged, fuzz, messages

INFO: Final = read_p4info()
TABLES: Final = st.sampled_from([info.preamble.id for info in INFO.tables])
ACTIONS: Final = st.sampled_from([info.preamble.id for info in INFO.actions])
SMALL: Final = st.integers(0, 4)
WIDTHS: Final = st.integers(0, 6).flatmap(lambda size: st.binary(min_size=size, max_size=size))
VALID_VALUES: Final[dict[str, st.SearchStrategy[Any]]] = {
    "device_id": st.just(DEVICE),
    "Uint128_high": st.just(0),
    "Uint128_low": st.just(1),
    "role": st.just(""),
    "role_id": st.just(0),
    "name": st.just(""),
    "type": st.integers(1, 3),
    "atomicity": st.integers(0, 2),
    "table_id": TABLES,
    "action_id": ACTIONS,
    "field_id": SMALL,
    "param_id": SMALL,
    "metadata_id": SMALL,
    "value": WIDTHS,
    "mask": WIDTHS,
    "priority": SMALL,
    "multicast_group_id": SMALL,
    "counter_id": st.sampled_from([info.preamble.id for info in INFO.counters]),
    "register_id": st.sampled_from([info.preamble.id for info in INFO.registers]),
    "index": SMALL,
    "p4info": st.just(INFO),
}
CALLS: Final[dict[str, Any]] = {
    "Write": p4r.WriteRequest,
    "Read": p4r.ReadRequest,
    "SetForwardingPipelineConfig": p4r.SetForwardingPipelineConfigRequest,
    "GetForwardingPipelineConfig": p4r.GetForwardingPipelineConfigRequest,
    "Capabilities": p4r.CapabilitiesRequest,
}
FAULTS: Final = {"UNKNOWN", "INTERNAL", "DEADLINE_EXCEEDED"}


def blob_of(data: st.DataObject, kind: Any) -> bytes:
    message = data.draw(messages(kind, **VALID_VALUES))
    if isinstance(message, p4r.SetForwardingPipelineConfigRequest) and data.draw(st.booleans()):
        message.config.p4info.CopyFrom(INFO)
        message.config.p4_device_config = damaged(data, KINDS.with_suffix(".json").read_bytes(), 1)
    blob: bytes = message.SerializeToString()
    return damaged(data, blob) if data.draw(st.booleans()) else blob


def check(refusal: Failure) -> None:
    """Check a refusal's status; that of a batch is UNKNOWN, with a status for each element (section 12.3)."""
    assert len(refusal.message) < 2000
    statuses = {rpc_code.Code.Name(code) for code in refusal.codes} or {refusal.code}  # type: ignore[arg-type]
    assert not statuses & FAULTS, refusal


@fuzz(150, data=st.data())
def test_any_request_is_answered_or_refused(running: Running, primary: Client, data: st.DataObject) -> None:
    method, kind = data.draw(st.sampled_from([*CALLS.items()]))
    blob = blob_of(data, kind)
    calls: Any = primary.channel.unary_stream if method == "Read" else primary.channel.unary_unary
    try:
        answer = calls(f"/p4.v1.P4Runtime/{method}", None, None)(blob, timeout=20)
        assert all(isinstance(message, bytes) for message in (answer if method == "Read" else [answer]))
    except grpc.RpcError as error:
        check(Failure(error))


@fuzz(100, data=st.data())
def test_any_stream_message_is_answered_or_refused(
    running: Running, primary: Client, data: st.DataObject
) -> None:
    blobs = [blob_of(data, p4r.StreamMessageRequest) for _ in range(data.draw(st.integers(1, 3)))]
    call: Any = primary.channel.stream_stream("/p4.v1.P4Runtime/StreamChannel", None, None)
    try:
        for answer in call(iter(blobs), timeout=20):
            p4r.StreamMessageResponse.FromString(answer)
    except grpc.RpcError as error:
        check(Failure(error))
