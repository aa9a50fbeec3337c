"""Python names for the names of the P4 program."""

from __future__ import annotations

import keyword
import re

# Names used by generated code; so are all names with a leading underscore.
RESERVED = {
    "at",
    "changed",
    "copy_port",
    "egress",
    "entry",
    "frame",
    "packet_size",
    "port",
    "process",
    "size",
    "trace",
}
BUILTINS = {"bool", "bytes", "dict", "int", "len", "memoryview", "min", "range", "str", "zip"}


class Names:
    """Unique, readable names."""

    def __init__(self) -> None:
        self._given: dict[tuple[str, ...], str] = {}
        self._taken: set[str] = RESERVED | BUILTINS

    def of(self, space: str, *words: str) -> str:
        """Return the name for these words; it is the same for the same words in the same space."""
        if (space, *words) not in self._given:
            self._given[space, *words] = self._fresh("_".join(words))
        return self._given[space, *words]

    def _fresh(self, text: str) -> str:
        plain = re.sub(r"_+", "_", re.sub(r"\W", "_", text, flags=re.ASCII)).strip("_") or "value"
        if plain[0].isdigit() or keyword.iskeyword(plain):
            plain = f"x_{plain}"
        name, number = plain, 1
        while name in self._taken:
            number += 1
            name = f"{plain}_{number}"
        self._taken.add(name)
        return name
