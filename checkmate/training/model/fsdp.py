"""A model that PyTorch's `fully_shard` has cut into shards (FSDP2).

Tensor parallelism may have split its parameters before, or have done so alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from checkmate.state import dtype_name, local_of
from checkmate.training.errors import RefusedError
from checkmate.training.model.trained import TrainedModel
from checkmate.wire.layout import BUCKET_BYTES
from checkmate.wire.parameter import Parameter

_EXACT: Final = (torch.float32, torch.bfloat16)
"""Types of gradients that FSDP does not divide after the reduction."""


class FsdpModel(TrainedModel):
    """The root of a sharded model. A rank trains chunks, of which all ranks of its DP group have replicas.

    Parameters are in the order of FSDP's units, the outermost first, because backward completes them in
    reverse. They are those outside of forward and backward, during which FSDP replaces some by whole ones.
    """

    replicas = None
    broadcasts_buffers = False
    keeps_gradients = False
    bucket_bytes = BUCKET_BYTES

    def __init__(self, module: object) -> None:
        """Create it. Raise `RefusedError` if shadow nodes can't follow it."""
        assert isinstance(module, nn.Module)
        self.outer = self.inner = module
        self.units = {name: unit for name, unit in module.named_modules() if isinstance(unit, FSDPModule)}
        for unit in self.units.values():
            unit.reshard()
        order = {name: number for number, name in enumerate(self.units)}
        parameters = sorted(module.named_parameters(), key=lambda pair: order.get(self._unit_of(pair[0]), -1))
        self._parameters = dict(parameters)
        if not self.trained():
            raise RefusedError("no parameter of the model needs a gradient, so there is nothing to follow")
        for name, parameter in self.trained().items():
            if isinstance(parameter, DTensor):
                _check_part(name, parameter)
        _check_elements(self.trained().values())

    @property
    def shard_ranks(self) -> list[int]:
        """The global ranks that share this rank's replica, in order of their parts of it."""
        parameters = [parameter for parameter in self.trained().values() if isinstance(parameter, DTensor)]
        largest = max(parameters, key=lambda parameter: parameter.device_mesh.mesh.numel())
        ranks: torch.Tensor = largest.device_mesh.mesh
        if isinstance(largest.placements[0], Replicate):  # FSDP's own replicas
            ranks = ranks[_coordinate(largest)[0]]
        return list(ranks.flatten().tolist())

    def check_forward(self) -> None:
        """Do nothing: FSDP itself needs all ranks in each iteration."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return all parameters by name, in the layout's order."""
        return self._parameters

    def slots(self) -> list[tuple[str, dict[str, nn.Parameter | None], str]]:
        """Return nothing: FSDP itself puts whole parameters in their place, and back."""
        return []

    def describe(self) -> list[Parameter]:
        """Return this rank's chunks of the trained parameters."""
        return [_chunk(name, p, self.gradient_dtype(p)) for name, p in self.trained().items()]

    def describe_frozen(self) -> list[Parameter]:
        """Return this rank's chunks of the frozen parameters."""
        return [_chunk(name, p, p.dtype) for name, p in self.frozen().items() if isinstance(p, DTensor)]

    def gradient_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """Return the type in which a parameter's gradient is copied: that of `.grad`."""
        return parameter.dtype

    def _unit_of(self, name: str) -> str:
        """Return the name of the innermost unit that contains a parameter."""
        prefixes = list(accumulate(name.split("."), "{}.{}".format))
        return next((prefix for prefix in reversed(prefixes) if prefix in self.units), "")


