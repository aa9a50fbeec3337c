"""All checks of a host: for `checkmate doctor`, and without other hosts for processes that start."""

from __future__ import annotations

import datetime as dt
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from checkmate.doctor import clocks, host_checks, network_checks, peers, role_checks
from checkmate.doctor.facts import Facts
from checkmate.doctor.findings import Finding, failed, finding_from_error, has_failed, skipped
from checkmate.doctor.reading import is_here, read
from checkmate.doctor.subjects import Subject
from checkmate.job.addresses import split_address
from checkmate.job.schema import Job, Rank, ShadowNode
from checkmate.keys.access import insecure_everywhere
from checkmate.keys.errors import KeysError
from checkmate.keys.folder import RoleKeys
from checkmate.keys.roles import Role
from checkmate.ring.place import host_ports, repair_ports, ring_ports, tree_ports
from checkmate.shadow.receive.connect import ORDINARY_BUFFER, RECEIVE_BUFFER
from checkmate.wire.ring_sockets import BUFFER_BYTES, TREE_CHANNEL_PORTS

log = logging.getLogger("checkmate")

_EXAMPLE_BUFFERS: Final = 8
"""Receive buffers that a shadow node without a job file is checked for."""


@dataclass(frozen=True)
class Diagnosis:
    """The findings about a host in its role."""

    subject: Subject
    findings: tuple[Finding, ...]

    @property
    def is_able(self) -> bool:
        """True if nothing keeps it from its role."""
        return not has_failed(self.findings)


@dataclass(frozen=True)
class Keys:
    """A role's keys, if there are any, and what was found of them. `usable`: others can be called."""

    findings: tuple[Finding, ...]
    keys: RoleKeys | None
    usable: bool


def diagnose(subject: Subject, file: Path | None, *, insecure: bool = False) -> Diagnosis:
    """Check a host for its role.

    Args:
        subject: the role, and which of the job's hosts this is.
        file: the job file, if there is one.
        insecure: whether the role's process uses no keys.
    """
    if sys.platform != "linux":
        return Diagnosis(
            subject, (failed("kernel", f"{sys.platform} is not Linux", "use Linux 5.10 or newer"),)
        )
    facts = read(str(nic.ip) for nic in subject.nics)
    findings = [role_checks.libraries(subject.role), *_host(subject, facts)]
    if subject.job is None or file is None:
        return Diagnosis(subject, tuple(findings))
    now = dt.datetime.now(dt.UTC)
    keys = _keys(subject, now, insecure=insecure or insecure_everywhere())
    findings += [*network_checks.interfaces(subject, facts), *keys.findings]
    if subject.role is Role.CONTROLLER:
        findings += [
            *role_checks.tls_files(file, subject.job, now),
            _clocks(subject),
            *_switches(subject.job),
        ]
    else:
        findings += [*([] if subject.by_hosts else role_checks.routes(subject, facts))]
        findings += _peer_findings(subject, facts, keys)
    return Diagnosis(subject, tuple(findings))


def warn(
    subjects: Iterable[Subject], *, receive_buffer: int = RECEIVE_BUFFER, insecure: bool = False
) -> None:
    """Log a line for each thing to do that a process which starts does not say itself.

    Asks no other host, takes a few milliseconds, and never fails. Does not ask for the clock's state, because
    systemd's filters may end a service for that.
    """
    for subject in subjects:
        try:
            findings = list(_quietly(subject, receive_buffer, insecure or insecure_everywhere()))
        except (OSError, ValueError) as error:
            log.warning("this host cannot be checked: %s", error)
            continue
        for finding in findings:
            if finding.is_bad:
                log.warning("%s", finding)


def _quietly(subject: Subject, receive_buffer: int, insecure: bool) -> Iterator[Finding]:
    if subject.role is Role.SHADOW:
        facts = read((str(nic.ip) for nic in subject.nics), quick=True)
        yield host_checks.kernel(subject.role, facts.release, by_hosts=subject.by_hosts)
        yield host_checks.windows(subject.role, facts, by_hosts=subject.by_hosts)
        yield from _capacity(subject, facts, ORDINARY_BUFFER if subject.by_hosts else receive_buffer)
        # Without such an address the process refuses to start, and says so.
        present_nics = tuple(nic for nic in subject.nics if facts.nics[str(nic.ip)] is not None)
        yield from network_checks.interfaces(replace(subject, nics=present_nics), facts)
    if not insecure:
        try:
            ends = role_checks.keys_end(role_checks.role_keys(subject), dt.datetime.now(dt.UTC))
        except KeysError:
            return  # the process refuses to start, and says why
        if ends is not None:
            yield ends


def _host(subject: Subject, facts: Facts) -> Iterator[Finding]:
    """Yield what concerns the host itself."""
    role, by_hosts = subject.role, subject.by_hosts
    ports = [port for _, port in subject.listens]
    yield host_checks.kernel(role, facts.release, by_hosts=by_hosts)
    yield host_checks.capabilities(
        role, facts.capabilities, tags=subject.is_tagging, ports=ports, by_hosts=by_hosts
    )
    yield from _of_host_copies(subject, facts) if by_hosts else _of_switch_copies(subject, facts)
    if role is Role.TRAINER:
        yield host_checks.rendezvous(facts)
    if role is Role.SHADOW:
        yield role_checks.step_kernel()
    yield host_checks.windows(role, facts, by_hosts=by_hosts)
    yield host_checks.clock(role, facts, by_hosts=by_hosts)


