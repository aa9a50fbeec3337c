"""Measure the README's figures.

python -m benchmarks               all of them, in one run
python -m benchmarks control_plane some
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from benchmarks.figures import Result, markdown, table
from topologies.signals import unwinding

SUITES = {
    "goodput": "switch.goodput",
    "packets": "switch.packets",
    "copies": "switch.copies",
    "faults": "switch.faults",
    "control_plane": "switch.control_plane",
    "allreduce": "training.allreduce",
    "shadow_receive": "shadow.receive",
    "shadow_step": "shadow.step",
    "shadow_memory": "shadow.memory",
    "iteration": "training.iteration",
    "batches": "shadow.batches",
    "recovery": "training.recovery",
}
"""Each suite's module."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("suite", nargs="*", help=f"which: {', '.join(SUITES)}; all by default")
    parser.add_argument("--json", action="store_true", help="data instead of tables")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables as Markdown")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.suite if name not in SUITES]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(SUITES)}")
    console = Console(stderr=arguments.json)
    found: dict[str, tuple[str, list[Result]]] = {}
    for name in arguments.suite or SUITES:
        module = importlib.import_module(f"benchmarks.{SUITES[name]}")
        console.print(f"[bold]{name}[/bold] ...")
        start = time.monotonic()
        with unwinding():  # a signal ends it as Ctrl-C does, and removes what it made
            found[name] = (module.TITLE, module.measure())
        console.print(table(*found[name]))
        console.print(f"({time.monotonic() - start:.0f} s)\n")
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(markdown(*one) for one in found.values()))
    if arguments.json:
        data = {
            name: [{"kind": type(r).__name__, **asdict(r)} for r in results]
            for name, (_, results) in found.items()
        }
        json.dump(data, sys.stdout, indent=2)
    return 1 if any(r.holds is False for _, rs in found.values() for r in rs if hasattr(r, "holds")) else 0


if __name__ == "__main__":
    sys.exit(main())
