"""`checkmate nccl check`: what each rank's plugin has compared, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from checkmate.cli.nccl import show
from checkmate.job.fields import Collective
from checkmate.training.errors import SessionError
from checkmate.training.gradients import nccl_check
from checkmate.training.gradients.nccl_check import RankVerdict
from checkmate.wire.nccl_slicing import NcclSlicing
from tests.support.nccl.double import DoubleNccl
from tests.support.training.nccl_ranks import OTHER_CELLS, TAGGING, place_of, prepare
from tests.support.training.rank_processes import RankProcesses


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with RankProcesses() as processes:
        yield processes


SIZES = (1, 1000, 65_537, 300_000)


def examined(rank: int, count: int, double: DoubleNccl, collective: Collective) -> list[RankVerdict] | str:
    prepare(rank, count, 2, double, ExitStack())
    try:
        job = replace(place_of(rank, count, 2).job, collective=collective)
        return nccl_check.examine(job, 0, SIZES)
    except SessionError as error:
        return str(error)


@TAGGING
def test_the_check_prints_what_each_rank_has_compared(
    ranks: RankProcesses, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ranks.run(2, examined, DoubleNccl("2.30"), "nccl")
    assert both[0] == both[1]
    verdicts: list[RankVerdict] = both[0]
    assert [(verdict.rank, verdict.version, verdict.trouble) for verdict in verdicts] == [
        ("rank 0 (192.168.0.0)", "2.30.5", ""),
        ("rank 1 (192.168.0.1)", "2.30.5", ""),
    ]
    layout = nccl_check.sample_layout(2, NcclSlicing(), SIZES)
    compared = [channel.nbytes for verdict in verdicts for channel in verdict.channels]
    assert sum(compared) == sum(bucket.nbytes for bucket in layout.schedule)  # each of 2 ranks sends half
    assert all(
        channel.mismatches == 0 and channel.sends for verdict in verdicts for channel in verdict.channels
    )
    show(verdicts)
    printed = capsys.readouterr().out
    assert printed.count("gradients can be tagged") == 2
    assert "rank 1 (192.168.0.1)  2.30.5        1" in printed


@TAGGING
def test_the_check_names_what_is_wrong(ranks: RankProcesses) -> None:
    (verdicts, _) = ranks.run(2, examined, OTHER_CELLS, "nccl")
    assert all("NCCL sends" in verdict.trouble for verdict in verdicts)
    errors = ranks.run(2, examined, DoubleNccl("2.30"), "ring")
    assert errors == ["the job demo has collective: ring: set it to nccl"] * 2
