"""Checks of the host itself: kernel, capabilities, limits, memory, clock. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from checkmate.base.privileges import Capability
from checkmate.base.wording import counted, size
from checkmate.doctor.clocks import MAX_DIFFERENCE
from checkmate.doctor.facts import Facts
from checkmate.doctor.findings import Finding, failed, ok, skipped, warning
from checkmate.keys.roles import Role
from checkmate.tagger import libbpf
from checkmate.tagger.program import kernel_version

MIN_KERNEL: Final = (5, 10)
RENDEZVOUS_PORT: Final = 29400
"""torchrun's default, as in `--rdzv-endpoint HOST` (torch.distributed.run)."""
_DROPS: Final = re.compile(
    rf"dport [^\n]*\b{RENDEZVOUS_PORT}\b[^\n]*\b(?:drop|reject)|hook input [^\n]*policy drop"
)
_MEMLOCK_UNTIL: Final = (5, 11)
"""Before this kernel, maps of BPF count against RLIMIT_MEMLOCK."""
PART_BUFFERS: Final = ("net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem")
"""The sysctls whose last numbers limit what the kernel gives a socket by itself, in bytes."""
_SPARE_FILES: Final = 200
"""Open files of a shadow node beside its streams and step records: calls, keys, libraries."""


def kernel(role: Role, release: str, *, by_hosts: bool = False) -> Finding:
    """Check the kernel's version. `by_hosts`: whether hosts send copies themselves, so that none tags."""
    if role is Role.CONTROLLER:
        return skipped("kernel", f"Linux {release}; a controller runs on any")
    version, minimum = kernel_version(release), ".".join(map(str, MIN_KERNEL))
    if version < MIN_KERNEL and role is Role.TRAINER and not by_hosts:
        return failed("kernel", f"Linux {release} cannot tag segments", f"use Linux {minimum} or newer")
    if version < MIN_KERNEL:
        return warning("kernel", f"Linux {release} is not tried", f"use Linux {minimum} or newer")
    if version < _MEMLOCK_UNTIL and role is Role.TRAINER and not by_hosts:
        detail = f"Linux {release} counts maps of BPF against RLIMIT_MEMLOCK"
        return warning("kernel", detail, "start ranks with `ulimit -l unlimited`, or use Linux 5.11 or newer")
    return ok("kernel", f"Linux {release}")


def capabilities(
    role: Role,
    effective: Collection[Capability],
    *,
    tags: bool,
    ports: Collection[int],
    by_hosts: bool = False,
) -> Finding:
    """Check the capabilities of this process.

    Args:
        role: the host's role.
        effective: the capabilities that it has.
        tags: whether a rank of it tags segments.
        ports: those at which a shadow node would listen.
        by_hosts: whether hosts send copies themselves.
    """
    if role is Role.CONTROLLER:
        return skipped("capabilities", "a controller needs none")
    if role is Role.TRAINER and not (tags or by_hosts):
        return skipped("capabilities", "no rank of this host tags segments")
    if role is Role.TRAINER and by_hosts:
        return skipped("capabilities", "ranks need none, because no switch copies")
    buffers = role is Role.SHADOW and not by_hosts
    reasons = {Capability.NET_ADMIN: "for its receive buffers"} if buffers else {}
    if role is Role.SHADOW and any(port < 1024 for port in ports):
        reasons[Capability.NET_BIND_SERVICE] = "for its port below 1024"
    missing = [
        f"CAP_{capability.name} ({why})" for capability, why in reasons.items() if capability not in effective
    ]
    if role is Role.TRAINER:
        missing = libbpf.lacking(effective)
    if missing:
        remedy = libbpf.REMEDY if role is Role.TRAINER else "run it as root, or give it these capabilities"
        return failed("capabilities", f"{', '.join(missing)} missing", remedy)
    if role is Role.SHADOW and not reasons:
        return skipped("capabilities", "the node needs none, because no switch copies")
    names = [
        f"CAP_{capability.name}" for capability in (libbpf.REQUIRED if role is Role.TRAINER else reasons)
    ]
    return ok("capabilities", f"has {', '.join(names)}")


def open_files(limit: int, streams: int, ranks: int) -> Finding:
    """Check a shadow node's limit of open files, by its streams and the ranks of its job."""
    minimum = streams + 2 * ranks + _SPARE_FILES
    detail = f"{counted(limit, 'open file')}, of which {counted(streams, 'stream')} need about {minimum:,}"
    if limit >= minimum:
        return ok("open files", detail)
    remedy = f"`ulimit -n {2 * minimum}` before it starts, or LimitNOFILE={2 * minimum} in its unit"
    return warning("open files", detail, remedy)


def memory(available: int, streams: int, receive_buffer: int) -> Finding:
    """Check that the memory that is free holds the buffers of a shadow node's streams, in bytes each."""
    # The kernel doubles what is asked for (man 7 socket).
    minimum = 2 * receive_buffer * streams
    detail = f"{size(available)} free; receive buffers may take {size(minimum)}, and the model comes on top"
    if available >= minimum:
        return ok("memory", detail)
    return warning("memory", detail, "add memory or nodes (`checkmate plan --capacity`), or --receive-buffer")


