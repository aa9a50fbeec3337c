"""Options for models, shared by `plan --capacity` and `profile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from checkmate.cli.common import UsageFault

Optimizer = Annotated[
    str,
    typer.Option(
        "--optimizer", help="Optimizer, such as adamw or sgd,momentum=0.9.", metavar="NAME[,OPTION=VALUE]"
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="Type of the parameters.", show_default="the model's own", metavar="TYPE"),
]
IterationTime = Annotated[
    str | None,
    typer.Option(
        "--iteration-time", help="Duration of an iteration, such as 1.5s.", show_default=False, metavar="TIME"
    ),
]
ReceiveBuffer = Annotated[
    int, typer.Option("--receive-buffer", min=1, max=1023, help="Socket buffer of each stream, in MB.")
]


def quantity(option: str, text: str, parse: Callable[[object], float]) -> float:
    """Parse an option's value, a positive number with a unit. Raise `UsageFault` if it is wrong."""
    try:
        found = parse(text)
    except ValueError as error:
        raise UsageFault(f"{option} {error}") from None
    if not found > 0:
        raise UsageFault(f"{option} must be more than 0, not {text}")
    return found
