"""Words of messages that depend on a number."""

from __future__ import annotations


def counted(number: int, one: str, many: str | None = None) -> str:
    """`1 stream`, `2 streams`; `many` where the plural isn't `one` with an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
