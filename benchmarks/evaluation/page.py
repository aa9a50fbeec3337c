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
from benchmarks.report import replace_section, with_tables
from checkmate.base.wording import counted

_MB: Final = 1e6
_Rows = tuple[Sequence[str], Sequence[Sequence[str]]]
_COLUMNS: Final = ("kind", "workload", "system", "interval", "figure", "unit", "samples")


def write(page: Path, records: Mapping[Cell, Record], extent: MeasuredExtent) -> None:
    """Write tables and plots of the cells that there are, and the CSV.

    An extent that has only cells with kills has a section of its own, and its CSV has the extent's name.

    Args:
        page: The Markdown file. It may be missing.
        records: The cells' data.
        extent: The cells that were planned.
    """
    compared = comparable(records, matrix(extent))
    undisturbed = throughputs(compared)
    disturbed, differences = failures(compared, extent.seconds), losses(records)
    measured = _measurement_section(records, len(records) - len(compared), extent)
    table = _table(*_failure_rows(disturbed))
    if extent.starts:
        sections = {
            "short": _table(*_short_rows(undisturbed, disturbed)),
            "measured": measured,
            "throughput": _table(*_throughput_rows(undisturbed)) + _plot(page, undisturbed),
            "failures": table,
            "resources": _table(*_resource_rows(undisturbed)),
            "losses": _table(*_loss_rows(differences)),
        }
    else:
        sections = {extent.name: f"{measured}\n{table}{_recovery_plot(page, extent.name, disturbed)}"}
    text = page.read_text() if page.exists() else "# Evaluation\n"
    for name, section in sections.items():
        text = replace_section(text, name, section)
    beside = page.with_name("figures.json")
    if beside.exists():
        text = _with_figures(text, json.loads(beside.read_text()))
    page.write_text(text)
    _write_csv(data_of(page, extent).with_suffix(".csv"), undisturbed, disturbed, differences)


def data_of(page: Path, extent: MeasuredExtent) -> Path:
    """Return the path of the extent's data beside a page, with the page's suffix."""
    return page if extent.starts else page.with_stem(f"{page.stem}-{extent.name}")


def _with_figures(text: str, everything: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page with those figures of `benchmarks.report` that the paper's evaluation has, too."""
    selection = {
        name: {
            **everything[name],
            "results": [result for result in everything[name]["results"] if is_wanted(result)],
        }
        for name, is_wanted in _ALSO.items()
        if name in everything
    }
    return with_tables(text, selection)


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
    failures_by_system = {(throughput.system, throughput.interval): throughput for throughput in disturbed}
    rows = []
    for throughput in undisturbed:
        if throughput.workload != "gpt" or throughput.has_own_interval or throughput.interval > 1:
            continue
        killed = failures_by_system.get((throughput.system, throughput.interval))
        of_kills = () if killed is None else (killed.repeated, killed.next_trained, killed.useful)
        values = [
            number(statistics.median(samples)) if samples else "none"
            for samples in (throughput.relative, *of_kills)
        ]
        rows.append((throughput.system, *values, *[""] * (len(head) - 1 - len(values))))
    return head, rows


def _measurement_section(records: Mapping[Cell, Record], left_out: int, extent: MeasuredExtent) -> str:
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
        alike[tuple(getattr(records[cell], condition) for condition in CONDITIONS)].append(cell)
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


def _throughput_rows(throughputs: Sequence[Throughput]) -> _Rows:
    head = ("model", "system", "interval", "throughput, to none", "an iteration, s")
    rows = [
        (
            throughput.workload,
            throughput.system,
            _interval_of(throughput),
            _spread(throughput.relative),
            _spread(throughput.seconds),
        )
        for throughput in throughputs
    ]
    return head, rows


def _failure_rows(failures: Sequence[Failures]) -> _Rows:
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
            failure.system,
            _interval(failure.interval),
            str(failure.kills),
            *(
                _spread(samples)
                for samples in (failure.repeated, failure.next_trained, failure.regained, failure.useful)
            ),
        )
        for failure in failures
    ]
    return head, rows


def _resource_rows(throughputs: Sequence[Throughput]) -> _Rows:
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
            throughput.workload,
            throughput.system,
            _interval_of(throughput),
            *(
                number(nbytes / _MB, "MB")
                for nbytes in (
                    throughput.trainers,
                    throughput.helpers,
                    throughput.written_bytes,
                    throughput.sent_bytes,
                )
            ),
        )
        for throughput in throughputs
    ]
    return head, rows


def _loss_rows(differences: Mapping[str, float]) -> _Rows:
    rows = [
        (system, "the same bits" if not greatest else f"{greatest:.3g}")
        for system, greatest in differences.items()
    ]
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


def _interval_of(throughput: Throughput) -> str:
    return _interval(throughput.interval) + ", its own" * throughput.has_own_interval


