"""The `checkmate` command. Commands load on demand, because a host has its role's libraries only."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Final

import typer

import checkmate
from checkmate.base.extras import ExtraMissing, needs_of
from checkmate.cli.common import AsJson, show_errors
from checkmate.cli.helping import App, Command, Group

GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    "To begin with": {"lab": "lab", "init": "init", "validate": "validate", "docs": "docs"},
    "To serve a job": {
        "keys": "keys",
        "run": "run",
        "shadow": "shadow",
        "launch": "launch",
        "status": "status",
        "consolidate": "consolidate",
        "report": "report",
    },
    "To change or end it": {"drain": "drain", "reset": "reset", "remove": "remove"},
    "To plan": {"plan": "planning.plan", "cost": "planning.cost", "profile": "planning.profile"},
    "Hosts, switches and files": {
        "doctor": "doctor",
        "sysctl": "sysctl",
        "nccl": "nccl",
        "shell": "shell",
        "schema": "schema",
    },
}
"""The commands by what they are for, each with its module, as in `COMMANDS`."""

COMMANDS: Final[Mapping[str, str]] = {
    name: module for commands in GROUPS.values() for name, module in commands.items()
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

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands of each group."""
        width = max(map(len, COMMANDS))
        for title, commands in GROUPS.items():
            rows = [
                (name.ljust(width), self.get_command(ctx, name).get_short_help_str()) for name in commands
            ]
            with formatter.section(title):
                formatter.write_dl(rows)

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
    @show_errors
    def command(as_json: AsJson = False) -> None:
        raise missing

    return typer.main.get_command(alone)


app = App(
    name="checkmate",
    cls=Commands,
    help=(
        "Checkpoint data-parallel training after every iteration.\n\nWithout a switch, as root: "
        "`checkmate lab run single_tor` shows it at work, and `checkmate docs` lists what there is to read."
    ),
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