def _of_switch_copies(subject: Subject, facts: Facts) -> Iterator[Finding]:
    """Yield what matters if a switch copies: the tagger, and buffers that hold what a node has not read."""
    if subject.role is Role.TRAINER and subject.is_tagging:
        group = role_checks.cgroup()
        yield group
        yield skipped("BPF", "not tried without a cgroup") if group.is_bad else role_checks.tagger(facts)
    if subject.role is Role.SHADOW:
        yield role_checks.receive_buffers(facts, RECEIVE_BUFFER)
        buffers = _EXAMPLE_BUFFERS if subject.job is None else role_checks.count_streams(subject) + 1
        yield role_checks.tcp_memory(buffers, RECEIVE_BUFFER)
        yield from _capacity(subject, facts, RECEIVE_BUFFER)


def _of_host_copies(subject: Subject, facts: Facts) -> Iterator[Finding]:
    """Yield what matters if hosts copy: what is beyond ordinary buffers waits in the ranks' memory."""
    yield host_checks.part_buffers(facts, ORDINARY_BUFFER)
    if subject.role is Role.SHADOW:
        yield from _capacity(subject, facts, ORDINARY_BUFFER)


def _capacity(subject: Subject, facts: Facts, receive_buffer: int) -> Iterator[Finding]:
    """Yield what a shadow node's streams take."""
    if subject.job is None:
        return
    streams = role_checks.count_streams(subject)
    ranks = subject.job.rank_count
    yield host_checks.memory(facts.memory, streams + 1, receive_buffer)
    yield host_checks.open_files(facts.files, streams, ranks)


def _keys(subject: Subject, now: dt.datetime, *, insecure: bool) -> Keys:
    if insecure:
        return Keys((skipped("keys", "none are used (--insecure)"),), None, True)
    finding = role_checks.keys(subject, now)
    if has_failed([finding]):
        return Keys((finding,), None, False)
    return Keys((finding,), role_checks.role_keys(subject), True)


def _clocks(subject: Subject) -> Finding:
    """Compare the clock with those of the job's shadow nodes, but this one."""
    assert subject.job is not None
    nodes = [node for node in subject.job.shadow_nodes if node != subject.node]
    hosts = list(dict.fromkeys(split_address(node.mgmt)[0] for node in nodes))
    return clocks.compare(subject.role, hosts, clocks.differences(hosts))


def _switches(job: Job) -> Iterator[Finding]:
    if find_spec("finsy") is None:
        yield skipped("switches", "not asked without the extra switch")
    else:
        yield from peers.switches(job)


def _peer_findings(subject: Subject, facts: Facts, keys: Keys) -> Iterator[Finding]:
    """Yield what concerns ports, and the shadow nodes that the host calls."""
    assert subject.job is not None
    job, nodes = subject.job, peers.called_nodes(subject)
    installed = all(find_spec(library) for library in ("torch", "grpc"))
    if subject.role is Role.TRAINER and installed and not subject.by_hosts:
        yield from _ring(job, subject.ranks, facts)
    callees = [*nodes, *([subject.node] if subject.node is not None else [])]
    answers = peers.ask_nodes(job, callees, keys.keys) if keys.usable and installed else {}
    if subject.node is not None:
        runs = not isinstance(answers.get(subject.node.id, ""), str)
        own_hosts = [host for host in subject.mgmt if is_here(host)]
        serving = [host for host, _ in subject.listens if is_here(host)]
        yield network_checks.own_ports(subject, facts, serving, runs=runs)
        yield role_checks.source_addresses(subject, own_hosts)
        if not subject.by_hosts:
            yield _clocks(subject)
    if not (keys.usable and installed):
        yield skipped("shadow nodes", f"not asked without {'keys' if installed else 'the libraries'}")
        return
    yield from peers.judge_answers(job, nodes, answers)
    if subject.role is Role.TRAINER:
        present = [node for node in nodes if not isinstance(answers[node.id], str)]
        yield from _records(present, keys.keys)
        if subject.by_hosts:
            yield from peers.gradients(present)


def _records(nodes: Sequence[ShadowNode], keys: RoleKeys | None) -> Iterator[Finding]:
    from checkmate.keys.contexts import client_context  # noqa: PLC0415 - imports gRPC

    try:
        tls = None if keys is None else client_context(keys)
    except KeysError as error:
        yield finding_from_error(
            "step records", str(error), "make the keys again (`checkmate docs security`)"
        )
        return
    yield from peers.records(nodes, tls)


def _ring(job: Job, ranks: Iterable[Rank], facts: Facts) -> Iterator[Finding]:
    """Yield what concerns the ring's ports and buffers; with NCCL, it has its own."""
    own_ranks = list(ranks)
    if job.collective == "nccl":
        yield skipped("ports", "NCCL chooses its own; `checkmate nccl check` tries it")
        return
    yield network_checks.ring_ports(ring_addresses(job, own_ranks), facts)
    yield host_checks.trainers_buffers(facts, BUFFER_BYTES)


def ring_addresses(job: Job, own_ranks: Sequence[Rank]) -> list[tuple[str, int]]:
    """Return the addresses and ports of a host's ranks for rings, repairs, trees, and rings in the host."""
    addresses = [
        (str(rank.ip), first + number)
        for group in job.groups
        for firsts, count in _ports_of_group(job, group)
        for rank, first in zip(job.dp_groups[group].ranks, firsts, strict=True)
        if rank in own_ranks
        for number in range(count)
    ]
    if len(own_ranks) > 1:
        firsts = zip(own_ranks, host_ports(job, own_ranks), strict=True)
        addresses += [(str(rank.ip), first + more) for rank, first in firsts for more in (0, 1)]
    return addresses


def _ports_of_group(job: Job, group: int) -> Iterator[tuple[list[int], int]]:
    """Yield the first ports of each rank of a DP group, with their number."""
    yield ring_ports(job, group), job.channels
    if not job.lossless:
        yield repair_ports(job, group), 1
    if job.has_trees(group):
        yield tree_ports(job, group), TREE_CHANNEL_PORTS * job.channels
