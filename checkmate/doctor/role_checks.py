"""Checks that try what a role does itself, with the function by which it does it."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path

from checkmate.base.extras import ExtraMissing, check
from checkmate.base.privileges import Capability
from checkmate.base.wording import counted
from checkmate.doctor.facts import Facts, is_numeric
from checkmate.doctor.findings import Finding, failed, finding_from_error, ok, skipped, warning
from checkmate.doctor.reading import route_error, source_to
from checkmate.doctor.subjects import Subject
from checkmate.job.addresses import split_address
from checkmate.job.files import JobSet
from checkmate.job.schema import Job
from checkmate.keys.access import keys_folder
from checkmate.keys.checking import check_files
from checkmate.keys.errors import KeysError
from checkmate.keys.folder import RoleKeys, read_keys
from checkmate.keys.plans import RENEWED_BEFORE
from checkmate.keys.roles import Role, role_folder
from checkmate.shadow.receive.connect import StreamError, check_host, tcp_memory_shortfall
from checkmate.shadow.receive.hold_plans import hold_plans
from checkmate.tagger import Tagger, TaggerUnavailable, libbpf
from checkmate.tagger.cgroups import open_own_cgroup

_EXTRAS = {Role.TRAINER: "trainer", Role.SHADOW: "shadow", Role.CONTROLLER: "switch"}
_DOCS = "see `checkmate docs security`"


def libraries(role: Role) -> Finding:
    """Check that the libraries of a role are installed. Import none."""
    extra = _EXTRAS[role]
    try:
        check("this role", extra)
    except ExtraMissing as error:
        return failed("libraries", str(error).partition(";")[0], error.remedy)
    return ok("libraries", f"those of the extra {extra} are installed")


def cgroup() -> Finding:
    """Find this process's cgroup v2, as the tagger does."""
    try:
        os.close(open_own_cgroup())
    except TaggerUnavailable as error:
        return failed("cgroup v2", error.missing, error.remedy)
    return ok("cgroup v2", "this process's can be opened")


def tagger(facts: Facts) -> Finding:
    """Compile the tagger, attach it to this process's cgroup, and detach it again."""
    if libbpf.lacking(facts.capabilities):
        return skipped("BPF", "not tried without the capabilities")
    try:
        with Tagger.attach():
            return ok("BPF", "the tagger was compiled, attached and detached")
    except TaggerUnavailable as error:
        return failed("BPF", error.missing, error.remedy)


def step_kernel() -> Finding:
    """Compile the kernel of optimizer steps, as a shadow node does when it starts, unless it is cached."""
    if find_spec("torch") is None:
        return skipped("step kernel", "not tried without PyTorch")
    from checkmate.optim.kernel import trouble  # noqa: PLC0415 - PyTorch takes seconds

    detail, _, remedy = trouble().rpartition(": ")
    if detail:
        return warning("step kernel", f"{detail}; PyTorch steps, several times slower", remedy)
    return ok("step kernel", "it can be compiled and loaded")


def receive_buffers(facts: Facts, receive_buffer: int) -> Finding:
    """Set the receive buffer of a stream, in bytes, as a shadow node does."""
    if Capability.NET_ADMIN not in facts.capabilities:
        return skipped("receive buffers", "not tried without CAP_NET_ADMIN")
    try:
        check_host(["0.0.0.0"], receive_buffer)
    except StreamError as error:
        detail, _, remedy = str(error).partition(": ")
        return failed("receive buffers", detail, remedy)
    return ok("receive buffers", f"may be {receive_buffer >> 20} MB")


def tcp_memory(buffers: int, receive_buffer: int) -> Finding:
    """Check the kernel's memory for TCP against the buffers of a shadow node, in bytes each."""
    shortfall = tcp_memory_shortfall(buffers, receive_buffer)
    if shortfall is None:
        return ok("TCP memory", f"net.ipv4.tcp_mem is enough for {counted(buffers, 'buffer')}")
    detail, _, remedy = shortfall.partition("; ")
    if not remedy:
        return skipped("TCP memory", detail)
    return warning("TCP memory", detail, remedy.removeprefix("raise it: "))


def count_streams(subject: Subject) -> int:
    """Return the number of streams of a shadow node."""
    assert subject.job is not None and subject.node is not None
    return sum(len(plan.streams) for plan in hold_plans(subject.job, subject.node.id))