class FsdpReplica(FsdpModel):
    """A model sharded on a mesh of the shards alone, whose gradients Checkmate reduces over the replicas.

    So FSDP must leave nothing to do after that reduction.
    """

    def __init__(self, module: object) -> None:
        """Create it. Raise `RefusedError` if shadow nodes can't follow it."""
        if not hasattr(module, "set_all_reduce_hook"):
            raise RefusedError(
                f"PyTorch {torch.__version__} can't be followed with fully_shard: use 2.7 or newer"
            )
        super().__init__(module)
        self._fsdp_params: dict[torch.Tensor, Any] = {}
        self._reduced: dict[torch.Tensor, torch.dtype] = {}
        for group in (group for unit in self.units.values() for group in param_groups(unit)):
            for fsdp_param in group.fsdp_params:
                self._fsdp_params[fsdp_param.sharded_param] = fsdp_param
                sharded = fsdp_param.sharded_param
                self._reduced[sharded] = _reduced_dtype(group.mp_policy, sharded.dtype)
        self._kept_frozen = self.frozen()
        for name, parameter in self.trained().items():
            if parameter not in self._reduced:
                raise RefusedError(
                    f"{name} is not sharded, so FSDP does not reduce its gradient: leave it out of "
                    "ignored_params of fully_shard, or set requires_grad=False"
                )
            _check_mesh(name, parameter)
        for name, unit in self.units.items():
            _check_unit(name or type(module).__name__, unit)
        self.averages = _averages(self.units)
        self.check_settings()

    def gradient_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """Return the type in which FSDP reduces a parameter's gradient."""
        return self._reduced[parameter]

    def check_settings(self) -> None:
        """Raise `RefusedError` if the script has changed what FSDP reduces, or how it divides gradients."""
        if new := [name for name, parameter in self._kept_frozen.items() if parameter.requires_grad]:
            raise RefusedError(
                f"{min(new)} got requires_grad=True after checkmate.protect, so its gradients would not be "
                "reduced over the replicas: set it before, and protect again"
            )
        if _averages(self.units) != self.averages:
            raise RefusedError(
                "set_gradient_divide_factor was called after checkmate.protect, which decides whether "
                "gradients are averaged or summed over replicas: call it before"
            )
        for name, unit in self.units.items():
            if any(getattr(group, "force_sum_reduction_for_comms", False) for group in param_groups(unit)):
                raise RefusedError(  # since PyTorch 2.8
                    f"{name or type(self.inner).__name__}: with set_force_sum_reduction_for_comms(True), "
                    "FSDP divides gradients after their reduction, so shadow nodes would get others: remove "
                    "that call"
                )

    def await_offloaded(self, parameter: torch.Tensor) -> None:
        """Wait until a gradient is on the CPU, if FSDP is copying it there (CPUOffloadPolicy)."""
        event = self._fsdp_params[parameter].grad_offload_event
        if event is not None:  # before PyTorch 2.13
            event.synchronize()

    def padded_elements(self, parameter: torch.Tensor) -> int:
        """Return how many elements a gradient has in the flat tensor that FSDP reduces and scatters."""
        return int(self._fsdp_params[parameter].padded_sharded_param_size.numel())


def param_groups(unit: FSDPModule) -> Iterator[Any]:
    """Yield FSDP's groups of a unit's parameters, with the settings that the script has made."""
    state: Any = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # since PyTorch 2.12
        yield from state._fsdp_param_groups
    elif state._fsdp_param_group is not None:
        yield state._fsdp_param_group


def _chunk(name: str, parameter: torch.Tensor, reduced: torch.dtype) -> Parameter:
    """Return this rank's chunk of a parameter whose gradient is copied in the type `reduced`.

    A parameter that FSDP ignores is no DTensor, and each rank has all of it.
    """
    local = local_of(parameter)
    chunk = Parameter.of(name, local.shape, local.stride(), dtype_name(local.dtype))
    gradient = "" if reduced == local.dtype else dtype_name(reduced)
    offset = [0] * parameter.ndim
    if isinstance(parameter, DTensor):
        offset, _ = _box(parameter, _coordinate(parameter))
    return replace(chunk, whole=tuple(parameter.shape), offset=tuple(offset), gradient=gradient)


def _coordinate(parameter: DTensor) -> list[int]:
    """Return this rank's coordinate in a parameter's mesh."""
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    return list(coordinate)


