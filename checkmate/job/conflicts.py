"""Rules between jobs that run side by side: exclusive and shared resources.

Exclusive is what a job claims for itself alone: addresses, switch ports, and where its shadow nodes serve.
Like `checks`, this works on the valid parts of each file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from checkmate.job.faults import Fault, Path, show_path
from checkmate.job.placing import interfaces
from checkmate.job.schema import SWITCH_KEYS, Attachment, Nic, ShadowNode, Stub, Switch
from checkmate.job.tofino.ports import effective
from checkmate.job.validation import ValidPart, addresses_of, parts, served_at

Kind = Literal["ip", "mac", "port", "service"]


@dataclass(frozen=True)
class Claim:
    """A job's claim on an exclusive resource. `value` of a port: its switch and number; else a text."""

    kind: Kind
    subject: str
    value: object
    path: Path
    switch: str | None = None
    """The switch of a stub or a link, which jobs on that switch share."""

    @property
    def key(self) -> object:
        """Identity of the resource. Hosts and NICs share one address space."""
        return self.value if self.kind != "port" else ("port", self.value)

    @property
    def text(self) -> str:
        """The resource as messages name it."""
        return " ".join(map(str, self.value)) if isinstance(self.value, tuple) else str(self.value)


def claims(raw: Any) -> Iterator[Claim]:
    """Yield a job's claims: hosts, shadow NICs, their switch ports, and the addresses of stubs."""
    names = {switch.path: switch.fields.get("name") for switch in parts(raw, Switch, "fabric", "switches")}
    for stub in parts(raw, Stub, "fabric", "switches", "stub"):
        if (name := names.get(stub.path[:-1])) is not None:
            yield from _addresses("stub", stub, name)
    for end in parts(raw, Attachment, "fabric", "links"):
        yield from _port(end, end.fields.get("switch"))
    yield from own_claims(raw)


def own_claims(raw: Any) -> Iterator[Claim]:
    """Yield those of a job's claims that are not of the fabric."""
    for interface in interfaces(raw):
        yield from _addresses("host", interface)
        yield from _port(interface)
    for node in parts(raw, ShadowNode, "shadow_nodes"):
        for field, address in served_at(node):
            yield Claim("service", "shadow node management address", address, (*node.path, field))
    for nic in parts(raw, Nic, "shadow_nodes", "nics"):
        yield from _addresses("shadow NIC", nic)
        yield from _port(nic)


def _addresses(subject: str, part: ValidPart, switch: str | None = None) -> Iterator[Claim]:
    for path, address in addresses_of(part):
        yield Claim("ip", f"{subject} address", str(address), path, switch)
    if "mac" in part.fields:
        yield Claim("mac", f"{subject} address", str(part.fields["mac"]), (*part.path, "mac"), switch)


def _port(part: ValidPart, switch: str | None = None) -> Iterator[Claim]:
    place = part.get("switch", "port")
    if place is not None:
        yield Claim("port", "switch port", place, (*part.path, "port"), switch)


Faults = Iterator[tuple[int, Fault]]


def between_jobs(jobs: Sequence[Any], files: Sequence[str] = ()) -> list[tuple[int, Fault]]:
    """Return faults between jobs, from their YAML data, each with the index of the later job.

    A job with the name of an earlier one is most often a copy of its file, and is compared with no other. The
    names of `files` are for its message.
    """
    if len(jobs) < 2:
        return []
    names = [raw.get("job") if isinstance(raw, dict) else None for raw in jobs]
    owners = [f"job {name!r}" if isinstance(name, str) else "the job of another file" for name in names]
    copies = dict(_same_names(names, files))
    jobs = [{} if index in copies else raw for index, raw in enumerate(jobs)]
    return [
        *copies.items(),
        *_same_claims(jobs, owners),
        *_same_switches(jobs, owners),
        *_same_links(jobs, owners),
    ]


def _same_names(names: Sequence[Any], files: Sequence[str]) -> Faults:
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if isinstance(name, str) and (before := first.setdefault(name, index)) != index:
            file = files[before] if files else "another file"
            remedy = "remove one of both if it is a copy, or name its job otherwise"
            yield index, Fault(("job",), f"{file} has a job {name!r}, too: {remedy}")


def _same_claims(jobs: Sequence[Any], owners: Sequence[str]) -> Faults:
    owners_of: dict[object, tuple[int, Claim]] = {}
    for index, raw in enumerate(jobs):
        for claim in claims(raw):
            owner, first = owners_of.setdefault(claim.key, (index, claim))
            if owner != index and not (claim.switch and claim.switch == first.switch):
                place = f"{owners[owner]} ({show_path(first.path)})"
                yield index, Fault(claim.path, f"{claim.subject} {claim.text} is claimed already by {place}")


def _same_switches(jobs: Sequence[Any], owners: Sequence[str]) -> Faults:
    described: dict[str, tuple[int, ValidPart]] = {}
    at: dict[object, tuple[int, str]] = {}
    for index, raw in enumerate(jobs):
        for switch in parts(raw, Switch, "fabric", "switches"):
            name, server = switch.fields.get("name"), switch.get("address", "device_id")
            if name is None:
                continue
            if server is not None:
                owner, known_name = at.setdefault(server, (index, name))
                if known_name != name and owner != index:
                    message = f"{owners[owner]} calls the switch at {server[0]} {known_name!r}"
                    yield index, Fault((*switch.path, "name"), f"{message}; a switch has one name")
            owner, earlier = described.setdefault(name, (index, switch))
            settings, earlier_settings = effective(switch.fields), effective(earlier.fields)
            both = earlier_settings.keys() & settings.keys()
            differing = [f for f in SWITCH_KEYS if f in both and earlier_settings[f] != settings[f]]
            if differing and owner != index:
                message = f"{owners[owner]} describes switch {name!r} differently ({', '.join(differing)})"
                yield index, Fault(switch.path, f"{message}; use one fabric file for both")


def _same_links(jobs: Sequence[Any], owners: Sequence[str]) -> Faults:
    ends: dict[object, tuple[int, object]] = {}
    for index, raw in enumerate(jobs):
        for path, a, b in links(raw):
            for near, far in ((a, b), (b, a)):
                owner, linked = ends.setdefault(near, (index, far))
                if linked != far and owner != index:
                    message = f"{owners[owner]} has another link at {near[0]} port {near[1]}"
                    yield index, Fault(path, f"{message}; use one fabric file for both")


def links(raw: Any) -> Iterator[tuple[Path, tuple[Any, ...], tuple[Any, ...]]]:
    """Yield links with two valid ends: path, and (switch, port) of each end."""
    ends = [(end.path, end.get("switch", "port")) for end in parts(raw, Attachment, "fabric", "links")]
    for (path, a), (next_path, b) in itertools.pairwise(ends):
        if path[:-1] == next_path[:-1] and path[-1] == 0 and a is not None and b is not None:
            yield path[:-1], a, b
