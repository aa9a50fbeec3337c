"""Measure Checkmate beside other ways to survive failures.

python -m benchmarks.evaluation                  all of it: up to 8 hours on two cores
python -m benchmarks.evaluation --quick          30 minutes
python -m benchmarks.evaluation --recovery       systems that keep processes, with kills: half an hour
python -m benchmarks.evaluation --only gpt --only failures --page docs/evaluation.md
python -m benchmarks.evaluation --only "Gemini, blocking"

Each cell is added to --raw once it is measured, so that an interrupted run goes on where it was. All cells of
a start must be of one commit and machine; to measure all again, remove that file. With --page, the tables and
plots of that page are written again from all cells that there are, and the data beside them, as .jsonl.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.progress import Progress

from benchmarks.evaluation.cache import Cache, Unusable
from benchmarks.evaluation.cells import QUICK, RECOVERY, WHOLE, Cell, MeasuredExtent, matrix
from benchmarks.evaluation.measure import Here, clear, file_system_of, measure
from benchmarks.evaluation.page import data_of, write
from benchmarks.evaluation.record import Record
from benchmarks.evaluation.systems import is_installed
from benchmarks.report import commit, machine
from checkmate.output.standard_streams import use_plain_streams
from topologies.describe.topology import LabError
from topologies.signals import unwinding

_MAX_FAILURES: Final = 3
"""Cells that may fail one after another: then something else is wrong."""


def main() -> int:
    """Measure what is not measured yet; return 1 if a cell has failed, and 2 if nothing can be measured."""
    options = parse()
    use_plain_streams()
    extent = QUICK if options.quick else RECOVERY if options.recovery else WHOLE
    try:
        cells = _select(matrix(extent), options.only)
        cache = Cache(options.raw, extent)
        failed = 0 if options.page_only else _all(cells, extent, cache, options.scratch)
    except (Unusable, LabError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on with what {options.raw} lacks", file=sys.stderr)
        return 130
    if options.page is not None:
        write(options.page, cache.records(matrix(extent)), extent)
        beside = data_of(options.page, extent).with_suffix(".jsonl")
        if options.raw.exists() and not (beside.exists() and beside.samefile(options.raw)):
            shutil.copyfile(options.raw, beside)
    return 1 if failed else 0


def _select(cells: Sequence[Cell], words: Sequence[str]) -> list[Cell]:
    """Return the cells that have each word in their name, as it is or as tables have it."""
    matches = [
        cell for cell in cells if all(word in f"{cell.key}\n{cell.kind}\n{cell.system}" for word in words)
    ]
    if not matches:
        systems = ", ".join(sorted({cell.system for cell in cells}))
        raise Unusable(
            f"no cell has all of {', '.join(map(repr, words))} in its name; a name has a kind (throughput, "
            f"failures, losses), a model ({', '.join(sorted({cell.workload for cell in cells}))}), "
            f"and a system: {systems}"
        )
    return matches


def _all(cells: Sequence[Cell], extent: MeasuredExtent, cache: Cache, scratch: Path) -> int:
    """Measure all that can be measured here; return how many cells have failed."""
    if os.geteuid() != 0:
        raise Unusable("the evaluation needs root, for network namespaces")
    here = Here(commit(), scratch.resolve(), Path("out/evaluation-failed"))
    file_system = file_system_of(here.scratch)
    if file_system == "tmpfs":
        print(f"{scratch} is in memory (tmpfs): checkpoints do not go to a disk", file=sys.stderr)
    for system in sorted({cell.system for cell in cells if not is_installed(cell.system)}):
        print(f"{system} is left out, because its package is missing: run make comparators", file=sys.stderr)
    cells = [cell for cell in cells if is_installed(cell.system)]
    missing = [cell for cell in cells if cell not in cache]
    cache.require_same(missing, Record(here.commit, "", machine(), file_system))
    if len(missing) < len(cells):
        print(f"{len(cells) - len(missing)} of {len(cells)} cells are measured already")
    if missing:
        clear(here.scratch)
    with unwinding():
        return _measure(missing, extent, cache, here)


def _measure(cells: Sequence[Cell], extent: MeasuredExtent, cache: Cache, here: Here) -> int:
    """Measure cells; return how many have failed. Raise `Unusable` if several do so one after another."""
    failed: list[bool] = []
    with Progress(transient=True) as bar:
        task = bar.add_task("cells", total=len(cells))
        for cell in cells:
            began = time.monotonic()
            try:
                record = measure(cell, extent, here, lambda text: bar.update(task, description=text))
            except LabError as error:
                failed.append(True)
                logs = here.failed / cell.key
                print(f"{cell.key} failed: {error}; its logs are in {logs}", file=sys.stderr)
            else:
                failed.append(False)
                cache.put(cell, record)
                bar.console.print(f"{cell.key}: {time.monotonic() - began:.0f} s")
            if all(failed[-_MAX_FAILURES:]) and len(failed) >= _MAX_FAILURES:
                raise Unusable(f"the last {_MAX_FAILURES} cells have failed")
            if commit() != here.commit:
                raise Unusable(f"this tree is no longer that of commit {here.commit}, which is measured")
            bar.advance(task)
    return sum(failed)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evaluation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--quick", action="store_true", help="few cells, measured once")
    choice.add_argument("--recovery", action="store_true", help="what recovers in place, and what does not")
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD", help="cells whose name has this word"
    )
    parser.add_argument(
        "--raw", type=_file, default=Path("out/evaluation.jsonl"), help="file of raw data, which may be new"
    )
    parser.add_argument("--page", type=_file, metavar="PAGE.md", help="write tables, plots and CSV")
    parser.add_argument("--page-only", action="store_true", help="measure nothing")
    parser.add_argument(
        "--scratch",
        type=_folder,
        default=Path(tempfile.gettempdir()),
        help="folder on the file system to which checkpoints are written",
    )
    return parser.parse_args()


def _file(text: str) -> Path:
    """Return the path of a file that is there or can be made."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path.parent} is not a folder: {error.strerror}") from None
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; name a file")
    return path


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return Path(text)


if __name__ == "__main__":
    sys.exit(main())
