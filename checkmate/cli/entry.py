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
        sys.exit(_run())
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # it is flushed once more at the end
        if error.errno != errno.EPIPE:  # whoever closed a pipe knows it
            print(f"error: the output can't be written: {error.strerror}", file=sys.stderr)
        sys.exit(1)


def _run() -> int:
    """Run a command; return the exit status. With --json, its errors are JSON, too, usage errors included."""
    import typer  # noqa: PLC0415

    from checkmate.cli.common import print_error  # noqa: PLC0415
    from checkmate.cli.main import app  # noqa: PLC0415 - takes a second

    try:
        status = app(standalone_mode=False)
    except typer.Abort:  # Ctrl-C at a question
        return 130
    except Exception as error:
        if not hasattr(error, "format_message"):  # click's, or typer's own copy of it
            raise
        usage: Any = error
        usage.show()
        if "--json" in sys.argv:
            print_error(usage.format_message(), usage.exit_code)
        return int(usage.exit_code)
    finally:
        sys.stdout.flush()
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    main()
