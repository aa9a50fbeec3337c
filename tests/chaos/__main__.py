"""`python -m tests.chaos`: random training jobs with random faults, compared with undisturbed ones."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

EXAMPLE = """examples:
  python -m tests.chaos --seed 7                    one scenario, with all that is known of it
  python -m tests.chaos --seeds 1-20 --json         twenty of them, as JSON
  python -m tests.chaos --minutes 10                random seeds for ten minutes
  python -m tests.chaos --shrink 7                  the smallest part of seed 7 that still fails
  python -m tests.chaos --seed 7 --without stalls   as --seed 7, without some of its features
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the requested scenarios; return 1 if a promise was broken."""
    options = _parse(arguments)
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"  # before torch, whose threads a fork would lose
    from tests.chaos import campaign  # noqa: PLC0415 - it imports torch
    from topologies.signals import unwinding  # noqa: PLC0415

    with unwinding():
        return campaign.main(options)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.chaos",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--seed", type=int, help="run this scenario")
    choice.add_argument("--seeds", type=_range, help="run these scenarios: 1-20, or 3,5,8")
    choice.add_argument("--minutes", type=float, help="run random seeds for this time")
    choice.add_argument("--shrink", type=int, metavar="SEED", help="find the smallest part of it that fails")
    choice.add_argument("--scenario", type=Path, metavar="FILE", help="run a scenario from its JSON")
    choice.add_argument("--features", action="store_true", help="list the features for --without")
    parser.add_argument("--first", type=int, default=None, help="with --minutes: seeds count up from here")
    parser.add_argument("--without", default="", help="features to leave out, with commas between")
    parser.add_argument("--show", action="store_true", help="say what is generated; run nothing")
    parser.add_argument("--keep", type=Path, help="keep the logs of those that fail in this folder")
    parser.add_argument("--json", action="store_true", help="JSON on standard output, at the end")
    return parser.parse_args(arguments)


def _range(text: str) -> list[int]:
    if "-" in text:
        first, last = text.split("-", 1)
        return list(range(int(first), int(last) + 1))
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
