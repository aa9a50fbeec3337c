"""Processes of a case: forked from a server that has imported what they need, and that end with it."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import threading
from typing import Final

PRELOADED: Final = (
    "torch",
    "torch.nn.parallel",
    "torch._dynamo",
    "torch.optim.swa_utils",
    "torch.nn.utils.parametrizations",
    "torch.utils.serialization.config",
    "encodings.idna",
    "checkmate.job.files",
    "checkmate.training.protect",
    "checkmate.shadow.process",
)


def prepare_child(log: str) -> None:
    """Have this process end with the one that runs cases, ignore Ctrl-C, and write its output to a file.

    SIGUSR1 writes the stacks of its threads there.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "CHECKMATE_INSECURE": "1"}


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
