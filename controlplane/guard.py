"""Feature `guard`: the source addresses that each port may send.

Data plane: p4src/include/guard.p4. Packet tests: ptf_tests/guard.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Any

from checkmate.base.wording import counted
from checkmate.job.schema import Host
from controlplane.entities import TableEntry
from controlplane.network import Network


def permit(port: int, address: IPv4Address) -> TableEntry:
    """Return the entry that lets frames from `address` in at `port`."""
    return TableEntry("sources", (("port", port), ("address", int(address))), "permit")


def host_port(port: int) -> TableEntry:
    """Return the entry by which a port accepts no other addresses than the permitted ones."""
    return TableEntry("guarded_ports", (("port", port),), "host_port")


def link_port(port: int) -> TableEntry:
    """Return the entry for a port to another switch: hosts of any job may be behind it."""
    return TableEntry("guarded_ports", (("port", port),), "link_port")


def refuse(address: IPv4Address, *, from_link: bool) -> TableEntry:
    """Return the entry that refuses an address at links, or at ports of no job, unless it is permitted."""
    return TableEntry(
        "guarded_addresses", (("address", int(address)), ("from_link", int(from_link))), "refuse"
    )


def entries(network: Network, switch: str) -> Iterator[TableEntry]:
    """Yield the switch's entries: a host is behind its own port, a stub behind the links on its paths."""
    for host in network.interfaces:
        for address in host.sources:
            yield refuse(address, from_link=False)
            if host.switch == switch:
                yield permit(host.port, address)
        if host.switch == switch:
            yield host_port(host.port)
    for port in network.links(switch):
        yield link_port(port)
    for name, peer in network.switches.items():
        yield refuse(peer.stub.ip, from_link=False)
        yield refuse(peer.stub.ip, from_link=True)
        for port in network.stub_ports(switch, name):
            yield permit(port, peer.stub.ip)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Packets that the guard has refused: at a host's `port`, or from an `address` at others than its own."""

    switch: str
    port: int | None
    address: str
    """The addresses of the host at the port; or the source of the packets."""
    host: str
    packets: int
    """Since the guard's entry was written, as a job was installed; the counter never goes back."""
    bytes: int

    @property
    def place(self) -> tuple[int | None, str]:
        """The port and the address of the count."""
        return (self.port, self.address)

    @property
    def trouble(self) -> str:
        """The refused packets and their place, in words."""
        many = counted(self.packets, "packet")
        if self.port is None:
            return (
                f"{many} from {self.address}, the address of {self.host}, refused at other ports than its own"
            )
        return f"{many} refused at port {self.port}, where {self.host} has only {self.address}"

    @property
    def remedy(self) -> str:
        """Advice for the operator."""
        if self.port is None:
            return "correct a cable, or its port in the job file, unless another machine has its address"
        return "give its interface that address, or name the others in the job file (addresses)"

    def __str__(self) -> str:
        return f"{self.trouble}: {self.remedy}"


Counts = tuple[Mapping[str, Any], int, int]
"""Match fields of an entry, and the packets and bytes of its direct counter."""


def refusals(network: Network, switch: str, counts: Iterable[Counts]) -> Iterator[Refusal]:
    """Yield what the counters of both guarded tables say: each host's port, and addresses with packets.

    Counters of links are left out: they have what links let pass, too. So are addresses that these jobs don't
    name: a command that was given some of a switch's jobs does not know whose they are.
    """
    at_port: dict[int, dict[str, Host]] = {}
    names: dict[int, dict[str, None]] = {}
    for job in network.jobs:
        for name, host in job.interfaces():
            if host.switch == switch:
                at_port.setdefault(host.port, {})[name] = host
            for address in host.sources:
                names.setdefault(int(address), {})[name] = None
    for peer in network.switches.values():
        names.setdefault(int(peer.stub.ip), {})[f"the stub of switch {peer.name}"] = None
    for match, packets, nbytes in counts:
        port = match.get("port")
        if port is None:
            if packets and (owners := names.get(int(match["address"]))):
                source = str(IPv4Address(match["address"]))
                yield Refusal(switch, None, source, ", ".join(owners), packets, nbytes)
        elif port in at_port:
            sources = dict.fromkeys(str(ip) for host in at_port[port].values() for ip in host.sources)
            yield Refusal(switch, port, ", ".join(sources), ", ".join(at_port[port]), packets, nbytes)
