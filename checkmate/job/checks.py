"""Rules within one job's file: its structure, and relations between its parts.

Works on the valid parts of the file, so that one run reports every fault but no consequential ones.
`conflicts` has the rules between jobs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Address
from typing import Any, Final

from checkmate.base.wording import counted, in_ranges
from checkmate.job.boundaries import first_shadow_ids
from checkmate.job.faults import Fault, Path, show_path
from checkmate.job.fields import NODE_IDS_LAST, Collective
from checkmate.job.placing import interfaces, is_placed
from checkmate.job.schema import Attachment, Job, Nic, Rank, ShadowNode, Stub, Switch, TrainingHost
from checkmate.job.tofino.ports import tofino_faults
from checkmate.job.validation import ValidPart, addresses_of, parts, served_at, validated
from checkmate.wire.tag import CHANNELS_MAX, NCCL_SHADOW_IDS, SHARDS_MAX

PORTS_MOST: Final = 65535
MAX_LISTED: Final = 16
TREE_GROUPS_MAX: Final = 1 << 14
"""DP groups with trees, each of which has four boundaries, whose ids have 16 bits."""
RECORDS_PORT: Final = "the port after mgmt's (for step records)"

_REPLACED: Final[Mapping[Path, str]] = {
    ("mgmt_tls",): "is replaced by keys: remove it, run `checkmate keys FILE`, and copy the "
    "folders that it prints (`checkmate docs security`)"
}
"""What has taken the place of keys of older job files."""


def structure(raw: Any) -> tuple[Job | None, list[Fault]]:
    """Validate a job file's structure. Return the job, or all its faults."""
    job, faults = validated(Job, raw)
    return job, [Fault(fault.path, _REPLACED.get(fault.path, fault.message)) for fault in faults]


def within_job(raw: Any) -> list[Fault]:
    """Return faults between the valid parts of one job."""
    ranks = parts(raw, Rank, "dp_groups", "ranks")
    nodes = parts(raw, ShadowNode, "shadow_nodes")
    nics = parts(raw, Nic, "shadow_nodes", "nics")
    switches = parts(raw, Switch, "fabric", "switches")
    links = parts(raw, Attachment, "fabric", "links")
    hosts = interfaces(raw)
    addressed = [*parts(raw, Stub, "fabric", "switches", "stub"), *hosts, *nics]
    return [
        *_duplicates(switches, "name", "switch name"),
        *_duplicates(switches, "address", "switch", ("address", "device_id")),
        *_duplicates(ranks, "rank", "rank number"),
        *_duplicates(nodes, "id", "shadow node id"),
        *_duplicates(parts(raw, TrainingHost, "hosts"), "name", "host name"),
        *_same_addresses(addressed),
        *_loopbacks(hosts),
        *_duplicates(addressed, "mac", "MAC address"),
        *_duplicates([*links, *hosts, *nics], "port", "switch port", ("switch", "port")),
        *_served_twice(nodes),
        *_unknown_switches([*hosts, *nics, *links], switches),
        *_unreachable(ranks, [*hosts, *nics], _link_pairs(raw, links), switches),
        *_shadow_lists(raw, nodes),
        *_together(ranks),
        *_misplaced_for_nccl(raw, ranks),
        *tofino_faults(raw),
    ]


def _loopbacks(hosts: Sequence[ValidPart]) -> Iterator[Fault]:
    """Yield loopback addresses among others of ranks: if all are, the job is of processes on one host."""
    addressed = [(part, part.fields["ip"]) for part in hosts if "ip" in part.fields]
    if all(address.is_loopback for _, address in addressed):
        return
    for part, address in addressed:
        if address.is_loopback:
            yield Fault(
                (*part.path, "ip"), f"{address} is on the host's own loopback, which no switch reaches"
            )


