"""Data that Checkmate attaches to a script's own objects, so that it shares their lifetime."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final, TypeVar

_NAME: Final = "_checkmate"


class AttachedData:
    """Base class of attached data. Copies and pickles of the owner do not carry it."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as an empty dict, which `torch.load` accepts with `weights_only` too."""
        return (OrderedDict, ())


Data = TypeVar("Data", bound=AttachedData)


def attach(owner: object, data: AttachedData) -> None:
    """Attach data to an object. It replaces what was attached before."""
    setattr(owner, _NAME, data)


def attached(owner: object, kind: type[Data]) -> Data | None:
    """Return the data of this kind that is attached to an object, if any."""
    data = getattr(owner, _NAME, None)
    return data if isinstance(data, kind) else None


def detach(owner: object, data: AttachedData) -> None:
    """Undo `attach`, unless something else has been attached since."""
    if getattr(owner, _NAME, None) is data:
        delattr(owner, _NAME)
