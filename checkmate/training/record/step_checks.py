"""Checks that shadow nodes can repeat a step: all changes since the last one are in the step record."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from checkmate.base.wording import counted, with_article
from checkmate.optim.several import members_of, parameters_of
from checkmate.state import bytes_of, in_memory_order, local_of
from checkmate.training.errors import RefusedError
from checkmate.training.record.buffers import copied
from checkmate.training.record.capture import RecordDraft
from checkmate.training.record.generators import MAX_CHECKS
from checkmate.training.record.sites import script_site
from checkmate.training.record.windows import Copy, Slices, Window
from checkmate.wire.parameter import dim_order

_log: Final = logging.getLogger("checkmate")

_ANOTHER_RUN: Final = (
    "To load other weights or to replace the optimizer in mid-training, end this run there, save the "
    "parameters, and begin another run from them, after `checkmate reset JOB`"
)


class StepChecks:
    """Checks an optimizer and, by name, the parameters whose gradients are reduced.

    `slices` selects parameters and state to check, `frozen` has the parameters that need no gradient, and
    `slots` where modules keep those that do.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[str, nn.Parameter],
        slices: Slices,
        frozen: Mapping[str, nn.Parameter] = MappingProxyType({}),
        slots: Sequence[tuple[str, dict[str, nn.Parameter | None], str]] = (),
    ) -> None:
        self._optimizer = optimizer
        members = members_of(optimizer)
        self._stepped_by = (
            {id(member): parameters_of(member) for member in members} if len(members) > 1 else {}
        )
        self._frozen = frozen
        self._slots = [(name, slots, key, names[name]) for name, slots, key in slots]
        self._said_frozen = set[str]()
        self._named_foreign = False
        self._names = list(names)
        self._parameters = list(names.values())
        self._ids = {id(parameter) for parameter in self._parameters}
        self._groups = self._group_ids()
        self.gradients = GradientWatch(list(names.items()))
        self._on_host = all(parameter.device.type == "cpu" for parameter in self._parameters)
        self._slices = slices
        self._state = StateWatch(slices, on_host=self._on_host)
        self._versions: list[int] = []

    def check(self, optimizer: torch.optim.Optimizer) -> Callable[[], None] | None:
        """Raise `RefusedError` if groups, or gradients of an optimizer that is to step, were changed.

        Return what `check_gradients` does.
        """
        self.check_groups()
        return self.check_gradients(self._stepped_by.get(id(optimizer)))

    def check_groups(self, *, sizes: bool = False) -> None:
        """Raise `RefusedError` if the optimizer has other parameter groups than before, or other `sizes`."""
        groups = self._optimizer.param_groups
        same = [len(group["params"]) for group in groups] == list(map(len, self._groups))
        if not same or (not sizes and self._group_ids() != self._groups):
            raise RefusedError(
                "the optimizer's parameter groups were changed after checkmate.protect: add parameters "
                "before it"
            )

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has used the gradients of its parameters."""
        self.gradients.forget(self._stepped_by.get(id(optimizer)))

    def check_closure(self, arguments: Any, keywords: Any) -> None:
        """Raise `RefusedError` if the step has a closure, which runs backward inside of it."""
        if keywords.get("closure", *arguments[1:2]) is not None:
            raise RefusedError(
                "optimizer.step(closure) can't be followed, because the closure runs backward inside of the "
                "step: call backward() before step(), and step() without a closure"
            )

    def is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer was given to `protect`, or wraps one that was, whose step it calls."""
        members = members_of(self._optimizer)
        if any(optimizer is member or optimizer.param_groups is member.param_groups for member in members):
            return True
        value_lists = [
            value if isinstance(value, list | tuple) else (value,) for value in vars(optimizer).values()
        ]
        return any(part is member for values in value_lists for part in values for member in members)

    def name_foreign(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn once of an optimizer of other parameters, which nobody restores."""
        if not self._named_foreign:
            self._named_foreign = True
            _log.warning(
                "%s steps parameters that are not of the protected model, and extra= was not given: a "
                "resumed run begins with what the script makes of them. Return their state, and the "
                "optimizer's, from extra(), or put both models into one",
                with_article(type(optimizer).__name__),
            )

    def foreign(self, optimizer: torch.optim.Optimizer) -> RefusedError | None:
        """Return why another optimizer may not step, if it has a protected parameter."""
        groups = (group["params"] for group in optimizer.param_groups)
        shared = next((p for params in groups for p in params if id(p) in self._ids), None)
        if shared is None:
            return None
        name = next(n for n, p in zip(self._names, self._parameters, strict=True) if p is shared)
        kind, given_kinds = _kinds([optimizer])[0], _kinds(members_of(self._optimizer))
        if kind in given_kinds:
            kind = f"another {type(optimizer).__name__}"
        (file, line), *_ = script_site() or (("", 0),)
        return RefusedError(
            f"{kind} is about to step {name} ({file}:{line}), but checkmate.protect was given "
            f"{' and '.join(given_kinds)}, whose steps alone shadow nodes repeat. {_ANOTHER_RUN}"
        )

    def check_state(self, iteration: int) -> Callable[[], None] | None:
        """Raise `RefusedError` if parameters or optimizer state are not as the last step has left them.

        On a device, return a function that raises it once copies have arrived, because nothing may wait here.
        """
        compared = self._state.compare()

        def check() -> None:
            if windows := compared():
                raise self._refused_change(iteration, windows[0])

        return self._now_or_later(check)

    def look_at_written(self) -> None:
        """Begin the next slices with what PyTorch's version counters show as written since the last step.

        Windows cover only a part of a large model. Not every write is a change: a script may swap parameters
        for an EMA's and back.
        """
        now = [parameter._version for parameter in self._parameters]
        if now != self._versions:
            pairs = enumerate(zip(now, self._versions, strict=True))
            numbers = [number for number, (version, before) in pairs if version != before]
            if len(numbers) <= SAMPLED:  # windows show a write of all parameters, as a swap for an EMA's is
                self._slices.look_at(numbers)
            self._versions = now

    def hint_of_unused(self) -> str:
        """Return a hint in words if a backward has reached only some of the parameters."""
        pairs = zip(self._names, self._parameters, strict=True)
        without = [name for name, parameter in pairs if parameter.requires_grad and parameter.grad is None]
        if not 0 < len(without) < len(self._parameters):
            return ""
        return (
            f". {without[0]} has no gradient: if a loss does not use all parameters, construct "
            "DistributedDataParallel with find_unused_parameters=True, else it does not finish the reduction"
        )

    def check_parameters(self, iteration: int) -> None:
        """Raise `RefusedError` if the model has another parameter in the place of one, or one was unfrozen.

        Warn once of those that have been frozen.
        """
        replaced = next((name for name, slots, key, p in self._slots if slots.get(key) is not p), None)
        if replaced is not None:
            raise RefusedError(
                f"iteration {iteration}: the model has another parameter in the place of {replaced}, or "
                "none, which neither DDP nor the optimizer knows: change modules before checkmate.protect"
            )
        unfrozen = next((name for name, p in self._frozen.items() if p.requires_grad), None)
        if unfrozen is not None:
            raise RefusedError(
                f"{unfrozen} got requires_grad=True after checkmate.protect, so its gradient is not reduced: "
                "set it before the model is wrapped, and protect that"
            )
        if all(parameter.requires_grad for parameter in self._parameters):
            return
        pairs = zip(self._names, self._parameters, strict=True)
        frozen = [name for name, p in pairs if not p.requires_grad and name not in self._said_frozen]
        if frozen and not self._stepped_by:  # else frameworks freeze, in turn, what the others step
            self._said_frozen.update(frozen)
            more = f" and {counted(len(frozen) - 1, 'other')}" if len(frozen) > 1 else ""
            _log.warning(
                "iteration %d: %s%s got requires_grad=False after checkmate.protect. A resumed run begins "
                "with what the script sets before its loop, so set it there, too, if the run is that far",
                iteration,
                frozen[0],
                more,
            )

    def note_state(self, copies: Sequence[tuple[Window, Copy]]) -> None:
        """Note these windows of parameters and state as the optimizer, or the start, has left them."""
        self._state.note(copies)
        self._versions = [parameter._version for parameter in self._parameters]

    def check_gradients(self, of: Collection[torch.Tensor] | None = None) -> Callable[[], None] | None:
        """Raise `RefusedError` if gradients were changed in a way that the record can't express.

        On a device, return a function that does so. `of`: only those of these parameters.
        """
        compared = self.gradients.compare(of)

        def check() -> None:
            if names := compared():
                raise RefusedError(
                    f"the gradient of {names[0]} was changed between its reduction and the optimizer's "
                    "step, and shadow nodes can't know how: clip by norm, with checkmate.clip_grad_norm_ or "
                    "checkmate.clip_grads_with_norm_, pass the GradScaler to checkmate.protect as scaler=, "
                    "give pipeline schedules scale_grads=False, and make other changes before the reduction, "
                    "in the loss or with Tensor.register_hook on parameters"
                )

        return self._now_or_later(check)

    def _now_or_later(self, check: Callable[[], None]) -> Callable[[], None] | None:
        """Do a check if its copies are there; return it for the publisher if they arrive from a device."""
        if not self._on_host:
            return check
        check()
        return None

    def _refused_change(self, iteration: int, window: Window) -> RefusedError:
        of = f"{window.state} of parameter" if window.state else "parameter"
        error = RefusedError(
            f"iteration {iteration}: {of} {self._names[window.parameter]} was changed, and not by the step "
            "of the optimizer that checkmate.protect was given: shadow nodes can't know how. Compute values "
            "derived from a parameter in the model's forward (torch.nn.utils.parametrize), and constrain "
            "parameters through the loss or the optimizer's options (`checkmate docs training`). "
            f"{_ANOTHER_RUN}"
        )
        error.iteration = iteration
        return error

    def _group_ids(self) -> list[list[int]]:
        return [[id(p) for p in group["params"]] for group in self._optimizer.param_groups]


def _kinds(optimizers: Iterable[torch.optim.Optimizer]) -> list[str]:
    return list(dict.fromkeys(with_article(type(optimizer).__name__) for optimizer in optimizers))


SAMPLE_BYTES: Final = 16 * 1024
SAMPLED: Final = 8
"""The number of gradients sampled per iteration, in rotation, and of the record's windows on a device."""

_WORDS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class GradientWatch:
    """Samples gradients in `note`, and again in `compare`, which waits for no device.

    It detects a change of all gradients, such as scaling or clipping, at once, and a change of a single one
    when the rotation reaches it.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._parameters = parameters
        self._on_host = all(parameter.device.type == "cpu" for _, parameter in parameters)
        self._round = 0
        self._names: list[str] = []
        self._samples: list[_Sample] = []
        self._noted: list[bytes] = []
        self._sums: torch.Tensor | None = None

    def start(self) -> None:
        """Choose the gradients to sample in a new iteration, and note them."""
        count = len(self._parameters)
        first = self._round * SAMPLED
        self._round += 1
        places = range(first, first + min(SAMPLED, count))
        self._names = [self._parameters[place % count][0] for place in places]
        self._samples = [_Sample(self._parameters[place % count][1], place // count) for place in places]
        self.note()

    def note(self) -> None:
        """Accept the gradients as they are now."""
        if self._on_host:
            self._noted = [sample.copy() for sample in self._samples]
        elif self._samples:
            self._sums = self._sum()

    def forget(self, of: Collection[torch.Tensor] | None = None) -> None:
        """Release gradients, of these parameters or of all, and do not check them until `start`."""
        samples = enumerate(self._samples)
        places = [] if of is None else [place for place, sample in samples if sample.parameter not in of]
        self._names = [self._names[place] for place in places]
        self._samples = [self._samples[place] for place in places]
        self._noted = [self._noted[place] for place in places] if self._on_host else []
        if self._sums is not None:  # not by a list, which would be copied to the device
            self._sums = torch.stack([self._sums[place] for place in places]) if places else None

    def compare(self, of: Collection[torch.Tensor] | None = None) -> Callable[[], list[str]]:
        """Look at gradients again; the result returns the names of parameters whose gradients were changed.

        `of`: only these parameters. On CUDA the result waits for the device.
        """
        names = self._names
        if self._on_host:
            pairs = zip(names, self._samples, self._noted, strict=True)
            changed_names = [
                name
                for name, sample, draft in pairs
                if (of is None or sample.parameter in of) and sample.copy() != draft
            ]
            return lambda: changed_names
        samples = zip(names, self._samples, strict=True)
        eligible = {name for name, sample in samples if of is None or sample.parameter in of}
        if self._sums is None:
            return lambda: names
        differs = copied(self._sums != self._sum())
        return lambda: [name for name in _changed_names(names, differs()) if name in eligible]

    def _sum(self) -> torch.Tensor:
        return torch.stack([sample.sum() for sample in self._samples])


class StateWatch:
    """Detects changes of parameters and optimizer state by anything but the optimizer's step.

    It compares windows as the last step has left them: those of the record and some of parameters alone, of
    which a part is enough on a device, because each copy there costs a launch.
    """

    def __init__(self, slices: Slices, *, on_host: bool) -> None:
        self._slices = slices
        self._on_host = on_host
        self._round = 0
        self._noted_windows: list[tuple[Window, Copy]] = []

    def note(self, copies: Sequence[tuple[Window, Copy]]) -> None:
        """Note these windows, and some of parameters alone, as they are now."""
        if not self._on_host:
            first = self._round * SAMPLED
            self._round += 1
            copies = [copies[(first + i) % len(copies)] for i in range(min(SAMPLED, len(copies)))]
        self._noted_windows = [*copies, *self._slices.take_parameters()]

    def compare(self) -> Callable[[], list[Window]]:
        """Copy the same windows again; the result returns those that differ, once copies have arrived."""
        pairs = [(window, then, self._copy_again(window)) for window, then in self._noted_windows]
        return lambda: [window for window, then, now in pairs if not same_bits(then(), now())]

    def _copy_again(self, window: Window) -> Copy:
        try:
            return self._slices.copy(window)
        except KeyError:  # the script has discarded this state
            return lambda: None


def same_bits(first: object, second: object) -> bool:
    """Return whether two copies of a window have the same bits: bytes, flat tensors, numbers or `None`."""
    if isinstance(first, bytes):
        return first == second
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.dtype == second.dtype and bytes_of(first) == bytes_of(second)
    return type(first) is type(second) and bool(first == second or (first != first and second != second))  # noqa: PLR0124 - NaN


class _Sample:
    """A window of a parameter's gradient: the next one at each turn of the parameter."""

    def __init__(self, parameter: nn.Parameter, turn: int) -> None:
        self.parameter = parameter
        self._turn = turn

    def copy(self) -> bytes:
        """Return its bytes in host memory; empty without a gradient."""
        gradient = self.parameter.grad
        if gradient is None:
            return b""
        parameter, local = local_of(self.parameter), local_of(gradient)
        if local.stride() != parameter.stride() or not _dense(parameter) or local.is_conj() or local.is_neg():
            return bytes_of(self._window(_flat(self.parameter, gradient))).tobytes()
        # It has the parameter's order in memory. A view of it as a tensor would take ten times as long.
        size = local.element_size()
        window = self._place(local.numel(), size)
        return ctypes.string_at(local.data_ptr() + window.start * size, (window.stop - window.start) * size)

    def sum(self) -> torch.Tensor:
        """Return the sum of its elements' bits as integers, as int64."""
        gradient = self.parameter.grad
        if gradient is None or not local_of(gradient).numel():
            return torch.zeros((), dtype=torch.int64, device=self.parameter.device)
        window = self._window(_flat(self.parameter, gradient))
        return window.view(_WORDS[window.element_size()]).sum()

    def _window(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self._place(flat.numel(), flat.element_size())]

    def _place(self, elements: int, size: int) -> slice:
        """Return its place among the elements of a tensor, which have `size` bytes each."""
        window = max(SAMPLE_BYTES // size, 1)
        windows = max(-(-elements // window), 1)
        start = (self._turn % windows) * window
        return slice(start, min(start + window, elements))


def _dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill its memory; false for some that do."""
    images = tensor.dim() == 4
    return tensor.is_contiguous() or (images and tensor.is_contiguous(memory_format=torch.channels_last))


def _changed_names(names: Sequence[str], differs: torch.Tensor) -> list[str]:
    return [name for name, is_changed in zip(names, differs.tolist(), strict=True) if is_changed]


def _flat(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient's elements in its parameter's memory order: a view if the gradient has that order."""
    local = local_of(parameter)
    ordered = in_memory_order(local_of(gradient).detach(), dim_order(local.shape, local.stride()))
    if ordered.is_contiguous():  # dimensions of size 1 may have any stride
        return ordered.as_strided((ordered.numel(),), (1,))
    return ordered.clone(memory_format=torch.contiguous_format).reshape(-1)


class LeftGradients:
    """Warns once of each kind if a backward adds to the iteration before's gradients: a resumed run has none.

    Scripts may clear gradients as late as between forward and backward. So one parameter's hook looks as the
    next backward comes, or else `on_backward`: that of a sharded parameter is not called, nor of one that
    this rank's loss does not use. `several`: there are several optimizers, and after the step of one,
    gradients of the others' parameters may stay.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, several: bool) -> None:
        self._parameters = sorted(filter(torch.Tensor.numel, parameters), key=torch.Tensor.numel)
        self._checks_left = (
            0 if several else MAX_CHECKS
        )  # looks at a CUDA device after a step, which wait for it
        self._has_warned = False
        self._noted: RecordDraft | None = None  # whose gradients may be left
        self._parameter = self._parameters[0]
        self._hook: Any = None

    def watch(self, draft: RecordDraft, on_backward: Callable[[], None]) -> None:
        """Look when the first backward after this iteration's comes, at the smallest that has a gradient.

        `on_backward` is called then; it calls ours.
        """
        self.forget()
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        if trained:
            self._noted = draft
            self._parameter = next(
                (candidate for candidate in trained if candidate.grad is not None), trained[0]
            )
            self._hook = self._parameter.register_hook(lambda gradient: on_backward())  # type: ignore[no-untyped-call]

    def on_backward(self) -> None:
        """Look now that a backward has begun, unless that is done; DDP has not filled in gradients yet."""
        draft = self._noted
        self.forget()
        if draft is None:
            return
        draft.leaves_gradients = (self._checks_left > 0 or not draft.is_over) and _has_gradient(
            self._parameter
        )
        if draft.is_over:
            self._checks_left -= self._parameter.is_cuda
        if not draft.leaves_gradients:
            return
        if draft.is_over:
            self._checks_left = 0
            _log.warning(
                "iteration %d: gradients are added to those of the iteration before, which no zero_grad() "
                "has cleared. A resumed run begins without gradients: call optimizer.zero_grad() after each "
                "step",
                draft.iteration + 1,
            )
        elif not self._has_warned:
            self._has_warned = True
            _log.warning(
                "iteration %d: a backward without optimizer.step() or zero_grad(). To accumulate gradients, "
                "use ddp.no_sync(), or with FSDP set_requires_gradient_sync(False): a run resumed between "
                "two such backwards lacks what was accumulated",
                draft.iteration,
            )

    def has_gradients(self) -> bool:
        """Return whether gradients are left. Waits for a CUDA device."""
        return any(_has_gradient(parameter) for parameter in self._parameters)

    def forget(self) -> None:
        """Do not look."""
        if self._hook is not None:
            self._hook.remove()
        self._noted = self._hook = None


def _has_gradient(parameter: nn.Parameter) -> bool:
    """Return whether it has one that is not zero. Waits for a CUDA device."""
    return parameter.grad is not None and bool(local_of(parameter.grad).any())
