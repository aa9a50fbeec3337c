"""Checks of a job's other hosts: whether each answers, and with which version. All are asked at once.

Nothing goes to shadow NICs, or to ports at which only a start of training listens. Shadow nodes are asked for
their status, and switches for their program, as `status` asks; neither changes anything there.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Final

from checkmate.base.wording import counted, shortened
from checkmate.doctor.deadlines import within
from checkmate.doctor.findings import Finding, failed, finding_from_error, ok, skipped, warning
from checkmate.doctor.subjects import Subject
from checkmate.job.addresses import split_address
from checkmate.job.schema import Job, ShadowNode, Switch
from checkmate.keys.folder import RoleKeys
from checkmate.keys.roles import Role

if TYPE_CHECKING:
    from checkmate.nodes.standing import Answers
    from checkmate.rpc import shadow_pb2 as pb

SECONDS: Final = 3.0
"""For each answer."""
_LATE: Final = f"no answer within {SECONDS:g} s"
_MAX_SHOWN: Final = 8
_MAX_REFUSAL: Final = 1000
"""Characters of an error."""
_AWAY: Final = ("can't be reached", "did not answer")
"""The beginnings of reasons if nobody is there; others are refusals."""
_START: Final = "start it, or let its port through the firewall (`checkmate docs install`)"
_OPEN: Final = (
    "let its port through the firewall, or correct gradients in the job file (`checkmate docs install`)"
)
_COUNTERS_SECONDS: Final = 10.0
"""For what a switch's guard has counted, once it has answered."""
_AGAIN_SECONDS: Final = 1.0
_SAME: Final = "install the same version of Checkmate on all hosts of the job"


def called_nodes(subject: Subject) -> list[ShadowNode]:
    """Return the shadow nodes that a host calls: those of its ranks' groups, or all others of the job."""
    assert subject.job is not None
    job = subject.job
    if subject.role is Role.SHADOW:
        return [node for node in job.shadow_nodes if node != subject.node]
    ranks = {rank.rank for rank in subject.ranks}
    groups = [i for i in job.groups if ranks & {rank.rank for rank in job.dp_groups[i].ranks}]
    ids = {number for group in groups for number in job.shadow_list(group)}
    return [node for node in job.shadow_nodes if node.id in ids]


def ask_nodes(job: Job, nodes: Iterable[ShadowNode], keys: RoleKeys | None) -> Answers:
    """Return the status of shadow nodes by id, or why there is none. Needs gRPC."""
    from checkmate.nodes.stubs import Stubs  # noqa: PLC0415 - an extra

    with Stubs(job, keys) as stubs:
        return stubs.statuses([node.id for node in nodes], SECONDS)


def judge_answers(job: Job, nodes: Sequence[ShadowNode], answers: Answers) -> list[Finding]:
    """Return what shadow nodes' answers, or their silence, mean for this host. Pure."""
    if not nodes:
        return [skipped("shadow nodes", "this host calls none")]
    silent = {node: status for node in nodes if isinstance(status := answers[node.id], str)}
    findings = [_silence(node, why) for node, why in list(silent.items())[:_MAX_SHOWN]]
    if len(silent) > _MAX_SHOWN:
        findings.append(warning("shadow nodes", f"{len(silent) - _MAX_SHOWN} more do not answer", _START))
    if len(silent) < len(nodes):
        answering = counted(len(nodes) - len(silent), "node")
        findings.append(
            ok("shadow nodes", f"{answering} of {len(nodes)} answered, with this host's protocol")
        )
    statuses = {node: status for node, status in answers.items() if not isinstance(status, str)}
    return [*findings, *_versions(job, statuses), *_refusal(statuses)]


def _silence(node: ShadowNode, why: str) -> Finding:
    detail = f"shadow node {node.id} ({node.mgmt}) {shortened(why)}"
    if why.startswith(_AWAY):
        return warning("shadow nodes", detail, _START)
    remedy = "see what listens there, and whether both sides have keys of the same job"
    return finding_from_error("shadow nodes", detail, remedy)


