"""Shadow nodes whose state is of another mesh than the job's, or other ranks, groups or shards. Pure."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

from checkmate.base.wording import at_iteration, counted
from checkmate.job.partial import present_of, with_present, with_replicas
from checkmate.job.schema import NO_ADDRESS, DpGroup, Job, Mesh, Rank
from checkmate.nodes.standing import Answers, beginning_of, counted_holds, newest_beginnings, node_name
from checkmate.rpc import shadow_pb2 as pb

RESHARDING: Final = (
    "To go on with other ranks, copy the job file to the hosts of all shadow nodes, too: they read it again "
    "by themselves, and training resumes from what they hold"
)
BY_DISK: Final = (
    "To go on nevertheless, save the state with `checkmate consolidate`, with the job file as it was then; "
    "start the shadow nodes again; and specify restore(..., checkpoints=)"
)
_MESH: Final = tuple(field.name for field in fields(Mesh))
_MAX_SHOWN: Final = 8
"""The number of ranks, nodes or replicas that a message names."""


class OtherRanks(RuntimeError):
    """The nodes' state is whole, but of other ranks. No older state may take its place."""


def job_ranks(job: Job) -> pb.JobRanks:
    """Return what a job's shadow nodes, and its trainers, tell each other about its ranks."""
    mesh = {} if job.mesh is None else {name: getattr(job.mesh, name) for name in _MESH}
    groups = (
        pb.GroupRanks(
            ranks=[rank.rank for rank in group.ranks],
            hosts=[rank.host or "" for rank in group.ranks],
            shadow_nodes=job.shadow_list(number),
        )
        for number, group in enumerate(job.dp_groups)
    )
    return pb.JobRanks(mesh=mesh, groups=groups, replicas=job.replicas, present=present_of(job))


def ranks_digest(ranks: pb.JobRanks) -> bytes:
    """Return 16 bytes that are the same for job files whose ranks train the same, with the same holders."""
    groups = [[list(group.ranks), list(group.shadow_nodes)] for group in ranks.groups]
    data = json.dumps([sorted(ranks.mesh.items()), groups, list(ranks.present), _replicas(ranks)])
    return hashlib.blake2b(data.encode(), digest_size=16).digest()


def job_of(job: Job, ranks: pb.JobRanks) -> Job:
    """Return a job as it is with other ranks, which its nodes have been told.

    It has what the nodes' state depends on: mesh, groups, hosts and holders, and no addresses of ranks.

    Raises:
        OtherRanks: A node that holds a part of that state is not in the job any more.
    """
    nodes = {node.id for node in job.shadow_nodes}
    if not _is_of_a_job(ranks):
        raise OtherRanks("a shadow node holds the state of ranks that no job has")
    for group in ranks.groups:
        if gone := sorted(set(group.shadow_nodes) - nodes):
            raise OtherRanks(
                f"shadow node {gone[0]}, which holds a part of the state, is not in the job file any more: "
                "add it again, and leave it out at a later start"
            )
    groups = tuple(
        DpGroup(
            ranks=tuple(
                Rank(rank=rank, host=host or None, ip=NO_ADDRESS, mac="", switch="", port=0)
                for rank, host in zip(group.ranks, group.hosts, strict=True)
            ),
            shadow_nodes=tuple(group.shadow_nodes),
        )
        for group in ranks.groups
    )
    mesh = Mesh(**dict(ranks.mesh)) if ranks.mesh else None
    present = tuple(ranks.present)
    return with_present(job, present, mesh=mesh, dp_groups=groups, replicas=ranks.replicas or 1)


def _is_of_a_job(ranks: pb.JobRanks) -> bool:
    """Return whether a job can have these ranks, which a node has told: nothing is made for others."""
    numbers = [rank for group in ranks.groups for rank in group.ranks]
    present = list(ranks.present)
    if not numbers or len(set(numbers)) < len(numbers) or present != sorted(set(present)):
        return False
    if ranks.mesh and (set(ranks.mesh) != set(_MESH) or math.prod(ranks.mesh.values()) != len(numbers)):
        return False
    return all(
        len(group.hosts) == len(group.ranks)
        and len(group.ranks) == (len(present) or len(group.ranks))
        and _replicas(ranks) <= len(group.shadow_nodes) == len(set(group.shadow_nodes))
        for group in ranks.groups
    )


def is_part_of(whole: Job, ranks: pb.JobRanks) -> bool:
    """Return whether these ranks are those of a job, or of as many of its replicas as it goes on with."""
    present, most = list(ranks.present), len(whole.dp_groups[0].ranks)
    if not present:
        return difference(job_ranks(whole), ranks) is None
    if whole.min_replicas is None or not whole.min_replicas <= len(present) < most:
        return False
    if present != sorted(set(present)) or present[-1] >= most:
        return False
    return difference(job_ranks(with_replicas(whole, present)), ranks) is None


