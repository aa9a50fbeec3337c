"""Statuses of shadow nodes: one hold, one node, and hypothesis strategies for all nodes of a job."""

from __future__ import annotations

from hypothesis import strategies as st

from checkmate.job.schema import Job
from checkmate.nodes.standing import Answers, Shard, holders_of, newest_incarnation
from checkmate.rpc import shadow_pb2 as pb
from testbed.jobs import job

JOB = job(nodes=3, replicas=2, ranks=2)
SHARDS = list(holders_of(JOB))


def hold(
    shard: Shard = (0, 0),
    stepped: int = 5,
    in_full: int = 6,
    *,
    incarnation: int = 3,
    first: int = 0,
    run: str = "a",
    start: bytes = b"",
    continues: bytes = b"",
    generation: int = 0,
    seeded: bool = True,
    live: bool = True,
    offered: bool = True,
    doubtful: bool = False,
    lacks: int = 0,
    last: bool = False,
    trouble: str = "",
    streams: int = 0,
    connected: int = 0,
) -> pb.HoldStatus:
    return pb.HoldStatus(
        shard=pb.Shard(group=shard[0], shard=shard[1]),
        incarnation=incarnation,
        stepped=stepped,
        in_full=in_full,
        seeded=seeded,
        live=live,
        offered=offered,
        run=run,
        start=start,
        continues=continues,
        generation=generation,
        first_iteration=first,
        doubtful=doubtful,
        lacks_buffers=lacks,
        last=last,
        trouble=trouble,
        streams=streams,
        connected=connected,
    )


def node(number: int, *holds: pb.HoldStatus) -> pb.NodeStatus:
    return pb.NodeStatus(
        node=number,
        holds=holds,
        holds_nothing=not holds,
        incarnation=max((hold.incarnation for hold in holds), default=0),
        generation=max((hold.generation for hold in holds), default=0),
    )


Start = tuple[int, str, int, bytes, int]
STARTS: list[Start] = [
    (3, "a", 0, b"1", 1),
    (3, "a", 0, b"2", 1),
    (3, "a", 7, b"3", 1),
    (3, "b", 0, b"4", 1),
    (2, "a", 0, b"5", 1),
    (130, "b", 0, b"6", 1),
    (4, "a", 7, b"7", 1),
    (1, "c", 0, b"8", 2),
]
"""Incarnation, run, first iteration, start, generation.

First those with the same number, then older and newer ones; the last is the newest only by its generation.
"""

_USUALLY = [True] * 9 + [False]


@st.composite
def holds(draw: st.DrawFn, shard: Shard, starts: list[Start], around: int) -> pb.HoldStatus:
    """Return a hold near an iteration, which is usually valid."""
    stepped = max(around + draw(st.sampled_from([0, 0, 0, 1, 1, -1, 3])), -1)
    incarnation, run, first, start, generation = draw(st.sampled_from(starts))
    return hold(
        shard,
        stepped,
        stepped + draw(st.integers(0, 2)),
        incarnation=incarnation,
        run=run,
        first=first,
        start=start,
        continues=b"1" if first else start,
        generation=generation,
        seeded=draw(st.sampled_from(_USUALLY)),
        live=draw(st.sampled_from(_USUALLY)),
        offered=draw(st.sampled_from(_USUALLY)),
        doubtful=not draw(st.sampled_from(_USUALLY)),
        lacks=draw(st.sampled_from([0, 0, 0, 1])),
        last=draw(st.booleans()),
    )


@st.composite
def answers(draw: st.DrawFn, job: Job = JOB) -> Answers:
    """Return the answers of all nodes of a job, with few starts, so that shards are often available."""
    starts = draw(st.lists(st.sampled_from(STARTS), min_size=1, max_size=2))
    around = draw(st.integers(-1, 7))
    answer_by_node: dict[int, pb.NodeStatus | str] = {}
    for shadow_node in job.shadow_nodes:
        if not draw(st.sampled_from(_USUALLY)):
            answer_by_node[shadow_node.id] = "can't be reached"
            continue
        has = [shard for shard in holders_of(job) if draw(st.sampled_from(_USUALLY))]
        status = node(shadow_node.id, *(draw(holds(shard, starts, around)) for shard in has))
        status.fenced = draw(st.booleans())
        answer_by_node[shadow_node.id] = status
    return answer_by_node


def hold_of(answers_by_node: Answers, number: int, shard: Shard) -> pb.HoldStatus:
    """Return a node's status of a shard."""
    answer = answers_by_node[number]
    assert isinstance(answer, pb.NodeStatus)
    (hold,) = [
        candidate for candidate in answer.holds if (candidate.shard.group, candidate.shard.shard) == shard
    ]
    return hold


def newest(answers_by_node: Answers) -> tuple[int, int | None]:
    """Return the generation and incarnation that count."""
    generation = max((hold.generation for hold in all_holds(answers_by_node)), default=0)
    incarnations = [hold.incarnation for hold in all_holds(answers_by_node) if hold.generation == generation]
    return generation, newest_incarnation(incarnations)


def all_holds(answers_by_node: Answers) -> list[pb.HoldStatus]:
    return [
        hold for answer in answers_by_node.values() if not isinstance(answer, str) for hold in answer.holds
    ]
