"""What must hold between the parts of a job, and between jobs that share switches.

Works on whatever parts of a file are well-formed, so that one run reports every fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from checkmate.schema import Attachment, Job, Nic, Rank, ShadowNode, Switch

Path = tuple[str | int, ...]
ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: where (a path into the YAML) and what would be right."""

    path: Path
    message: str


def show_path(path: Path) -> str:
    """`dp_groups[0].ranks[1].ip`"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "(top level)"


def items(raw: Any, model: type[ModelT], *keys: str) -> Iterator[tuple[Path, ModelT]]:
    """The well-formed items of the list at `keys`, each with its path. A list on the way is walked."""
    yield from _walk(raw, model, keys, ())


def _walk(raw: Any, model: type[ModelT], keys: Sequence[str], path: Path) -> Iterator[tuple[Path, ModelT]]:
    if isinstance(raw, list):
        for index, item in enumerate(raw):
            yield from _walk(item, model, keys, (*path, index))
    elif keys:
        if isinstance(raw, dict) and keys[0] in raw:
            yield from _walk(raw[keys[0]], model, keys[1:], (*path, keys[0]))
    else:
        try:
            yield path, model.model_validate(raw)
        except ValidationError:
            return  # reported with the file's structure


def structure(raw: Any) -> tuple[Job | None, list[Fault]]:
    """Validate a file's structure: the job, or each of its faults."""
    try:
        return Job.model_validate(raw), []
    except ValidationError as error:
        found = error.errors()
        faulty = [e["loc"] for e in found]
        return None, [Fault(_location(e["loc"]), _message(e)) for e in found if not _follows(e, faulty)]


def _follows(error: Any, faulty: Sequence[tuple[str | int, ...]]) -> bool:
    """pydantic counts only sound items, so it calls a list too short whose one item has a fault."""
    loc = error["loc"]
    return error["type"] == "too_short" and any(f[: len(loc)] == loc and len(f) > len(loc) for f in faulty)


def _location(loc: tuple[str | int, ...]) -> Path:
    """pydantic names union members in its paths; the YAML has no such level."""
    return tuple(part for part in loc if isinstance(part, int) or "[" not in part)


def _message(error: Any) -> str:
    kind, context = error["type"], error.get("ctx", {})
    match kind:
        case "extra_forbidden":
            return "unknown key; remove it, or see docs/job.md for the keys there are"
        case "missing":
            return "is missing"
        case "too_short":
            return f"needs at least {context['min_length']} items, has {context['actual_length']}"
        case "too_long":
            return f"holds at most {context['max_length']} items, has {context['actual_length']}"
        case "string_pattern_mismatch":
            return "must be a name of letters, digits, '_', '.' and '-', at most 63 long"
        case "literal_error":
            return f"must be {context['expected']}"
        case "value_error":
            return str(context["error"])
        case "tuple_type":
            return "must be a list"
        case "model_type" | "model_attributes_type":
            return "must be a mapping of keys"
        case _:
            text = error["msg"].removeprefix("Input should be ")
            return f"must be {text}, not {error['input']!r}" if text != error["msg"] else str(text)


def within_job(raw: Any) -> list[Fault]:
    """Faults between the parts of one job, as far as its parts are well-formed."""
    faults: list[Fault] = []
    ranks = list(items(raw, Rank, "dp_groups", "ranks"))
    nodes = list(items(raw, ShadowNode, "shadow_nodes"))
    nics = list(items(raw, Nic, "shadow_nodes", "nics"))
    switches = list(items(raw, Switch, "fabric", "switches"))
    faults += _duplicates(switches, lambda s: s.name, "name", "switch name")
    faults += _duplicates(switches, lambda s: (s.address, s.device_id), "address", "switch")
    faults += _duplicates(ranks, lambda r: r.rank, "rank", "rank number")
    faults += _duplicates(nodes, lambda n: n.id, "id", "shadow node id")
    stubs = [((*path, "stub"), switch.stub) for path, switch in switches]
    hosts: list[tuple[Path, Any]] = [*ranks, *nics, *stubs]
    faults += _duplicates(hosts, lambda h: h.ip, "ip", "IP address")
    faults += _duplicates(hosts, lambda h: h.mac, "mac", "MAC address")
    faults += _duplicates([*ranks, *nics, *_links(raw)], lambda a: (a.switch, a.port), "port", "switch port")
    faults += _duplicates(ranks, lambda r: r.mgmt, "mgmt", "mgmt address")
    faults += _duplicates(nodes, lambda n: n.mgmt, "mgmt", "mgmt address")
    faults += _unknown_switches([*ranks, *nics, *_links(raw)], switches)
    faults += _unreachable(raw, ranks, nics)
    faults += _shadow_lists(raw, nodes)
    return faults


