"""A parameter with its optimizer state as a shadow node holds it: whole, and in the pieces that are stepped.

On 16-bit types torch's bits depend on where its own threads' shares end. These are stepped with as many
threads as in training, and whole if there are several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from checkmate.state import DTYPES
from checkmate.wire.layout import Parameter

SURE_ITEMSIZE: Final = 4
"""From this size on, an element's bits don't depend on the number of threads."""

State = Mapping[str, object]


@dataclass
class HeldPiece:
    """A flat run of a parameter, as an optimizer sees it; `tensor` is the optimizer's key for its state."""

    start: int
    stop: int
    tensor: torch.Tensor
    optimizer: torch.optim.Optimizer | None = None
    views: dict[str, torch.Tensor] = field(default_factory=dict)
    """The runs of the whole state's tensors that the optimizer was given."""
    gathered: int = -1
    """Entries that its state had after a step: the optimizer changes them in place from then on."""

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's own, of this piece."""
        if self.optimizer is None:
            return {}
        found: dict[str, Any] = self.optimizer.state[self.tensor]
        return found


class Held:
    """A parameter with its optimizer state: whole, as it is read, and in the pieces that are stepped."""

    def __init__(self, parameter: Parameter, block: int, threads: int = 1) -> None:
        """`block`: elements of a piece at most, or 0. `threads`: of training, where its bits are wanted."""
        self.parameter = parameter
        self.dtype = DTYPES[parameter.dtype]
        self.tensor = torch.empty(0, dtype=self.dtype)
        self.whole: dict[str, torch.Tensor] = {}
        self.rest: dict[str, object] = {}
        """Of a parameter that no optimizer steps: state as it came."""
        short = self.dtype.itemsize < SURE_ITEMSIZE
        self.threads = threads if short else 0
        elements = parameter.elements
        step = block if block and (threads <= 1 or not short) else elements
        self.pieces = [
            HeldPiece(start, min(start + step, elements), torch.empty(0, dtype=self.dtype))
            for start in (range(0, elements, step) if elements else [0])
        ]

    @property
    def stepped(self) -> bool:
        """Whether an optimizer steps it at all."""
        return self.pieces[0].optimizer is not None

    def put(self, tensor: torch.Tensor, state: State) -> None:
        """Take a parameter and its state over; nothing that was given out before changes."""
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
                name: piece.views.get(name, _own(value)) for name, value in state.items()
            }

    def snapshot(self) -> tuple[torch.Tensor, dict[str, object]]:
        """The parameter and its state as they are. The large tensors are the live ones, not copies."""
        if not self.stepped:
            return self.tensor, dict(self.rest)
        state = self.pieces[0].state
        return self.tensor, {name: self.whole.get(name, _own(value)) for name, value in state.items()}

    def entry(self, name: str) -> object:
        """The parameter (an empty name) or an entry of its state, live. `KeyError` if there is none such."""
        if not name:
            return self.tensor
        if not self.stepped:
            return self.rest[name]
        return self.whole[name] if name in self.whole else self.pieces[0].state[name]

    def move(self) -> None:
        """Go on with a copy, and leave what was given out to those who read it."""
        tensor, state = self.snapshot()
        self.put(tensor.clone(), {name: _own(value) for name, value in state.items()})

    def gather(self) -> None:
        """After a step: state that the optimizer has only now created becomes part of the whole."""
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

    @property
    def nbytes(self) -> int:
        """Of the parameter and its state, without what is as small as a number."""
        return sum(tensor.nbytes for tensor in (self.tensor, *self.whole.values()))

    def _by_element(self, value: object) -> bool:
        return bool(self.parameter.shape) and _like(value, self.tensor)

    def _run(self, whole: torch.Tensor, piece: HeldPiece) -> torch.Tensor:
        """A piece's elements. A parameter without dimensions stays so, for its state looks like its step."""
        return whole.view(-1)[piece.start : piece.stop] if self.parameter.shape else whole.view(())


def _like(value: object, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape and tensor.dim() > 0


def _own(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value
