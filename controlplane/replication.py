"""Feature `replication`: entries that select segments, and their multicast groups.

Data plane: p4src/include/replication.p4. Packet tests: ptf_tests/replication.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv4Address
from itertools import count

from checkmate.job.boundaries import AddressPair
from checkmate.job.schema import Attachment, Job
from controlplane.entities import FIRST_JOB_GROUP, Holdings, MulticastGroup, TableEntry
from controlplane.network import Network

Replicas = frozenset[tuple[int, int]]
BOUNDARY_IDS = 1 << 16


def mark(dscp_bit: int) -> TableEntry:
    """Return the entry by which segments with this DSCP bit may be tagged."""
    return TableEntry("marks", (("dscp", (dscp_bit, dscp_bit)),), "mark", (), priority=1)


def enter(port: int, source: IPv4Address, destination: IPv4Address, *, boundary: int) -> TableEntry:
    """Return the entry by which segments of a boundary rank have the boundary's id.

    `port` is the rank's own, so that no other host can send in its name.
    """
    return TableEntry(
        "boundaries",
        (("port", port), ("source", int(source)), ("destination", int(destination))),
        "enter",
        (("boundary", boundary),),
    )


def replicate(boundary: int, shadow_id: int, channel: int, *, group: int) -> TableEntry:
    """Return the entry that sends a boundary's tagged segments of a shard and channel to `group`."""
    return TableEntry(
        "replication",
        (("boundary", boundary), ("shadow_id", shadow_id), ("channel", channel)),
        "replicate",
        (("group", group),),
    )


def boundary_ids(network: Network, switch: str, holdings: Holdings) -> dict[tuple[str, int], int]:
    """Return each boundary's id on the switch, by (job, boundary number).

    Boundaries with the same pair of addresses have one id, because their shadow ids differ. A pair keeps its
    id on the switch. A new pair gets the id of a pair of the same source that is gone, or else a free one.
    """
    local_boundaries = [boundary for boundary in network.boundaries if boundary.switch == switch]
    pairs = {boundary.pair for boundary in local_boundaries}
    entries = holdings.table("boundaries")
    used_ids = {entry["boundary"] for entry in entries}
    ids: dict[AddressPair, int] = {}
    stale_ids: dict[IPv4Address, int] = {}
    for entry in entries:
        pair = IPv4Address(entry["source"]), IPv4Address(entry["destination"])
        if pair in pairs:
            ids[pair] = entry["boundary"]
        else:
            stale_ids[pair[0]] = entry["boundary"]
    free = (number for number in range(BOUNDARY_IDS) if number not in used_ids)
    for boundary in local_boundaries:
        if boundary.pair not in ids:
            source = boundary.pair[0]
            ids[boundary.pair] = stale_ids.pop(source) if source in stale_ids else next(free)
    return {(boundary.job, boundary.number): ids[boundary.pair] for boundary in local_boundaries}


def group_contents(network: Network, switch: str) -> dict[tuple[str, int, int, int], Replicas]:
    """Return the ports of training and shadow copies, by (job, boundary number, shadow id, channel)."""
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


def group_ids(contents: Iterable[Replicas], holdings: Holdings) -> dict[Replicas, int]:
    """Return a group id for each distinct content: its id on the switch if it has one, else a free one."""
    ids = {
        group.replicas: number
        for number, group in sorted(holdings.groups.items())
        if number >= FIRST_JOB_GROUP
    }
    free = (number for number in count(FIRST_JOB_GROUP) if number not in holdings.groups)
    return {
        content: ids[content] if content in ids else next(free)
        for content in sorted(set(contents), key=sorted)
    }


def entries(
    network: Network, switch: str, boundary_id: Mapping[tuple[str, int], int], holdings: Holdings
) -> Iterator[TableEntry | MulticastGroup]:
    """Yield the switch's multicast groups, and the entries that use them."""
    contents = group_contents(network, switch)
    ids = group_ids(contents.values(), holdings)
    for content, number in ids.items():
        yield MulticastGroup(number, content)
    for boundary in network.boundaries:
        if boundary.switch == switch:
            source, destination = boundary.source, boundary.destination
            number = boundary_id[(boundary.job, boundary.number)]
            yield enter(source.port, source.ip, destination.ip, boundary=number)
    for (job, number, shadow_id, channel), content in contents.items():
        yield replicate(boundary_id[(job, number)], shadow_id, channel, group=ids[content])
    for bit in sorted({job.tag.dscp_bit for job in network.jobs if _tags_at(job, switch)}):
        yield mark(bit)


def _tags_at(job: Job, switch: str) -> bool:
    return any(rank.switch == switch for group in job.dp_groups for rank in (group.ranks[0], group.ranks[-1]))
