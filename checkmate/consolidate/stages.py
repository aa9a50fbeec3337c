"""Finds the DP groups that train one model, or one stage of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from checkmate.job.mesh import coordinates
from checkmate.job.schema import Job
from checkmate.wire.layout import Layout
from checkmate.wire.shares import Share


def stages(job: Job, layouts: Sequence[Layout]) -> list[list[int]]:
    """Return the DP groups of each stage, in order of their first ones.

    The DP groups of a sharded model are one stage: those of one `pp` in the job's mesh, or else those that
    have chunks of the same parameter. So are those with shares of a model, on the same hosts. Each other DP
    group is a stage.
    """
    found: list[list[int]] = []
    of_mesh: dict[int, list[int]] = {}
    of_name: dict[str, list[int]] = {}
    for group, layout in enumerate(layouts):
        names = [parameter.name for parameter in layout.parameters if parameter.whole]
        if layout.share.count > 1:
            stage = next((one for one in found if _continues(job, layouts, one, group)), [])
        elif names and job.mesh is not None:
            stage = of_mesh.setdefault(coordinates(job, group)["pp"], [])
        else:
            stage = next((of_name[name] for name in names if name in of_name), [])
        of_name.update(dict.fromkeys(names, stage))
        if not stage:
            found.append(stage)
        stage.append(group)
    return found


def _continues(job: Job, layouts: Sequence[Layout], stage: Sequence[int], group: int) -> bool:
    """Return whether a DP group has the next share of a model, of which a stage's groups have the first."""
    first, own = layouts[stage[0]], layouts[group]
    hosts = [{rank.host for rank in job.dp_groups[one].ranks} for one in (stage[0], group)]
    next_share = Share(len(stage), first.share.count)
    return own.share == next_share and own.parameters == first.parameters and hosts[0] == hosts[1]


def stage_of(job: Job, group: int, *, sharded: bool, together: Sequence[int] = ()) -> int:
    """Return the number of a DP group's stage.

    Without a mesh, all groups of a sharded model are one; if groups train a model `together`, all stages have
    as many groups.
    """
    if job.mesh is None and together:
        return min(together) // len(together)
    return coordinates(job, group).get("pp", 0) if sharded or together else group
