"""`checkmate plan --pfc` and `--bfrt`: settings of a Tofino and its hosts beyond P4Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from checkmate.cli.common import UsageFault, err, out, print_json
from checkmate.job.files import JobSet
from checkmate.job.schema import Job
from checkmate.output.tables import FittedTable
from controlplane.network import Network
from controlplane.plan import SwitchPlan
from controlplane.tofino.bfrt import script
from controlplane.tofino.pfc import (
    HostCommands,
    NoRoom,
    PfcPlan,
    host_commands,
    pfc_plan,
    port_peers,
    priority_clashes,
)

PfcFlag = Annotated[
    bool, typer.Option("--pfc", help="Print the settings for lossless delivery on Tofinos and their hosts.")
]
BfrtFlag = Annotated[
    bool, typer.Option("--bfrt", help="Print a bfrt_python script of Tofino settings that P4Runtime lacks.")
]
SwitchName = Annotated[
    str | None, typer.Option("--switch", help="Print only this switch (--pfc, --bfrt).", show_default=False)
]


def show(
    job_set: JobSet,
    jobs: Sequence[Job],
    plans: Mapping[str, SwitchPlan],
    *,
    bfrt: bool,
    only: str | None,
    as_json: bool,
) -> None:
    """Print the settings for PFC, or with `bfrt` a script.

    Raises `JobError`, with the arithmetic, if a switch has too little memory.
    """
    network = Network(jobs)
    names = _names(network, only)
    lossy = [name for name in names if not _needs_pfc(jobs, name)]
    planned = _planned(job_set, network, plans, [name for name in names if name not in lossy])
    if bfrt:
        scripts = {
            name: script(network.switches[name], port_peers(network, name)[0], planned.get(name))
            for name in names
        }
        if as_json:
            print_json({"switches": {name: {"script": text} for name, text in scripts.items()}})
            return
        if len(scripts) > 1:
            raise UsageFault(f"each script is for one switch: add --switch {' or --switch '.join(scripts)}")
        typer.echo("".join(scripts.values()))
        return
    hosts = [host for host in host_commands(jobs) if host.switch in planned]
    if as_json:
        data = {name: _data(plan) for name, plan in planned.items()}
        print_json({"switches": data, "hosts": [asdict(host) for host in hosts]})
        return
    for plan in planned.values():
        _print_switch(plan)
    for name in lossy:
        out.print(f"switch {name} needs no PFC: ranks of its jobs send lost copies again (lossless: false)")
    if hosts:
        _print_hosts(hosts)


def _needs_pfc(jobs: Sequence[Job], switch: str) -> bool:
    """Return whether copies at a switch must not be lost. One such job decides for all that share it."""
    return any(job.lossless and _uses(job, switch) for job in jobs)


def _uses(job: Job, switch: str) -> bool:
    return any(switch == at.name for at in job.fabric.switches)


def _names(network: Network, only: str | None) -> list[str]:
    tofinos = [name for name, switch in network.switches.items() if switch.is_tofino]
    if only is not None:
        if only not in tofinos:
            raise UsageFault(
                f"no Tofino {only!r} among the jobs' switches; Tofinos: {', '.join(tofinos) or 'none'}"
            )
        return [only]
    if not tofinos:
        targets = [f"{name} ({switch.target})" for name, switch in network.switches.items()]
        raise UsageFault(f"--pfc and --bfrt are for Tofinos, but the jobs' switches are {', '.join(targets)}")
    return tofinos


def _planned(
    job_set: JobSet, network: Network, plans: Mapping[str, SwitchPlan], names: Sequence[str]
) -> dict[str, PfcPlan]:
    clashing = priority_clashes(network.jobs)
    faults = [
        job_set.located(file, ("tag", "priority"), clashing[job.job])
        for file, job in job_set.sound
        if job.job in clashing
    ]
    pfc_plans = {}
    for name in names:
        users = [(file, job) for file, job in job_set.sound if _uses(job, name)]
        try:
            pfc_plans[name] = pfc_plan(network, network.switches[name], plans[name], users[0][1].tag.priority)
        except NoRoom as error:
            faults += [job_set.located(file, ("fabric",), str(error)) for file, _ in users]
    job_set.require(faults)
    return pfc_plans


def _data(plan: PfcPlan) -> dict[str, object]:
    data = asdict(plan)
    for sender, sender_data in zip(plan.senders, data["senders"], strict=True):
        sender_data["headroom"]["bytes"] = sender.headroom.bytes
        sender_data["admitted"] = sender.admitted_cells(plan.threshold)
    return data


def _print_switch(plan: PfcPlan) -> None:
    out.print(
        f"switch {plan.switch} ({plan.target}): priority {plan.priority}; "
        f"{plan.egress_pool:,} of {plan.available:,} cells",
        markup=False,
    )
    columns = ("speed", "cable", "threshold", "headroom", "copies")
    table = FittedTable("", "training comes in by", *columns, numbers=columns)
    for sender in plan.senders:
        where = f"{sender.port.name}  {', '.join(sender.peers)}"
        cells = (plan.threshold, sender.headroom.cells, sender.copies)
        table.add_row(where, sender.port.speed, f"{sender.port.cable:g} m", *map(str, cells))
    out.print(table)
    table = FittedTable("", "goes out by", "behind it", "queue holds", numbers=("queue holds",))
    for queue in plan.queues:
        table.add_row(
            f"{queue.port.name}  {', '.join(queue.peers)}", "shadow" if queue.shadow else "", str(queue.cells)
        )
    out.print(table)
    numbers = ("from", "cells of its copies")
    table = FittedTable("", "multicast group", *numbers, numbers=numbers)
    for group in plan.groups:
        table.add_row(f"{group.group}  to {' '.join(group.ports)}", group.came_in_by, str(group.cells))
    out.print(table)
    for text in _explained(plan):
        out.print(text, soft_wrap=True, markup=False)
    out.print()


def _explained(plan: PfcPlan) -> list[str]:
    """Return the arithmetic as sentences."""
    sentences = [
        f"Pools: ingress {plan.ingress_pool:,}, skid {plan.skid_pool:,}, egress {plan.egress_pool:,} cells. "
        f"A stuck shadow node pauses training for up to {plan.watchdog} ms; then its NIC drops copies.",
    ]
    if plan.senders:
        slowest = max(plan.senders, key=lambda sender: sender.headroom.cells)
        sentences.insert(0, f"Headroom of {slowest.port.name}: {slowest.headroom.arithmetic()}.")
    return sentences


def _print_hosts(hosts: Sequence[HostCommands]) -> None:
    """Print a shell script; all other lines are comments."""
    for host in hosts:
        typer.echo(f"# {host.host}, at {host.switch} {host.port}")
        for command in host.commands:
            typer.echo(command)
        typer.echo()
    err.print("With PFC, training waits while a shadow node cannot receive.", markup=False)
