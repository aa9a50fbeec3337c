"""Help texts of all commands: arguments as `JOB...`, and whole summaries in lists of commands."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

_TYPE: Final = re.compile(r"<(.*)>$")
_VALUES: Final = {
    "int": "N",
    "int range": "N",
    "float": "NUMBER",
    "float range": "NUMBER",
    "path": "PATH",
    "str": "TEXT",
    "list[str]": "TEXT",
}
"""The word for an option's value in its help, by the name of its type; choices are listed as they are."""
_WHOLE: Final = 1000
"""Characters of a summary, instead of what fits on a line: longer ones are folded, not cut."""


class Command(TyperCommand):
    """A command whose help names its arguments as its usage does, and whose summary is whole in lists."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for parameter in self.params:
            if parameter.param_type_name == "argument":  # so that errors name it as the help does
                parameter.metavar = parameter.metavar or str(parameter.name).upper()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line. Errors of values use this project's words, instead of pydantic's."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if hasattr(error, "message"):  # click's, or typer's own copy of it
                error.message = str(error.message).replace("Input should be", "must be")
            raise

    def get_short_help_str(self, limit: int = 0) -> str:
        """Return the summary, even if it has to be folded."""
        return super().get_short_help_str(_WHOLE)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return `[OPTIONS]` and the arguments."""
        arguments = (
            parameter for parameter in self.get_params(ctx) if parameter.param_type_name == "argument"
        )
        names = (
            _argument(parameter) if parameter.required else f"[{_argument(parameter)}]"
            for parameter in arguments
        )
        return ["[OPTIONS]", *names]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options."""
        arguments, options = [], []
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is None:
                continue
            if parameter.param_type_name == "argument":
                arguments.append((_argument(parameter), record[1]))
            else:
                options.append((_TYPE.sub(_value, record[0]), record[1]))
        for title, rows in (("Arguments", arguments), ("Options", options)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _value(match: re.Match[str]) -> str:
    return _VALUES.get(match[1], match[1])


def _argument(parameter: Any) -> str:
    return f"{parameter.metavar}..." if parameter.nargs != 1 else str(parameter.metavar)


class Group(TyperGroup):
    """A group of commands, whose own summary is whole too."""

    def get_short_help_str(self, limit: int = 0) -> str:
        """Return the summary, even if it has to be folded."""
        return super().get_short_help_str(_WHOLE)


class App(typer.Typer):
    """Commands of this kind."""

    def __init__(self, *, cls: type[Group] = Group, add_completion: bool = False, **settings: Any) -> None:
        super().__init__(cls=cls, add_completion=add_completion, rich_markup_mode=None, **settings)

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = Command, **settings: Any
    ) -> Callable[[Any], Any]:
        """Return a decorator that adds a command."""
        return super().command(name, cls=cls, **settings)
