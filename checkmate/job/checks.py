"""Rules within one job's file: its structure, and relations between its parts.

Works on the valid parts of the file, so that one run reports every fault but no consequential ones.
`conflicts` has the rules between jobs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from ipaddress import IPv4Address
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from checkmate.job.faults import Fault, Part, Path, addresses_of, parts, served_at, show_path
from checkmate.job.schema import Attachment, Job, Nic, Rank, ShadowNode, Stub, Switch
from checkmate.job.tofino import chips
from checkmate.job.tofino.ports import tofino_faults
from checkmate.wire.tag import SHADOW_IDS_MAX
from checkmate.wording import counted

M = TypeVar("M", bound=BaseModel)

PORTS_MOST: Final = 65535
FAULTS_MOST: Final = 200
"""Faults of a file's structure that are listed; the rest is counted."""
RECORDS_PORT: Final = "the port after mgmt's (for step records)"
_JOB_WORDS: Final = {"extra_forbidden": "unknown key; remove it, or see `checkmate docs job`"}
_SHOWN: Final = 100
"""Characters of a faulty value in a message."""

_REPLACED: Final[Mapping[Path, str]] = {
    ("mgmt_tls",): "is replaced by keys: remove it, run `checkmate validate --init FILE`, and copy the "
    "folders that it prints (`checkmate docs security`)"
}
"""What has taken the place of keys of older job files."""


def structure(raw: Any) -> tuple[Job | None, list[Fault]]:
    """Validate a job file's structure. Return the job, or all its faults."""
    job, faults = validated(Job, raw, _JOB_WORDS)
    return job, [Fault(fault.path, _REPLACED.get(fault.path, fault.message)) for fault in faults]


def validated(model: type[M], raw: Any, words: Mapping[str, str]) -> tuple[M | None, list[Fault]]:
    """Validate a file's structure. Return the model, or all faults; `words` has messages by error type."""
    try:
        return model.model_validate(raw), []
    except ValidationError as error:
        found = error.errors()
        faulty = [e["loc"] for e in found]
        told = [e for e in found if not _follows(e, faulty)]
        listed = [
            Fault(_location(e["loc"]), words.get(e["type"]) or _message(model, e)) for e in told[:FAULTS_MOST]
        ]
        if more := len(told) - len(listed):
            listed.append(Fault((), f"has {counted(more, 'other fault')}; correct these first"))
        return None, listed


def _follows(error: Any, faulty: Sequence[tuple[str | int, ...]]) -> bool:
    """Return whether an error is consequential: pydantic does not count faulty items of a list."""
    loc = error["loc"]
    return error["type"] == "too_short" and any(f[: len(loc)] == loc and len(f) > len(loc) for f in faulty)


def _location(loc: tuple[str | int, ...]) -> Path:
    """Return the path in the YAML, without pydantic's names of union members."""
    return tuple(part for part in loc if isinstance(part, int) or "[" not in part)


def _message(model: type[BaseModel], error: Any) -> str:
    kind, context = error["type"], error.get("ctx", {})
    match kind:
        case "missing":
            return "is missing"
        case "too_short":
            return f"needs at least {counted(context['min_length'], 'item')}, has {context['actual_length']}"
        case "too_long":
            return f"holds at most {counted(context['max_length'], 'item')}, has {context['actual_length']}"
        case "string_pattern_mismatch" if context["pattern"] == chips.PORT_NAME:
            return 'must be a front-panel name such as "1/0": connector, then lane'
        case "string_pattern_mismatch":
            return "must be a name of letters, digits, '_', '.' and '-', at most 63 long"
        case "int_type" | "int_parsing" | "int_from_float":
            return f"must be a whole number{_range(model, error['loc'])}, not {_shown(error)}"
        case "literal_error":
            return f"must be {context['expected']}, not {_shown(error)}"
        case "value_error":
            return str(context["error"])
        case "tuple_type":
            return "must be a list"
        case "model_type" | "model_attributes_type":
            return "must be a mapping of keys"
        case _:
            text = error["msg"].removeprefix("Input should be ")
            return f"must be {text}, not {_shown(error)}" if text != error["msg"] else str(text)


