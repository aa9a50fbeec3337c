"""The hooks of a `fully_shard`ed model: lend its gradient shards to the buckets of our layout."""

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
from checkmate.training.gradients.buckets import GradientBuckets
from checkmate.training.model.fsdp import FsdpReplica, param_groups


class ShardedHooks:
    """The hooks of one model.

    FSDP reduces and scatters the gradients of a unit's parameters as one flat tensor, and passes that to the
    all-reduce hook, without a word of whose it is. Then it sets `.grad` of each of these parameters to a view
    of it, and calls the parameter's own hooks. So each of these lends `.grad` itself.

    If parameters have a narrower type, FSDP first rounds the flat tensor, as a copy. Then each hook lends its
    part of the flat tensor, and `.grad` gets the average of that, rounded.
    """

    steps = None
    on_reduced: Callable[[int], None]
    on_begun: Callable[[], None]

    def __init__(self, model: FsdpReplica, buckets: GradientBuckets) -> None:
        self.buckets = buckets
        self._model = model
        self._handles: list[Any] = []
        self._types = {bucket.dtype for bucket in buckets.layout.buckets}
        # FSDP may reduce a unit of which this rank has no elements after all others: no end of an iteration.
        self._in_iteration = False
        self._end_queued = False  # the iteration may end with the backward that is going on
        self._backward_due = False  # what the last forward returned has not had its backward
        self._with_gradient: set[int] = set()  # parameters with a gradient in this iteration's backward
        self._in_schedule = False  # at the end of a reduction that is not within backward
        # The flat tensor of the unit whose parameters' hooks are called, and the next one's place in it.
        self._scattered, self._offset = torch.empty(0), 0
        self._checked_places: set[int] = set()  # parameters whose place there is known to be right

    @property
    def active(self) -> bool:
        """Whether gradients are reduced: after `register`, before `close`."""
        return bool(self._handles)

    def register(
        self,
        on_reduced: Callable[[int], None] = lambda iteration: None,
        on_begun: Callable[[], None] = lambda: None,
    ) -> None:
        """Have FSDP call the hooks from now on."""
        self.on_reduced, self.on_begun = on_reduced, on_begun
        for number, parameter in enumerate(self.buckets.parameters):
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
        self.buckets.close()

    def scattered(self, flat: torch.Tensor) -> None:
        """Begin an iteration with the gradients of its first unit. FSDP calls this in backward's thread."""
        if not self.active:
            raise self.buckets.error or RingError(
                "the model's Protection is closed, so gradients are not reduced"
            )
        if dtype_name(flat.dtype) not in self._types:
            raise RuntimeError(f"FSDP reduces gradients of {flat.dtype}; known: {', '.join(self._types)}")
        if not self._in_iteration:
            self._check_settings()
            self._check_empty()
            self._in_iteration = True
            self._with_gradient.clear()
            self.buckets.begin()
            self.on_begun()
        if not self._end_queued:
            self._end_queued = True
            iteration = self.buckets.iteration
            self._after_backward(lambda: self._end(iteration))
        self._scattered, self._offset = flat, 0

    def _forwarded(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Note that a backward of `output` will come; a loss in chunks has one of the head before it."""
        if self._in_iteration and not self._end_queued:
            first = {
                number in self._with_gradient: self.buckets.layout.parameters[number].name
                for number in sorted(self.buckets.flats, reverse=True)
            }
            raise RefusedError(
                f"backward() has reached {first.get(True, 'some parameters')}, but not {first[False]}: call "
                "backward() on what the model returns, before its next forward"
            )
        if torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    self._backward_due = True
                    tensor.register_hook(self._reached)  # type: ignore[no-untyped-call]

    def _reached(self, gradient: torch.Tensor) -> None:
        """Note that backward has come to what the model returned."""
        self._backward_due = False

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
        described = self.buckets.layout.parameters
        for number, parameter in enumerate(self.buckets.parameters):
            if parameter.grad is not None:
                raise RefusedError(
                    f"{described[number].name} has a .grad from before this backward: call "
                    "optimizer.zero_grad() after each step, without set_to_none=False, accumulate with "
                    "set_requires_gradient_sync(False), and checkpoint activations with use_reentrant=False"
                )

    def _accumulated(self, number: int, parameter: torch.Tensor) -> None:
        """Lend a parameter's gradient. FSDP calls this after `scattered` of its unit."""
        assert parameter.grad is not None
        gradient = local_of(parameter.grad).detach()
        if number in self._with_gradient:
            raise self.buckets.reduced_twice(number)
        self._with_gradient.add(number)
        at, self._offset = self._offset, self._offset + self._model.padded_elements(parameter)
        if not gradient.numel():
            return
        self.buckets.check_type(number, gradient)
        self._model.await_offloaded(parameter)
        flat = gradient.view(-1)
        self.buckets.lend({number: flat}, flat, {number: self._exact(number, flat, at)})

    def _exact(self, number: int, gradient: torch.Tensor, at: int) -> torch.Tensor:
        """Return a flat gradient in the type in which FSDP has reduced it, `at` elements into its unit's."""
        described = self.buckets.layout.parameters[number]
        reduced = DTYPES[described.gradient_dtype]
        if torch.promote_types(reduced, gradient.dtype) == gradient.dtype:
            return gradient
        exact = self._scattered[at : at + gradient.numel()].to(gradient.device)
        if number in self._checked_places:
            return exact
        if not _same(exact.to(gradient.dtype), gradient):
            raise RuntimeError(
                f"{described.name}: PyTorch {torch.__version__} does not store FSDP's "
                f"gradients as expected: keep parameters in {reduced}, with param_dtype={gradient.dtype}"
            )
        if gradient.isfinite().all() and gradient.any():  # zeros are everywhere
            self._checked_places.add(number)
        return exact

    def _after_backward(self, work: Callable[[], None]) -> None:
        """Call `work` at the end of backward, or of the reduction that a pipeline schedule does later."""
        if torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(work)
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

    def _end(self, iteration: int) -> None:
        """Reduce zeros for parameters without a gradient, and wait. FSDP's last callback has returned.

        Do nothing if the backward of what the model returned is still to come.
        """
        self._end_queued = False
        buckets = self.buckets
        if self._backward_due and buckets.flats.keys() - self._with_gradient:
            return
        self._scattered = torch.empty(0)
        absent = {}
        for number in buckets.flats.keys() - self._with_gradient:
            like = buckets.flats[number]
            absent[number] = torch.zeros_like(like, device=buckets.parameters[number].device)
            buckets.lend({number: absent[number]}, absent[number])
        self._in_iteration = False
        buckets.wait()
        self._after_backward(lambda: self.on_reduced(iteration))
        for number, zeros in absent.items():
            if zeros.any():
                raise RefusedError(
                    f"{buckets.layout.parameters[number].name} has no gradient on this rank, but on another "
                    "replica: each iteration has to use the same parameters on all ranks"
                )


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have the same values. NaN is a value, whatever its bits."""
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def check_hooks(model: FsdpReplica) -> None:
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