def _links(raw: Any) -> list[tuple[Path, Attachment]]:
    return list(items(raw, Attachment, "fabric", "links"))


def _duplicates(
    parts: Sequence[tuple[Path, Any]], key: Callable[[Any], object], field: str, what: str
) -> Iterator[Fault]:
    first: dict[object, Path] = {}
    for path, part in parts:
        value = key(part)
        if value in first:
            text = value if not isinstance(value, tuple) else " ".join(str(v) for v in value)
            yield Fault(
                (*path, field),
                f"{what} {text} is taken already by {show_path(first[value])}; each needs its own",
            )
        else:
            first[value] = path


def _unknown_switches(
    parts: Sequence[tuple[Path, Attachment]], switches: Sequence[tuple[Path, Switch]]
) -> Iterator[Fault]:
    names = sorted({switch.name for _, switch in switches})
    for path, part in parts:
        if names and part.switch not in names:
            yield Fault(
                (*path, "switch"),
                f"no switch {part.switch!r} in fabric.switches; there are {', '.join(names)}",
            )


def _unreachable(
    raw: Any, ranks: Sequence[tuple[Path, Rank]], nics: Sequence[tuple[Path, Nic]]
) -> Iterator[Fault]:
    """Ranks and shadow NICs on switches that no link joins to the first rank's."""
    if not ranks:
        return
    joined = {ranks[0][1].switch}
    pairs = _link_pairs(raw)
    while new := {b for a, b in pairs if a in joined} - joined:
        joined |= new
    known = {end for pair in pairs for end in pair} | {
        part.name for _, part in items(raw, Switch, "fabric", "switches")
    }
    for path, part in [*ranks, *nics]:
        if part.switch in known - joined:
            yield Fault(
                (*path, "switch"),
                f"no link joins switch {part.switch!r} to {ranks[0][1].switch!r}, where the first rank is; "
                "add one to fabric.links",
            )


def _link_pairs(raw: Any) -> set[tuple[str, str]]:
    """The switches that a link joins, both ways round."""
    by_link: dict[Path, list[str]] = defaultdict(list)
    for path, end in _links(raw):
        by_link[path[:-1]].append(end.switch)
    ends = [pair for pair in by_link.values() if len(pair) == 2]
    return {(a, b) for a, b in ends} | {(b, a) for a, b in ends}


def _shadow_lists(raw: Any, nodes: Sequence[tuple[Path, ShadowNode]]) -> Iterator[Fault]:
    ids = [node.id for _, node in nodes]
    groups = raw.get("dp_groups") if isinstance(raw, dict) else None
    replicas = raw.get("replicas", 1) if isinstance(raw, dict) else 1
    for index, group in enumerate(groups if isinstance(groups, list) else []):
        listed = group.get("shadow_nodes") if isinstance(group, dict) else None
        path: Path = ("dp_groups", index, "shadow_nodes")
        for position, node in enumerate(listed if isinstance(listed, list) else []):
            if ids and isinstance(node, int) and node not in ids:
                known = ", ".join(map(str, ids))
                yield Fault((*path, position), f"no shadow node {node} in shadow_nodes; there are {known}")
            if node in (listed or [])[:position]:
                yield Fault((*path, position), f"shadow node {node} is listed twice; each holds one shard")
        holders = len(listed) if isinstance(listed, list) else len(ids)
        if isinstance(replicas, int) and holders and replicas > holders:
            yield Fault(
                ("replicas",),
                f"{replicas} replicas need as many shadow nodes; dp_groups[{index}] has {holders}",
            )
        if holders > 16 and not isinstance(listed, list):
            yield Fault(path, f"a DP group has at most 16 shadow nodes, not {holders}; list the ones it uses")


@dataclass(frozen=True)
class Claim:
    """A job's claim on something that no other job may have."""

    what: str
    value: object
    path: Path
    switch: str = ""
    """Of a stub: jobs on one switch share it."""


