"""A shard's parameters and optimizer state, cut into blocks that are stepped one after another.

A step works element by element, so a large parameter may be stepped in pieces and small ones together; each
block has a torch optimizer of its own. Temporaries then need memory for a block alone, where torch's own step
may need as much as all parameters.

Bits don't depend on the cut where it stands at whole vectors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from checkmate.optim.options import parse_options
from checkmate.optim.supported import build, default_dtype
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow.replica.held import Held, HeldPiece
from checkmate.shadow.replica.scalings import forget, scale, skip
from checkmate.state import DTYPES
from checkmate.wire.layout import Parameter

BLOCKS: Final = 8
"""A shard has about so many blocks: few cost less time, many less memory."""
BLOCK_ELEMENTS: Final = (1 << 16, 1 << 22)
"""A block has at least and at most so many, unless small parameters together go a little beyond."""
CUT: Final = 64
"""Whole vectors of every kind: cuts stand at multiples of it."""

Gradients = Mapping[int, tuple[torch.Tensor, int]]
"""Of some parameters: the bucket, flat, and where in it the gradient begins."""


@dataclass
class Block:
    """Pieces that one optimizer steps together."""

    optimizer: torch.optim.Optimizer
    pieces: list[tuple[int, HeldPiece]]

    def step(self, gradients: Gradients, step: pb.Step, beside: Iterable[torch.dtype] = ()) -> None:
        """Scale, in place, and step those whose parameter's gradient is given.

        `beside`: as if together with parameters of these types that have no state yet.
        """
        chosen = [(n, piece) for n, piece in self.pieces if n in gradients]
        if not chosen:
            return
        named = []
        for n, piece in chosen:
            bucket, start = gradients[n]
            run = bucket[start + piece.start : start + piece.stop]
            # As a scalar where the trainers' is one: torch promotes types by the number of dimensions too.
            piece.tensor.grad = run if piece.tensor.dim() else run.view(())
            named.append((n, piece.tensor.grad))
        try:
            scale(self.optimizer, named, step.scalings)
            if step.skipped:
                skip(self.optimizer)
            with self._beside(beside):
                self.optimizer.step()
        finally:
            forget(self.optimizer)
            for _, piece in chosen:
                piece.tensor.grad = None

    @contextmanager
    def _beside(self, types: Iterable[torch.dtype]) -> Iterator[None]:
        """With an empty parameter of each type that has a gradient and no state."""
        group = self.optimizer.param_groups[0]
        own, others = group["params"], [torch.empty(0, dtype=dtype) for dtype in types]
        for other in others:
            other.grad = torch.empty_like(other)
        group["params"] = [*own, *others]
        try:
            yield
        finally:
            group["params"] = own
            for other in others:
                self.optimizer.state.pop(other, None)


@dataclass
class Batch:
    """Parameters that go to the next iteration together: one large one, or several small ones."""

    group: int | None
    numbers: list[int]
    blocks: list[Block] = field(default_factory=list)
    threads: int = 0
    """With so many it is stepped; 0: with any number."""
    default: torch.dtype = torch.float32
    """The trainers' default type, which some optimizers give to their numbers."""

    def step(self, gradients: Gradients, step: pb.Step) -> None:
        """Scale, in place, and step the parameters whose gradient is given.

        A fused optimizer that a GradScaler has told to skip makes its state even so; others are not called.
        """
        beside = [DTYPES[one.dtype] for one in step.beginnings if one.group == self.group]
        with _torch_set(self.threads, self.default):
            for block in self.blocks:
                if not step.skipped or block.optimizer.param_groups[0].get("fused"):
                    block.step(gradients, step, beside)

    def put_options(self, options: Mapping[str, Any]) -> None:
        """Hyperparameters for the next step."""
        for block in self.blocks:
            block.optimizer.param_groups[0].update(options)


def block_elements(parameters: Iterable[Parameter]) -> int:
    """How large the blocks of these parameters are."""
    least, most = BLOCK_ELEMENTS
    share = sum(parameter.elements for parameter in parameters) // BLOCKS
    return max(least, min(share, most)) // CUT * CUT


def uncut(spec: pb.OptimizerSpec) -> set[int]:
    """Parameters that need no cutting: torch's fused steps have no temporaries."""
    fused = [group for group in spec.groups if parse_options(group.options).get("fused")]
    return {number for group in fused for number in group.parameters}


def cut(spec: pb.OptimizerSpec, held: Mapping[int, Held], block: int) -> list[Batch]:
    """The batches of a shard's parameters, with their blocks' optimizers; those that none steps come last.

    `block`: elements that `foreach` steps together, for it has temporaries of all of them at once.
    """
    batches: list[Batch] = []
    stepped: set[int] = set()
    default = default_dtype(spec)
    for index, group in enumerate(spec.groups):
        ours = [number for number in group.parameters if number in held]
        together = block if parse_options(group.options).get("foreach") else None
        stepped.update(ours)
        for threads in sorted({held[number].threads for number in ours}):
            alike = [number for number in ours if held[number].threads == threads]
            for numbers in _batches(alike, held, together):
                blocks = list(_blocks(spec.name, group.options, numbers, held))
                batches.append(Batch(index, numbers, blocks, threads, default))
    if rest := [number for number in held if number not in stepped]:
        batches.append(Batch(None, rest))
    return batches


def _batches(numbers: Sequence[int], held: Mapping[int, Held], together: int | None) -> Iterator[list[int]]:
    """Parameters in several pieces each by itself; the others `together` up to so many elements."""
    open_: list[int] = []
    for number in numbers:
        if len(held[number].pieces) > 1:
            yield [number]
            continue
        open_.append(number)
        if together is not None and sum(held[n].parameter.elements for n in open_) >= together:
            yield open_
            open_ = []
    if open_:
        yield open_


def _blocks(name: str, options: str, numbers: list[int], held: Mapping[int, Held]) -> Iterator[Block]:
    """One block of all pieces of several parameters, or one of each piece of a single one."""
    pieces = [[(number, piece) for piece in held[number].pieces] for number in numbers]
    runs = [[one] for one in pieces[0]] if len(numbers) == 1 else [list(itertools.chain(*pieces))]
    for run in runs:
        spec = pb.OptimizerSpec(name=name)
        spec.groups.add(parameters=[number for number, _ in run], options=options)
        optimizer = build(spec, {number: piece.tensor for number, piece in run})
        for _, piece in run:
            piece.optimizer = optimizer
        yield Block(optimizer, run)


@contextmanager
def _torch_set(threads: int, default: torch.dtype) -> Iterator[None]:
    """With so many of torch's threads (0: as it is) and this default type."""
    before = torch.get_num_threads(), torch.get_default_dtype()
    if threads not in (0, before[0]):
        torch.set_num_threads(threads)
    if default != before[1]:
        torch.set_default_dtype(default)
    try:
        yield
    finally:
        if torch.get_num_threads() != before[0]:
            torch.set_num_threads(before[0])
        if default != before[1]:
            torch.set_default_dtype(before[1])
