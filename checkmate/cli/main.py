"""The `checkmate` command. Commands are loaded when asked for: hosts lack what the switch's need."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module, metadata
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from checkmate.cli.common import AsJson, says_errors, switch_extra

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
}
"""Each command's module here, with a function of the command's name, or an `app` of its own commands."""
_SWITCH_LIBRARIES: Final = ("finsy", "scapy")


class Commands(TyperGroup):
    """The commands, in the order of their help."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name; `None` where there is none."""
        return _load(cmd_name) if cmd_name in COMMANDS else None


@cache
def _load(name: str) -> Any:
    try:
        module = import_module(f"checkmate.cli.{COMMANDS[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _SWITCH_LIBRARIES:
            raise
        return _without_switch(name)
    if hasattr(module, "app"):
        return typer.main.get_command(module.app)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name)(getattr(module, name))
    return typer.main.get_command(alone)


def _without_switch(name: str) -> Any:
    """In place of a command whose libraries aren't installed; takes any arguments."""
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)

    @alone.command(name, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    @says_errors
    def command(as_json: AsJson = False) -> None:
        """Needs: pip install 'checkmate-training[switch]'"""
        switch_extra()

    return typer.main.get_command(alone)


app = typer.Typer(
    name="checkmate",
    cls=Commands,
    help="Checkpoints of data-parallel training, never older than one iteration.",
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
