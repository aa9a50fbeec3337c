"""What the evaluation makes of raw data, and that its page has nothing else."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.evaluation.cache import Cache
from benchmarks.evaluation.cells import QUICK, WHOLE, Cell, Extent, matrix
from benchmarks.evaluation.page import write
from benchmarks.evaluation.summary import failures, losses, recoveries, repeated, throughputs
from benchmarks.evaluation.systems import CHECKMATE, COMPARATORS, GLOO, RING

EXTENT = Extent(1, (1,), ("gpt",), 4, 100.0, 30.0)


def log(*steps: tuple[float, int], resumed: dict[float, int] | None = None) -> list[dict[str, Any]]:
    """Return a rank's log: times and iterations, and with which iteration it resumed at a time."""
    found: list[dict[str, Any]] = [{"at": at, "resumed": to} for at, to in (resumed or {0.0: 0}).items()]
    for at, iteration in steps:
        used = {"peak": 5_000_000, "written": 100 * iteration, "sent": 1000 * iteration}
        found.append({"at": at, "iteration": iteration, "loss": 1.0 / (1 + iteration), "used": used})
    return sorted(found, key=lambda line: float(line["at"]))


def undisturbed(seconds: float, interval: int = 0) -> dict[str, Any]:
    one = log(*((1 + seconds * number, number) for number in range(5)))
    one.append({"at": 100.0, "interval": interval})
    return {
        "ranks": [one, one],
        "timed_from": 1,
        "kills": [],
        "ended": 100.0,
        "helpers": [7_000_000],
        "commit": "c0ffee",
        "day": "2026-01-01",
        "machine": "a machine",
    }


DISTURBED = undisturbed(1) | {
    "ranks": [log((1, 0), (2, 1), (3, 2), (10, 1), (11, 2), (12, 3), resumed={0.0: 0, 8.0: 1})],
    "kills": [3.5],
    "ended": 20.0,
}


def test_every_system_has_each_cell_once_and_all_have_baselines() -> None:
    for extent in (QUICK, WHOLE):
        cells = matrix(extent)
        assert len({cell.key for cell in cells}) == len(cells)
        assert {cell.system for cell in cells} == {CHECKMATE, GLOO, RING, *COMPARATORS}
        for cell in cells:
            if cell.kind == "throughput":
                bases = {Cell("throughput", cell.workload, base, 0, cell.start) for base in (GLOO, RING)}
                assert bases <= set(cells)


def test_the_order_of_systems_differs_from_start_to_start() -> None:
    orders = [
        [cell.system for cell in matrix(WHOLE) if (cell.kind, cell.start) == ("throughput", start)]
        for start in range(WHOLE.starts)
    ]
    assert all(one != other for one, other in pairwise(orders))


def test_throughput_is_relative_to_the_same_start() -> None:
    raw = {}
    for start, slower in ((0, 1.0), (1, 2.0)):
        raw[Cell("throughput", "gpt", GLOO, 0, start)] = undisturbed(1.0 * slower)
        raw[Cell("throughput", "gpt", RING, 0, start)] = undisturbed(0.5 * slower)
        raw[Cell("throughput", "gpt", "torch.save", 5, start)] = undisturbed(4.0 * slower, 5)
    raw[Cell("throughput", "gpt", "torch.save", 5, 2)] = undisturbed(99.0)  # it has no baseline
    found = {one.system: one for one in throughputs(raw)}
    saved = found["torch.save"]
    assert (saved.relative, saved.ring) == ((0.25, 0.25), (0.125, 0.125))
    assert (saved.checkpoints, found[GLOO].checkpoints) == (200.0, 0.0)
    assert (saved.written, saved.sent) == (200.0, 2000.0)  # of two ranks
    assert (saved.trainers, saved.helpers) == (5e6, 7e6)


def test_a_frequency_that_a_system_chose_is_its_interval() -> None:
    raw = {Cell("throughput", "gpt", base, 0, 0): undisturbed(1.0) for base in (GLOO, RING)}
    raw[Cell("throughput", "gpt", "CheckFreq", 0, 0)] = undisturbed(1.0, 7)
    assert [one.interval for one in throughputs(raw)] == [0, 0, 7]


def test_a_kill_costs_the_way_back_and_what_is_repeated() -> None:
    assert recoveries(DISTURBED) == [(10 - 3.5, 12 - 3.5)]
    assert repeated(DISTURBED) == 2.0


def test_a_kill_from_which_training_has_not_come_back_lasts_to_the_end() -> None:
    assert recoveries(DISTURBED | {"kills": [3.5, 15.0]})[1] == (5.0, 5.0)


def test_useful_iterations_are_counted_once() -> None:
    (found,) = failures({Cell("failures", "gpt", "DCP", 5, 0): DISTURBED}, 100.0)
    assert found.useful == (4 * 36.0,)
    assert found.repeated == (2.0,)


def test_losses_are_compared_with_a_run_of_the_same_reduction() -> None:
    changed = DISTURBED | {"ranks": [log((1, 0), (2, 1))]}
    changed["ranks"][0][1]["loss"] += 0.5
    raw = {
        Cell("throughput", "gpt", RING, 0, 0): undisturbed(1.0),
        Cell("throughput", "gpt", GLOO, 0, 0): undisturbed(1.0),
        Cell("losses", "gpt", CHECKMATE, 1, 0): changed | {"ranks": changed["ranks"] * 2},
        Cell("losses", "gpt", "DCP", 1, 0): DISTURBED | {"ranks": DISTURBED["ranks"] * 2},
    }
    assert losses(raw) == {CHECKMATE: 0.5, "DCP": 0.0}


def test_a_page_keeps_its_words_and_has_every_sample_as_csv(tmp_path: Path) -> None:
    raw = {Cell("throughput", "gpt", base, 0, 0): undisturbed(1.0) for base in (GLOO, RING)}
    raw[Cell("failures", "gpt", "DCP", 5, 0)] = DISTURBED
    page = tmp_path / "evaluation.md"
    page.write_text("# Words\n\n<!-- failures -->\nold\n<!-- /failures -->\n\nMore words.\n")
    (tmp_path / "pictures").mkdir()
    write(page, raw, EXTENT)
    text = page.read_text()
    assert text.startswith("# Words\n") and "More words." in text and "old" not in text
    assert "| DCP | 5 | 2 | 6.5 | 8.5 | 144 |" in text
    assert "commit c0ffee" in text
    assert "failures,gpt,DCP,5,useful iterations an hour,,144" in page.with_suffix(".csv").read_text()


def test_cells_are_kept_whole(tmp_path: Path) -> None:
    cache, cell = Cache(tmp_path), Cell("losses", "gpt", "Gemini, blocking", 1, 0)
    assert cell not in cache
    cache.put(cell, {"kills": [1.0]})
    assert cell in cache
    assert cache.cells([cell])[cell]["kills"] == [1.0]
    assert [file.name for file in tmp_path.iterdir()] == ["losses-gpt-Gemini_blocking-1-0.json"]
