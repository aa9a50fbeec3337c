"""Rules between jobs that run side by side: exclusive and shared resources.

Like `checks`, this works on the valid parts of each file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from checkmate.job.claims import Claim, claims
from checkmate.job.faults import Fault, Path, show_path
from checkmate.job.schema import SWITCH_KEYS, Attachment, Switch
from checkmate.job.tofino.ports import effective
from checkmate.job.valid_parts import ValidPart, parts

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
            other = files[before] if files else "another file"
            remedy = "remove one of both if it is a copy, or name its job otherwise"
            yield index, Fault(("job",), f"{other} has a job {name!r}, too: {remedy}")


def _same_claims(jobs: Sequence[Any], owners: Sequence[str]) -> Faults:
    taken: dict[object, tuple[int, Claim]] = {}
    for index, raw in enumerate(jobs):
        for claim in claims(raw):
            owner, first = taken.setdefault(claim.key, (index, claim))
            if owner != index and not (claim.switch and claim.switch == first.switch):
                other = f"{owners[owner]} ({show_path(first.path)})"
                yield index, Fault(claim.path, f"{claim.what} {claim.text} is claimed already by {other}")


def _same_switches(jobs: Sequence[Any], owners: Sequence[str]) -> Faults:
    described: dict[str, tuple[int, ValidPart]] = {}
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
            differing = [f for f in SWITCH_KEYS if f in both and theirs[f] != ours[f]]
            if differing and owner != index:
                message = f"{owners[owner]} describes switch {name!r} differently ({', '.join(differing)})"
                yield index, Fault(switch.path, f"{message}; use one fabric file for both")


def _same_links(jobs: Sequence[Any], owners: Sequence[str]) -> Faults:
    ends: dict[object, tuple[int, object]] = {}
    for index, raw in enumerate(jobs):
        for path, a, b in links(raw):
            for near, far in ((a, b), (b, a)):
                owner, seen = ends.setdefault(near, (index, far))
                if seen != far and owner != index:
                    message = f"{owners[owner]} has another link at {near[0]} port {near[1]}"
                    yield index, Fault(path, f"{message}; use one fabric file for both")


def links(raw: Any) -> Iterator[tuple[Path, tuple[Any, ...], tuple[Any, ...]]]:
    """Yield links with two valid ends: path, and (switch, port) of each end."""
    ends = [(end.path, end.get("switch", "port")) for end in parts(raw, Attachment, "fabric", "links")]
    for (path, a), (next_path, b) in itertools.pairwise(ends):
        if path[:-1] == next_path[:-1] and path[-1] == 0 and a is not None and b is not None:
            yield path[:-1], a, b
