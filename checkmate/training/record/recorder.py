"""Notes each iteration of a rank: the optimizer's step, and the state that a resumed run needs.

Hooks on the model, the optimizer and the scaler only take notes; a thread of `publisher` turns them into
messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from checkmate.errors import CheckmateError
from checkmate.optim.several import members_of, parameters_of, scripts_optimizers
from checkmate.optim.supported import beginnings
from checkmate.rpc import shadow_pb2 as pb
from checkmate.state import StateError, local_of
from checkmate.training.errors import RefusedError
from checkmate.training.exclusion import StepExclusion
from checkmate.training.record.buffers import Buffers
from checkmate.training.record.capture import (
    Capture,
    DriftWatch,
    RecordDraft,
    Scaled,
    StepCopies,
    Watched,
    several_backwards,
    warn_of_missed_mark,
)
from checkmate.training.record.sites import StepSites
from checkmate.training.record.step_checks import LeftGradients, StepChecks
from checkmate.training.record.windows import Slices
from checkmate.training.record.wrapped import (
    ClipListener,
    ScalerWatch,
    SchedulerWatch,
    check_unscaled,
    check_unscheduled,
    clipping_followed,
    is_scheduled,
    schedulers_of,
)


class Recorder:
    """Notes iterations through hooks that it registers.

    The state at the end of an iteration is captured at one moment: when the script calls `mark`. If it never
    does, the state is captured after the optimizer's step, and again after steps of scaler and scheduler.

    What the script did in an iteration is checked before the iteration is emitted. So a restart after a
    refusal repeats this iteration, and is refused again. Once refused, every call is refused.
    """

    def __init__(
        self,
        watched: Watched,
        names: Mapping[str, nn.Parameter],
        steps: StepExclusion,
        emit: Callable[[RecordDraft], None],
        stream_ends: Callable[[int], Mapping[tuple[int, int], int]],
        slices: Slices,
        buffers: Buffers,
        await_departed: Callable[[], None] = lambda: None,
        on_refused: Callable[[int, Exception, bool], None] = lambda iteration, error, marks: None,
        copies: StepCopies | None = None,
        *,
        first: bool = True,
        marking: bool = False,
        resumed: Mapping[str, Any] | None = None,
    ) -> None:
        """Register the hooks.

        Args:
            watched: The script's objects.
            names: The trained parameters by name, in the layout's order.
            steps: Locks parameters during the optimizer's step.
            emit: Called with each iteration once the next forward has begun.
            stream_ends: Returns the ends of the streams at the end of an iteration.
            slices: Selects what is compared: by this rank, because a script may change its replica alone, and
                by nodes, if the rank is the first.
            buffers: The buffers to record.
            await_departed: Returns once this process's death can't lose iterations emitted before. It raises
                the error if one of them can't be published.
            on_refused: Called once before the script is refused, with the iteration that is not emitted, and
                with whether the script marks its iterations.
            copies: What copies gradients as optimizers step, which begins an iteration. Then nothing that
                the script does to gradients before is of interest. `None` if gradients are copied as they are
                reduced, which `reduced` tells.
            first: Whether this is the group's first rank, which also records the optimizer's step.
            marking: Whether the script is known to mark its iterations, from an earlier start.
            resumed: This rank's random generators in the record from which the run resumes.
        """
        self.refusal: CheckmateError | None = None
        """The reason why the script was refused, if it was."""
        self._await_departed = await_departed
        self._on_refused = on_refused
        self._copies = copies
        self._watched = watched
        self._steps = steps
        self._emit = emit
        self._stream_ends = stream_ends
        self._slices = slices
        self._first = first
        self._capture = Capture(watched, buffers, resumed, first=first)
        self._drift = DriftWatch(watched, self._capture.options, active=first)
        self._numbers = {id(p): number for number, p in enumerate(names.values())}
        self._members = members_of(watched.optimizer)
        self._numbers_of = {
            id(member): {self._numbers[id(p)] for p in parameters_of(member) if id(p) in self._numbers}
            for member in self._members
        }
        # Which `check_schedulers` has let pass: another one that is made later was not given.
        optimizers = scripts_optimizers(watched.optimizer)
        self._scheduled = watched.scheduler is not None or any(map(is_scheduled, optimizers))
        self._scripts_optimizers = dict(zip(map(id, self._members), optimizers, strict=True))
        self._stepped_ids = {id(p) for member in self._members for p in parameters_of(member)}
        self._checks = StepChecks(
            watched.optimizer, names, slices, watched.model.frozen(), watched.model.slots()
        )
        self._open: RecordDraft | None = None
        self._looping = self._missed = False
        self._marking = marking
        self._parameters = list(names.values())
        self._unmarked = 0  # iterations with a step that had ended before the first mark
        self._sites = StepSites()
        self._before_steps: list[tuple[Any, int]] = []
        self._newest = self._began = steps.stepped
        self._checks.note_state(slices.take() if first else [])
        if marking:
            self._drift.forget()
        with ExitStack() as undo:
            self._register(undo)
            self._undo = undo.pop_all()

    def _register(self, undo: ExitStack) -> None:
        """Register hooks on the script's objects; `undo` removes them."""
        watched = self._watched
        if watched.scaler is not None:
            undo.callback(ScalerWatch(watched.scaler, scripts_optimizers(watched.optimizer)[0], self).remove)
        for scheduler in schedulers_of(watched.scheduler):
            undo.callback(SchedulerWatch(scheduler, self.moved_on).remove)
        for member in self._members:
            before = member.register_step_pre_hook(self._before_step)
            undo.callback(before.remove)
            self._before_steps.append((member, before.id))
            after = member.register_step_post_hook(self._after_step)
            undo.callback(after.remove)
            # First, because hooks that the script has registered before may change parameters, too.
            hooks: Any = member._optimizer_step_post_hooks
            hooks.move_to_end(after.id, last=False)
        for handle in (
            register_optimizer_step_pre_hook(self._before_any_step),
            watched.model.outer.register_forward_pre_hook(self._before_forward),
        ):
            undo.callback(handle.remove)
        if self._copies is None:
            undo.callback(ClipListener(self._parameters, self.check_gradients, self._clipped).close)
            undo.enter_context(clipping_followed())
        self._leftovers = LeftGradients(self._parameters, several=len(self._members) > 1)
        undo.callback(self._leftovers.forget)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Keep an error that refuses the script, and raise it again whenever the script goes on."""
        if self.refusal is not None:
            raise self.refusal
        try:
            yield
        except (RefusedError, StateError) as error:
            self.refusal = error
            present = self._newest + 1 if self._open is None else self._open.iteration
            iteration = getattr(error, "iteration", None)
            self._on_refused(present if iteration is None else iteration, error, self._marking)
            raise

    @property
    def is_marking(self) -> bool:
        """Whether the script marks the ends of iterations."""
        return self._marking

    def on_backward(self) -> None:
        """Emit a start's first iteration as the next backward begins, if the script does not mark any.

        Its record has the time of that backward to leave this process, as others have. A refusal waits for
        `reduced`, because an error that is raised here would lose its type.
        """
        is_due = self._copies is not None and self._copies.is_due
        if is_due and self._marking and self.refusal is None and not self._leftovers.has_gradients():
            with self._refusing():  # a mark was passed over
                self._begin_due()
                self._finish_open()
        draft = self._open
        self._leftovers.on_backward()
        if draft is None or self.refusal is not None:
            return
        if draft.waiting and not self._marking:
            self._drift.say()
            self._emit_open(draft)
        elif self._copies is not None and draft.marked and draft.settled:
            with self._refusing():  # no forward of the whole model has ended it
                self._finish(draft)

    def reduced(self, iteration: int) -> None:
        """Open an iteration at the end of its backward: gradients are those that shadow nodes receive.

        If they are copied as optimizers step, a script that marks its iterations opens them by a step, or by
        a mark without one.
        """
        with self._refusing():
            if self._copies is None:
                self._begin(lambda: iteration)
                self._checks.gradients.start()
            elif not self._marking:
                self._begin_due()

    def _begin(self, number: Callable[[], int]) -> RecordDraft:
        """Open an iteration, whose number is asked for after the one before has ended."""
        if self._finish_open() and self._copies is not None:
            self._await_departed()  # as if a forward had ended it
        if not self._marking and self._newest == self._began + 1:
            self._await_departed()  # because it left late (`on_backward`), and other ranks may step now
        iteration = number()
        self._open = draft = RecordDraft(iteration, self._stream_ends(iteration))
        if not self._marking or self._missed:  # it may get neither a step nor a mark
            draft.captured = self._capture.take(marks=self._marking)
            self._drift.note(draft.captured)
        # Without a forward of the whole model, the hook of a parameter is the first to know of a backward.
        self._leftovers.watch(
            draft, self._leftovers.on_backward if self._copies is None else self.on_backward
        )
        return draft

    def _finish_open(self) -> bool:
        """Emit the open iteration; return whether there was one."""
        draft = self._open
        if draft is not None:
            self._finish(draft)
        return draft is not None

    def _begin_due(self) -> None:
        """Begin an iteration that no step may follow, if gradients are copied as optimizers step."""
        if self._copies is not None and self._copies.is_due:
            self._begin(self._copies.begin)

    def _take_gradients(self, copies: StepCopies, optimizer: torch.optim.Optimizer) -> None:
        """Have the gradients copied that a step is about to use. It begins an iteration unless one is open.

        With several optimizers, an iteration has a step of each, but none that comes after a mark.
        """
        draft = self._open
        if draft is None or draft.marked or optimizer in draft.stepped_by:
            self._begin(copies.begin)
        copies.take(self._numbers_of[id(optimizer)])

    def enter_loop(self) -> None:
        """Expect a mark at the end of each turn from now on, with at most one backward in each."""
        with self._refusing():
            draft = self._open
            if draft is not None and draft.is_over and not self._marking:  # it has ended before the loop
                self._check_end(draft)
                draft.marked = True
            self._mark_from_now_on(looping=True)

    def leave_loop(self) -> None:
        """Note that the script has used up its loop's batches. Marks are expected nevertheless."""
        self._looping = False

    def _mark_from_now_on(self, *, looping: bool) -> None:
        self._marking, self._looping = True, looping
        self._drift.forget()

    def mark(self, *, in_loop: bool = False, left_loop: bool = False) -> None:
        """End the open iteration here, if there is one. A later mark before the next forward replaces it.

        `in_loop`: as in `Capture.take`. `left_loop`: the script has left its loop, and may have left the
        iteration half-way.
        """
        if left_loop and self.refusal is not None:
            return  # the script leaves its loop because of it
        with self._refusing():
            unmarked = 0 if self._marking else self._unmarked
            self._mark_from_now_on(looping=in_loop and self._looping)
            if unmarked:
                raise several_backwards(self._newest, unmarked + 1)
            self._begin_due()
            draft = self._open
            if draft is not None and not (left_loop and draft.settled):
                draft.refusal = self._refusal_at_end(draft)
                if not left_loop and draft.refusal is not None:
                    raise draft.refusal
                draft.resume()
                self._end_here(draft, in_loop=in_loop)  # first, because the script's `extra` may fail
                if self._copies is not None:
                    self._copies.capture()
                self._note_gradients(draft)
                draft.marked, draft.settled, draft.left_loop = True, not left_loop, left_loop
                if not left_loop:
                    self._steps.end(draft.iteration)

    def close(self, last: bool) -> None:
        """Remove the hooks. `last`: the open iteration is complete if its optimizer has stepped or skipped.

        After an error it may lack its step or later changes. Then it is not emitted, unless the script had
        marked its end. Calling it again has no effect.
        """
        if last and self.refusal is None:
            with self._refusing():
                self._begin_due()
        draft = self._open
        try:
            is_complete = draft is not None and (last or draft.settled) and not self._lacks_step(draft)
            if draft is not None and is_complete and self.refusal is None:
                with self._refusing():
                    self._close(draft, last)
        finally:
            self._open = None
            self._checks.gradients.forget()
            self._undo.close()

    def _close(self, draft: RecordDraft, last: bool) -> None:
        """Emit the open iteration as it was at its end: what the script did after its loop is its own."""
        draft.last = last
        if draft.refusal is not None:
            raise draft.refusal
        if not draft.marked and not draft.is_over:  # no step shows where it has ended
            self._check_end(draft)
        if self._marking and not draft.marked:
            self._end_here(draft)
            draft.marked = draft.settled = True
        if last and draft.left_loop:  # whoever resumes makes that loop's iterator again
            draft.captured = replace(draft.end, rng={**draft.end.rng, "in_loop": True})
        self._emit_open(draft)

    def scaled(self, kind: pb.Scaling.Kind.ValueType, factor: torch.Tensor) -> None:
        """Note that the scaler has unscaled all gradients, or a fused optimizer will."""
        if self._copies is not None and kind is not pb.Scaling.FUSED:
            return
        if self._open is not None:
            self._open.scaled.append(Scaled(kind, factor))
            self._checks.gradients.note()

    def scaler_stepped(self, infinite: Sequence[torch.Tensor]) -> None:
        """Note that `scaler.step()` has returned; if it found an infinity, the optimizer has skipped."""
        if self._copies is not None and (self._open is None or self._open.infinite):
            with self._refusing():  # no step has begun an iteration
                self._await_departed()
                self._begin(self._copies.begin)
        if self._open is not None:
            self._open.infinite = infinite
        self.moved_on()

    def moved_on(self) -> None:
        """Capture again: scaler or scheduler have changed, and the open iteration may end here."""
        if self._open is not None and not self._marking:
            self._end_here(self._open)

    def check_foreign(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise `RefusedError` for another optimizer of protected parameters."""
        self._before_any_step(optimizer, (), {})

    def check_gradients(self) -> None:
        """Raise `RefusedError` if gradients were changed in a way that the record can't express."""
        if self._open is not None:
            with self._refusing():
                self._add_check(self._open, self._checks.check_gradients())

    def _clipped(self, parameters: Sequence[torch.Tensor], coefficient: torch.Tensor) -> None:
        if self._open is None:
            return
        ids = {id(p) for p in parameters}
        numbers = sorted(self._numbers[id(p)] for p in parameters if id(p) in self._numbers)
        if ids >= self._stepped_ids and len(numbers) == len(set(numbers)):
            numbers = []  # all; parameters named twice, such as tied weights, are multiplied twice
        self._open.scaled.append(Scaled(pb.Scaling.CLIP, coefficient, numbers))
        self._checks.gradients.note()

    def _before_forward(self, module: nn.Module, arguments: Any) -> None:
        """End the iteration before a training forward, unless a mark may still follow."""
        if not (module.training and torch.is_grad_enabled()):
            return
        with self._refusing():
            self._watched.model.check_forward()
            self._checks.check_parameters(self._newest + 1)
            self._move_to_end()
            draft = self._open
            self._capture.draws.look(draft.captured.rng if draft and draft.captured else None)
            if draft is None or draft.waiting:
                return
            if self._marking and draft.is_over and not draft.marked:
                if draft.buffers is None:
                    self._end_here(draft)
                return
            self._drift.check(draft)
            if not draft.marked:
                self._note_gradients(draft)
                if not draft.is_over or (not self._marking and self._newest == self._began):
                    self._wait_here(draft)
                    return
            self._finish(draft)

    def _move_to_end(self) -> None:
        """Have hooks before steps follow those of the script, which may change gradients."""
        for member, number in self._before_steps:
            member._optimizer_step_pre_hooks.move_to_end(number)

    def _wait_here(self, draft: RecordDraft) -> None:
        """Let the next backward end an iteration, with its state now, unless a step or a mark still comes.

        So it is with a forward before the step, and in a start's first turn, in which nobody knows yet
        whether the script marks its iterations.
        """
        self._check_end(draft)
        if draft.captured is None:
            self._end_here(draft)
        if draft.buffers is None:
            draft.buffers = self._capture.buffers(None)
        draft.waiting = True

    def _note_gradients(self, draft: RecordDraft) -> None:
        """Note which parameters have a gradient, if only of zeros: an optimizer leaves out those without."""
        if self._first and self._watched.model.keeps_gradients:
            draft.with_gradient = [n for n, p in enumerate(self._parameters) if p.grad is not None]

    def _before_any_step(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        """Refuse another optimizer that steps the same parameters; name one of other parameters once."""
        if self._checks.is_ours(optimizer):
            return
        if refusal := self._checks.foreign(optimizer):
            with self._refusing():
                raise refusal
        if self._first and self._watched.extra is None:
            self._checks.name_foreign(optimizer)

    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        with self._refusing():
            self._await_departed()
            self._checks.check_closure(arguments, keywords)
            if self._copies is not None:
                self._take_gradients(self._copies, optimizer)
            draft = self._open
            if draft is None or optimizer in draft.stepped_by:
                raise RefusedError(
                    "optimizer.step() without a backward of its own: each step must follow one synchronising "
                    "backward (the last of those accumulated with no_sync) and precede the next forward"
                    + self._checks.hint_of_unused()
                )
            if not self._scheduled:
                check_unscheduled(self._scripts_optimizers[id(optimizer)])
            if self._watched.scaler is None:
                check_unscaled(optimizer)
            draft.resume()
            self._add_check(draft, self._checks.check(optimizer))
            self._checks.look_at_written()
            self._check_state(draft)
            if not self._marking and not draft.has_stepped:
                self._sites.look(draft.iteration)
            if self._first:
                self._note_step(draft, optimizer)
            self._steps.begin()

    def _note_step(self, draft: RecordDraft, optimizer: torch.optim.Optimizer) -> None:
        """Note what a step is about to use. What other optimizers do not step counts as without gradient."""
        now = self._capture.options.of(self._watched.optimizer.param_groups)
        first = 0
        for member in self._members:
            groups = range(first, first + len(member.param_groups))
            first = groups.stop
            numbers = self._numbers_of[id(member)]
            without = {number for number in numbers if self._parameters[number].grad is None}
            if member is optimizer:
                draft.note_options(now, groups)
                draft.without_gradient = draft.without_gradient - numbers | without
                draft.beginnings += beginnings(member, groups.start)
            elif not draft.has_stepped:
                draft.without_gradient |= numbers

    def _after_step(self, optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        draft = self._open
        if draft is not None:
            draft.stepped_by.append(optimizer)
            if self._copies is not None:
                # Not before the last step, which may fail, and be tried again.
                if len(draft.stepped_by) == len(self._members):
                    self._copies.stepped(marking=self._marking)
                self._move_to_end()
            self._take_slices(draft)
            self._checks.note_step(optimizer)
            self._checks.note_state(draft.slices)
            self.moved_on()
            # Else another may step in this iteration, or the state that is copied has more than the step, and
            # seeds would be of half of it.
            if len(self._members) == 1 and not (self._marking and self._watched.copied is not None):
                self._steps.end(draft.iteration)

    def _check_state(self, draft: RecordDraft) -> None:
        """Refuse the iteration if anything but the optimizer has changed parameters or their state."""
        self._add_check(draft, self._checks.check_state(draft.iteration))

    def _add_check(self, draft: RecordDraft, later: Callable[[], None] | None) -> None:
        """Have the publisher finish a check whose copies have not arrived from a device yet."""
        if later is not None:
            draft.checks.append(later)

    def _refusal_at_end(self, draft: RecordDraft) -> RefusedError | None:
        """Return why an iteration is refused that the script may have left by an error, which comes first."""
        try:
            self._check_end(draft)
        except RefusedError as error:
            return error
        return None

    def _check_end(self, draft: RecordDraft) -> None:
        """Check what the script has done up to the end of an iteration.

        Nodes get slices of an iteration without a step, too, because they compare all of it in time.
        """
        self._checks.check_groups(sizes=True)
        self._check_state(draft)
        if not draft.has_stepped:
            self._checks.look_at_written()
            self._take_slices(draft)

    def _take_slices(self, draft: RecordDraft) -> None:
        """Copy an iteration's slices, and the same ones again after a later step of it.

        Other ranks' records have none, so these ranks look at windows of parameters alone.
        """
        if self._first:
            draft.slices = self._slices.again(draft.slices) if draft.slices else self._slices.take()

    def _end_here(self, draft: RecordDraft, *, in_loop: bool = False) -> None:
        """Capture the state at the iteration's end, in place of an earlier capture."""
        draft.captured = captured = self._capture.take(in_loop=in_loop, marks=self._marking)
        draft.buffers = self._capture.buffers(draft.buffers)
        self._drift.note(captured)

    def _finish(self, draft: RecordDraft) -> None:
        """Emit an iteration because the next one begins, after the last checks."""
        if self._marking and not draft.marked:
            if self._looping or draft.is_over or self._lacks_step(draft):
                raise several_backwards(draft.iteration, 2)
            if not self._missed:
                self._missed = True  # later such iterations end with their backward
                warn_of_missed_mark(draft.iteration)
        if draft.refusal is not None:
            raise draft.refusal
        if not draft.waiting:  # again after a mark: what a script changes then no record would have
            self._check_end(draft)
        self._drift.say()
        self._emit_open(draft)

    def _emit_open(self, draft: RecordDraft) -> None:
        if self._copies is not None:
            self._copies.complete()
            draft.beside = self._copies.beside
        self._open = None
        self._newest = draft.iteration
        self._unmarked += draft.is_over and not draft.marked
        self._checks.gradients.forget()
        self._steps.end(draft.iteration)
        if draft.captured is None:  # a mark was missed, and no forward in training mode showed its end
            self._end_here(draft)
        if draft.buffers is None:
            draft.buffers = self._capture.buffers(None)
        self._emit(draft)

    def _lacks_step(self, draft: RecordDraft) -> bool:
        """Return whether there are gradients that no step has used."""
        if draft.leaves_gradients is not None:
            return draft.leaves_gradients and not draft.is_over
        gradients = (p.grad for p in self._parameters if p.grad is not None)
        return not draft.is_over and any(bool(local_of(gradient).any()) for gradient in gradients)
