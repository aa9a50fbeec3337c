"""`python -m tests.script_fuzz`: random training scripts with kills, compared with plain PyTorch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

EXAMPLE = """examples:
  python -m tests.script_fuzz --seed 17                a plan, with all that is known of it
  python -m tests.script_fuzz --cases 200 --first 0    the plans of the seeds 0 to 199
  python -m tests.script_fuzz --minutes 60 --json      random seeds for an hour
  python -m tests.script_fuzz --plan '{"turns": 5, "deeds": [...]}'
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the requested plans; return 1 if one shows a defect."""
    options = _parse(arguments)
    from tests.script_fuzz import campaign  # noqa: PLC0415 - for a quick --help
    from topologies.signals import unwinding  # noqa: PLC0415

    with unwinding():
        return campaign.main(options)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.script_fuzz",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--seed", type=int, help="run the plan of this seed")
    choice.add_argument("--cases", type=int, help="run this number of plans")
    choice.add_argument("--minutes", type=float, help="run plans for this time")
    choice.add_argument("--plan", help="run a plan from its JSON, or those in the lines of a file")
    choice.add_argument(
        "--elements", action="store_true", help="list what models have and scripts do by hand"
    )
    parser.add_argument("--first", type=int, help="seeds count up from here; by default from a random one")
    parser.add_argument("--without", default="", help="leave out plans with these elements or places")
    parser.add_argument("--show", action="store_true", help="print plans; run nothing")
    parser.add_argument(
        "--no-shrink", action="store_true", help="do not look for the smallest plan that fails"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the files of cases in this folder")
    parser.add_argument("--json", action="store_true", help="JSON on standard output, at the end")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
