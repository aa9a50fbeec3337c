"""The page of the evaluation: tables and plots of its cells, with their data as CSV beside it.

The page has a pair of comments for each table, between which it is written; all else is left as it is.
"""

from __future__ import annotations

import csv
import json
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib
from matplotlib.figure import Figure as Picture

from benchmarks.evaluation.cells import Cell, Kind, MeasuredExtent, matrix
from benchmarks.evaluation.record import CONDITIONS, Record
from benchmarks.evaluation.summary import Failures, Throughput, comparable, failures, losses, throughputs
from benchmarks.evaluation.systems import LIVE
from benchmarks.figures import median_and_spread, number
from benchmarks.report import replaced, with_tables
from checkmate.wording import counted

_MB: Final = 1e6
_Rows = tuple[Sequence[str], Sequence[Sequence[str]]]
_COLUMNS: Final = ("kind", "workload", "system", "interval", "figure", "unit", "samples")


def write(page: Path, records: Mapping[Cell, Record], extent: MeasuredExtent) -> None:
    """Write tables and plots of the cells that there are, and the CSV.

    Args:
        page: The Markdown file. It may be missing.
        records: The cells' data.
        extent: What was measured.
    """
    compared = comparable(records, matrix(extent))
    undisturbed = throughputs(compared)
    disturbed, changed = failures(compared, extent.seconds), losses(records)
    text = page.read_text() if page.exists() else "# Evaluation\n"
    for name, table in (
        ("short", _table(*_short_rows(undisturbed, disturbed))),
        ("measured", _measured(records, len(records) - len(compared), extent)),
        ("throughput", _table(*_throughput_rows(undisturbed)) + _plot(page, undisturbed)),
        ("failures", _table(*_failure_rows(disturbed))),
        ("resources", _table(*_resource_rows(undisturbed))),
        ("losses", _table(*_loss_rows(changed))),
    ):
        text = replaced(text, name, table)
    beside = page.with_name("figures.json")
    if beside.exists():
        text = _with_figures(text, json.loads(beside.read_text()))
    page.write_text(text)
    _write_csv(page.with_suffix(".csv"), undisturbed, disturbed, changed)


