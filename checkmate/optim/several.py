"""Several optimizers of one model, each of which steps its own parameters, seen as one optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

Groups = list[dict[str, Any]]


class SeveralOptimizers(torch.optim.Optimizer):
    """Optimizers of different parameters. It has their groups, in their order, and their state.

    A script steps each of them by itself; this one has no step. Its state is like that of one optimizer with
    all groups.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        self.members = tuple(members)

    @property
    def param_groups(self) -> Groups:  # type: ignore[override]
        """The groups of all, which are the members' own."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> Mapping[torch.Tensor, dict[str, Any]]:  # type: ignore[override]
        """The state of each parameter, which is the members' own."""
        return _States(self.members)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all, with parameters numbered through."""
        state: dict[int, Any] = {}
        groups: Groups = []
        first = 0
        for member in self.members:
            member_state = member.state_dict()
            state |= {first + number: entries for number, entries in member_state["state"].items()}
            groups += [
                {**group, "params": [first + n for n in group["params"]]}
                for group in member_state["param_groups"]
            ]
            first += sum(len(group["params"]) for group in member_state["param_groups"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give each member its part of a `state_dict`. Raise `ValueError` if groups do not fit."""
        groups, first = list(state_dict["param_groups"]), 0
        if len(groups) != len(self.param_groups):
            raise ValueError(f"the state has {len(groups)} parameter groups, not {len(self.param_groups)}")
        for member in self.members:
            member_groups = [groups.pop(0) for _ in member.param_groups]
            count = sum(len(group["params"]) for group in member_groups)
            numbers = range(first, first + count)
            state = {n - first: entries for n, entries in state_dict["state"].items() if n in numbers}
            renumbered = [
                {**group, "params": [n - first for n in group["params"]]} for group in member_groups
            ]
            member.load_state_dict({"state": state, "param_groups": renumbered})
            first += count


class OwnedShare(SeveralOptimizers):
    """This rank's share of a `ZeroRedundancyOptimizer`: the optimizer in it, which steps some parameters.

    A script changes options, such as the learning rate, in the groups of the whole. They are those of the
    share from its next step on, and here at once, from `follow` on.
    """

    def __init__(self, whole: Any) -> None:
        """Take the share of `whole`, a `ZeroRedundancyOptimizer`."""
        super().__init__([whole.optim])
        self.whole = whole
        self._follows = False

    @property
    def param_groups(self) -> Groups:  # type: ignore[override]
        """The groups of the share, with the present options of the whole."""
        if self._follows:
            self.whole._sync_param_groups(self.whole.param_groups, self.whole.optim.param_groups)
        return super().param_groups

    def follow(self) -> None:
        """Take options from the whole from now on."""
        self._follows = True

    def share_with_others(self) -> None:
        """Give the whole the restored options, and other ranks the parameters. All ranks call it."""
        self.whole._sync_param_groups(self.whole.optim.param_groups, self.whole.param_groups)
        self.whole._sync_params()


def scripts_optimizers(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers whose methods a script calls: of a share, the whole."""
    return (optimizer.whole,) if isinstance(optimizer, OwnedShare) else members_of(optimizer)


class _States(Mapping[torch.Tensor, dict[str, Any]]):
    """The state of all members by parameter. It never makes an entry, as a member's own `state` does."""

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        self._states = [member.state for member in members]

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        for state in self._states:
            if parameter in state:
                entries: dict[str, Any] = state[parameter]
                return entries
        raise KeyError(parameter)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for state in self._states:
            yield from state

    def __len__(self) -> int:
        return sum(map(len, self._states))


def members_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that a script steps: those of `SeveralOptimizers`, or the one itself."""
    return optimizer.members if isinstance(optimizer, SeveralOptimizers) else (optimizer,)


def entries_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """Return the state of a parameter, to write to: an empty one is made at the optimizer that steps it."""
    member = next(member for member in members_of(optimizer) if parameter in parameters_of(member))
    entries: dict[str, Any] = member.state.setdefault(parameter, {})
    return entries


def parameters_of(optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
    """Return the parameters that an optimizer steps."""
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}
