"""`checkmate schema`: print the JSON Schema of a kind of file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final

import typer

from checkmate.cli.common import UsageFault, print_json, says_errors
from checkmate.job import editor_schema
from checkmate.wording import meant
from topologies.describe.lab_file import LabFile

SCHEMAS: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "job": editor_schema.of_job,
    "fabric": editor_schema.of_fabric,
    "lab": lambda: editor_schema.of_model(LabFile),
}


def _names() -> list[str]:
    return list(SCHEMAS)


@says_errors
def schema(
    name: Annotated[str, typer.Argument(help=f"{', '.join(SCHEMAS)}.", autocompletion=_names)],
) -> None:
    """Print the JSON Schema of job files, fabric files or labs, which editors use.

    `checkmate init` writes that of job files beside a new job file.

    Example: checkmate schema job > job.schema.json
    """
    if name not in SCHEMAS:
        raise UsageFault(f"no schema {name!r}{meant(name, SCHEMAS)}; there are {', '.join(SCHEMAS)}")
    print_json(SCHEMAS[name]())