def _versions(job: Job, answers: Mapping[int, pb.NodeStatus]) -> list[Finding]:
    """Compare what must be the same on all hosts of a job, as far as nodes tell it."""
    from checkmate.nodes.other_ranks import difference, is_part_of, job_ranks  # noqa: PLC0415

    if not answers:
        return [skipped("versions", "nobody answered whose version could be compared")]
    for node, status in answers.items():
        if not status.job_ranks.groups or is_part_of(job, status.job_ranks):
            continue
        if values := difference(status.job_ranks, job_ranks(job)):
            detail = (
                f"shadow node {node} has a job file with {shortened(values[0])}, this host with {values[1]}"
            )
            return [failed("versions", detail, "copy the same job file to all hosts, and start nodes again")]
    try:
        own_version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return [skipped("versions", "PyTorch is not installed here")]
    other_versions = sorted({status.torch for status in answers.values()} - {own_version, ""})
    if other_versions:
        detail = f"PyTorch {own_version} here, {shortened(' and '.join(other_versions))} on shadow nodes"
        return [warning("versions", f"{detail}: states may differ in the last bits", "install the same one")]
    return [ok("versions", f"the same protocol, job file and PyTorch ({own_version})")]


def _refusal(answers: Mapping[int, pb.NodeStatus]) -> list[Finding]:
    """Tell why the last start of training was refused, if it was."""
    from checkmate.nodes.standing import newest_refusal, refusal_words  # noqa: PLC0415

    if (refusal := newest_refusal(answers)) is None:
        return []
    detail = f"the last start was refused {shortened(refusal_words(refusal), _MAX_REFUSAL)}"
    return [
        warning("training", detail, "change the script: `checkmate docs training` has what can be followed")
    ]


def records(nodes: Sequence[ShadowNode], tls: ssl.SSLContext | None) -> list[Finding]:
    """Connect to where nodes take step records, with TLS if there are keys, and leave again."""
    if not nodes:
        return []
    places = [node.records_at for node in nodes]
    whys = within(SECONDS, [partial(_greets, place, tls) for place in places], _LATE)
    failures = [(node, why) for node, why in zip(nodes, whys, strict=True) if why]
    findings = [
        warning(
            "step records", f"shadow node {node.id} at {':'.join(map(str, node.records_at))}: {why}", _START
        )
        for node, why in failures[:_MAX_SHOWN]
    ]
    if len(failures) < len(nodes):
        findings.append(
            ok("step records", f"{len(nodes) - len(failures)} of {counted(len(nodes), 'node')} connected")
        )
    return findings


def gradients(nodes: Sequence[ShadowNode]) -> list[Finding]:
    """Connect to where nodes take gradients from ranks, and leave again."""
    if not nodes:
        return []
    whys = within(SECONDS, [partial(_greets, node.gradients_at, None) for node in nodes], _LATE)
    failures = [(node, why) for node, why in zip(nodes, whys, strict=True) if why]
    findings = [
        failed("gradients", f"shadow node {node.id} at {':'.join(map(str, node.gradients_at))}: {why}", _OPEN)
        for node, why in failures[:_MAX_SHOWN]
    ]
    if len(failures) < len(nodes):
        counts = f"{len(nodes) - len(failures)} of {counted(len(nodes), 'node')} connected"
        findings.append(ok("gradients", counts))
    return findings


def _greets(place: tuple[str, int], tls: ssl.SSLContext | None) -> str:
    """Return why a connection fails, or "". Close it as TLS wants, so that the node's log is silent."""
    try:
        with socket.create_connection(place, SECONDS) as plain:
            if tls is None:
                return ""
            with tls.wrap_socket(plain, server_hostname=place[0]) as sock:
                with suppress(OSError, ValueError):
                    sock.unwrap()
                return ""
    except OSError as error:
        return shortened(error.strerror or str(error))


def switches(job: Job) -> list[Finding]:
    """Ask a job's switches for their program and for what their guard has refused.

    Needs the libraries of a controller.
    """
    job_switches = list(job.fabric.switches)
    # A name that nobody looks up in time would hold up the end of the event loop.
    whys = within(SECONDS, [partial(_unknown, switch) for switch in job_switches], _LATE)
    return asyncio.run(_all_switches(job, list(zip(job_switches, whys, strict=True))))


