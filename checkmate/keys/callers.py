"""The calls that each role may make on a shadow node, and the role that a certificate gives. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from types import MappingProxyType
from typing import Final

from checkmate.job.schema import Job
from checkmate.keys.roles import URI_SCHEME, Role, node_hosts

STEP_RECORDS: Final = "step records"
"""The connection for step records, which is not an RPC."""
GRADIENT_STREAM: Final = "gradients"
"""An encrypted stream of gradients, with copies by hosts."""

_ALL: Final = frozenset(Role)
_TRAINER: Final = frozenset({Role.TRAINER})
_SHADOW: Final = frozenset({Role.SHADOW})
_READERS: Final = frozenset({Role.READER, Role.SHADOW})

CALLERS: Final[Mapping[str, frozenset[Role]]] = MappingProxyType(
    {
        "Status": _ALL,
        "Events": _ALL,
        "Fence": _TRAINER,
        "Copy": _TRAINER,
        "Parts": _SHADOW,
        "Settle": _TRAINER,
        "Reset": _TRAINER,
        "Leave": _TRAINER,
        "Begin": _TRAINER,
        "Refused": _TRAINER,
        "Meet": _TRAINER,
        "Store": _TRAINER,
        "Conclude": _TRAINER,
        "Seed": _TRAINER,
        "Reserve": _READERS,
        "Release": _READERS,
        "Fetch": _READERS | _TRAINER,  # trainers fetch from fenced nodes, which need no reservation
        "Commit": _SHADOW,
        STEP_RECORDS: _TRAINER,
        GRADIENT_STREAM: _TRAINER,
    }
)
"""The roles that may make each call of `checkmate.v1.Shadow`, by the RPC's name."""

_MAX_SHOWN: Final = 100
"""Characters of a stranger's text in a message."""


class CallerRefused(Exception):
    """A caller may not do what it asks for; the message is one sentence."""


def caller_role(uris: Iterable[str], job: Job) -> Role:
    """Return the role that a certificate gives to its owner.

    Args:
        uris: The URIs among the subject alternative names of the caller's certificate.
        job: The job of this shadow node.

    Raises:
        CallerRefused: It does not have exactly one URI of Checkmate, or one of another job.
    """
    job_uris = sorted({uri for uri in uris if uri.startswith(URI_SCHEME)})
    expected = f"{URI_SCHEME}{job.job}/ROLE"
    if len(job_uris) != 1:
        raise CallerRefused(
            f"the caller's certificate has {len(job_uris)} URIs like {expected}, instead of one"
        )
    name, _, role = job_uris[0].removeprefix(URI_SCHEME).partition("/")
    if name != job.job or role not in _ALL:
        excerpt = repr(job_uris[0][:_MAX_SHOWN])
        raise CallerRefused(f"the caller's certificate has the URI {excerpt}, which is not {expected}")
    return Role(role)


def check_call(
    rpc: str,
    role: Role,
    peer_host: str,
    job: Job,
    resolved: Mapping[str, Iterable[str]] = MappingProxyType({}),
) -> None:
    """Check that a role may make a call, and that a shadow node calls from a shadow node's host.

    Args:
        rpc: The RPC's name, or `STEP_RECORDS`.
        role: The caller's role.
        peer_host: The caller's IP address.
        job: The job of this shadow node.
        resolved: The IP addresses of those hosts that the job specifies by DNS name.

    Raises:
        CallerRefused: It may not.
    """
    allowed = CALLERS.get(rpc, frozenset())
    if role not in allowed:
        callers = " or ".join(sorted(allowed)) or "nobody"
        raise CallerRefused(f"role {role} may not call {rpc[:_MAX_SHOWN]}, which is for {callers}")
    if role is Role.SHADOW and not _is_node(peer_host, job, resolved):
        raise CallerRefused(
            f"{rpc} came with a certificate of role {role} from {peer_host[:_MAX_SHOWN]}, "
            f"which is not a host of a shadow node of job {job.job}"
        )


def _is_node(peer_host: str, job: Job, resolved: Mapping[str, Iterable[str]]) -> bool:
    caller = _address(peer_host)
    if caller is None:
        return False
    addresses = (_address(name) for host in node_hosts(job) for name in (host, *resolved.get(host, ())))
    return any(_same(caller, address) for address in addresses if address is not None)


def _same(first: IPv4Address | IPv6Address, second: IPv4Address | IPv6Address) -> bool:
    """Return whether addresses are of one host. Loopback addresses are: the kernel chooses one."""
    return first == second or (first.is_loopback and second.is_loopback)


def _address(host: str) -> IPv4Address | IPv6Address | None:
    """Return an IP address, or `None` for a DNS name. An IPv4 address within IPv6 is the IPv4 address."""
    try:
        address = ip_address(host)
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address
