"""What a training script is told that asks for what can't be."""

from __future__ import annotations


class RefusedError(RuntimeError):
    """A training script does what shadow nodes can't repeat: the message says what to do instead."""
