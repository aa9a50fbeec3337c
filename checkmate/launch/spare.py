"""A warm spare: a process with a script's imports, from which a rank is forked that needs none of its own.

`python -m checkmate.launch.spare DESCRIPTOR SCRIPT` imports what the script imports, and then waits on a
socket for environments. For each it forks a process that runs the script, and answers with
its number. It holds neither threads nor a GPU's context, which a fork would not survive.
"""

from __future__ import annotations

import ast
import ctypes
import gc
import json
import os
import random
import runpy
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module, util
from pathlib import Path
from typing import Any, Final, NoReturn

from checkmate.launch.word import PIPE_VARIABLE

ALWAYS: Final = ("checkmate.training.in_place.resilient", "torch.distributed", "torch.optim", "numpy")
"""What each script needs that uses `checkmate.resilient`."""
_WITH: Final = {"torch.distributed.fsdp": ("checkmate.training.model.fsdp",)}
_PR_SET_PDEATHSIG: Final = 1
MESSAGE_BYTES: Final = 1 << 20
"""Of an environment."""


def main() -> None:
    """Import, and fork a process for each request, until the launcher ends."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    script = sys.argv[2:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends it
    die_with_parent()
    sys.path[0] = os.getcwd() if script[0] == "-m" else str(Path(script[0]).resolve().parent)
    for name in [*ALWAYS, *imports_of(source_of(script))]:
        with suppress(Exception):  # the script itself reports what it can't import
            import_module(name)
    trouble = _trouble()
    connection.send(json.dumps({"trouble": trouble}).encode())
    if trouble:
        return
    gc.collect()
    gc.freeze()  # else a child's first collection would copy all pages
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 1)
        if not data:
            return
        _fork(connection, json.loads(data), descriptors[0], script)
        os.close(descriptors[0])


def _trouble() -> str:
    """Return why no process can be forked from this one, or ""."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"an import of the script has started {threads - 1} threads"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "an import of the script has initialised CUDA"
    return ""


def _fork(
    connection: socket.socket, environment: Mapping[str, str], pipe: int, script: Sequence[str]
) -> None:
    """Fork a rank, which becomes the launcher's child: an orphan's parent is the next one that adopts."""
    launcher = os.getppid()
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return
    if os.fork():
        os._exit(0)
    while (parent := os.getppid()) != launcher:
        if parent == 1:  # the launcher has ended
            os._exit(1)
    die_with_parent()
    connection.send(json.dumps({"pid": os.getpid()}).encode())
    connection.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment, **{PIPE_VARIABLE: str(pipe)})
    random.seed()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    run(script)


def run(script: Sequence[str]) -> NoReturn:
    """Run a script in this process as `python` would, and end the process with its status."""
    status = 0
    try:
        if script[0] == "-m":
            sys.argv = list(script[1:])
            runpy.run_module(script[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(script)
            runpy.run_path(script[0], run_name="__main__")
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as the interpreter does at its end
        sys.excepthook(*sys.exc_info())
        sys.last_value = sys.exc_info()[1]  # which a protection looks at, at exit
        status = 1
    sys.exit(status)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent's thread ends (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def source_of(script: Sequence[str]) -> str:
    """Return the text of a script, or "" if it can't be read."""
    path: str | None = script[0]
    with suppress(Exception):
        if path == "-m":
            spec = util.find_spec(script[1])
            path = spec.origin if spec is not None else None
        return Path(path).read_text() if path else ""
    return ""


def imports_of(source: str) -> Iterator[str]:
    """Yield the modules that a script imports, also within functions."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # of which the script itself tells
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from _WITH.get(node.module, ())


if __name__ == "__main__":
    main()
