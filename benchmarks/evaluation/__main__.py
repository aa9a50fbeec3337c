"""Measure Checkmate beside other ways to survive failures.

python -m benchmarks.evaluation                  all of it: up to 8 hours on two cores
python -m benchmarks.evaluation --quick          30 minutes
python -m benchmarks.evaluation --only gpt --only failures --page docs/evaluation.md

Each cell is added to --raw once it is measured, so that an interrupted run goes on where it was. To measure
all again, remove that file. With --page, the tables and plots of that page are written again from all cells
that there are.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from rich.progress import Progress

from benchmarks.evaluation.cache import Cache
from benchmarks.evaluation.cells import QUICK, WHOLE, Cell, Extent, matrix
from benchmarks.evaluation.measure import clear, measure
from benchmarks.evaluation.page import write
from benchmarks.evaluation.systems import installed
from checkmate.output.plain_text import use_plain_streams
from topologies.describe.topology import LabError
from topologies.signals import unwinding


def main() -> int:
    """Measure what is not measured yet; return 1 if a cell has failed."""
    options = parse()
    if os.geteuid() != 0:
        print("the evaluation needs root, for network namespaces", file=sys.stderr)
        return 1
    use_plain_streams()
    extent = QUICK if options.quick else WHOLE
    cells = [cell for cell in matrix(extent) if all(word in cell.key for word in options.only)]
    for system in sorted({cell.system for cell in cells if not installed(cell.system)}):
        print(f"{system} is left out, because its package is missing: run make comparators", file=sys.stderr)
    cells = [cell for cell in cells if installed(cell.system)]
    cache = Cache(options.raw, extent)
    clear(options.scratch)
    failed = _measure(cells, extent, cache, options.scratch.resolve())
    if options.page is not None:
        write(options.page, cache.records(matrix(extent)), extent)
    return 1 if failed else 0


def _measure(cells: list[Cell], extent: Extent, cache: Cache, scratch: Path) -> int:
    """Measure the cells that the cache lacks; return how many have failed."""
    missing = [cell for cell in cells if cell not in cache]
    if len(missing) < len(cells):
        print(f"{len(cells) - len(missing)} of {len(cells)} cells are measured already")
    failed = 0
    with Progress(transient=True) as bar, unwinding():
        task = bar.add_task("cells", total=len(missing))
        for cell in missing:
            began = time.monotonic()
            try:
                found = measure(cell, extent, scratch, lambda text: bar.update(task, description=text))
            except LabError as error:
                failed += 1
                print(f"{cell.key} failed: {error}", file=sys.stderr)
            else:
                cache.put(cell, found)
                bar.console.print(f"{cell.key}: {time.monotonic() - began:.0f} s")
            bar.advance(task)
    return failed


def parse() -> argparse.Namespace:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.evaluation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--quick", action="store_true", help="few cells, measured once")
    made.add_argument(
        "--only", action="append", default=[], metavar="WORD", help="cells whose name has this word"
    )
    made.add_argument("--raw", type=Path, default=Path("out/evaluation.jsonl"), help="file of raw data")
    made.add_argument("--page", type=Path, metavar="PAGE.md", help="write tables, plots and CSV")
    made.add_argument(
        "--scratch",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="folder on the file system to which checkpoints are written",
    )
    return made.parse_args()


if __name__ == "__main__":
    sys.exit(main())
