"""The subject of a check: a role, and one of a job's hosts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from checkmate.errors import CheckmateError
from checkmate.job.addresses import split_address
from checkmate.job.schema import Host, Job, Rank, ShadowNode, Switch
from checkmate.keys.roles import Role
from checkmate.wire.schedule import side_of

ROLES: Final = (Role.TRAINER, Role.SHADOW, Role.CONTROLLER)
"""Roles of hosts that are checked."""
_NAMES: Final = {Role.TRAINER: "a trainer", Role.SHADOW: "a shadow node", Role.CONTROLLER: "a controller"}
_MAX_SHOWN: Final = 8


class NoSubject(CheckmateError):
    """It is not clear for whom the host is to be checked; the message says how to name it."""

    exit_code = 2


@dataclass(frozen=True)
class Subject:
    """A host in its role. Without a job, it is any host of that role."""

    role: Role
    name: str
    job: Job | None = None
    node: ShadowNode | None = None
    """The shadow node that it runs."""
    ranks: tuple[Rank, ...] = ()
    """The ranks that run on it."""
    nics: tuple[Host, ...] = ()
    """Its interfaces on the training network."""
    mgmt: tuple[str, ...] = ()
    """Its addresses or names on the management network, as far as the job has them."""
    guessed: str = ""
    """The reason for the guess, as a sentence; empty if it was named."""

    @property
    def by_hosts(self) -> bool:
        """True if hosts send copies themselves, and no switch does."""
        return self.job is not None and self.job.copies == "host"

    @property
    def is_tagging(self) -> bool:
        """True if a rank on it tags segments. Any trainer might."""
        if self.job is None:
            return self.role is Role.TRAINER
        if self.by_hosts:
            return False
        own_ranks = {rank.rank for rank in self.ranks}
        places = [(group.ranks, place) for group in self.job.dp_groups for place in range(len(group.ranks))]
        return any(
            ranks[at].rank in own_ranks and side_of(len(ranks), at) is not None for ranks, at in places
        )

    @property
    def listens(self) -> tuple[tuple[str, int], ...]:
        """Host and port of each address at which a shadow node serves: `mgmt`, `records`, and `gradients`."""
        if self.node is None:
            return ()
        return self.node.addresses if self.by_hosts else self.node.addresses[:2]

    def switch_of(self, nic: Host) -> Switch:
        """Return the switch to which an interface is attached."""
        assert self.job is not None
        return next(switch for switch in self.job.fabric.switches if switch.name == nic.switch)


def any_host(role: Role) -> Subject:
    """Return any host of a role, without a job."""
    return Subject(role, _NAMES[role])


def controller(job: Job, guessed: str = "") -> Subject:
    """Return the controller of a job. Raise `NoSubject` if no switch copies, so that it has none."""
    if job.copies == "host":
        raise NoSubject(
            f"job {job.job} has no controller, because hosts send copies themselves (copies: host); "
            "--role is trainer or shadow"
        )
    return Subject(Role.CONTROLLER, f"the controller of job {job.job}", job, guessed=guessed)


def trainers(job: Job) -> Iterator[Subject]:
    """Yield the training hosts of a job; with copies by hosts, whose file does not name them, any of them."""
    ranks = [rank for group in job.dp_groups for rank in group.ranks]
    if job.copies == "host":
        yield Subject(Role.TRAINER, f"a host of ranks of job {job.job}", job, ranks=tuple(ranks))
        return
    for host in job.hosts:
        host_ranks = tuple(rank for rank in ranks if rank.host == host.name)
        mgmt = (host.mgmt,) if host.mgmt else ()
        yield Subject(
            Role.TRAINER,
            f"host {host.name} of job {job.job}",
            job,
            ranks=host_ranks,
            nics=host.nics,
            mgmt=(*mgmt, host.name),
        )
    for rank in ranks:
        if rank.host is None:
            mgmt_addresses = (rank.mgmt,) if rank.mgmt else ()
            name = f"{rank.named} of job {job.job}"
            yield Subject(Role.TRAINER, name, job, ranks=(rank,), nics=(rank,), mgmt=mgmt_addresses)


def shadow(job: Job, node_id: int) -> Subject:
    """Return a shadow node of a job. Raise `KeyError` if there is none."""
    name = f"shadow node {node_id} of job {job.job}"
    node = job.node(node_id)
    hosts = tuple(dict.fromkeys((split_address(node.mgmt)[0], node.records_at[0])))
    return Subject(Role.SHADOW, name, job, node=node, nics=node.nics, mgmt=hosts)


def choose(job: Job, role: Role | None, number: int | None, host: str | None) -> Subject:
    """Return the host that a role and an id or a host's name mean.

    Args:
        job: the job.
        role: the role; by default that of whoever has this id or name. An id is then a shadow node's.
        number: a shadow node's id, or a rank.
        host: a host's name or address on either network.

    Raises:
        NoSubject: No host has this id or name, or several have.
    """
    if role is Role.CONTROLLER:
        if number is not None or host is not None:
            raise NoSubject("a controller has neither --id nor --host: leave them out")
        return controller(job)
    if number is not None and host is not None:
        raise NoSubject("--id and --host name the same thing: give one of them")
    training_hosts = (
        [] if role is Role.SHADOW or (role is None and number is not None) else list(trainers(job))
    )
    shadow_hosts = [] if role is Role.TRAINER else _shadows(job)
    matches = [
        *(
            subject
            for subject in training_hosts
            if any(rank.rank == number for rank in subject.ranks) or _is_named(subject, host)
        ),
        *(
            subject
            for subject in shadow_hosts
            if (subject.node and subject.node.id == number) or _is_named(subject, host)
        ),
    ]
    if len(matches) == 1:
        return matches[0]
    description = f"the host {host}" if host is not None else f"{_kind(role)} {number}"
    if not matches:
        names = _list_names([*training_hosts, *shadow_hosts]).replace(f" of job {job.job}", "")
        raise NoSubject(f"job {job.job} does not have {description}; it has {names}")
    raise NoSubject(f"{description} may be {_list_names(matches)}; choose with --role and --id")


def guess(job: Job, is_here: Callable[[str], bool], *, role: Role | None, controls: bool) -> Subject:
    """Return the host of a job that this machine is, by its addresses.

    Args:
        job: the job.
        is_here: returns whether a host name or an address is this machine's.
        role: a role that it must have, if one is known.
        controls: whether this machine has the job's keys of role controller.

    Raises:
        NoSubject: That is not clear.
    """
    subjects = [subject for subject in (*trainers(job), *_shadows(job)) if role in (None, subject.role)]
    for addresses in (lambda subject: [str(nic.ip) for nic in subject.nics], lambda subject: subject.mgmt):
        matches = [
            (subject, address)
            for subject in subjects
            if (address := next(filter(is_here, addresses(subject)), None))
        ]
        if len(matches) > 1:
            raise NoSubject(
                f"this host has the addresses of {_list_names([subject for subject, _ in matches])}; "
                "choose with --role and --id, or --host"
            )
        for subject, address in matches:
            why = f"{address} is an address of this host"
            return replace(subject, guessed=why)
    if job.copies == "host" and role is not Role.SHADOW:
        why = "the job names no hosts of ranks" + (
            "" if role else ", and no shadow node with an address of this host"
        )
        return replace(next(trainers(job)), guessed=why)
    if controls and role is None:
        return controller(job, "it has the keys of role controller, and none of the job's addresses")
    raise NoSubject(
        f"this host has no address of {_list_names(subjects)}; choose what to check it for with --role, "
        "and --id or --host"
    )


def _shadows(job: Job) -> list[Subject]:
    return [shadow(job, node.id) for node in job.shadow_nodes]


def _is_named(subject: Subject, host: str | None) -> bool:
    return host is not None and host in (*subject.mgmt, *(str(nic.ip) for nic in subject.nics))


def _kind(role: Role | None) -> str:
    return "rank" if role is Role.TRAINER else "shadow node"


def _list_names(subjects: list[Subject]) -> str:
    names = [subject.name for subject in subjects[:_MAX_SHOWN]]
    more = f" and {len(subjects) - _MAX_SHOWN} more" if len(subjects) > _MAX_SHOWN else ""
    return f"{', '.join(names)}{more}"