def _interval(interval: int) -> str:
    return str(interval) if interval else "never"


def _recovery_plot(page: Path, name: str, failures: Sequence[Failures]) -> str:
    """Draw the seconds that each kill cost, by system; return the page's link."""
    if not failures:
        return ""
    picture = Picture(figsize=(8, 0.6 + 0.45 * len(failures)), layout="constrained")
    axes = picture.add_subplot()
    for row, failure in enumerate(failures):
        places = [row] * len(failure.next_trained)
        axes.plot(failure.next_trained, places, "o", color="0.45", alpha=0.5, markersize=5)
        if failure.next_trained:
            axes.plot(statistics.median(failure.next_trained), row, "|", color="black", markersize=18)
    axes.set(xlabel="seconds from a kill to the next trained iteration; a line at the median", xlim=(0, None))
    axes.set_yticks(range(len(failures)), [failure.system for failure in failures])
    axes.invert_yaxis()
    file = page.parent / "pictures" / f"evaluation-{name}.svg"
    _save(picture, file)
    return f"\n![Seconds from a kill to the next trained iteration, by system](pictures/{file.name})\n"


def _save(picture: Picture, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "checkmate", "svg.fonttype": "none"}):
        picture.savefig(file, metadata={"Date": None})


def _plot(page: Path, throughputs: Sequence[Throughput]) -> str:
    """Draw throughput beside frequency, for each model; return the page's links."""
    links = ""
    regular = [
        throughput for throughput in throughputs if throughput.checkpoints and not throughput.has_own_interval
    ]
    places = sorted({throughput.checkpoints for throughput in regular})
    for workload in dict.fromkeys(throughput.workload for throughput in regular):
        picture = Picture(figsize=(8, 4.5), layout="constrained")
        axes = picture.add_subplot()
        for system in dict.fromkeys(throughput.system for throughput in regular):
            series = [
                throughput
                for throughput in regular
                if (throughput.workload, throughput.system) == (workload, system)
            ]
            if series:
                series.sort(key=lambda throughput: throughput.checkpoints)
                middle = [statistics.median(throughput.relative) for throughput in series]
                below = [at - min(throughput.relative) for at, throughput in zip(middle, series, strict=True)]
                above = [max(throughput.relative) - at for at, throughput in zip(middle, series, strict=True)]
                places_of = [throughput.checkpoints for throughput in series]
                axes.errorbar(places_of, middle, (below, above), marker="o", capsize=3, label=system)
        axes.axhline(1, color="0.4", linewidth=1, linestyle="--")
        for live in (
            throughput
            for throughput in throughputs
            if (throughput.workload, throughput.system) == (workload, LIVE)
        ):
            label = f"{LIVE}, no checkpoints"
            axes.axhline(statistics.median(live.relative), color="0.6", linestyle=":", label=label)
        axes.set(
            xscale="log",
            xlabel="checkpoints in 1,000 iterations",
            ylabel="throughput, to none",
            ylim=(0, None),
        )
        axes.set_xticks(places, [number(throughput) for throughput in places], minor=False)
        axes.set_xticks([], minor=True)
        axes.legend(fontsize="small")
        file = page.parent / "pictures" / f"evaluation-{workload}.svg"
        _save(picture, file)
        links += f"\n![Throughput beside the frequency of checkpoints, {workload}](pictures/{file.name})\n"
    return links


def _write_csv(
    file: Path,
    undisturbed: Sequence[Throughput],
    disturbed: Sequence[Failures],
    differences: Mapping[str, float],
) -> None:
    """Write every sample behind the tables."""
    with file.open("w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for throughput in undisturbed:
            where = ("throughput", throughput.workload, throughput.system, throughput.interval)
            for name, unit, samples in (
                ("throughput, to none", "", throughput.relative),
                ("an iteration", "s", throughput.seconds),
                ("trainer's memory", "B", (throughput.trainers,)),
                ("helpers' memory", "B", (throughput.helpers,)),
                ("written in an iteration", "B", (throughput.written_bytes,)),
                ("sent in an iteration", "B", (throughput.sent_bytes,)),
            ):
                writer.writerow([*where, name, unit, _samples(samples)])
        for failure in disturbed:
            where = ("failures", "gpt", failure.system, failure.interval)
            for name, unit, samples in (
                ("iterations repeated", "", failure.repeated),
                ("to the next trained iteration", "s", failure.next_trained),
                ("to where training was", "s", failure.regained),
                ("useful iterations an hour", "", failure.useful),
            ):
                writer.writerow([*where, name, unit, _samples(samples)])
        for system, greatest in differences.items():
            writer.writerow(["losses", "gpt", system, 1, "greatest difference of a loss", "", repr(greatest)])


def _samples(samples: Sequence[float]) -> str:
    return " ".join(f"{sample:.6g}" for sample in samples)
