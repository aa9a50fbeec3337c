"""A rank that runs the unmodified recipes of docs/training.md: undisturbed, killed, and resumed.

`python -m tests.scripts.recipes FOLDER TITLE ...`, with torchrun's environment. For each recipe it writes
{recipe}.{phase}.rank{r}.pt: the first iteration, each forward's output, and the final state.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

import checkmate
from checkmate.keys.access import access
from checkmate.keys.roles import Role
from checkmate.nodes import reset
from checkmate.nodes.stubs import Stubs
from checkmate.training.start.named_job import named_job

GUIDE: Final = Path(__file__).parents[2] / "docs" / "training.md"
PHASES: Final = ("undisturbed", "killed", "resumed")
EPOCHS, BATCHES, SIZE = 2, 5, 4
ITERATIONS: Final = EPOCHS * BATCHES
KILLED_AFTER: Final = 8
"""Number of steps, in the middle of an iteration's work."""
_SECONDS: Final = 90.0


def recipes() -> dict[str, str]:
    """Return the guide's recipes by title: the code below its headings of the third level."""
    sections = re.findall(
        r"^### ([^\n]+)\n(?:(?!^#).)*?^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S
    )
    return dict(sections)


class Undisturbed:
    """Replacement of `checkmate`: the same loop without it."""

    Batches = checkmate.Batches

    def restore(self, *_: object, **__: object) -> checkmate.Restored:
        """Return nothing to restore."""
        return checkmate.Restored(0)

    def protect(self, *_: object, **__: object) -> Undisturbed:
        """Return the loop itself."""
        return self

    def steps(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches."""
        return iter(batches)

    def mark(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def discard_all() -> None:
    """Have the nodes discard what they hold of the recipe before. All ranks call it."""
    if dist.get_rank() == 0:
        job = named_job()
        with Stubs(job, access(job, Role.TRAINER).keys) as stubs:
            statuses = stubs.statuses().values()
            while any(isinstance(status, str) or status.trainers for status in statuses):
                time.sleep(0.05)  # connections of the phase before
                statuses = stubs.statuses().values()
            if not all(getattr(status, "holds_nothing", False) for status in statuses):
                reset.discard(job, stubs, reset.ask(job, stubs))
    dist.barrier()


def recipe_names(code: str, phase: str, forwards: list[float], starts: list[int]) -> dict[str, Any]:
    """Return a recipe's names: model, optimizer and data, which differ between phases until restored."""
    torch.manual_seed({"undisturbed": 1, "killed": 1, "resumed": 77}[phase])
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))
    ddp = DistributedDataParallel(model)
    ddp.register_forward_hook(lambda *a: forwards.append(a[2].sum().item()))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.02)
    if phase == "killed":
        steps = itertools.count(1)
        register_optimizer_step_post_hook(
            lambda *_: os.kill(os.getpid(), signal.SIGKILL) if next(steps) == KILLED_AFTER else None
        )
    here: Any = Undisturbed()
    if phase != "undisturbed":

        def restore(*arguments: Any, **options: Any) -> checkmate.Restored:
            if phase == "killed":
                discard_all()
            restored = checkmate.restore(*arguments, **options)
            starts.append(restored.iteration)
            return restored

        here = SimpleNamespace(restore=restore, protect=checkmate.protect, Batches=checkmate.Batches)
    scheduled = {"scheduler": StepLR(optimizer, 2, gamma=0.8)} if "scheduler" in code else {}
    rows = torch.Generator().manual_seed(5)
    torch.manual_seed((17 if phase != "resumed" else 78) + dist.get_rank())
    return {
        "checkmate": here,
        "torch": torch,
        "model": model,
        "ddp": ddp,
        "optimizer": optimizer,
        **scheduled,
        "batch": lambda: torch.randn(SIZE, 8),
        "data": list(torch.randn(2 * BATCHES * SIZE, 8, generator=rows)),
        "epochs": EPOCHS,
        "iterations": ITERATIONS,
    }


def run(title: str, code: str, phase: str, folder: Path) -> None:
    """Run one phase of a recipe in a separate process."""
    forwards: list[float] = []
    starts: list[int] = []
    names = recipe_names(code, phase, forwards, starts)
    exec(compile(f"from __future__ import annotations\n{code}", title, "exec"), names)
    stateful_names = ("model", "ema", "optimizer", "scheduler")
    results = {
        "started": starts,
        "forwards": forwards,
        "state": {name: names[name].state_dict() for name in stateful_names if name in names},
        "optimizers": [optimizer.state_dict() for optimizer in names.get("optimizers", ())],
        "values": {name: names[name] for name in ("best", "epoch", "used") if name in names},
        "random": torch.rand(3),
    }
    torch.save(results, folder / f"{title}.{phase}.rank{dist.get_rank()}.pt")


def forked(title: str, code: str, phase: str, folder: Path, port: int) -> int:
    """Run a phase in a forked process, which needs no imports; return its exit status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    with contextlib.suppress(BaseException):
        try:
            signal.alarm(int(_SECONDS))
            os.environ["MASTER_PORT"] = str(port)
            dist.init_process_group("gloo")
            run(title, code, phase, folder)
            dist.destroy_process_group()
            status = 0
        except BaseException:  # noqa: BLE001 - for the test to show
            traceback.print_exc()
            sys.stderr.flush()
    os._exit(status)


def main() -> None:
    """Run the recipes in turn."""
    torch.set_num_threads(1)
    folder, port = Path(sys.argv[1]), int(os.environ["MASTER_PORT"])
    for title in sys.argv[2:]:
        code = recipes()[title]
        for phase in PHASES:
            port += 1
            status = forked(title, code, phase, folder, port)
            if status != (-signal.SIGKILL if phase == "killed" else 0):
                raise SystemExit(f"{title}, {phase}: {status}")


if __name__ == "__main__":
    main()
