"""A lab's YAML file: its keys, and each fault in it with its location. Pure.

Valid parts are checked against one another even if other parts are invalid, so one run reports all faults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from checkmate.base.wording import counted
from checkmate.job.checks import reduction_faults
from checkmate.job.faults import Fault, Path, show_path
from checkmate.job.fields import GPUS_MOST, Collective, Flag, ValueLimits, at_most, items, whole
from checkmate.job.schema import Frozen, Mesh
from checkmate.job.validation import parts, validated
from checkmate.wire.tree import TREE_BYTES_MAX
from topologies.describe import lab_mesh

Example = Literal["gpt.train", "hsdp", "pipeline"]
"""A script of `checkmate.examples` that trains in labs with such groups."""

RANKS_MAX: Final = 150
SHARDS_MAX: Final = 16
_WORDS: Final = {
    "string_too_short": "must describe the lab in a few words",
    "string_pattern_mismatch": "must be a switch's name: up to 12 of a-z and 0-9, a letter first",
}
_SwitchName = Annotated[str, ValueLimits(pattern=r"^[a-z][a-z0-9]{0,11}$")]
_NodeNumber = Annotated[int, whole(0)]


@dataclass(frozen=True, kw_only=True)
class GroupFile(Frozen):
    """A data-parallel group: its ranks in ring order, and its shadow nodes by number.

    `ranks` has the switch of each, whose host is its own; or else `hosts` has the number of its host.
    """

    ranks: Annotated[tuple[_SwitchName, ...], items(2, RANKS_MAX)] | None = None
    hosts: Annotated[tuple[_NodeNumber, ...], items(2, RANKS_MAX)] | None = None
    shadow_nodes: Annotated[tuple[_NodeNumber, ...], items(1, SHARDS_MAX)] | None = None


@dataclass(frozen=True, kw_only=True)
class LabFile(Frozen):
    """The whole file of a lab with switches, as docs/lab.md describes it."""

    title: Annotated[str, items(1)]
    copies: Literal["switch", "host"] = "switch"
    """With `host`, the file is another one (`host_copies`)."""
    example: Example | None = None
    channels: Annotated[int, whole(1, 8)] = 1
    replicas: Annotated[int, whole(1, SHARDS_MAX)] = 1
    collective: Collective = "ring"
    tree_bytes: Annotated[int, whole(1, TREE_BYTES_MAX)] | None = None
    lossless: Flag = True
    switches: Annotated[tuple[_SwitchName, ...], items(1, 50)]
    links: Annotated[tuple[tuple[_SwitchName, _SwitchName], ...], at_most(150)] = ()
    hosts: Annotated[
        tuple[Annotated[tuple[_SwitchName, ...], items(1, 8)], ...],
        at_most(RANKS_MAX),
    ] = ()
    mesh: Mesh | None = None
    gpus_per_host: Annotated[int, whole(1, GPUS_MOST)] | None = None
    dp_groups: Annotated[tuple[GroupFile, ...], items(1)] = ()
    shadow_nodes: Annotated[
        tuple[Annotated[tuple[_SwitchName, ...], items(1, 2)], ...],
        items(1, 100),
    ]


def read(raw: object, reserved: Collection[str]) -> tuple[LabFile | None, list[Fault]]:
    """Return a lab from the data of its YAML, or else every fault in it.

    Args:
        raw: The data.
        reserved: Names that switches cannot have.
    """
    lab, faults = validated(LabFile, raw, _WORDS)
    paths = {fault.path for fault in faults}
    if isinstance(raw, dict):
        faults += [fault for fault in _between(raw, reserved) if fault.path not in paths]
    return (None, faults) if faults else (lab, [])


def _between(raw: dict[str, Any], reserved: Collection[str]) -> Iterator[Fault]:
    """Yield contradictions between the valid parts of a lab."""
    (top,) = parts(raw, LabFile)
    if switches := top.fields.get("switches"):
        yield from _names(switches, reserved)
        yield from _unknown(raw, switches)
        yield from _apart(switches, top.fields.get("links"))
    yield from _too_many_ranks(raw)
    keys = {"channels", "collective", "tree_bytes", "lossless"}
    if keys <= top.fields.keys():
        yield from reduction_faults(**{key: top.fields[key] for key in keys})
    meshed = any(key in raw for key in lab_mesh.KEYS)
    if meshed:
        yield from lab_mesh.groups_of(raw)[1]
    elif "dp_groups" not in raw:
        yield Fault(("dp_groups",), "is missing; list the lab's DP groups, or give a mesh")
    if (hosts := top.fields.get("hosts")) is not None:
        yield from () if meshed else _placed(raw, len(hosts))
        if top.fields.get("collective") == "nccl":
            yield from _descending(raw)
        if sum(map(len, hosts)) > RANKS_MAX:
            yield Fault(("hosts",), f"a lab's hosts have at most {RANKS_MAX} NICs together")
    nodes = raw.get("shadow_nodes")
    if isinstance(nodes, list) and nodes:
        for group in parts(raw, GroupFile, "dp_groups"):
            nodes_of_group = group.fields.get("shadow_nodes", ())
            yield from _shadow_list(group.path, nodes_of_group, len(nodes), top.fields.get("replicas", 1))


def _names(switches: Sequence[str], reserved: Collection[str]) -> Iterator[Fault]:
    for index, name in enumerate(switches):
        path: Path = ("switches", index)
        if (first := switches.index(name)) < index:
            place = show_path(("switches", first))
            yield Fault(path, f"{name!r} is {place} already; each switch needs a name of its own")
        if name in reserved or name.rstrip("0123456789") in ("rank", "host", "shadow"):
            yield Fault(path, f"{name!r} is a name that the lab gives itself; use another, such as tor")


def _unknown(raw: dict[str, Any], switches: Sequence[str]) -> Iterator[Fault]:
    for path, name in _uses(raw):
        if name not in switches:
            yield Fault(
                path, f"no switch {name!r} in switches; there are {', '.join(dict.fromkeys(switches))}"
            )


def _uses(raw: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yield the path and the value of every reference to a switch."""
    yield from _texts(raw.get("links"), ("links",))
    groups = raw.get("dp_groups")
    for index, group in enumerate(groups if isinstance(groups, list) else []):
        if isinstance(group, dict):
            yield from _texts(group.get("ranks"), ("dp_groups", index, "ranks"))
    for key in ("hosts", "shadow_nodes"):
        yield from _texts(raw.get(key), (key,))


