"""Rules between jobs that run side by side: exclusive and shared resources.

Like `checks`, this works on the valid parts of each file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from checkmate.job.faults import Fault, Part, Path, addresses_of, parts, served_at, show_path
from checkmate.job.placing import interfaces
from checkmate.job.schema import Attachment, Nic, ShadowNode, Stub, Switch
from checkmate.job.tofino.ports import effective

Faults = Iterator[tuple[int, Fault]]


@dataclass(frozen=True)
class _Claim:
    """A job's claim on an exclusive resource."""

    what: str
    value: object
    path: Path
    switch: str | None = None
    """The switch of a stub or a link, which jobs on that switch share."""

    @property
    def key(self) -> object:
        """Identity of the resource. Hosts and NICs share one address space."""
        return self.value if "port" not in self.what else ("port", self.value)

    @property
    def text(self) -> str:
        return " ".join(map(str, self.value)) if isinstance(self.value, tuple) else str(self.value)


def between_jobs(jobs: Sequence[Any]) -> list[tuple[int, Fault]]:
    """Return faults between jobs, from their YAML data, each with the index of the later job."""
    names = [raw.get("job") if isinstance(raw, dict) else None for raw in jobs]
    owners = [f"job {name!r}" if isinstance(name, str) else "the job of another file" for name in names]
    return [
        *_same_names(names),
        *_same_claims(jobs, owners),
        *_same_switches(jobs, owners),
        *_same_links(jobs, owners),
    ]


def _claims(raw: Any) -> Iterator[_Claim]:
    """Yield a job's claims: hosts, shadow NICs, their switch ports, and the addresses of stubs."""
    named = {switch.path: switch.fields.get("name") for switch in parts(raw, Switch, "fabric", "switches")}
    for stub in parts(raw, Stub, "fabric", "switches", "stub"):
        if (name := named.get(stub.path[:-1])) is not None:
            yield from _addresses("stub", stub, name)
    for end in parts(raw, Attachment, "fabric", "links"):
        yield from _port(end, end.fields.get("switch"))
    for interface in interfaces(raw):
        yield from _addresses("host", interface)
        yield from _port(interface)
    for node in parts(raw, ShadowNode, "shadow_nodes"):
        for field, address in served_at(node):
            yield _Claim("shadow node management address", address, (*node.path, field))
    for nic in parts(raw, Nic, "shadow_nodes", "nics"):
        yield from _addresses("shadow NIC", nic)
        yield from _port(nic)


def _addresses(what: str, part: Part, switch: str | None = None) -> Iterator[_Claim]:
    for path, address in addresses_of(part):
        yield _Claim(f"{what} address", str(address), path, switch)
    if "mac" in part.fields:
        yield _Claim(f"{what} address", str(part.fields["mac"]), (*part.path, "mac"), switch)


def _port(part: Part, switch: str | None = None) -> Iterator[_Claim]:
    place = part.get("switch", "port")
    if place is not None:
        yield _Claim("switch port", place, (*part.path, "port"), switch)


def _same_names(names: Sequence[Any]) -> Faults:
    seen: set[str] = set()
    for index, name in enumerate(names):
        if not isinstance(name, str):
            continue
        if name in seen:
            yield index, Fault(("job",), f"another file has a job {name!r}; names must be unique")
        seen.add(name)


def _same_claims(jobs: Sequence[Any], owners: Sequence[str]) -> Faults:
    taken: dict[object, tuple[int, _Claim]] = {}
    for index, raw in enumerate(jobs):
        for claim in _claims(raw):
            owner, first = taken.setdefault(claim.key, (index, claim))
            if owner != index and not (claim.switch and claim.switch == first.switch):
                other = f"{owners[owner]} ({show_path(first.path)})"
                yield index, Fault(claim.path, f"{claim.what} {claim.text} is claimed already by {other}")


def _same_switches(jobs: Sequence[Any], owners: Sequence[str]) -> Faults:
    described: dict[str, tuple[int, Part]] = {}
    at: dict[object, tuple[int, str]] = {}
    for index, raw in enumerate(jobs):
        for switch in parts(raw, Switch, "fabric", "switches"):
            name, server = switch.fields.get("name"), switch.get("address", "device_id")
            if name is None:
                continue
            if server is not None:
                owner, known = at.setdefault(server, (index, name))
                if known != name and owner != index:
                    message = f"{owners[owner]} calls the switch at {server[0]} {known!r}"
                    yield index, Fault((*switch.path, "name"), f"{message}; a switch has one name")
            owner, seen = described.setdefault(name, (index, switch))
            ours, theirs = effective(switch.fields), effective(seen.fields)
            both = theirs.keys() & ours.keys()
            differing = [f for f in Switch.model_fields if f in both and theirs[f] != ours[f]]
            if differing and owner != index:
                message = f"{owners[owner]} describes switch {name!r} differently ({', '.join(differing)})"
                yield index, Fault(switch.path, f"{message}; use one fabric file for both")


def _same_links(jobs: Sequence[Any], owners: Sequence[str]) -> Faults:
    ends: dict[object, tuple[int, object]] = {}
    for index, raw in enumerate(jobs):
        for path, a, b in _links(raw):
            for near, far in ((a, b), (b, a)):
                owner, seen = ends.setdefault(near, (index, far))
                if seen != far and owner != index:
                    message = f"{owners[owner]} has another link at {near[0]} port {near[1]}"
                    yield index, Fault(path, f"{message}; use one fabric file for both")


def _links(raw: Any) -> Iterator[tuple[Path, tuple[Any, ...], tuple[Any, ...]]]:
    """Yield links with two valid ends: path, and (switch, port) of each end."""
    ends = [(end.path, end.get("switch", "port")) for end in parts(raw, Attachment, "fabric", "links")]
    for (path, a), (next_path, b) in itertools.pairwise(ends):
        if path[:-1] == next_path[:-1] and path[-1] == 0 and a is not None and b is not None:
            yield path[:-1], a, b
