"""A shard's replica: parameters and optimizer state in memory order, stepped like those of training.

No sockets, no gRPC. One thread steps and loads, while any number of threads read. Readers and steps never
wait for each other: if a step would overwrite data that is still to be read, readers keep it and the replica
continues with a copy.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from checkmate.optim.kernel import Arithmetic, StepKernel
from checkmate.optim.options import parse_options
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow import locks
from checkmate.shadow.replica.blocks import (
    Batch,
    CopiedBatch,
    Gradients,
    block_elements,
    check_scalings,
    make_batches,
    uncut,
)
from checkmate.shadow.replica.compare import CAUSES, CAUSES_BETWEEN_RANKS, Comparison
from checkmate.shadow.replica.parameter import OptimizerState, StoredParameter
from checkmate.state import DTYPES
from checkmate.wire.layout import Layout
from checkmate.wire.parts import PartSlicing

_log: Final = logging.getLogger("checkmate")


class ReplicaError(ValueError):
    """A request cannot be carried out; the replica is unchanged."""


class NotStepped(ReplicaError, LookupError):
    """The iteration to read is not stepped yet, or the parameter is not seeded."""


class IterationGone(ReplicaError, LookupError):
    """Newer iterations have overwritten the iteration to read."""


@dataclass
class _Reservation:
    """An iteration that is reserved or being read."""

    reserved: int = 0
    reads: Counter[int] = field(default_factory=Counter)
    readers: list[set[int]] = field(default_factory=list)
    copies: dict[int, tuple[torch.Tensor, dict[str, object]]] = field(default_factory=dict)

    def wants(self, number: int) -> bool:
        return self.reads[number] < self.reserved or any(number in reader for reader in self.readers)

    @property
    def is_over(self) -> bool:
        return not self.reserved and not self.readers


class Replica:
    """Parameters and optimizer state of one shard."""

    def __init__(
        self,
        layout: Layout,
        shard: int,
        spec: pb.OptimizerSpec,
        *,
        exact: bool,
        arithmetic: Arithmetic = "cpu",
    ) -> None:
        """Create an empty replica. `exact`: the trainers' own step gives the same bits.

        `arithmetic`: the kind of device on which they step, whose bits the step kernel repeats.

        Raises `UnsupportedOptimizer` or `OptionsError` if the optimizer or its options are not supported.
        """
        self.layout, self.shard = layout, shard
        parted = isinstance(layout.slicing, PartSlicing)
        self.comparison = Comparison(exact=exact, causes=CAUSES_BETWEEN_RANKS if parted else CAUSES)
        self.numbers = tuple(layout.of_shard(shard))
        self.at: dict[int, int] = {}
        """Iteration of each parameter's last step; absent if it is not seeded."""
        # Of PyTorch's own steps; the kernel's bits do not depend on it.
        threads = (spec.threads or torch.get_num_threads()) if exact and arithmetic == "cpu" else 0
        parameters = [layout.parameters[number] for number in self.numbers]
        block = block_elements(parameters)
        kernel = StepKernel.of(spec, arithmetic)
        described = {number: layout.parameters[number] for number in self.numbers}
        whole = set(described) if spec.copied else uncut(spec, described, kernel)
        self._parameters = {
            n: StoredParameter(layout.parameters[n], 0 if n in whole else block, threads)
            for n in self.numbers
        }
        self._groups = len(spec.groups)
        self._copies = spec.copied
        self._batches: Sequence[Batch] = (
            [CopiedBatch(None, list(self.numbers), parameters=self._parameters)]
            if spec.copied
            else make_batches(spec, self._parameters, block, kernel)
        )
        if arithmetic == "gpu":
            self.comparison.exact &= all(batch.by_kernel for batch in self._batches)
        self._begins_exact = self.comparison.exact
        self._lock = locks.ordered_lock("replica")
        self._moving: set[int] = set()
        self._reservations: dict[int, _Reservation] = {}

    def load(self, parameter: int, tensor: torch.Tensor, state: OptimizerState, iteration: int) -> None:
        """Seed a parameter with its state after `iteration`. Takes over both, without a copy.

        Raises `ReplicaError` if the shard has no such parameter, or its shape or type differs.
        """
        target = self._parameters.get(parameter)
        if target is None:
            raise ReplicaError(f"shard {self.shard} has no parameter {parameter}")
        expected = target.parameter
        if (tuple(tensor.shape), tensor.dtype) != (expected.memory_shape, target.dtype):
            raise ReplicaError(
                f"{expected.name} has shape {expected.memory_shape} and type {expected.dtype}, but its seed "
                f"has {tuple(tensor.shape)} and {str(tensor.dtype).removeprefix('torch.')}"
            )
        entries = {name: _plain(value) for name, value in state.items()}
        with self._lock:
            self._keep(parameter, target)
            target.load(_plain(tensor), entries)
            self.at[parameter] = iteration
            self.comparison.seeded(parameter, iteration, entries)

    def clear(self) -> None:
        """Discard all state. Readers in progress keep the old copy."""
        with self._lock:
            for number, stored_parameter in self._parameters.items():
                self._keep(number, stored_parameter)
            self.at.clear()
            self.comparison.exact = self._begins_exact  # what comes next are the trainers' own bits

    def step(self, iteration: int, gradients: Mapping[int, torch.Tensor], step: pb.Step) -> list[str]:
        """Step parameters from `iteration - 1` to `iteration`, and compare them with the trainers' slices.

        Args:
            gradients: the shard's buckets, as flat tensors by index in the layout; scaled in place.
            step: the first rank's record.

        Returns:
            A message for each difference.

        Raises:
            ValueError: if the record or the gradients do not fit the shard; nothing is stepped then.
        """
        numbers_due = {number for number in self.numbers if self.at.get(number) == iteration - 1}
        options = self._options(step)
        # A skipped step: by a GradScaler, whatever the optimizer did then.
        is_called = not step.skipped or bool(step.options) or self._copies
        without = set() if self._copies else set(step.without_gradient)
        bucket_gradients = self._gradients(numbers_due - without, gradients) if is_called else {}
        for batch in self._batches:
            numbers = [number for number in batch.numbers if number in numbers_due]
            if numbers:
                self._advance(batch, numbers, iteration, options, bucket_gradients, step)
        stepped = {
            number: parameter
            for number, parameter in self._parameters.items()
            if self.at.get(number) == iteration
        }
        return list(self.comparison.compare(iteration, step.slices, stepped))

    @property
    def nbytes(self) -> int:
        """The bytes of parameters and optimizer state that steps overwrite."""
        return sum(parameter.nbytes for parameter in self._parameters.values())

    def reserve(self, iteration: int) -> bool:
        """Keep a present or future iteration readable, once for each parameter, until `release`.

        Reservations add up. Returns false if the iteration is gone.
        """
        with self._lock:
            if any(self._beyond(number, iteration) for number in self.numbers):
                return False
            self._reservations.setdefault(iteration, _Reservation()).reserved += 1
            return True

    def release(self, iteration: int) -> None:
        """End one reservation of an iteration, if there is one."""
        with self._lock:
            reservation = self._reservations.get(iteration)
            if reservation is not None and reservation.reserved:
                reservation.reserved -= 1
                self._drop(iteration)

    def read(
        self, iteration: int, parameters: Sequence[int] = ()
    ) -> Iterator[tuple[int, torch.Tensor, dict[str, object]]]:
        """Return an iterator over parameters (all if empty) after `iteration`, without waiting.

        A tensor is valid until the next one is read, and must not be changed. Raises `NotStepped` if the
        iteration is not stepped yet, and `IterationGone` if newer ones have overwritten it.
        """
        numbers = tuple(parameters) or self.numbers
        with self._lock:
            self._check_readable(iteration, numbers)
        return self._read(iteration, numbers)

    def _read(
        self, iteration: int, numbers: Sequence[int]
    ) -> Iterator[tuple[int, torch.Tensor, dict[str, object]]]:
        unread = set(numbers)
        with self._lock:
            self._check_readable(iteration, numbers)
            reservation = self._reservations.setdefault(iteration, _Reservation())
            reservation.readers.append(unread)
        try:
            for number in numbers:
                with self._lock:
                    copy = reservation.copies.get(number)
                    tensor, state = self._parameters[number].snapshot() if copy is None else copy
                yield number, tensor, state
                with self._lock:
                    unread.discard(number)
                    reservation.reads[number] += 1
                    if not reservation.wants(number):
                        reservation.copies.pop(number, None)
        finally:
            with self._lock:
                reservation.readers.remove(unread)
                self._drop(iteration)

    def _options(self, step: pb.Step) -> list[dict[str, Any]]:
        """Return each parameter group's options for the step; empty if they are unchanged."""
        if step.options and len(step.options) != self._groups:
            raise ReplicaError(
                f"the record has {len(step.options)} parameter groups, the optimizer has {self._groups}"
            )
        check_scalings(step.scalings)
        if unknown := {beginning.dtype for beginning in step.beginnings} - DTYPES.keys():
            raise ReplicaError(f"the record has parameters of unknown types: {', '.join(unknown)}")
        return [parse_options(text) for text in step.options]

    def _gradients(self, numbers: set[int], buckets: Mapping[int, torch.Tensor]) -> Gradients:
        """Return each parameter's gradient in its bucket. Empty parameters are not in any bucket."""
        where = {number: self.layout.where[number] for number in numbers.difference(self.layout.empty)}
        for index in {index for index, _ in where.values()}:
            bucket, expected = buckets.get(index), self.layout.buckets[index]
            if bucket is None or (bucket.shape, bucket.dtype) != (
                (expected.elements,),
                DTYPES[expected.dtype],
            ):
                raise ReplicaError(
                    f"bucket {index} of shard {self.shard} is missing, or has another size or type"
                )
        gradients = {number: (buckets[index], place.start) for number, (index, place) in where.items()}
        nothing = {n: (torch.empty(0, dtype=self._parameters[n].dtype), 0) for n in numbers - where.keys()}
        return gradients | nothing

    def _advance(
        self,
        batch: Batch,
        numbers: Sequence[int],
        iteration: int,
        options: Sequence[Mapping[str, Any]],
        gradients: Gradients,
        step: pb.Step,
    ) -> None:
        """Advance a batch's parameters to `iteration`. If that fails, they count as not seeded."""
        with self._lock:
            self._moving.update(numbers)
            unread = [number for number in numbers if self._keep(number, self._parameters[number])]
        try:
            for number in unread:
                if batch.changes:
                    self._parameters[number].move()
            if options and batch.group is not None:
                batch.put_options(options[batch.group])
            parameter_gradients = {number: gradients[number] for number in numbers if number in gradients}
            if not batch.step(parameter_gradients, step):
                self._tolerate()
            for number in parameter_gradients:
                self._parameters[number].gather()
        except BaseException:
            with self._lock:
                for number in numbers:
                    self.at.pop(number, None)
                self._moving.difference_update(numbers)
            raise
        with self._lock:
            self.at.update(dict.fromkeys(numbers, iteration))
            self._moving.difference_update(numbers)

    def _tolerate(self) -> None:
        """Compare with a tolerance from now on: the bits of this step stay in the state."""
        if self.comparison.exact:
            self.comparison.exact = False
            _log.warning(
                "shard %d: this step was not repeated bit for bit, nor can later ones be", self.shard
            )

    def _keep(self, number: int, parameter: StoredParameter) -> bool:
        """Leave a parameter that will change to its remaining readers. Return whether there are any."""
        reservation = self._reservations.get(self.at.get(number, -2))
        if reservation is None or number in reservation.copies or not reservation.wants(number):
            return False
        reservation.copies[number] = parameter.snapshot()
        return True

    def _beyond(self, number: int, iteration: int) -> bool:
        at = self.at.get(number)
        return at is not None and (at > iteration or (at == iteration and number in self._moving))

    def _check_readable(self, iteration: int, numbers: Sequence[int]) -> None:
        reservation = self._reservations.get(iteration)
        for number in numbers:
            if number not in self._parameters:
                raise NotStepped(f"shard {self.shard} has no parameter {number}")
            if reservation is not None and number in reservation.copies:
                continue
            name = self.layout.parameters[number].name
            if self._beyond(number, iteration):
                raise IterationGone(
                    f"{name} is beyond iteration {iteration}, which was not reserved, or is read already"
                )
            if self.at.get(number) != iteration:
                raise NotStepped(f"{name} is not at iteration {iteration} yet")

    def _drop(self, iteration: int) -> None:
        if self._reservations[iteration].is_over:
            del self._reservations[iteration]


def _plain(value: Any) -> Any:
    return value.detach().cpu().contiguous() if isinstance(value, torch.Tensor) else value
