"""Rules for jobs of several owners: each has what the operator's fabric file grants it, and nothing else.

Like `checks`, this works on the valid parts of a job's file. No I/O.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from checkmate.job import mesh
from checkmate.job.conflicts import Claim, links, own_claims
from checkmate.job.fabric_file import Extent, Granted, GrantItem, address_extent, mac_extent, service_extent
from checkmate.job.faults import Fault
from checkmate.job.schema import SWITCH_KEYS, Job, Stub, Switch, TagSettings
from checkmate.job.tofino.ports import effective
from checkmate.job.validation import ValidPart, parts

MAX_LISTED: Final = 8
"""Items of a grant, or names, in a message."""
_KEYS: Final = {"ip": "addresses", "mac": "macs", "service": "shadow_nodes"}
"""The key of a grant for each kind of claim but ports."""


def refusals(raw: Any, file: Path, granted: Granted) -> list[Fault]:
    """Return what a job claims beyond its grant, and where its fabric is not the operator's.

    Args:
        raw: The job's data, with its fabric in place, and device ports instead of front-panel names.
        file: Its file, as the command line names it.
        granted: The operator's fabric file.
    """
    faults = [*_other_switches(raw, granted), *_other_links(raw, granted)]
    name = raw.get("job") if isinstance(raw, dict) else None
    if not isinstance(name, str):
        return faults
    if name not in granted.grants:
        return [*faults, Fault(("job",), _no_grant(name, granted))]
    faults += _elsewhere(name, file, granted)
    faults += _other_tag(raw, name, granted)
    stubs = dict(_stubs(granted))
    for claim in own_claims(raw):
        if (extent := _extent(claim)) is None:  # if that is reported already, this is left out
            faults.append(Fault(claim.path, f"{claim.subject} {claim.text} can't be compared with a grant"))
            continue
        owner = granted.owner(extent)
        if extent in stubs:
            message = (
                f"{claim.subject} {claim.text} is that of a switch's stub ({stubs[extent]}); use another"
            )
            faults.append(Fault(claim.path, message))
        elif owner is None or owner.job != name:
            faults.append(Fault(claim.path, _not_granted(claim, owner, name, granted)))
    return faults


def not_covered(job: Job, granted: Granted) -> Iterator[Fault]:
    """Yield a fault if a valid job claims anything beyond its grant.

    `refusals` says what and where. This looks at what would be served, in case that is not what it looked at.
    """
    try:
        owners = [granted.owner(extent) for extent in _served(job)]
    except ValueError:
        owners = [None]
    if any(owner is None or owner.job != job.job for owner in owners):
        yield Fault(("job",), f"claims what job {job.job!r} has not been granted")


def _served(job: Job) -> Iterator[Extent]:
    """Yield the extents of all that a valid job claims. Raise `ValueError` if something has none."""
    hosts = [host for _, host in job.interfaces()]
    nics = [nic for node in job.shadow_nodes for nic in node.nics]
    for address in [*(source for host in hosts for source in host.sources), *(nic.ip for nic in nics)]:
        yield address_extent(address)
    for interface in (*hosts, *nics):
        yield mac_extent(interface.mac)
        yield Extent(("port", interface.switch), interface.port, interface.port)
    for node in job.shadow_nodes:
        beside = f"{node.mgmt.rpartition(':')[0]}:{node.records_at[1]}"
        yield from (service_extent(node.mgmt), service_extent(node.records or beside))


def too_many_streams(job: Job, granted: Granted) -> Iterator[Fault]:
    """Yield a fault if a valid job has more streams than its grant. Counts them without making them."""
    of_groups = (job.shards(index) * job.stream_channels(index) for index in job.groups)
    streams, most = 2 * sum(of_groups) * job.replicas, granted.grants[job.job].streams
    if streams > most:
        where = granted.at(("grants", job.job, "streams"))
        yield Fault(
            (mesh.groups_key(job),),
            f"has {streams} streams, and job {job.job!r} may have {most} ({where}); use fewer channels, "
            "shadow nodes or replicas",
        )


def _no_grant(name: str, granted: Granted) -> str:
    names = sorted(granted.grants)
    more = ", ..." if names[MAX_LISTED:] else ""
    granted_jobs = (
        f"it has some for {', '.join(names[:MAX_LISTED])}{more}" if names else "it has none for any job"
    )
    return f"{granted.document.file} has no grant for job {name!r}; {granted_jobs}"


def _elsewhere(name: str, file: Path, granted: Granted) -> Iterator[Fault]:
    """Yield a fault if a file is not in the folder of its job's owner. Symbolic links are not followed.

    Whoever owns a folder could change a link between this check and reading.
    """
    granted_folder = granted.grants[name].folder
    if granted_folder is None:
        return
    folder = Path(os.path.abspath(granted.document.file.parent / granted_folder))
    if not Path(os.path.abspath(file)).is_relative_to(folder):
        where = granted.at(("grants", name, "folder"))
        yield Fault(("job",), f"a file of job {name!r} must be in {folder} ({where}), and this one is not")


def _other_tag(raw: Any, name: str, granted: Granted) -> Iterator[Fault]:
    """Yield the DSCP bit and priority if the job has others than its grant."""
    tags = parts(raw, TagSettings, "tag") or [ValidPart(("tag",), vars(TagSettings()), {})]
    for key, own_value in vars(granted.grants[name].tag).items():
        value = tags[0].fields.get(key, own_value)
        if value != own_value:
            where = granted.at(("grants", name, "tag", key))
            yield Fault(("tag", key), f"must be {own_value}, which job {name!r} has ({where}), not {value}")


def _stubs(granted: Granted) -> Iterator[tuple[Extent, str]]:
    """Yield the addresses of the switches' stubs, each with its place."""
    for stub in parts({"fabric": granted.raw}, Stub, "fabric", "switches", "stub"):
        at = granted.at(stub.path[1:])
        yield address_extent(stub.fields["ip"]), at
        yield mac_extent(stub.fields["mac"]), at