def _box(parameter: DTensor, coordinate: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return where in the whole parameter the part of a rank begins, and its shape.

    The mesh's last dimension, such as that of tensor parallelism, has split it first. Each gives all ranks
    but the last ones the same number of rows.
    """
    mesh = parameter.device_mesh
    offset, shape = [0] * parameter.ndim, list(parameter.shape)
    for dimension, placement in reversed(list(enumerate(parameter.placements))):
        if isinstance(placement, Shard | _StridedShard):
            size = shape[placement.dim]
            rows = -(-size // mesh.size(dimension))
            begin = min(rows * coordinate[dimension], size)
            offset[placement.dim] += begin
            shape[placement.dim] = min(rows, size - begin)
    return offset, shape


def _check_mesh(name: str, parameter: torch.Tensor) -> None:
    """Raise `RefusedError` unless FSDP has sharded a trained parameter, and tensor parallelism at most."""
    assert isinstance(parameter, DTensor)
    mesh, placements = parameter.device_mesh, parameter.placements
    if isinstance(placements[0], Replicate):
        raise RefusedError(
            f"{name} is on the mesh {mesh.mesh_dim_names or tuple(mesh.shape)}, on which FSDP itself reduces "
            "gradients over the replicas, so switches can't copy them: give fully_shard the dimension of the "
            'shards alone, mesh=checkmate.shard_mesh(device_type), or mesh["dp_shard"] of yours; or have '
            "hosts copy them, copies: host"
        )
    split = placements[1:]
    if len(split) > 1 or any(type(placement) not in (Shard, Replicate) for placement in split):
        raise RefusedError(
            f"{name} has the placements {placements}: shadow nodes can follow shards of FSDP, and one "
            "dimension of tensor parallelism that shards or replicates parameters"
        )


def _check_part(name: str, parameter: DTensor) -> None:
    """Raise `RefusedError` if this rank's part of a parameter is not where PyTorch would have put it."""
    shape, (_, usual) = tuple(local_of(parameter).shape), _box(parameter, _coordinate(parameter))
    if shape != tuple(usual):
        raise RefusedError(
            f"{name}: this rank has {shape} of {tuple(parameter.shape)}, but with {parameter.placements} "
            f"PyTorch would give it {tuple(usual)}: split it with distribute_tensor or parallelize_module"
        )


def _check_elements(parameters: Collection[torch.Tensor]) -> None:
    """Raise `RefusedError`, on all ranks of a replica, if its last shard has no element of any parameter."""
    elements, shards = 0, 1
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            return
        mesh, coordinate = parameter.device_mesh, _coordinate(parameter)
        dimension = 1 if isinstance(parameter.placements[0], Replicate) and len(coordinate) > 1 else 0
        shards = mesh.size(dimension)
        coordinate[dimension] = shards - 1
        elements += math.prod(_box(parameter, coordinate)[1])
    if not elements:
        raise RefusedError(
            f"no parameter has a part on the last of {shards} shards, and a rank without any can't be "
            "followed: use fewer shards. fully_shard gives the same number of rows to all shards but the last"
        )


def _check_unit(name: str, unit: FSDPModule) -> None:
    """Raise `RefusedError` if the settings of a unit prevent that shadow nodes get its final gradients."""
    groups = list(param_groups(unit))
    if len(groups) > 1:
        raise RefusedError(
            f"{name}: its parameters have several meshes, and FSDP has no all-reduce hook then: use one mesh"
        )
    for group in groups:
        if getattr(group.mesh_info, "dp_mesh_dims", None) is not None:  # since PyTorch 2.12
            raise RefusedError(
                f"{name}: dp_mesh_dims of fully_shard can't be followed: give it the dimension of the "
                "shards, mesh=checkmate.shard_mesh(device_type)"
            )
        for parameter in group.fsdp_params:
            _check_types(name, group.mp_policy, parameter.sharded_param.dtype)


def _averages(units: Mapping[str, FSDPModule]) -> bool:
    """Return whether FSDP averages over replicas; with a factor of the script's it sums.

    Raise `RefusedError` if its units differ.
    """
    with_factor = {name: _divides(group) for name, unit in units.items() for group in param_groups(unit)}
    if len(set(with_factor.values())) > 1:
        without = next(name for name, has_factor in with_factor.items() if not has_factor)
        raise RefusedError(
            f"only some of FSDP's units have set_gradient_divide_factor, {without or 'the root'} has not: "
            "call it on all of them"
        )
    return not any(with_factor.values())


def _divides(group: Any) -> bool:
    """Return whether a group's gradients have a factor that the script has set."""
    if hasattr(group, "gradient_divide_factor"):  # since PyTorch 2.8
        return group.gradient_divide_factor is not None
    return group.reduce_scatter_reduce_op is not None


def _reduced_dtype(policy: Any, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which FSDP reduces the gradients of parameters of a type."""
    result: torch.dtype = policy.reduce_dtype or policy.param_dtype or dtype
    return result


def _check_types(name: str, policy: Any, dtype: torch.dtype) -> None:
    """Raise `RefusedError` if FSDP changes gradients after their reduction, other than their type."""
    reduced = _reduced_dtype(policy, dtype)
    if reduced not in _EXACT:
        raise RefusedError(
            f"{name}: FSDP divides gradients of {reduced} after their reduction, so shadow nodes would get "
            "others: set reduce_dtype=torch.float32 in its MixedPrecisionPolicy"
        )