def _served_twice(nodes: Sequence[ValidPart]) -> Iterator[Fault]:
    """Yield addresses of shadow nodes that are in use already, or are impossible."""
    first: dict[str, Path] = {}
    for node in nodes:
        for field, address in served_at(node):
            path = (*node.path, field)
            subject = f"{field} address" if address == node.fields.get(field) else RECORDS_PORT
            if int(address.rpartition(":")[2]) > PORTS_MOST:
                yield Fault(path, f"{RECORDS_PORT} {address} does not exist: set records")
            elif address in first:
                clash = f"{subject} {address} is taken already by {show_path(first[address])}"
                yield Fault(path, f"{clash}; each needs its own")
                break
            else:
                first[address] = path


def _duplicates(
    among: Sequence[ValidPart], field: str, subject: str, alike: tuple[str, ...] | None = None
) -> Iterator[Fault]:
    """Yield parts that have the same `field`, or all fields `alike`, as an earlier part."""
    first: dict[object, Path] = {}
    for part in among:
        values = part.get(*(alike or (field,)))
        if values is None:
            continue
        if values in first:
            text = (", device " if field == "address" else " ").join(str(value) for value in values)
            yield Fault(
                (*part.path, field),
                f"{subject} {text} is taken already by {show_path(first[values])}; each needs its own",
            )
        else:
            first[values] = part.path


def _same_addresses(hosts: Sequence[ValidPart]) -> Iterator[Fault]:
    """Yield IP addresses that are taken already; those of `ip` come first."""
    first: dict[IPv4Address, Path] = {}
    addresses = [address_at for host in hosts for address_at in addresses_of(host)]
    for path, address in sorted(addresses, key=lambda address_at: "addresses" in address_at[0]):
        if address in first:
            clash = f"IP address {address} is taken already by {show_path(first[address])}"
            yield Fault(path, f"{clash}; each needs its own")
        else:
            first[address] = path


def _names(switches: Sequence[ValidPart]) -> set[str] | None:
    """Return the switches' names, or `None` if one is unknown, so that references cannot be checked."""
    names = [switch.fields.get("name") for switch in switches]
    return None if not names or None in names else {str(name) for name in names}


def _unknown_switches(attached: Sequence[ValidPart], switches: Sequence[ValidPart]) -> Iterator[Fault]:
    names = _names(switches)
    for part in attached:
        switch = part.fields.get("switch")
        if names and switch is not None and switch not in names:
            yield Fault(
                (*part.path, "switch"),
                f"no switch {switch!r} in fabric.switches, which has {', '.join(sorted(names))}",
            )


def _unreachable(
    ranks: Sequence[ValidPart],
    attached: Sequence[ValidPart],
    pairs: set[tuple[str, str]] | None,
    switches: Sequence[ValidPart],
) -> Iterator[Fault]:
    """Yield interfaces on switches that are not connected to the first rank's switch.

    Yields nothing if a link, a switch or the first rank is faulty, because its correction may connect them.
    """
    names = _names(switches)
    if not ranks or names is None or ranks[0].fields.get("switch") not in names or pairs is None:
        return
    if not names.issuperset(end for pair in pairs for end in pair):
        return
    home = ranks[0].fields["switch"]
    joined = {home}
    while new := {b for a, b in pairs if a in joined} - joined:
        joined |= new
    for part in attached:
        if part.fields.get("switch") in names - joined:
            yield Fault(
                (*part.path, "switch"),
                f"no path of links from switch {part.fields['switch']!r} to the first rank's {home!r}; "
                "add one to fabric.links",
            )


def _link_pairs(raw: Any, links: Sequence[ValidPart]) -> set[tuple[str, str]] | None:
    """Return linked pairs of switches, in both directions, or `None` if a link is faulty."""
    fabric = raw.get("fabric") if isinstance(raw, dict) else None
    listed_links = fabric.get("links", []) if isinstance(fabric, dict) else []
    by_link: dict[Path, list[Any]] = defaultdict(list)
    for end in links:
        by_link[end.path[:-1]].append(end.fields.get("switch"))
    ends = list(by_link.values())
    if not isinstance(listed_links, list) or len(ends) != len(listed_links):
        return None
    if any(len(pair) != 2 or None in pair for pair in ends):
        return None
    return {(a, b) for a, b in ends} | {(b, a) for a, b in ends}


