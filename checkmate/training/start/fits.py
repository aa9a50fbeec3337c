"""Checks, before anything is installed, that stored state fits the script and job that resume from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from checkmate import state
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.record.capture import Watched
from checkmate.training.record.scheduler import class_of
from checkmate.training.start.install import InstallError, part_of
from checkmate.training.start.membership import Membership
from checkmate.wording import counted

_AFTER: Final = "To continue with another one, create it after restore, and pass it to checkmate.protect"
_AS_IT_WAS: Final = f"construct it as before. {_AFTER}"


def check_record(record: pb.IterationRecord, watched: Watched, place: Membership) -> None:
    """Raise `InstallError` if a record's ranks, scheduler or scaler are not like the script's.

    A record without parts, from before the first iteration, fits anything.
    """
    if not record.parts:
        return
    check_ranks(len(record.parts), place)
    step = part_of(record, 0).step
    scheduler, scaler = (state.loads(data) if data else None for data in (step.scheduler, step.scaler))
    check_scheduler(watched.scheduler, scheduler, step.scheduler_class)
    check_scaler(watched.scaler, scaler)


def check_ranks(stored: int, place: Membership) -> None:
    """Raise `InstallError` if the state has another number of ranks than the job's DP group."""
    if stored != place.ranks:
        raise InstallError(
            f"the state has {counted(stored, 'rank')} in DP group {place.group}, but the job now has "
            f"{place.ranks}. Random generators and extra() belong to single ranks: start the same number of "
            "ranks, or pass fresh=True to start from iteration 0"
        )


def check_scheduler(ours: Any, stored: Mapping[str, Any] | None, stored_class: str = "") -> None:
    """Raise `InstallError` if the script's scheduler is of another kind than the stored one.

    `stored_class` is `class_of` the stored one. If the classes are equal, either state may have additional
    keys, because some schedulers add keys as they step. If the class is unknown, all keys must be equal.
    """
    mine = class_of(ours)
    if stored is None:
        if ours is None:
            return
        raise InstallError(
            f"the state has no scheduler, but the script has {_a(mine)}, which would begin in the middle of "
            f"the run. {_AFTER}"
        )
    if ours is None:
        which = f", {_a(stored_class)}" if stored_class else ""
        raise InstallError(f"the state has a scheduler{which}: pass scheduler= to checkmate.restore")
    if stored_class and stored_class != mine:
        raise InstallError(
            f"the state's scheduler is {_a(stored_class)}, but the script's is {_a(mine)}: {_AS_IT_WAS}"
        )
    theirs, own = set(_keys(stored)), set(_keys(ours.state_dict()))
    fits = theirs <= own or own <= theirs if stored_class else theirs == own
    if not fits:
        raise InstallError(
            f"the state's {stored_class or 'scheduler'} has {_listed(theirs - own)}, and the script's "
            f"{mine} has {_listed(own - theirs)}: {_AS_IT_WAS}"
        )


def check_scaler(ours: Any, stored: Mapping[str, Any] | None) -> None:
    """Raise `InstallError` if only one of the scalers is enabled; a disabled one has an empty state."""
    own = None if ours is None else ours.state_dict()
    if stored and not own:
        raise InstallError("the state has an enabled scaler: pass an enabled scaler= to checkmate.restore")
    if own and not stored:
        raise InstallError(f"the state has no enabled scaler, but the script has one: {_AS_IT_WAS}")
    if own and stored and own.keys() != stored.keys():
        raise InstallError(
            f"the state's scaler has {_listed(stored.keys() - own.keys())}, and the script's "
            f"{type(ours).__name__} has {_listed(own.keys() - stored.keys())}: {_AS_IT_WAS}"
        )


def _keys(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of a scheduler's state, and of the schedulers in it."""
    for key, value in found.items():
        yield key
        if key == "_schedulers":
            for number, one in enumerate(value):
                yield from (f"{key}[{number}].{name}" for name in _keys(one))


def _listed(keys: set[str]) -> str:
    return ", ".join(sorted(keys)) or "no other keys"


def _a(name: str) -> str:
    vowel = name[:1] in "AEIOU" and not name.startswith("One")
    return f"an {name}" if vowel else f"a {name}"
