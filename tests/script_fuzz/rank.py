"""A rank of a case, in a process of its own. It writes what happens to a file, line by line."""

from __future__ import annotations

import atexit
import datetime
import json
import logging
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist

from checkmate.errors import CheckmateError
from checkmate.ring.place import RingError
from tests.script_fuzz.children import prepare_child
from tests.script_fuzz.plan import Kill, ScriptPlan
from tests.script_fuzz.reducer import reducer_over
from tests.script_fuzz.script import Script

GLOO_SECONDS: Final = 20.0


@dataclass(frozen=True)
class RankOrders:
    """What a process does: a rank's start number `attempt`, without Checkmate if there is no `job`."""

    plan: ScriptPlan
    rank: int
    folder: str
    attempt: int = 0
    job: str = ""
    kill: Kill | None = None

    @property
    def name(self) -> str:
        """The name of its files."""
        return f"rank{self.rank}-{self.attempt if self.job else 'plain'}"


def run_rank(orders: RankOrders) -> None:
    """Run a rank to its end, as the interpreter runs a script."""
    folder = Path(orders.folder)
    prepare_child(str(folder / f"{orders.name}.out"))
    events = os.open(folder / f"{orders.name}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def say(event: str, **more: Any) -> None:
        line = {"event": event, "rank": orders.rank, "time": time.monotonic(), **more}
        os.write(events, json.dumps(line).encode() + b"\n")

    say("started")
    code = 0
    try:
        _run(orders, say)
    except BaseException as error:  # noqa: BLE001 - reported
        sys.last_value = error
        traceback.print_exc()
        kinds = {"RingError": RingError, "CheckmateError": CheckmateError}
        kind = next((name for name, kind in kinds.items() if isinstance(error, kind)), "other")
        say("failed", kind=kind, error=f"{type(error).__name__}: {error}")
        code = 1
    atexit._run_exitfuncs()
    say("ended", code=code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(orders: RankOrders, say: Any) -> None:
    torch.set_num_threads(1)
    store = Path(orders.folder, f"store-{orders.attempt if orders.job else 'plain'}")
    timeout = datetime.timedelta(seconds=GLOO_SECONDS)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=orders.rank, world_size=2, timeout=timeout
    )
    dist.barrier()  # so that no rank disconnects from one that still connects
    script = Script(orders.plan, orders.rank, say)
    if not orders.job:
        script.run_plain()
        return
    log = logging.getLogger("checkmate")
    log.setLevel(logging.INFO)
    log.addHandler(_WarningHandler(say))
    if orders.plan.copies == "switch":
        replaced = reducer_over(str(Path(orders.folder, "switch")))
        mock.patch("checkmate.training.gradients.setup.make_reducer", replaced).start()
    os.environ["CHECKMATE_JOB"] = orders.job
    script.run_protected(orders.attempt, orders.kill)


class _WarningHandler(logging.Handler):
    """A handler that notes what Checkmate logs."""

    def __init__(self, say: Any) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Note a line."""
        self._say("logged", level=record.levelname, text=record.getMessage())
