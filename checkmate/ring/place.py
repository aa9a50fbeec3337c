"""A rank's place in its ring, and the errors of the ring, which name ranks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from ipaddress import IPv4Address

from checkmate.errors import CheckmateError
from checkmate.job.schema import Job, Rank
from checkmate.keys.secret_files import SECRET_BYTES
from checkmate.ring.greetings import Greeting
from checkmate.wire import ring_sockets, tag

DEFAULT_PORT = ring_sockets.RING_PORT


def ring_ports(job: Job, group: int) -> list[int]:
    """Return the port of channel 0 of each rank of a DP group: of each address, `CHANNELS_MAX` a rank."""
    return _ports(job, job.dp_groups[group].ranks, DEFAULT_PORT, tag.CHANNELS_MAX)


def repair_ports(job: Job, group: int) -> list[int]:
    """Return the port of each rank of a DP group to which the one before it sends what was lost again."""
    return _ports(job, job.dp_groups[group].ranks, ring_sockets.REPAIR_PORT, 1)


def tree_ports(job: Job, group: int) -> list[int]:
    """Return the first of the ports that each rank of a DP group has for trees."""
    return _ports(job, job.dp_groups[group].ranks, ring_sockets.TREE_PORT, ring_sockets.TREE_PORTS)


def host_ports(job: Job, ranks: Sequence[Rank]) -> list[int]:
    """Return the first of the two ports that each of these ranks has for the rings within its host."""
    return _ports(job, ranks, ring_sockets.HOST_PORT, ring_sockets.HOST_PORTS)


def _ports(job: Job, ranks: Sequence[Rank], first: int, count: int) -> list[int]:
    """Return the first port of each of these ranks: at each address, a rank has `count` from `first` on."""
    at = _at_their_addresses(job)
    return [first + count * at[rank.rank] for rank in ranks]


def _at_their_addresses(job: Job) -> dict[int, int]:
    """Return, by rank, how many ranks with its address have lower numbers."""
    ranks = sorted((rank for group in job.dp_groups for rank in group.ranks), key=lambda rank: rank.rank)
    before: Counter[IPv4Address] = Counter()
    numbers = {}
    for rank in ranks:
        numbers[rank.rank] = before[rank.ip]
        before[rank.ip] += 1
    return numbers


PUBLIC_KEY = blake2b(b"checkmate ring without a key", digest_size=SECRET_BYTES).digest()
"""The key of rings that are not a job's, in labs and measurements. Everybody has it."""


class RingError(CheckmateError, RuntimeError):
    """The ring can't be connected, or is broken."""


class RingTimeout(RingError):
    """Another rank can't be reached, or does not come."""


@dataclass(frozen=True)
class RingPlace:
    """A rank's place in its ring, for `connect_ring`."""

    rank: int
    ips: Sequence[str]
    """One address per rank, in ring order."""
    channels: int
    port: int = DEFAULT_PORT
    """Port of channel 0 of every rank."""
    ports: Sequence[int] = ()
    """The port of channel 0 of each rank, in ring order, if they differ."""
    device: str | None = None
    """The interface of this rank's address, on a host that has several for the training network."""
    incarnation: int = 0
    dscp_bit: int = tag.DEFAULT_DSCP_BIT
    fingerprint: bytes = bytes(16)
    """A hash (16 bytes) of everything that ranks must have in common, such as the buckets."""
    key: bytes = field(default=PUBLIC_KEY, repr=False)
    """The secret, 32 bytes, that only the ring's ranks have."""
    names: Sequence[str] = ()
    """The ranks' names in messages, in ring order; by default `rank 0`, `rank 1` and so on."""

    @property
    def ranks(self) -> int:
        """Number of ranks in the ring."""
        return len(self.ips)

    @property
    def previous(self) -> int:
        """The rank that connects to this one."""
        return (self.rank - 1) % self.ranks

    def address(self, rank: int, channel: int) -> tuple[str, int]:
        """Return where a rank listens on `channel`."""
        return self.ips[rank], (self.ports[rank] if self.ports else self.port) + channel

    def name(self, rank: int) -> str:
        """Return a rank's name in messages."""
        return self.names[rank] if self.names else f"rank {rank}"

    @property
    def own_name(self) -> str:
        """This rank's name in messages."""
        return self.name(self.rank)

    def greeting(self, rank: int, channel: int) -> Greeting:
        """Return what `rank` sends first on `channel`."""
        return Greeting(self.ranks, rank, channel, self.incarnation, self.fingerprint)
