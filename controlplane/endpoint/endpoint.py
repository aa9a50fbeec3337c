"""Decisions of the stub endpoint: the answer to a segment, and the changes on the switch. Pure.

A SYN leaves no state. State begins with a valid hello, and is the stream's entry on the switch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from ipaddress import IPv4Address

from checkmate.job.schema import Nic
from checkmate.wire import tag
from controlplane import streams
from controlplane.endpoint import frames
from controlplane.endpoint.frames import Segment, SegmentKind
from controlplane.entities import TableEntry
from controlplane.network import Network
from controlplane.streams import Admission, StreamConnection, StreamKey, StreamRefused

_LEFT = "the node was stopped, training starts again, or the node joins again after a gap"
_DEAD = "the node died, or its connection broke"


class Connected:
    """The connected streams' entries, by stream and by the shadow node's (address, port)."""

    def __init__(self, entries: Iterable[TableEntry] = ()) -> None:
        self.by_stream: dict[StreamKey, TableEntry] = {}
        self._by_peer: dict[tuple[int, int], TableEntry] = {}
        for entry in entries:
            self.put(entry)

    def put(self, entry: TableEntry) -> None:
        self.drop(self.by_stream.get(streams.key_of(entry)))
        self.by_stream[streams.key_of(entry)] = entry
        self._by_peer[(entry["shadow_ip"], entry["shadow_port"])] = entry

    def drop(self, entry: TableEntry | None) -> None:
        if entry is not None and self.by_stream.get(streams.key_of(entry)) == entry:
            del self.by_stream[streams.key_of(entry)]
            peer = (entry["shadow_ip"], entry["shadow_port"])
            if self._by_peer.get(peer) == entry:
                del self._by_peer[peer]

    def of_peer(self, segment: Segment) -> TableEntry | None:
        """Return the connection that a segment names."""
        return self._by_peer.get((int(segment.ip), segment.port))


@dataclass(frozen=True, slots=True)
class View:
    """State of one switch that its endpoint needs."""

    network: Network
    switch: str
    boundary_ids: Mapping[tuple[str, int], int]
    connected: Connected
    nics: Mapping[IPv4Address, tuple[Nic, int]]
    """Each shadow NIC with the switch port at which its frames arrive."""

    @classmethod
    def of(
        cls, network: Network, switch: str, boundary_ids: Mapping[tuple[str, int], int], connected: Connected
    ) -> View:
        nics = {
            nic.ip: (nic, port)
            for nic in network.hosts
            if isinstance(nic, Nic) and (port := network.arrival_port(switch, nic)) is not None
        }
        return cls(network, switch, boundary_ids, connected, nics)

    def knows(self, segment: Segment, port: int) -> bool:
        """Return whether a segment comes from a job's shadow NIC: its MAC address, at its port."""
        found = self.nics.get(segment.ip)
        return found is not None and found[1] == port and found[0].mac == segment.mac


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply frame, sent once `admission` is written and `drop` is removed; `note` is for the log."""

    frame: bytes | None = None
    admission: Admission | None = None
    drop: TableEntry | None = None
    note: str = ""


def answer(segment: Segment, port: int, view: View) -> Answer:
    """Return the answer to a segment that arrived at `port` (design, section 4)."""
    here = view.network.switches[view.switch].stub
    match segment.kind:
        case SegmentKind.ARP:
            return Answer(frames.arp_reply(here, segment))
        case SegmentKind.SYN:
            if segment.stub_port == here.port and view.knows(segment, port):
                return Answer(frames.syn_ack(here, segment))
            return Answer(frames.reset(here, segment), note=f"refused a SYN from {segment.ip} at port {port}")
        case SegmentKind.RST:
            entry = _named(segment, port, view)
            return Answer(drop=entry, note=_over(segment, entry, "reset", _DEAD) if entry else "")
        case SegmentKind.FIN:
            entry = _named(segment, port, view)
            if entry is not None:
                return Answer(
                    frames.finish(here, segment), drop=entry, note=_over(segment, entry, "closed", _LEFT)
                )
            return Answer(frames.reset(here, segment))
        case SegmentKind.DATA:
            return _hello(segment, port, view)
        case _:
            return Answer()


def _over(segment: Segment, entry: TableEntry, how: str, why: str) -> str:
    """Return the log line for the end of a shadow node's stream."""
    stream = f"channel {entry['channel']}, shadow id {entry['shadow_id']}"
    return (
        f"shadow NIC {segment.ip}:{segment.port} {how} its stream of {stream}: {why}; "
        "no copies go to it until it connects: by itself while training runs, else once training has started"
    )


def _named(segment: Segment, port: int, view: View, *, behind: tuple[int, ...] = (0,)) -> TableEntry | None:
    """Return the connection that a segment belongs to, if its sequence number is acceptable now.

    Args:
        behind: How far the sequence number may be below the next one.
    """
    entry = view.connected.of_peer(segment) if view.knows(segment, port) else None
    if entry is not None and (entry["acknowledgement"] - segment.sequence) % tag.MODULUS in behind:
        return entry
    return None


def _hello(segment: Segment, port: int, view: View) -> Answer:
    here = view.network.switches[view.switch].stub
    isn = (segment.sequence - 1) % tag.MODULUS
    try:
        if not view.knows(segment, port) or segment.stub_port != here.port:
            raise StreamRefused(f"{segment.ip} at port {port} is not a shadow NIC of any job")
        try:
            hello = tag.Hello.unpack(segment.payload)
        except ValueError as error:
            raise StreamRefused(str(error)) from None
        admission = streams.admit(
            hello,
            StreamConnection(segment.ip, segment.mac, segment.port, isn, hello.base),
            network=view.network,
            switch=view.switch,
            boundary_id=view.boundary_ids,
            held=view.connected.by_stream,
        )
    except StreamRefused as refusal:
        return Answer(
            frames.reset(here, segment),
            drop=_named(segment, port, view, behind=(0, tag.HELLO_LENGTH)),
            note=f"refused a hello from {segment.ip}:{segment.port}: {refusal}",
        )
    stale = view.connected.of_peer(segment)
    if stale is not None and streams.key_of(stale) != admission.key:
        # The node reuses this address and port, so it no longer has the older stream.
        admission = replace(admission, drop=(*admission.drop, stale))
    frame = frames.acknowledge(here, segment)
    if view.connected.by_stream.get(admission.key) == admission.put[0]:
        return Answer(frame)  # a repeated hello
    return Answer(frame, admission)
