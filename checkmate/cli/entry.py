"""The `checkmate` console script: Ctrl-C while the libraries load ends it as quietly as later."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; status 130 and no traceback where it is interrupted."""
    try:
        from checkmate.cli.main import app  # noqa: PLC0415 - takes a second

        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
