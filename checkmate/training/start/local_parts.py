"""This rank's parts of the whole tensors in a checkpoint on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from checkmate.consolidate.assemble import not_trained
from checkmate.consolidate.chunks import Box
from checkmate.training.model.trained import TrainedModel
from checkmate.training.record.capture import Watched
from checkmate.training.start.install import sharded_like
from checkmate.wire.parameter import Parameter


class LocalParts:
    """Selects what a rank reads of each tensor: of its stage only, and only its chunks of a sharded model.

    `misfits` has what of the checkpoint does not fit the script, in words.
    """

    def __init__(self, watched: Watched, stage: int) -> None:
        """Look at a script's model and optimizer."""
        model = watched.model
        self._stage = f"group{stage}"
        known = [*model.describe(), *model.describe_frozen()] if model.shard_ranks else []
        self._known = {one.name: one for one in known if one.whole}
        self._keys = model.state_names()
        self._names: dict[object, str] = {}
        names = {parameter: name for name, parameter in model.parameters().items()}
        flat = (p for group in watched.optimizer.param_groups for p in group["params"])
        for number, parameter in enumerate(flat):
            if name := names.get(parameter):
                self._names |= dict.fromkeys([number, name, not_trained(number)], name)
        self.misfits: list[str] = []

    def select(self, path: Sequence[object], shape: Sequence[int]) -> Box | None:
        """Return this rank's part of a tensor, or `None` for all of it.

        Args:
            path: The keys that lead to it: `("model", "weight")`, or `("group1", "model", "weight")`.
            shape: Its shape.
        """
        first, *inner = path
        if isinstance(first, str) and first.startswith("group"):
            if first != self._stage:
                return Box((0,) * len(shape), (0,) * len(shape))
            path = inner
        known = self._parameter(path)
        if known is None or (path[0] == "optimizer" and not shape):
            return None
        if tuple(shape) != known.whole:
            key, ours = ".".join(map(str, path)), f"{known.name} {list(known.whole)}"
            self.misfits.append(f"it has {key} {list(shape)} in place of {ours}")
            return None
        return Box(known.offset, known.shape)

    def _parameter(self, path: Sequence[object]) -> Parameter | None:
        """Return the parameter to which a tensor belongs, if it is one of which this rank has a chunk."""
        match path:
            case ["model", str(key)]:
                return self._known.get(self._keys.get(key, key))
            case ["buffers", str(name)]:
                return self._known.get(name)
            case ["optimizer", "state", which, _]:
                return self._known.get(self._names.get(which, ""))
        return None


def load_model(model: TrainedModel, found: Mapping[str, torch.Tensor]) -> tuple[list[str], list[str]]:
    """Set a model's `state_dict()`, of which `found` has this rank's parts.

    Returns:
        The keys that are missing, and those that the model does not know.
    """
    tensors, names = model.tensors(), model.state_names()
    parts = {
        key: sharded_like(tensors[names[key]], part) if names.get(key) in tensors else part
        for key, part in found.items()
    }
    missing, unexpected = model.inner.load_state_dict(parts, strict=False)
    return missing, unexpected
