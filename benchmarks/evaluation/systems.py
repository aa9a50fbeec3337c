"""The systems that are compared, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from benchmarks.comparators.checkfreq import CheckFreq
from benchmarks.comparators.concurrent import ConcurrentCheckpoints
from benchmarks.comparators.gemini import Gemini, GeminiBlocking
from benchmarks.comparators.saving import DcpAsyncSave, DcpSave, TorchSave
from benchmarks.comparators.system import CheckpointSystem, NoCheckpoints, Place
from topologies.training.orders import Reduce

CHECKMATE: Final = "Checkmate"
GLOO: Final = "no checkpoints"
"""DDP over gloo, as all comparators use it."""
RING: Final = "no checkpoints, Checkmate's ring"
"""The ring that Checkmate uses, untagged, without shadow nodes."""
OWN_FREQUENCY: Final = CheckFreq.name
"""The system that chooses its own interval."""

_SYSTEMS: Final = (TorchSave, DcpSave, DcpAsyncSave, CheckFreq, ConcurrentCheckpoints, Gemini, GeminiBlocking)
COMPARATORS: Final[Mapping[str, type[CheckpointSystem]]] = {system.name: system for system in _SYSTEMS}


def reduce_of(system: str) -> Reduce:
    """Return how the gradients of a job with this system are reduced."""
    known: dict[str, Reduce] = {CHECKMATE: "checkmate", RING: "untagged"}
    return known.get(system, "gloo")


def system_of(name: str, place: Place) -> CheckpointSystem:
    """Return what a rank uses besides `checkmate.protect`, which labs replace if it is not Checkmate."""
    return COMPARATORS.get(name, NoCheckpoints)(place)