def followed_job(job: Job, answers: Answers) -> Job:
    """Return the job of a file as its nodes follow it now: with fewer replicas, if some are away."""
    for answer in answers.values():
        ranks = pb.JobRanks() if isinstance(answer, str) else answer.job_ranks
        if ranks.present and is_part_of(job, ranks):
            return with_replicas(job, ranks.present)
    return job


@dataclass(frozen=True)
class HeldState:
    """A job with some ranks, and what its nodes hold of it."""

    job: Job
    ranks: pb.JobRanks
    is_former: bool
    """Whether these are not the job's present ranks."""
    answers: Answers
    """Each node's status of that, or why there is none."""

    @property
    def digest(self) -> bytes:
        """The digest by which nodes know what is asked for."""
        return ranks_digest(self.ranks)

    def select(self, answers: Answers) -> Answers:
        """Return what later answers of nodes say of these ranks."""
        return _answers_of(self.ranks, answers)


def held_states(job: Job, answers: Answers) -> list[HeldState]:
    """Return what nodes hold of a job with its present ranks, and with others. The newest state comes first.

    Raises:
        OtherRanks: A node that holds a part of a state is not in the job any more.
    """
    own_ranks, tables = job_ranks(job), dict[bytes, pb.JobRanks]()
    holds: dict[bytes, list[pb.HoldStatus]] = {b"": []}
    for answer in answers.values():
        for status in _statuses(answer):
            is_own = not status.job_ranks.groups or difference(status.job_ranks, own_ranks) is None
            digest = b"" if is_own else ranks_digest(status.job_ranks)
            counted_here = [hold for _, hold in counted_holds({0: status})]
            holds.setdefault(digest, []).extend(counted_here)
            if is_own and status.job_ranks.groups:
                own_ranks = status.job_ranks  # it may have a mesh where ours lists groups
            if digest and counted_here:
                tables.setdefault(digest, status.job_ranks)
    states = {b"": HeldState(job, own_ranks, False, _answers_of(own_ranks, answers))}
    for digest, ranks in tables.items():
        states[digest] = HeldState(job_of(job, ranks), ranks, True, _answers_of(ranks, answers))
    return [states[digest] for digest in _by_age(holds) if digest in states]


def _by_age(holds: Mapping[bytes, Sequence[pb.HoldStatus]]) -> list[bytes]:
    """Return the digests of ranks in the order of their starts of training, the newest first.

    Incarnations wrap, so that one is newer only among those that are there. Ranks without holds come last.
    """
    remaining, order = dict(holds), list[bytes]()
    while remaining:
        newest = set(newest_beginnings(hold for of_ranks in remaining.values() for hold in of_ranks))
        following = [
            digest
            for digest, of_ranks in remaining.items()
            if not newest or not newest.isdisjoint(map(beginning_of, of_ranks))
        ]
        order += following
        for digest in following:
            del remaining[digest]
    return order


def _statuses(answer: pb.NodeStatus | str) -> list[pb.NodeStatus]:
    """Return what a node says of its present ranks, and of former ones."""
    if isinstance(answer, str):
        return []
    if not answer.HasField("former"):
        return [answer]
    former = pb.NodeStatus(
        node=answer.node,
        job_ranks=answer.former.job_ranks,
        holds=answer.former.holds,
        discarded=answer.discarded,
        fenced=True,
    )
    return [answer, former]


def _answers_of(ranks: pb.JobRanks, answers: Answers) -> Answers:
    """Return what nodes say of some ranks."""
    return {node: _status_of(ranks, answer) for node, answer in answers.items()}


def _status_of(ranks: pb.JobRanks, answer: pb.NodeStatus | str) -> pb.NodeStatus | str:
    """Return what a node says of some ranks, or that it holds nothing of them."""
    if isinstance(answer, str):
        return answer
    for status in _statuses(answer):
        if not status.job_ranks.groups or difference(status.job_ranks, ranks) is None:
            return status
    return "holds nothing of these ranks"


def other_files(job: Job, answers: Answers) -> str:
    """Return which node that holds something has a job file without this job's ranks now, or "".

    Only those with the newest run count: one that was away may come back with an older run, of a job file
    that was replaced meanwhile.
    """
    own_ranks = job_ranks(job)
    holds = [
        (node, hold)
        for node, answer in answers.items()
        for status in _statuses(answer)
        for hold in status.holds
    ]
    newest_run = max((hold.generation for _, hold in holds), default=0)
    for node in sorted({node for node, hold in holds if hold.generation == newest_run}):
        answer = answers[node]
        assert isinstance(answer, pb.NodeStatus)
        present = answer.next_ranks if answer.HasField("next_ranks") else answer.job_ranks
        if not present.groups or (sizes := difference(present, own_ranks)) is None:
            continue
        is_partial = bool(present.present or own_ranks.present)
        if job.min_replicas is not None and is_partial and _same_whole(present, own_ranks):
            continue
        newest = max((hold.stepped for _, hold in holds), default=-1)
        return (
            f"{node_name(job, node)} holds a state {at_iteration(newest)}, and its job file has {sizes[0]}, "
            f"but the job now has {sizes[1]}. {answer.next_trouble or RESHARDING}"
        )
    return ""


