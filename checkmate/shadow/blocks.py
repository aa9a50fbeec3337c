"""A shard's parameters and optimizer state, cut into blocks that are stepped one after another.

A step works element by element, so a large parameter may be stepped in pieces and small ones together; each
block has a torch optimizer of its own. Temporaries then need memory for a block alone, where torch's own step
may need as much as all parameters.

Bits don't depend on the cut where it stands at whole vectors. On 16-bit types torch's bits do depend on where
its own threads' shares end; these are stepped with as many threads as in training, and whole where there are
several.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from checkmate.layout import Parameter
from checkmate.optimizer_options import parse_options
from checkmate.optimizers import build
from checkmate.rpc import shadow_pb2 as pb
from checkmate.state import DTYPES

BLOCKS: Final = 8
"""A shard has about so many blocks: few cost less time, many less memory."""
BLOCK_ELEMENTS: Final = (1 << 16, 1 << 22)
"""A block has at least and at most so many, unless small parameters together go a little beyond."""
CUT: Final = 64
"""Whole vectors of every kind: cuts stand at multiples of it."""

SURE_ITEMSIZE: Final = 4
"""From this size on, an element's bits don't depend on the number of threads."""

State = Mapping[str, object]
Gradients = Mapping[int, tuple[torch.Tensor, int]]
"""Of some parameters: the bucket, flat, and where in it the gradient begins."""


@dataclass
class Piece:
    """A flat run of a parameter, as an optimizer sees it; `tensor` is the optimizer's key for its state."""

    start: int
    stop: int
    tensor: torch.Tensor
    optimizer: torch.optim.Optimizer | None = None
    views: dict[str, torch.Tensor] = field(default_factory=dict)
    """The runs of the whole state's tensors that the optimizer was given."""
    gathered: int = -1
    """Entries that its state had after a step: the optimizer changes them in place from then on."""

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's own, of this piece."""
        if self.optimizer is None:
            return {}
        found: dict[str, Any] = self.optimizer.state[self.tensor]
        return found


class Held:
    """A parameter with its optimizer state: whole, as it is read, and in the pieces that are stepped."""

    def __init__(self, parameter: Parameter, block: int, threads: int = 1) -> None:
        """`block`: elements of a piece at most, or 0. `threads`: of training, where its bits are wanted."""
        self.parameter = parameter
        self.dtype = DTYPES[parameter.dtype]
        self.tensor = torch.empty(0, dtype=self.dtype)
        self.whole: dict[str, torch.Tensor] = {}
        self.rest: dict[str, object] = {}
        """Of a parameter that no optimizer steps: state as it came."""
        short = self.dtype.itemsize < SURE_ITEMSIZE
        self.threads = threads if short else 0
        elements = parameter.elements
        step = block if block and (threads <= 1 or not short) else elements
        self.pieces = [
            Piece(start, min(start + step, elements), torch.empty(0, dtype=self.dtype))
            for start in (range(0, elements, step) if elements else [0])
        ]

    @property
    def stepped(self) -> bool:
        """Whether an optimizer steps it at all."""
        return self.pieces[0].optimizer is not None

    def put(self, tensor: torch.Tensor, state: State) -> None:
        """Take a parameter and its state over; nothing that was given out before changes."""
        self.tensor = tensor
        self.whole = {name: value for name, value in state.items() if self._by_element(value)}  # type: ignore[misc]
        self.rest = dict(state)
        for piece in self.pieces:
            piece.tensor.data = self._run(tensor, piece)
            piece.gathered = -1
            if piece.optimizer is None:
                continue
            piece.views = {name: self._run(value, piece) for name, value in self.whole.items()}
            piece.optimizer.state[piece.tensor] = {
                name: piece.views.get(name, _own(value)) for name, value in state.items()
            }

    def snapshot(self) -> tuple[torch.Tensor, dict[str, object]]:
        """The parameter and its state as they are. The large tensors are the live ones, not copies."""
        if not self.stepped:
            return self.tensor, dict(self.rest)
        state = self.pieces[0].state
        return self.tensor, {name: self.whole.get(name, _own(value)) for name, value in state.items()}

    def move(self) -> None:
        """Go on with a copy, and leave what was given out to those who read it."""
        tensor, state = self.snapshot()
        self.put(tensor.clone(), {name: _own(value) for name, value in state.items()})

    def gather(self) -> None:
        """After a step: state that the optimizer has only now created becomes part of the whole."""
        for piece in self.pieces:
            state = piece.state
            if len(state) == piece.gathered:
                continue
            piece.gathered = len(state)
            for name, value in state.items():
                if value is piece.views.get(name) or not _like(value, piece.tensor):
                    continue
                if len(self.pieces) == 1:
                    self.whole[name] = value.reshape(self.parameter.memory_shape)
                elif name not in self.whole:
                    self.whole[name] = torch.empty(self.parameter.memory_shape, dtype=value.dtype)
                view = self._run(self.whole[name], piece)
                if len(self.pieces) > 1:
                    view.copy_(value)
                piece.views[name] = state[name] = view

    @property
    def nbytes(self) -> int:
        """Of the parameter and its state, without what is as small as a number."""
        return sum(tensor.nbytes for tensor in (self.tensor, *self.whole.values()))

    def _by_element(self, value: object) -> bool:
        return bool(self.parameter.shape) and _like(value, self.tensor)

    def _run(self, whole: torch.Tensor, piece: Piece) -> torch.Tensor:
        """A piece's elements. A parameter without dimensions stays so, for its state looks like its step."""
        return whole.view(-1)[piece.start : piece.stop] if self.parameter.shape else whole.view(())


