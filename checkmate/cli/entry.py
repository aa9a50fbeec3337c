"""The `checkmate` console script. Ctrl-C ends it quietly even while libraries are being loaded."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, Final

from checkmate.output.noted import note_output, output_fault
from checkmate.output.plain_text import use_plain_streams

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def main() -> None:
    """Run the command line; exit with status 130 and no traceback if it is interrupted."""
    note_output()
    use_plain_streams()
    try:
        status = _run()
        _flush()
    except KeyboardInterrupt:
        status = 130
    except OSError as error:
        status = _told(error)
    sys.exit(status)


def _flush() -> None:
    """Write what is left of the output, so that its errors are known before the exit status is."""
    if sys.stdout is not None:  # without a file descriptor 1, there is none
        sys.stdout.flush()


def _told(error: OSError) -> int:
    """Tell of an output or a disk that is full, and return the exit status; raise any other error."""
    if (fault := output_fault()) is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # it is flushed once more at the end
        if fault.errno != errno.EPIPE:  # whoever closed a pipe knows it
            print(f"error: the output can't be written: {fault.strerror}", file=sys.stderr)
        return 1
    if error.errno not in _FULL:
        raise error
    message = f"{error.filename or 'a file'} can't be written: {error.strerror}"
    print(f"error: {message}", file=sys.stderr)
    if "--json" in sys.argv:
        from checkmate.cli.common import print_error  # noqa: PLC0415

        print_error(message, 1)
    return 1


def _run() -> int:
    """Run a command; return the exit status. With --json, its errors are JSON, too, usage errors included."""
    import typer  # noqa: PLC0415

    from checkmate.cli.common import print_error  # noqa: PLC0415
    from checkmate.cli.main import app  # noqa: PLC0415 - takes a second

    try:
        status = app(standalone_mode=False)
    except typer.Abort as abort:  # Ctrl-C or Ctrl-D at a question
        if not isinstance(abort.__cause__ or abort.__context__, EOFError):
            return 130
        print("error: the answers ended before the last question", file=sys.stderr)
        return 1
    except Exception as error:
        if not hasattr(error, "format_message"):  # click's, or typer's own copy of it
            raise
        usage: Any = error
        usage.show()
        if "--json" in sys.argv:
            print_error(usage.format_message(), usage.exit_code)
        return int(usage.exit_code)
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    main()
