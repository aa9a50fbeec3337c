"""What all ranks do at a restart, so that all go on or none does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol, Self, TypeVar

from checkmate.consolidate.disk import DiskError
from checkmate.errors import CheckmateError
from checkmate.nodes.other_ranks import OtherRanks
from checkmate.state import StateError
from checkmate.training.start import exchange
from checkmate.training.start.exchange import ExchangeError
from checkmate.training.start.fetch import FetchError
from checkmate.training.start.install import InstallError
from checkmate.training.start.membership import Membership

_log: Final = logging.getLogger("checkmate")

ANEW: Final = "`checkmate reset JOB` has the next start begin with iteration 0"
ENDED: Final = f"training had ended with iteration {{}}: {ANEW}"


class RestoreError(CheckmateError, RuntimeError):
    """No complete state is available to resume from. The message names the shards and nodes concerned."""


class FirstRanksFinding(Protocol):
    """What rank 0 finds out for all."""

    def message(self) -> Any:
        """Return it as JSON can express it."""

    @classmethod
    def of_message(cls, message: Any) -> Self:
        """Return what `message` has made. Raise `ValueError` if it is malformed."""


A = TypeVar("A", bound=FirstRanksFinding)


class RankOutcome(NamedTuple):
    """What this rank's work had for a result, and how it went on all ranks."""

    result: Any
    trouble: str
    """The errors of all ranks, or ""."""
    unread: bool
    """Whether all of these are of what was read, so that another way of reading it may help."""


def log_once(place: Membership, message: str) -> None:
    """Log on one rank what all know."""
    if place.rank == 0:
        _log.info("%s", message)


def agree(place: Membership, kind: type[A], make: Callable[[], A]) -> A:
    """Return on all ranks what `make` returns on rank 0; raise `RestoreError` on all ranks if it raises."""
    message: Any = None
    if place.rank == 0:
        try:
            message = {"made": make().message()}
        except Exception as error:  # noqa: BLE001 - others would wait for ever
            message = {"trouble": exchange.shortened(f"{place.name}: {type(error).__name__}: {error}")}
    told = exchange.broadcast(message, 0, named=place.named)
    if not isinstance(told, dict) or told.keys() not in ({"made"}, {"trouble"}):
        raise ExchangeError("rank 0 sent neither a plan nor an error")
    if "trouble" in told:
        raise RestoreError(str(told["trouble"]))
    try:
        return kind.of_message(told["made"])
    except ValueError as error:
        raise ExchangeError(f"rank 0 sent a malformed {kind.__name__}: {error}") from None


def on_all(place: Membership, do: Callable[[], Any]) -> RankOutcome:
    """Do this rank's work, which must not wait for other ranks; return how it went on all ranks.

    Raise `RestoreError` on all ranks if the state of one is of other ranks: older state must not replace it.
    """
    result, trouble, kind = None, None, ""
    try:
        result = do()
    except (FetchError, ExchangeError) as error:
        trouble, kind = f"{place.name}: {error}", "unread"
    except OtherRanks as error:
        trouble, kind = f"{place.name}: {error}", "final"
    except (InstallError, DiskError, StateError, ValueError) as error:
        trouble = f"{place.name}: {error}"
    except Exception as error:  # noqa: BLE001 - a script's load_state_dict; the others would wait for ever
        _log.exception("rank %d can't install the state", place.rank)
        trouble = f"{place.name}: {type(error).__name__}: {error}"
    told = exchange.gather([trouble and exchange.shortened(trouble), kind], named=place.named)
    failed = [(str(one), kind) for one, kind in told if one]
    if final := [one for one, kind in failed if kind == "final"]:
        raise RestoreError(final[0])
    return RankOutcome(
        result, "; ".join(one for one, _ in failed), all(kind == "unread" for _, kind in failed)
    )
