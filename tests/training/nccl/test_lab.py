"""Every byte that shadow nodes get of NCCL's AllReduces, over tagged segments and a switch."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import pytest

from tests.support.labs.live import needs_clang, needs_root
from tests.support.labs.made import on_one_switch
from tests.support.nccl.lab_ring import StreamKey, expected_streams
from topologies.crew import Crew, serving
from topologies.describe.topology import build
from topologies.lab import Lab
from topologies.traffic.orders import Load
from topologies.traffic.run import Traffic

pytestmark = [needs_root, needs_clang, pytest.mark.timeout(300)]  # a lab's start is slow on a busy machine

Digests = dict[StreamKey, tuple[int, str]]


def reduce(traffic: Traffic, release: str) -> None:
    """Run the ranks to their end, and wait until the shadow nodes have read as many bytes."""
    crew, lab = traffic.crew, traffic.lab
    members = []
    for rank in lab.topology.ranks:
        where = ["--job", str(lab.job_file), "--rank", str(rank.number), "--interface", rank.interface.name]
        argv = [sys.executable, "-m", "tests.support.nccl.lab_ring", *where, "--release", release]
        members.append(crew.start(rank.name, rank.host.name, argv))
    crew.finish(members, 120)
    total = sum(map(len, expected_streams(traffic.job).values()))
    crew.wait(lambda: traffic.received() >= total, f"shadow nodes to read {total} bytes", 20)


def read(traffic: Traffic) -> Digests:
    """Stop the shadow nodes, and return what they have read."""
    digests: Digests = {}
    for shadow in traffic.shadows:
        traffic.crew.stop(shadow)
        for stream in traffic.result(shadow)["streams"]:
            assert stream["error"] is None
            key = stream["side"], stream["channel"], stream["shadow_id"]
            digests[key] = stream["bytes"], stream["sha256"]
    return digests


def check(topology: dict[str, Any], name: str, release: str) -> None:
    with Lab(build("nccl", topology), name=name) as lab, Crew(lab) as crew, serving(crew):
        traffic = Traffic(crew, Load())
        traffic.connect()
        reduce(traffic, release)
        expected = {
            key: (len(data), hashlib.sha256(data).hexdigest())
            for key, data in expected_streams(traffic.job).items()
        }
        assert read(traffic) == expected


def test_shadow_nodes_get_exactly_the_reduced_buckets(name: str) -> None:
    check(on_one_switch(2, (1, 2), channels=2), name, "2.29")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "channels", "release"),
    [
        (2, 1, "2.26"),
        (2, 8, "2.30"),
        (3, 1, "2.29"),
        (3, 3, "2.27"),
        (3, 8, "2.30"),
        (4, 2, "2.28"),
        (4, 4, "2.29"),
    ],
)
def test_shadow_nodes_get_exactly_the_reduced_buckets_of(
    name: str, ranks: int, channels: int, release: str
) -> None:
    check(on_one_switch(ranks, (1, 1), channels=channels), name, release)
