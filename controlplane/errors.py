"""Failures of a switch, each with the exit code of the command line."""

from __future__ import annotations


class ControlError(Exception):
    """A failure that is reported to the user in one message."""

    exit_code = 1


class TooMuch(ControlError):
    """A job needs more than its switches can hold; the exit code is that of invalid input."""

    exit_code = 2


class SwitchUnreachable(ControlError):
    """The switch's P4Runtime address does not answer, or the connection was lost."""

    exit_code = 3


class WrongPipeline(ControlError):
    """The switch runs another program, or refuses ours."""

    exit_code = 4


class AnotherPrimary(ControlError):
    """Another controller is the switch's primary."""

    exit_code = 5


class WriteRefused(ControlError):
    """The switch refused an update; the updates applied before it were undone."""

    exit_code = 6


class RefusalLost(WriteRefused):
    """The switch has refused a call, and gRPC has lost the reason; a second try may have it."""


class Unsure(WriteRefused):
    """A refusal that leaves the switch's entries unknown: they have to be read again."""
