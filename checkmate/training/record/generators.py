"""A rank's random generators, and batches fetched ahead, which a resumed run must not draw again."""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from checkmate import state
from checkmate.state import bytes_of
from checkmate.training.record.sites import script_frames

_log: Final = logging.getLogger("checkmate")

MAX_CHECKS: Final = 4
"""The number of iterations checked. Each check copies the state and waits for a CUDA device."""

LEFT_OUT: Final = (
    "a batch that the run had fetched ahead is left out, or random numbers differ from those of a run "
    "without a restart: give such a batch to checkmate.protect by extra=, take it from checkmate.restore, "
    "and make iterators before that (`checkmate docs training`)"
)


def capture_generators() -> dict[str, Any]:
    """Return the states of the generators of torch, the CUDA device, Python and NumPy."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
    }


def install_generators(state: dict[str, Any]) -> None:
    """Set all generators to a state from `capture_generators`, as `state.load_generators` returns it."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(np.frombuffer(words, dtype=np.uint32).tolist()), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))


class DrawWatch:
    """Notices a batch fetched ahead, by random generators, which a resumed run draws again.

    If they don't move between an iteration's end and the next forward, they must not move between `restore`
    and the first forward either. Within a loop of `Loop.steps` they may, because it sets them again.
    """

    def __init__(self, resumed: Mapping[str, Any] | None, *, first: bool) -> None:
        is_still = bool(resumed and resumed.get("still") and not resumed.get("in_loop"))
        self._resumed = resumed if is_still else None
        self._checks_left = MAX_CHECKS
        self._first = first
        self.still = is_still
        """Whether they don't move there, as far as is known."""

    def look(self, end: Mapping[str, Any] | None) -> None:
        """Compare generators as a forward in training begins.

        `end`: at the end of the iteration before it; `None` before the first one, or if that is unknown.
        """
        resumed, self._resumed = self._resumed, None
        if end is None:
            if resumed is not None and self._first and _have_moved(resumed):
                _log.warning(
                    "random generators moved between checkmate.restore and the first forward, but did not "
                    f"between the iterations that were looked at (at most {MAX_CHECKS}). Unless an epoch or "
                    "an evaluation begins here, " + LEFT_OUT
                )
        elif self._checks_left:
            self._checks_left -= 1
            has_moved = _have_moved(end)
            self.still = not has_moved and (self.still or not self._checks_left)
            if has_moved:
                self._checks_left = 0


def _have_moved(before: Mapping[str, Any]) -> bool:
    now = capture_generators()
    names = [name for name in now if now[name] is not None and before.get(name) is not None]
    before_bytes, now_bytes = (
        state.dump_generators({name: of[name] for name in names}) for of in (before, now)
    )
    return before_bytes != now_bytes


MAX_ITEMS, MAX_DEPTH = 16, 4
"""A larger container of tensors is a data set rather than a batch; a deeper one may contain itself."""


class RestoredTensors:
    """The tensors of a restored `extra`, as long as the script has them."""

    def __init__(self, extra: Any) -> None:
        self._kinds = [((tensor.shape, tensor.dtype), weakref.ref(tensor)) for tensor in _tensors(extra)]

    def may_have(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is among them, or a copy of one, as far as can be known."""
        alike = [reference() for kind, reference in self._kinds if kind == (tensor.shape, tensor.dtype)]
        return any(
            original is None or bytes_of(_plain(original)) == bytes_of(_plain(tensor)) for original in alike
        )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


class FirstBatch:
    """Notices that a resumed run begins with a batch that was drawn before `protect`, and not restored.

    Such a batch was named by the script then, and the next one is drawn later. A tensor that is in both
    forwards is not a batch, and a forward without a backward does not count: it warms the model up.
    """

    def __init__(self, model: nn.Module, restored: RestoredTensors, iteration: Callable[[], int]) -> None:
        """Look at the script's names, and at the first two forwards of `model` that train.

        `iteration`: returns how many synchronising backwards there were.
        """
        self._restored = restored
        self._parameters = list(model.parameters())
        self._iteration = iteration
        self._first_in = -1
        # Not their local names: reading these would keep what they name until the function returns.
        scopes = {id(frame.f_globals): frame.f_globals for frame in script_frames()}.values()
        values = [value for names in scopes for value in list(names.values())]
        self._early_tensors = {id(tensor): weakref.ref(tensor) for tensor in _tensors(values)}
        self._begins_with_named: bool | None = None
        self._hook = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def remove(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    def _before_forward(self, module: nn.Module, arguments: Any, keywords: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        tensors = list(_tensors([arguments, keywords]))
        early = [
            tensor
            for tensor in tensors
            if id(tensor) in self._early_tensors and self._early_tensors[id(tensor)]() is tensor
        ]
        if self._begins_with_named is None or self._without_backward():
            self._begins_with_named = bool(early) and not any(map(self._restored.may_have, early))
            self._first_in = self._iteration()
            return
        self.remove()
        if self._begins_with_named and not early:
            _log.warning(
                "the first batch was drawn before checkmate.protect, and not restored by extra(): " + LEFT_OUT
            )

    def _without_backward(self) -> bool:
        return self._iteration() == self._first_in and all(
            parameter.grad is None for parameter in self._parameters
        )


def _tensors(value: Any, depth: int = MAX_DEPTH) -> Iterator[torch.Tensor]:
    """Yield the plain tensors in a value: to compare a DTensor takes all ranks.

    Other containers than these may read files, or fail.
    """
    if type(value) is torch.Tensor:
        if value.layout is torch.strided:
            yield value
    elif depth and type(value) in (dict, list, tuple):
        for item in list(value.values() if type(value) is dict else value):
            if type(item) not in (dict, list, tuple) or len(item) <= MAX_ITEMS:
                yield from _tensors(item, depth - 1)