def _texts(raw: object, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(raw, str):
        yield path, raw
    elif isinstance(raw, list):
        for index, item in enumerate(raw):
            yield from _texts(item, (*path, index))


def _apart(switches: Sequence[str], links: Sequence[tuple[str, str]] | None) -> Iterator[Fault]:
    """Yield links from a switch to itself, and switches without a path to the first.

    The latter are not checked if a link has a fault, because correcting it may connect them.
    """
    if links is None:
        return
    loops = [index for index, (a, b) in enumerate(links) if a == b]
    for index in loops:
        yield Fault(("links", index), f"a link joins two switches, not {links[index][0]!r} to itself")
    if loops or not {end for link in links for end in link}.issubset(switches):
        return
    joined = {switches[0]}
    while new := {end for link in links if joined & {*link} for end in link} - joined:
        joined |= new
    for name in dict.fromkeys(switches):
        if name not in joined:
            yield Fault(
                ("switches", switches.index(name)),
                f"no link joins {name!r} to {switches[0]!r}; add one to links, or remove it",
            )


def _too_many_ranks(raw: dict[str, Any]) -> Iterator[Fault]:
    groups = [group.fields for group in parts(raw, GroupFile, "dp_groups")]
    from_groups = [group.get(key) or () for group in groups for key in ("ranks", "hosts")]
    from_mesh = [group["ranks"] for group in lab_mesh.groups_of(raw)[0]]
    for key, members in (("dp_groups", from_groups), ("mesh", from_mesh)):
        if (ranks := sum(map(len, members))) > RANKS_MAX:
            yield Fault((key,), f"a lab has at most {RANKS_MAX} ranks in all groups together, not {ranks}")


def _placed(raw: dict[str, Any], hosts: int) -> Iterator[Fault]:
    """Yield groups that have ranks in the wrong form, or on hosts that there are not, or on some only."""
    right, wrong = ("hosts", "ranks") if hosts else ("ranks", "hosts")
    why = "the lab has hosts" if hosts else "the lab has no hosts"
    count: Counter[int] = Counter()
    sound = True
    for group in parts(raw, GroupFile, "dp_groups"):
        if not isinstance(group.raw, dict) or wrong in group.raw or right not in group.raw:
            sound = False
            if isinstance(group.raw, dict):
                path = (*group.path, wrong if wrong in group.raw else right)
                yield Fault(
                    path, f"{why}, so list {right} here{', not ' + wrong if wrong in group.raw else ''}"
                )
            continue
        for position, number in enumerate(group.fields.get("hosts") or ()):
            if number >= hosts:
                sound = False
                yield Fault(
                    (*group.path, "hosts", position), f"no host {number}; the lab has {hosts}, from 0 on"
                )
            elif number in group.fields["hosts"][:position]:
                sound = False
                yield Fault(
                    (*group.path, "hosts", position), f"host {number} has a rank of this group already"
                )
            count[number] += 1
        sound = sound and "hosts" in group.fields
    if hosts and sound and len({count[number] for number in range(hosts)}) > 1:
        has = ", ".join(f"host {number} has {count[number]}" for number in range(min(hosts, 4)))
        yield Fault(("dp_groups",), f"all hosts need the same number of ranks, but {has}")


def _descending(raw: dict[str, Any]) -> Iterator[Fault]:
    """Yield hosts that NCCL would connect in another order."""
    for group in parts(raw, GroupFile, "dp_groups"):
        hosts = list(group.fields.get("hosts") or ())
        if hosts != sorted(hosts):
            yield Fault((*group.path, "hosts"), "with collective: nccl, list hosts in ascending order")


def _shadow_list(group: Path, members: Sequence[int] | None, nodes: int, replicas: int) -> Iterator[Fault]:
    """Yield faults in a group's list of shadow nodes. `None` means all nodes; an invalid list is empty."""
    path: Path = (*group, "shadow_nodes")
    for position, node in enumerate(members or ()):
        if node >= nodes:
            numbers = f"their numbers are 0 to {nodes - 1}" if nodes > 1 else "the only one's number is 0"
            yield Fault((*path, position), f"no shadow node {node} in shadow_nodes; {numbers}")
        if node in (members or ())[:position]:
            yield Fault((*path, position), f"shadow node {node} is listed twice; each holds one shard")
    holders = nodes if members is None else len(set(members))
    if holders and replicas > holders:
        has = f"{show_path(group)} has {holders}"
        yield Fault(("replicas",), f"{counted(replicas, 'replica')} need as many shadow nodes; {has}")
    if members is None and nodes > SHARDS_MAX:
        yield Fault(
            path, f"a DP group has at most {SHARDS_MAX} shadow nodes, not {nodes}; list the ones it uses"
        )
