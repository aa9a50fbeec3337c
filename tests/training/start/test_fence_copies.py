"""The parts of step records that nodes copy from one another: all that exist, of the same start only."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.start.fence import missing_parts

STARTS = ((4, "a", b"one"), (4, "a", b"two"), (5, "b", b"two"))
Parts = frozenset[tuple[int, int]]


def answer(node: int, start: int, parts: Iterable[tuple[int, int]], stepped: int) -> pb.NodeStatus:
    """Return the answer of a node with one hold and these parts: positions and iterations."""
    incarnation, run, name = STARTS[start]
    status = pb.NodeStatus(job="demo", node=node)
    status.holds.add(shard=pb.Shard(group=0, shard=node), stepped=stepped)
    ranges = status.parts.add(group=0, incarnation=incarnation, run=run, start=name)
    for position, iteration in sorted(parts):
        ranges.ranges.add(position=position, first=iteration, last=iteration)
    return status


def of(ranges: Iterable[pb.PartRange]) -> Parts:
    return frozenset((run.position, t) for run in ranges for t in range(run.first, run.last + 1))


some_parts = st.frozensets(st.tuples(st.integers(0, 2), st.integers(0, 6)))


@given(st.lists(st.tuples(st.integers(0, 2), some_parts, st.integers(-1, 6)), min_size=1, max_size=4))
def test_each_node_gets_what_it_lacks_and_somebody_of_its_start_has(
    nodes: list[tuple[int, Parts, int]],
) -> None:
    requests = missing_parts(answer(number, *copy) for number, copy in enumerate(nodes))
    for number, (start, parts, stepped) in enumerate(nodes):
        copies: set[tuple[int, int]] = set()
        for copy in requests.get(number, pb.CopyRequest()).wanted:
            from_start, there, _ = nodes[copy.node]
            assert (copy.parts.incarnation, copy.parts.run, copy.parts.start) == STARTS[start]
            assert from_start == start
            assert of(copy.parts.ranges) <= there
            copies |= of(copy.parts.ranges)
        everywhere = frozenset[tuple[int, int]]().union(*(p for s, p, _ in nodes if s == start))
        assert copies == {part for part in everywhere - parts if part[1] > stepped}


def test_neighbouring_iterations_are_asked_for_together() -> None:
    parts = [(position, iteration) for position in (0, 1) for iteration in range(3, 9)]
    requests = missing_parts([answer(0, 0, parts, 2), answer(1, 0, [(0, 5)], 2)])
    assert requests.keys() == {1}
    (request,) = requests[1].wanted
    assert [(r.position, r.first, r.last) for r in request.parts.ranges] == [(0, 3, 4), (0, 6, 8), (1, 3, 8)]
