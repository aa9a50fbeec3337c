"""The errors of training scripts that Checkmate can't follow."""

from __future__ import annotations

from checkmate.errors import CheckmateError


class RefusedError(CheckmateError, RuntimeError):
    """A script does something that shadow nodes can't repeat. The message suggests an alternative."""

    iteration: int | None = None
    """The iteration in which it did, if that is not the present one."""


class SessionError(CheckmateError, RuntimeError):
    """Job, environment and process groups contradict one another. The message suggests a remedy."""


class RegroupError(CheckmateError, RuntimeError):
    """An iteration has ended, and ranks that were away wait to take part in the next one.

    `checkmate.resilient` calls the training function again for it, with all of them.
    """
