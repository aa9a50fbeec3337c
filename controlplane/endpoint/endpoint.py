"""Decisions of the stub endpoint: the answer to a segment, and the changes on the switch. Pure.

A SYN leaves no state. State begins with a valid hello: the stream's entry on the switch, and the hello's
time in the controller's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address
from types import MappingProxyType
from typing import Final

from checkmate.base.wording import counted
from checkmate.job.schema import Job, Nic
from checkmate.keys.macs import is_hello_authentic
from checkmate.wire import tag
from controlplane import streams
from controlplane.endpoint import frames
from controlplane.endpoint.frames import Segment, SegmentKind
from controlplane.entities import TableEntry
from controlplane.network import Network
from controlplane.streams import StreamAdmission, StreamConnection, StreamKey, StreamRefused

_WHY: Final[Mapping[str, str]] = MappingProxyType(
    {
        "closed": "the node was stopped, training starts again, or the node joins again after a gap",
        "reset": "the node died, or its connection broke",
    }
)
MAX_LISTED: Final = 3
CLOCK_WINDOW = 60_000_000
"""Microseconds by which a node's clock may differ from the controller's."""


@dataclass(frozen=True, slots=True)
class Closure:
    """A stream that a shadow NIC has `closed` or `reset`."""

    switch: str
    how: str
    nic: str
    port: int
    channel: int
    shadow_id: int


def closures_line(closures: Sequence[Closure]) -> str:
    """Return one log line for closures, of one switch and one kind, that came together."""
    first = closures[0]
    nics = list(dict.fromkeys(closure.nic for closure in closures))
    if len(closures) == 1:
        subject = f"shadow NIC {first.nic}:{first.port}"
        closed_streams = f"its stream of channel {first.channel}, shadow id {first.shadow_id}"
    else:
        more = f" and {len(nics) - MAX_LISTED:,} more" if len(nics) > MAX_LISTED else ""
        subject = f"{'shadow NIC' if len(nics) == 1 else 'shadow NICs'} {', '.join(nics[:MAX_LISTED])}{more}"
        closed_streams = counted(len(closures), "stream")
    return (
        f"switch {first.switch}: {subject} {first.how} {closed_streams}: {_WHY[first.how]}; no copies go "
        "there until the node connects: by itself while training runs, else once training has started"
    )


class ConnectedStreams:
    """The connected streams' entries, by stream and by the shadow node's (address, port)."""

    def __init__(self, entries: Iterable[TableEntry] = ()) -> None:
        self.by_stream: dict[StreamKey, TableEntry] = {}
        self._by_peer: dict[tuple[int, int], TableEntry] = {}
        for entry in entries:
            self.put(entry)

    def put(self, entry: TableEntry) -> None:
        """Add a stream's entry, or replace it."""
        self.drop(self.by_stream.get(streams.stream_key(entry)))
        self.by_stream[streams.stream_key(entry)] = entry
        self._by_peer[(entry["shadow_ip"], entry["shadow_port"])] = entry

    def drop(self, entry: TableEntry | None) -> None:
        """Remove an entry, if it is the one of its stream."""
        if entry is not None and self.by_stream.get(streams.stream_key(entry)) == entry:
            del self.by_stream[streams.stream_key(entry)]
            peer = (entry["shadow_ip"], entry["shadow_port"])
            if self._by_peer.get(peer) == entry:
                del self._by_peer[peer]

    def find_peer(self, segment: Segment) -> TableEntry | None:
        """Return the connection that a segment names."""
        return self._by_peer.get((int(segment.ip), segment.port))


@dataclass(frozen=True, slots=True)
class KnownNic:
    """A shadow NIC, its job, and the switch port at which its frames arrive."""

    nic: Nic
    job: Job
    port: int


