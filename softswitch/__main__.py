"""The `softswitch` command, and `python -m softswitch`."""

from __future__ import annotations

import sys

from checkmate.base.extras import ExtraMissing, needs


def main() -> int:
    """Run a switch until SIGINT or SIGTERM; return the exit status."""
    try:
        with needs("softswitch", "switch"):
            from softswitch import process  # noqa: PLC0415 - its libraries may be missing
    except ExtraMissing as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return process.main()


if __name__ == "__main__":
    sys.exit(main())
