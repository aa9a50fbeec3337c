"""The layout's buckets of one model: filled with its gradients, reduced in order, and copied back.

The two fronts, `ddp_hook` and `fsdp_hooks`, only tell which gradients are ready. A bucket of the layout is
reduced when all of its gradients are, in order of index. Therefore the order of summation, and so the bits,
do not depend on the order in which gradients come (design, section 7).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import nn

from checkmate.events.kinds import TRAINER_RING_BROKEN
from checkmate.events.process_log import say
from checkmate.ring.place import RingError
from checkmate.state import DTYPES
from checkmate.training.gradients.reducer import Reducer
from checkmate.training.gradients.repairs import Repairs
from checkmate.training.gradients.staging import FutureBuffer, Staging
from checkmate.training.record.capture import StepCopies
from checkmate.wire.layout import Layout

_MAX_ENDS: Final = 8
"""The number of iterations whose stream ends are kept."""


class CopiedGradients(Protocol):
    """The gradients of one model, of which shadow nodes get copies."""

    iteration: int
    """Number of the last synchronising backward that began."""
    error: RingError | None
    """The reason why backward fails, if it does."""

    @property
    def repairs(self) -> Repairs | None:
        """What sends lost copies again; `None` if none are lost."""

    def stream_ends(self, iteration: int) -> Mapping[tuple[int, int], int]:
        """Return the bytes of each stream that this rank sends, by channel and shard, after an iteration."""

    def has_passed(self, node: int, iteration: int, ends: Mapping[tuple[int, int], int]) -> bool:
        """Return whether a node will have this rank's copies up to an iteration, whatever happens here.

        `ends` are those of the iteration.
        """

    def give_up(self) -> None:
        """Note that the script ends by an error."""


class GradientFront(Protocol):
    """Has a model's gradients reduced or copied by its `buckets`, from `register` to `close`."""

    @property
    def buckets(self) -> CopiedGradients:
        """The gradients that it has reduced or copied."""

    @property
    def steps(self) -> StepCopies | None:
        """What copies gradients as optimizers step; `None` if they are copied as they are reduced."""

    def register(
        self,
        on_reduced: Callable[[int], None] = ...,
        on_begun: Callable[[], None] = ...,
    ) -> None:
        """Reduce gradients from now on, for good.

        Args:
            on_reduced: Called by backward's thread with the number of the iteration at the end of its
                backward, when every `.grad` is reduced.
            on_begun: Called by backward's thread when an iteration's backward has begun. It must not raise.
        """

    def close(self) -> None:
        """End the threads and the reducer. A reduction in progress fails."""


@dataclass(eq=False)
class _Loan:
    """Gradients that were lent together. The future gets `buffer` when none is `unreduced` any more."""

    future: FutureBuffer
    buffer: torch.Tensor
    staging: Staging
    unreduced: int


