"""A shard's parameters and optimizer state, cut into blocks that are stepped in turn.

A step works element by element. A large parameter may therefore be stepped in pieces, and small ones
together; each block has its own torch optimizer. Temporaries then need memory for one block only, whereas
torch's own step may need as much memory as all parameters. The step kernel has no temporaries, so its
parameters are not cut.

Results are bit-identical wherever the cut is, as long as it falls on a vector boundary.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from checkmate.optim.kernel import MAX_FACTORS, StepKernel, fits_kernel
from checkmate.optim.options import parse_options
from checkmate.optim.supported import SUPPORTED, build, default_dtype, kind_of
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.replica.parameter import ParameterPiece, StoredParameter
from checkmate.state import DTYPES
from checkmate.wire.parameter import Parameter

BLOCKS: Final = 8
"""Approximate number of blocks of a shard. Fewer take less time, more take less memory."""
BLOCK_ELEMENTS: Final = (1 << 16, 1 << 22)
"""Minimum and maximum size of a block; small parameters together may exceed it a little."""
CUT_ELEMENTS: Final = 64
"""Cuts are at multiples of this number of elements, which are whole vectors on every CPU."""

Gradients = Mapping[int, tuple[torch.Tensor, int]]
"""Gradients by parameter: the flat bucket, and the gradient's first element in it."""


@dataclass
class Block:
    """Pieces of parameters that one optimizer steps together."""

    optimizer: torch.optim.Optimizer
    pieces: list[tuple[int, ParameterPiece]]
    kernel: StepKernel

    def step(self, gradients: Gradients, step: pb.Step, beside: Iterable[torch.dtype] = ()) -> bool:
        """Scale gradients in place, and step the pieces of parameters that have one.

        Step as if together with parameters of the types `beside` that have no state yet. Return whether bits
        are those of the arithmetic that the kernel has: PyTorch's own step has a CPU's.
        """
        pieces = [(n, piece) for n, piece in self.pieces if n in gradients]
        if not pieces:
            return True
        gradients_by_number = []
        for n, piece in pieces:
            bucket, start = gradients[n]
            run = bucket[start + piece.start : start + piece.stop].to(piece.tensor.dtype)
            # A scalar if the trainers' is one, because torch's type promotion depends on dimensions.
            piece.tensor.grad = run if piece.tensor.dim() else run.view(())
            gradients_by_number.append((n, piece.tensor.grad))
        try:
            if not step.skipped and (factors := self._kernel_factors(pieces, step.scalings)) is not None:
                self._step_by_kernel([piece.tensor for _, piece in pieces], *factors)
                return True
            scale(self.optimizer, gradients_by_number, step.scalings)
            if step.skipped:
                skip(self.optimizer)
            with self._beside(beside):
                self.optimizer.step()
            return step.skipped or self.kernel.arithmetic == "cpu"
        finally:
            forget(self.optimizer)
            for _, piece in pieces:
                piece.tensor.grad = None

    @property
    def by_kernel(self) -> bool:
        """Whether the kernel steps it, with the present options."""
        options, kind = self.optimizer.param_groups[0], type(self.optimizer)
        types = {piece.tensor.dtype for _, piece in self.pieces}
        return all(self.kernel.covers(kind, options, dtype) for dtype in types)

    def _kernel_factors(
        self, pieces: Sequence[tuple[int, ParameterPiece]], scalings: Iterable[pb.Scaling]
    ) -> tuple[list[list[float]], float] | None:
        """Return factors of each gradient and the fused scale, or `None` if the kernel can't step these."""
        if not self.by_kernel or not all(fits_kernel(self.optimizer, piece.tensor) for _, piece in pieces):
            return None
        factors: list[list[float]] = [[] for _ in pieces]
        fused = 1.0
        for scaling in scalings:
            if DTYPES[scaling.dtype or "float32"].itemsize > 4:
                return None
            if scaling.kind == pb.Scaling.FUSED:
                if math.frexp(scaling.factor)[0] != 0.5 or type(self.optimizer) is torch.optim.SGD:
                    return None  # only the inverse of a power of two is exact
                fused /= scaling.factor
                continue
            times = Counter(scaling.parameters)
            # A GPU converts a 0-dimensional factor to the type of the gradient before it clips.
            types = {piece.tensor.dtype for _, piece in pieces}
            rounded = {
                dtype: torch.tensor(
                    scaling.factor, dtype=dtype if scaling.kind == pb.Scaling.CLIP else torch.float32
                ).item()
                for dtype in types
            }
            for its_factors, (number, piece) in zip(factors, pieces, strict=True):
                its_factors.extend([rounded[piece.tensor.dtype]] * (times[number] if times else 1))
        return None if max(map(len, factors)) > MAX_FACTORS else (factors, fused)

    def _step_by_kernel(
        self, tensors: Sequence[torch.Tensor], factors: Sequence[Sequence[float]], fused: float
    ) -> None:
        for dtype in {tensor.dtype for tensor in tensors}:
            members = [n for n, tensor in enumerate(tensors) if tensor.dtype is dtype]
            self.kernel.step(
                self.optimizer, [tensors[n] for n in members], [factors[n] for n in members], fused
            )

    @contextmanager
    def _beside(self, types: Iterable[torch.dtype]) -> Iterator[None]:
        """Add an empty parameter of each type, with a gradient and without state."""
        group = self.optimizer.param_groups[0]
        parameters, stand_ins = group["params"], [torch.empty(0, dtype=dtype) for dtype in types]
        for stand_in in stand_ins:
            stand_in.grad = torch.empty_like(stand_in)
        group["params"] = [*parameters, *stand_ins]
        try:
            yield
        finally:
            group["params"] = parameters
            for stand_in in stand_ins:
                self.optimizer.state.pop(stand_in, None)


