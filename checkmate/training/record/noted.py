"""One iteration as a rank has noted it, before it becomes a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.record.buffers import Later
from checkmate.training.record.capture import IterationEnd
from checkmate.training.record.windows import Copy, Window


@dataclass
class Scaled:
    """A multiplication of gradients by a factor (or a division, by a fused optimizer)."""

    kind: pb.Scaling.Kind.ValueType
    factor: torch.Tensor
    parameters: Sequence[int] = ()


@dataclass
class Noted:
    """One iteration of one rank. Fields that only the group's first rank records are empty on others."""

    iteration: int
    ends: Mapping[tuple[int, int], int]
    rng: dict[str, Any]
    extra: Any
    stepped: bool = False
    marked: bool = False  # the script has marked its end
    settled: bool = False  # ... and has reached it
    left: bool = False  # ... by leaving its loop over batches
    last: bool = False
    infinite: Sequence[torch.Tensor] = ()  # if one is not zero, the scaler made the optimizer skip
    options: list[str] = field(default_factory=list)
    next_options: list[str] = field(default_factory=list)
    without_gradient: list[int] = field(default_factory=list)
    beginnings: list[pb.Beginning] = field(default_factory=list)
    scaled: list[Scaled] = field(default_factory=list)
    scheduler: dict[str, Any] | None = None
    scaler: dict[str, Any] | None = None
    scheduler_class: str = ""
    slices: list[tuple[Window, Copy]] = field(default_factory=list)
    buffers: dict[str, Later] | None = None  # not captured yet

    def ends_with(self, end: IterationEnd) -> None:
        """Set the state at the iteration's end, in place of an earlier one."""
        self.rng, self.extra = end.rng, end.extra
        self.next_options = end.next_options
        self.scheduler, self.scaler = end.scheduler, end.scaler
        self.scheduler_class = end.scheduler_class

    @property
    def over(self) -> bool:
        """Whether its optimizer has stepped, or was made to skip by a scaler."""
        return self.stepped or bool(self.infinite)

    def skipped(self) -> bool:
        """Return whether parameters did not change. Waits for a CUDA device."""
        return not self.stepped or any(bool(found.item()) for found in self.infinite)