class GradientBuckets:
    """Reduces the gradients of one model.

    `parameters` are the trained parameters in the layout's order. An iteration is one synchronising backward:
    `begin`, `lend` for all gradients, `wait`. `close` ends the threads; backward fails from then on.
    """

    iteration: int
    """Number of the last synchronising backward that began; `first_iteration` - 1 before the first."""
    error: RingError | None
    """The reason why the ring broke, as backward raises it."""

    def __init__(
        self, layout: Layout, parameters: Sequence[nn.Parameter], reducer: Reducer, first_iteration: int
    ) -> None:
        self.iteration = first_iteration - 1
        self.first_iteration: Final = first_iteration
        self.error = None
        self.layout: Final = layout
        self.parameters: Final = parameters
        self.flats: Final = {
            number: reducer.tensors[index][place.start : place.stop]
            for number, (index, place) in layout.where.items()
        }
        """Each parameter's part of its bucket, by number; none for those without elements."""
        self._incomplete = False
        self._futures: list[FutureBuffer] = []  # of this iteration's backward
        self._reducer = reducer
        self._lock = threading.RLock()
        # By parameter: a gradient that was lent, and those with which it was.
        self._lent: dict[int, tuple[torch.Tensor, _Loan]] = {}
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

    @property
    def repairs(self) -> Repairs | None:
        """What sends lost copies again."""
        return self._reducer.repairs

    @property
    def all_lent(self) -> bool:
        """Whether the last iteration's backward has lent all gradients: the next one begins another."""
        return not self._missing

    def stream_ends(self, iteration: int) -> dict[tuple[int, int], int]:
        """Return each stream's tagged bytes, by channel and shard, at the end of this iteration.

        It is empty on ranks that do not tag. Raise `KeyError` for all but the last few iterations.
        """
        return self._ends[iteration]

    def has_passed(self, node: int, iteration: int, ends: Mapping[tuple[int, int], int]) -> bool:
        """Return whether all bytes up to these ends are acknowledged: the switch has them."""
        return self._reducer.is_acknowledged(ends)

    def give_up(self) -> None:
        """Note that the script ends by an error, of which other ranks of this host are told at `close`."""
        self._reducer.give_up()

    def close(self) -> None:
        """End the threads and the reducer. A reduction in progress fails."""
        self._undo.close()

    def begin(self) -> int:
        """Begin the next iteration, in backward's thread; return its number. `all_lent` must hold."""
        self.iteration += 1
        self._missing = len(self.flats)
        self._next = 0
        self._unready = [len(bucket.places) for bucket in self.layout.buckets]
        for staging in self._stagings.values():
            staging.begin()
        return self.iteration

    def lend(
        self,
        gradients: Mapping[int, torch.Tensor],
        buffer: torch.Tensor,
        exact: Mapping[int, torch.Tensor] | None = None,
    ) -> FutureBuffer:
        """Reduce flat gradients, by parameter and without empty ones, in backward's thread, after `begin`.

        If they are rounded, `exact` has what to reduce. Their averages replace them. Then the returned future
        is completed with `buffer`.
        """
        staging = self._stagings[buffer.device]
        loan = _Loan(staging.future(), buffer, staging, len(gradients))
        if not gradients:
            staging.complete(loan.future, buffer)
            return loan.future
        self._futures.append(loan.future)
        with self._lock:
            if twice := gradients.keys() & self._lent.keys():
                raise self.reduced_twice(min(twice))
            self._lent |= {number: (gradient, loan) for number, gradient in gradients.items()}
            self._missing -= len(gradients)
        if self.error is not None:
            self._fail(self.error)
        else:
            numbers = list(gradients)  # what waits for the copies must not keep gradients, too
            flats = [self.flats[number] for number in numbers]
            staging.copy_in(list((exact or gradients).values()), flats, lambda: self._ready(numbers))
        return loan.future

    def wait(self) -> None:
        """Wait at the end of backward until the iteration is reduced. Raise `RingError` if it can't be."""
        while self._futures:  # which hold the gradients, too
            self._futures.pop().wait()
        if self.error is not None and self._incomplete:
            raise self.error

    def reduced_twice(self, number: int) -> RuntimeError:
        """Return the error of a parameter whose gradient comes again."""
        name = self.layout.parameters[number].name
        return RuntimeError(f"{name} was reduced twice in one backward; did an earlier backward fail?")

    def check_type(self, number: int, gradient: torch.Tensor) -> None:
        """Raise `RuntimeError` if a gradient has another type than its parameter had at first."""
        parameter = self.layout.parameters[number]
        if gradient.dtype != DTYPES[parameter.dtype]:
            raise RuntimeError(
                f"{parameter.name} has gradients of {gradient.dtype}, but was protected with "
                f"torch.{parameter.dtype}"
            )

    def _ready(self, numbers: Iterable[int]) -> None:
        """Submit the buckets that are complete now that these gradients are there, in order of index."""
        with self._lock:
            for number in numbers:
                self._unready[self.layout.where[number][0]] -= 1
            try:
                while self._next < len(self._unready) and not self._unready[self._next]:
                    self._next += 1
                    self._reducer.submit(self._next - 1)
            except RingError as error:
                self._fail(error)

    def _finish(self) -> None:
        """Copy reduced gradients back, in the finisher's thread."""
        while (index := self._reduced.get()) is not None:
            try:
                self._copy_back(index)
            except Exception as error:  # noqa: BLE001 - otherwise backward would wait for ever
                self._staging_failed(error)

    def _copy_back(self, index: int) -> None:
        if index == len(self.layout.buckets) - 1:
            # Only now: no bucket is in progress, so the ends are exact.
            self._ends[self.iteration] = self._reducer.ends()
            self._ends.pop(self.iteration - _MAX_ENDS, None)
        numbers_by_loan: dict[_Loan, list[int]] = {}
        with self._lock:
            if self.error is not None:
                return
            lent = {
                place.parameter: self._lent[place.parameter] for place in self.layout.buckets[index].places
            }
        for number, (_, loan) in lent.items():
            numbers_by_loan.setdefault(loan, []).append(number)
        for loan, numbers in numbers_by_loan.items():
            loan.staging.copy_out([self.flats[n] for n in numbers], [lent[n][0] for n in numbers])
        with self._lock:
            # After an error `_fail` has completed all loans, and a future completes once.
            if self.error is not None:
                return
            for number, (_, loan) in lent.items():
                del self._lent[number]
                loan.unreduced -= 1
        for loan in numbers_by_loan:
            if not loan.unreduced:
                loan.staging.complete(loan.future, loan.buffer)

    def _staging_failed(self, error: Exception) -> None:
        broken = RingError(f"gradients can't be copied: {type(error).__name__}: {error}")
        broken.__cause__ = error
        self._fail(broken)

    def _fail(self, error: RingError) -> None:
        """Have backward fail, now and from now on."""
        with self._lock:  # each reducer's thread may be the first
            is_first = self.error is None
            self.error = self.error or error
            loans = {loan for _, loan in self._lent.values()}
            self._incomplete |= bool(loans)
            self._lent.clear()
        for loan in loans:  # `wait` raises the error
            loan.staging.complete(loan.future, loan.buffer)
        if is_first:
            event = TRAINER_RING_BROKEN(iteration=self.iteration, why=str(error))
            say(logging.DEBUG, event, "gradients can't be reduced: %s", error)
