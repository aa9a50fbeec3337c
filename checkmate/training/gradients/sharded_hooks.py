"""The hooks of a `fully_shard`ed model: lend its gradient shards to their reduction in our layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from checkmate.ring.place import RingError
from checkmate.state import DTYPES, dtype_name, local_of
from checkmate.training.errors import RefusedError
from checkmate.training.gradients.reducing import Reducer
from checkmate.training.gradients.reduction import GradientReduction
from checkmate.training.model.fsdp import FsdpModel, param_groups
from checkmate.wire.layout import Layout


class ShardedHooks(GradientReduction):
    """The hooks of one model.

    FSDP reduces and scatters the gradients of a unit's parameters as one flat tensor, and passes that to the
    all-reduce hook, without a word of whose it is. Then it sets `.grad` of each of these parameters to a view
    of it, and calls the parameter's own hooks. So each of these lends `.grad` itself.

    If parameters have a narrower type, FSDP first rounds the flat tensor, as a copy. Then each hook lends its
    part of the flat tensor, and `.grad` gets the average of that, rounded.
    """

    def __init__(self, model: FsdpModel, layout: Layout, reducer: Reducer, first_iteration: int) -> None:
        super().__init__(layout, list(model.trained().values()), reducer, first_iteration)
        self._model = model
        self._handles: list[Any] = []
        self._types = {bucket.dtype for bucket in layout.buckets}
        self._begun = False  # FSDP may reduce a unit of which this rank has no elements after all others
        self._ending = False  # the iteration may end with the backward that is going on
        self._awaited = False  # what the last forward returned has not had its backward
        self._seen: set[int] = set()  # parameters with a gradient in this iteration's backward
        self._in_schedule = False  # at the end of a reduction that is not within backward
        # The flat tensor of the unit whose parameters' hooks are called, and the next one's place in it.
        self._scattered, self._at = torch.empty(0), 0
        self._compared: set[int] = set()  # parameters whose place there is known to be right

    @property
    def active(self) -> bool:
        """Whether gradients are reduced: after `register`, before `close`."""
        return bool(self._handles)

    def register(self, on_reduced: Callable[[int], None] = lambda iteration: None) -> None:
        """Have FSDP call the hooks from now on."""
        self.on_reduced = on_reduced
        for number, parameter in enumerate(self._parameters):
            hook = partial(self._accumulated, number)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self._handles.append(self._model.outer.register_forward_hook(self._forwarded))
        for unit in self._model.units.values():
            unit.set_all_reduce_hook(self.scattered)

    def close(self) -> None:
        """End the threads and the reducer. The all-reduce hook stays, and fails."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        super().close()

    def scattered(self, flat: torch.Tensor) -> None:
        """Begin an iteration with the gradients of its first unit. FSDP calls this in backward's thread."""
        if not self.active:
            raise self.error or RingError("the model's Protection is closed, so gradients are not reduced")
        if dtype_name(flat.dtype) not in self._types:
            raise RuntimeError(f"FSDP reduces gradients of {flat.dtype}; known: {', '.join(self._types)}")
        if not self._begun:
            self._check_settings()
            self._check_empty()
            self._begun = True
            self._seen.clear()
            self._ending = True
            self._begin()
        elif not self._ending:
            self._ending = True
            iteration = self.iteration
            self._after_backward(lambda: self._await_reduced(iteration))
        self._scattered, self._at = flat, 0

    def _forwarded(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Note that a backward of `output` will come; a loss in chunks has one of the head before it."""
        if self._begun and not self._ending:
            first = {
                number in self._seen: self._layout.parameters[number].name
                for number in sorted(self._flats, reverse=True)
            }
            raise RefusedError(
                f"backward() has reached {first.get(True, 'some parameters')}, but not {first[False]}: call "
                "backward() on what the model returns, before its next forward"
            )
        if torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    self._awaited = True
                    tensor.register_hook(self._reached)  # type: ignore[no-untyped-call]

    def _reached(self, gradient: torch.Tensor) -> None:
        """Note that backward has come to what the model returned."""
        self._awaited = False

    def _check_settings(self) -> None:
        """Raise `RefusedError` if the script has changed FSDP's settings since `register`."""
        self._model.check_settings()
        for name, unit in self._model.units.items():
            if any(group._all_reduce_hook != self.scattered for group in param_groups(unit)):
                raise RefusedError(
                    f"{name or type(self._model.inner).__name__} got another all-reduce hook after "
                    "checkmate.protect, so its gradients would not be reduced: remove set_all_reduce_hook"
                )

    def _check_empty(self) -> None:
        """Raise `RefusedError` if there are gradients, to which FSDP would add those of this rank."""
        for number, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                raise RefusedError(
                    f"{self._layout.parameters[number].name} has a .grad from before this backward: call "
                    "optimizer.zero_grad() after each step, without set_to_none=False, accumulate with "
                    "set_requires_gradient_sync(False), and checkpoint activations with use_reentrant=False"
                )

    def _accumulated(self, number: int, parameter: torch.Tensor) -> None:
        """Lend a parameter's gradient. FSDP calls this after `scattered` of its unit."""
        assert parameter.grad is not None
        gradient = local_of(parameter.grad).detach()
        if number in self._seen:
            raise self._reduced_twice(number)
        self._seen.add(number)
        at, self._at = self._at, self._at + self._model.padded_elements(parameter)
        if not gradient.numel():
            return
        self._check_type(number, gradient)
        self._model.await_offloaded(parameter)
        flat = gradient.view(-1)
        self._lend({number: flat}, flat, {number: self._exact(number, flat, at)})

    def _exact(self, number: int, gradient: torch.Tensor, at: int) -> torch.Tensor:
        """Return a flat gradient in the type in which FSDP has reduced it, `at` elements into its unit's."""
        reduced = DTYPES[self._layout.parameters[number].gradient_dtype]
        if torch.promote_types(reduced, gradient.dtype) == gradient.dtype:
            return gradient
        exact = self._scattered[at : at + gradient.numel()].to(gradient.device)
        if number in self._compared:
            return exact
        if not _same(exact.to(gradient.dtype), gradient):
            raise RuntimeError(
                f"{self._layout.parameters[number].name}: PyTorch {torch.__version__} does not store FSDP's "
                f"gradients as expected: keep parameters in {reduced}, with param_dtype={gradient.dtype}"
            )
        if gradient.isfinite().all() and gradient.any():  # zeros are everywhere
            self._compared.add(number)
        return exact

    def _after_backward(self, work: Callable[[], None]) -> None:
        """Call `work` at the end of backward, or of the reduction that a pipeline schedule does later."""
        if torch._C._current_graph_task_id() != -1:
            super()._after_backward(work)
            return
        if self._in_schedule:
            work()
            return
        state: Any = self._model.outer._get_fsdp_state()  # type: ignore[operator]
        finish = state._root_post_backward_final_callback

        def end() -> None:
            del state._root_post_backward_final_callback
            finish()
            self._in_schedule = True
            try:
                work()
            finally:
                self._in_schedule = False

        # FSDP has no hook there. Schedules call this last.
        state._root_post_backward_final_callback = end

    def _await_reduced(self, iteration: int) -> None:
        """Reduce zeros for parameters without a gradient, and wait. FSDP's last callback has returned.

        Do nothing if the backward of what the model returned is still to come.
        """
        self._ending = False
        if self._awaited and self._flats.keys() - self._seen:
            return
        self._scattered = torch.empty(0)
        absent = {}
        for number in self._flats.keys() - self._seen:
            like = self._flats[number]
            absent[number] = torch.zeros_like(like, device=self._parameters[number].device)
            self._lend({number: absent[number]}, absent[number])
        self._begun = False
        super()._await_reduced(iteration)
        for number, zeros in absent.items():
            if zeros.any():
                raise RefusedError(
                    f"{self._layout.parameters[number].name} has no gradient on this rank, but on another "
                    "replica: each iteration has to use the same parameters on all ranks"
                )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same values. NaN is one, whatever its bits."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def check_hooks(model: FsdpModel) -> None:
    """Raise `RefusedError` if a unit has an all-reduce hook, other than that of a closed Protection."""
    for name, unit in model.units.items():
        for group in param_groups(unit):
            hook = group._all_reduce_hook
            owner = getattr(hook, "__self__", None)
            if hook is not None and not (isinstance(owner, ShardedHooks) and not owner.active):
                raise RefusedError(
                    f"{name or type(model.inner).__name__} already has the all-reduce hook "
                    f"{getattr(hook, '__qualname__', hook)}, and FSDP accepts only one. Checkmate's own hook "
                    "reduces gradients as they are: remove the other one"
                )
