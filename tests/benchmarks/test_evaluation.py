"""The evaluation's results from raw data, and that its page has nothing else."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evaluation.__main__ import _select, main
from benchmarks.evaluation.cache import Cache, Unusable
from benchmarks.evaluation.cells import INTERVALS, QUICK, RECOVERY, WHOLE, Cell, MeasuredExtent, matrix
from benchmarks.evaluation.page import write
from benchmarks.evaluation.record import (
    MeasuredBlock,
    Record,
    TrainedStep,
    blocks_of,
    has_regained,
    interval_of,
    log_of,
    losses_of,
    peaks_of,
    plain_of,
    steps_of,
)
from benchmarks.evaluation.summary import (
    comparable,
    failures,
    losses,
    recoveries,
    repeated_iterations,
    throughputs,
    useful,
)
from benchmarks.evaluation.systems import CHECKMATE, COMPARATORS, GLOO, IN_PLACE, LIVE, RING, STARTERS
from benchmarks.evaluation.turns import BLOCK, first_of

EXTENT = MeasuredExtent("some", 1, (1,), ("gpt",), 100.0, 30.0)


def record(
    *steps: tuple[float, int],
    interval: int = 0,
    kills: tuple[float, ...] = (),
    end_time: float = 100.0,
    losses: tuple[tuple[float, ...], ...] = ((1.0, 0.5), (1.0, 0.25)),
) -> Record:
    """Return a record of iterations that took half a second, with the times at which they ended."""
    return Record(
        commit="c0ffee",
        day="2026-01-01",
        machine="a machine",
        file_system="ext4",
        steps=tuple(TrainedStep(iteration, at - 0.5, at) for at, iteration in steps),
        interval=interval,
        kills=kills,
        ended=end_time,
        losses=losses,
    )


def undisturbed(seconds: float, plain: float = 1.0, interval: int = 0) -> Record:
    """Return a record of a block with a system, of which an iteration takes `seconds`, and one without."""
    return replace(
        record(interval=interval),
        system=(MeasuredBlock(seconds, 100.0, 1000.0), MeasuredBlock(seconds + 9, 100.0, 1000.0)),
        plain=plain,
        peaks=(4_000_000, 6_000_000),
        helpers=(7_000_000,),
    )


DISTURBED = record((1, 0), (2, 1), (3, 2), (10, 1), (11, 2), (12, 3), kills=(3.5,), end_time=20.0)


def line(at: float, iteration: int, **more: object) -> dict[str, Any]:
    """Return what a rank says of an iteration."""
    return {"at": at, "began": at - 0.5, "iteration": iteration, "loss": at / 2, **more}


def test_every_system_has_each_cell_once_and_all_have_baselines() -> None:
    for extent in (QUICK, WHOLE):
        cells = matrix(extent)
        assert len({cell.key for cell in cells}) == len(cells)
        assert {cell.system for cell in cells} == {CHECKMATE, GLOO, RING, LIVE, *COMPARATORS}
        for cell in cells:
            if cell.kind == "losses":
                bases = {Cell("throughput", cell.workload, base, 0, 0) for base in (GLOO, RING)}
                assert bases <= set(cells), "they have the losses of the undisturbed job"


def test_the_order_of_systems_differs_from_start_to_start() -> None:
    orders = [
        [cell.system for cell in matrix(WHOLE) if (cell.kind, cell.start) == ("throughput", start)]
        for start in range(WHOLE.starts)
    ]
    assert all(order != following for order, following in pairwise(orders))


def test_throughput_is_relative_to_the_same_job() -> None:
    raw = {
        Cell("throughput", "gpt", "torch.save", 5, start): undisturbed(4.0 * slower, slower, 5)
        for start, slower in ((0, 1.0), (1, 2.0))
    }
    (throughput,) = throughputs(raw)
    assert (throughput.relative, throughput.seconds) == ((0.25, 0.25), (4.0, 8.0))
    assert (throughput.checkpoints, throughput.interval, throughput.has_own_interval) == (200.0, 5, False)
    assert (throughput.written_bytes, throughput.sent_bytes) == (200.0, 2000.0)  # of two ranks
    assert (throughput.trainers, throughput.helpers) == (5e6, 7e6)


def test_a_frequency_that_a_system_chose_is_its_interval() -> None:
    raw = {
        Cell("throughput", "gpt", GLOO, 0, 0): undisturbed(1.0),
        Cell("throughput", "gpt", "CheckFreq", 0, 0): undisturbed(1.0, interval=7),
    }
    assert [(throughput.interval, throughput.has_own_interval) for throughput in throughputs(raw)] == [
        (0, False),
        (7, True),
    ]


def test_blocks_begin_between_two_checkpoints_and_have_all_intervals() -> None:
    for warm_up in (0, 5, 100):
        first = first_of(warm_up)
        assert first >= warm_up
        for interval in INTERVALS:
            checkpoints = [
                iteration for iteration in range(first, first + BLOCK) if (iteration + 1) % interval == 0
            ]
            assert len(checkpoints) == BLOCK // interval
            assert interval == 1 or checkpoints[-1] < first + BLOCK - 1


def test_a_kill_costs_the_way_back_and_what_is_repeated() -> None:
    assert recoveries(DISTURBED) == [(10 - 3.5, 12 - 3.5)]
    assert repeated_iterations(DISTURBED) == 2.0


def test_the_last_kill_has_its_whole_cost_though_the_period_has_ended() -> None:
    early = replace(DISTURBED, ended=4.0)
    assert recoveries(early) == recoveries(DISTURBED)
    assert repeated_iterations(early) == repeated_iterations(DISTURBED)
    assert has_regained((3.5,), DISTURBED.steps)
    assert not has_regained((3.5,), DISTURBED.steps[:-1])


def test_useful_iterations_are_counted_once() -> None:
    (summary,) = failures({Cell("failures", "gpt", "DCP", 5, 0): DISTURBED}, 100.0)
    assert summary.useful == (4 * 36.0,)
    assert summary.repeated == (2.0,)


def test_an_iteration_that_a_rank_has_missed_is_useful_in_part() -> None:
    assert useful(DISTURBED) == 4
    steps = [step._replace(share=0.75 if step.iteration == 3 else 1.0) for step in DISTURBED.steps]
    assert useful(replace(DISTURBED, steps=tuple(steps))) == 3.75


def test_iterations_that_are_lost_are_not_useful_though_the_restart_comes_after_the_period() -> None:
    interrupted = record((1, 0), (2, 1), (3, 2), (10, 0), (11, 1), (12, 2), kills=(3.5,), end_time=20.0)
    assert [useful(replace(interrupted, ended=end)) for end in (20.0, 11.0, 5.0)] == [3, 2, 0]


def test_only_starts_with_all_systems_are_compared() -> None:
    """A start with short periods of training would otherwise count for some systems and not for others."""
    cells = [Cell("failures", "gpt", system, 1, start) for system in (CHECKMATE, "DCP") for start in (0, 1)]
    records: dict[Cell, Record] = dict.fromkeys(cells[:3], DISTURBED)
    assert set(comparable(records, cells)) == {cells[0], cells[2]}
    assert set(comparable(records, [*cells, Cell("failures", "gpt", "absent", 1, 0)])) == {cells[0], cells[2]}
    alone = {cells[1]: DISTURBED, cells[2]: DISTURBED}
    assert comparable(alone, cells) == alone, "better than nothing, if no start is whole"


def test_losses_are_compared_with_a_run_of_the_same_reduction() -> None:
    records = {
        Cell("throughput", "gpt", RING, 0, 0): record((1, 0), losses=((1.0, 2.0), (3.0, 4.0))),
        Cell("throughput", "gpt", GLOO, 0, 0): undisturbed(1.0),
        Cell("losses", "gpt", CHECKMATE, 1, 0): record((1, 0), losses=((1.0, 2.5), (3.0, 4.0))),
        Cell("losses", "gpt", "DCP", 1, 0): DISTURBED,
    }
    assert losses(records) == {CHECKMATE: 0.5, "DCP": 0.0}


def test_a_record_has_what_ranks_have_said() -> None:
    logs = [
        [
            {"at": 10.2, "resumed": 0},
            line(11, 0),
            line(12, 1),
            line(13, 2),
            line(15, 1),
            {"interval": 4},
            {"block": "system", "seconds": 0.5, "written": 10.4, "sent": 20},
            {"block": "plain", "seconds": 0.25},
            {"peak": 6},
            {"peak": 7},
        ],
        [line(11.25, 0), line(12, 1), line(14, 2), line(15.5, 1, share=0.5), {"peak": 8}],
    ]
    assert steps_of(logs, 10.0, alone=False)[::3] == (TrainedStep(0, 0.5, 1.0), TrainedStep(1, 4.5, 5.0))
    assert steps_of(logs, 10.0, alone=True) == (
        TrainedStep(0, 0.5, 1.0),
        TrainedStep(1, 1.5, 2.0),
        TrainedStep(2, 2.5, 3.0),
    )
    assert losses_of(logs, 2) == ((5.5, 7.5), (5.625, 7.75))
    assert (blocks_of(logs), plain_of(logs), peaks_of(logs)) == ((MeasuredBlock(0.5, 10, 20),), 0.25, (7, 8))
    assert interval_of(logs) == 4
    assert log_of('{"at": 1}\n{"at": 2}\n{"a') == [{"at": 1}, {"at": 2}]


def test_a_page_keeps_its_words_and_has_every_sample_as_csv(tmp_path: Path) -> None:
    raw = {Cell("throughput", "gpt", base, 0, 0): undisturbed(1.0) for base in (GLOO, RING)}
    raw[Cell("failures", "gpt", "DCP", 5, 0)] = DISTURBED
    page = tmp_path / "evaluation.md"
    page.write_text("# Words\n\n<!-- failures -->\nold\n<!-- /failures -->\n\nMore words.\n")
    (tmp_path / "pictures").mkdir()
    write(page, raw, EXTENT)
    text = page.read_text()
    assert text.startswith("# Words\n") and "More words." in text and "old" not in text
    assert "| DCP | 5 | 1 | 2 (n=1) | 6.5 (n=1) | 8.5 (n=1) | 144 (n=1) |" in text
    assert "| failures, start 1; throughput, start 1 | 2026-01-01 | c0ffee | a machine | ext4 |" in text
    assert f"3 of {len(matrix(EXTENT))} cells.\n" in text
    assert "cells of throughput, of CheckFreq; Checkmate; DCP" in text, "what is missing is named"
    assert "<!-- losses -->\nNot measured yet.\n<!-- /losses -->" in text
    assert "failures,gpt,DCP,5,useful iterations an hour,,144" in page.with_suffix(".csv").read_text()


def test_recovery_has_a_section_and_data_of_its_own(tmp_path: Path) -> None:
    assert {cell.kind for cell in matrix(RECOVERY)} == {"failures"}
    assert set(STARTERS) | {LIVE, CHECKMATE} < {cell.system for cell in matrix(RECOVERY)}
    page = tmp_path / "evaluation.md"
    page.write_text("# Words\n\n<!-- failures -->\nold\n<!-- /failures -->\n")
    write(page, {Cell("failures", "gpt", IN_PLACE, 1, 0): DISTURBED}, RECOVERY)
    text = page.read_text()
    assert "<!-- failures -->\nold\n" in text, "those of the whole evaluation stay"
    assert "<!-- recovery -->\n1 of 12 cells.\n" in text
    assert f"| {IN_PLACE} | 1 | 1 | 2 (n=1) | 6.5 (n=1) | 8.5 (n=1) | 120 (n=1) |" in text
    assert (tmp_path / "pictures" / "evaluation-recovery.svg").exists()
    assert f'failures,gpt,"{IN_PLACE}",1' in (tmp_path / "evaluation-recovery.csv").read_text()
    assert not page.with_suffix(".csv").exists()


def test_cells_are_kept_whole(tmp_path: Path) -> None:
    file, cell = tmp_path / "folder" / "raw.jsonl", Cell("losses", "gpt", "Gemini, blocking", 1, 0)
    assert cell not in Cache(file, EXTENT)
    Cache(file, EXTENT).put(cell, DISTURBED)
    with file.open("a") as raw:
        raw.write('["some/losses-gpt-DCP-1-0",{"commit":')  # a measurement was killed
    cache = Cache(file, EXTENT)
    assert cache.records([cell, Cell("losses", "gpt", "DCP", 1, 0)]) == {cell: DISTURBED}
    cache.put(Cell("losses", "gpt", "DCP", 1, 0), DISTURBED)
    assert [json.loads(line)[0] for line in file.read_text().splitlines()] == [
        "some/losses-gpt-DCP-1-0",
        "some/losses-gpt-Gemini_blocking-1-0",
    ]
    assert cell not in Cache(file, QUICK), "it was measured for another time"
    cache.require_same([cell], replace(DISTURBED, day="2027-01-01"))
    records = [
        replace(DISTURBED, commit="new"),
        replace(DISTURBED, machine="new"),
        replace(DISTURBED, file_system="new"),
    ]
    for new_record in records:
        with pytest.raises(
            Unusable, match=f"{file} has cells of another .*losses-gpt.*this is new; remove that start"
        ):
            cache.require_same([Cell("throughput", "gpt", GLOO, 0, 0)], new_record)
        cache.require_same([Cell("failures", "gpt", GLOO, 0, 0)], new_record)
    assert [path.name for path in file.parent.iterdir()] == ["raw.jsonl"]


def test_a_loss_that_is_not_a_number_is_kept(tmp_path: Path) -> None:
    cell, diverged = Cell("losses", "gpt", "DCP", 1, 0), record((1, 0), losses=((math.nan, math.inf),))
    Cache(tmp_path / "raw", EXTENT).put(cell, diverged)
    (losses,) = Cache(tmp_path / "raw", EXTENT).records([cell])[cell].losses
    assert math.isnan(losses[0]) and losses[1] == math.inf


def test_a_file_of_something_else_is_refused_with_its_line(tmp_path: Path) -> None:
    Cache(tmp_path / "raw", EXTENT).put(Cell("losses", "gpt", "DCP", 1, 0), DISTURBED)
    with (tmp_path / "raw").open("a") as raw:
        raw.write("<<<<<<< HEAD\n")
    with pytest.raises(Unusable, match="raw, line 2 is not a cell's record"):
        Cache(tmp_path / "raw", EXTENT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "torch_svae"], "no cell has all of 'torch_svae' in its name; .*torch.save"),
        (["--raw", "."], "is a folder; name a file"),
        (["--page", "/dev/null/page.md"], "/dev/null is not a folder"),
        (["--scratch", "/missing"], "/missing is not a folder"),
    ],
)
def test_wrong_arguments_are_refused_in_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["evaluation", "--page-only", *arguments])
    try:
        status = main()
    except SystemExit as error:  # argparse's
        status = int(error.code or 0)
    assert status == 2
    assert re.search(message, capsys.readouterr().err)


def test_cells_are_chosen_by_the_names_that_tables_have() -> None:
    for words in (["torch.save"], ["Gemini, blocking", "failures"], ["no checkpoints"]):
        cells = _select(matrix(WHOLE), words)
        assert cells and all(cell.system.startswith(words[0]) for cell in cells)


def test_a_page_is_written_again_without_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("throughput", "gpt", GLOO, 0, 0)
    Cache(tmp_path / "raw", QUICK).put(cell, undisturbed(1.0))
    page = tmp_path / "page.md"
    arguments = ["--quick", "--page-only", "--raw", str(tmp_path / "raw"), "--page", str(page)]
    monkeypatch.setattr("sys.argv", ["evaluation", *arguments])
    assert main() == 0
    assert "| gpt | no checkpoints | never | 1 (n=1) | 1 (n=1) |" in page.read_text()
    assert page.with_suffix(".jsonl").read_text() == (tmp_path / "raw").read_text()


def test_ctrl_c_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.evaluation.__main__._all", interrupted)
    monkeypatch.setattr("sys.argv", ["evaluation", "--quick", "--raw", str(tmp_path / "raw")])
    assert main() == 130
    assert capsys.readouterr().err.startswith("interrupted; the same command goes on with what ")


def test_the_quick_evaluation_has_all_systems_and_fewer_losses() -> None:
    cells = matrix(QUICK)
    assert {cell.system for cell in cells if cell.kind == "failures"} == {CHECKMATE, GLOO, LIVE, *COMPARATORS}
    assert len({cell.system for cell in cells if cell.kind == "losses"}) == 4
    assert all(cell.interval or cell.system in (GLOO, RING, LIVE) for cell in cells)
