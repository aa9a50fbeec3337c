"""Shadow ids on the wire: groups whose ranks share addresses are told apart by them."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from checkmate.job.boundaries import boundaries, first_shadow_ids, streams
from checkmate.job.schema import Job
from checkmate.job.validation import of_data
from testbed.jobs import job_data


def job_of(*rings: str, shadow_nodes: dict[int, list[int]] | None = None, nodes: int = 3) -> Job:
    """Return a job with a group for each ring, which is a text of hosts such as "abc"."""
    data: dict[str, Any] = job_data(nodes=nodes)
    ranks = itertools.count()
    data["dp_groups"] = [
        {"ranks": [host(name) | {"rank": next(ranks)} for name in ring]}
        | ({"shadow_nodes": shadow_nodes[number]} if shadow_nodes and number in shadow_nodes else {})
        for number, ring in enumerate(rings)
    ]
    return of_data(Job, data)


def host(name: str) -> dict[str, Any]:
    number = ord(name) - ord("a")
    at = {"ip": f"10.9.0.{number + 1}", "mac": f"02:00:00:00:09:{number:02x}"}
    return at | {"switch": "tor0", "port": 200 + number}


def test_groups_on_the_same_hosts_follow_each_other() -> None:
    job = job_of("abc", "abc", "abc", shadow_nodes={0: [0], 1: [1, 2]})
    assert first_shadow_ids(job) == (0, 1, 3)
    assert {stream.shadow_id for stream in streams(job) if stream.boundary.group == 2} == {3, 4, 5}
    assert {stream.shard for stream in streams(job) if stream.boundary.group == 2} == {0, 1, 2}


def test_groups_with_other_addresses_begin_with_0() -> None:
    assert first_shadow_ids(job_of("ab", "cd", "ac")) == (0, 0, 0)
    assert first_shadow_ids(job_of("abc", "cba")) == (0, 0), "other directions, so other addresses"


def test_one_common_boundary_suffices() -> None:
    assert first_shadow_ids(job_of("abc", "abd")) == (0, 3), "the first hop"
    assert first_shadow_ids(job_of("abc", "adc")) == (0, 3), "the last hop"
    assert first_shadow_ids(job_of("ab", "ba")) == (0, 3), "the first hop is the other's last"


@given(st.lists(st.permutations("abcd").flatmap(lambda r: st.integers(2, 4).map(lambda n: "".join(r[:n])))))
def test_addresses_and_shadow_id_identify_a_boundary(rings: list[str]) -> None:
    job = job_of(*rings or ["ab"], shadow_nodes={0: [0], 1: [1, 2]})
    places: dict[object, tuple[int, int]] = {}
    for stream in streams(job):
        key = stream.boundary.pair, stream.shadow_id, stream.channel
        assert places.setdefault(key, (stream.boundary.number, stream.shard)) == (
            stream.boundary.number,
            stream.shard,
        )
    assert {number for number, _ in places.values()} == {boundary.number for boundary in boundaries(job)}
