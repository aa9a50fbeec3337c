"""The `checkmate` console script. Ctrl-C ends it quietly even while libraries are being loaded."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, Final

from checkmate.base.wording import printable
from checkmate.output.standard_streams import OutputFile, is_output_error, note_output, use_plain_streams

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def main() -> None:
    """Run the command line; exit with status 130 and no traceback if it is interrupted."""
    output = note_output()
    use_plain_streams()
    status: Any
    try:
        status = _run_and_flush()
    except KeyboardInterrupt:
        status = 130
    except OSError as error:
        status = _report_full_disk(error, output)
    sys.exit(status)


def _run_and_flush() -> Any:
    """Run a command, and write what is left of its output. Return the exit status, or a message with it."""
    try:
        status: Any = _run()
    except KeyboardInterrupt:
        status = 130
    except SystemExit as end:  # a signal ends some commands in this way
        status = end.code
    sys.stdout.flush()
    return status


def _report_full_disk(error: OSError, output: OutputFile | None) -> int:
    """Tell of an output or a disk that is full, and return the exit status; raise any other error."""
    if is_output_error(error, output):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # it is flushed once more at the end
        if error.errno != errno.EPIPE:  # whoever closed a pipe knows it
            print(f"error: the output can't be written: {error.strerror}", file=sys.stderr)
        return 1
    if error.errno not in _FULL:
        raise error
    message = f"{printable(str(error.filename or 'a file'))} can't be written: {error.strerror}"
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
