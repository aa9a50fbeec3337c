"""The kernel settings (sysctl) that a job's hosts need. Pure, but for `present`.

No limit is below the present one of the host, because other software may have raised it, and an arp_ignore
that is stricter than needed stays.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from checkmate.base.wording import counted
from checkmate.job import boundaries
from checkmate.job.addresses import split_address
from checkmate.job.schema import Job
from checkmate.shadow.receive.connect import ORDINARY_BUFFER, tcp_memory
from checkmate.wire import ring_sockets
from checkmate.wire.tag import CHANNELS_MAX

Present = Callable[[str], str | None]
"""Returns the present value of a setting of this host; `None` if it has none that can be read."""

_UNPRIVILEGED: Final = 1024
_STRICTER: Final = ("2", "8")
"""Values of arp_ignore that answer for less than 1 does: for the same subnet only, or never."""
_NICS: Final = "each NIC answers for its own address only, and takes what comes for it"
_PORTS: Final = "these ports of Checkmate are not given to outgoing connections"


class Setting(NamedTuple):
    """A setting, such as `net.ipv4.tcp_mem`, its value as the kernel takes it, and the reason."""

    key: str
    value: str
    reason: str


def present(key: str) -> str | None:
    """Return a setting's present value in this network namespace; `None` if it can't be read."""
    try:
        return Path("/proc/sys", *key.split(".")).read_text().strip()
    except OSError:
        return None


def shadow_node_settings(job: Job, receive_buffer: int, now: Present = present) -> list[Setting]:
    """Return the settings for machines of shadow nodes.

    `receive_buffer`: bytes of each stream's socket, unless hosts copy: their streams have ordinary ones.
    """
    if job.copies == "host":
        ports = [port for node in job.shadow_nodes for _, port in node.addresses]
        return [*_part_buffers("net.ipv4.tcp_rmem", now), *_reserved(ports, now)]
    streams = Counter(stream.node.id for stream in boundaries.streams(job))
    sockets: Counter[str] = Counter()
    ports_by_host: dict[str, list[int]] = defaultdict(list)
    for node in job.shadow_nodes:
        host, port = split_address(node.mgmt)
        sockets[host] += streams[node.id] + 1  # step records fill one buffer
        ports_by_host[host] += [port, node.records_at[1]]
    most = max(sockets.values())
    room = f"{counted(most, 'connection')} with buffers of {receive_buffer >> 20} MB, in pages"
    settings = [
        _at_least("net.ipv4.tcp_mem", tcp_memory(most, receive_buffer), room, now),
        Setting("net.ipv4.tcp_window_scaling", "1", "a stream's window is larger than 64 KB"),
    ]
    if any(len(node.nics) > 1 for node in job.shadow_nodes):
        settings += _several_nics(now)
    return settings + _reserved((port for of_host in ports_by_host.values() for port in of_host), now)


def trainer_settings(job: Job, now: Present = present) -> list[Setting]:
    """Return the settings for hosts of ranks."""
    if job.copies == "host":
        return _part_buffers("net.ipv4.tcp_wmem", now)
    ranks = [rank for group in job.dp_groups for rank in group.ranks]
    settings: list[Setting] = []
    ports: list[int] = []
    if job.collective != "nccl":
        room = "the ring's buffers, for ranks without CAP_NET_ADMIN"
        for key in ("net.core.rmem_max", "net.core.wmem_max"):
            settings.append(_at_least(key, [ring_sockets.BUFFER_BYTES], room, now))
        most = max(Counter(rank.ip for rank in ranks).values())
        for number in range(most):
            first = ring_sockets.RING_PORT + CHANNELS_MAX * number
            ports += range(first, first + job.channels)
        if job.collective == "tree":
            ports += range(ring_sockets.TREE_PORT, ring_sockets.TREE_PORT + ring_sockets.TREE_PORTS * most)
        if not job.lossless:
            ports += range(ring_sockets.REPAIR_PORT, ring_sockets.REPAIR_PORT + most)
        if most > 1:
            last = ring_sockets.HOST_PORT + ring_sockets.HOST_PORTS * most
            ports += range(ring_sockets.HOST_PORT, last)
    nics = defaultdict(set)
    for rank in ranks:
        nics[rank.place].add(rank.ip)
    if any(len(ips) > 1 for ips in nics.values()) or any(len(host.nics) > 1 for host in job.hosts):
        settings += _several_nics(now)
    return settings + _reserved(ports, now)


def _part_buffers(key: str, now: Present) -> list[Setting]:
    """Return the limit of what the kernel gives a stream's buffer by itself, if it is known and too low."""
    *sizes, limit = (now(key) or "").split() or [""]
    if not limit.isdecimal() or int(limit) >= ORDINARY_BUFFER:
        return []
    return [Setting(key, " ".join([*sizes, str(ORDINARY_BUFFER)]), "a stream's buffer may be 4 MB")]


def _several_nics(now: Present) -> list[Setting]:
    # The kernel takes the larger value of `all` and the interface's own; of the other two, 2 is the largest.
    present = now("net.ipv4.conf.all.arp_ignore")
    ignore = present if present in _STRICTER else "1"
    values = {"arp_ignore": ignore, "arp_announce": "2", "rp_filter": "2"}
    return [Setting(f"net.ipv4.conf.all.{name}", value, _NICS) for name, value in values.items()]


def _at_least(key: str, minimums: Sequence[int], reason: str, now: Present) -> Setting:
    present = [int(number) for number in (now(key) or "").split()]
    if len(present) == len(minimums):
        minimums = [max(pair) for pair in zip(minimums, present, strict=True)]
    return Setting(key, " ".join(map(str, minimums)), reason)


def _reserved(ports: Iterable[int], now: Present) -> list[Setting]:
    key = "net.ipv4.ip_local_reserved_ports"
    reserved = {port for port in ports if port >= _UNPRIVILEGED}
    if not reserved:
        return []
    for part in (now(key) or "").split(","):
        first, _, last = part.partition("-")
        reserved |= set(range(int(first), int(last or first) + 1)) if first else set()
    return [Setting(key, _ranges(sorted(reserved)), _PORTS)]


def _ranges(ports: Sequence[int]) -> str:
    """Return sorted ports as the kernel writes them: `7000-7001,47000`."""
    runs: list[list[int]] = []
    for port in ports:
        if runs and port == runs[-1][-1] + 1:
            runs[-1].append(port)
        else:
            runs.append([port])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
