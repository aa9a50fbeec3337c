"""A rank of a scenario's job: `python -m tests.chaos.script ORDERS.json`, with torchrun's environment.

It writes rank{r}.jsonl: begin and end, and each iteration's loss with a digest of all state. Jobs that
recover in place call `ChaosRank.run` again after another rank's death.
With `reference`, it trains over the same ring without tags, on loopback, without any other part of Checkmate.
"""

from __future__ import annotations

import datetime
import faulthandler
import itertools
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import checkmate
from tests.chaos.model import INPUTS, ROWS, RandomNet, make_optimizer, make_scheduler
from tests.chaos.scenario import Scenario
from tests.chaos.wrapped import synchronising, wrap
from topologies.training.unprotected import Unprotected, Untagged
from topologies.training.verdict import digest

TIMEOUT = 12.0
_MEETING, _PATIENCE, _ATTEMPTS = 90.0, 20.0, 8
ANEW = 3
"""Exit status of a rank that cannot resume: it has to be started with `fresh`."""


class ChaosRank:
    """One rank, from its start to its end."""

    def __init__(self, scenario: Scenario, orders: Mapping[str, Any]) -> None:
        self.scenario, self.orders, self.training = scenario, orders, scenario.model
        self.rank, self.attempt = int(os.environ["RANK"]), int(orders["attempt"])
        self.folder = Path(orders["folder"])
        self.stop = Path(orders["stop"])
        self.reference = bool(orders["reference"])
        self.in_place = scenario.network.in_place and not self.reference
        calls = self._calls()
        is_first = bool(orders["fresh"]) and self.attempt not in calls
        begins = 0 if is_first else 1 + len(calls)  # restored state always differs from initial state
        self.has_initial_state = not begins
        torch.manual_seed(scenario.seed + 1000 * begins)
        self.model = RandomNet(self.training)
        self.wrapped: Any = self.model
        if scenario.network.sharded:  # it replaces parameters, and so comes before the optimizer
            self.wrapped = wrap(self.model, scenario)
        self.optimizer = make_optimizer(self.model, self.training)
        self.scheduler = make_scheduler(self.optimizer, self.training)
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
            if self.training.has("scaler")
            else None
        )
        averaging: Any = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
        if self.training.has("ema"):  # FSDP2's models can't be copied
            self.ema = AveragedModel(self.model, multi_avg_fn=averaging)
        self.best = 0.0
        self.loader = StatefulDataLoader(_Rows(scenario.seed), batch_size=ROWS, shuffle=True)
        self._rows = torch.zeros(ROWS, INPUTS)
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(100 * (scenario.seed + 1) % 2**31 + self.rank + 7 * begins)

    def run(self) -> None:
        """Restore, protect, and train to the end or to a clean stop."""
        self.say("called", start=self.orders["attempt"], pid=os.getpid())
        if self.in_place:  # the ranks' numbers differ, if one is a new process
            agreed = torch.tensor([len(self._calls()) if self.rank == 0 else 0, not self.has_initial_state])
            dist.all_reduce(agreed, dist.ReduceOp.MAX)
            self.attempt, self.has_initial_state = int(agreed[0]) - 1, not agreed[1]
        if not self.scenario.network.sharded:
            self.wrapped = wrap(self.model, self.scenario)
        first, protection = self._begin()
        self.say("protected")
        iteration = first - 1
        for iteration in self._loop(first, protection):
            loss = self.iterate(iteration)
            self.after_step(iteration)
            self.say("iteration", iteration=iteration, loss=repr(loss), digest=self.digest())
            if self.training.boundary == "mark":
                protection.mark()
            if self.once("error", iteration):
                raise ArithmeticError("as ordered")
            if self.once("close", iteration):
                break
            if not self.reference:
                time.sleep(self.training.pause)
        began = time.monotonic()
        protection.close()
        is_last = iteration + 1 >= self.training.iterations or not self._goes_on(iteration + 1)
        self.say("ended" if is_last else "closed", iteration=iteration, seconds=time.monotonic() - began)

    def _loop(self, first: int, protection: Any) -> Iterator[int]:
        """Yield iterations from a range, or epoch by epoch from a loader."""
        iteration, end = first, self.training.iterations
        if not self.training.has("loader"):
            loop = itertools.takewhile(self._goes_on, range(first, end))
            yield from protection.steps(loop) if self.training.boundary == "steps" else loop
            return
        while iteration < end:
            for rows in protection.steps(self.loader):
                self._rows = rows
                if iteration == end:
                    return
                yield iteration
                iteration += 1

    def _goes_on(self, iteration: int) -> bool:
        """Return whether training has not been told to end before this iteration."""
        try:
            return iteration < int(self.stop.read_text())
        except FileNotFoundError:
            return True

    def _begin(self) -> tuple[int, Any]:
        if self.reference:
            if self.scenario.network.copies == "host":  # then PyTorch reduces, protected or not
                return 0, Unprotected()
            return 0, Untagged(self.wrapped, loopback=True)
        parts = {"scheduler": self.scheduler, "scaler": self.scaler}
        if self.orders["checkpoints"]:
            os.environ["CHECKMATE_CHECKPOINTS"] = self.orders["checkpoints"]
        first, extra = 0, None
        if self.in_place or not self.orders["fresh"]:
            try:
                first, extra = checkmate.restore(self.wrapped, self.optimizer, **parts, timeout=TIMEOUT)
            except checkmate.RestoreError as error:
                self.say("unrestorable", why=str(error))
                raise
        if extra is not None:
            self.best = extra["best"]
            if "ema" in extra:
                self.ema.load_state_dict(extra["ema"])
            if "loader" in extra:
                self.loader.load_state_dict(extra["loader"])
        self.say("resumed", iteration=first, digest=self.digest() if first else "")
        if first == 0 and not self.has_initial_state:
            self.say("unresumable")
            sys.exit(ANEW)
        return first, checkmate.protect(self.wrapped, self.optimizer, **parts, extra=self.extra, wait=20.0)

    def iterate(self, iteration: int) -> float:
        """Train one iteration up to the optimizer's step and its related work; return its loss."""
        orders, total = self.training, 0.0
        sometimes = orders.has("sometimes") and iteration % 3 == 1
        for micro in range(orders.accumulate):
            with synchronising(self.wrapped, micro == orders.accumulate - 1):
                x = self._rows + torch.randn(ROWS, INPUTS)
                x[0, 1] += random.random() + float(np.random.rand())
                with torch.autocast("cpu", torch.bfloat16, enabled=orders.has("autocast")):
                    loss = ((self.wrapped(x, sometimes=sometimes) - x.sum(1) * 0.1) ** 2).mean()
                if iteration in orders.infinite:
                    loss = loss * float("inf")
                total += float(loss.detach())
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self._step(total)
        return total

    def _step(self, loss: float) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.training.clip:
            norm = self.training.clip_norm
            checkmate.clip_grad_norm_(self.wrapped.parameters(), self.training.clip, norm_type=norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.training.schedule == "plateau":
            self.scheduler.step(self._mean(loss))
        elif self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()

    def _mean(self, loss: float) -> float:
        """Return the mean over all ranks, because schedulers must agree."""
        mean = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(mean)
        return float(mean) / dist.get_world_size()

    def after_step(self, iteration: int) -> None:
        """Do work that belongs to the iteration only if the loop marks its boundary."""
        if self.training.has("ema"):
            self.ema.update_parameters(self.model)
        if self.training.has("validation"):
            self.best = max(self.best, float(torch.rand(())), random.random(), float(np.random.rand()))

    def extra(self) -> dict[str, Any]:
        """Return the extra state for `protect`."""
        ema = {"ema": self.ema.state_dict()} if self.training.has("ema") and self.rank == 0 else {}
        loader = {"loader": self.loader.state_dict()} if self.training.has("loader") else {}
        return {"best": self.best, **ema, **loader}

    def digest(self) -> str:
        """Return a digest of all state, with mappings in order of their keys."""
        state = {
            "model": self.model.state_dict(),
            "parameters": dict(self.model.named_parameters()),
            "buffers": dict(self.model.named_buffers()),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler and self.scheduler.state_dict(),
            "scaler": self.scaler and self.scaler.state_dict(),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": [str(part) for part in np.random.get_state()],
            "extra": self.extra(),
        }
        return " ".join(f"{name}={digest(_sorted(part)).hex()[:12]}" for name, part in state.items())

    def once(self, kind: str, iteration: int) -> bool:
        """Return whether an event of this kind is due here now; it returns true once."""
        for number, event in enumerate(self.scenario.events):
            if event.kind == kind and event.at == iteration and event.who in ("job", f"rank{self.rank}"):
                mark = self.folder / f"rank{self.rank}.event{number}"
                if not mark.exists() and not self.reference:
                    mark.touch()
                    return True
        return False

    def _calls(self) -> list[int]:
        """Return the starts of the job in which this rank has been called, one for each call."""
        try:
            text = self._log.read_text()
        except FileNotFoundError:
            return []
        lines = [json.loads(line) for line in text.splitlines()]
        return [int(line["start"]) for line in lines if line["event"] == "called"]

    @property
    def _log(self) -> Path:
        return self.folder / f"rank{self.rank}.jsonl"

    def say(self, event: str, **more: Any) -> None:
        """Write a line to this rank's log."""
        entry = {"event": event, "attempt": self.attempt, "at": time.monotonic(), **more}
        with self._log.open("a") as log:
            print(json.dumps(entry), file=log)


class _Rows(Dataset[torch.Tensor]):
    """A dataset so small that an epoch ends every six batches."""

    def __init__(self, seed: int) -> None:
        self._rows = torch.randn(6 * ROWS, INPUTS, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index]


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value, key=repr)}
    return [_sorted(element) for element in value] if isinstance(value, list | tuple) else value


def main() -> None:
    """Train according to the orders. SIGUSR1 has all threads' stacks written to the log."""
    faulthandler.register(signal.SIGUSR1)
    orders = json.loads(Path(sys.argv[1]).read_text())
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    scenario = Scenario.from_json(orders["scenario"])
    if scenario.network.in_place and not orders["reference"]:
        _recover_in_place(scenario, orders)
        return
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    try:
        ChaosRank(scenario, orders).run()
    finally:
        dist.destroy_process_group()


def _recover_in_place(scenario: Scenario, orders: Mapping[str, Any]) -> None:
    """Train, again after each death of another rank. Only a model that FSDP2 shards is made again."""
    ranks = [] if scenario.network.sharded else [ChaosRank(scenario, orders)]

    def train() -> None:
        (ranks[0] if ranks else ChaosRank(scenario, orders)).run()

    keep = scenario.network.keeping
    checkmate.resilient(train, timeout=60, wait=_MEETING, patience=_PATIENCE, attempts=_ATTEMPTS, keep=keep)


if __name__ == "__main__":
    main()
