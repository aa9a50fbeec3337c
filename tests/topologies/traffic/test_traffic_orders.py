"""Configurations of a lab's hosts, and the comparison of their results: pure."""

from __future__ import annotations

import hashlib
import io
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from checkmate.job.boundaries import streams
from checkmate.job.files import read_job
from checkmate.job.schema import Job
from topologies.describe import job_files
from topologies.describe.topology import Topology, load
from topologies.progress import StepProgress
from topologies.traffic import orders, verdict
from topologies.traffic.orders import Load
from topologies.traffic.rank import RingJob
from topologies.traffic.sink import SinkJob
from topologies.traffic.verdict import Digest, ReadKey, StreamKey, StreamsVerdict, compare


@pytest.fixture(scope="module", params=["single_tor", "two_tor", "paper_testbed"])
def topology(request: pytest.FixtureRequest) -> Topology:
    return load(request.param)


@pytest.fixture(scope="module")
def job(topology: Topology, tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("job")
    fabric = job_files.as_yaml(job_files.fabric(topology, "softswitch"), "")
    folder.joinpath(job_files.FABRIC_FILE).write_text(fabric)
    file: Path = folder / job_files.JOB_FILE
    file.write_text(job_files.as_yaml(job_files.job(topology, "x"), ""))
    return read_job(file)


def ends_of_run(job: Job) -> tuple[dict[StreamKey, Digest], dict[ReadKey, Digest]]:
    """Return both ends of a successful run."""
    tagged, read = {}, {}
    for stream in streams(job):
        key = (stream.boundary.number, stream.channel, stream.shadow_id)
        tagged[key] = Digest(1000 + key[0], hashlib.sha256(repr(key).encode()).hexdigest())
        read[*key, stream.node.id] = tagged[key]
    return tagged, read


def judged(job: Job, tagged: dict[StreamKey, Digest], read: dict[ReadKey, Digest]) -> StreamsVerdict:
    return StreamsVerdict(compare(job, tagged, read), 1.0, 10**6)


@settings(max_examples=50)
@given(nbytes=st.integers(1, 10**9), iterations=st.integers(1, 9))
def test_the_rings_gather_what_was_asked_for(job: Job, nbytes: int, iterations: int) -> None:
    load = Load(nbytes, iterations)
    for group in range(len(job.dp_groups)):
        buckets = orders.buckets(job, group, load)
        assert {bucket.shadow_id for bucket in buckets} == set(range(job.shards(group)))
        assert max(bucket.nbytes for bucket in buckets) < orders.BUCKET_BYTES + 1000
    # At least this many; rounding up adds less than a thousand bytes to each bucket.
    most = nbytes + 1000 * iterations * (nbytes // orders.BUCKET_BYTES + 100)
    assert nbytes <= orders.gathered(job, load) < most


def test_the_ring_understands_its_configuration(job: Job) -> None:
    for group, members in enumerate(job.dp_groups):
        ring = RingJob.model_validate(orders.ring(job, group, Load(incarnation=7)))
        assert ring.ips == [str(rank.ip) for rank in members.ranks]
        assert (ring.group, ring.channels, ring.incarnation) == (group, job.channels, 7)


def test_the_sinks_understand_their_configuration(job: Job, topology: Topology) -> None:
    load = Load(incarnation=7)
    specs = []
    for host, config in orders.sinks(job, topology, load).items():
        sink = SinkJob.model_validate(config)
        nics = {str(nic.ip): nic.name for nic in topology.host(host).interfaces}
        assert all(spec.device == nics[spec.nic_ip] for spec in sink.streams)
        specs += sink.streams
    assert len(specs) == len(list(streams(job)))
    assert {(spec.incarnation, spec.base) for spec in specs} == {(7, 0)}
    stubs = {(str(switch.stub_ip), 7471) for switch in topology.switches}
    assert {(spec.stub_ip, spec.stub_port) for spec in specs} == stubs


def test_equal_ends_are_a_success(job: Job) -> None:
    tagged, read = ends_of_run(job)
    result = judged(job, tagged, read)
    assert result.equal
    assert len(result.rows) == len(list(streams(job)))
    assert result.tagged == sum(digest.nbytes for digest in tagged.values())


def test_any_difference_is_a_failure(job: Job) -> None:
    tagged, read = ends_of_run(job)
    key, digest_read = next(iter(read.items()))
    for wrong in (
        read | {key: replace(digest_read, nbytes=digest_read.nbytes - 1)},
        read | {key: replace(digest_read, sha256="0" * 64)},
        {other_key: digest for other_key, digest in read.items() if other_key != key},
        {},
    ):
        result = judged(job, tagged, wrong)
        assert not result.equal
        assert next(row for row in result.rows if not row.equal).boundary == key[0]
        assert "NO" in _table_text(result)
    assert not judged(job, {}, read).equal


def test_a_stream_without_bytes_proves_nothing(job: Job) -> None:
    tagged, read = ends_of_run(job)
    nothing = Digest(0, hashlib.sha256().hexdigest())
    assert not judged(job, dict.fromkeys(tagged, nothing), dict.fromkeys(read, nothing)).equal


def test_a_stream_that_the_job_has_not_is_shown(job: Job) -> None:
    tagged, read = ends_of_run(job)
    result = judged(job, tagged, read | {(99, 0, 0, 0): Digest(1, "ab")})
    assert not result.equal
    assert "not of this job" in _table_text(result)


def test_the_table_shows_both_digests(job: Job) -> None:
    result = judged(job, *ends_of_run(job))
    text = _table_text(result)
    for row in result.rows:
        assert row.tagged is not None
        assert text.count(row.tagged.sha256[:10]) >= 2
    assert "NO" not in text


def test_the_data_has_every_stream(job: Job) -> None:
    result = judged(job, *ends_of_run(job))
    data = result.data()
    assert data["equal"] is True
    assert [row["tagged"] == row["read"] for row in data["streams"]] == [True] * len(result.rows)


def test_steps_are_told_with_their_times() -> None:
    text = io.StringIO()
    with StepProgress(Console(file=text, width=120)) as steps:
        steps("first")
        steps.moved(1, 2)
        steps("second")
    lines = text.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["first", "second"]
    assert all(line.endswith("0.0 s") for line in lines)


def _table_text(result: StreamsVerdict) -> str:
    text = io.StringIO()
    Console(file=text, width=200).print(verdict.table(result))
    return text.getvalue()
