"""Ranks on hosts with several NICs in one subnet, with NCCL."""

from __future__ import annotations

import sys

import pytest

from tests.support.labs.live import needs_clang, needs_root
from topologies.crew import Crew, serving
from topologies.describe.topology import build
from topologies.lab import Lab

pytestmark = [needs_root, needs_clang, pytest.mark.slow, pytest.mark.timeout(200)]

TOPOLOGY = {
    "title": "two hosts with a NIC for each of two ranks",
    "channels": 1,
    "switches": ["tor"],
    "hosts": [["tor", "tor"], ["tor", "tor"]],
    "dp_groups": [{"hosts": [0, 1], "shadow_nodes": [0]}, {"hosts": [0, 1], "shadow_nodes": [0]}],
    "shadow_nodes": [["tor"]],
}


def test_a_ranks_connections_use_its_own_nic(name: str) -> None:
    """Connections are bound to the rank's own interface, so that the guard lets them pass."""
    with Lab(build("nics", TOPOLOGY), name=name) as lab, Crew(lab) as crew, serving(crew):
        members = []
        for rank in lab.topology.ranks:
            argv = [sys.executable, "-m", "tests.support.nccl.lab_nics", "--job", str(lab.job_file)]
            argv += ["--group", "1", "--rank", str(rank.number)]
            members.append(crew.start(rank.name, rank.host.name, argv))
        crew.finish(members, 100)
