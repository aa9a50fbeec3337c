"""Parameters and optimizer state as the tensors of a layout, for optimizers whose steps nodes can't repeat.

An optimizer creates its state in its first step. A trial (`trial.py`) tells its layout before that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, get_args

import torch
from torch import nn

from checkmate import state
from checkmate.optim.several import entries_of, members_of
from checkmate.optim.supported import UnsupportedOptimizer, copied_spec_of, spec_of
from checkmate.state import StateError, in_memory_order, leaves, local_of, sharded_like
from checkmate.training.errors import RefusedError
from checkmate.training.model.trained import TrainedModel
from checkmate.training.record.trial import tried_out
from checkmate.wire.parameter import STATE_ITEMSIZES, LayoutError, Parameter, dim_order

Follow = Literal["auto", "gradients", "state"]
"""How nodes follow: by repeating steps with copied gradients, or by copies of the state itself."""
FOLLOW: Final = get_args(Follow)
MAX_BESIDE: Final = 16 << 20
"""Bytes of state in a record, beside the tensors: a record carries other things, too."""


class CopiedState:
    """The tensors that are copied after each iteration: parameters, then each tensor of their state.

    Numbers of tensors are those of `described`, as in the layout.
    """

    def __init__(self, model: TrainedModel, optimizer: torch.optim.Optimizer) -> None:
        """Try the optimizer out; its state is as before afterwards.

        Raise `UnsupportedOptimizer` if it has no step without a closure, or state that can't be copied.
        """
        self._optimizer = optimizer
        trained = model.trained()
        self.parameters: Final[Sequence[nn.Parameter]] = list(trained.values())
        numbers = {parameter: number for number, parameter in enumerate(self.parameters)}
        self.spec: Final = copied_spec_of(optimizer, numbers)
        chunks = model.describe()
        with tried_out(optimizer) as self._counters:
            tensors = [
                (chunks[number], leaf)
                for number, parameter in enumerate(self.parameters)
                for leaf in _leaves_of(optimizer, parameter)
                if _is_copied(chunks[number], leaf)
            ]
            entries = [_described(chunk, leaf) for chunk, leaf in tensors]
            strides = [leaf.value.stride() for _, leaf in tensors]
        self.is_shared_out = False
        """Whether some of the state is of one rank of the DP group alone."""
        self._names: Final = {name: number for number, name in enumerate(trained)}
        self._stride_of = {self._place(entry): stride for entry, stride in zip(entries, strides, strict=True)}
        if len(self._stride_of) < len(entries):
            raise UnsupportedOptimizer("the optimizer's state has two entries whose names are alike")
        self._lay_out([*chunks, *entries])
        self._tensors: list[torch.Tensor | None] = []
        self.beside = b""
        """What the tensors lacked when `look` was called, as plain state; empty: nothing."""

    def _place(self, entry: Parameter) -> tuple[int, str]:
        """Return the number of the parameter whose state has an entry, and the entry's name in it."""
        return self._names[entry.name], entry.state

    def _lay_out(self, described: Sequence[Parameter]) -> None:
        self.described = described
        self._places = {n: self._place(entry) for n, entry in enumerate(described) if entry.state}
        self._numbers = {place: number for number, place in self._places.items()}
        self._strides = {
            n: self._stride_of[place] for n, place in self._places.items() if place in self._stride_of
        }
        """The strides of this rank's own entries, by number."""

    def share_out(self, entries_by_position: Sequence[Sequence[Parameter]]) -> None:
        """Take up the entries of all ranks of the DP group, in the order of their positions.

        What only some of them have is of the first of these alone. Raise `UnsupportedOptimizer` if entries of
        one name differ.
        """
        holders: dict[Parameter, list[int]] = {}
        for position, entries in enumerate(entries_by_position):
            for entry in entries:
                holders.setdefault(entry, []).append(position)
        if len(set(map(self._place, holders))) < len(holders):
            raise UnsupportedOptimizer("ranks of a DP group have optimizer state of other shapes or types")
        whole = len(entries_by_position)
        shared_out = [
            entry if len(positions) == whole else replace(entry, owner=(positions[0],))
            for entry, positions in holders.items()
        ]
        self.is_shared_out = any(entry.owner for entry in shared_out)
        self._lay_out([*self.described[: len(self.parameters)], *shared_out])

    def is_told_by(self, position: int) -> bool:
        """Return whether a rank's record has what is beside tensors: if all agree, the first one's."""
        return self.is_shared_out or position == 0

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors, which are copied in each iteration."""
        return sum(parameter.nbytes for parameter in self.described)

    def look(self) -> None:
        """Find the present tensors, for `flat`. Raise `StateError` if state can't be copied."""
        tensors: list[torch.Tensor | None] = [None] * len(self.described)
        for number, parameter in enumerate(self.parameters):
            tensors[number] = local_of(parameter)
            if not self._fits(number, tensors[number]):
                raise StateError(
                    f"{self.described[number].name} has another shape or type than at the start: change "
                    "modules before checkmate.protect"
                )
        stateless: list[int] = []
        values: dict[int, dict[str, Any]] = {}
        strides: dict[int, dict[str, tuple[int, ...]]] = {}
        for at, parameter in enumerate(self.parameters):
            if not self._optimizer.state.get(parameter):
                stateless.append(at)
                continue
            for leaf in _leaves_of(self._optimizer, parameter):
                entry = self._numbers.get((at, leaf.name), -1)
                if entry in self._strides and self._fits(entry, leaf.value):
                    tensors[entry] = leaf.value
                    if leaf.value.stride() != self._strides[entry]:
                        strides.setdefault(at, {})[leaf.name] = leaf.value.stride()
                else:
                    values.setdefault(at, {})[leaf.name] = leaf.value
        absent: dict[int, list[str]] = {}
        for number in self._strides:
            at, name = self._places[number]
            if tensors[number] is None and at not in stateless and name not in values.get(at, {}):
                absent.setdefault(at, []).append(name)
        members = zip(members_of(self._optimizer), self._counters, strict=True)
        counters = [{name: vars(member)[name] for name in names} for member, names in members]
        beside: dict[str, Any] = {"stateless": stateless, "values": values, "absent": absent}
        beside |= {"strides": strides, "counters": counters if any(counters) else []}
        beside = {key: value for key, value in beside.items() if value}
        # As bytes: what it refers to changes in the next step, and the record is made beside training.
        self._tensors, self.beside = tensors, state.dumps(beside) if beside else b""
        if len(self.beside) > MAX_BESIDE:
            sizes = {
                f"{name} of {self.described[at].name}": len(state.dumps(value))
                for at, entries in values.items()
                for name, value in entries.items()
            }
            largest = max(sizes, key=sizes.__getitem__, default="")
            raise StateError(
                f"{len(self.beside) >> 20} MiB of optimizer state have appeared, or changed their shapes, "
                f"since the start, and a record may have {MAX_BESIDE >> 20} MiB; the largest is {largest}"
            )

    def flat(self, number: int) -> torch.Tensor | None:
        """Return a tensor that `look` has found, flat and in memory order; `None` if there is none."""
        tensor = self._tensors[number]
        if tensor is None:
            return None
        return in_memory_order(tensor.detach(), self.described[number].dim_order).reshape(-1)

    def value(self, number: int) -> torch.Tensor:
        """Return a tensor as it is now, or zeros if there is none."""
        described = self.described[number]
        if not described.state:
            return local_of(self.parameters[number]).detach()
        at, name = self._places[number]
        for leaf in _leaves_of(self._optimizer, self.parameters[at]):
            if leaf.name == name and self._fits(number, leaf.value):
                tensor: torch.Tensor = leaf.value.detach()
                return tensor
        return torch.zeros(described.shape, dtype=state.DTYPES[described.dtype])

    def values(self, number: int) -> tuple[torch.Tensor, Mapping[str, object]]:
        """Return a tensor as it is now, for seeds. It has no state of its own."""
        return self.value(number), {}

    def install(self, tensors: Mapping[int, torch.Tensor], beside: Mapping[str, Any]) -> None:
        """Set parameters and optimizer state to what was copied.

        The state is created by a trial, so that all of it has the optimizer's own types and devices.

        Args:
            tensors: All tensors, in the script's shapes.
            beside: What `look` has found beside them.

        Raises:
            StateError: The optimizer does not create such state.
        """
        stateless, values, absent, strides = (
            beside.get(key, {}) for key in ("stateless", "values", "absent", "strides")
        )
        for member, counters in zip(members_of(self._optimizer), beside.get("counters", ()), strict=False):
            vars(member).update(counters)
        with tried_out(self._optimizer, stays=True):
            pass
        self.install_parameters(tensors)
        with torch.no_grad():
            for at, parameter in enumerate(self.parameters):
                if at in stateless:
                    for member in members_of(self._optimizer):
                        member.state.pop(parameter, None)
                    continue
                beside_tensors = (values.get(at, {}), absent.get(at, ()), strides.get(at, {}))
                self._install(at, parameter, tensors, *beside_tensors)

    def install_states(
        self, states: Sequence[Mapping[Any, Any]], counters: Sequence[Mapping[str, Any]]
    ) -> None:
        """Set the optimizer's state to that of a checkpoint; parameters are as they are.

        A tensor that consists of others may be a dictionary of them. Raise `StateError` as `install`.

        Args:
            states: The state of each parameter, as in `state_dict()`.
            counters: Numbers of the optimizers themselves.
        """
        names = {(at, _plain_name(name)): name for at, name in self._numbers}
        tensors: dict[int, torch.Tensor] = {n: self.value(n).clone() for n in range(len(self.parameters))}
        values: dict[int, dict[str, Any]] = {}
        absent: dict[int, list[str]] = {}
        missing = set(self._numbers)
        for at, entries in enumerate(states):
            plain = {_plain_name(leaf.name): leaf.value for leaf in leaves(entries)}
            saved = {names.get((at, name), name): value for name, value in plain.items()}
            for name, value in saved.items():
                missing.discard((at, name))
                number = self._numbers.get((at, name))
                if number is not None and number not in self._strides:
                    continue  # another rank's
                if number is not None and self._fits(number, value):
                    tensors[number] = value
                else:
                    values.setdefault(at, {})[name] = value
        for at, name in missing:
            absent.setdefault(at, []).append(name)
        stateless = [at for at, entries in enumerate(states) if not entries]
        beside = {"stateless": stateless, "values": values, "absent": absent, "counters": counters}
        self.install(tensors, beside)

    def install_parameters(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Set the parameters alone."""
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters):
                local_of(parameter).copy_(tensors[number])

    def _install(
        self,
        at: int,
        parameter: nn.Parameter,
        tensors: Mapping[int, torch.Tensor],
        values: Mapping[str, Any],
        absent: Sequence[str],
        strides: Mapping[str, Sequence[int]],
    ) -> None:
        remaining = dict(values)
        for leaf in list(_leaves_of(self._optimizer, parameter)):
            number = self._numbers.get((at, leaf.name))
            if leaf.name in remaining:
                leaf.replace(placed_like(parameter, remaining.pop(leaf.name)))
            elif leaf.name in absent or number is None:
                leaf.remove()
            else:
                tensor = leaf.value
                if leaf.holder is not None and leaf.holder[leaf.key] is tensor:
                    tensor = _strided(tensor, strides.get(leaf.name, self._strides[number]))
                tensor.copy_(tensors[number])
                if tensor is not leaf.value:
                    leaf.replace(tensor)
        for name, value in remaining.items():
            if name != next(iter(state.nested({name: value}))):
                raise StateError(
                    f"{name} of the optimizer state of {self.described[at].name} has no place: "
                    "what it is in is not made by the script's optimizer"
                )
            entries_of(self._optimizer, parameter)[name] = placed_like(parameter, value)

    def _fits(self, number: int, value: object) -> bool:
        described = self.described[number]
        return isinstance(value, torch.Tensor) and (
            (tuple(value.shape), state.dtype_name(value.dtype)) == (described.shape, described.dtype)
        )


def copied_state_of(
    model: TrainedModel, optimizer: torch.optim.Optimizer, follow: Follow, copies: str
) -> CopiedState | None:
    """Return what is copied in place of gradients; `None` if nodes repeat the optimizer's steps.

    Args:
        model: The model.
        optimizer: The optimizer, or several.
        follow: With `auto`, state is copied if nodes can't repeat the optimizer's steps.
        copies: The job's way of copies.

    Raises:
        RefusedError: `follow` is unknown, or state can't be copied in this way.
        UnsupportedOptimizer: Neither is possible.
    """
    if follow not in FOLLOW:
        raise RefusedError(f"follow={follow!r}: must be one of {', '.join(map(repr, FOLLOW))}")
    by_hosts = copies == "host"
    if follow == "state" and not by_hosts:
        raise RefusedError(
            "follow='state' needs copies by hosts, because no reduction carries the state over the network: "
            "write copies: host into the job file"
        )
    if follow == "state":
        return CopiedState(model, optimizer)
    numbers = {parameter: number for number, parameter in enumerate(model.trained().values())}
    try:
        spec_of(optimizer, numbers)
    except UnsupportedOptimizer as error:
        if by_hosts and follow == "auto":
            return CopiedState(model, optimizer)
        hint = "follow='auto'" if by_hosts else "a job with copies: host"
        raise UnsupportedOptimizer(f"{error}; or have its state copied, which {hint} does") from None
    return None


def _leaves_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Iterator[state.Leaf]:
    entries = optimizer.state.get(parameter)
    return leaves(entries) if entries else iter(())


def _strided(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Return a tensor, or one like it with these strides, on which the bits of matrices' products depend."""
    if tensor.stride() == tuple(stride):
        return tensor
    return torch.empty_strided(tensor.shape, tuple(stride), dtype=tensor.dtype, device=tensor.device)


def _plain_name(name: str) -> str:
    """Return a leaf's name as it is where a dictionary has the parts of a tensor."""
    return name.replace(":", ".")


def placed_like(parameter: torch.Tensor, value: Any) -> Any:
    """Return a value for the state of a parameter: a tensor of several elements is where that is."""
    if isinstance(value, torch.Tensor) and value.dim():
        return sharded_like(parameter, value.to(parameter.device))
    return value


def _is_copied(chunk: Parameter, leaf: state.Leaf) -> bool:
    """Return whether a leaf is a tensor. Raise `UnsupportedOptimizer` for numbers that can't be restored."""
    if isinstance(leaf.value, torch.Tensor):
        return True
    if isinstance(leaf.holder, tuple):
        raise UnsupportedOptimizer(
            f"the state of {chunk.name}, {leaf.name}, is a number in a tuple with tensors, which can't be "
            "restored: the optimizer has to keep it in a list or a dictionary"
        )
    return False


def _described(chunk: Parameter, leaf: state.Leaf) -> Parameter:
    """Return an entry of a parameter's state as a layout has it. `chunk`: the parameter itself."""
    value: torch.Tensor = leaf.value
    dtype = state.dtype_name(value.dtype)
    if value.layout is not torch.strided or dtype not in STATE_ITEMSIZES:
        raise UnsupportedOptimizer(
            f"the state of {chunk.name}, {leaf.name}, is a tensor of {dtype}, {value.layout}, which can't be "
            f"copied; it may be dense, of {', '.join(STATE_ITEMSIZES)}"
        )
    try:
        order = dim_order(value.shape, value.stride())
    except LayoutError:  # it is copied element by element
        order = ()
    is_chunk = bool(chunk.whole) and tuple(value.shape) == chunk.shape
    whole, offset = (chunk.whole, chunk.offset) if is_chunk else ((), ())
    return Parameter(chunk.name, tuple(value.shape), dtype, order, whole, offset, state=leaf.name)
