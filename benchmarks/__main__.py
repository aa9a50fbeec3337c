"""Measure the figures of docs/figures.md.

python -m benchmarks                                        all of them, in one run
python -m benchmarks control_plane                          some
python -m benchmarks recovery --report docs/figures.md      also write them to the page
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from benchmarks.figures import Result, data, table
from benchmarks.report import commit, machine, report
from checkmate.output.consoles import text_console
from checkmate.output.standard_streams import use_plain_streams
from topologies.signals import undisturbed, unwinding

SUITES = {
    "goodput": "switch.goodput",
    "packets": "switch.packets",
    "copies": "switch.copies",
    "faults": "switch.faults",
    "control_plane": "switch.control_plane",
    "syn_flood": "switch.syn_flood",
    "allreduce": "training.allreduce",
    "trees": "training.trees",
    "nccl_speed": "training.nccl_speed",
    "shadow_receive": "shadow.receive",
    "shadow_part_streams": "shadow.part_streams",
    "shadow_step": "shadow.step",
    "shadow_cores": "shadow.cores",
    "shadow_memory": "shadow.memory",
    "tls": "shadow.tls",
    "iteration": "training.iteration",
    "host_copies": "training.host_copies",
    "gpu": "training.gpu",
    "lost_copies": "training.lost_copies",
    "sharded": "training.sharded",
    "recording": "training.recording",
    "metrics": "training.scraped",
    "batches": "shadow.batches",
    "recovery": "training.recovery",
    "in_place": "training.in_place",
    "many_recoveries": "training.many_recoveries",
    "fewer_replicas": "training.fewer_replicas",
}
"""The module of each benchmark."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("suite", nargs="*", help=f"the benchmarks: {', '.join(SUITES)}; all by default")
    parser.add_argument("--json", action="store_true", help="data instead of tables")
    parser.add_argument(
        "--report", type=Path, metavar="PAGE.md", help="also write tables, plots, and the data as PAGE.json"
    )
    arguments = parser.parse_args()
    unknown = [name for name in arguments.suite if name not in SUITES]
    if unknown:
        parser.error(f"unknown benchmark {', '.join(unknown)}; known are {', '.join(SUITES)}")
    use_plain_streams()
    console = text_console(stderr=arguments.json)
    results: dict[str, tuple[str, list[Result]]] = {}
    try:
        with unwinding():
            interruption = _measure_all(arguments.suite or SUITES, results, console)
            with undisturbed():  # a second signal often follows the first
                _keep(results, arguments)
    except (KeyboardInterrupt, SystemExit) as exit_error:
        interruption = exit_error
    if interruption is not None:
        with contextlib.suppress(OSError):  # the terminal may have gone away
            print(f"interrupted; measured before: {', '.join(results) or 'nothing'}", file=sys.stderr)
        sys.exit(interruption.code if isinstance(interruption, SystemExit) else 130)
    return 1 if any(r.holds is False for _, rs in results.values() for r in rs if hasattr(r, "holds")) else 0


def _measure_all(
    names: Iterable[str], measured: dict[str, tuple[str, list[Result]]], console: Console
) -> KeyboardInterrupt | SystemExit | None:
    """Add what is measured to `measured`; return what has ended it early: Ctrl-C, or another signal."""
    try:
        for name in names:
            measured[name] = _measure(name, console)
    except (KeyboardInterrupt, SystemExit) as end:
        return end
    return None


def _keep(measured: dict[str, tuple[str, list[Result]]], arguments: argparse.Namespace) -> None:
    """Write the page, and the data to standard output, as the command line says."""
    if arguments.report and measured:
        report(arguments.report, measured, datetime.datetime.now(datetime.UTC).date(), machine(), commit())
    if arguments.json:
        json.dump({name: data(results) for name, (_, results) in measured.items()}, sys.stdout, indent=2)


def _measure(name: str, console: Console) -> tuple[str, list[Result]]:
    """Return a benchmark's title and figures, and print them."""
    module = importlib.import_module(f"benchmarks.{SUITES[name]}")
    console.print(f"[bold]{name}[/bold] ...")
    start = time.monotonic()
    result = (module.TITLE, module.measure())
    console.print(table(*result))
    console.print(f"({time.monotonic() - start:.0f} s)\n")
    return result


if __name__ == "__main__":
    sys.exit(main())
