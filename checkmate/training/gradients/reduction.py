"""The backward pass: has gradients reduced in our layout, in order, and gives them back.

Whatever wraps the model only tells which gradients are ready. A bucket of the layout is reduced when all of
its gradients are, in order of index. Therefore the order of summation, and so the bits, do not depend on the
order in which gradients come (design, section 7).
"""

from __future__ import annotations

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from checkmate.events.kinds import TRAINER_RING_BROKEN
from checkmate.events.saying import say
from checkmate.ring.place import RingError
from checkmate.state import DTYPES
from checkmate.training.gradients.reducing import Reducer
from checkmate.training.gradients.staging import Gradients, Staging
from checkmate.wire.layout import Layout

_KEPT = 8
"""The number of iterations whose stream ends are kept."""


@dataclass(eq=False)
class _Pending:
    """Gradients that were lent together, of which `left` are not reduced yet. The future gets `buffer`."""

    future: Gradients
    buffer: torch.Tensor
    staging: Staging
    left: int


class GradientReduction(ABC):
    """Reduces the gradients of one model, in use from `register` on.

    `parameters` are the trained parameters in the layout's order. An iteration is one synchronising backward.
    `close` ends the threads; backward fails from then on.
    """

    iteration: int
    """Number of the last synchronising backward that began; `first_iteration` - 1 before the first."""
    on_reduced: Callable[[int], None]
    """Called by backward's thread at the end of an iteration's backward, when every `.grad` is reduced."""
    on_begun: Callable[[], None]
    """Called by backward's thread when an iteration's backward has begun. It must not raise."""
    error: RingError | None
    """Why the ring broke, as backward raises it."""

    def __init__(
        self, layout: Layout, parameters: Sequence[nn.Parameter], reducer: Reducer, first_iteration: int
    ) -> None:
        self.iteration = first_iteration - 1
        self._first_iteration = first_iteration
        self.on_begun = lambda: None
        self.error = None
        self._incomplete = False
        self._futures: list[Gradients] = []  # of this iteration's backward
        self._layout = layout
        self._parameters = parameters
        self._reducer = reducer
        self._flats = {
            number: reducer.tensors[index][place.start : place.stop]
            for number, (index, place) in layout.where.items()
        }
        self._lock = threading.RLock()
        # By parameter: a gradient that was lent, and those with which it was.
        self._lent: dict[int, tuple[torch.Tensor, _Pending]] = {}
        self._missing = 0  # parameters whose gradients this iteration's backward has not lent
        self._unready = [len(bucket.places) for bucket in layout.buckets]
        self._next = 0  # bucket to submit
        self._ends: dict[int, dict[tuple[int, int], int]] = {}
        self._reduced: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._stagings: dict[torch.device, Staging] = {}
        with ExitStack() as undo:
            for device in {parameter.device for parameter in parameters}:
                self._stagings[device] = reducer.staging(device, self._staging_failed)
                undo.callback(self._stagings[device].close)
            self._finisher = threading.Thread(target=self._finish, name="gradients back", daemon=True)
            self._finisher.start()
            undo.callback(self._finisher.join)
            undo.callback(self._reduced.put, None)
            reducer.open(self._reduced.put, self._fail)
            undo.callback(reducer.close)
            self._undo = undo.pop_all()

    @abstractmethod
    def register(self, on_reduced: Callable[[int], None] = lambda iteration: None) -> None:
        """Reduce gradients from now on, for good."""

    def stream_ends(self, iteration: int) -> dict[tuple[int, int], int]:
        """Return each stream's tagged bytes, by channel and shard, at the end of this iteration.

        It is empty on ranks that do not tag. Raise `KeyError` for all but the last few iterations.
        """
        return self._ends[iteration]

    def passed(self, ends: Mapping[tuple[int, int], int]) -> bool:
        """Return whether the next rank has acknowledged all bytes up to these ends."""
        return self._reducer.passed(ends)

    def give_up(self) -> None:
        """Note that the script ends by an error, of which other ranks of this host are told at `close`."""
        self._reducer.give_up()

    def close(self) -> None:
        """End the threads and the reducer. A reduction in progress fails."""
        self._undo.close()

    def _lend(
        self,
        gradients: Mapping[int, torch.Tensor],
        buffer: torch.Tensor,
        exact: Mapping[int, torch.Tensor] | None = None,
    ) -> Gradients:
        """Reduce flat gradients, by parameter and without empty ones, in backward's thread, after `_begin`.

        If they are rounded, `exact` has what to reduce. Their averages replace them. Then the returned future
        is completed with `buffer`.
        """
        staging = self._stagings[buffer.device]
        pending = _Pending(staging.future(), buffer, staging, len(gradients))
        if not gradients:
            staging.complete(pending.future, buffer)
            return pending.future
        self._futures.append(pending.future)
        with self._lock:
            if twice := gradients.keys() & self._lent.keys():
                raise self._reduced_twice(min(twice))
            self._lent |= {number: (gradient, pending) for number, gradient in gradients.items()}
            self._missing -= len(gradients)
        if self.error is not None:
            self._fail(self.error)
        else:
            numbers = list(gradients)  # what waits for the copies must not keep gradients, too
            flats = [self._flats[number] for number in numbers]
            staging.take(flats, list((exact or gradients).values()), lambda: self._ready(numbers))
        return pending.future

    def _reduced_twice(self, number: int) -> RuntimeError:
        name = self._layout.parameters[number].name
        return RuntimeError(f"{name} was reduced twice in one backward; did an earlier backward fail?")

    def _check_type(self, number: int, gradient: torch.Tensor) -> None:
        """Raise `RuntimeError` if a gradient has another type than its parameter had at first."""
        known = self._layout.parameters[number]
        if gradient.dtype != DTYPES[known.dtype]:
            raise RuntimeError(
                f"{known.name} has gradients of {gradient.dtype}, but was protected with torch.{known.dtype}"
            )

    def _begin(self) -> None:
        """Begin an iteration: the one before has no `_missing` gradients any more."""
        self.iteration += 1
        self._missing = len(self._flats)
        self._next = 0
        self._unready = [len(bucket.places) for bucket in self._layout.buckets]
        for staging in self._stagings.values():
            staging.begin()
        iteration = self.iteration
        self.on_begun()
        self._after_backward(lambda: self._await_reduced(iteration))

    def _after_backward(self, work: Callable[[], None]) -> None:
        """Call `work` at the end of backward, or of its callbacks if this is one of them."""
        torch.autograd.Variable._execution_engine.queue_callback(work)

    def _await_reduced(self, iteration: int) -> None:
        """Wait for the ring at the end of backward, before a last callback of DDP. Raise `RingError`.

        DDP would not keep the error's type, and would first wait for a collective that may fail, too.
        """
        while self._futures:  # which hold the gradients, too
            self._futures.pop().wait()
        if self.error is not None and self._incomplete:
            raise self.error
        # After DDP's callback, which fills `.grad`.
        self._after_backward(lambda: self.on_reduced(iteration))

    def _ready(self, numbers: Iterable[int]) -> None:
        """Submit the buckets that are complete now that these gradients are there, in order of index."""
        with self._lock:
            for number in numbers:
                self._unready[self._layout.where[number][0]] -= 1
            try:
                while self._next < len(self._unready) and not self._unready[self._next]:
                    self._next += 1
                    self._reducer.submit(self._next - 1)
            except RingError as error:
                self._fail(error)

    def _finish(self) -> None:
        """Give reduced gradients back, in the finisher's thread."""
        while (index := self._reduced.get()) is not None:
            try:
                self._give_back(index)
            except Exception as error:  # noqa: BLE001 - otherwise backward would wait for ever
                self._staging_failed(error)

    def _give_back(self, index: int) -> None:
        if index == len(self._layout.buckets) - 1:
            self._ends[self.iteration] = self._reducer.ends()
            self._ends.pop(self.iteration - _KEPT, None)
        back: dict[_Pending, list[int]] = {}
        with self._lock:
            if self.error is not None:
                return
            lent = {p.parameter: self._lent[p.parameter] for p in self._layout.buckets[index].places}
        for number, (_, pending) in lent.items():
            back.setdefault(pending, []).append(number)
        for pending, numbers in back.items():
            pending.staging.give([lent[n][0] for n in numbers], [self._flats[n] for n in numbers])
        with self._lock:
            if self.error is not None:
                return
            for number, (_, pending) in lent.items():
                del self._lent[number]
                pending.left -= 1
        for pending in back:
            if not pending.left:
                pending.staging.complete(pending.future, pending.buffer)

    def _staging_failed(self, error: Exception) -> None:
        broken = RingError(f"gradients can't be copied: {type(error).__name__}: {error}")
        broken.__cause__ = error
        self._fail(broken)

    def _fail(self, error: RingError) -> None:
        """Have backward fail, now and from now on."""
        first = self.error is None
        with self._lock:
            self.error = self.error or error
            left = {pending for _, pending in self._lent.values()}
            self._incomplete |= bool(left)
            self._lent.clear()
        for pending in left:  # `_await_reduced` raises the error
            pending.staging.complete(pending.future, pending.buffer)
        if first:
            broken = TRAINER_RING_BROKEN(iteration=self.iteration, why=str(error))
            say(logging.DEBUG, broken, "gradients can't be reduced: %s", error)
