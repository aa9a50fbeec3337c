"""Finds shadow nodes whose state is of another number of ranks or DP groups than the job's. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from checkmate.job.schema import Job
from checkmate.nodes.standing import node_name
from checkmate.rpc import shadow_pb2 as pb
from checkmate.wording import at_iteration, counted

RESHARDING: Final = (
    "To continue with other ranks, save the state with `checkmate consolidate`, with the job file as it was "
    "then; start the shadow nodes again with the new one; and specify restore(..., checkpoints=)"
)


def other_ranks(job: Job, answers: Mapping[int, pb.NodeStatus]) -> str:
    """Return which node holds something of a job with other DP groups, or "".

    `answers` are those of the nodes. A node that holds nothing does not count.
    """
    ours = [len(group.ranks) for group in job.dp_groups]
    for node, answer in sorted(answers.items()):
        theirs = list(answer.ranks)
        if theirs and theirs != ours and not answer.holds_nothing:
            newest = max((hold.stepped for hold in answer.holds), default=-1)
            return (
                f"{node_name(job, node)} holds a state {at_iteration(newest)}, and its job file has "
                f"{_groups(theirs)}, but the job now has {_groups(ours)}"
            )
    return ""


def _groups(ranks: Sequence[int]) -> str:
    sizes = " and ".join(map(str, sorted(set(ranks))))
    return f"{counted(len(ranks), 'DP group')} of {sizes} ranks"
