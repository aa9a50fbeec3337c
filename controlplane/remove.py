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
from controlplane.reconciling import Reconciled
from controlplane.serve import CONTROLLER

_OF_BOUNDARIES = ("replication", "streams", "lost", "incarnations")
_OF_HOSTS = ("sources", "guarded_addresses", "clients")


def without(held: Holdings, network: Network, switch: str) -> Holdings:
    """Return the entries of `switch` that remain without the network's jobs. Pure.

    A boundary is identified by its source address, so the ids of the jobs' boundaries are read from
    `boundaries`. The result is empty if no job is left.
    """
    sources = {int(boundary.source.ip) for boundary in network.boundaries}
    ours = {entry["boundary"] for entry in held.table("boundaries") if entry["source"] in sources}
    macs = {mac_number(host.mac) for host in network.hosts}
    addresses = {int(source) for host in network.hosts for source in host.sources}
    rest = Holdings(rates=dict(held.rates))
    for entry in held.entries.values():
        gone = (
            (entry.table == "boundaries" and entry["source"] in sources)
            or (entry.table in _OF_BOUNDARIES and entry["boundary"] in ours)
            or (entry.table == "forwarding" and entry["mac"] in macs)
            or (entry.table in _OF_HOSTS and entry["address"] in addresses)
        )
        if not gone:
            rest.put(entry)
    stubs = {mac_number(one.stub.mac) for one in network.switches.values()}
    if not any(entry.action == "forward" and entry["mac"] not in stubs for entry in rest.table("forwarding")):
        return Holdings()  # no host of another job is left
    if not rest.table("replication"):
        for entry in rest.table("marks"):
            rest.drop(entry)  # no segments are tagged here any more
    guarded = {entry["port"] for entry in rest.table("sources")}
    for entry in rest.table("guarded_ports"):
        if entry.action == "host_port" and entry["port"] not in guarded:
            rest.drop(entry)
    used = {entry["group"] for entry in rest.table("replication")}
    ports = {host.port for host in network.hosts if host.switch == switch}
    for group in held.groups.values():
        if group.id == FLOOD_GROUP:
            rest.put(MulticastGroup(group.id, frozenset(r for r in group.replicas if r[0] not in ports)))
        elif group.id < FIRST_JOB_GROUP or group.id in used:
            rest.put(group)
    return rest


async def remove_jobs(jobs: Sequence[Job]) -> list[Reconciled]:
    """Remove `jobs` from all of their switches.

    All switches are reached before the first write. If one refuses, the entries of the others are restored.
    """
    network = Network(jobs)
    changes: list[tuple[SwitchSession, Holdings, Holdings]] = []
    done: list[Reconciled] = []
    async with AsyncExitStack() as stack:
        for name, switch in network.switches.items():
            session = await stack.enter_async_context(
                SwitchSession(switch, Codec.for_switch(switch), candidacy=Candidacy(CONTROLLER))
            )
            await session.check_pipeline()
            held = await session.read()
            changes.append((session, held, without(held, network, name)))
        try:
            for session, held, rest in changes:
                start = time.monotonic()
                updates = difference(held, rest)
                await session.write(updates)
                seconds = time.monotonic() - start
                done.append(Reconciled(session.switch.name, len(updates), len(rest), seconds))
        except ControlError:
            for session, held, rest in changes[: len(done)]:
                await session.write(difference(rest, held))
            raise
    return done
