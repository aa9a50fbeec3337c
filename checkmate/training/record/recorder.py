"""What a rank notes of each iteration: what its optimizer was about to do, and all that a resumed run needs.

Hooks on DDP, the optimizer and the scaler only note; a thread of `publish` makes a message of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import nn

from checkmate.optim.supported import beginnings, options_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.errors import RefusedError
from checkmate.training.exclusion import StepExclusion
from checkmate.training.record import clip
from checkmate.training.record.buffers import Buffers
from checkmate.training.record.capture import Capture, Watched
from checkmate.training.record.drift import DriftWatch
from checkmate.training.record.noted import Noted, Scaled
from checkmate.training.record.scaler import ScalerWatch
from checkmate.training.record.scheduler import SchedulerWatch
from checkmate.training.record.step_checks import StepChecks, check_even
from checkmate.training.record.windows import Slices

__all__ = ["Noted", "PendingFault", "Recorder", "RefusedError", "Scaled", "Watched"]

_log: Final = logging.getLogger("checkmate")


class PendingFault:
    """What a background thread has found; the script's next step raises it."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def set(self, error: Exception) -> None:
        """From any thread."""
        self.error = error

    def check(self) -> None:
        """Raise what was found."""
        if self.error is not None:
            raise self.error


class Recorder:
    """Notes iterations, from hooks that it registers; `emit` gets each once the next forward has begun.

    All that an iteration ends with is captured at one moment: where the script says so, by `mark`. If it
    never does, at the end of the optimizer's step, and again of what scaler and scheduler do after that.

    `slices`: the group's first rank's, which also says what the optimizer does; `None` on others.
    """

    def __init__(
        self,
        watched: Watched,
        names: Mapping[str, nn.Parameter],
        steps: StepExclusion,
        emit: Callable[[Noted], None],
        stream_ends: Callable[[int], Mapping[tuple[int, int], int]],
        fault: PendingFault,
        slices: Slices | None = None,
        buffers: Buffers | None = None,
        await_departed: Callable[[], None] = lambda: None,
    ) -> None:
        """`await_departed` returns once what was emitted before can't be lost with this process."""
        self._await_departed = await_departed
        self._watched = watched
        self._steps = steps
        self._emit = emit
        self._stream_ends = stream_ends
        self._fault = fault
        self._slices = slices
        self._capture = Capture(watched, buffers, first=slices is not None)
        self._drift = DriftWatch(watched) if slices is not None else None
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
        """Have the script's objects tell us what becomes of them; `undo` takes that back."""
        watched = self._watched
        if watched.scaler is not None:
            undo.callback(ScalerWatch(watched.scaler, watched.optimizer, self).remove)
        if watched.scheduler is not None:
            undo.callback(SchedulerWatch(watched.scheduler, self.moved_on).remove)
        for handle in (
            watched.optimizer.register_step_pre_hook(self._before_step),
            watched.optimizer.register_step_post_hook(self._after_step),
            watched.ddp.register_forward_pre_hook(self._before_forward),
        ):
            undo.callback(handle.remove)
        undo.callback(clip.ClipListener(self._parameters, self.check_gradients, self._clipped).close)

    def reduced(self, iteration: int) -> None:
        """DDP has finished an iteration's backward: gradients are what shadow nodes get."""
        if self._open is not None:
            self._finish(self._open)
        end = self._capture.take()  # of an iteration that gets neither step nor mark
        self._open = Noted(iteration, self._stream_ends(iteration), end.rng, end.extra)
        self._open.ends_with(end)
        self._checks.gradients.start()

    def marks(self) -> None:
        """The script says from now on, by `mark`, where its iterations end."""
        self._marking = True
        if self._drift is not None:
            self._drift.forget()

    def mark(self, *, in_loop: bool = False, left: bool = False) -> None:
        """The open iteration ends here, if there is one; a later mark before the next forward counts instead.

        `in_loop`: as in `Capture.take`. `left`: the script has left its loop, and may have left the iteration
        half-way.
        """
        self.marks()
        noted = self._open
        if noted is not None and not (left and noted.settled):
            noted.marked, noted.settled, noted.left = True, not left, left
            self._end_here(noted, in_loop=in_loop)

    def close(self, last: bool) -> None:
        """Note no more. `last`: the iteration that is open is over, if its optimizer has stepped or skipped.

        After an error it may lack its step, or what follows that: then nobody may resume from it, unless the
        script had come to its end. Calling it again does nothing.
        """
        noted = self._open
        if noted is not None and (last or noted.settled) and not self._lacks_step(noted):
            noted.last = last
            if self._marking and not noted.marked:
                self.mark()
            if last and noted.left:  # whoever resumes makes that loop's iterator again
                noted.rng = {**noted.rng, "in_loop": True}
            self._finish(noted)
        self._open = None
        self._checks.gradients.forget()
        self._undo.close()

    def scaled(self, kind: pb.Scaling.Kind.ValueType, factor: torch.Tensor) -> None:
        """The scaler has unscaled all gradients."""
        if self._open is not None:
            self._open.scaled.append(Scaled(kind, factor))
            self._checks.gradients.note()

    def scaler_stepped(self, infinite: Sequence[torch.Tensor]) -> None:
        """`scaler.step()` has returned; where it found an infinity, the optimizer has skipped."""
        if self._open is not None:
            self._open.infinite = infinite
        self.moved_on()

    def moved_on(self) -> None:
        """Scaler or scheduler have done something that may be the last of the open iteration."""
        if self._open is not None and not self._marking:
            self._end_here(self._open)

    def check_gradients(self) -> None:
        """`RefusedError` where gradients were changed by what the record can't say."""
        if self._open is not None:
            self._checks.check_gradients()

    def _clipped(self, parameters: Sequence[torch.Tensor], coefficient: torch.Tensor) -> None:
        if self._open is None:
            return
        ids = {id(p) for p in parameters}
        chosen = sorted(self._numbers[id(p)] for p in parameters if id(p) in self._numbers)
        if ids >= self._stepped_ids and len(chosen) == len(set(chosen)):
            chosen = []  # all; who is named twice, as tied weights may be, is multiplied twice
        self._open.scaled.append(Scaled(pb.Scaling.CLIP, coefficient, chosen))
        self._checks.gradients.note()

    def _before_forward(self, module: nn.Module, arguments: Any) -> None:
        """A forward that trains ends the iteration before it, unless a mark may come still."""
        if not (module.training and torch.is_grad_enabled()):
            return
        check_even(self._watched.ddp)
        noted = self._open
        if noted is None:
            return
        if self._marking and noted.over and not noted.marked:
            if noted.buffers is None:
                self._end_here(noted)
            return
        if self._drift is not None:
            self._drift.check(noted.iteration)
        self._finish(noted)

    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        self._fault.check()
        self._await_departed()
        noted = self._open
        if noted is None or noted.stepped:
            raise RefusedError(
                "optimizer.step() without a backward of its own: each step comes after one synchronising "
                "backward (of those accumulated with no_sync, the last) and before the next forward"
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
        """Capture what the iteration ends with, in place of what was captured earlier."""
        end = self._capture.take(in_loop=in_loop)
        noted.ends_with(end)
        noted.buffers = self._capture.buffers(noted.buffers)
        if self._drift is not None:
            self._drift.note(end)

    def _finish(self, noted: Noted) -> None:
        self._open = None
        self._checks.gradients.forget()
        if not noted.stepped:
            self._passed_over(noted)
        if self._marking and noted.over and not noted.marked:
            self._mark_missed(noted)
        if noted.buffers is None:
            noted.buffers = self._capture.buffers(None)
        self._emit(noted)

    def _mark_missed(self, noted: Noted) -> None:
        """What there was at the forward that followed counts; until the next mark, the optimizer's step."""
        if noted.buffers is None:
            self._end_here(noted)
        self._marking = False
        if not self._missed:
            self._missed = True
            _log.warning(
                "iteration %d ended without protection.mark(), though an earlier one had it: a run resumed "
                "here may differ. Call it at the end of every iteration, or use protection.steps(loader) "
                "around the loop of which each pass is an iteration",
                noted.iteration,
            )

    def _passed_over(self, noted: Noted) -> None:
        """No step came. Gradients that stay would be lost to a run that resumes here."""
        self._steps.end(noted.iteration)
        if self._lacks_step(noted) and not self._accumulated:
            self._accumulated = True
            _log.warning(
                "iteration %d: a backward without optimizer.step() or zero_grad(). To accumulate gradients, "
                "use ddp.no_sync(): a run resumed between two such backwards lacks what was accumulated",
                noted.iteration,
            )

    def _lacks_step(self, noted: Noted) -> bool:
        """Whether gradients wait for a step that hasn't come."""
        return not noted.over and any(p.grad is not None and bool(p.grad.any()) for p in self._parameters)