def _shown(error: Any) -> str:
    text = repr(error["input"])
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _range(model: type[BaseModel], loc: tuple[str | int, ...]) -> str:
    """Return ` from 1 to 8` for a number at a path, or an empty text if its model has no bounds."""
    schema = _json_schema(model)
    at: dict[str, Any] = schema
    for part in _location(loc):
        if isinstance(part, int):
            at = dict(enumerate(at.get("prefixItems", ()))).get(part) or at.get("items", {})
        else:
            at = at.get("properties", {}).get(part) or next(
                iter(at.get("patternProperties", {}).values()), {}
            )
        at = at.get("anyOf", [at])[0]  # the type of an optional field
        at = schema["$defs"][at["$ref"].rpartition("/")[2]] if "$ref" in at else at
    least, below = at.get("minimum"), at.get("exclusiveMaximum")
    most = at.get("maximum") if below is None else below - 1
    return "" if least is None or most is None else f" from {least} to {most}"


@cache
def _json_schema(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()


def within_job(raw: Any) -> list[Fault]:
    """Return faults between the valid parts of one job."""
    ranks = parts(raw, Rank, "dp_groups", "ranks")
    nodes = parts(raw, ShadowNode, "shadow_nodes")
    nics = parts(raw, Nic, "shadow_nodes", "nics")
    switches = parts(raw, Switch, "fabric", "switches")
    links = parts(raw, Attachment, "fabric", "links")
    hosts = [*parts(raw, Stub, "fabric", "switches", "stub"), *ranks, *nics]
    return [
        *_duplicates(switches, "name", "switch name"),
        *_duplicates(switches, "address", "switch", ("address", "device_id")),
        *_duplicates(ranks, "rank", "rank number"),
        *_duplicates(nodes, "id", "shadow node id"),
        *_same_addresses(hosts),
        *_duplicates(hosts, "mac", "MAC address"),
        *_duplicates([*links, *ranks, *nics], "port", "switch port", ("switch", "port")),
        *_duplicates(ranks, "mgmt", "mgmt address"),
        *_served_twice(nodes),
        *_unknown_switches([*ranks, *nics, *links], switches),
        *_unreachable(ranks, nics, _link_pairs(raw, links), switches),
        *_shadow_lists(raw, nodes),
        *tofino_faults(raw),
    ]


def _served_twice(nodes: Sequence[Part]) -> Iterator[Fault]:
    """Yield addresses of shadow nodes that are in use already, or are impossible."""
    first: dict[str, Path] = {}
    for node in nodes:
        for field, address in served_at(node):
            path = (*node.path, field)
            what = f"{field} address" if address == node.fields.get(field) else RECORDS_PORT
            if int(address.rpartition(":")[2]) > PORTS_MOST:
                yield Fault(path, f"{RECORDS_PORT} {address} does not exist: set records")
            elif address in first:
                taken = f"{what} {address} is taken already by {show_path(first[address])}"
                yield Fault(path, f"{taken}; each needs its own")
                break
            else:
                first[address] = path


def _duplicates(
    among: Sequence[Part], field: str, what: str, alike: tuple[str, ...] | None = None
) -> Iterator[Fault]:
    """Yield parts that have the same `field`, or all fields `alike`, as an earlier part."""
    first: dict[object, Path] = {}
    for part in among:
        values = part.get(*(alike or (field,)))
        if values is None:
            continue
        if values in first:
            text = " ".join(str(value) for value in values)
            yield Fault(
                (*part.path, field),
                f"{what} {text} is taken already by {show_path(first[values])}; each needs its own",
            )
        else:
            first[values] = part.path


def _same_addresses(hosts: Sequence[Part]) -> Iterator[Fault]:
    """Yield IP addresses that are taken already; those of `ip` come first."""
    first: dict[IPv4Address, Path] = {}
    found = [each for host in hosts for each in addresses_of(host)]
    for path, address in sorted(found, key=lambda each: "addresses" in each[0]):
        if address in first:
            taken = f"IP address {address} is taken already by {show_path(first[address])}"
            yield Fault(path, f"{taken}; each needs its own")
        else:
            first[address] = path


def _names(switches: Sequence[Part]) -> set[str] | None:
    """Return the switches' names, or `None` if one is unknown, so that references cannot be checked."""
    names = [switch.fields.get("name") for switch in switches]
    return None if not names or None in names else {str(name) for name in names}


def _unknown_switches(attached: Sequence[Part], switches: Sequence[Part]) -> Iterator[Fault]:
    names = _names(switches)
    for part in attached:
        switch = part.fields.get("switch")
        if names and switch is not None and switch not in names:
            yield Fault(
                (*part.path, "switch"),
                f"no switch {switch!r} in fabric.switches, which has {', '.join(sorted(names))}",
            )


def _unreachable(
    ranks: Sequence[Part],
    nics: Sequence[Part],
    pairs: set[tuple[str, str]] | None,
    switches: Sequence[Part],
) -> Iterator[Fault]:
    """Yield ranks and shadow NICs on switches that are not connected to the first rank's switch.

    Yields nothing if a link or a switch is faulty, because its correction may connect them.
    """
    names = _names(switches)
    if not ranks or "switch" not in ranks[0].fields or names is None or pairs is None:
        return
    if not names.issuperset(end for pair in pairs for end in pair):
        return
    home = ranks[0].fields["switch"]
    joined = {home}
    while new := {b for a, b in pairs if a in joined} - joined:
        joined |= new
    for part in [*ranks, *nics]:
        if part.fields.get("switch") in names - joined:
            yield Fault(
                (*part.path, "switch"),
                f"no path of links from switch {part.fields['switch']!r} to the first rank's {home!r}; "
                "add one to fabric.links",
            )


def _link_pairs(raw: Any, links: Sequence[Part]) -> set[tuple[str, str]] | None:
    """Return linked pairs of switches, in both directions, or `None` if a link is faulty."""
    fabric = raw.get("fabric") if isinstance(raw, dict) else None
    listed = fabric.get("links", []) if isinstance(fabric, dict) else []
    by_link: dict[Path, list[Any]] = defaultdict(list)
    for end in links:
        by_link[end.path[:-1]].append(end.fields.get("switch"))
    ends = list(by_link.values())
    if not isinstance(listed, list) or len(ends) != len(listed):
        return None
    if any(len(pair) != 2 or None in pair for pair in ends):
        return None
    return {(a, b) for a, b in ends} | {(b, a) for a, b in ends}


def _shadow_lists(raw: Any, nodes: Sequence[Part]) -> Iterator[Fault]:
    ids = [node.fields.get("id") for node in nodes]
    groups = raw.get("dp_groups") if isinstance(raw, dict) else None
    replicas = raw.get("replicas", 1) if isinstance(raw, dict) else 1
    every = len(ids) if isinstance(raw, dict) and isinstance(raw.get("shadow_nodes"), list) else 0
    for index, group in enumerate(groups if isinstance(groups, list) else []):
        listed = group.get("shadow_nodes") if isinstance(group, dict) else None
        path: Path = ("dp_groups", index, "shadow_nodes")
        for position, node in enumerate(listed if isinstance(listed, list) else []):
            if not isinstance(node, int):
                continue  # reported with the file's structure
            if ids and None not in ids and node not in ids:
                known = ", ".join(map(str, ids))
                yield Fault((*path, position), f"no shadow node {node} in shadow_nodes; its ids are {known}")
            if node in (listed or [])[:position]:
                yield Fault((*path, position), f"shadow node {node} is listed twice; each holds one shard")
        holders = len(listed) if isinstance(listed, list) else every
        if isinstance(replicas, int) and holders and replicas > holders:
            yield Fault(
                ("replicas",),
                f"{replicas} replicas need as many shadow nodes; dp_groups[{index}] has {holders}",
            )
        if holders > SHADOW_IDS_MAX and not isinstance(listed, list):
            most = f"a DP group has at most {SHADOW_IDS_MAX} shadow nodes, not {holders}"
            yield Fault(path, f"{most}; list the ones it uses")
