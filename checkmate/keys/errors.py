"""Errors of keys."""

from __future__ import annotations

from checkmate.errors import CheckmateError


class KeysError(CheckmateError, RuntimeError):
    """Keys that can't be used or made; the message explains how to correct it."""

    exit_code = 2


class Malformed(ValueError):
    """Content that is not what its file should have: the end of a sentence that begins with the file."""
