"""`python -m checkmate.tagger`: compiles the tagger, tries it, and reports whether it works here."""

from __future__ import annotations

import argparse
import sys

from checkmate.tagger import Tagger, TaggerUnavailable
from checkmate.tagger.libbpf import object_file


def main() -> int:
    """Return exit status 0 if the tagger works, or 1 after a line about the missing requirement."""
    parser = argparse.ArgumentParser(
        prog="python -m checkmate.tagger",
        description=__doc__,
        epilog="example: python -m checkmate.tagger --build",
    )
    parser.add_argument("--build", action="store_true", help="only compile, as set-up does")
    arguments = parser.parse_args()
    try:
        print(f"compiled: {object_file()}")
        if not arguments.build:
            with Tagger.attach() as tagger:
                print(f"attached as program {tagger.program_id}, and detached again")
    except TaggerUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
