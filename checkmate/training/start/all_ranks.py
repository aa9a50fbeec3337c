"""The steps that all ranks take together at a restart, so that all go on or none does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from checkmate.base.wording import in_ranges
from checkmate.consolidate.disk import DiskError
from checkmate.errors import CheckmateError
from checkmate.nodes.other_ranks import OtherRanks
from checkmate.state import StateError
from checkmate.training.start import exchange
from checkmate.training.start.exchange import ExchangeError
from checkmate.training.start.from_nodes import FetchError
from checkmate.training.start.install import InstallError
from checkmate.training.start.places import Place

_log: Final = logging.getLogger("checkmate")

ANEW: Final = "`checkmate reset JOB` has the next start begin with iteration 0"
TRAINING_ENDED: Final = f"training had ended with iteration {{}}: {ANEW}"


class RestoreError(CheckmateError, RuntimeError):
    """No complete state is available to resume from. The message names the shards and nodes concerned."""


class Decision(Protocol):
    """A decision of rank 0 for all ranks."""

    def message(self) -> Any:
        """Return it as JSON can express it."""


A = TypeVar("A", bound=Decision)


class RankOutcome(NamedTuple):
    """The result of this rank's work, and its status on all ranks."""

    result: Any
    trouble: str
    """The errors of all ranks, or ""."""
    unread: bool
    """Whether all of these are of what was read, so that another way of reading it may help."""


def log_once(place: Place, message: str) -> None:
    """Log on one rank what all know."""
    if place.rank == 0:
        _log.info("%s", message)


def agree(place: Place, make: Callable[[], A], from_message: Callable[[Any], A], *, subject: str) -> A:
    """Return on all ranks what `make` returns on rank 0; raise `RestoreError` on all ranks if it raises.

    Args:
        place: This rank's place.
        make: Decides, on rank 0 alone.
        from_message: Returns the decision of a `message`. It raises `ValueError` if that is malformed.
        subject: The decision's name in errors.
    """
    message: Any = None
    if place.rank == 0:
        try:
            message = {"made": make().message()}
        except Exception as error:  # noqa: BLE001 - others would wait for ever
            message = {"trouble": exchange.shortened(f"{place.name}: {type(error).__name__}: {error}")}
    answer = exchange.broadcast(message, 0, name_of=place.name_of)
    if not isinstance(answer, dict) or answer.keys() not in ({"made"}, {"trouble"}):
        raise ExchangeError("rank 0 sent neither a plan nor an error")
    if "trouble" in answer:
        raise RestoreError(str(answer["trouble"]))
    try:
        return from_message(answer["made"])
    except ValueError as error:
        raise ExchangeError(f"rank 0 sent a malformed {subject}: {error}") from None


def run_on_all_ranks(place: Place, do: Callable[[], Any]) -> RankOutcome:
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
    outcomes = exchange.gather([trouble and exchange.shortened(trouble), kind], name_of=place.name_of)
    failures = {rank: (str(error), kind) for rank, (error, kind) in enumerate(outcomes) if error}
    if final := [error for error, kind in failures.values() if kind == "final"]:
        raise RestoreError(final[0])
    errors = {rank: error for rank, (error, _) in failures.items()}
    return RankOutcome(
        result, _grouped(errors, place), all(kind == "unread" for _, kind in failures.values())
    )


def _grouped(errors: Mapping[int, str], place: Place) -> str:
    """Return the errors of ranks in words, each cause once."""
    ranks_by_cause: dict[str, list[int]] = {}
    for rank, error in errors.items():
        ranks_by_cause.setdefault(error.removeprefix(f"{place.name_of(rank)}: "), []).append(rank)
    return "; ".join(
        errors[ranks[0]] if len(ranks) == 1 else f"ranks {in_ranges(ranks)}: {cause}"
        for cause, ranks in ranks_by_cause.items()
    )
