"""Feature `streams`: the rewrite entry of each connected stream, and the admission of streams.

Data plane: p4src/include/streams.p4. Packet tests: ptf_tests/streams.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address

from checkmate.job.boundaries import Stream
from checkmate.job.schema import Job, Nic, Stub
from checkmate.wire import tag
from checkmate.wire.schedule import nic_of
from controlplane.entities import Holdings, TableEntry, mac_number
from controlplane.network import Network

StreamKey = tuple[int, int, int, int]
"""(boundary id on the switch, channel, shadow id, replication id): a stream in any incarnation."""


@dataclass(frozen=True, slots=True)
class StreamConnection:
    """A shadow node's end of a stream: its address, port and initial sequence number, and its base."""

    ip: IPv4Address
    mac: str
    port: int
    isn: int
    base: int = 0


def rewrite(key: StreamKey, incarnation: int, connection: StreamConnection, stub: Stub) -> TableEntry:
    """Return the entry that rewrites copies for `key` and `incarnation` to segments of `connection`."""
    boundary, channel, shadow_id, replication_id = key
    return TableEntry(
        "streams",
        (
            ("boundary", boundary),
            ("channel", channel),
            ("shadow_id", shadow_id),
            ("incarnation", incarnation),
            ("replication_id", replication_id),
        ),
        "rewrite",
        (
            ("shadow_mac", mac_number(connection.mac)),
            ("stub_mac", mac_number(stub.mac)),
            ("shadow_ip", int(connection.ip)),
            ("stub_ip", int(stub.ip)),
            ("shadow_port", connection.port),
            ("stub_port", stub.port),
            ("acknowledgement", tag.copy_acknowledgement(connection.isn)),
            ("minus_base", tag.minus(connection.base)),
        ),
    )


def expect(boundary: int, incarnation: int) -> TableEntry:
    """Return the entry with a boundary's current incarnation; losses of others are counted apart."""
    return TableEntry("incarnations", (("boundary", boundary),), "expect", (("incarnation", incarnation),))


def lose(key: StreamKey) -> TableEntry:
    """Return the entry that counts a stream's losses while it is not connected."""
    boundary, channel, shadow_id, replication_id = key
    return TableEntry(
        "lost",
        (
            ("boundary", boundary),
            ("channel", channel),
            ("shadow_id", shadow_id),
            ("replication_id", replication_id),
        ),
        "lose",
    )


def stream_key(entry: TableEntry | Mapping[str, int]) -> StreamKey:
    """Return the stream that an entry of `streams` or `lost`, or its match fields, belongs to."""
    return (entry["boundary"], entry["channel"], entry["shadow_id"], entry["replication_id"])


def planned_streams(
    network: Network, switch: str, boundary_id: Mapping[tuple[str, int], int]
) -> dict[StreamKey, Stream]:
    """Return every stream that may connect to `switch`, by its key there."""
    return {
        (
            boundary_id[(stream.boundary.job, stream.boundary.number)],
            stream.channel,
            stream.shadow_id,
            stream.replication_id,
        ): stream
        for stream in network.streams
        if stream.boundary.switch == switch
    }


def belongs(entry: TableEntry, nic: Nic, stub: Stub) -> bool:
    """Return whether a rewrite entry is still for this stub and NIC."""
    return (
        entry["shadow_ip"] == int(nic.ip)
        and entry["shadow_mac"] == mac_number(nic.mac)
        and entry["stub_ip"] == int(stub.ip)
        and entry["stub_mac"] == mac_number(stub.mac)
        and entry["stub_port"] == stub.port
    )


def entries(
    network: Network, switch: str, boundary_id: Mapping[tuple[str, int], int], holdings: Holdings
) -> Iterator[TableEntry]:
    """Yield a loss counter for each stream, and the connected streams in `holdings` that a job still has."""
    streams = planned_streams(network, switch, boundary_id)
    for key in streams:
        yield lose(key)
    stub = network.switches[switch].stub
    for entry in holdings.table("streams"):
        stream = streams.get(stream_key(entry))
        if stream is not None and belongs(entry, stream.nic, stub):
            yield entry
    ids = {key[0] for key in streams}
    for entry in holdings.table("incarnations"):
        if entry["boundary"] in ids:
            yield entry


@dataclass(frozen=True, slots=True)
class StreamAdmission:
    """Changes for a valid hello: entries to put, and the stream's older entries to drop.

    `time` is the hello's own, in microseconds since the epoch.
    """

    key: StreamKey
    time: int
    puts: tuple[TableEntry, ...]
    drops: tuple[TableEntry, ...]


class StreamRefused(Exception):
    """A hello that is answered by a RST, with the reason."""


def admit(
    hello: tag.Hello,
    connection: StreamConnection,
    *,
    job: Job,
    network: Network,
    switch: str,
    boundary_id: Mapping[tuple[str, int], int],
    connected: Mapping[StreamKey, TableEntry],
) -> StreamAdmission:
    """Check that this node and NIC may have the stream that `hello` names (design, section 4).

    Args:
        hello: The first bytes on the connection, authenticated.
        connection: The shadow node's end.
        job: The job of its address.
        network: The jobs and where they are.
        switch: The switch that received the hello.
        boundary_id: Boundary ids on the switch, by (job, boundary number).
        connected: Entries of the connected streams.

    Raises:
        StreamRefused: It may not have the stream.
    """
    boundary = boundary_id.get((job.job, hello.boundary))
    if boundary is None:
        raise StreamRefused(f"job {job.job} has no boundary {hello.boundary} on {switch}")
    hop = network.boundary(job.job, hello.boundary)
    shard = hello.shadow_id - hop.first_id
    if hello.channel not in hop.channels or shard not in range(job.shards(hop.group)):
        raise StreamRefused(f"job {job.job} has no channel {hello.channel} of shadow id {hello.shadow_id}")
    for replication_id in range(1, job.replicas + 1):
        node = job.holder(hop.group, shard, replication_id)
        nic = node.nics[nic_of(hello.channel, hop.side, len(node.nics))]
        if nic.ip == connection.ip:
            break
    else:
        raise StreamRefused(
            f"{connection.ip} is not the NIC for channel {hello.channel} of shadow id {hello.shadow_id}"
        )
    if nic.mac != connection.mac:
        raise StreamRefused(f"{connection.ip} has {nic.mac} in the job, not {connection.mac}")
    key = (boundary, hello.channel, hello.shadow_id, replication_id)
    entry = rewrite(key, hello.incarnation, connection, network.switches[switch].stub)
    old = connected.get(key)
    drop = (old,) if old is not None and old.key != entry.key else ()
    return StreamAdmission(key, hello.time, (entry, expect(boundary, hello.incarnation)), drop)
