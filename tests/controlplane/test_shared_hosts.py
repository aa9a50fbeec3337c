"""DP groups on the same hosts, through the compiled program: each segment gets into its own streams."""

from __future__ import annotations

import pytest
from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import Ether
from scapy.packet import Raw

from checkmate.job.boundaries import Boundary, Stream
from checkmate.job.schema import Job
from checkmate.wire.tag import Tag
from controlplane import plan as planning
from controlplane.streams import StreamConnection, expect, rewrite
from softswitch.codegen.program import Program
from softswitch.program.state import GroupReplica
from testbed.jobs import job
from tests.softswitch.support.scenarios import CHECKMATE, add, load_program

INCARNATION = 3
Peers = dict[Stream, tuple[str, int]]
"""The address and port of each stream's shadow node."""


def loaded(of: Job) -> tuple[Program, Peers]:
    """Return the program with all entries of a job's plan, and every stream connected."""
    (plan,) = planning.plan([of]).values()
    stub = of.fabric.switches[0].stub
    holdings, peers = plan.holdings.copy(), {}
    for port, (key, stream) in enumerate(plan.streams.items(), 5000):
        peers[stream] = str(stream.nic.ip), port
        connection = StreamConnection(stream.nic.ip, stream.nic.mac, port, isn=1)
        holdings.put(rewrite(key, INCARNATION, connection, stub))
        holdings.put(expect(key[0], INCARNATION))
    program = load_program(CHECKMATE)
    for entry in holdings.entries.values():
        values = [value for _, value in entry.match]
        params = [value for _, value in entry.params if isinstance(value, int)]
        add(program, entry.table, tuple(values), entry.action, *params, priority=entry.priority)
    for group in holdings.groups.values():
        program.state.groups[group.id] = tuple(GroupReplica(*replica) for replica in sorted(group.replicas))
    return program, peers


def tagged(of: Job, boundary: Boundary, shadow_id: int, channel: int = 0) -> bytes:
    """Return a segment of a boundary with a tag."""
    option = Tag(7, 100, shadow_id, channel, INCARNATION).pack()
    return bytes(
        Ether(src=boundary.source.mac, dst=boundary.destination.mac)
        / IP(src=str(boundary.source.ip), dst=str(boundary.destination.ip), tos=of.tag.dscp_bit << 2)
        / TCP(sport=40000, dport=47000, seq=100, flags="A", options=[(option[0], option[2:])])
        / Raw(b"gradients")
    )


@pytest.mark.parametrize("shared", [True, False])
def test_each_tagged_segment_gets_into_the_streams_of_its_own_shard(shared: bool) -> None:
    of = job(groups=3, ranks=3, nodes=3, nics=1, replicas=2, channels=2, shared=shared)
    program, peers = loaded(of)
    expected: dict[tuple[int, int, int], set[tuple[str, int]]] = {}
    for stream, peer in peers.items():
        expected.setdefault((stream.boundary.number, stream.channel, stream.shard), set()).add(peer)
    for stream in peers:
        at = stream.boundary
        frame = tagged(of, at, stream.shadow_id, stream.channel)
        *copies, training = program.process(at.source.port, frame)
        assert (training.port, training.frame) == (at.destination.port, frame)
        packets = [Ether(copy.frame) for copy in copies]
        assert len(packets) == of.replicas
        reached = {(copy[IP].dst, copy[TCP].dport) for copy in packets}
        assert reached == expected[at.number, stream.channel, stream.shard]


def test_a_shadow_id_of_no_group_is_not_copied() -> None:
    of = job(groups=2, ranks=2, nodes=1, nics=1, shared=True)
    program, peers = loaded(of)
    at = next(iter(peers)).boundary
    for shadow_id, outputs in ((0, 2), (1, 2), (2, 1), (0xFFFF, 1)):
        assert len(program.process(at.source.port, tagged(of, at, shadow_id))) == outputs