def trainers_buffers(facts: Facts, buffer_bytes: int) -> Finding:
    """Check the limits of a ring's socket buffers, for ranks that may not exceed them."""
    name = "socket buffers"
    if Capability.NET_ADMIN in facts.capabilities:
        return ok(name, f"may be {size(buffer_bytes)}, whatever the limits, because of CAP_NET_ADMIN")
    limits = {key: facts.number(key) for key in ("net.core.rmem_max", "net.core.wmem_max")}
    low = [f"{key} is {limit}" for key, limit in limits.items() if limit is not None and limit < buffer_bytes]
    if low:
        remedy = " ".join(f"{text.split()[0]}={buffer_bytes}" for text in low)
        return warning(name, f"{' and '.join(low)}, so the ring is slower", f"sysctl -w {remedy}")
    if None in limits.values():
        return skipped(name, "this network namespace does not show net.core.rmem_max and wmem_max")
    return ok(name, f"may be {size(buffer_bytes)}")


def part_buffers(facts: Facts, buffer_bytes: int) -> Finding:
    """Check how large the kernel lets socket buffers of copies by hosts become, by itself."""
    limits = {name: facts.last_number(name) for name in PART_BUFFERS}
    low = [name for name, limit in limits.items() if limit is not None and limit < buffer_bytes]
    if low:
        detail = f"{' and '.join(low)} let them be at most {min(limits[name] or 0 for name in low):,} bytes"
        words = [
            f'"{name}={" ".join([*facts.sysctls[name].split()[:2], str(buffer_bytes)])}"' for name in low
        ]
        return warning("socket buffers", f"{detail}, so copies are slower", f"sysctl -w {' '.join(words)}")
    if None in limits.values():
        return skipped("socket buffers", f"this network namespace does not show {' and '.join(PART_BUFFERS)}")
    return ok("socket buffers", f"may be {size(buffer_bytes)}")


def windows(role: Role, facts: Facts, *, by_hosts: bool = False) -> Finding:
    """Check that TCP windows scale.

    What is beyond a window of 64 kB is dropped, and a switch's copies do not wait; those `by_hosts` do.
    """
    name = "TCP windows"
    if role is Role.CONTROLLER or facts.number("net.ipv4.tcp_window_scaling") is None:
        return skipped(name, "a controller has no streams" if role is Role.CONTROLLER else "not shown here")
    if facts.number("net.ipv4.tcp_window_scaling"):
        return ok(name, "scale")
    detail, remedy = "net.ipv4.tcp_window_scaling is 0", "sysctl -w net.ipv4.tcp_window_scaling=1"
    if role is Role.SHADOW and not by_hosts:
        return failed(name, f"{detail}, so copies beyond 64 kB are lost", remedy)
    return warning(name, f"{detail}, so {'copies are' if by_hosts else 'the ring is'} slow", remedy)


def rendezvous(facts: Facts) -> Finding:
    """Check who can reach torchrun's rendezvous, which has no key (docs/security.md)."""
    name, port = "rendezvous", RENDEZVOUS_PORT
    if not any(bound_port == port and not address.is_loopback for address, bound_port in facts.listening):
        return ok(name, f"no process takes connections at port {port}, torchrun's default")
    risk = f"whoever reaches torchrun's rendezvous at port {port} runs code as its user"
    remedy = "admit the training hosts only, by a firewall (`checkmate docs security`)"
    if facts.firewall is None:
        return warning(name, f"{risk}, and only root can see the firewall's rules", remedy)
    if _DROPS.search(facts.firewall):
        return ok(name, f"a rule of the firewall drops what comes to port {port}, torchrun's default")
    return warning(name, f"{risk}, and no rule of the firewall drops what comes to it", remedy)


def clock(role: Role, facts: Facts, *, by_hosts: bool = False) -> Finding:
    """Check what the kernel knows about its clock; `clocks` compares it with others."""
    if role is Role.TRAINER or by_hosts:
        if by_hosts and facts.clock is not None and not facts.clock.synchronised:
            detail = "not synchronised, says the kernel; certificates have dates, and reports compare times"
            return warning("clock", detail, "run an NTP client, such as chrony")
        return skipped(
            "clock", "it is needed for the dates of certificates only" if by_hosts else _TRAINERS_CLOCK
        )
    detail = f"shadow nodes' must not differ by {MAX_DIFFERENCE:g} s"
    if role is Role.SHADOW:
        limit = f"{MAX_DIFFERENCE:g} s"
        detail = f"the controller's must not differ by {limit}, and the job file does not name its host"
    if facts.clock is None:
        return warning("clock", f"the kernel does not tell whether it is synchronised; {detail}", _COMPARE)
    if not facts.clock.synchronised:
        return warning("clock", f"not synchronised, says the kernel; {detail}", _COMPARE)
    return ok("clock", f"synchronised within {1000 * facts.clock.error:,.0f} ms; {detail}")


_TRAINERS_CLOCK: Final = "trainers need it for the dates of certificates only"
_COMPARE: Final = "run an NTP client, such as chrony, or compare `date -u` on both"
