"""Extras of the package: the libraries of each role beyond the core, and the message if one is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import Final

_TENSORS: Final = frozenset({"google", "grpc", "numpy", "torch", "xxhash"})
_SWITCH: Final = frozenset({"finsy", "google", "grpc", "numpy"})
_PLAN: Final = frozenset({"matplotlib", "numpy"})
_METRICS: Final = frozenset({"prometheus_client"})
_SHADOW: Final = _TENSORS | {"grpc_health", "pyroute2"}
LIBRARIES: Final[Mapping[str, frozenset[str]]] = {
    "trainer": _TENSORS,
    "shadow": _SHADOW,
    "switch": _SWITCH,
    "plan": _PLAN,
    "metrics": _METRICS,
    "demo": _SHADOW | _SWITCH | _PLAN | _METRICS | {"thriftpy2"},
}
"""The modules that each extra of setup.cfg brings."""
_OF_COMMAND: Final[Mapping[str, tuple[str, ...]]] = {
    "run": ("switch", "metrics"),
    "status": ("switch",),
    "remove": ("switch",),
    "cost": ("plan",),
    "lab": ("demo",),
    "nccl": ("trainer",),
}
_OF_OTHERS: Final = ("shadow", "plan", "switch", "metrics", "demo")


class ExtraMissing(ImportError):
    """A library of an extra is not installed; the message has the command that installs it."""

    exit_code = 2

    def __init__(self, user: str, library: str, extra: str) -> None:
        self.remedy: Final = f"pip install 'checkmate-training[{extra}]'"
        super().__init__(f"{user} needs {library}, which is not installed; install it with: {self.remedy}")


@contextmanager
def needs(user: str, *extras: str) -> Iterator[None]:
    """Raise `ExtraMissing` for an import that fails because the first extra with that module is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        for extra in extras:
            if library in LIBRARIES[extra]:
                raise ExtraMissing(user, library, extra) from None
        raise


def needs_of(command: str) -> AbstractContextManager[None]:
    """Do as `needs`, for the extras of a command of `checkmate`."""
    return needs(f"`checkmate {command}`", *_OF_COMMAND.get(command, _OF_OTHERS))


def check(user: str, extra: str) -> None:
    """Raise `ExtraMissing` if a library of an extra is not installed. Import none."""
    for library in sorted(LIBRARIES[extra]):
        if find_spec(library) is None:
            raise ExtraMissing(user, library, extra)
