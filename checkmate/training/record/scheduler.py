"""Follows a learning rate scheduler: reports its class and its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from checkmate.training.errors import RefusedError


def class_of(scheduler: Any) -> str:
    """Return a name such as `StepLR` or `SequentialLR(LinearLR, StepLR)`; empty for `None`."""
    if scheduler is None:
        return ""
    within = ", ".join(class_of(one) for one in getattr(scheduler, "_schedulers", ()))
    return f"{type(scheduler).__name__}({within})" if within else type(scheduler).__name__


class SchedulerWatch:
    """Gives one scheduler a subclass whose `step` calls `on_step`, because schedulers do not have hooks.

    An attribute `step` would appear in the scheduler's `state_dict()`.
    """

    def __init__(self, scheduler: Any, on_step: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._kind = type(scheduler)
        kind: Any = self._kind

        def step(itself: Any, *arguments: Any, **keywords: Any) -> Any:
            result = kind.step(itself, *arguments, **keywords)
            if itself is scheduler:
                on_step()
            return result

        def reduce(itself: Any, protocol: Any) -> Any:
            """Give copies and pickles the original class."""
            _, _, *rest = kind.__reduce_ex__(itself, protocol)
            return object.__new__, (kind,), *rest

        alike = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
        followed = type(kind.__name__, (kind,), {**alike, "step": step, "__reduce_ex__": reduce})
        try:
            scheduler.__class__ = followed
        except TypeError as error:  # it has slots, or is implemented in C
            raise RefusedError(f"scheduler= is a {kind.__name__}, which can't be followed: {error}") from None

    def remove(self) -> None:
        """Restore the scheduler's own class."""
        self._scheduler.__class__ = self._kind
