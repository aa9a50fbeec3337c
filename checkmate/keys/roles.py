"""Roles in a job, and what belongs to each: its certificate's names, its secrets, its hosts."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Final

from checkmate.job.addresses import split_address
from checkmate.job.schema import Job


class Role(StrEnum):
    """The part of a holder of keys in a job."""

    CONTROLLER = "controller"
    TRAINER = "trainer"
    SHADOW = "shadow"
    READER = "reader"


class Secret(StrEnum):
    """A symmetric secret, by the name of its file."""

    HELLO = "hello.key"
    RING = "ring.key"
    GRADIENTS = "gradients.key"


SECRETS: Final[Mapping[Role, tuple[Secret, ...]]] = MappingProxyType(
    {
        Role.CONTROLLER: (Secret.HELLO,),
        Role.TRAINER: (Secret.RING, Secret.GRADIENTS),
        Role.SHADOW: (Secret.HELLO, Secret.GRADIENTS),
        Role.READER: (),
    }
)
"""The secrets that each role needs, and no others."""

CA_FILE: Final = "ca.pem"
CERT_FILE: Final = "cert.pem"
KEY_FILE: Final = "key.pem"

URI_SCHEME: Final = "checkmate:"


def role_uri(job: str, role: Role) -> str:
    """Return the URI that a role's certificate has as a subject alternative name."""
    return f"{URI_SCHEME}{job}/{role}"


def role_folder(keys: Path, job: str, role: Role) -> Path:
    """Return a role's folder within a folder of keys."""
    return keys / job / role


def node_hosts(job: Job) -> tuple[str, ...]:
    """Return the hosts that serve for shadow nodes, each once: those of `mgmt` and `records`."""
    hosts = [host for node in job.shadow_nodes for host in (split_address(node.mgmt)[0], node.records_at[0])]
    return tuple(dict.fromkeys(hosts))


def hosts_of(job: Job, role: Role) -> tuple[str, ...]:
    """Return the hosts that need a role's keys, each once; none if the job does not name them."""
    match role:
        case Role.TRAINER:
            hosts = [rank.place for group in job.dp_groups for rank in group.ranks if rank.place]
        case Role.SHADOW:
            hosts = [split_address(node.mgmt)[0] for node in job.shadow_nodes]
        case _:
            hosts = []
    return tuple(dict.fromkeys(hosts))
