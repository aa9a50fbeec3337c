"""The systems that are compared, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from benchmarks.comparators import packages
from benchmarks.comparators.checkfreq import CheckFreq
from benchmarks.comparators.concurrent import ConcurrentCheckpoints
from benchmarks.comparators.gemini import Gemini, GeminiBlocking
from benchmarks.comparators.saving import DcpAsyncSave, DcpSave, TorchSave
from benchmarks.comparators.system import CheckpointFolders, CheckpointSystem, NoCheckpoints
from topologies.torchrun import Starter
from topologies.training.orders import Reduce

CHECKMATE: Final = "Checkmate"
GLOO: Final = "no checkpoints"
"""DDP over gloo, as all comparators use it."""
RING: Final = "no checkpoints, Checkmate's ring"
"""The ring that Checkmate uses, untagged, without shadow nodes."""
IN_PLACE: Final = "Checkmate, in place"
"""`checkmate launch` starts only the rank that died."""
IN_PLACE_SPARES: Final = "Checkmate, in place, warm spares"
IN_PLACE_HOSTS: Final = "Checkmate, in place, copies by hosts"
STARTERS: Final[Mapping[str, Starter]] = {
    IN_PLACE: "launch",
    IN_PLACE_SPARES: "launch --spare",
    IN_PLACE_HOSTS: "launch",
}
"""The programs that start ranks, where they are not torchrun."""
LIVE: Final = "torchft"
"""Live recovery; its ranks come and go, and have a script of their own."""
OWN_FREQUENCY: Final = CheckFreq.name
"""The system that chooses its own interval."""
_LM: Final = "lm-resiliency"

_CLASSES: Final[Mapping[str, type[CheckpointSystem]]] = {
    system.name: system
    for system in (TorchSave, DcpSave, DcpAsyncSave, CheckFreq, ConcurrentCheckpoints, Gemini, GeminiBlocking)
}
COMPARATORS: Final = (*_CLASSES, _LM)
"""Those that make checkpoints."""
_PACKAGES: Final[Mapping[str, str]] = {LIVE: "torchft", _LM: "lm_resiliency"}
"""Their distributions in `packages`."""


def reduce_of(system: str) -> Reduce:
    """Return how the gradients of a job with this system are reduced."""
    reductions: dict[str, Reduce] = {RING: "untagged", **dict.fromkeys((CHECKMATE, *STARTERS), "checkmate")}
    return reductions.get(system, "gloo")


def is_installed(system: str) -> bool:
    """Return whether this machine has what a system needs."""
    return system not in _PACKAGES or packages.is_installed(_PACKAGES[system])


def system_of(name: str, place: CheckpointFolders) -> CheckpointSystem:
    """Return what a rank uses besides `checkmate.protect`, which labs replace if it is not Checkmate."""
    if name == _LM:
        packages.use()
        from benchmarks.comparators.lm_gemini import LmResiliency  # noqa: PLC0415 - it may be missing

        return LmResiliency(place)
    return _CLASSES.get(name, NoCheckpoints)(place)
