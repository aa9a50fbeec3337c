"""The `checkmate` command. Commands load on demand, because a host has its role's libraries only."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Final

import typer

import checkmate
from checkmate.cli.common import AsJson, says_errors
from checkmate.cli.helping import App, Command, Group
from checkmate.extras import ExtraMissing, needs_of

COMMANDS: Final[Mapping[str, str]] = {
    "init": "init",
    "validate": "validate",
    "keys": "keys",
    "doctor": "doctor",
    "plan": "planning.plan",
    "sysctl": "sysctl",
    "run": "run",
    "status": "status",
    "report": "report",
    "remove": "remove",
    "shell": "shell",
    "shadow": "shadow",
    "consolidate": "consolidate",
    "reset": "reset",
    "drain": "drain",
    "cost": "planning.cost",
    "profile": "planning.profile",
    "lab": "lab",
    "nccl": "nccl",
    "schema": "schema",
    "docs": "docs",
}
"""The module of each command. It has a function of that name, or an `app` with subcommands."""


class Commands(Group):
    """The commands, in the order of their help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands.update({name: Command(name) for name in COMMANDS})  # to suggest one that was meant

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
    alone = App()
    alone.command(name)(getattr(module, name))
    return typer.main.get_command(alone)


def _refusing(name: str, missing: ExtraMissing) -> Any:
    """Return a stand-in, which takes any arguments, for a command whose libraries are not installed."""
    alone = App()
    anything = {"allow_extra_args": True, "ignore_unknown_options": True}

    @alone.command(name, help=f"Needs: {missing.remedy}", context_settings=anything)
    @says_errors
    def command(as_json: AsJson = False) -> None:
        raise missing

    return typer.main.get_command(alone)


app = App(
    name="checkmate",
    cls=Commands,
    help="Checkpoint data-parallel training after every iteration.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=True,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"checkmate {checkmate.__version__}")
        raise typer.Exit


if __name__ == "__main__":
    app()
