"""Compares a replica's parameters with slices of the trainers': the check that decides (design, section 7).

What was found to differ is suspect, also once it is seeded anew, until it is found equal after steps of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

import torch

from checkmate.layout import Parameter
from checkmate.rpc import shadow_pb2 as pb
from checkmate.state import bytes_of

CLOSE_ENOUGH: Final[Mapping[torch.dtype, tuple[float, float]]] = {
    torch.float64: (1e-8, 1e-10),
    torch.float32: (1e-4, 1e-6),
    torch.bfloat16: (4e-2, 1e-4),
    torch.float16: (5e-3, 1e-5),
}
"""Relative and absolute tolerance of a comparison with parameters that another kind of device stepped."""

STEPS_TO_TRUST: Final = 2
"""Of our own since it was seeded: what is changed behind our back in each iteration shows by then."""


class Holding(Protocol):
    """A parameter as it is held."""

    parameter: Parameter
    tensor: torch.Tensor


class Comparison:
    """What comparing has found so far. For the thread that steps."""

    def __init__(self, *, exact: bool) -> None:
        """`exact`: the trainers' own step gives the same bits."""
        self.exact = exact
        self.doubtful: dict[int, int] = {}
        """Parameters that were found wrong, and not seeded since: after which iteration they are in doubt."""
        self.suspects: set[tuple[int, int]] = set()
        """Slices, as parameter and offset, that were found wrong and not right since."""
        self._equal: dict[int, int] = {}  # the last iteration at which a parameter was found right, or seeded
        self._seeded: dict[int, int] = {}

    def seeded(self, number: int, iteration: int) -> None:
        """A parameter was seeded."""
        self._equal[number] = self._seeded[number] = iteration
        self.doubtful.pop(number, None)

    def compare(
        self, iteration: int, slices: Sequence[pb.Slice], held: Mapping[int, Holding]
    ) -> Iterator[str]:
        """What of `held`, all of it as after `iteration`, differs from the trainers' parameters."""
        for one in slices:
            ours = held.get(one.parameter)
            if ours is None:
                continue
            if self._same(ours.tensor, one):
                self._equal[one.parameter] = iteration
                if iteration >= self._seeded[one.parameter] + STEPS_TO_TRUST:
                    self.suspects.discard((one.parameter, one.offset))
                continue
            self.suspects.add((one.parameter, one.offset))
            since = self.doubtful.setdefault(one.parameter, self._equal[one.parameter])
            yield (
                f"parameter {ours.parameter.name} differs from the trainers' after iteration {iteration}. "
                f"It was last found equal after iteration {since}; checkpoints after that one are doubtful. "
                "A gradient that is changed between backward and optimizer.step() does this, and a parameter "
                "that is changed outside of that step: clip with checkmate.clip_grad_norm_, unscale with the "
                "GradScaler that protect was given, and leave parameters to the optimizer"
            )

    def _same(self, tensor: torch.Tensor, one: pb.Slice) -> bool:
        ours = bytes_of(tensor)[one.offset : one.offset + len(one.data)]
        if len(ours) != len(one.data) or len(ours) % tensor.element_size():
            return False
        if self.exact or not one.data:
            return bytes(ours) == one.data
        relative, absolute = CLOSE_ENOUGH[tensor.dtype]
        start = one.offset // tensor.element_size()
        theirs = torch.frombuffer(bytearray(one.data), dtype=tensor.dtype)
        mine = tensor.view(-1)[start : start + len(theirs)]
        return torch.allclose(mine.double(), theirs.double(), relative, absolute, equal_nan=True)