@dataclass
class Block:
    """Pieces that one optimizer steps together."""

    optimizer: torch.optim.Optimizer
    pieces: list[tuple[int, Piece]]

    def step(self, gradients: Gradients, scalings: Sequence[pb.Scaling]) -> None:
        """Scale, in place, and step those whose parameter's gradient is given."""
        chosen = [(n, piece) for n, piece in self.pieces if n in gradients]
        if not chosen:
            return
        runs = []
        for n, piece in chosen:
            bucket, start = gradients[n]
            run = bucket[start + piece.start : start + piece.stop]
            runs.append(run)
            piece.tensor.grad = run if piece.tensor.dim() else run.view(())
        for scaling in scalings:
            only = set(scaling.parameters)
            named = [run for (n, _), run in zip(chosen, runs, strict=True) if not only or n in only]
            SCALINGS[scaling.kind](self.optimizer, named, _factor(scaling))
        try:
            self.optimizer.step()
        finally:
            for _, piece in chosen:
                piece.tensor.grad = None
            for name in ("grad_scale", "found_inf"):
                vars(self.optimizer).pop(name, None)


@dataclass
class Batch:
    """Parameters that go to the next iteration together: one large one, or several small ones."""

    group: int | None
    numbers: list[int]
    blocks: list[Block] = field(default_factory=list)
    threads: int = 0
    """With so many it is stepped; 0: with any number."""

    def step(self, gradients: Gradients, scalings: Sequence[pb.Scaling]) -> None:
        """Scale, in place, and step the parameters whose gradient is given."""
        with _threads(self.threads):
            for block in self.blocks:
                block.step(gradients, scalings)

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
    for index, group in enumerate(spec.groups):
        ours = [number for number in group.parameters if number in held]
        together = block if parse_options(group.options).get("foreach") else None
        stepped.update(ours)
        for threads in sorted({held[number].threads for number in ours}):
            alike = [number for number in ours if held[number].threads == threads]
            for numbers in _batches(alike, held, together):
                blocks = list(_blocks(spec.name, group.options, numbers, held))
                batches.append(Batch(index, numbers, blocks, threads))
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


def _like(value: object, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape and tensor.dim() > 0


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """With so many of torch's threads; 0: as it is."""
    before = torch.get_num_threads()
    if count in (0, before):
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _own(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _factor(scaling: pb.Scaling) -> torch.Tensor:
    return torch.tensor(scaling.factor, dtype=DTYPES[scaling.dtype or "float32"])


def _by_type(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    for dtype in {gradient.dtype for gradient in gradients}:
        yield [gradient for gradient in gradients if gradient.dtype == dtype]


def _clip(_: torch.optim.Optimizer, gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """As `torch.nn.utils.clip_grad_norm_` multiplies."""
    for group in _by_type(gradients):
        torch._foreach_mul_(group, factor)


def _unscale(_: torch.optim.Optimizer, gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """As `torch.amp.GradScaler.unscale_` multiplies."""
    for group in _by_type(gradients):
        torch._amp_foreach_non_finite_check_and_unscale_(group, torch.zeros(1), factor.reshape(1))


def _hand_over(optimizer: torch.optim.Optimizer, _: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """As `torch.amp.GradScaler.step` hands the loss scale to a fused optimizer."""
    vars(optimizer).update(grad_scale=factor, found_inf=torch.zeros(()))


SCALINGS: Final = {pb.Scaling.CLIP: _clip, pb.Scaling.UNSCALE: _unscale, pb.Scaling.FUSED: _hand_over}
"""How each kind of scaling is done, in place."""