def _same_whole(first: pb.JobRanks, second: pb.JobRanks) -> bool:
    """Return whether two tables may be of one job's replicas, of which others are there."""
    meshes = [
        {name: size for name, size in ranks.mesh.items() if name != "dp_replicate"}
        for ranks in (first, second)
    ]
    shards = [[len(group.shadow_nodes) for group in ranks.groups] for ranks in (first, second)]
    return meshes[0] == meshes[1] and shards[0] == shards[1]


def other_ranks(job: Job, answers: Answers) -> str:
    """Return which node holds something of a job with another mesh or other DP groups, or "".

    `answers` are those of the nodes. Only those with the newest run count: one that was away may come back
    with an older run, of a job file that was replaced meanwhile.
    """
    own_ranks = job_ranks(job)
    holds = counted_holds(answers)
    newest_run = max((hold.generation for _, hold in holds), default=0)
    for node in sorted({node for node, hold in holds if hold.generation == newest_run}):
        answer = answers[node]
        if isinstance(answer, str) or not answer.job_ranks.groups:
            continue
        if sizes := difference(answer.job_ranks, own_ranks):
            newest = max((hold.stepped for hold in answer.holds), default=-1)
            return (
                f"{node_name(job, node)} holds a state {at_iteration(newest)}, and its job file has "
                f"{sizes[0]}, but the job now has {sizes[1]}"
            )
    return ""


def difference(old_ranks: pb.JobRanks, new_ranks: pb.JobRanks) -> tuple[str, str] | None:
    """Return, in words, what two job files have instead of each other; `None` if ranks train the same.

    A job with a mesh, and one that lists the DP groups of that mesh, do not differ. Those with other holders
    of a shard do: a node that did not follow would lack what it should hold.
    """
    if list(old_ranks.present) != list(new_ranks.present):
        return _present(old_ranks), _present(new_ranks)
    old, new = dict(old_ranks.mesh), dict(new_ranks.mesh)
    names = [name for name in old.keys() | new.keys() if old.get(name) != new.get(name)]
    if old and new and names:
        return _mesh(old, names), _mesh(new, names)
    if [len(group.ranks) for group in old_ranks.groups] != [len(group.ranks) for group in new_ranks.groups]:
        return _sizes(old_ranks), _sizes(new_ranks)
    for number, (before, now) in enumerate(zip(old_ranks.groups, new_ranks.groups, strict=True)):
        if list(before.ranks) != list(now.ranks):
            return (
                f"DP group {number} with ranks {_numbers(before.ranks)}",
                f"it with ranks {_numbers(now.ranks)}",
            )
        shards = [len(group.shadow_nodes) for group in (before, now)]
        if shards[0] != shards[1]:
            return (
                f"DP group {number} in {counted(shards[0], 'shard')}",
                f"it in {counted(shards[1], 'shard')}",
            )
        if list(before.shadow_nodes) != list(now.shadow_nodes):
            return (
                f"DP group {number} on shadow nodes {_numbers(before.shadow_nodes)}",
                f"it on shadow nodes {_numbers(now.shadow_nodes)}",
            )
    replicas = [_replicas(ranks) for ranks in (old_ranks, new_ranks)]
    if replicas[0] != replicas[1]:
        before_words, now_words = (f"{counted(count, 'holder')} of each shard" for count in replicas)
        return before_words, now_words
    return None


def _replicas(ranks: pb.JobRanks) -> int:
    return max(ranks.replicas, 1)


def _present(job_ranks: pb.JobRanks) -> str:
    """Return which replicas are there."""
    if not job_ranks.present:
        sizes = {len(group.ranks) for group in job_ranks.groups}
        return f"all {max(sizes, default=0)} replicas"
    return f"{counted(len(job_ranks.present), 'replica')} ({_numbers(job_ranks.present)})"


def _mesh(mesh: Mapping[str, int], names: list[str]) -> str:
    dimensions = [name for name in _MESH if name in names]
    return f"a mesh with {' and '.join(f'{name} {mesh.get(name, 0)}' for name in dimensions)}"


def _sizes(job_ranks: pb.JobRanks) -> str:
    *smaller, largest = sorted({len(group.ranks) for group in job_ranks.groups}) or [0]
    sizes = " and ".join([*map(str, smaller), counted(largest, "rank")])
    return f"{counted(len(job_ranks.groups), 'DP group')} of {sizes}"


def _numbers(numbers: Sequence[int]) -> str:
    more = ", ..." if len(numbers) > _MAX_SHOWN else ""
    return ", ".join(map(str, numbers[:_MAX_SHOWN])) + more
