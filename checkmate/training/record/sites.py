"""Places of the script: where it calls a hook, and what it names there."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Final

import torch

_log: Final = logging.getLogger("checkmate")

_INSIDE: Final = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[2]}/")
"""Folders whose frames are not the script's."""
_FRAMES: Final = 40

Site = tuple[tuple[str, int], ...]
"""Files and lines of a call, and of the call of the function that it is in."""


class StepSites:
    """Warns once of a script that steps in several places without naming where its iterations end."""

    def __init__(self) -> None:
        self._first: Site | None = None
        self._warned = False

    def look(self, iteration: int) -> None:
        """Note where the script calls the optimizer's step."""
        if self._warned:
            return
        site = script_site()
        if self._first is None:
            self._first = site
        place, first_place = next(
            ((a, b) for a, b in zip(site, self._first, strict=False) if a != b), (None, None)
        )
        if place is None or first_place is None:
            return
        self._warned = True
        _log.warning(
            "iteration %d: optimizer.step() is called at %s:%d, and was at %s:%d. If one turn of the loop "
            "has both, a resumed loop leaves turns out, because `restore` returns a number of synchronising "
            "backwards: take one step a turn, for turn in protection.steps(...), which also shows where "
            "iterations end (`checkmate docs training`)",
            iteration,
            *place,
            *first_place,
        )


def script_site() -> Site:
    """Return where the script, or a library that it uses, is in its call of a hook."""
    return tuple((frame.f_code.co_filename, frame.f_lineno) for frame in islice(script_frames(), 2))


def script_frames() -> Iterator[FrameType]:
    """Yield the frames of the script, and of libraries that it uses, from the innermost outwards."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return
        if not frame.f_code.co_filename.startswith(_INSIDE):
            yield frame
        frame = frame.f_back
