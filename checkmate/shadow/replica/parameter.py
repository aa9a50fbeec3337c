"""A parameter and its optimizer state in a shadow node: whole, and in the pieces that are stepped.

With 16-bit types, torch's results depend on how it divides work among its threads. Such parameters are
stepped with as many threads as in training, and are not cut if there are several threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from checkmate.state import DTYPES
from checkmate.wire.parameter import Parameter

SURE_ITEMSIZE: Final = 4
"""Size of elements from which results do not depend on the number of threads."""

OptimizerState = Mapping[str, object]


@dataclass
class ParameterPiece:
    """A flat run of a parameter, as an optimizer sees it; `tensor` is the optimizer's key for its state."""

    start: int
    stop: int
    tensor: torch.Tensor
    optimizer: torch.optim.Optimizer | None = None
    views: dict[str, torch.Tensor] = field(default_factory=dict)
    """Views of the whole state's tensors that the optimizer uses."""
    gathered: int = -1
    """Number of entries of its state after the last step; the optimizer changes those in place."""

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's own state of this piece."""
        if self.optimizer is None:
            return {}
        entries: dict[str, Any] = self.optimizer.state[self.tensor]
        return entries


class StoredParameter:
    """A parameter and its optimizer state: whole for readers, and in pieces for steps."""

    def __init__(self, parameter: Parameter, block: int, threads: int = 1) -> None:
        """Cut into pieces of at most `block` elements (0: uncut). `threads`: as many as in training."""
        self.parameter = parameter
        self.dtype = DTYPES[parameter.dtype]
        self.tensor = torch.empty(0, dtype=self.dtype)
        self.whole: dict[str, torch.Tensor] = {}
        self.rest: dict[str, object] = {}
        """State as seeded, for a parameter that no optimizer steps."""
        short = self.dtype.itemsize < SURE_ITEMSIZE
        self.threads = threads if short else 0
        elements = parameter.elements
        step = block if block and (threads <= 1 or not short) else elements
        self.pieces = [
            ParameterPiece(start, min(start + step, elements), torch.empty(0, dtype=self.dtype))
            for start in (range(0, elements, step) if elements else [0])
        ]

    @property
    def stepped(self) -> bool:
        """Whether an optimizer steps it."""
        return self.pieces[0].optimizer is not None

    @property
    def nbytes(self) -> int:
        """The bytes of its large tensors."""
        return self.tensor.nbytes + sum(value.nbytes for value in list(self.whole.values()))

    def load(self, tensor: torch.Tensor, state: OptimizerState) -> None:
        """Take over a parameter and its state. Earlier snapshots do not change."""
        self.tensor = tensor
        self.whole = {name: value for name, value in state.items() if self._by_element(value)}  # type: ignore[misc]
        self.rest = dict(state)
        for piece in self.pieces:
            piece.tensor.data = self._run(tensor, piece)
            piece.gathered = -1
            if piece.optimizer is None:
                continue
            piece.views = {name: self._run(value, piece) for name, value in self.whole.items()}
            piece.optimizer.state[piece.tensor] = {
                name: piece.views.get(name, _copy_of(value)) for name, value in state.items()
            }

    def snapshot(self) -> tuple[torch.Tensor, dict[str, object]]:
        """Return the parameter and its state. Large tensors are shared, not copied."""
        if not self.stepped:
            return self.tensor, dict(self.rest)
        state = self.pieces[0].state
        return self.tensor, {name: self.whole.get(name, _copy_of(value)) for name, value in state.items()}

    def entry(self, name: str) -> object:
        """Return the live parameter (empty name) or entry of its state. Raise `KeyError` if there is none."""
        if not name:
            return self.tensor
        if not self.stepped:
            return self.rest[name]
        return self.whole[name] if name in self.whole else self.pieces[0].state[name]

    def move(self) -> None:
        """Continue with a copy, and leave shared tensors to their readers."""
        tensor, state = self.snapshot()
        self.load(tensor.clone(), {name: _copy_of(value) for name, value in state.items()})

    def gather(self) -> None:
        """Add state that the optimizer has created in a step to the whole."""
        for piece in self.pieces:
            state = piece.state
            if len(state) == piece.gathered:
                continue
            piece.gathered = len(state)
            for name, value in state.items():
                if value is piece.views.get(name) or not _like(value, piece.tensor):
                    continue
                if len(self.pieces) == 1:
                    self.whole[name] = value.reshape(self.parameter.memory_shape)
                elif name not in self.whole:
                    self.whole[name] = torch.empty(self.parameter.memory_shape, dtype=value.dtype)
                view = self._run(self.whole[name], piece)
                if len(self.pieces) > 1:
                    view.copy_(value)
                piece.views[name] = state[name] = view

    def _by_element(self, value: object) -> bool:
        return bool(self.parameter.shape) and _like(value, self.tensor)

    def _run(self, whole: torch.Tensor, piece: ParameterPiece) -> torch.Tensor:
        """Return a piece's elements. Scalars stay scalars, because their state looks like a step count."""
        return whole.view(-1)[piece.start : piece.stop] if self.parameter.shape else whole.view(())


def _like(value: object, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape and tensor.dim() > 0


def _copy_of(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value