def _extent(claim: Claim) -> Extent | None:
    """Return a claim as an extent; `None` if it is none, such as the port after the last."""
    try:
        match claim.kind, claim.value:
            case "port", (str(switch), int(port)):
                return Extent(("port", switch), port, port)
            case "ip", value:
                return address_extent(value)
            case "mac", value:
                return mac_extent(value)
            case _, value:
                return service_extent(value)
    except ValueError:
        return None


def _not_granted(claim: Claim, owner: GrantItem | None, name: str, granted: Granted) -> str:
    to = f"granted to job {owner.job!r} ({granted.at(owner.path)})" if owner else "granted to no job"
    return f"{claim.subject} {claim.text} is {to}; {_own_items(claim, name, granted)}"


def _own_items(claim: Claim, name: str, granted: Granted) -> str:
    """Return what a job has of the kind that it claims, as the fabric file says it."""
    grant = granted.document.data["grants"][name] or {}
    if claim.kind == "port" and isinstance(claim.value, tuple):
        switch = claim.value[0]
        items: Sequence[Any] = grant.get("ports", {}).get(switch, ())
        subject, at = f"ports of {switch}", granted.at(("grants", name, "ports", switch))
    else:
        key = _KEYS[claim.kind]
        items, subject, at = grant.get(key, ()), key, granted.at(("grants", name, key))
    more = ", ..." if items[MAX_LISTED:] else ""
    shown_items = f"{', '.join(map(str, items[:MAX_LISTED]))}{more}" if items else "not granted"
    return f"the {subject} of job {name!r} are {shown_items} ({at})"


def _other_switches(raw: Any, granted: Granted) -> Iterator[Fault]:
    """Yield switches that the operator describes differently, or not at all.

    `tls` is left out: a job's own has no effect, because the controller uses the operator's.
    """
    operators = {
        switch.fields["name"]: switch
        for switch in parts({"fabric": granted.raw}, Switch, "fabric", "switches")
    }
    for switch in parts(raw, Switch, "fabric", "switches"):
        if (name := switch.fields.get("name")) is None:
            continue
        if (right := operators.get(name)) is None:
            switch_names = ", ".join(sorted(operators))
            yield Fault(
                (*switch.path, "name"),
                f"no switch {name!r} in {granted.document.file}, which has {switch_names}",
            )
            continue
        claimed, operated = effective(switch.fields), effective(right.fields)
        for key in SWITCH_KEYS:
            if key != "tls" and key in claimed and key in operated and claimed[key] != operated[key]:
                is_plain = isinstance(operated[key], str | int | float)
                value = f"must be {operated[key]}," if is_plain else "must be"
                yield Fault((*switch.path, key), f"{value} as in {granted.at((*right.path[1:], key))}")


def _other_links(raw: Any, granted: Granted) -> Iterator[Fault]:
    """Yield links that the operator does not have."""
    operators = {frozenset((a, b)) for _, a, b in links({"fabric": granted.raw})}
    for path, a, b in links(raw):
        if frozenset((a, b)) not in operators:
            near, far = (f"port {port} of {switch}" for switch, port in (a, b))
            where = granted.at(("links",))
            yield Fault(path, f"{where} has no link between {near} and {far}; list its links only")
