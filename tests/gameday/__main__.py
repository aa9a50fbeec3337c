"""`python -m tests.gameday`: three jobs and three switches, with faults, and every alert accounted for."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

EXAMPLE = """examples:
  python -m tests.gameday --seed 7 --minutes 20            a game day, with all that it finds
  python -m tests.gameday --seed 7 --show                  its first incidents; runs nothing
  python -m tests.gameday --minutes 3 --only "lost shard"  incidents of one kind

Alerts are checked if prometheus is on PATH. Needs root.
"""
_INCIDENTS_SHOWN = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a game day; return 1 if something was not as it should be, 2 for bad input."""
    options = _parse(arguments)
    from tests.gameday.draw import OF_A_JOB, OF_THE_FABRIC, schedule  # noqa: PLC0415 - after --help

    kinds = tuple(kind for kind in options.only.split(",") if kind)
    known_kinds = [*OF_A_JOB, *OF_THE_FABRIC]
    if unknown := [kind for kind in kinds if kind not in known_kinds]:
        print(f"gameday: --only {unknown[0]}: there are {', '.join(known_kinds)}", file=sys.stderr)
        return 2
    if options.show:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever reads may have seen enough
        incidents = schedule(options.seed, kinds=kinds)
        print("\n".join(str(next(incidents)) for _ in range(_INCIDENTS_SHOWN)))
        return 0
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"  # before torch, whose threads a fork would lose
    from tests.gameday import report, run  # noqa: PLC0415 - they import torch
    from topologies.describe.topology import LabError  # noqa: PLC0415
    from topologies.signals import unwinding  # noqa: PLC0415

    began = time.monotonic()

    def say(subject: str, text: str) -> None:
        print(f"{time.monotonic() - began:7.1f}  {subject:8}  {text}", file=sys.stderr, flush=True)

    try:
        with unwinding():
            outcome = run.run(
                options.seed, options.minutes, name=options.name, kinds=kinds, keep=options.keep, say=say
            )
    except (LabError, OSError) as error:
        print(f"gameday: {error}", file=sys.stderr)
        return 2
    print(report.text(outcome))
    return int(bool(outcome.problems))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.gameday",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=1, help="of the schedule and of the training (1)")
    parser.add_argument("--minutes", type=_minutes, default=20.0, help="for how long incidents begin (20)")
    parser.add_argument("--name", default="", help="of the lab")
    parser.add_argument("--only", default="", metavar="KINDS", help="kinds of incidents, with commas between")
    parser.add_argument("--show", action="store_true", help="show the schedule; run nothing")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the logs there")
    return parser.parse_args(arguments)


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < 24 * 60:
        raise argparse.ArgumentTypeError(f"{text} is not a number of minutes above 0 and within a day")
    return minutes


if __name__ == "__main__":
    sys.exit(main())
