"""A host's memory, in which checkpoints outlive the process that trains: files of a tmpfs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

VERSIONS: Final = 2
"""One that is complete, and one in progress."""


@dataclass(frozen=True)
class Copy:
    """A rank's complete part of a checkpoint, in this host's memory."""

    rank: int
    iteration: int
    version: int


class HostMemory:
    """The parts of checkpoints that a host keeps: of its own rank, and of its peer's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._open: dict[tuple[int, int], torch.Tensor] = {}

    def buffer(self, rank: int, version: int, nbytes: int) -> torch.Tensor:
        """Return the memory of a rank's part, whose content is not complete from now on."""
        self._mark(rank, version).unlink(missing_ok=True)
        return self._mapped(rank, version, nbytes)

    def completed(self, rank: int, version: int, iteration: int, described: Any) -> None:
        """Note that a part is complete. `described` is that of `flat.FlatState`, of the whole state."""
        mark = self._mark(rank, version)
        temporary = mark.with_suffix(".unfinished")
        torch.save({"iteration": iteration, "described": described}, temporary)
        temporary.replace(mark)

    def copies(self) -> list[Copy]:
        """Return what is complete."""
        found = []
        for mark in sorted(self._folder.glob("*.complete")):
            rank, version = mark.stem.split("-")
            found.append(Copy(int(rank), int(self._read(mark)["iteration"]), int(version)))
        return found

    def described(self, copy: Copy) -> Any:
        """Return the description of the state of which a part is complete."""
        return self._read(self._mark(copy.rank, copy.version))["described"]

    def part(self, copy: Copy, nbytes: int) -> torch.Tensor:
        """Return the content of a complete part."""
        return self._mapped(copy.rank, copy.version, nbytes)

    def _mapped(self, rank: int, version: int, nbytes: int) -> torch.Tensor:
        key = rank, version
        if key not in self._open or self._open[key].numel() != nbytes:
            path = str(self._folder / f"{rank}-{version}")
            self._open[key] = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        return self._open[key]

    def _mark(self, rank: int, version: int) -> Path:
        return self._folder / f"{rank}-{version}.complete"

    @staticmethod
    def _read(mark: Path) -> Mapping[str, Any]:
        found: dict[str, Any] = torch.load(mark, weights_only=True)
        return found