def _shadow_lists(raw: Any, nodes: Sequence[ValidPart]) -> Iterator[Fault]:
    ids = [node.fields.get("id") for node in nodes]
    groups = raw.get("dp_groups") if isinstance(raw, dict) else None
    replicas = raw.get("replicas", 1) if isinstance(raw, dict) else 1
    replicas = replicas if _is_number(replicas, SHARDS_MAX) else 0
    node_count = len(ids) if isinstance(raw, dict) and isinstance(raw.get("shadow_nodes"), list) else 0
    for index, group in enumerate(groups if isinstance(groups, list) else []):
        group_nodes = group.get("shadow_nodes") if isinstance(group, dict) else None
        path: Path = ("dp_groups", index, "shadow_nodes")
        for position, node in enumerate(group_nodes if isinstance(group_nodes, list) else []):
            if not _is_number(node, NODE_IDS_LAST):
                continue  # reported with the file's structure
            if ids and None not in ids and node not in ids:
                id_list = ", ".join(map(str, ids))
                yield Fault(
                    (*path, position), f"no shadow node {node} in shadow_nodes; its ids are {id_list}"
                )
            if node in (group_nodes or [])[:position]:
                yield Fault((*path, position), f"shadow node {node} is listed twice; each holds one shard")
        holders = len(group_nodes) if isinstance(group_nodes, list) else node_count
        if 0 < holders < replicas:
            yield Fault(
                ("replicas",),
                f"{replicas} replicas need as many shadow nodes; dp_groups[{index}] has {holders}",
            )
        if holders > SHARDS_MAX and not isinstance(group_nodes, list):
            most = f"a DP group has at most {SHARDS_MAX} shadow nodes, not {holders}"
            yield Fault(path, f"{most}; list the ones it uses")


def _together(ranks: Sequence[ValidPart]) -> Iterator[Fault]:
    """Yield ranks on the host of another rank of their group: gradients between them pass no switch."""
    first: dict[tuple[object, object], ValidPart] = {}
    for rank in ranks:
        if is_placed(rank) and (host := rank.fields.get("host")) is not None:
            earlier = first.setdefault((rank.path[1], host), rank)
            if earlier is not rank:
                yield Fault(
                    (*rank.path, "host"),
                    f"{host!r} is the host of {show_path(earlier.path)} already; the ranks of a DP group "
                    "need a host each, because a switch copies what passes between hosts",
                )


def _misplaced_for_nccl(raw: Any, ranks: Sequence[ValidPart]) -> Iterator[Fault]:
    """Yield ranks that NCCL would connect in another way: past the switch, or in another order."""
    if not isinstance(raw, dict) or raw.get("collective") != "nccl":
        return
    first: dict[tuple[object, str], ValidPart] = {}
    before: dict[object, int] = {}
    for rank in ranks:
        number, host = rank.fields.get("rank"), rank.fields.get("mgmt")
        if number is not None and number < before.setdefault(rank.path[1], number):
            yield Fault(
                (*rank.path, "rank"),
                f"rank {number} follows rank {before[rank.path[1]]}; with collective: nccl, list the ranks "
                "of a DP group in ascending order, because NCCL's ring has that order",
            )
        before[rank.path[1]] = max(number or 0, before.get(rank.path[1], 0))
        if host is None:
            continue
        earlier = first.setdefault((rank.path[1], host), rank)
        is_reported = is_placed(rank) and rank.fields.get("host") == earlier.fields.get("host")
        if earlier is not rank and not is_reported:
            yield Fault(
                (*rank.path, "mgmt"),
                f"{host} is the host of {show_path(earlier.path)} already; with collective: nccl, each rank "
                "of a DP group needs a host of its own (one GPU for each, as in HSDP's replicate groups)",
            )


