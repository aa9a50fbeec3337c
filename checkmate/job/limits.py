"""What an annotation says about a value in a YAML file, beside its type; pydantic asks these objects for it.

They have pydantic's own methods for that, and import it only when they are asked. Trainers need the classes
of a job (`schema`), but read one that was checked before (`kept`), and pydantic takes as long to import as
all of the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema


FILE_BYTES: Final = 2 << 20
"""The largest file: a job of about 15,000 ranks."""


class ValueLimits:
    """Limits of a value, named as pydantic's core schemas name them."""

    def __init__(self, **limits: object) -> None:
        self.limits = limits

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return {**handler(source), **self.limits}


def whole(least: int, most: int | None = None) -> ValueLimits:
    """Return the limits of a whole number; YAML's `true` and `1.0` are not one."""
    return ValueLimits(strict=True, ge=least) if most is None else ValueLimits(strict=True, ge=least, le=most)


def items(least: int, most: int | None = None) -> ValueLimits:
    """Return the limits of a list's length."""
    return ValueLimits(min_length=least) if most is None else ValueLimits(min_length=least, max_length=most)


def at_most(items: int) -> ValueLimits:
    """Return the limit of a list's length."""
    return ValueLimits(max_length=items)


class Before:
    """A function that gets the value as it is in the file, and returns or refuses it (`ValueError`)."""

    def __init__(self, function: Callable[[Any], object]) -> None:
        self.function = function

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema  # noqa: PLC0415 - see above

        return core_schema.no_info_before_validator_function(self.function, handler(source))


class After(Before):
    """A function that gets the value with its type, and returns or refuses it (`ValueError`)."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema  # noqa: PLC0415 - see above

        return core_schema.no_info_after_validator_function(self.function, handler(source))


class Described:
    """What else a JSON Schema says about a value, for editors."""

    def __init__(self, **more: object) -> None:
        self.more = more

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Any:
        return {**handler(schema), **self.more}
