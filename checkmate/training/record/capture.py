"""A rank's notes of an iteration: its step, and copies of the other state that a resumed run needs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import torch

from checkmate.optim.options import GroupOptions
from checkmate.rpc import shadow_pb2 as pb
from checkmate.state import bytes_of, local_of
from checkmate.training.errors import RefusedError
from checkmate.training.model.trained import TrainedModel
from checkmate.training.record.buffers import Buffers, Later
from checkmate.training.record.copied_state import CopiedState
from checkmate.training.record.generators import MAX_CHECKS, DrawWatch, capture_generators
from checkmate.training.record.windows import Copy, Window
from checkmate.training.record.wrapped import class_of


@dataclass(frozen=True)
class Watched:
    """The objects of a training script that a rank's records describe."""

    model: TrainedModel
    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    scaler: Any = None
    extra: Callable[[], Any] | None = None
    copied: CopiedState | None = None
    """What is copied in place of gradients, if nodes can't repeat the optimizer's step."""


@dataclass(frozen=True)
class IterationEnd:
    """A rank's state at the end of an iteration. Fields of the group's first rank are empty on others."""

    rng: dict[str, Any]
    extra: Any = None
    next_options: Sequence[str] = ()
    scheduler: dict[str, Any] | None = None
    scaler: dict[str, Any] | None = None
    scheduler_class: str = ""


@dataclass
class Scaled:
    """A multiplication of gradients by a factor (or a division, by a fused optimizer)."""

    kind: pb.Scaling.Kind.ValueType
    factor: torch.Tensor
    parameters: Sequence[int] = ()


@dataclass
class RecordDraft:
    """One iteration of one rank, before it becomes a message.

    Fields that only the group's first rank records are empty on others.
    """

    iteration: int
    ends: Mapping[tuple[int, int], int]
    captured: IterationEnd | None = None  # not yet
    stepped_by: list[torch.optim.Optimizer] = field(default_factory=list)
    marked: bool = False  # the script has marked its end
    settled: bool = False  # ... and has reached it
    left_loop: bool = False  # ... by leaving its loop over batches
    last: bool = False
    infinite: Sequence[torch.Tensor] = ()  # if one is not zero, the scaler made the optimizer skip
    options: list[str] = field(default_factory=list)
    without_gradient: set[int] = field(default_factory=set)
    with_gradient: Sequence[int] = ()
    waiting: bool = False  # a forward has come, and the next backward ends it
    leaves_gradients: bool | None = None  # to the next backward, once that has begun
    beginnings: list[pb.Beginning] = field(default_factory=list)
    scaled: list[Scaled] = field(default_factory=list)
    slices: list[tuple[Window, Copy]] = field(default_factory=list)
    buffers: dict[str, Later] | None = None  # not captured yet
    beside: bytes = b""
    """What of the optimizer's state is in none of the tensors that are copied, as plain state."""
    refusal: RefusedError | None = None
    """The reason why it is refused, if the script has left its loop, perhaps by an error of its own."""
    checks: list[Callable[[], None]] = field(default_factory=list)
    """Raise `RefusedError` once a device has answered: before the iteration is sent."""

    @property
    def end(self) -> IterationEnd:
        """The state at its end. Raise `RuntimeError` if that was not captured."""
        if self.captured is None:
            raise RuntimeError(f"the end of iteration {self.iteration} was not captured")
        return self.captured

    def resume(self) -> None:
        """Go on after a forward, which was not the next iteration's: a step or a mark has come."""
        self.waiting = False

    def note_options(self, now: Sequence[str], groups: range) -> None:
        """Note the options of the groups that a step is about to use."""
        before = self.options or now
        self.options = [*before[: groups.start], *now[groups.start : groups.stop], *before[groups.stop :]]

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped."""
        return bool(self.stepped_by)

    @property
    def is_over(self) -> bool:
        """Whether its optimizer has stepped, or was made to skip by a scaler."""
        return self.has_stepped or bool(self.infinite)

    def skipped(self) -> bool:
        """Return whether parameters did not change. Waits for a CUDA device."""
        return not self.has_stepped or any(bool(infinity.item()) for infinity in self.infinite)


class StepCopies(Protocol):
    """Copies gradients as optimizers step. An iteration is a round of steps, one of each at most."""

    beside: bytes
    """What of the optimizer's state is in none of the tensors, as plain state, if the state is copied."""
    is_due: bool
    """Whether DDP has reduced gradients that no step has used: an iteration, also if none does."""

    def begin(self) -> int:
        """Begin the next iteration, as its first step comes; return its number."""

    def take(self, numbers: Collection[int]) -> None:
        """Copy the gradients that a step is about to use, of parameters by number."""

    def stepped(self, *, marking: bool) -> None:
        """Note that all optimizers have stepped. `marking`: whether the script marks iterations' ends."""

    def capture(self) -> None:
        """Copy what belongs to the end of the iteration, which is now, in place of an earlier end."""

    def complete(self) -> None:
        """Note that the iteration is over. Does nothing between two iterations."""


