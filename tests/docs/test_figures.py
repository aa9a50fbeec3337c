"""Figures on pages equal the raw data that are committed beside them, which name the commit."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.evaluation.cache import Cache
from benchmarks.evaluation.cells import RECOVERY, WHOLE, matrix
from benchmarks.evaluation.page import data_of, write
from benchmarks.report import with_tables
from tests.docs.test_markdown import ROOT, text_of

FIGURES: dict[str, Any] = json.loads(text_of("docs/figures.json"))
COMMIT = r"[0-9a-f]{7,}"


def median(benchmark: str, name: str) -> float:
    """Return the median of a figure."""
    (measurement,) = (result for result in FIGURES[benchmark]["results"] if result["name"] == name)
    return float(statistics.median(measurement["samples"]))


def test_each_measurement_names_its_commit() -> None:
    assert all(re.fullmatch(rf"{COMMIT}\+?", measurement["commit"]) for measurement in FIGURES.values())


def test_the_figures_are_what_their_data_say() -> None:
    page = text_of("docs/figures.md")
    assert page == with_tables(page, FIGURES)


RING = "Checkmate / the same ring untagged"


@pytest.mark.parametrize(
    ("row", "figures"),
    [
        ("iteration time, Checkmate", [("iteration", RING), ("sharded", RING)]),
        (
            "from kill -9 of a rank",
            [
                ("in_place", "in place with no spare / restart of all ranks by torchrun"),
                ("in_place", "together, no spare"),
                ("in_place", "in place with a warm spare / restart of all ranks by torchrun"),
                ("in_place", "together, a warm spare"),
            ],
        ),
        ("a shadow node's optimizer step", [("shadow_step", "AdamW")]),
        ("2,048 streams planned", [("control_plane", "planned and written")]),
    ],
)
def test_the_readme_has_figures_of_the_page(row: str, figures: list[tuple[str, str]]) -> None:
    (line,) = (line for line in text_of("README.md").splitlines() if line.startswith(f"| {row}"))
    numbers = re.findall(r"\d+\.\d+", line)
    assert len(numbers) == len(figures)
    for number, (benchmark, name) in zip(numbers, figures, strict=True):
        digits = len(number.partition(".")[2])
        assert number == f"{median(benchmark, name):.{digits}f}", line


def test_the_evaluation_is_what_its_data_say(tmp_path: Path) -> None:
    page = ROOT / "docs" / "evaluation.md"
    page_copy = Path(shutil.copy(page, tmp_path))
    shutil.copy(ROOT / "docs" / "figures.json", tmp_path)
    remedy = "python -m benchmarks.evaluation --page-only --page docs/evaluation.md --raw docs/{}.jsonl {}"
    for extent, option in ((WHOLE, ""), (RECOVERY, "--recovery")):
        data = data_of(page, extent)
        records = Cache(data.with_suffix(".jsonl"), extent).records(matrix(extent))
        assert records and all(re.fullmatch(COMMIT, record.commit) for record in records.values())
        write(page_copy, records, extent)
        remedy = remedy.format(data.stem, option)
        csv_copy = data_of(page_copy, extent).with_suffix(".csv")
        assert csv_copy.read_text() == data.with_suffix(".csv").read_text(), remedy
    assert page_copy.read_text() == page.read_text(), remedy
    pictures_drawn = {file.name: file.read_text() for file in (tmp_path / "pictures").glob("*")}
    pictures = (ROOT / "docs" / "pictures").glob("evaluation-*")
    assert pictures_drawn == {file.name: file.read_text() for file in pictures}, remedy
