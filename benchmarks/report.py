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
from typing import Any, Final

import matplotlib
from matplotlib.figure import Figure as Picture

from benchmarks.figures import Result, data, from_data, markdown
from checkmate.wording import counted

PLOTTED: Final[Mapping[str, tuple[str, str]]] = {
    "iteration": ("", "iteration time, as a ratio"),
    "recovery": ("s", "seconds"),
    "allreduce": ("", "time of the ring's AllReduce / gloo's"),
    "control_plane": ("s", "seconds"),
}
"""By benchmark: the unit of the figures that a plot shows, and the label of its axis."""


def machine() -> str:
    """Return the number and kind of the processors that this process may use."""
    cores = len(os.sched_getaffinity(0))
    models = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{counted(cores, 'core')}, {models[0] if models else platform.machine()}"


def commit() -> str:
    """Return the commit of this tree, with + if anything but documentation differs from it."""
    said = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--", ".", ":!docs", ":!*.md")
    return said + "+" * bool(changed) if said else "unknown"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()


def report(
    page: Path, found: Mapping[str, tuple[str, Sequence[Result]]], day: datetime.date, where: str, what: str
) -> None:
    """Write tables and plots of `found` to the page, and the data to a JSON file of the same name.

    Args:
        page: The Markdown file. It may be missing.
        found: Title and results of each benchmark, by its name.
        day: When they were measured.
        where: The machine, as from `machine`.
        what: The commit, as from `commit`.
    """
    kept = page.with_suffix(".json")
    everything = json.loads(kept.read_text()) if kept.exists() else {}
    for name, (title, results) in found.items():
        everything[name] = {
            "title": title,
            "measured": day.isoformat(),
            "commit": what,
            "machine": where,
            "results": data(results),
        }
        draw(page.parent / "pictures", name, everything[name]["results"])
    text = page.read_text() if page.exists() else "# Figures\n"
    page.write_text(with_tables(text, {name: everything[name] for name in found}))
    kept.write_text(json.dumps(everything, indent=2) + "\n")


def with_tables(text: str, everything: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a page with the tables of benchmarks, by name, from their data. Pure."""
    for name, one in everything.items():
        results = [from_data(result) for result in one["results"]]
        measured = f"Measured on {one['measured']}, commit {one['commit']}: {one['machine']}."
        table = f"{measured}\n{markdown(one['title'], results)}"
        if _plotted(name, one["results"]):
            table += f"\n![{one['title']}](pictures/figures-{name}.svg)\n"
        text = replaced(text, name, table)
    return text


def replaced(text: str, name: str, table: str) -> str:
    """Return a page with what is between a name's comments replaced; they are added if there are none."""
    opening, closing = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    pattern = re.compile(f"{re.escape(opening)}.*?{re.escape(closing)}", re.DOTALL)
    made = f"{opening}{table}{closing}"
    return pattern.sub(lambda _: made, text) if pattern.search(text) else f"{text}\n{made}"


def draw(folder: Path, name: str, results: Sequence[Mapping[str, Any]]) -> None:
    """Draw a benchmark's medians and spreads, if it has a plot."""
    shown = _plotted(name, results)
    if not shown:
        return
    unit, label = PLOTTED[name]
    with matplotlib.rc_context({"svg.hashsalt": "checkmate", "svg.fonttype": "none"}):
        picture = Picture(figsize=(8, 0.8 + 0.42 * len(shown)), layout="constrained")
        axes = picture.add_subplot()
        for row, one in enumerate(shown):
            least, median, most = spread(one)
            axes.barh(row, median, color="#9ecae1")
            axes.errorbar(median, row, xerr=[[median - least], [most - median]], color="#08306b", capsize=3)
        axes.set_yticks(range(len(shown)), [one["name"] for one in shown])
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        if not unit:
            axes.axvline(1, color="0.4", linewidth=1, linestyle="--")
        axes.set_xlabel(f"{label}; bar: median, line: least to greatest")
        folder.mkdir(parents=True, exist_ok=True)
        picture.savefig(folder / f"figures-{name}.svg", metadata={"Date": None})


def _plotted(name: str, results: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the figures that a benchmark's plot shows; none if it has no plot."""
    if name not in PLOTTED:
        return []
    return [one for one in results if one["kind"] != "Skipped" and one["unit"] == PLOTTED[name][0]]


def spread(result: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return least, median and greatest of a figure."""
    samples = result["samples"]
    return min(samples), statistics.median(samples), max(samples)


def main() -> None:
    """Write the tables and draw the plots of a page again from its data."""
    page = Path(sys.argv[1])
    everything = json.loads(page.with_suffix(".json").read_text())
    page.write_text(with_tables(page.read_text(), everything))
    for name, one in everything.items():
        draw(page.parent / "pictures", name, one["results"])


if __name__ == "__main__":
    main()