def _with_figures(text: str, everything: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page with those figures of `benchmarks.report` that the paper's evaluation has, too."""
    chosen = {
        name: {**everything[name], "results": [one for one in everything[name]["results"] if wanted(one)]}
        for name, wanted in _ALSO.items()
        if name in everything
    }
    return with_tables(text, chosen)


def _of_allreduce(result: Mapping[str, Any]) -> bool:
    name = str(result["name"])
    return name.startswith("allreduce") and name.endswith(("from the ranks", "included"))


_ALSO: Final[Mapping[str, Callable[[Mapping[str, Any]], bool]]] = {
    "copies": _of_allreduce,
    "batches": lambda _: True,
    "shadow_cores": lambda _: True,
}


def _short_rows(undisturbed: Sequence[Throughput], disturbed: Sequence[Failures]) -> _Rows:
    """Return medians of the GPT with a checkpoint every iteration, and of what makes none."""
    head = (
        "system",
        "throughput, to none",
        "iterations repeated a kill",
        "to the next trained iteration, s",
        "useful iterations an hour, with kills",
    )
    known = {(one.system, one.interval): one for one in disturbed}
    rows = []
    for one in undisturbed:
        if one.workload != "gpt" or one.own or one.interval > 1:
            continue
        killed = known.get((one.system, one.interval))
        of_kills = () if killed is None else (killed.repeated, killed.next_trained, killed.useful)
        values = [number(statistics.median(each)) if each else "none" for each in (one.relative, *of_kills)]
        rows.append((one.system, *values, *[""] * (len(head) - 1 - len(values))))
    return head, rows


def _measured(records: Mapping[Cell, Record], left_out: int, extent: MeasuredExtent) -> str:
    if not records:
        return "Not measured yet.\n"
    lacking = f"{counted(left_out, 'cell')} of starts that lack a system are not in the tables below.\n"
    return (
        f"{len(records)} of {len(matrix(extent))} cells.\n{lacking * bool(left_out)}"
        f"{_missing([cell for cell in matrix(extent) if cell not in records])}"
        f"The time between failures is exponential, {extent.mtbf:g} s on average, "
        f"in periods of {extent.seconds:g} s.\n\n{_table(*_condition_rows(records))}"
    )


def _condition_rows(records: Mapping[Cell, Record]) -> _Rows:
    """Return by which commit and where the cells were measured. All of a round are alike."""
    alike: dict[tuple[str, ...], list[Cell]] = defaultdict(list)
    for cell in sorted(records):
        alike[tuple(getattr(records[cell], what) for what in CONDITIONS)].append(cell)
    rows = [
        (
            "; ".join(_starts(cells, kind) for kind in dict.fromkeys(cell.kind for cell in cells)),
            ", ".join(sorted({records[cell].day for cell in cells})),
            *where,
        )
        for where, cells in alike.items()
    ]
    return ("cells", "day", "commit", "machine", "checkpoints go to"), rows


def _starts(cells: Sequence[Cell], kind: Kind) -> str:
    if kind == "losses":
        return kind
    starts = sorted({cell.start + 1 for cell in cells if cell.kind == kind})
    return f"{kind}, start{'s' * (len(starts) > 1)} {', '.join(map(str, starts))}"


def _missing(cells: Sequence[Cell]) -> str:
    """Return a line for each kind of cell that was not measured, or has failed."""
    lines = ""
    for kind in dict.fromkeys(cell.kind for cell in cells):
        systems = [cell.system for cell in cells if cell.kind == kind]
        names = "; ".join(sorted(dict.fromkeys(systems)))
        line = f"Missing: {counted(len(systems), 'cell')} of {kind}, of {names}."
        lines += textwrap.fill(line, 119, break_on_hyphens=False) + "\n"
    return lines


def _throughput_rows(found: Sequence[Throughput]) -> _Rows:
    head = ("model", "system", "interval", "throughput, to none", "an iteration, s")
    rows = [
        (one.workload, one.system, _interval_of(one), _spread(one.relative), _spread(one.seconds))
        for one in found
    ]
    return head, rows


def _failure_rows(found: Sequence[Failures]) -> _Rows:
    head = (
        "system",
        "interval",
        "kills",
        "iterations repeated a kill",
        "to the next trained iteration, s",
        "to where training was, s",
        "useful iterations an hour",
    )
    rows = [
        (
            one.system,
            _interval(one.interval),
            str(one.kills),
            *(_spread(each) for each in (one.repeated, one.next_trained, one.regained, one.useful)),
        )
        for one in found
    ]
    return head, rows


def _resource_rows(found: Sequence[Throughput]) -> _Rows:
    head = (
        "model",
        "system",
        "interval",
        "trainer's memory",
        "helpers' memory",
        "written",
        "sent by trainers",
    )
    rows = [
        (
            one.workload,
            one.system,
            _interval_of(one),
            *(number(each / _MB, "MB") for each in (one.trainers, one.helpers, one.written, one.sent)),
        )
        for one in found
    ]
    return head, rows


def _loss_rows(found: Mapping[str, float]) -> _Rows:
    rows = [(system, "the same bits" if not most else f"{most:.3g}") for system, most in found.items()]
    return ("system", "greatest difference of a loss"), rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "Not measured yet.\n"
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _spread(samples: Sequence[float]) -> str:
    if not samples:
        return "none"
    return median_and_spread(samples) + " (n=1)" * (len(samples) == 1)


def _interval_of(one: Throughput) -> str:
    return _interval(one.interval) + ", its own" * one.own


def _interval(interval: int) -> str:
    return str(interval) if interval else "never"


def _plot(page: Path, found: Sequence[Throughput]) -> str:
    """Draw throughput beside frequency, for each model; return the page's links."""
    links = ""
    regular = [one for one in found if one.checkpoints and not one.own]
    places = sorted({one.checkpoints for one in regular})
    for workload in dict.fromkeys(one.workload for one in regular):
        picture = Picture(figsize=(8, 4.5), layout="constrained")
        axes = picture.add_subplot()
        for system in dict.fromkeys(one.system for one in regular):
            ours = [one for one in regular if (one.workload, one.system) == (workload, system)]
            if ours:
                ours.sort(key=lambda one: one.checkpoints)
                middle = [statistics.median(one.relative) for one in ours]
                below = [at - min(one.relative) for at, one in zip(middle, ours, strict=True)]
                above = [max(one.relative) - at for at, one in zip(middle, ours, strict=True)]
                places_of = [one.checkpoints for one in ours]
                axes.errorbar(places_of, middle, (below, above), marker="o", capsize=3, label=system)
        axes.axhline(1, color="0.4", linewidth=1, linestyle="--")
        for live in (one for one in found if (one.workload, one.system) == (workload, LIVE)):
            label = f"{LIVE}, no checkpoints"
            axes.axhline(statistics.median(live.relative), color="0.6", linestyle=":", label=label)
        axes.set(
            xscale="log",
            xlabel="checkpoints in 1,000 iterations",
            ylabel="throughput, to none",
            ylim=(0, None),
        )
        axes.set_xticks(places, [number(one) for one in places], minor=False)
        axes.set_xticks([], minor=True)
        axes.legend(fontsize="small")
        file = page.parent / "pictures" / f"evaluation-{workload}.svg"
        file.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context({"svg.hashsalt": "checkmate", "svg.fonttype": "none"}):
            picture.savefig(file, metadata={"Date": None})
        links += f"\n![Throughput beside the frequency of checkpoints, {workload}](pictures/{file.name})\n"
    return links


def _write_csv(
    file: Path, undisturbed: Sequence[Throughput], disturbed: Sequence[Failures], changed: Mapping[str, float]
) -> None:
    """Write every sample behind the tables."""
    with file.open("w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for one in undisturbed:
            where = ("throughput", one.workload, one.system, one.interval)
            for name, unit, samples in (
                ("throughput, to none", "", one.relative),
                ("an iteration", "s", one.seconds),
                ("trainer's memory", "B", (one.trainers,)),
                ("helpers' memory", "B", (one.helpers,)),
                ("written in an iteration", "B", (one.written,)),
                ("sent in an iteration", "B", (one.sent,)),
            ):
                writer.writerow([*where, name, unit, _samples(samples)])
        for each in disturbed:
            where = ("failures", "gpt", each.system, each.interval)
            for name, unit, samples in (
                ("iterations repeated", "", each.repeated),
                ("to the next trained iteration", "s", each.next_trained),
                ("to where training was", "s", each.regained),
                ("useful iterations an hour", "", each.useful),
            ):
                writer.writerow([*where, name, unit, _samples(samples)])
        for system, most in changed.items():
            writer.writerow(["losses", "gpt", system, 1, "greatest difference of a loss", "", repr(most)])


def _samples(samples: Sequence[float]) -> str:
    return " ".join(f"{one:.6g}" for one in samples)
