"""Scaling of gradients as recorded by trainers, with the same kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import torch

from checkmate.rpc import shadow_pb2 as pb
from checkmate.state import DTYPES


def check_scalings(scalings: Iterable[pb.Scaling]) -> None:
    """Raise `ValueError` if the kind or type of a scaling is unknown."""
    for one in scalings:
        dtype = DTYPES.get(one.dtype or "float32")
        if one.kind not in _KINDS or dtype is None or not dtype.is_floating_point:
            raise ValueError(f"unknown scaling of gradients: {one.kind} {one.dtype}")


def scale(
    optimizer: torch.optim.Optimizer,
    gradients: Sequence[tuple[int, torch.Tensor]],
    scalings: Iterable[pb.Scaling],
) -> None:
    """Scale gradients in place, given with their parameters' numbers. A scaling may list parameters."""
    for one in scalings:
        times = Counter(one.parameters)
        chosen = [gradient for number, gradient in gradients for _ in range(times[number] if times else 1)]
        factor = torch.tensor(one.factor, dtype=DTYPES[one.dtype or "float32"])
        _KINDS[one.kind](optimizer, chosen, factor)


def skip(optimizer: torch.optim.Optimizer) -> None:
    """Make a fused optimizer skip its next step, as a GradScaler does. It still creates its state."""
    vars(optimizer).update(found_inf=torch.ones((), dtype=torch.float32))


def forget(optimizer: torch.optim.Optimizer) -> None:
    """Remove the attributes that `scale` and `skip` have set for the step."""
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)


def _by_type(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    for dtype in {gradient.dtype for gradient in gradients}:
        yield [gradient for gradient in gradients if gradient.dtype == dtype]


def _clip(_: torch.optim.Optimizer, gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply like `torch.nn.utils.clip_grad_norm_`."""
    for group in _by_type(gradients):
        torch._foreach_mul_(group, factor)


def _unscale(_: torch.optim.Optimizer, gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply like `torch.amp.GradScaler.unscale_`."""
    for group in _by_type(gradients):
        found = torch.zeros(1, dtype=torch.float32)
        torch._amp_foreach_non_finite_check_and_unscale_(group, found, factor.reshape(1))


def _hand_over(optimizer: torch.optim.Optimizer, _: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Pass the loss scale to a fused optimizer like `torch.amp.GradScaler.step`."""
    vars(optimizer).update(grad_scale=factor, found_inf=torch.zeros((), dtype=torch.float32))


_KINDS: Final[dict[int, Callable[[torch.optim.Optimizer, Sequence[torch.Tensor], torch.Tensor], None]]] = {
    pb.Scaling.CLIP: _clip,
    pb.Scaling.UNSCALE: _unscale,
    pb.Scaling.FUSED: _hand_over,
}
"""In-place implementation of each kind of scaling."""
