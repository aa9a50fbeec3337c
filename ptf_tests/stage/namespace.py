"""A network namespace without a name, which ends with the last process in it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from pyroute2 import IPRoute

MTU = 9500
"""MTU of every interface, for frames of 9,000 bytes."""

_CLONE_NEWNET = 0x40000000
_NO_IPV6 = Path("/proc/sys/net/ipv6/conf/default/disable_ipv6")


class NamespaceError(Exception):
    """The namespace or an interface in it could not be created."""


def enter() -> None:
    """Move this process into a new network namespace that has only a loopback interface, which is up.

    Call it before any thread starts, because unshare(2) moves only the calling thread.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise NamespaceError(f"can't make a network namespace: {reason}; run as root")
    # The kernel's own router solicitations would be unexpected frames at the ports.
    if _NO_IPV6.exists():
        _NO_IPV6.write_text("1")
    with IPRoute() as ip:
        ip.link("set", index=ip.link_lookup(ifname="lo")[0], state="up")


def add_links(pairs: Iterable[tuple[str, str]]) -> None:
    """Create veth pairs with these names, and bring them up."""
    with IPRoute() as ip:
        names = []
        for near, far in pairs:
            ip.link("add", ifname=near, kind="veth", mtu=MTU, peer={"ifname": far, "mtu": MTU})
            names += [near, far]
        for name in names:
            ip.link("set", index=ip.link_lookup(ifname=name)[0], state="up")


def mtu(name: str) -> int | None:
    """Return an interface's MTU in bytes, or `None` if it does not exist."""
    with IPRoute() as ip:
        for link in ip.get_links():
            if link.get_attr("IFLA_IFNAME") == name:
                return int(link.get_attr("IFLA_MTU"))
    return None


def frames_sent(names: Iterable[str]) -> dict[str, int]:
    """Return the number of frames that each interface has sent so far."""
    interfaces = set(names)
    counts = {}
    with IPRoute() as ip:
        for link in ip.get_links():
            name = link.get_attr("IFLA_IFNAME")
            if name in interfaces:
                counts[name] = int(link.get_attr("IFLA_STATS64")["tx_packets"])
    return counts
