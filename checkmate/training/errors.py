"""The error for training scripts that Checkmate can't follow."""

from __future__ import annotations


class RefusedError(RuntimeError):
    """A script does something that shadow nodes can't repeat. The message suggests an alternative."""