@dataclass
class Batch:
    """Parameters that advance together: one large one, or several small ones."""

    group: int | None
    numbers: list[int]
    blocks: list[Block] = field(default_factory=list)
    threads: int = 0
    """Number of threads of its step; 0 for any number."""
    default: torch.dtype = torch.float32
    """The trainers' default type, which some optimizers use for numbers in their state."""

    def step(self, gradients: Gradients, step: pb.Step) -> bool:
        """Scale gradients in place, and step the parameters that have one. Return as `Block.step` does.

        If a GradScaler skips the step, fused optimizers still create their state; others are not called.
        """
        beside = [DTYPES[beginning.dtype] for beginning in step.beginnings if beginning.group == self.group]
        with _torch_set(self.threads, self.default):
            called = [
                block
                for block in self.blocks
                if not step.skipped or block.optimizer.param_groups[0].get("fused")
            ]
            repeated = [block.step(gradients, step, beside) for block in called]
            return all(repeated)

    @property
    def changes(self) -> bool:
        """Whether a step writes to its parameters."""
        return bool(self.blocks)

    @property
    def by_kernel(self) -> bool:
        """Whether the kernel steps all of it, with the present options."""
        return all(block.by_kernel for block in self.blocks)

    def put_options(self, options: Mapping[str, Any]) -> None:
        """Set hyperparameters for the next step."""
        for block in self.blocks:
            block.optimizer.param_groups[0].update(options)


@dataclass
class CopiedBatch(Batch):
    """Parameters, and tensors of optimizer state, that copies of the trainers' replace: they do not step."""

    parameters: Mapping[int, StoredParameter] = field(default_factory=dict)

    def step(self, gradients: Gradients, step: pb.Step) -> bool:
        """Copy what has come in the place of gradients."""
        for number, (bucket, start) in gradients.items():
            flat = self.parameters[number].tensor.view(-1)
            flat.copy_(bucket[start : start + flat.numel()])
        return True

    @property
    def changes(self) -> bool:
        """Whether a step writes to its parameters."""
        return True


def block_elements(parameters: Iterable[Parameter]) -> int:
    """Return the size of these parameters' blocks, in elements."""
    least, most = BLOCK_ELEMENTS
    share = sum(parameter.elements for parameter in parameters) // BLOCKS
    return max(least, min(share, most)) // CUT_ELEMENTS * CUT_ELEMENTS


def uncut(spec: pb.OptimizerSpec, parameters: Mapping[int, Parameter], kernel: StepKernel) -> set[int]:
    """Return those parameters that are not cut, because their steps have no temporaries.

    These are torch's fused steps and the kernel's.
    """
    numbers = set()
    for group in spec.groups:
        options, kind = parse_options(group.options), SUPPORTED.get(kind_of(spec, group))
        for number in parameters.keys() & set(group.parameters):
            dtype = DTYPES[parameters[number].dtype]
            if options.get("fused") or (kind is not None and kernel.covers(kind, options, dtype)):
                numbers.add(number)
    return numbers


def make_batches(
    spec: pb.OptimizerSpec, parameters: Mapping[int, StoredParameter], block: int, kernel: StepKernel
) -> list[Batch]:
    """Return the batches of a shard's parameters; parameters that no optimizer steps come last.

    `block` limits the elements that are stepped together, unless PyTorch's fused step has them: `foreach` has
    temporaries of all of them, and readers wait for a batch.
    """
    batches: list[Batch] = []
    stepped: set[int] = set()
    default = default_dtype(spec)
    for index, group in enumerate(spec.groups):
        members = [number for number in group.parameters if number in parameters]
        together = None if parse_options(group.options).get("fused") else block
        stepped.update(members)
        for threads in sorted({parameters[number].threads for number in members}):
            alike = [number for number in members if parameters[number].threads == threads]
            for numbers in _batches(alike, parameters, together):
                blocks = list(_blocks(kind_of(spec, group), group.options, numbers, parameters, kernel))
                batches.append(Batch(index, numbers, blocks, threads, default))
    if rest := [number for number in parameters if number not in stepped]:
        batches.append(Batch(None, rest))
    return batches


