"""Election of the primary controller: election ids, and the rules for claiming switches. Pure.

A switch's server knows its primary, and refuses everybody else's writes (P4Runtime specification, section 5).
Controllers of the same job files take turns by these rules:

- A controller claims switches in the order of their names. It writes to none before it has the first one that
  it can reach.
- A controller that holds that switch may displace the primaries of those after it, if they have the same job
  files.
- A controller that loses one switch to another controller releases all of them.

An election id names the job files, so that controllers can compare them without talking to each other.
"""

from __future__ import annotations

import enum
import hashlib
import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from checkmate.job.schema import Job
from checkmate.job.validation import data_of

_JOBS_BITS: Final = 48
_CONTROLLER_BITS: Final = 16
_OWN_PATHS: Final[Any] = {"keys": True, "fabric": {"switches": {"__all__": {"tls"}}}}
"""Fields that differ between two machines with the same job files: the paths of their keys."""


@dataclass(frozen=True, slots=True)
class ElectionId:
    """An election id: the higher term wins.

    A write is its sender's by this number alone, so no two controllers may have the same one.

    Attributes:
        term: Counted up at each change of the primary; 0 for a controller that waits.
        jobs: The digest of the primary's job files; 0 is unknown.
        controller: A number that tells this process from others.
    """

    term: int
    jobs: int
    controller: int

    @property
    def number(self) -> int:
        """The number in P4Runtime's messages, of 128 bits."""
        return (self.term << _JOBS_BITS | self.jobs) << _CONTROLLER_BITS | self.controller

    @classmethod
    def from_number(cls, number: int) -> ElectionId:
        """Return the parts of `number`. Only a primary's names job files."""
        rest, controller = divmod(number, 1 << _CONTROLLER_BITS)
        term, jobs = divmod(rest, 1 << _JOBS_BITS)
        return cls(term, jobs, controller) if term else cls(0, 0, number)


def new_controller() -> int:
    """Return a random number for a process, as `ElectionId.controller`."""
    return secrets.randbelow(1 << _CONTROLLER_BITS)


def jobs_digest(jobs: Iterable[Job]) -> int:
    """Return a number for what a set of jobs makes switches do, as `ElectionId.jobs`. It is never 0."""
    data = sorted((job.job, data_of(job, exclude=_OWN_PATHS, exclude_defaults=True)) for job in jobs)
    text = json.dumps(data, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=_JOBS_BITS // 8).digest(), "big") or 1


class Primary(enum.Enum):
    """The primary of a switch, as its server says."""

    THIS = "this controller"
    ANOTHER = "another controller"
    NOBODY = "nobody"


@dataclass(frozen=True, slots=True)
class ServerStanding:
    """A server's answer to arbitration: its primary, and the highest election id that it has known."""

    primary: Primary
    highest: ElectionId | None = None

    @property
    def is_led(self) -> bool:
        """True if another controller serves; a primary that waits, or a shell, does not count."""
        waits = self.highest is not None and not self.highest.term
        return self.primary is Primary.ANOTHER and not waits


@dataclass(frozen=True, slots=True)
class Candidacy:
    """A controller's claim to a switch.

    Attributes:
        controller: Its own number (`new_controller`).
        jobs: The digest of its job files; 0 for one that has none, such as `checkmate remove`.
        displaces: It may take over from a primary with the same job files.
        returns: It has been the switch's primary before.
    """

    controller: int
    jobs: int = 0
    displaces: bool = False
    returns: bool = False

    def bid(self, standing: ServerStanding) -> ElectionId | None:
        """Return the election id to become primary with, or `None` if another controller is to stay."""
        highest = standing.highest
        if highest is not None and highest.jobs:
            has_same_jobs, is_own_id = highest.jobs == self.jobs, highest.controller == self.controller
            # Its own is of a connection that has broken, and that the server has not given up yet.
            if standing.is_led and not (has_same_jobs and (self.displaces or is_own_id)):
                return None
            if self.returns and not (has_same_jobs or is_own_id):
                return None  # another one has brought newer job files meanwhile
        elif standing.is_led:
            return None
        return ElectionId((highest.term if highest is not None else 0) + 1, self.jobs, self.controller)


class StandbyVerdict(enum.Enum):
    """The next action of a standby."""

    WAIT = "wait"
    CLAIM = "claim"
    OTHER_JOBS = "wait, because the primary has, or had, other job files"


class SwitchWatch:
    """The switches as a standby sees them, and its verdict."""

    def __init__(self, switches: Iterable[str], digest: int, earlier: Iterable[int] = ()) -> None:
        """Watch some switches.

        Args:
            switches: Their names.
            digest: The digest of its own job files.
            earlier: Digests that they had before, because they may change while a primary ends.
        """
        self._names = sorted(switches)
        self._digest, self._digests = digest, {digest, *earlier}
        self._standings: dict[str, ServerStanding | None] = {}
        self._back: set[str] = set()
        self._jobs: dict[str, int] = {}

    def see(self, switch: str, standing: ServerStanding | None) -> None:
        """Take a switch's answer; `None` if it is unreachable."""
        if standing is None or standing.is_led:
            self._back.discard(switch)
        elif self._standings.get(switch, standing) is None:
            self._back.add(switch)
        self._standings[switch] = standing
        if standing is not None and standing.highest is not None and standing.highest.jobs:
            self._jobs[switch] = standing.highest.jobs

    @property
    def reachable(self) -> list[str]:
        """The switches that can be reached, in the order in which they are claimed."""
        return [name for name in self._names if self._standings.get(name) is not None]

    @property
    def first(self) -> str | None:
        """The switch that decides: the first reachable one; `None` as long as that is not known."""
        for name in self._names:
            if name not in self._standings:
                return None
            if self._standings[name] is not None:
                return name
        return None

    @property
    def is_back(self) -> bool:
        """True if the switch that decides was away, and nobody has served it since.

        It may have lost its entries, and only the controller that served it knows the connected streams.
        """
        return self.first in self._back

    @property
    def verdict(self) -> StandbyVerdict:
        """The decision whether to claim the switches now."""
        standing = self._standings[self.first] if self.first is not None else None
        if standing is None:
            return StandbyVerdict.WAIT
        jobs = self._jobs.get(self.first or "", 0)
        if jobs and jobs not in self._digests:
            return StandbyVerdict.OTHER_JOBS
        if standing.is_led:
            return StandbyVerdict.WAIT
        # A primary that has not read the new job files yet may serve other switches of theirs.
        led = (
            self._jobs.get(name, 0)
            for name, standing in self._standings.items()
            if standing is not None and standing.is_led
        )
        return (
            StandbyVerdict.OTHER_JOBS
            if any(jobs not in (0, self._digest) for jobs in led)
            else StandbyVerdict.CLAIM
        )


def earlier_switches(name: str, names: Iterable[str]) -> Sequence[str]:
    """Return the switches that are claimed before one."""
    return [earlier for earlier in sorted(names) if earlier < name]