class Capture:
    """Copies the state of a script's objects.

    `first`: on the group's first rank, with shared state. `resumed`: this rank's generators in the record
    from which the run resumes.
    """

    def __init__(
        self, watched: Watched, buffers: Buffers, resumed: Mapping[str, Any] | None = None, *, first: bool
    ) -> None:
        self.options = GroupOptions()
        self.draws = DrawWatch(resumed, first=first)
        self._watched = watched
        self._buffers = buffers
        self._first = first

    def take(self, *, in_loop: bool = False, marks: bool = False) -> IterationEnd:
        """Copy the current state without buffers.

        `in_loop`: an iterator over batches exists, so that creating one in a resumed run must not advance
        generators. `marks`: the script marks where its iterations end.
        """
        watched, first = self._watched, self._first
        flags = {"in_loop": in_loop, "marks": marks, "still": self.draws.still}
        return IterationEnd(
            rng=capture_generators() | flags,
            extra=None if watched.extra is None else copy.deepcopy(watched.extra()),
            next_options=self.options.of(watched.optimizer.param_groups) if first else (),
            scheduler=_state_of(watched.scheduler) if first else None,
            scaler=_state_of(watched.scaler) if first else None,
            scheduler_class=class_of(watched.scheduler) if first else "",
        )

    def buffers(self, before: Mapping[str, Later] | None) -> dict[str, Later]:
        """Return copies of the buffers that the iteration's record must contain.

        `before`: the result of an earlier call in the same iteration; only later changes are copied again.
        """
        if before is None:
            return self._buffers.take()
        since = self._buffers.take(again=True)
        return {name: later for name, later in before.items() if name in self._buffers.names} | since


def _state_of(thing: Any) -> dict[str, Any] | None:
    return None if thing is None else copy.deepcopy(thing.state_dict())


_log: Final = logging.getLogger("checkmate")

SAMPLED: Final = 4096
"""The number of elements compared per buffer or frozen parameter, evenly spread."""


