"""The `checkmate` console script. Ctrl-C ends it quietly even while libraries are being loaded."""

from __future__ import annotations

import sys
from typing import Any

from checkmate.output.plain_text import use_plain_streams


def main() -> None:
    """Run the command line; exit with status 130 and no traceback if it is interrupted."""
    use_plain_streams()
    try:
        from checkmate.cli.main import app  # noqa: PLC0415 - takes a second

        if "--json" in sys.argv:
            sys.exit(_with_json())
        app()
    except KeyboardInterrupt:
        sys.exit(130)


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
