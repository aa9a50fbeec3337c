"""Optimizer state of parameters that training does not reduce: named tensors among the buffers. Pure.

Optimizers have such state from before a parameter was frozen, or (Adagrad) from the start. It seldom changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from checkmate.state.tensors import StateError

_TENSOR: Final = "tensor"
_NAME: Final = re.compile(
    r"optimizer\.state\[(?P<index>\d+)\]\[(?P<place>\d+)\]\.(?P<entry>.+) \((?P<kind>\w+)\)", re.DOTALL
)
"""Names contain the place of an entry because buffers have no order. No buffer has such a name."""
_NUMBERS: Final = {"float": torch.float64, "int": torch.int64, "bool": torch.bool}


def is_frozen_state(name: str) -> bool:
    """Return whether a name among the buffers is such state."""
    return _NAME.fullmatch(name) is not None


def name_frozen(index: int, entries: Mapping[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the state of the parameter with this number in `optimizer.state_dict()`, as named tensors.

    Raises `StateError` if an entry is neither a tensor nor a number.
    """
    for place, (entry, value) in enumerate(entries.items()):
        kind = _TENSOR if isinstance(value, torch.Tensor) else type(value).__name__
        if isinstance(value, torch.Tensor):
            tensor = value
        elif value is None:
            tensor = torch.empty(0)
        elif kind in _NUMBERS:
            tensor = torch.tensor(value, dtype=_NUMBERS[kind])
        else:
            raise StateError(f"{entry} of the optimizer state is neither a tensor nor a number, but a {kind}")
        yield f"optimizer.state[{index}][{place}].{entry} ({kind})", tensor


def frozen_states(found: Mapping[str, torch.Tensor]) -> dict[int, dict[str, object]]:
    """Return the state of each such parameter, by its number. Ignore other names."""
    states: dict[int, dict[str, object]] = {}
    matches = [match for name in found if (match := _NAME.fullmatch(name)) is not None]
    for match in sorted(matches, key=lambda match: (int(match["index"]), int(match["place"]))):
        tensor = found[match.string]
        number = tensor.item() if match["kind"] != _TENSOR and tensor.numel() else None
        value = tensor if match["kind"] == _TENSOR else number
        states.setdefault(int(match["index"]), {})[match["entry"]] = value
    return states
