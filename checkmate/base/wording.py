"""Output of commands: plurals, sizes, what was probably meant, and the version of JSON."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

JSON_VERSION: Final = 1
"""Of what `--json` prints. Further keys need no new one; removing or changing a key does."""


def shortened(text: str, most: int = 300) -> str:
    """Return a text that another host has influenced, in one line of at most `most` printable characters."""
    line = "".join(character if character.isprintable() else " " for character in text[: most + 1])
    return line if len(line) <= most else f"{line[: most - 3]}..."


def printable(text: str, but: str = "") -> str:
    """Escape what steers a terminal in a text that somebody else has chosen, such as the name of a file.

    Line feeds, too: they would forge a line of the log. `but`: characters that stay.
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in but
        else character.encode("unicode_escape").decode()
        for character in text
    )


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return `; did you mean channels?` for the known name that is most alike, or an empty text."""
    near = get_close_matches(name, list(candidates), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def counted(number: int, singular: str, plural: str | None = None) -> str:
    """Return `1 stream` or `2 streams`; `plural` if that is not `singular` with an s."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def with_article(name: str) -> str:
    """Return `a StepLR` or `an AdamW`: the name of a class with its article."""
    spelt = "AEFHILMNORSX" if name.isupper() else "AEIOU"  # SGD is read letter by letter
    vowel = name[:1] in spelt and not name.startswith("One")
    return f"an {name}" if vowel else f"a {name}"


def at_iteration(stepped: int) -> str:
    """Return where a state is whose last step is of iteration `stepped`: -1 if there was none yet."""
    return f"at iteration {stepped}" if stepped >= 0 else "before iteration 0"


def size(nbytes: float) -> str:
    """Return a number of bytes with three digits and a decimal unit: `26.2 MB`."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale * 0.9995:
            amount = nbytes / scale
            return f"{amount:,.3g} {unit}" if amount < 999.5 else f"{amount:,.0f} {unit}"
    return f"{nbytes:.0f} B"


_SUFFIX: Final = re.compile(r"(0|[1-9]\d*)$")
_MIN_RANGE: Final = 3


def in_ranges(names: Iterable[object]) -> str:
    """Return names in their order, those whose numbers follow one another as a range: 0-3, trainer0-15."""
    runs: list[list[tuple[str, int | None]]] = []
    for name in map(str, names):
        number = _SUFFIX.search(name)
        prefix, value = (name[: number.start()], int(number[0])) if number else (name, None)
        last = runs[-1][-1] if runs else None
        if last is not None and value is not None and last == (prefix, value - 1):
            runs[-1].append((prefix, value))
        else:
            runs.append([(prefix, value)])
    words = []
    for run in runs:
        (prefix, first), (_, last_number) = run[0], run[-1]
        if len(run) >= _MIN_RANGE:
            words.append(f"{prefix}{first}-{last_number}")
        else:
            words += [f"{prefix}{'' if value is None else value}" for prefix, value in run]
    return ", ".join(words)


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL, or its number in words."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
