"""The `checkmate` console script. Ctrl-C ends it quietly even while libraries are being loaded."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, Final

from checkmate.output.plain_text import use_plain_streams

_UNWRITABLE: Final = (errno.ENOSPC, errno.EPIPE, errno.EIO)


def main() -> None:
    """Run the command line; exit with status 130 and no traceback if it is interrupted."""
    use_plain_streams()
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # it is flushed once more at the end
        if error.errno != errno.EPIPE:  # whoever closed a pipe knows it
            print(f"error: the output can't be written: {error.strerror}", file=sys.stderr)
        sys.exit(1)


def _run() -> None:
    from checkmate.cli.main import app  # noqa: PLC0415 - takes a second

    try:
        if "--json" in sys.argv:
            sys.exit(_with_json())
        app()
    finally:
        sys.stdout.flush()


def _with_json() -> int:
    """Run a command that prints its errors as JSON, usage errors included; return the exit status."""
    import typer  # noqa: PLC0415

    from checkmate.cli.common import print_error  # noqa: PLC0415
    from checkmate.cli.main import app  # noqa: PLC0415

    try:
        status = app(standalone_mode=False)
    except typer.Abort:
        return 130
    except Exception as error:
        if not hasattr(error, "format_message"):  # click's, or typer's own copy of it
            raise
        usage: Any = error
        usage.show()
        print_error(usage.format_message(), usage.exit_code)
        return int(usage.exit_code)
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    main()
