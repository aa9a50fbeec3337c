"""Removal of jobs from switches whose other jobs are unknown here, based on the entries of the switches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from checkmate.job.schema import Job
from controlplane.election import Candidacy
from controlplane.entities import (
    FIRST_JOB_GROUP,
    FLOOD_GROUP,
    Holdings,
    MulticastGroup,
    difference,
    mac_number,
)
from controlplane.errors import ControlError
from controlplane.network import Network
from controlplane.p4runtime.codec import Codec
from controlplane.p4runtime.session import SwitchSession
from controlplane.reconciling import Reconciliation
from controlplane.serve import CONTROLLER

_BOUNDARY_TABLES = ("replication", "streams", "lost", "incarnations")
_HOST_TABLES = ("sources", "guarded_addresses", "clients")


def holdings_without(current: Holdings, network: Network, switch: str) -> Holdings:
    """Return the entries of `switch` that remain without the network's jobs. Pure.

    A boundary is identified by its source address, so the ids of the jobs' boundaries are read from
    `boundaries`. The result is empty if no job is left.
    """
    sources = {int(boundary.source.ip) for boundary in network.boundaries}
    boundaries = {entry["boundary"] for entry in current.table("boundaries") if entry["source"] in sources}
    macs = {mac_number(host.mac) for host in network.interfaces}
    addresses = {int(source) for host in network.interfaces for source in host.sources}
    rest = Holdings(rates=dict(current.rates))
    for entry in current.entries.values():
        is_removed = (
            (entry.table == "boundaries" and entry["source"] in sources)
            or (entry.table in _BOUNDARY_TABLES and entry["boundary"] in boundaries)
            or (entry.table == "forwarding" and entry["mac"] in macs)
            or (entry.table in _HOST_TABLES and entry["address"] in addresses)
        )
        if not is_removed:
            rest.put(entry)
    stubs = {mac_number(peer.stub.mac) for peer in network.switches.values()}
    if not any(entry.action == "forward" and entry["mac"] not in stubs for entry in rest.table("forwarding")):
        return Holdings()  # no host of another job is left
    if not rest.table("replication"):
        for entry in rest.table("marks"):
            rest.drop(entry)  # no segments are tagged here any more
    guarded = {entry["port"] for entry in rest.table("sources")}
    for entry in rest.table("guarded_ports"):
        if entry.action == "host_port" and entry["port"] not in guarded:
            rest.drop(entry)
    groups = {entry["group"] for entry in rest.table("replication")}
    ports = {host.port for host in network.interfaces if host.switch == switch}
    for group in current.groups.values():
        if group.id == FLOOD_GROUP:
            rest.put(MulticastGroup(group.id, frozenset(r for r in group.replicas if r[0] not in ports)))
        elif group.id < FIRST_JOB_GROUP or group.id in groups:
            rest.put(group)
    return rest


async def remove_jobs(jobs: Sequence[Job]) -> list[Reconciliation]:
    """Remove `jobs` from all of their switches.

    All switches are reached before the first write. If one refuses, the entries of the others are restored.
    """
    network = Network(jobs)
    changes: list[tuple[SwitchSession, Holdings, Holdings]] = []
    reports: list[Reconciliation] = []
    async with AsyncExitStack() as stack:
        for name, switch in network.switches.items():
            session = await stack.enter_async_context(
                SwitchSession(switch, Codec.for_switch(switch), candidacy=Candidacy(CONTROLLER))
            )
            await session.check_pipeline()
            current = await session.read()
            changes.append((session, current, holdings_without(current, network, name)))
        try:
            for session, current, rest in changes:
                start = time.monotonic()
                updates = difference(current, rest)
                await session.write(updates)
                seconds = time.monotonic() - start
                reports.append(Reconciliation(session.switch.name, len(updates), len(rest), seconds))
        except ControlError:
            for session, current, rest in changes[: len(reports)]:
                await session.write(difference(rest, current))
            raise
    return reports
