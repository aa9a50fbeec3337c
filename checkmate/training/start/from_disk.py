"""Resumes all ranks from a checkpoint on disk, because the shadow nodes have no complete iteration."""

from __future__ import annotations

import logging
from typing import Any, Final

from checkmate.consolidate.stages import Trained, stages
from checkmate.training.record.capture import Watched
from checkmate.training.start import disk, exchange
from checkmate.training.start.all_ranks import ANEW, ENDED, RestoreError, log_once, on_all
from checkmate.training.start.install import restored_parts
from checkmate.training.start.membership import Membership, Start
from checkmate.training.start.on_disk import OnDisk
from checkmate.training.start.plans import RestartPlan

_log: Final = logging.getLogger("checkmate")


def resume(place: Membership, watched: Watched, plan: RestartPlan, found: OnDisk) -> tuple[Start, Any]:
    """Resume from the newest checkpoint. Only the user chooses an older one: it loses iterations."""
    path, *older = found.paths
    own = disk.trained_by(place, watched).message()
    told = exchange.gather(own if place.first else None, named=place.named)
    trained = [Trained.of_message(told[group.ranks[0].rank]) for group in place.job.dp_groups]
    groups = stages(place.job, trained)
    resumed, trouble, _ = on_all(place, lambda: disk.resume(path, place, watched, groups))
    if trouble:
        instead = f"checkpoints={str(older[0])!r} selects the one before it" if older else ""
        raise RestoreError("; ".join(filter(None, [plan.trouble, trouble, instead, ANEW])))
    record = resumed.record
    log_once(
        place, f"resumed from {path}: iteration {record.iteration + 1} comes next ({restored_parts(record)})"
    )
    if resumed.ended:
        log_once(place, ENDED.format(record.iteration))
    if resumed.other_ranks:
        _log.warning("%s: %s", path, resumed.other_ranks)
    if older:
        log_once(place, f"older checkpoints were not used: {found.passed_over}")
    return Start(plan, record.iteration + 1, record=record), resumed.extra
