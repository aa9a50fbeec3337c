"""Follows a learning rate scheduler: says what it is, and when it has stepped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from checkmate.training.errors import RefusedError


def class_of(scheduler: Any) -> str:
    """`StepLR`, or `SequentialLR(LinearLR, StepLR)`; empty of none."""
    if scheduler is None:
        return ""
    within = ", ".join(class_of(one) for one in getattr(scheduler, "_schedulers", ()))
    return f"{type(scheduler).__name__}({within})" if within else type(scheduler).__name__


class SchedulerWatch:
    """Gives one scheduler a class of its own, whose `step` is noted; it has no hooks of its own.

    An attribute `step` would do, but schedulers put all their attributes into their `state_dict()`.
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
            """A copy or a pickle is of the original class."""
            _, _, *rest = kind.__reduce_ex__(itself, protocol)
            return object.__new__, (kind,), *rest

        alike = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
        told = type(kind.__name__, (kind,), {**alike, "step": step, "__reduce_ex__": reduce})
        try:
            scheduler.__class__ = told
        except TypeError as error:  # it has slots, or is no Python object
            raise RefusedError(f"scheduler= is a {kind.__name__}, which can't be followed: {error}") from None

    def remove(self) -> None:
        """Give the scheduler its own class back."""
        self._scheduler.__class__ = self._kind
