"""Who may call what on a shadow node."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from checkmate.keys.callers import (
    CALLERS,
    GRADIENT_STREAM,
    STEP_RECORDS,
    CallerRefused,
    caller_role,
    check_call,
)
from checkmate.keys.roles import Role
from checkmate.rpc import shadow_pb2
from tests.support.fuzz import fuzz
from tests.support.keys import served_job

JOB = served_job("gpt", "10.0.0.1", "fd00::1", "node.example.org")
NODE = "10.0.0.1"


def allowed(rpc: str, role: Role, host: str = NODE) -> bool:
    try:
        check_call(rpc, role, host, JOB)
    except CallerRefused:
        return False
    return True


def test_every_rpc_has_a_row() -> None:
    service = shadow_pb2.DESCRIPTOR.services_by_name["Shadow"]
    assert {method.name for method in service.methods} | {STEP_RECORDS, GRADIENT_STREAM} == CALLERS.keys()
    assert all(CALLERS.values())


def test_each_role_may_do_what_it_needs_and_no_more() -> None:
    calls = {role: {rpc for rpc in CALLERS if allowed(rpc, role)} for role in Role}
    assert calls[Role.CONTROLLER] == {"Status", "Events"}
    assert calls[Role.READER] == {"Status", "Events", "Reserve", "Release", "Fetch"}
    assert calls[Role.SHADOW] == calls[Role.READER] | {"Parts", "Commit"}
    changing = {"Fence", "Copy", "Settle", "Reset", "Leave", "Begin", "Refused", "Seed"}
    changing |= {"Meet", "Store", "Conclude"}
    changing |= {STEP_RECORDS, GRADIENT_STREAM}
    assert calls[Role.TRAINER] == changing | {"Status", "Events", "Fetch"}


def test_a_refusal_names_who_may() -> None:
    with pytest.raises(CallerRefused, match="^role reader may not call Fence, which is for trainer$"):
        check_call("Fence", Role.READER, NODE, JOB)
    with pytest.raises(CallerRefused, match="which is for reader or shadow$"):
        check_call("Reserve", Role.TRAINER, NODE, JOB)
    with pytest.raises(CallerRefused, match="may not call Format, which is for nobody"):
        check_call("Format", Role.TRAINER, NODE, JOB)


@pytest.mark.parametrize("host", ["10.0.0.1", "::ffff:10.0.0.1", "fd00::1", "fd00:0::0:1", "10.7.7.7"])
def test_a_shadow_node_calls_from_a_host_of_the_job(host: str) -> None:
    check_call("Commit", Role.SHADOW, host, JOB, {"node.example.org": ["10.7.7.7", "fd00::7"]})


@pytest.mark.parametrize(
    "host", ["10.0.0.2", "127.0.0.1", "fd00::2", "node.example.org", "", "unix", "10.0.0.1:1"]
)
def test_a_shadow_node_elsewhere_is_refused(host: str) -> None:
    with pytest.raises(CallerRefused, match="which is not a host of a shadow node of job gpt$"):
        check_call("Status", Role.SHADOW, host, JOB, {"another.example.org": [host]})


def test_other_roles_may_call_from_anywhere() -> None:
    assert allowed("Fence", Role.TRAINER, "10.0.0.2")
    assert allowed("Fetch", Role.READER, "10.0.0.2")


def test_nodes_of_one_machine_reach_each_other_over_loopback() -> None:
    job = served_job("gpt", "127.0.3.1", "127.0.3.2")
    check_call("Commit", Role.SHADOW, "127.0.0.1", job)
    with pytest.raises(CallerRefused):
        check_call("Commit", Role.SHADOW, "10.0.0.1", job)


@pytest.mark.parametrize("role", Role)
def test_a_certificate_gives_one_role(role: Role) -> None:
    assert caller_role([f"checkmate:gpt/{role}", "spiffe://cluster/gpt"], JOB) is role


@pytest.mark.parametrize(
    ("uris", "words"),
    [
        ([], "has 0 URIs like checkmate:gpt/ROLE, instead of one"),
        (["spiffe://x/checkmate:gpt/trainer"], "has 0 URIs"),
        (["checkmate:gpt/trainer", "checkmate:gpt/shadow"], "has 2 URIs"),
        (
            ["checkmate:other/trainer"],
            "has the URI 'checkmate:other/trainer', which is not checkmate:gpt/ROLE",
        ),
        (["checkmate:gpt/root"], "has the URI 'checkmate:gpt/root'"),
        (["checkmate:gpt/trainer/x"], "has the URI"),
        (["checkmate:gpt/"], "has the URI"),
        (["checkmate:gpt"], "has the URI"),
        (["checkmate:\n" + "x" * 5000], r"has the URI 'checkmate:\\nx{89}', which"),
    ],
)
def test_a_certificate_of_no_role_is_refused(uris: list[str], words: str) -> None:
    with pytest.raises(CallerRefused, match=words) as error:
        caller_role(uris, JOB)
    assert "\n" not in str(error.value)


@fuzz(100, uris=st.lists(st.text()), rpc=st.text(), host=st.text())
def test_whatever_a_stranger_sends_is_refused(uris: list[str], rpc: str, host: str) -> None:
    with pytest.raises(CallerRefused):
        caller_role(uris, JOB)
    with pytest.raises(CallerRefused):
        check_call(f"?{rpc}", Role.TRAINER, host, JOB)
    with pytest.raises(CallerRefused):
        check_call("Commit", Role.SHADOW, host, JOB)