def _unknown(switch: Switch) -> str:
    """Return why a switch's name has no address, or ""."""
    try:
        socket.getaddrinfo(*split_address(switch.address), type=socket.SOCK_STREAM)
    except OSError as error:
        return error.strerror or str(error)
    return ""


async def _all_switches(job: Job, troubles: Sequence[tuple[Switch, str]]) -> list[Finding]:
    """Ask all switches for their program, and only then for their counters: many take long to decode."""
    programs = await asyncio.gather(*(_in_time(switch, why) for switch, why in troubles))
    ready = [
        switch
        for (switch, _), program in zip(troubles, programs, strict=True)
        if program == _runs_checkmate(switch)
    ]
    refusals = await asyncio.gather(*(_refusals(job, switch) for switch in ready))
    return [*programs, *(finding for findings in refusals for finding in findings)]


async def _in_time(switch: Switch, unknown: str) -> Finding:
    """Ask a switch, unless its name is unknown. A library's own limits are longer, and add up."""
    if unknown:
        return _away(switch, unknown)
    try:
        async with asyncio.timeout(SECONDS):
            return await _program(switch)
    except TimeoutError:
        return _away(switch, _LATE)


def _away(switch: Switch, why: str) -> Finding:
    remedy = "start its P4Runtime server, or correct address in the fabric"
    return failed(f"switch {switch.name}", f"cannot be reached at {switch.address} ({why})", remedy)


async def _connection_error(host: str, port: int) -> str:
    """Return why a connection fails, or ""."""
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    writer.close()
    return ""


async def _program(switch: Switch) -> Finding:
    from controlplane.errors import ControlError  # noqa: PLC0415 - an extra
    from controlplane.p4runtime.codec import Codec  # noqa: PLC0415
    from controlplane.p4runtime.session import NoProgram, SwitchSession  # noqa: PLC0415

    name = f"switch {switch.name}"
    if why := await _connection_error(*split_address(switch.address)):
        return _away(switch, why)
    try:
        async with SwitchSession(switch, Codec.for_switch(switch), timeout=SECONDS) as session:
            await session.check_pipeline()
    except NoProgram:
        detail = f"answers at {switch.address}, and runs no program yet, which `checkmate run` loads"
        return ok(name, detail)
    except ControlError as error:
        return finding_from_error(name, str(error), _SAME)
    return _runs_checkmate(switch)


def _runs_checkmate(switch: Switch) -> Finding:
    return ok(f"switch {switch.name}", f"answers at {switch.address}, and runs Checkmate's program")


async def _refusals(job: Job, switch: Switch) -> list[Finding]:
    """Read what the guard has refused, twice: counters never go back, so only the second says what is now."""
    from controlplane.errors import ControlError  # noqa: PLC0415 - an extra
    from controlplane.network import Network  # noqa: PLC0415
    from controlplane.p4runtime.codec import Codec  # noqa: PLC0415
    from controlplane.p4runtime.session import SwitchSession  # noqa: PLC0415
    from controlplane.status import read_refusals  # noqa: PLC0415

    name, network = f"switch {switch.name}", Network([job])
    try:
        async with (
            asyncio.timeout(_COUNTERS_SECONDS),
            SwitchSession(switch, Codec.for_switch(switch), timeout=_COUNTERS_SECONDS) as session,
        ):
            before = {
                refusal.place: refusal.packets
                for refusal in await read_refusals(session, network)
                if refusal.packets
            }
            if not before:
                return []
            await asyncio.sleep(_AGAIN_SECONDS)
            refusals = [refusal for refusal in await read_refusals(session, network) if refusal.packets]
    except TimeoutError:
        return [skipped(name, f"the guard's counters took longer than {_COUNTERS_SECONDS:g} s: see `status`")]
    except ControlError as error:
        return [finding_from_error(name, str(error), _SAME)]
    return [
        warning(
            name,
            f"{refusal.trouble} ({_lately(refusal.packets - before.get(refusal.place, 0))})",
            refusal.remedy,
        )
        for refusal in refusals
    ]


def _lately(packets: int) -> str:
    return f"{f'{packets:,}' if packets else 'none'} of them in the last {_AGAIN_SECONDS:g} s"
