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
    other_server = grpc.server(ThreadPoolExecutor(1))
    port = other_server.add_insecure_port("127.0.0.1:0")
    other_server.start()
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
            start = time.monotonic()
            answers = stubs.ask(range(4), lambda stub: stub.Status, request)
            assert time.monotonic() - start < 0.9
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
        other_server.stop(0).wait()
        for slow_server in (slow, slower):
            slow_server.stop()


HOLD = pb.HoldStatus(shard=pb.Shard(group=0, shard=0), incarnation=3, stepped=5, generation=1, seeded=True)


def hold(**fields: object) -> pb.NodeStatus:
    status = pb.NodeStatus(generation=1, holds=[HOLD])
    status.holds[0].MergeFrom(pb.HoldStatus(**fields))  # type: ignore[arg-type]
    return status


def answer_of(status: pb.NodeStatus) -> pb.NodeStatus | str:
    """Return what a caller has of a node's status."""
    node = RecordingNode()
    node.status = status
    data = job_data(nodes=1)
    data["shadow_nodes"][0]["mgmt"] = node.address
    try:
        with Stubs(of_data(Job, data), None) as stubs:
            return stubs.statuses()[0]
    finally:
        node.stop()


def ranges(last: int) -> pb.NodeStatus:
    return pb.NodeStatus(parts=[pb.PartsHeld(incarnation=3, ranges=[pb.PartRange(first=0, last=last)])])


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (hold(stepped=1 << 62), "stepped is 4611686018427387904, and can be -1 to 1099511627776"),
        (hold(first_iteration=-7), "first_iteration is -7, and can be"),
        (hold(incarnation=1 << 20), "incarnation is 1048576, and can be 0 to 255"),
        (hold(generation=(1 << 31) + 1), "generation is 2147483649, and can be 0 to"),
        (pb.NodeStatus(discarded=(1 << 32) - 1), "discarded is 4294967295, and can be 0 to 2147483648"),
        (pb.NodeStatus(holds=[pb.HoldStatus()] * 70_000), "holds has 70000 entries, and may have 65536"),
        (hold(start=bytes(17)), "start has 17 bytes, and may have 16"),
        (pb.NodeStatus(job_ranks=pb.JobRanks(replicas=257)), "replicas is 257, and can be 0 to 256"),
        (
            pb.NodeStatus(former=pb.FormerState(job_ranks=pb.JobRanks(replicas=(1 << 32) - 1))),
            "replicas is 4294967295, and can be 0 to 256",
        ),
        (
            pb.NodeStatus(job_ranks=pb.JobRanks(present=range((1 << 18) + 1))),
            "present has 262145 numbers, and may have 262144",
        ),
        (pb.NodeStatus(step_seconds=float("nan")), "step_seconds is nan"),
        (pb.NodeStatus(behind=[pb.Behind(iterations=1 << 50)]), "iterations is 1125899906842624"),
        (ranges((1 << 40) - 1), "it reports 1099511627776 parts of step records, and can have 1048576"),
    ],
)
def test_an_answer_that_no_training_explains_is_none(status: pb.NodeStatus, why: str) -> None:
    """`reset` would believe it, tell the others, and take iterations for those of years to come."""
    answer = answer_of(status)
    assert isinstance(answer, str)
    assert answer.startswith(f"its answer is not a shadow node's: {why}")


def test_texts_of_an_answer_are_cut_and_shown_in_one_line() -> None:
    trouble = ["\x1b[2Jforged\nline " + "x" * 5_000] * 700
    answer = answer_of(pb.NodeStatus(trouble=trouble, torch="2\u202e.0"))
    assert isinstance(answer, pb.NodeStatus)
    assert len(answer.trouble) == 65
    assert answer.trouble[-1] == "and 636 more"
    assert all(text.isprintable() and len(text) <= 4096 for text in [*answer.trouble, answer.torch])


def test_an_answer_that_is_far_too_long_is_refused_by_its_length() -> None:
    """Receiving it took the whole timeout, in each command."""
    answer = answer_of(pb.NodeStatus(trouble=["x" * 1_000_000] * 40))
    assert isinstance(answer, str)
    assert answer.startswith("RESOURCE_EXHAUSTED")