def notes(job: Job) -> Iterator[str]:
    """Yield what a valid job may not be meant to have, or what will be refused of it for some scripts."""
    numbers = sorted(rank.rank for group in job.dp_groups for rank in group.ranks)
    if missing := sorted(set(range(numbers[-1])) - set(numbers)):
        gaps = in_ranges(missing[:MAX_LISTED]) + (" and so on" if len(missing) > MAX_LISTED else "")
        yield (
            f"{job.job}: no DP group has rank {gaps}, although the last one is {numbers[-1]}: torch numbers "
            f"{counted(len(numbers), 'rank')} from 0 to {len(numbers) - 1}"
        )
    holding = {node for index in job.groups for node in job.shadow_list(index)}
    if idle := [node.id for node in job.shadow_nodes if node.id not in holding]:
        yield (
            f"{job.job}: no DP group lists {'shadow nodes' if len(idle) > 1 else 'shadow node'} "
            f"{in_ranges(idle)}, so that nothing is held there (shadow_nodes of dp_groups)"
        )
    if job.collective == "tree" and not any(map(job.has_trees, job.groups)):
        yield (
            f"{job.job}: no DP group has trees (collective: tree), because all have fewer than "
            f"{counted(job.min_tree_ranks, 'rank')}"
            + ("" if job.tree_bytes is not None else "; tree_bytes gives them some")
        )
    if job.collective != "nccl" or job.mesh is not None:
        return
    for groups in job.groups_by_hosts():
        if len(groups) > 1:
            pair = " and ".join(show_path(("dp_groups", index)) for index in groups[:2])
            more = " and so on" if groups[2:] else ""
            yield (
                f"{job.job}: if DDP averages over the ranks of {pair}{more}, which share hosts, then "
                "checkmate.restore and checkmate.protect refuse it with collective: nccl, because NCCL can't "
                "sum within hosts yet: use ring or tree for that. Shards (HSDP) and stages are trained"
            )


def beyond_the_collective(job: Job) -> Iterator[Fault]:
    """Yield what a valid job's collective can't do: repair, or as many channels, boundaries or shadow ids."""
    yield from reduction_faults(job.collective, job.channels, job.tree_bytes, lossless=job.lossless)
    if job.collective == "tree" and len(job.dp_groups) > TREE_GROUPS_MAX:
        yield Fault(
            ("collective",),
            f"tree is for up to {TREE_GROUPS_MAX:,} DP groups, which have four boundaries each, and this job "
            f"has {len(job.dp_groups):,}: use collective: ring",
        )
    for index, first in enumerate(first_shadow_ids(job) if job.collective == "nccl" else ()):
        last = first + job.shards(index) - 1
        if last >= NCCL_SHADOW_IDS:
            yield Fault(
                ("dp_groups", index),
                f"has shadow ids {first} to {last}, after those of other groups between the same addresses; "
                f"with collective: nccl they end at {NCCL_SHADOW_IDS - 1}: list fewer shadow_nodes for each",
            )


def reduction_faults(
    collective: Collective, channels: int, tree_bytes: int | None, *, lossless: bool
) -> Iterator[Fault]:
    """Yield what a collective can't do, of the keys that job files and files of labs have."""
    if collective != "ring" and not lossless:
        yield Fault(
            ("lossless",),
            "false is for collective: ring, where ranks send lost copies again; with collective: "
            f"{collective}, the network must be lossless (PFC), or use copies by hosts (copies: host)",
        )
    if collective != "tree" and tree_bytes is not None:
        yield Fault(("tree_bytes",), f"is for collective: tree, and this is {collective}: remove it")
    if channels > (most := most_channels(collective)):
        yield Fault(
            ("channels",),
            f"is {channels}; with collective: tree, the trees have as many channels beside the ring's, "
            f"and both together {CHANNELS_MAX} at most: 1 to {most}",
        )


def most_channels(collective: Collective) -> int:
    """Return the most `channels` that a job may have: trees have as many of their own."""
    return CHANNELS_MAX // 2 if collective == "tree" else CHANNELS_MAX


def _is_number(value: object, most: int) -> bool:
    return type(value) is int and 0 <= value <= most
