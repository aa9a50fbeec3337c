"""The `checkmate` command. Commands load on demand, because a host has its role's libraries only."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module, metadata
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from checkmate.cli.common import AsJson, says_errors
from checkmate.extras import ExtraMissing, needs_of

COMMANDS: Final[Mapping[str, str]] = {
    "validate": "validate",
    "plan": "planning.plan",
    "run": "run",
    "status": "status",
    "remove": "remove",
    "shell": "shell",
    "shadow": "shadow",
    "consolidate": "consolidate",
    "cost": "planning.cost",
    "profile": "planning.profile",
    "lab": "lab",
    "docs": "docs",
}
"""The module of each command. It has a function of that name, or an `app` with subcommands."""


class Commands(TyperGroup):
    """The commands, in the order of their help."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of that name, or `None`."""
        return _load(cmd_name) if cmd_name in COMMANDS else None


@cache
def _load(name: str) -> Any:
    try:
        with needs_of(name):
            module = import_module(f"checkmate.cli.{COMMANDS[name]}")
    except ExtraMissing as missing:
        return _refusing(name, missing)
    if hasattr(module, "app"):
        return typer.main.get_command(module.app)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name)(getattr(module, name))
    return typer.main.get_command(alone)


def _refusing(name: str, missing: ExtraMissing) -> Any:
    """Return a stand-in, which takes any arguments, for a command whose libraries are not installed."""
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    anything = {"allow_extra_args": True, "ignore_unknown_options": True}

    @alone.command(name, help=f"Needs: {missing.remedy}", context_settings=anything)
    @says_errors
    def command(as_json: AsJson = False) -> None:
        raise missing

    return typer.main.get_command(alone)


app = typer.Typer(
    name="checkmate",
    cls=Commands,
    help="Checkpoint data-parallel training after every iteration.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"checkmate {metadata.version('checkmate-training')}")
        raise typer.Exit


if __name__ == "__main__":
    app()
