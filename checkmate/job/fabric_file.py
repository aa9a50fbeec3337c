"""The operator's fabric file: switches, links, and what each job may have of them (`grants`).

It is the authority if several owners write job files: `grants` has the rules for those.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final

from checkmate.job import checks
from checkmate.job.extents import Addresses, Extent, Macs, Ports, Services
from checkmate.job.faults import Fault
from checkmate.job.faults import Path as YamlPath
from checkmate.job.fields import Name
from checkmate.job.limits import Described, whole
from checkmate.job.schema import Fabric, Frozen, TagSettings
from checkmate.job.tls_paths import resolve_tls
from checkmate.job.tofino import ports
from checkmate.job.tofino.chips import TARGETS
from checkmate.job.validation import validated
from checkmate.job.yaml_lines import Document, JobError

STREAMS: Final = 8192
"""Streams of a job whose grant names no number: as many as a switch's table holds."""


@dataclass(frozen=True, kw_only=True)
class Grant(Frozen):
    """What one job may have of the fabric: nothing but this."""

    folder: Path | None = None
    """Where its file must be, as the command line names it. Anywhere by default."""
    ports: Annotated[Mapping[Name, tuple[Ports, ...]], Described(default={})] = field(default_factory=dict)
    """By switch."""
    addresses: tuple[Addresses, ...] = ()
    """Of its hosts and shadow NICs on the training network."""
    macs: tuple[Macs, ...] = ()
    shadow_nodes: tuple[Services, ...] = ()
    """Where its shadow nodes serve, on the management network."""
    streams: Annotated[int, whole(1, 1 << 20)] = STREAMS
    """How many it may have at most."""
    tag: TagSettings = TagSettings()  # noqa: RUF009 - it is frozen
    """The DSCP bit and the priority that it must use."""


@dataclass(frozen=True, kw_only=True)
class FabricFile(Fabric):
    """A fabric, and the grants of jobs by their names."""

    grants: Annotated[Mapping[Name, Grant], Described(default={})] = field(default_factory=dict)


@dataclass(frozen=True)
class Given:
    """One item of a grant: to which job, and where it is in the file."""

    job: str
    extent: Extent
    path: YamlPath


@dataclass(frozen=True)
class Granted:
    """A fabric file without faults. `raw`: its fabric's data, with device ports instead of names."""

    document: Document
    raw: Mapping[str, Any]
    fabric: Fabric
    grants: Mapping[str, Grant]
    given: Mapping[object, tuple[Given, ...]]
    """What is granted of each space, in order, without overlaps."""

    def owner(self, wanted: Extent) -> Given | None:
        """Return the grant's item that has all of an extent, if there is one."""
        listed = self.given.get(wanted.space, ())
        number = bisect_right(listed, wanted.low, key=lambda one: one.extent.low)
        found = listed[number - 1] if number else None
        return found if found is not None and found.extent.has(wanted) else None

    def at(self, path: YamlPath) -> str:
        """Return the place of a path in the file, as messages name it: `fabric.yaml:12`."""
        return f"{self.document.file}:{self.document.locate(Fault(path, '')).line}"


def read_fabric(file: Path, read: Callable[[Path], Document]) -> Granted:
    """Read an operator's fabric file. Raise `JobError` with every fault in it."""
    document = read(file)
    raw = copy.deepcopy(document.data)
    grants = raw.pop("grants", {}) if isinstance(raw, dict) else {}
    whole = {"fabric": raw}
    unnamed = ports.resolve(whole)
    resolve_tls(raw, file.parent)
    model, structural = validated(FabricFile, {**raw, "grants": grants})
    found = [Fault(f.path[1:], f.message) for f in (*unnamed, *checks.within_job(whole))]
    told = {fault.path for fault in found}
    found += [fault for fault in structural if fault.path not in told]
    if model is None:
        raise JobError([document.locate(fault) for fault in dict.fromkeys(found)])
    given = sorted(_given(model, found), key=lambda one: (str(one.extent.space), one.extent.low))
    found += [*_unknown_switches(model), *_of_links(model, given), *_overlaps(document, given)]
    if found:
        raise JobError([document.locate(fault) for fault in dict.fromkeys(found)])
    fabric = Fabric(switches=model.switches, links=model.links)
    return Granted(document, raw, fabric, model.grants, _by_space(given))


def _given(model: FabricFile, faults: list[Fault]) -> Iterator[Given]:
    """Yield every item of every grant. Add faults of ports whose names are unknown."""
    switches = {switch.name: switch for switch in model.switches}
    for job, grant in model.grants.items():
        at: YamlPath = ("grants", job)
        for name, listed in grant.ports.items():
            one = switches.get(name)
            known = ports.names(one.front_panel, one.ports) if one is not None else {}
            for index, port in enumerate(listed):
                path = (*at, "ports", name, index)
                if not isinstance(port, str):
                    yield Given(job, Extent(("port", name), *port), path)
                elif port in known:
                    yield Given(job, Extent(("port", name), known[port], known[port]), path)
                elif one is not None:
                    faults.append(Fault(path, _no_port(port, name, one.target)))
        for key in ("addresses", "macs", "shadow_nodes"):
            for index, extent in enumerate(getattr(grant, key)):
                yield Given(job, extent, (*at, key, index))


def _no_port(port: str, switch: str, target: str) -> str:
    if target not in TARGETS:
        return f"{port!r} is a name, and the ports of switch {switch!r} have numbers: its target is {target}"
    return f"the device port of {port!r} on switch {switch!r} is unknown; use its number, or name it in ports"


def _unknown_switches(model: FabricFile) -> Iterator[Fault]:
    names = [switch.name for switch in model.switches]
    for job, grant in model.grants.items():
        for name in grant.ports:
            if name not in names:
                there = ", ".join(sorted(names))
                yield Fault(
                    ("grants", job, "ports", name), f"no switch {name!r} in switches, which has {there}"
                )


def _of_links(model: FabricFile, given: list[Given]) -> Iterator[Fault]:
    """Yield ports of links that are granted: whoever is attached there would be in the link's place."""
    for number, link in enumerate(model.links):
        for end, place in enumerate(link):
            extent = Extent(("port", place.switch), place.port, place.port)
            for one in given:
                if one.extent.has(extent):
                    what = f"port {place.port} of {place.switch} has a link already (links[{number}][{end}])"
                    yield Fault(one.path, f"{what}; a port has one host or one link")


def _overlaps(document: Document, given: list[Given]) -> Iterator[Fault]:
    """Yield items that overlap an item of another job, at least one of those that overlap each other."""

    def line(one: Given) -> int:
        return document.locate(Fault(one.path, "")).line

    widest: dict[object, Given] = {}
    for one in given:
        before = widest.setdefault(one.extent.space, one)
        if before.job != one.job and one.extent.low <= before.extent.high:
            first, second = sorted((before, one), key=line)
            has = f"overlaps what job {first.job!r} has in line {line(first)}"
            yield Fault(second.path, f"{has}; grant it to one job only")
        if one.extent.high > before.extent.high:
            widest[one.extent.space] = one


def _by_space(given: list[Given]) -> dict[object, tuple[Given, ...]]:
    """Return the items of each space, those of a job that overlap as one. `given` is sorted."""
    found: dict[object, list[Given]] = {}
    for one in given:
        listed = found.setdefault(one.extent.space, [])
        if listed and one.extent.low <= listed[-1].extent.high:
            last = listed.pop()
            high = max(last.extent.high, one.extent.high)
            listed.append(replace(last, extent=last.extent._replace(high=high)))
        else:
            listed.append(one)
    return {space: tuple(listed) for space, listed in found.items()}
