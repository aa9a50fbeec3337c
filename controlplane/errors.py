"""What can go wrong with a switch, each with the exit code that the command line ends with."""

from __future__ import annotations


class ControlError(Exception):
    """A failure that the user is told of in one message."""

    exit_code = 1


class TooMuch(ControlError):
    """A job needs more than its switches hold: bad input, so the code of bad input."""

    exit_code = 2


class SwitchUnreachable(ControlError):
    """Nothing answers at the switch's P4Runtime address, or it went away."""

    exit_code = 3


class WrongPipeline(ControlError):
    """The switch runs another program, or refuses ours."""

    exit_code = 4


class AnotherPrimary(ControlError):
    """Another controller is the switch's primary."""

    exit_code = 5


class WriteRefused(ControlError):
    """The switch refused an update; what had been applied with it is undone."""

    exit_code = 6


class Unsure(WriteRefused):
    """A refusal after which it isn't known what the switch holds: it has to be read again."""
