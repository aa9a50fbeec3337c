"""A host in a namespace: two interfaces in one subnet, the first with a small MTU and without offloads."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from checkmate.job.schema import Job
from checkmate.job.validation import of_data
from testbed.jobs import job_data
from topologies.kernel import namespaces
from topologies.kernel.links import add_cable, prepare, set_address, switch_offloads_off

MAC = "02:00:00:00:00:07"
"""The interfaces' addresses have 0 and 1 in place of the last digit."""
NET = IPv4Network("10.77.0.0/24")


@contextlib.contextmanager
def namespace_host() -> Iterator[str]:
    """Yield a namespace with eth0 (10.77.0.1, MTU 576, no offloads) and eth1 (10.77.0.2)."""
    name = f"cm-d{os.getpid()}{random.randrange(10**6)}-host"
    namespaces.create(name)
    try:
        prepare(name)
        for number, mtu in enumerate((576, 1500)):
            add_cable(name, f"far{number}", name, f"eth{number}", mtu=mtu, far_mac=f"{MAC[:-1]}{number}")
            set_address(name, f"eth{number}", IPv4Address(f"10.77.0.{number + 1}"), NET)
        switch_offloads_off(name, "eth0")
        yield name
    finally:
        namespaces.remove(name)


def job_there(**changes: Any) -> Job:
    """Return a job whose only shadow node is that host. `changes`: of the first NIC."""
    data = job_data("gpt")
    for number, nic in enumerate(data["shadow_nodes"][0]["nics"]):
        nic |= {"ip": f"10.77.0.{number + 1}", "mac": f"{MAC[:-1]}{number}"}
    data["shadow_nodes"][0]["nics"][0] |= changes
    return of_data(Job, data)
