"""The page of figures: tables and plots of what was measured, with the data beside the page.

`python -m benchmarks NAME --report docs/figures.md` measures and writes;
`python -m benchmarks.report docs/figures.md` writes tables and plots again from the data.

The page has a pair of comments for each benchmark. A report replaces what is between them, and leaves the
rest of the page, and the benchmarks that did not run, as they are.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import matplotlib
from matplotlib.figure import Figure as Picture

from benchmarks.figures import Result, data, from_data, markdown
from checkmate.base.wording import counted


class Plot(NamedTuple):
    """The unit of the figures that a plot shows, the label of its axis, and a part of their names."""

    unit: str
    label: str
    part: str = ""


PLOTTED: Final[Mapping[str, Plot]] = {
    "iteration": Plot("", "iteration time, as a ratio"),
    "recovery": Plot("s", "seconds"),
    "allreduce": Plot("", "time of the ring's AllReduce / gloo's"),
    "trees": Plot("", "time of the trees' AllReduce / the ring's", ": trees / ring"),
    "control_plane": Plot("s", "seconds"),
}
"""By benchmark."""


def machine() -> str:
    """Return the number and kind of the processors that this process may use."""
    cores = len(os.sched_getaffinity(0))
    models = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{counted(cores, 'core')}, {models[0] if models else platform.machine()}"


def commit() -> str:
    """Return the commit of this tree, with + if anything but documentation differs from it."""
    revision = _git("rev-parse", "--short", "HEAD")
    changes = _git("status", "--porcelain", "--", ".", ":!docs", ":!*.md")
    return revision + "+" * bool(changes) if revision else "unknown"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()


def report(
    page: Path,
    measured: Mapping[str, tuple[str, Sequence[Result]]],
    day: datetime.date,
    where: str,
    commit_name: str,
) -> None:
    """Write tables and plots of `measured` to the page, and the data to a JSON file of the same name.

    Args:
        page: The Markdown file. It may be missing.
        measured: Title and results of each benchmark, by its name.
        day: When they were measured.
        where: The machine, as from `machine`.
        commit_name: The commit, as from `commit`.
    """
    data_file = page.with_suffix(".json")
    everything = json.loads(data_file.read_text()) if data_file.exists() else {}
    for name, (title, results) in measured.items():
        everything[name] = {
            "title": title,
            "measured": day.isoformat(),
            "commit": commit_name,
            "machine": where,
            "results": data(results),
        }
        draw(page.parent / "pictures", name, everything[name]["results"])
    text = page.read_text() if page.exists() else "# Figures\n"
    page.write_text(with_tables(text, {name: everything[name] for name in measured}))
    data_file.write_text(json.dumps(everything, indent=2) + "\n")


def with_tables(text: str, everything: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a page with the tables of benchmarks, by name, from their data. Pure."""
    for name, benchmark in everything.items():
        results = [from_data(result) for result in benchmark["results"]]
        measured = (
            f"Measured on {benchmark['measured']}, commit {benchmark['commit']}: {benchmark['machine']}."
        )
        table = f"{measured}\n{markdown(benchmark['title'], results)}"
        if _plotted_results(name, benchmark["results"]):
            table += f"\n![{benchmark['title']}](pictures/figures-{name}.svg)\n"
        text = replace_section(text, name, table)
    return text


def replace_section(text: str, name: str, table: str) -> str:
    """Return a page with what is between a name's comments replaced; they are added if there are none."""
    opening, closing = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    pattern = re.compile(f"{re.escape(opening)}.*?{re.escape(closing)}", re.DOTALL)
    block = f"{opening}{table}{closing}"
    return pattern.sub(lambda _: block, text) if pattern.search(text) else f"{text}\n{block}"


def draw(folder: Path, name: str, results: Sequence[Mapping[str, Any]]) -> None:
    """Draw a benchmark's medians and spreads, if it has a plot."""
    plotted = _plotted_results(name, results)
    if not plotted:
        return
    unit, label, _ = PLOTTED[name]
    with matplotlib.rc_context({"svg.hashsalt": "checkmate", "svg.fonttype": "none"}):
        picture = Picture(figsize=(8, 0.8 + 0.42 * len(plotted)), layout="constrained")
        axes = picture.add_subplot()
        for row, result in enumerate(plotted):
            least, median, most = spread(result)
            axes.barh(row, median, color="#9ecae1")
            axes.errorbar(median, row, xerr=[[median - least], [most - median]], color="#08306b", capsize=3)
        axes.set_yticks(range(len(plotted)), [result["name"] for result in plotted])
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        if not unit:
            axes.axvline(1, color="0.4", linewidth=1, linestyle="--")
        axes.set_xlabel(f"{label}; bar: median, line: least to greatest")
        folder.mkdir(parents=True, exist_ok=True)
        picture.savefig(folder / f"figures-{name}.svg", metadata={"Date": None})


def _plotted_results(name: str, results: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the figures that a benchmark's plot shows; none if it has no plot."""
    if name not in PLOTTED:
        return []
    plot = PLOTTED[name]
    return [
        result
        for result in results
        if result["kind"] != "Skipped" and result["unit"] == plot.unit and plot.part in result["name"]
    ]


def spread(result: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return least, median and greatest of a figure."""
    samples = result["samples"]
    return min(samples), statistics.median(samples), max(samples)


def main() -> None:
    """Write the tables and draw the plots of a page again from its data."""
    page = Path(sys.argv[1])
    everything = json.loads(page.with_suffix(".json").read_text())
    page.write_text(with_tables(page.read_text(), everything))
    for name, benchmark in everything.items():
        draw(page.parent / "pictures", name, benchmark["results"])


if __name__ == "__main__":
    main()