def role_keys(subject: Subject) -> RoleKeys:
    """Read the keys of a subject's role, as its process does. Raise `KeysError` if they can't be used."""
    assert subject.job is not None
    job, hosts = subject.job, subject.mgmt if subject.role is Role.SHADOW else ()
    return read_keys(role_folder(keys_folder(job), job.job, subject.role), job.job, subject.role, hosts=hosts)


def keys(subject: Subject, now: dt.datetime) -> Finding:
    """Check the keys of a subject's role. `now` has a time zone."""
    try:
        keys_of_role = role_keys(subject)
    except KeysError as error:
        return finding_from_error("keys", str(error), _DOCS)
    return keys_end(keys_of_role, now) or ok(
        "keys", f"{keys_of_role.folder}, valid until {keys_of_role.expires:%Y-%m-%d}"
    )


def keys_end(keys: RoleKeys, now: dt.datetime) -> Finding | None:
    """Return a warning if a role's certificate ends soon."""
    if keys.expires - now > RENEWED_BEFORE:
        return None
    detail = f"the certificate in {keys.folder} ends on {keys.expires:%Y-%m-%d}"
    return warning("keys", detail, "run `checkmate keys` again, and copy the folder again")


def tls_files(file: Path, job: Job, now: dt.datetime) -> Iterator[Finding]:
    """Check the PEM files with which a controller connects to switches, as `checkmate validate` does."""
    if all(switch.tls is None for switch in job.fabric.switches):
        return
    result = check_files(JobSet(((file, job),), (), (file,)), now)
    faults = [fault for fault in result.faults if ".tls" in fault.path]
    for fault in faults:
        yield finding_from_error("TLS files", fault.message, _DOCS)
    if not faults:
        yield ok("TLS files", "those of the switches can be used")


def routes(subject: Subject, facts: Facts) -> Iterator[Finding]:
    """Check that the kernel has routes where the subject will send on the training network. Send nothing."""
    pairs = [pair for pair in dict.fromkeys(_ways(subject)) if facts.nics.get(pair[0]) is not None]
    missing = [
        (source, to, target, why)
        for source, to, target in dict.fromkeys(pairs)
        if (why := route_error(source, to))
    ]
    for source, to, target, why in missing:
        remedy = f"give {source} a netmask with {to} in it, or `ip route add {to}/32 dev ...`"
        yield failed("routes", f"none from {source} to {target} at {to} ({why})", remedy)
    if not pairs:
        yield skipped("routes", "this host has no address of the training network")
    elif not missing:
        addresses = counted(len({to for _, to, _ in pairs}), "address", "addresses")
        yield ok("routes", f"to {addresses} on the training network")


def _ways(subject: Subject) -> Iterator[tuple[str, str, str]]:
    """Yield from where to where the subject sends, and who is there."""
    assert subject.job is not None
    if subject.node is not None:
        for hold in hold_plans(subject.job, subject.node.id):
            yield from ((stream.nic_ip, stream.stub[0], "the stub") for stream in hold.tagged_streams)
    for group in subject.job.dp_groups:
        for place, rank in enumerate(group.ranks):
            if rank in subject.ranks:
                after = group.ranks[(place + 1) % len(group.ranks)]
                yield str(rank.ip), str(after.ip), after.named


def source_addresses(subject: Subject, here: Collection[str]) -> Finding:
    """Check from which address a shadow node would call the others, which admit only those of the job.

    `here`: which of its hosts this machine is. Names are not looked up, so with them nothing is certain.
    """
    assert subject.job is not None and subject.node is not None
    name = "source address"
    other_hosts = {split_address(node.mgmt)[0] for node in subject.job.shadow_nodes if node != subject.node}
    if not other_hosts or not here:
        reason = "this host is not the node's" if other_hosts else "the job has no other shadow node"
        return skipped(name, reason)
    if not all(map(is_numeric, here)):
        return skipped(name, "the job file has names for this node, not addresses")
    for host in sorted(filter(is_numeric, other_hosts)):
        source = source_to(host)
        if source is not None and source not in here:
            detail = f"this host calls {host} from {source}, which that node refuses"
            remedy = f"have the route to {host} use {min(here)}: `ip route replace ... src {min(here)}`"
            return failed(name, detail, remedy)
    return ok(name, "calls to other nodes leave from an address of mgmt or records")
