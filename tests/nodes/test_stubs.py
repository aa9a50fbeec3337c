"""Parallel calls to nodes, and the messages for nodes that do not answer."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from checkmate.job.schema import Job
from checkmate.job.validation import of_data
from checkmate.nodes.stubs import Stubs, unreached
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.protocol import PROTOCOL
from testbed.jobs import job_data
from tests.support.shadow.recording_node import RecordingNode, current


@pytest.mark.parametrize(
    ("detail", "why"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:7000: Failed to connect "
            "to remote host: connect: Connection refused (111)",
            " (Connection refused)",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:10.0.0.1:7000: "
            "Ssl handshake failed (TSI_PROTOCOL_FAILURE): CERTIFICATE_VERIFY_FAILED",
            " (its certificate is not one for this address by the authority in this host's folder of keys)",
        ),
        ("Socket closed", " (Socket closed)"),
        (
            "errors resolving nosuch.invalid:7000: [field:hostname lookup error:address lookup failed for "
            "nosuch.invalid:7000: Domain name not found]",
            " (Domain name not found)",
        ),
        ("", ""),
    ],
)
def test_of_what_grpc_says_only_the_reason_is_told(detail: str, why: str) -> None:
    assert unreached(detail) == why


class Slow(RecordingNode):
    """A node that answers `Status` late."""

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.NodeStatus:
        time.sleep(0.5)
        return super().Status(request, context)


def test_all_are_asked_at_once_and_each_says_why_it_gave_no_answer() -> None:
    other = grpc.server(ThreadPoolExecutor(1))
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    slow, slower, away = Slow(), Slow(), RecordingNode()
    away.stop()
    data = job_data(nodes=4)
    addresses = [slow.address, slower.address, f"127.0.0.1:{port}", away.address]
    for described, address in zip(data["shadow_nodes"], addresses, strict=True):
        described["mgmt"] = address
    request = pb.StatusRequest(protocol=PROTOCOL, job="demo")
    try:
        with Stubs(of_data(Job, data), None) as stubs:
            stubs.ask([0, 1], lambda stub: stub.Status, request)  # to connect
            begun = time.monotonic()
            answers = stubs.ask(range(4), lambda stub: stub.Status, request)
            assert time.monotonic() - begun < 0.9
            assert answers == {
                0: current(slow.status),
                1: current(slower.status),
                2: "runs a service other than a shadow node's",
                3: "can't be reached (Connection refused)",
            }
            late = stubs.ask([0], lambda stub: stub.Status, request, 0.1)
            assert late == {0: "did not answer in time"}
        for node in (0, 7):
            with pytest.raises(ValueError, match="closed"):
                stubs.ask([node], lambda stub: stub.Status, request)
    finally:
        other.stop(0).wait()
        for one in (slow, slower):
            one.stop()
