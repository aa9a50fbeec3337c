"""Segmentation and checksum offloads of an interface.

The embedded target forwards 64 KB segments whole. BMv2 reads frames as they are on the wire, so its hosts
segment data and compute checksums themselves.
"""

from __future__ import annotations

from contextlib import closing
from typing import Final

from pyroute2.ethtool.ioctl import IoctlEthtool

from topologies.kernel.namespaces import entered

_OFFLOADS: Final = {
    "gro": "generic-receive-offload",
    "gso": "generic-segmentation-offload",
    "tso": "tcp-segmentation-offload",
    "rx checksums": "rx-checksumming",
    "tx checksums": "tx-checksumming",  # last: the others depend on it
}


def switch_off(namespace: str, interface: str) -> None:
    """Switch all offloads of an interface off."""
    with entered(namespace), closing(IoctlEthtool(interface)) as ethtool:
        for name in _OFFLOADS.values():
            ethtool.set_offload_flag(name, 0)


def states(namespace: str, interface: str) -> dict[str, bool]:
    """Return for each offload of an interface whether it is on."""
    with entered(namespace), closing(IoctlEthtool(interface)) as ethtool:
        flags = ethtool.get_offload_flags()
    return {offload: bool(flags[name]) for offload, name in _OFFLOADS.items()}