@dataclass(frozen=True, slots=True)
class View:
    """State of one switch that its endpoint needs."""

    network: Network
    switch: str
    boundary_ids: Mapping[tuple[str, int], int]
    connected: ConnectedStreams
    hello_times: Mapping[StreamKey, int]
    """The time of the last hello that was accepted for each stream, since the controller's start."""
    hello_keys: Mapping[str, bytes] = field(repr=False)
    """The secret `hello.key` of each job."""
    nics: Mapping[IPv4Address, KnownNic]

    @classmethod
    def from_network(
        cls,
        network: Network,
        switch: str,
        boundary_ids: Mapping[tuple[str, int], int],
        connected: ConnectedStreams,
        hello_times: Mapping[StreamKey, int],
        hello_keys: Mapping[str, bytes],
    ) -> View:
        """Return the view of a switch, with the shadow NICs of all jobs that reach it."""
        nics = {
            nic.ip: KnownNic(nic, job, port)
            for job in network.jobs
            for node in job.shadow_nodes
            for nic in node.nics
            if (port := network.arrival_port(switch, nic)) is not None
        }
        return cls(network, switch, boundary_ids, connected, hello_times, hello_keys, nics)

    def known_nic(self, segment: Segment, port: int) -> KnownNic | None:
        """Return the shadow NIC that a segment comes from: its MAC address, at its port."""
        nic = self.nics.get(segment.ip)
        if nic is None or nic.port != port or nic.nic.mac != segment.mac:
            return None
        return nic

    def knows(self, segment: Segment, port: int) -> bool:
        """Return whether a segment comes from a job's shadow NIC."""
        return self.known_nic(segment, port) is not None


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply frame, sent once `admission` is written and `drop` is removed.

    `note` and `closure` are for the log.
    """

    frame: bytes | None = None
    admission: StreamAdmission | None = None
    drop: TableEntry | None = None
    note: str = ""
    closure: Closure | None = None


def answer(segment: Segment, port: int, view: View, now: int) -> Answer:
    """Return the answer to a segment that arrived at `port` (design, section 4).

    `now`: microseconds since the epoch, by the controller's clock.
    """
    stub = view.network.switches[view.switch].stub
    match segment.kind:
        case SegmentKind.ARP:
            return Answer(frames.arp_reply(stub, segment))
        case SegmentKind.SYN:
            if segment.stub_port == stub.port and view.knows(segment, port):
                return Answer(frames.syn_ack(stub, segment))
            return Answer(frames.reset(stub, segment), note=f"refused a SYN from {segment.ip} at port {port}")
        case SegmentKind.RST:
            entry = _connection_of(segment, port, view)
            return Answer(drop=entry, closure=_closure(segment, entry, view, "reset") if entry else None)
        case SegmentKind.FIN:
            entry = _connection_of(segment, port, view)
            if entry is not None:
                closure = _closure(segment, entry, view, "closed")
                return Answer(frames.finish(stub, segment), drop=entry, closure=closure)
            return Answer(frames.reset(stub, segment))
        case SegmentKind.DATA:
            return _hello(segment, port, view, now)
        case _:
            return Answer()


def _closure(segment: Segment, entry: TableEntry, view: View, how: str) -> Closure:
    nic, port = str(segment.ip), segment.port
    return Closure(view.switch, how, nic, port, entry["channel"], entry["shadow_id"])


def _connection_of(
    segment: Segment, port: int, view: View, *, behind: tuple[int, ...] = (0,)
) -> TableEntry | None:
    """Return the connection that a segment belongs to, if its sequence number is acceptable now.

    Args:
        behind: How far the sequence number may be below the next one.
    """
    entry = view.connected.find_peer(segment) if view.knows(segment, port) else None
    if entry is not None and (entry["acknowledgement"] - segment.sequence) % tag.MODULUS in behind:
        return entry
    return None


def _hello(segment: Segment, port: int, view: View, now: int) -> Answer:
    stub = view.network.switches[view.switch].stub
    try:
        admission = _admission(segment, port, view, now)
    except StreamRefused as refusal:
        return Answer(
            frames.reset(stub, segment),
            drop=_connection_of(segment, port, view, behind=(0, tag.HELLO_LENGTH)),
            note=f"refused a hello from {segment.ip}:{segment.port}: {refusal}",
        )
    stale = view.connected.find_peer(segment)
    if admission is not None and stale is not None and streams.stream_key(stale) != admission.key:
        # The node reuses this address and port, so it no longer has the older stream.
        admission = replace(admission, drops=(*admission.drops, stale))
    return Answer(frames.acknowledge(stub, segment), admission)


def _admission(segment: Segment, port: int, view: View, now: int) -> StreamAdmission | None:
    """Return what a hello changes, or `None` for a repeated one. Raise `StreamRefused`."""
    stub = view.network.switches[view.switch].stub
    nic = view.known_nic(segment, port)
    if nic is None or segment.stub_port != stub.port:
        raise StreamRefused(f"{segment.ip} at port {port} is not a shadow NIC of any job")
    try:
        hello, mac = tag.Hello.unpack(segment.payload)
    except ValueError as error:
        raise StreamRefused(str(error)) from None
    ends = tag.Ends(segment.ip, segment.port, stub.ip, segment.stub_port)
    if not is_hello_authentic(view.hello_keys[nic.job.job], hello.covered(ends), mac):
        raise StreamRefused(
            f"its MAC is wrong: the node's hello.key is not this controller's of job {nic.job.job}"
        )
    isn = (segment.sequence - 1) % tag.MODULUS
    admission = streams.admit(
        hello,
        StreamConnection(segment.ip, segment.mac, segment.port, isn, hello.base),
        job=nic.job,
        network=view.network,
        switch=view.switch,
        boundary_id=view.boundary_ids,
        connected=view.connected.by_stream,
    )
    if view.connected.by_stream.get(admission.key) == admission.puts[0]:
        return None  # the acknowledgement was lost; the entry is known even after a controller's restart
    _check_time(hello.time, view.hello_times.get(admission.key), now)
    return admission


def _check_time(time: int, last: int | None, now: int) -> None:
    """Raise `StreamRefused` unless a time is near the controller's, and after its stream's last one."""
    if abs(time - now) > CLOCK_WINDOW:
        way = "ahead of" if time > now else "behind"
        raise StreamRefused(
            f"the node's clock is {abs(time - now) / 1e6:.1f} s {way} this controller's, more than "
            f"{CLOCK_WINDOW // 1_000_000} s; synchronise both, for example by NTP. Or the hello was replayed"
        )
    if last is not None and time == last:
        raise StreamRefused(
            "it was replayed: a hello of this time was accepted before, for a connection that ended"
        )
    if last is not None and time < last:
        raise StreamRefused(
            f"it is old: {(last - time) / 1e6:.3f} s before the stream's last one, by the node's clock"
        )
