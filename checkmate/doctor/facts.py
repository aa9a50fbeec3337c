"""The facts about a host. Pure; `reading` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, ip_address

from checkmate.base.privileges import Capability

Address = IPv4Address | IPv6Address


def is_numeric(host: str) -> bool:
    """Return whether a host is an IP address, and not a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class NicFacts:
    """An interface as the kernel reports it. `mtu`: in bytes."""

    name: str
    up: bool
    carrier: bool
    mac: str
    mtu: int
    network: IPv4Network | None = None
    """The network of its first address."""
    driver: str = ""
    offloads: Mapping[str, bool] = field(default_factory=dict)
    """The state of each (true: on), by ethtool's short names; absent if the driver does not report it."""
    loopback: bool = False


@dataclass(frozen=True)
class Clock:
    """The kernel's view of its clock. `error`: the most that it is off, in seconds, if synchronised."""

    synchronised: bool
    error: float


@dataclass(frozen=True)
class Facts:
    """The facts from which checks decide."""

    release: str
    """The kernel's, such as `6.1.0-13-amd64`."""
    capabilities: frozenset[Capability]
    """Effective ones."""
    root: bool
    files: int
    """The most open files of this process."""
    memory: int
    """Bytes that can be taken without swapping."""
    sysctls: Mapping[str, str]
    """By name; those that this network namespace does not show are absent."""
    nics: Mapping[str, NicFacts | None]
    """By address of the job; `None` if no interface has it."""
    listening: frozenset[tuple[Address, int]] = frozenset()
    """Addresses and ports at which some process takes TCP connections."""
    firewall: str | None = None
    """The rules of nftables, which iptables makes too; `None` if they were not or may not be read."""
    clock: Clock | None = None
    """`None` if it was not asked, or the kernel does not tell."""

    def number(self, sysctl: str) -> int | None:
        """Return the number that a sysctl is, if it is shown."""
        text = self.sysctls.get(sysctl, "")
        return int(text) if text.isdecimal() else None

    def last_number(self, sysctl: str) -> int | None:
        """Return the last number of a sysctl that has several, if it is shown."""
        *_, last = self.sysctls.get(sysctl, "").split() or [""]
        return int(last) if last.isdecimal() else None

    def listens(self, host: str, port: int) -> bool:
        """Return whether a process takes connections there; wildcard addresses count."""
        wanted_address = ip_address(host)
        return any(
            bound_port == port and (address == wanted_address or address.is_unspecified)
            for address, bound_port in self.listening
        )
