"""Status of a job's streams on the switches: connected, packets, bytes, lost. Data for views and `--json`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field

from finsy import P4CounterEntry

from checkmate.job.boundaries import boundaries
from checkmate.job.mesh import group_name
from controlplane.entities import Holdings, mac_number
from controlplane.guard import Counts, Refusal, refusals
from controlplane.network import Network
from controlplane.p4runtime.session import SwitchSession
from controlplane.plan import plan_switch
from controlplane.streams import StreamKey, stream_key

SIDES = ("first", "last")
"""Names of a DP group's boundary ranks by their number, in the order of the ring."""
PASS_REASONS = ("without_tag", "without_entry")
LOSS_REASONS = ("not_connected", "old_incarnation")
"""The cells of the counters `passed` and `losses`, in the P4 source's order."""


@dataclass(frozen=True, slots=True)
class StreamCount:
    packets: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """One stream. `lost` counts the copies made for it while it was not connected."""

    job: str
    dp_group: int
    dp_group_name: str
    side: int
    in_trees: bool
    channel: int
    shadow_id: int
    shard: int
    replication_id: int
    shadow_node: int
    nic: str
    switch: str
    connected: bool
    incarnation: int | None
    packets: int
    bytes: int
    lost: int
    lost_bytes: int


@dataclass(frozen=True, slots=True)
class SwitchStatus:
    """One switch: its streams, and tagged traffic that was not copied or lost."""

    switch: str
    target: str
    streams: tuple[StreamStatus, ...]
    passed: dict[str, StreamCount] = field(default_factory=dict)
    losses: dict[str, StreamCount] = field(default_factory=dict)
    not_installed: tuple[str, ...] = ()
    """Requested jobs that have no entries on the switch."""
    acks_dropped: int = 0
    refused: tuple[Refusal, ...] = ()
    """Refused packets that the guard has counted at each host's port, and by addresses at others."""

    def data(self) -> dict[str, object]:
        """Return plain data for `--json`."""
        return asdict(self)


async def read_status(
    session: SwitchSession, network: Network, holdings: Holdings | None = None
) -> SwitchStatus:
    """Read one switch's status; with `holdings`, the switch's entries are not read again."""
    switch = session.switch
    if holdings is None:
        holdings = await session.read()
    plan = plan_switch(network, switch.name, holdings)
    connected = {
        key: entry for entry in holdings.table("streams") if (key := stream_key(entry)) in plan.streams
    }
    stream_counts = await _direct(session, "streams", holdings)
    loss_counts = await _direct(session, "lost", holdings)
    names = {(job.job, group): group_name(job, group) for job in network.jobs for group in job.groups}
    streams = []
    for key, stream in plan.streams.items():
        entry = connected.get(key)
        incarnation = entry["incarnation"] if entry else None
        count = stream_counts.get((key, incarnation), StreamCount())
        miss = loss_counts.get((key, None), StreamCount())
        streams.append(
            StreamStatus(
                stream.boundary.job,
                stream.boundary.group,
                names[stream.boundary.job, stream.boundary.group],
                stream.boundary.side,
                stream.boundary.in_trees,
                stream.channel,
                stream.shadow_id,
                stream.shard,
                stream.replication_id,
                stream.node.id,
                str(stream.nic.ip),
                switch.name,
                entry is not None,
                incarnation,
                count.packets,
                count.bytes,
                miss.packets,
                miss.bytes,
            )
        )
    return SwitchStatus(
        switch.name,
        switch.target,
        tuple(streams),
        await _cells(session, "passed", PASS_REASONS),
        await _cells(session, "losses", LOSS_REASONS),
        _missing_jobs(network, {stream.job for stream in streams}, holdings),
        (await _cells(session, "plain_acks", ("dropped",)))["dropped"].packets,
        await read_refusals(session, network, holdings),
    )


async def read_refusals(
    session: SwitchSession, network: Network, holdings: Holdings | None = None
) -> tuple[Refusal, ...]:
    """Read what a switch's guard has refused of the jobs' hosts, or in their names.

    With `holdings`, the guard's entries are not read again.
    """
    tables = ("guarded_ports", "guarded_addresses")
    if holdings is None:
        holdings = await session.read(tables)
    counts = [count for table in tables for count in await _counts(session, table, holdings)]
    return tuple(refusals(network, session.switch.name, counts))


def _missing_jobs(network: Network, here: Collection[str], holdings: Holdings) -> tuple[str, ...]:
    """Return the jobs that are not installed on the switch.

    A job with streams `here` is installed if the switch replicates for it. Another job is installed if the
    switch forwards to one of its ranks.
    """
    sources = {entry["source"] for entry in holdings.table("boundaries")}
    macs = {entry["mac"] for entry in holdings.table("forwarding")}
    missing = []
    for job in network.jobs:
        if job.job in here:
            is_installed = any(int(boundary.source.ip) in sources for boundary in boundaries(job))
        else:
            is_installed = any(
                mac_number(rank.mac) in macs for group in job.dp_groups for rank in group.ranks
            )
        if not is_installed:
            missing.append(job.job)
    return tuple(missing)


async def _direct(
    session: SwitchSession, table: str, holdings: Holdings
) -> dict[tuple[StreamKey, int | None], StreamCount]:
    return {
        (stream_key(match), match.get("incarnation")): StreamCount(packets, nbytes)
        for match, packets, nbytes in await _counts(session, table, holdings)
    }


async def _counts(session: SwitchSession, table: str, holdings: Holdings) -> list[Counts]:
    """Read a table's direct counters."""
    codec = session.codec
    reads = codec.read_direct_counters(table, holdings.table(table))
    if not reads:
        return []
    return [codec.decode_direct_counter(message) async for message in session.read_entities(reads)]


async def _cells(session: SwitchSession, counter: str, names: tuple[str, ...]) -> dict[str, StreamCount]:
    cells = {name: StreamCount() for name in names}
    codec = session.codec
    async for message in session.read_entities([codec.read_counter(counter)]):
        entry = P4CounterEntry.decode(message, codec.schema)
        if entry.index is not None and entry.index < len(names):
            cells[names[entry.index]] = StreamCount(entry.packet_count, entry.byte_count)
    return cells
