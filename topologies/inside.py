"""A command in a node's namespace, in place of this process: Ctrl-C and the exit status are its own."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from checkmate.base.wording import did_you_mean
from topologies.describe.topology import BadDescription, LabError
from topologies.kernel.namespaces import entered
from topologies.lab import Lab


class NoCommand(LabError):
    """A command that does not exist; the exit code is that of shells."""

    exit_code = 127


def check_node(lab: Lab, node: str) -> str:
    """Return a node's name; raise `BadDescription`, with the lab's nodes, if the lab has no such node."""
    nodes = lab.topology.nodes
    if node not in nodes:
        hint = did_you_mean(node, nodes)
        raise BadDescription(f"lab {lab.name} has no node {node!r} (its nodes are {', '.join(nodes)}){hint}")
    return node


def become(lab: Lab, node: str, argv: Sequence[str]) -> NoReturn:
    """Replace this process by a command in a node's namespace and cgroup.

    Raises:
        BadDescription: The lab has no such node.
        LabError: The command cannot be executed.
    """
    namespace, environment = lab.namespace(check_node(lab, node)), lab.environment(node)
    program = shutil.which(argv[0], path=environment["PATH"])
    if program is None:
        raise NoCommand(f"{argv[0]!r} is neither an executable file nor a command on PATH")
    if (cgroup := lab.cgroup(node)) is not None:
        Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, which a program would inherit
    try:
        with entered(namespace):
            os.execve(program, list(argv), environment)
    except OSError as error:
        raise LabError(f"{program} cannot be executed: {error.strerror}") from None
