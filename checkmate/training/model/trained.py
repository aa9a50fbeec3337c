"""The interface of a model to the training side, whatever wraps it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn

from checkmate.state import EXTRA_STATE, StateError, is_extra_state, packed
from checkmate.wire.layout import BUCKET_BYTES
from checkmate.wire.parameter import Parameter


class TrainedModel(ABC):
    """A model of which each rank of a DP group trains a replica."""

    outer: nn.Module
    """The module that the script calls. Its forward, in training, begins an iteration."""
    inner: nn.Module
    """The module that has the parameters and buffers, under the names that the script knows."""
    bucket_bytes: int
    """The size at which a bucket of gradients is closed."""
    averages: bool = True
    """Whether gradients are averaged over replicas; else they are summed."""
    keeps_gradients: bool = True
    """Whether gradients may be left from one iteration to the next, as zeros."""
    is_alone: bool = False
    """Whether no other rank trains the same parameters."""
    ignored: Collection[str] = ()
    """Names of parameters and buffers that the ranks don't share."""

    @property
    @abstractmethod
    def broadcasts_buffers(self) -> bool:
        """Whether all ranks get the buffers of the first one."""

    @property
    @abstractmethod
    def replicas(self) -> Sequence[int] | None:
        """The global ranks whose gradients are reduced together; `None` if only the job names them."""

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group of `replicas`, which all have the same state; `None` if there is none."""
        return None

    @property
    def shard_ranks(self) -> Sequence[int]:
        """The global ranks that share a replica, in order of its parts; empty if each rank has all of it."""
        return ()

    @abstractmethod
    def check_forward(self) -> None:
        """Raise `RefusedError` unless each rank trains in the iteration that begins."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return all parameters by name, in registration order."""
        return dict(self.inner.named_parameters())

    def describe(self) -> list[Parameter]:
        """Return the trained parameters as the layout has them. Raise `LayoutError` if one is not dense."""
        return [
            Parameter.of(name, p.shape, p.stride(), str(p.dtype).removeprefix("torch."))
            for name, p in self.trained().items()
        ]

    def describe_frozen(self) -> list[Parameter]:
        """Return this rank's chunks of the parameters that it does not train."""
        return []

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all parameters and buffers, by name."""
        return {**self.parameters(), **dict(self.inner.named_buffers())}

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters whose gradients are reduced, by name, in the layout's order."""
        parameters = self.parameters().items()
        return {name: p for name, p in parameters if p.requires_grad and name not in self.ignored}

    def slots(self) -> list[tuple[str, dict[str, nn.Parameter | None], str]]:
        """Return where modules keep the trained parameters: each one's name, and the dictionary and key."""
        names = {parameter: name for name, parameter in self.trained().items()}
        parameters = (
            (module._parameters, key, p)
            for module in self.inner.modules()
            for key, p in module._parameters.items()
        )
        return [(names[p], slots, key) for slots, key, p in parameters if p is not None and p in names]

    def frozen(self) -> dict[str, nn.Parameter]:
        """Return the parameters that need no gradient, by name."""
        parameters = (
            p for module in self.inner.modules() for p in module._parameters.values() if p is not None
        )
        if all(p.requires_grad for p in parameters):  # in most models, and names take ten times as long
            return {}
        return {name: p for name, p in self.parameters().items() if not p.requires_grad}

    def kept_beside(self) -> dict[str, torch.Tensor]:
        """Return the buffers, frozen parameters and extra states, by name."""
        tensors: dict[str, torch.Tensor] = {**self.frozen(), **dict(self.inner.named_buffers())}
        return {
            name: tensor for name, tensor in tensors.items() if name not in self.ignored
        } | self.extra_states()

    def extra_states(self) -> dict[str, torch.Tensor]:
        """Return what modules' `get_extra_state` returns, packed and named as in `state_dict()`.

        Raise `StateError` if it can't be stored.
        """
        states = {}
        for name, module in self._stateful:
            try:
                states[f"{name}.{EXTRA_STATE}".removeprefix(".")] = packed(module.get_extra_state())
            except StateError as error:
                raise StateError(
                    f"get_extra_state() of {name or type(module).__name__}: {error}. Have it return such "
                    "values, or keep them in a buffer"
                ) from None
        return states

    @cached_property
    def _stateful(self) -> list[tuple[str, nn.Module]]:
        """The modules with extra state. To search them in each iteration would take longer than all else."""
        modules = self.inner.named_modules()
        return [
            named_module
            for named_module in modules
            if type(named_module[1]).get_extra_state is not nn.Module.get_extra_state
        ]

    def state_names(self) -> dict[str, str]:
        """Return, by key of the model's `state_dict()`, the name of its tensor among `tensors`.

        A trained parameter for which a hook of the model's stores others, such as its parts, has its name as
        key: `load_state_dict` takes that too.
        """
        names = {id(tensor): name for name, tensor in self.tensors().items()}
        saved_tensors = self.inner.state_dict(keep_vars=True)
        by_key = {key: names[id(tensor)] for key, tensor in saved_tensors.items() if id(tensor) in names}
        stored_as_they_are = set(by_key.values())
        extra = {name: name for name in saved_tensors if is_extra_state(name)}
        return by_key | extra | {name: name for name in self.trained() if name not in stored_as_they_are}


class BareModel(TrainedModel):
    """A model without a wrapper: the script itself has its ranks' gradients agree, or trains alone."""

    replicas = None
    broadcasts_buffers = False
    bucket_bytes = BUCKET_BYTES

    def __init__(self, module: nn.Module) -> None:
        self.outer = module
        self.inner = getattr(module, "_orig_mod", module)  # of torch.compile, for the script's names

    def check_forward(self) -> None:
        """Do nothing: what other ranks do is the script's own."""
