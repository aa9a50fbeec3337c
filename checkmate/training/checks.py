"""What `checkmate.protect` refuses before training begins: what can't be kept, and what can't be followed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from checkmate import state
from checkmate.optimizers import UnsupportedOptimizer
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.records import Watched
from checkmate.training.slices import kept_beside


def check_kept(watched: Watched) -> None:
    """`StateError` where something can't be kept."""
    for name, give in (
        ("scheduler", watched.scheduler and watched.scheduler.state_dict),
        ("scaler", watched.scaler and watched.scaler.state_dict),
        ("extra", watched.extra),
    ):
        if give is not None:
            try:
                state.dumps(give())
            except state.StateError as error:
                raise state.StateError(f"{name}: {error}") from None
    for name, tensor in kept_beside(watched.ddp).items():
        _check_tensor(name, tensor)


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    """`StateError` where a buffer is of a kind that records can't say."""
    kind = "" if tensor.layout is torch.strided else str(tensor.layout)
    kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else kind
    if not kind:
        try:
            state.dumps(tensor.detach().reshape(-1)[:0].clone())
        except state.StateError:
            kind = type(tensor).__name__
    if kind:
        raise state.StateError(
            f"{name}, a buffer or frozen parameter, can't be kept, for it is {kind}: shadow nodes keep plain "
            "dense tensors; hold it in another attribute of the module, and have the script make it"
        )


def check_all_stepped(spec: pb.OptimizerSpec, names: Sequence[str]) -> None:
    """`UnsupportedOptimizer` where another optimizer would step a parameter: nodes wouldn't know."""
    stepped = {number for group in spec.groups for number in group.parameters}
    left = [name for number, name in enumerate(names) if number not in stepped]
    if left:
        raise UnsupportedOptimizer(
            f"the optimizer lacks {left[0]} and {len(left) - 1} others that are trained: give them to it, in "
            "a parameter group, or set requires_grad=False; one optimizer steps a protected model"
        )
