"""State that a process has trained, and keeps over a restart in place, so that it need not be read again."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from checkmate import state
from checkmate.nodes.reader import States
from checkmate.training.lines.seeder import copied
from checkmate.training.record.capture import Watched, same
from checkmate.training.start.sharing import TensorBytes
from checkmate.wire.layout import Layout

Values = dict[int, tuple[torch.Tensor, dict[str, object]]]
"""Parameters and their optimizer state, by number, with the shapes of the script's own parameters."""


@dataclass(frozen=True)
class Loss:
    """A failure elsewhere, after which this process goes on."""

    words: str
    """The rank that is lost, and why."""
    iteration: int
    """The last one that this process has trained, or -1."""
    at: float
    """When it was known, on the monotonic clock."""


@dataclass(frozen=True)
class Survivor:
    """Parameters and optimizer state of a protection that has ended by a failure elsewhere."""

    present: ClassVar[Survivor | None] = None
    """Of this process, until the next `restore`."""
    is_wanted: ClassVar[bool] = False
    """Whether this process restarts in place, so that the next protection that fails leaves one."""

    is_kept: ClassVar[bool] = False
    """Whether it leaves its state, and not only word of how far it has come."""
    has_trained: ClassVar[bool] = False
    """Whether this process's model may not be as it was made, so that it can't begin a run again."""
    reached: ClassVar[int] = -1
    """The last iteration that this process has trained."""

    loss: ClassVar[Loss | None] = None
    """Why this process restarts, until it trains again."""

    run: str
    iteration: int
    """The last one whose step they have."""
    layout: Layout
    values: Values
    digest: str
    """Of all bytes, because a script may write to them before the restart."""

    @classmethod
    def keep(cls, run: str, iteration: int | None, layout: Layout, watched: Watched) -> None:
        """Keep a script's present state for the next `restore`.

        Args:
            run: The run.
            iteration: The last one whose step the state has; `None` if a step is half done.
            layout: The layout of the model.
            watched: The script's objects.
        """
        cls.present = None
        parameters = watched.model.trained().values()
        # Steps of iterations that have failed may be queued on a GPU, with whatever NCCL has left behind.
        on_device = any(parameter.device.type != "cpu" for parameter in parameters)
        if not cls.is_kept or iteration is None or on_device:
            return
        values = {number: _values(p, watched.optimizer) for number, p in enumerate(parameters)}
        cls.present = cls(run, iteration, layout, values, _digest(values))

    @classmethod
    def note_progress(cls, stepped: int) -> None:
        """Note the last iteration that this process has trained, or that was restored."""
        cls.has_trained = True
        cls.reached = max(cls.reached, stepped)

    @classmethod
    def take(cls) -> Survivor | None:
        """Return what was kept, and forget it."""
        survivor, cls.present = cls.present, None
        return survivor

    def fits(self, run: str, iteration: int, layout: Layout) -> bool:
        """Return whether this is the state after an iteration, and nothing has written to it since."""
        described = self.layout.parameters == layout.parameters
        is_same = described and (run, iteration) == (self.run, self.iteration)
        return is_same and _digest(self.values) == self.digest

    def as_held(self, numbers: Collection[int]) -> States:
        """Return copies of parameters as shadow nodes hold them."""
        return {
            number: state.to_held(self.layout.parameters[number], *copied(*self.values[number]))
            for number in sorted(numbers)
        }

    def differs(self, states: Values) -> int | None:
        """Return a parameter of which others have other bits, or whose optimizer state they have so."""
        for number, (tensor, values) in states.items():
            own_tensor, own_values = self.values[number]
            if not same({"": tensor, **values}, {"": own_tensor, **own_values}):
                return number
        return None


def _values(
    parameter: nn.Parameter, optimizer: torch.optim.Optimizer
) -> tuple[torch.Tensor, dict[str, object]]:
    values = {
        name: state.local_of(value).detach() if isinstance(value, torch.Tensor) else value
        for name, value in optimizer.state.get(parameter, {}).items()
    }
    return state.local_of(parameter).detach(), values


def _digest(values: Values) -> str:
    """Return XXH3 of all tensors' bytes."""
    tensors = (value for tensor, entries in values.values() for value in (tensor, *entries.values()))
    return TensorBytes(value for value in tensors if isinstance(value, torch.Tensor)).digest()