def claims(job: Job) -> Iterator[Claim]:
    """What `job` has for itself alone: hosts, shadow NICs, their switch ports; and the stubs' addresses."""
    for s, switch in enumerate(job.fabric.switches):
        path: Path = ("fabric", "switches", s, "stub")
        yield Claim("stub address", str(switch.stub.ip), (*path, "ip"), switch.name)
        yield Claim("stub address", switch.stub.mac, (*path, "mac"), switch.name)
    for n, link in enumerate(job.fabric.links):
        for e, end in enumerate(link):
            path = ("fabric", "links", n, e, "port")
            yield Claim("switch port", (end.switch, end.port), path, end.switch)
    for g, group in enumerate(job.dp_groups):
        for r, rank in enumerate(group.ranks):
            path = ("dp_groups", g, "ranks", r)
            yield from _host_claims("host", rank.ip, rank.mac, path)
            yield Claim("switch port", (rank.switch, rank.port), (*path, "port"))
    for n, node in enumerate(job.shadow_nodes):
        yield Claim("shadow node management address", node.mgmt, ("shadow_nodes", n, "mgmt"))
        for i, nic in enumerate(node.nics):
            path = ("shadow_nodes", n, "nics", i)
            yield from _host_claims("shadow NIC", nic.ip, nic.mac, path)
            yield Claim("switch port", (nic.switch, nic.port), (*path, "port"))


def _host_claims(what: str, ip: object, mac: object, path: Path) -> Iterator[Claim]:
    yield Claim(f"{what} address", str(ip), (*path, "ip"))
    yield Claim(f"{what} address", mac, (*path, "mac"))


def between_jobs(jobs: Sequence[Job]) -> list[tuple[int, Fault]]:
    """Faults between jobs, each with the index of the later job."""
    return [*_same_names(jobs), *_same_claims(jobs), *_same_switches(jobs), *_same_links(jobs)]


Faults = Iterator[tuple[int, Fault]]


def _same_names(jobs: Sequence[Job]) -> Faults:
    names: set[str] = set()
    for index, job in enumerate(jobs):
        if job.job in names:
            yield index, Fault(("job",), f"another file has a job {job.job!r}; names are unique")
        names.add(job.job)


def _same_claims(jobs: Sequence[Job]) -> Faults:
    owners: dict[object, tuple[int, Claim]] = {}
    for index, job in enumerate(jobs):
        for claim in claims(job):
            owner, first = owners.setdefault(_shared_key(claim), (index, claim))
            if owner != index and not (claim.switch and claim.switch == first.switch):
                text = " ".join(map(str, claim.value)) if isinstance(claim.value, tuple) else claim.value
                other = f"job {jobs[owner].job!r} ({show_path(first.path)})"
                yield index, Fault(claim.path, f"{claim.what} {text} is claimed already by {other}")


def _same_switches(jobs: Sequence[Job]) -> Faults:
    described: dict[str, tuple[int, Switch]] = {}
    at: dict[tuple[str, int], str] = {}
    for index, job in enumerate(jobs):
        for s, switch in enumerate(job.fabric.switches):
            name = at.setdefault((switch.address, switch.device_id), switch.name)
            if name != switch.name:
                message = f"another job calls the switch at {switch.address} {name!r}; a switch has one name"
                yield index, Fault(("fabric", "switches", s, "name"), message)
            owner, seen = described.setdefault(switch.name, (index, switch))
            differing = [
                field for field in Switch.model_fields if getattr(seen, field) != getattr(switch, field)
            ]
            if differing:
                yield (
                    index,
                    Fault(
                        ("fabric", "switches", s),
                        f"job {jobs[owner].job!r} describes switch {switch.name!r} differently "
                        f"({', '.join(differing)}); use one fabric file for both",
                    ),
                )


def _same_links(jobs: Sequence[Job]) -> Faults:
    ends: dict[object, tuple[int, object]] = {}
    for index, job in enumerate(jobs):
        for n, (a, b) in enumerate(job.fabric.links):
            for near, far in ((a, b), (b, a)):
                owner, seen = ends.setdefault((near.switch, near.port), (index, far))
                if seen != far:
                    yield (
                        index,
                        Fault(
                            ("fabric", "links", n),
                            f"job {jobs[owner].job!r} has another link at {near.switch} port {near.port}; "
                            "use one fabric file for both",
                        ),
                    )


def _shared_key(claim: Claim) -> object:
    """Hosts and NICs are one space of addresses: a host of one job can't be a NIC of another."""
    return claim.value if "port" not in claim.what else ("port", claim.value)
