"""Feature `replication`: which segments are replicated, and to which multicast group.

Data plane: p4src/include/replication.p4. Packet tests: ptf_tests/replication.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv4Address

from checkmate.job.boundaries import Boundary
from checkmate.job.schema import Attachment, Job
from controlplane.entities import FIRST_JOB_GROUP, Holdings, MulticastGroup, TableEntry
from controlplane.network import Network

Replicas = frozenset[tuple[int, int]]
BOUNDARY_IDS = 1 << 16


def mark(dscp_bit: int) -> TableEntry:
    """Segments whose DSCP has this bit may be tagged."""
    return TableEntry("marks", (("dscp", (dscp_bit, dscp_bit)),), "mark", (), priority=1)


def replicate(
    source: IPv4Address, destination: IPv4Address, shadow_id: int, channel: int, *, group: int, boundary: int
) -> TableEntry:
    """Tagged segments of a boundary rank, for one shard and channel, go to `group`."""
    return TableEntry(
        "replication",
        (
            ("source", int(source)),
            ("destination", int(destination)),
            ("shadow_id", shadow_id),
            ("channel", channel),
        ),
        "replicate",
        (("group", group), ("boundary", boundary)),
    )


def boundary_ids(network: Network, switch: str, held: Holdings) -> dict[tuple[str, int], int]:
    """(job, boundary number) to the id that is unique on the switch.

    A boundary keeps the id under which the switch holds it: a rank is in one DP group and sends
    to one next rank, so its address tells which boundary an entry belongs to.
    """
    known = {entry["source"]: entry["boundary"] for entry in held.table("replication")}
    here = [b for b in _boundaries(network) if b.switch == switch]
    ids = {(b.job, b.number): known[int(b.source.ip)] for b in here if int(b.source.ip) in known}
    taken = set(known.values())
    free = (number for number in range(BOUNDARY_IDS) if number not in taken)
    for boundary in here:
        if (boundary.job, boundary.number) not in ids:
            ids[(boundary.job, boundary.number)] = next(free)
    return ids


def _boundaries(network: Network) -> Iterator[Boundary]:
    seen: set[tuple[str, int]] = set()
    for stream in network.streams:
        boundary = stream.boundary
        if (boundary.job, boundary.number) not in seen:
            seen.add((boundary.job, boundary.number))
            yield boundary


def group_contents(network: Network, switch: str) -> dict[tuple[str, int, int, int], Replicas]:
    """(job, boundary number, shadow id, channel) to the ports of its copies, training's and shadows'."""
    contents: dict[tuple[str, int, int, int], set[tuple[int, int]]] = {}
    for stream in network.streams:
        boundary = stream.boundary
        if boundary.switch != switch:
            continue
        key = (boundary.job, boundary.number, stream.shadow_id, stream.channel)
        if key not in contents:
            contents[key] = {(_port(network, switch, boundary.destination), 0)}
        contents[key].add((_port(network, switch, stream.nic), stream.replication_id))
    return {key: frozenset(ports) for key, ports in contents.items()}


def _port(network: Network, switch: str, place: Attachment) -> int:
    port = network.port_towards(switch, place)
    assert port is not None  # `checkmate.job.checks` refuses a job whose parts no link joins
    return port


def group_ids(contents: Iterable[Replicas], held: Holdings) -> dict[Replicas, int]:
    """An id for each distinct content: the one under which the switch holds it, else a free one."""
    ids = {
        group.replicas: number for number, group in sorted(held.groups.items()) if number >= FIRST_JOB_GROUP
    }
    taken = set(held.groups)
    wanted: dict[Replicas, int] = {}
    number = FIRST_JOB_GROUP
    for content in sorted(set(contents), key=sorted):
        if content in ids:
            wanted[content] = ids[content]
            continue
        while number in taken:
            number += 1
        wanted[content] = number
        taken.add(number)
    return wanted


def entries(
    network: Network, switch: str, boundary_id: Mapping[tuple[str, int], int], held: Holdings
) -> Iterator[TableEntry | MulticastGroup]:
    """The switch's multicast groups, and what leads to them."""
    contents = group_contents(network, switch)
    ids = group_ids(contents.values(), held)
    for content, number in ids.items():
        yield MulticastGroup(number, content)
    by_key = {(b.job, b.number): b for b in _boundaries(network)}
    for (job, number, shadow_id, channel), content in contents.items():
        boundary = by_key[(job, number)]
        yield replicate(
            boundary.source.ip,
            boundary.destination.ip,
            shadow_id,
            channel,
            group=ids[content],
            boundary=boundary_id[(job, number)],
        )
    for bit in sorted({job.tag.dscp_bit for job in network.jobs if _tags_at(job, switch)}):
        yield mark(bit)


def _tags_at(job: Job, switch: str) -> bool:
    return any(rank.switch == switch for group in job.dp_groups for rank in (group.ranks[0], group.ranks[-1]))