class DriftWatch:
    """Warns once, if it is `active`: on the group's first rank, because all ranks run the same script."""

    def __init__(self, watched: Watched, options: GroupOptions, *, active: bool) -> None:
        self._watched = watched
        self._options = options
        self._active = active
        self._checks_left = MAX_CHECKS
        self._captured: dict[str, Any] | None = None
        self._warning: tuple[int, str] | None = None

    def note(self, end: IterationEnd) -> None:
        """Note a capture, in place of an earlier one of the same iteration."""
        if self._active and self._checks_left:
            self._captured = {
                "extra()": end.extra,
                "the scheduler": end.scheduler,
                "the scaler": end.scaler,
                **self._samples(),
            }

    def forget(self) -> None:
        """Stop checking: the script marks where its iterations end."""
        self._captured, self._active = None, False

    def check(self, draft: RecordDraft) -> None:
        """Have `say` warn if, as the next forward begins, something has changed since the capture.

        Options are compared in each iteration, because a script may change them at any time.
        """
        if not self._active:
            return
        captured, self._captured = self._captured, None
        names = []
        if self._options.of(self._watched.optimizer.param_groups) != list(draft.end.next_options):
            names.append("an option of the optimizer")
        if captured is not None:
            self._checks_left -= 1
            now = self._now()
            names += [name for name, value in captured.items() if not same(value, now.get(name))]
        self._warning = (draft.iteration, _enumerated(names)) if names else None

    def say(self) -> None:
        """Warn, now that the iteration is known to have ended there."""
        warning, self._warning = self._warning, None
        if warning is not None and self._active:
            self._active = False
            _log.warning(
                "iteration %d: %s changed between the optimizer's or scheduler's step, when it was "
                "captured, and the next forward. If that change belongs to the iteration, a resumed run "
                "lacks it. Mark the end of iterations with `for batch in protection.steps(loader)`, or with "
                "protection.mark() as the last statement of the loop (`checkmate docs training`)",
                *warning,
            )

    def _now(self) -> dict[str, Any]:
        watched = self._watched
        return {
            "extra()": None if watched.extra is None else watched.extra(),
            "the scheduler": None if watched.scheduler is None else watched.scheduler.state_dict(),
            "the scaler": None if watched.scaler is None else watched.scaler.state_dict(),
            **self._samples(),
        }

    def _samples(self) -> dict[str, torch.Tensor]:
        watched = self._watched
        samples = {name: _sample(tensor) for name, tensor in watched.model.kept_beside().items()}
        if watched.copied is not None:  # else the checks of steps see it
            samples["a parameter"] = torch.cat(
                [_sample(p).view(torch.uint8) for p in watched.copied.parameters]
            )
        return samples


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Copy some elements of a tensor to the CPU."""
    flat = local_of(tensor).detach().resolve_conj().reshape(-1)
    return flat[:: max(flat.numel() // SAMPLED, 1)].to("cpu", copy=True).contiguous()


def same(first: Any, second: Any) -> bool:
    """Return whether two plain states (see `checkmate.state.dumps`) are equal, tensors bit for bit."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        first_tensor, second_tensor = (x.detach().cpu().resolve_conj().contiguous() for x in (first, second))
        return bytes_of(first_tensor) == bytes_of(second_tensor)
    if isinstance(first, np.ndarray | np.generic):
        alike = first.dtype == second.dtype and first.shape == second.shape
        return bool(alike and first.tobytes() == second.tobytes())
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second or (first != first and second != second))  # noqa: PLR0124 - not a number


def _enumerated(names: list[str], most: int = 3) -> str:
    words = ", ".join(names[:most])
    return words if len(names) <= most else f"{words} and {len(names) - most} more"


def several_backwards(iteration: int, count: int) -> RefusedError:
    """Return the refusal of a turn with several backwards, of which `iteration` is not the last."""
    return RefusedError(
        f"iteration {iteration} ended without a mark, because one turn of the loop has {count} or more "
        "synchronising backwards, or a `continue` passes over protection.mark(). `restore` returns a number "
        "of such backwards, so a resumed loop would leave turns out. Give each turn one of them: accumulate "
        "with ddp.no_sync() (FSDP: set_requires_gradient_sync(False)), and let methods with several steps, "
        "such as GANs, take one step a turn, for turn in protection.steps(...) (`checkmate docs training`)"
    )


def warn_of_missed_mark(iteration: int) -> None:
    """Warn of an iteration that has ended without a mark: its state is that at the next forward."""
    _log.warning(
        "iteration %d ended without protection.mark(), which others had: a run resumed here may differ. "
        "Call it at the end of every iteration, or use protection.steps(loader) in the loop over batches",
        iteration,
    )