def _batches(
    numbers: Sequence[int], parameters: Mapping[int, StoredParameter], together: int | None
) -> Iterator[list[int]]:
    """Yield cut parameters separately, and others together up to `together` elements."""
    open_: list[int] = []
    for number in numbers:
        if len(parameters[number].pieces) > 1:
            yield [number]
            continue
        open_.append(number)
        if together is not None and sum(parameters[n].parameter.elements for n in open_) >= together:
            yield open_
            open_ = []
    if open_:
        yield open_


def _blocks(
    name: str,
    options: str,
    numbers: list[int],
    parameters: Mapping[int, StoredParameter],
    kernel: StepKernel,
) -> Iterator[Block]:
    """Yield one block of all pieces of several parameters, or a block for each piece of a single one."""
    pieces = [[(number, piece) for piece in parameters[number].pieces] for number in numbers]
    runs = [[run] for run in pieces[0]] if len(numbers) == 1 else [list(itertools.chain(*pieces))]
    for run in runs:
        spec = pb.OptimizerSpec(name=name)
        spec.groups.add(parameters=[number for number, _ in run], options=options)
        optimizer = build(spec, {number: piece.tensor for number, piece in run})
        for _, piece in run:
            piece.optimizer = optimizer
        yield Block(optimizer, run, kernel)


@contextmanager
def _torch_set(threads: int, default: torch.dtype) -> Iterator[None]:
    """Set torch's number of threads (0: unchanged) and default type within the context."""
    before = torch.get_num_threads(), torch.get_default_dtype()
    if threads not in (0, before[0]):
        torch.set_num_threads(threads)
    torch.set_default_dtype(default)
    try:
        yield
    finally:
        if torch.get_num_threads() != before[0]:
            torch.set_num_threads(before[0])
        torch.set_default_dtype(before[1])


def check_scalings(scalings: Iterable[pb.Scaling]) -> None:
    """Raise `ValueError` if the kind or type of a scaling is unknown."""
    for scaling in scalings:
        dtype = DTYPES.get(scaling.dtype or "float32")
        if scaling.kind not in _KINDS or dtype is None or not dtype.is_floating_point:
            raise ValueError(f"unknown scaling of gradients: {scaling.kind} {scaling.dtype}")


def scale(
    optimizer: torch.optim.Optimizer,
    gradients: Sequence[tuple[int, torch.Tensor]],
    scalings: Iterable[pb.Scaling],
) -> None:
    """Scale gradients in place, given with their parameters' numbers. A scaling may list parameters."""
    for scaling in scalings:
        times = Counter(scaling.parameters)
        tensors = [gradient for number, gradient in gradients for _ in range(times[number] if times else 1)]
        factor = torch.tensor(scaling.factor, dtype=DTYPES[scaling.dtype or "float32"])
        _KINDS[scaling.kind](optimizer, tensors, factor)


def skip(optimizer: torch.optim.Optimizer) -> None:
    """Make a fused optimizer skip its next step, as a GradScaler does. It still creates its state."""
    vars(optimizer).update(found_inf=torch.ones((), dtype=torch.float32))


def forget(optimizer: torch.optim.Optimizer) -> None:
    """Remove the attributes that `scale` and `skip` have set for the step."""
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)


def _by_type(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    for dtype in {gradient.dtype for gradient in gradients}:
        yield [gradient for gradient in gradients if gradient.dtype == dtype]


def _clip(_: torch.optim.Optimizer, gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply like `torch.nn.utils.clip_grad_norm_`."""
    for group in _by_type(gradients):
        torch._foreach_mul_(group, factor)


def _unscale(_: torch.optim.Optimizer, gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply like `torch.amp.GradScaler.unscale_`."""
    for group in _by_type(gradients):
        found_inf = torch.zeros(1, dtype=torch.float32)
        torch._amp_foreach_non_finite_check_and_unscale_(group, found_inf, factor.reshape(1))


def _hand_over(optimizer: torch.optim.Optimizer, _: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Pass the loss scale to a fused optimizer like `torch.amp.GradScaler.step`."""
    vars(optimizer).update(grad_scale=factor, found_inf=torch.zeros((), dtype=torch.float32))


_KINDS: Final[dict[int, Callable[[torch.optim.Optimizer, Sequence[torch.Tensor], torch.Tensor], None]]] = {
    pb.Scaling.CLIP: _clip,
    pb.Scaling.UNSCALE: _unscale,
    pb.Scaling.FUSED: _hand_over,
}
"""In-place implementation of each kind of scaling."""
