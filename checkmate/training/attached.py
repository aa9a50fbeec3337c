"""What Checkmate keeps at a script's own objects: found from them, and gone with them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final, TypeVar

_NAME: Final = "_checkmate"


class AttachedData:
    """Base of what is kept. A copy or a pickle of its owner lacks it."""

    def __reduce__(self) -> tuple[Any, ...]:
        """An empty dict stands in its place, which `torch.load` reads with `weights_only` too."""
        return (OrderedDict, ())


Kept = TypeVar("Kept", bound=AttachedData)


def attach(owner: object, kept: AttachedData) -> None:
    """Keep this at an object, in place of what was kept there."""
    setattr(owner, _NAME, kept)


def attached(owner: object, kind: type[Kept]) -> Kept | None:
    """What of this kind is kept at an object."""
    found = getattr(owner, _NAME, None)
    return found if isinstance(found, kind) else None


def detach(owner: object, kept: AttachedData) -> None:
    """Take `attach` back, unless something else is kept there by now."""
    if getattr(owner, _NAME, None) is kept:
        delattr(owner, _NAME)
