"""Whether what is stored fits the script and job that resume from it: told before anything is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from checkmate import state
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.record.capture import Watched
from checkmate.training.record.scheduler import class_of
from checkmate.training.start.install import InstallError
from checkmate.training.start.membership import Membership
from checkmate.wording import counted

_AFTER: Final = "To go on with another one, make it after restore, and give it to checkmate.protect"
_AS_IT_WAS: Final = f"build it as it was. {_AFTER}"


def check_record(record: pb.IterationRecord, watched: Watched, place: Membership) -> None:
    """`InstallError` if a record is of other ranks, another scheduler or another scaler than the script's.

    A record without parts, from before the first iteration, fits anything.
    """
    if not record.parts:
        return
    check_ranks(len(record.parts), place)
    step = next((part.step for part in record.parts if part.position == 0), pb.Step())
    scheduler, scaler = (state.loads(data) if data else None for data in (step.scheduler, step.scaler))
    check_scheduler(watched.scheduler, scheduler, step.scheduler_class)
    check_scaler(watched.scaler, scaler)


def check_ranks(stored: int, place: Membership) -> None:
    """`InstallError` if a state is of another number of ranks than the job's DP group has now."""
    if stored != place.ranks:
        raise InstallError(
            f"the state is of {counted(stored, 'rank')} in DP group {place.group}, and the job has "
            f"{place.ranks} now. Random generators and extra() belong to single ranks: start as many, or "
            "begin anew with fresh=True"
        )


def check_scheduler(ours: Any, stored: Mapping[str, Any] | None, stored_class: str = "") -> None:
    """`InstallError` if the script's scheduler isn't of the stored one's kind. `stored_class`: as `class_of`.

    Of one class, a state may have what a scheduler gets only as it steps. Without a class all keys count.
    """
    mine = class_of(ours)
    if stored is None:
        if ours is None:
            return
        raise InstallError(
            f"the state has no scheduler, and the script {_a(mine)}, which would begin in the middle of the "
            f"run. {_AFTER}"
        )
    if ours is None:
        which = f", {_a(stored_class)}" if stored_class else ""
        raise InstallError(f"the state has a scheduler{which}: give checkmate.restore its scheduler=")
    if stored_class and stored_class != mine:
        raise InstallError(
            f"the state's scheduler is {_a(stored_class)}, and the script's {_a(mine)}: {_AS_IT_WAS}"
        )
    theirs, own = set(_keys(stored)), set(_keys(ours.state_dict()))
    fits = theirs <= own or own <= theirs if stored_class else theirs == own
    if not fits:
        raise InstallError(
            f"the state's {stored_class or 'scheduler'} has {_listed(theirs - own)}, and the script's "
            f"{mine} {_listed(own - theirs)}: {_AS_IT_WAS}"
        )


def check_scaler(ours: Any, stored: Mapping[str, Any] | None) -> None:
    """`InstallError` if one scaler is in use and the other is not; a disabled one has an empty state."""
    own = None if ours is None else ours.state_dict()
    if stored and not own:
        raise InstallError("the state has a scaler in use: give checkmate.restore its scaler=, enabled")
    if own and not stored:
        raise InstallError(f"the state has no scaler in use, and the script has one: {_AS_IT_WAS}")
    if own and stored and own.keys() != stored.keys():
        raise InstallError(
            f"the state's scaler has {_listed(stored.keys() - own.keys())}, and the script's "
            f"{type(ours).__name__} {_listed(own.keys() - stored.keys())}: {_AS_IT_WAS}"
        )


def _keys(found: Mapping[str, Any]) -> Iterator[str]:
    """Of a scheduler's state, those of schedulers in it as well."""
    for key, value in found.items():
        yield key
        if key == "_schedulers":
            for number, one in enumerate(value):
                yield from (f"{key}[{number}].{name}" for name in _keys(one))


def _listed(keys: set[str]) -> str:
    return ", ".join(sorted(keys)) or "nothing more"


def _a(name: str) -> str:
    vowel = name[:1] in "AEIOU" and not name.startswith("One")
    return f"an {name}" if vowel else f"a {name}"
