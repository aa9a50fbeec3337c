"""The files of a lab: its job, for `checkmate run`, and its topology. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal, get_args

import yaml

from topologies.describe.topology import (
    SHADOW_MGMT_PORT,
    STUB_TCP_PORT,
    BadDescription,
    LabGroup,
    LabHost,
    LabRank,
    SwitchNode,
    Topology,
)

Target = Literal["softswitch", "bmv2", "tofino"]
TARGETS: tuple[Target, ...] = get_args(Target)
TOFINO_CPU_PORT = 320
"""Of the model, which has four pipes."""
FABRIC_FILE = "fabric.yaml"
JOB_FILE = "job.yaml"
TOPOLOGY_FILE = "topology.yaml"


def target_of(text: str) -> Target:
    """Return the target of that name; raise `BadDescription` if there is none."""
    for target in TARGETS:
        if target == text:
            return target
    raise BadDescription(f"no target {text!r}; there are {', '.join(TARGETS)}")


def files(topology: Topology, lab: str, target: Target) -> dict[str, str]:
    """Return the text of each YAML file of a lab, by the file's name."""
    title = f"{topology.name}: {topology.title}"
    data = {
        **({FABRIC_FILE: fabric(topology, target)} if topology.switches else {}),
        TOPOLOGY_FILE: topology_data(topology),
        JOB_FILE: job(topology, lab),
        **{file_beside(beside): job(beside, beside.name) for beside in topology.beside},
    }
    return {name: as_yaml(content, title) for name, content in data.items()}


def file_beside(topology: Topology) -> str:
    """Return the name of the job file of a job beside the lab's."""
    return f"{topology.name}.yaml"


def fabric(topology: Topology, target: Target) -> dict[str, Any]:
    """Return the switches and links of a lab, as data of a fabric file."""
    links = [[{"switch": s, "port": p} for s, p in (link.a, link.b)] for link in topology.links]
    return {"switches": [_switch(switch, target) for switch in topology.switches], "links": links}


def job(topology: Topology, name: str) -> dict[str, Any]:
    """Return the job of a lab, as data of a job file, which refers to the fabric file beside it, if any."""
    if topology.copies == "host":
        return _job_by_hosts(topology, name)
    hosts = [_host(host) for host in topology.trainers] if topology.shared else []
    return {
        "job": name,
        "fabric": FABRIC_FILE,
        "channels": topology.channels,
        "replicas": topology.replicas,
        **_reduction(topology),
        **({"hosts": hosts} if hosts else {}),
        **(_mesh(topology) or {"dp_groups": [_group(group, hosts) for group in topology.groups]}),
        "shadow_nodes": [_shadow(node) for node in topology.shadow_nodes],
    }


def _job_by_hosts(topology: Topology, name: str) -> dict[str, Any]:
    ranks = {"ranks": len(topology.ranks)} if topology.mesh is None else {"mesh": asdict(topology.mesh)}
    nodes = [{"id": node.number, "mgmt": f"{node.mgmt}:{SHADOW_MGMT_PORT}"} for node in topology.shadow_nodes]
    return {"job": name, "copies": "host", "replicas": topology.replicas, **ranks, "shadow_nodes": nodes}


def topology_data(topology: Topology) -> dict[str, Any]:
    """Return a topology as data of its YAML, from which `build` makes an equal one."""
    if topology.copies == "host":
        return _topology_data_by_hosts(topology)
    hosts = [[nic.switch for nic in host.interfaces] for host in topology.trainers] if topology.shared else []
    return {
        "title": topology.title,
        "example": topology.example,
        "channels": topology.channels,
        "replicas": topology.replicas,
        **_reduction(topology),
        "switches": [switch.name for switch in topology.switches],
        "links": [[link.a[0], link.b[0]] for link in topology.links],
        **({"hosts": hosts} if hosts else {}),
        **(_mesh(topology) or {"dp_groups": [_group_data(group, hosts) for group in topology.groups]}),
        "shadow_nodes": [[nic.switch for nic in node.interfaces] for node in topology.shadow_nodes],
    }


def _topology_data_by_hosts(topology: Topology) -> dict[str, Any]:
    hosts = len(topology.trainers)
    return {
        "title": topology.title,
        "copies": "host",
        "example": topology.example,
        "replicas": topology.replicas,
        "hosts": hosts,
        "gpus_per_host": len(topology.ranks) // hosts,
        **({} if topology.mesh is None else {"mesh": asdict(topology.mesh)}),
        "shadow_nodes": len(topology.shadow_nodes),
    }


def as_yaml(data: dict[str, Any], title: str) -> str:
    """Return YAML text under a comment with the title."""
    return f"# {title}\n" + yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=110)


def _reduction(topology: Topology) -> dict[str, Any]:
    """Return the keys of what reduces gradients, and of what becomes of lost copies, unless by default."""
    collective: dict[str, Any] = {} if topology.collective == "ring" else {"collective": topology.collective}
    if topology.tree_bytes is not None:
        collective["tree_bytes"] = topology.tree_bytes
    return collective | ({} if topology.lossless else {"lossless": False})


def _mesh(topology: Topology) -> dict[str, Any]:
    """Return the keys of a lab's mesh, which a job file and a topology have in common; none without one."""
    if topology.mesh is None:
        return {}
    return {
        "mesh": asdict(topology.mesh),
        "gpus_per_host": len(topology.ranks) // len(topology.trainers),
    }


def _group(group: LabGroup, hosts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"ranks": [(_placed_rank if hosts else _rank)(rank) for rank in group.ranks]} | _nodes(group)


def _group_data(group: LabGroup, hosts: list[list[str]]) -> dict[str, Any]:
    if hosts:
        return {"hosts": [rank.host.number for rank in group.ranks]} | _nodes(group)
    return {"ranks": [rank.interface.switch for rank in group.ranks]} | _nodes(group)


def _nodes(group: LabGroup) -> dict[str, list[int]]:
    return {} if group.shadow_nodes is None else {"shadow_nodes": list(group.shadow_nodes)}


def _switch(switch: SwitchNode, target: Target) -> dict[str, Any]:
    tofino = {"device_id": 0, "cpu_port": TOFINO_CPU_PORT, "p4runtime": "pi", "speed": "10G"}
    return {
        "name": switch.name,
        "target": target,
        "address": switch.address,
        "device_id": switch.device_id,
        "stub": {"ip": str(switch.stub_ip), "mac": switch.stub_mac, "port": STUB_TCP_PORT},
        **(tofino if target == "tofino" else {}),
    }


def _rank(rank: LabRank) -> dict[str, Any]:
    nic = rank.interface
    return {
        "rank": rank.number,
        "ip": str(nic.ip),
        "mac": nic.mac,
        "mgmt": str(rank.mgmt),
        "switch": nic.switch,
        "port": nic.port,
    }


def _placed_rank(rank: LabRank) -> dict[str, Any]:
    return {"rank": rank.number, "host": rank.host.name} | ({"nic": rank.nic} if rank.nic else {})


def _host(host: LabHost) -> dict[str, Any]:
    return {"name": host.name, "mgmt": str(host.mgmt), "nics": _nics(host)}


def _shadow(host: LabHost) -> dict[str, Any]:
    return {"id": host.number, "mgmt": f"{host.mgmt}:{SHADOW_MGMT_PORT}", "nics": _nics(host)}


def _nics(host: LabHost) -> list[dict[str, Any]]:
    return [
        {"ip": str(nic.ip), "mac": nic.mac, "switch": nic.switch, "port": nic.port} for nic in host.interfaces
    ]
