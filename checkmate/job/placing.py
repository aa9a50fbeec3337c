"""Ranks that are placed on hosts: each gets the address, MAC and port of its host's NIC.

Works on a file's data, valid or not, before `checks`. Pure. A fault of what a rank has got from its host
belongs to the host: `origins` leads there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from checkmate.job import mesh_groups
from checkmate.job.faults import Fault, Path
from checkmate.job.mesh import KEY
from checkmate.job.schema import Host, Rank, TrainingHost
from checkmate.job.validation import ValidPart, parts

RANKS_MOST: Final = 256
"""Ranks with one address: each has ports of its own for the ring."""
_OF_NIC: Final = ("ip", "mac", "switch", "port", "addresses")
OF_HOST: Final = (*_OF_NIC, "mgmt")
"""Keys that a placed rank has from its host."""
_NO_GROUPS: Final = Fault(("dp_groups",), "is missing")
_OR_MESH: Final = "is missing; list the job's DP groups, or give a mesh (`checkmate docs job`)"
MAX_LISTED: Final = 10


@dataclass
class Placing:
    """The outcome: faults, and where each value of a placed rank is in the file."""

    faults: list[Fault] = field(default_factory=list)
    origins: dict[Path, Path] = field(default_factory=dict)
    unplaced: set[Path] = field(default_factory=set)
    """Ranks whose host or NIC is unknown. Only that is reported, and not that they have no address."""
    meshed: bool = False
    """Whether DP groups are those of a mesh."""

    def located_faults(self, faults: Iterable[Fault]) -> list[Fault]:
        """Return each fault once, at its place in the file, without those that follow from our own."""
        own_paths = {fault.path for fault in self.faults}
        located = [
            Fault(self._origin(fault.path), _OR_MESH if fault == _NO_GROUPS else fault.message)
            for fault in faults
            if fault.path not in own_paths
            and not (fault.path[:-1] in self.unplaced and fault.path[-1] in OF_HOST)
            and not (self.meshed and fault == _NO_GROUPS)
        ]
        return list(dict.fromkeys(located))

    def refuse(self, rank: ValidPart, key: str, message: str) -> None:
        """Leave a rank without a host, for this reason, which is empty if it is told elsewhere."""
        if message:
            self.faults.append(Fault((*rank.path, key), message))
        self.unplaced.add(rank.path)

    def _origin(self, path: Path) -> Path:
        for end in range(len(path), 0, -1):
            if (origin := self.origins.get(path[:end])) is not None:
                return (*origin, *path[end:])
        return (KEY,) if self.meshed and path[:1] == ("dp_groups",) else path


def place(raw: Any) -> Placing:
    """Add a mesh's groups, and give each rank that names a host what it needs from there, in `raw` itself."""
    placing = Placing()
    if isinstance(raw, dict) and KEY in raw:
        placing.faults += mesh_groups.expand(raw)
        placing.meshed = all(fault.path != ("dp_groups",) for fault in placing.faults)
    elif isinstance(raw, dict) and {"gpus_per_host", "dp_groups"} <= raw.keys():
        placing.faults.append(Fault(("gpus_per_host",), "is for a mesh, and the job has none: remove it"))
    described_hosts = parts(raw, TrainingHost, "hosts")
    hosts = {host.fields["name"]: host for host in reversed(described_hosts) if "name" in host.fields}
    if isinstance(raw, dict) and not raw.get("hosts"):
        _without_hosts(raw, placing)
        return placing
    unsure = len(described_hosts) > sum("name" in host.fields for host in described_hosts)
    on: Counter[Path] = Counter()
    for rank in parts(raw, Rank, "dp_groups", "ranks"):
        if is_placed(rank):
            if not (why := _refusal(rank, hosts)):
                on[_copy(rank, hosts, placing)] += 1
            elif not (why[0] == "host" and unsure):
                placing.refuse(rank, *why)
            else:
                placing.unplaced.add(rank.path)
        elif hosts and isinstance(rank.raw, dict) and not set(rank.raw) & set(OF_HOST):
            placing.refuse(rank, "host", f"is missing; {_there(hosts)}")
    for path, count in on.items():
        if count > RANKS_MOST:
            message = f"has {count} ranks, and an address may have {RANKS_MOST}: use more hosts or NICs"
            placing.faults.append(Fault(path, message))
    return placing


def _without_hosts(raw: dict[str, Any], placing: Placing) -> None:
    """Tell once that the job lists no hosts if ranks name some."""
    placed = [rank for rank in parts(raw, Rank, "dp_groups", "ranks") if is_placed(rank)]
    for rank in placed:
        placing.refuse(rank, "host", "")
    if names := list(dict.fromkeys(rank.raw["host"] for rank in placed if isinstance(rank.raw["host"], str))):
        more = ", ..." if names[MAX_LISTED:] else ""
        hosts_named = ", ".join(names[:MAX_LISTED]) + more
        empty = "is empty" if "hosts" in raw else "is missing"
        placing.faults.append(
            Fault(("hosts",), f"{empty}; ranks are on {hosts_named}: list these with their nics")
        )


def _refusal(rank: ValidPart, hosts: Mapping[str, ValidPart]) -> tuple[str, str] | None:
    """Return the key and the reason if a rank cannot be placed; both empty if that is told elsewhere."""
    for key in OF_HOST:
        if key in rank.raw:
            return key, "is a matter of the rank's host: remove it, or remove host"
    if (host_and_nic := rank.get("host", "nic")) is None:
        return "", ""
    name, nic = host_and_nic
    if name is None:
        return "host", "is empty; it must be the name of a host in hosts"
    if name not in hosts:
        return "host", f"no host {name!r} in hosts; {_there(hosts)}"
    nics = hosts[name].raw.get("nics")
    if not isinstance(nics, list) or not nics:
        return "", ""
    if nic >= len(nics):
        host_nics = "one NIC, 0" if len(nics) == 1 else f"NICs 0 to {len(nics) - 1}"
        return "nic", f"host {name!r} has {host_nics}, and not {nic}"
    return None if isinstance(nics[nic], dict) else ("", "")


def _there(hosts: Mapping[str, ValidPart]) -> str:
    names = sorted(hosts)
    return f"there are {', '.join(names[:MAX_LISTED])}{', ...' if len(names) > MAX_LISTED else ''}"


def _copy(rank: ValidPart, hosts: Mapping[str, ValidPart], placing: Placing) -> Path:
    """Copy a rank's values from its host, and note their origin. Return the path of its NIC."""
    host, number = hosts[rank.fields["host"]], rank.fields["nic"]
    path = (*host.path, "nics", number)
    for key in _OF_NIC:
        placing.origins[(*rank.path, key)] = (*path, key)
        if key in host.raw["nics"][number]:
            rank.raw[key] = host.raw["nics"][number][key]
    placing.origins[(*rank.path, "mgmt")] = (*host.path, "mgmt")
    if "mgmt" in host.raw:
        rank.raw["mgmt"] = host.raw["mgmt"]
    return path


def interfaces(raw: Any) -> list[ValidPart]:
    """Return the parts of a job that are interfaces of training hosts, each once."""
    unplaced = [rank for rank in parts(raw, Rank, "dp_groups", "ranks") if not is_placed(rank)]
    return [*unplaced, *parts(raw, Host, "hosts", "nics")]


def is_placed(rank: ValidPart) -> bool:
    """Return whether a rank names a host."""
    return isinstance(rank.raw, dict) and rank.raw.get("host") is not None
