"""The `checkmate` command."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from checkmate.cli import consolidate, cost, lab, plan, profile, remove, run, shadow, shell, status, validate

app = typer.Typer(
    name="checkmate",
    help="Checkpoints of data-parallel training, never older than one iteration.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    validate.validate,
    plan.plan,
    run.run,
    status.status,
    remove.remove,
    shell.shell,
    shadow.shadow,
    consolidate.consolidate,
    cost.cost,
    profile.profile,
):
    app.command()(command)
app.add_typer(lab.app, name="lab")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"checkmate {metadata.version('checkmate-training')}")
        raise typer.Exit


if __name__ == "__main__":
    app()
