"""Notes each iteration of a rank: the optimizer's step, and the state that a resumed run needs.

Hooks on the model, the optimizer and the scaler only take notes; a thread of `publisher` turns them into
messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from checkmate.optim.supported import beginnings, options_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.state import local_of
from checkmate.training.errors import RefusedError
from checkmate.training.exclusion import StepExclusion
from checkmate.training.record.buffers import Buffers
from checkmate.training.record.capture import Capture, DriftWatch, Noted, Scaled, Watched
from checkmate.training.record.step_checks import StepChecks
from checkmate.training.record.windows import Slices
from checkmate.training.record.wrapped import ClipListener, ScalerWatch, SchedulerWatch

_log: Final = logging.getLogger("checkmate")


class Recorder:
    """Notes iterations through hooks that it registers.

    The state at the end of an iteration is captured at one moment: when the script calls `mark`. If it never
    does, the state is captured after the optimizer's step, and again after steps of scaler and scheduler.
    """

    def __init__(
        self,
        watched: Watched,
        names: Mapping[str, nn.Parameter],
        steps: StepExclusion,
        emit: Callable[[Noted], None],
        stream_ends: Callable[[int], Mapping[tuple[int, int], int]],
        slices: Slices | None,
        buffers: Buffers,
        await_departed: Callable[[], None] = lambda: None,
    ) -> None:
        """Register the hooks.

        Args:
            watched: The script's objects.
            names: The trained parameters by name, in the layout's order.
            steps: Locks parameters during the optimizer's step.
            emit: Called with each iteration once the next forward has begun.
            stream_ends: Returns the ends of the streams at the end of an iteration.
            slices: Selects slices to compare, on the group's first rank, which also records the optimizer's
                step; `None` on other ranks.
            buffers: The buffers to record.
            await_departed: Returns once this process's death can't lose iterations emitted before. It raises
                the error if one of them can't be published.
        """
        self._await_departed = await_departed
        self._watched = watched
        self._steps = steps
        self._emit = emit
        self._stream_ends = stream_ends
        self._slices = slices
        self._capture = Capture(watched, buffers, first=slices is not None)
        self._drift = DriftWatch(watched, active=slices is not None)
        self._numbers = {id(p): number for number, p in enumerate(names.values())}
        self._stepped_ids = {id(p) for group in watched.optimizer.param_groups for p in group["params"]}
        self._checks = StepChecks(watched.optimizer, names, slices)
        self._open: Noted | None = None
        self._marking = self._missed = self._accumulated = False
        self._parameters = list(names.values())
        with ExitStack() as undo:
            self._register(undo)
            self._undo = undo.pop_all()

    def _register(self, undo: ExitStack) -> None:
        """Register hooks on the script's objects; `undo` removes them."""
        watched = self._watched
        if watched.scaler is not None:
            undo.callback(ScalerWatch(watched.scaler, watched.optimizer, self).remove)
        if watched.scheduler is not None:
            undo.callback(SchedulerWatch(watched.scheduler, self.moved_on).remove)
        for handle in (
            watched.optimizer.register_step_pre_hook(self._before_step),
            watched.optimizer.register_step_post_hook(self._after_step),
            watched.model.outer.register_forward_pre_hook(self._before_forward),
        ):
            undo.callback(handle.remove)
        undo.callback(ClipListener(self._parameters, self.check_gradients, self._clipped).close)

    def reduced(self, iteration: int) -> None:
        """Open an iteration at the end of its backward: gradients are those that shadow nodes receive."""
        if self._open is not None:
            self._finish(self._open)
        self._open = Noted(iteration, self._stream_ends(iteration))
        if not self._marking or self._missed:  # it may get neither a step nor a mark
            self._open.captured = self._capture.take()
        self._checks.gradients.start()

    def marks(self) -> None:
        """Expect a `mark` at the end of each iteration from now on."""
        self._marking = True
        self._drift.forget()

    def mark(self, *, in_loop: bool = False, left: bool = False) -> None:
        """End the open iteration here, if there is one. A later mark before the next forward replaces it.

        `in_loop`: as in `Capture.take`. `left`: the script has left its loop, and may have left the iteration
        half-way.
        """
        self.marks()
        noted = self._open
        if noted is not None and not (left and noted.settled):
            self._end_here(noted, in_loop=in_loop)  # first, because the script's `extra` may fail
            noted.marked, noted.settled, noted.left = True, not left, left

    def close(self, last: bool) -> None:
        """Remove the hooks. `last`: the open iteration is complete if its optimizer has stepped or skipped.

        After an error it may lack its step or later changes. Then it is not emitted, unless the script had
        marked its end. Calling it again has no effect.
        """
        noted = self._open
        if noted is not None and (last or noted.settled) and not self._lacks_step(noted):
            noted.last = last
            if self._marking and not noted.marked:
                self.mark()
            if last and noted.left:  # whoever resumes makes that loop's iterator again
                noted.captured = replace(noted.end, rng={**noted.end.rng, "in_loop": True})
            self._finish(noted)
        self._open = None
        self._checks.gradients.forget()
        self._undo.close()

    def scaled(self, kind: pb.Scaling.Kind.ValueType, factor: torch.Tensor) -> None:
        """Note that the scaler has unscaled all gradients."""
        if self._open is not None:
            self._open.scaled.append(Scaled(kind, factor))
            self._checks.gradients.note()

    def scaler_stepped(self, infinite: Sequence[torch.Tensor]) -> None:
        """Note that `scaler.step()` has returned; if it found an infinity, the optimizer has skipped."""
        if self._open is not None:
            self._open.infinite = infinite
        self.moved_on()

    def moved_on(self) -> None:
        """Capture again: scaler or scheduler have changed, and the open iteration may end here."""
        if self._open is not None and not self._marking:
            self._end_here(self._open)

    def check_gradients(self) -> None:
        """Raise `RefusedError` if gradients were changed in a way that the record can't express."""
        if self._open is not None:
            self._checks.check_gradients()

    def _clipped(self, parameters: Sequence[torch.Tensor], coefficient: torch.Tensor) -> None:
        if self._open is None:
            return
        ids = {id(p) for p in parameters}
        chosen = sorted(self._numbers[id(p)] for p in parameters if id(p) in self._numbers)
        if ids >= self._stepped_ids and len(chosen) == len(set(chosen)):
            chosen = []  # all; parameters named twice, such as tied weights, are multiplied twice
        self._open.scaled.append(Scaled(pb.Scaling.CLIP, coefficient, chosen))
        self._checks.gradients.note()

    def _before_forward(self, module: nn.Module, arguments: Any) -> None:
        """End the iteration before a training forward, unless a mark may still follow."""
        if not (module.training and torch.is_grad_enabled()):
            return
        self._watched.model.check_forward()
        noted = self._open
        if noted is None:
            return
        if self._marking and noted.over and not noted.marked:
            if noted.buffers is None:
                self._end_here(noted)
            return
        self._drift.check(noted.iteration)
        self._finish(noted)

    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        self._await_departed()
        noted = self._open
        if noted is None or noted.stepped:
            raise RefusedError(
                "optimizer.step() without a backward of its own: each step must follow one synchronising "
                "backward (the last of those accumulated with no_sync) and precede the next forward"
            )
        self._checks.check(arguments, keywords)
        if self._slices is not None:
            groups = optimizer.param_groups
            noted.options = [options_of(group) for group in groups]
            noted.without_gradient = [
                self._numbers[id(p)]
                for group in groups
                for p in group["params"]
                if p.grad is None and id(p) in self._numbers
            ]
            noted.beginnings = beginnings(optimizer)
        self._steps.begin()

    def _after_step(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        noted = self._open
        if noted is not None:
            noted.stepped = True
            if self._slices is not None:
                noted.slices = self._slices.take()
            self._checks.stepped(noted.slices)
            self.moved_on()
            self._steps.end(noted.iteration)

    def _end_here(self, noted: Noted, *, in_loop: bool = False) -> None:
        """Capture the state at the iteration's end, in place of an earlier capture."""
        noted.captured = captured = self._capture.take(in_loop=in_loop)
        noted.buffers = self._capture.buffers(noted.buffers)
        self._drift.note(captured)

    def _finish(self, noted: Noted) -> None:
        self._open = None
        self._checks.gradients.forget()
        if not noted.stepped:
            self._passed_over(noted)
        if self._marking and not noted.marked and (noted.over or noted.captured is None):
            self._mark_missed(noted)
        if noted.buffers is None:
            noted.buffers = self._capture.buffers(None)
        self._emit(noted)

    def _mark_missed(self, noted: Noted) -> None:
        """Use the state at the next forward; until the next mark, capture after the optimizer's step."""
        if noted.buffers is None:
            self._end_here(noted)
        self._marking = False
        if not self._missed:
            self._missed = True
            _log.warning(
                "iteration %d ended without protection.mark(), which others had: a run resumed here may "
                "differ. Call it at the end of every iteration, or use protection.steps(loader) in the loop "
                "over batches, with one synchronising backward for each",
                noted.iteration,
            )

    def _passed_over(self, noted: Noted) -> None:
        """Unlock an iteration without a step; warn if it leaves gradients, which a resumed run would lack."""
        self._steps.end(noted.iteration)
        if self._lacks_step(noted) and not self._accumulated:
            self._accumulated = True
            _log.warning(
                "iteration %d: a backward without optimizer.step() or zero_grad(). To accumulate gradients, "
                "use ddp.no_sync(), or with FSDP set_requires_gradient_sync(False): a run resumed between "
                "two such backwards lacks what was accumulated",
                noted.iteration,
            )

    def _lacks_step(self, noted: Noted) -> bool:
        """Return whether there are gradients that no step has used."""
        gradients = (p.grad for p in self._parameters if p.grad is not None)
        return not noted.over and any(bool(local_of(one).any()) for one in gradients)
