"""A training script that does what its plan says: the same statements with Checkmate and without."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

import numpy as np
import torch

import checkmate
from tests.script_fuzz import changes
from tests.script_fuzz.digest import digests
from tests.script_fuzz.model import INPUTS, ROWS, PlannedNet
from tests.script_fuzz.objects import make_optimizer, make_scaler, make_scheduler, make_second, wrap
from tests.script_fuzz.plan import Deed, Kill, ScriptPlan

RESTORE_SECONDS: Final = 3.0
PROTECT_SECONDS: Final = 5.0
_CLIP_NORM: Final = 0.02

Say = Callable[..., None]
"""Notes an event and its details."""


class Protecting(Protocol):
    """What a script uses of `checkmate.Protection`."""

    def steps(self, batches: Iterable[int]) -> Iterator[int]: ...
    def mark(self) -> None: ...
    def close(self) -> None: ...


class Unprotected:
    """What takes the place of a protection in a plain script."""

    def steps(self, batches: Iterable[int]) -> Iterator[int]:
        """Return the turns as they are."""
        return iter(batches)

    def mark(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Script:
    """One rank's script, from its start to its end."""

    def __init__(self, plan: ScriptPlan, rank: int, say: Say) -> None:
        """Create the script's objects, always with the same initial values."""
        self.plan, self.rank = plan, rank
        self._say = say
        self._kill: Kill | None = None
        self._seed()
        self.model = PlannedNet(plan)
        self.ddp = wrap(self.model, plan)
        self.optimizer = make_optimizer(self.model, plan)
        self.second = make_second(self.model, plan)
        self.scheduler = make_scheduler(self.optimizer, plan)
        self.scaler = make_scaler(plan)
        self.turn, self.total = -1, 0.0
        self.counter = 0
        self.ema = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._seed()

    def _seed(self, more: int = 0) -> None:
        seed = 10 * self.plan.seed + self.rank + more
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)

    def run_plain(self) -> None:
        """Train without Checkmate."""
        changes.register(self, after_protect=False)
        changes.register(self, after_protect=True)
        self._loop(0, Unprotected())

    def run_protected(self, attempt: int, kill: Kill | None) -> None:
        """Restore, protect and train; `attempt` is the number of earlier starts, and `kill` ends this one."""
        self._kill = kill
        loop = self.plan.loop
        arguments: dict[str, Any] = {
            "scheduler": self.scheduler if loop.scheduler_given else None,
            "scaler": self.scaler if loop.scaler == "given" else None,
        }
        initial = self._spoil(attempt)
        restored = checkmate.restore(self.ddp, self.optimizer, **arguments, timeout=RESTORE_SECONDS)
        if restored.iteration == 0:
            initial()
        elif restored.extra is not None:
            self.counter = restored.extra["counter"]
            self.ema.update(restored.extra.get("ema", {}))
        self._say("resumed", turn=restored.iteration)
        extra = self.extra if loop.extra != "none" else None
        changes.register(self, after_protect=False)
        protection = checkmate.protect(
            self.ddp, self.optimizer, **arguments, extra=extra, wait=PROTECT_SECONDS
        )
        changes.register(self, after_protect=True)
        with protection if loop.end == "with" else contextlib.nullcontext():
            self._loop(restored.iteration, protection)
        if loop.end == "close":
            protection.close()

    def _spoil(self, attempt: int) -> Callable[[], None]:
        """Give a later start other values than the first one; return what brings the initial ones back.

        So what is not restored shows.
        """
        if attempt == 0:
            return lambda: None
        tensors = [*self.model.parameters(), *self.model.buffers()]
        initial = [tensor.detach().clone() for tensor in tensors]
        with torch.no_grad():
            for tensor in tensors:
                tensor.add_(attempt)
        self._seed(1000 * attempt)

        @torch.no_grad()
        def bring_back() -> None:
            for tensor, value in zip(tensors, initial, strict=True):
                tensor.copy_(value)
            self._seed()

        return bring_back

    def extra(self) -> Mapping[str, Any]:
        """Return what `protect` is to keep for this script."""
        ema = {"ema": self.ema} if self.plan.loop.extra == "ema" else {}
        return {"counter": self.counter, **ema}

    def _loop(self, start: int, protection: Protecting) -> None:
        loop = self.plan.loop
        if loop.drawn:
            for number in protection.steps(range(start * loop.micro, self.plan.turns * loop.micro)):
                self._micro_batch(number // loop.micro, number % loop.micro)
                if number % loop.micro == loop.micro - 1:
                    self._end_turn(number // loop.micro)
        elif loop.breaks:
            for turn in protection.steps(self._turns(start, self.plan.turns + 1)):
                if turn == self.plan.turns:
                    break
                self._whole_turn(turn)
        elif loop.boundary == "steps":
            length = loop.epoch or self.plan.turns
            # Also a loop that has ended is entered, because what follows it may not have been done.
            for first in range(max(start - 1, 0) // length * length, self.plan.turns, length):
                end = min(first + length, self.plan.turns)
                for turn in protection.steps(self._turns(max(start, first), end)):
                    self._whole_turn(turn)
                self._end_epoch(end)
        else:
            for turn in self._turns(start, self.plan.turns):
                self._whole_turn(turn)
                if loop.boundary == "mark":
                    protection.mark()

    def _turns(self, start: int, end: int) -> Iterator[int]:
        for turn in range(start, end):
            yield turn
            self._at("after-mark", turn)

    def _end_epoch(self, turn: int) -> None:
        if self.plan.loop.epoch:
            self.evaluate(turn)
            if self.scheduler is not None:
                self.scheduler.step()

    def _whole_turn(self, turn: int) -> None:
        for micro in range(self.plan.loop.micro):
            self._micro_batch(turn, micro)
        self._end_turn(turn)

    def _micro_batch(self, turn: int, micro: int) -> None:
        """Run forward and backward; only the last micro-batch of a turn synchronises."""
        last = micro == self.plan.loop.micro - 1
        if micro == 0:
            self.turn, self.total = turn, 0.0
            self._at("top", turn)
            if self.plan.loop.zero == "top":
                self._zero()
        with contextlib.nullcontext() if last else self.ddp.no_sync():
            loss = self.forward(turn)
            if micro == 0 and self.plan.loop.zero == "backward":
                self._zero()
            if last:
                self._at("before-backward", turn)
            self.backward(loss)

    def _zero(self) -> None:
        for optimizer in (self.optimizer, self.second):
            if optimizer is not None:
                optimizer.zero_grad(set_to_none=self.plan.loop.zero != "zeros")

    def batch(self) -> torch.Tensor:
        """Draw a batch from the random generators of torch, Python and NumPy."""
        x = torch.randn(ROWS, INPUTS)
        x[0, 0] += random.random() + float(np.random.rand())
        return x

    def forward(self, turn: int) -> torch.Tensor:
        """Return the loss of a random batch."""
        x = self.batch()
        loss: torch.Tensor = ((self.ddp(x, turn) - x.sum(1) * 0.1) ** 2).mean() / self.plan.loop.micro
        if turn in self.plan.loop.overflows:
            loss = loss * float("inf")
        self.total += float(loss.detach())
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward, scaled if there is a scaler."""
        torch.autograd.backward(loss if self.scaler is None else self.scaler.scale(loss))

    def _end_turn(self, turn: int) -> None:
        """Do all of a turn that follows its last backward."""
        self._at("after-backward", turn)
        if turn not in self.plan.loop.skipped:
            self._step(turn)
        if self.scheduler is not None and not self.plan.loop.epoch:
            self.scheduler.step()
        if self.plan.loop.extra != "none":
            self._update_extra()
        if self.plan.loop.validation:
            self.evaluate(turn)
        self._at("after-scheduler", turn)
        if self.plan.loop.zero in {"end", "zeros"}:
            self._zero()
        self._say("turn", turn=turn, digests=digests(self, self.total))

    def _step(self, turn: int) -> None:
        """Clip and step."""
        loop = self.plan.loop
        if self.scaler is not None and loop.clip != "none":
            self.scaler.unscale_(self.optimizer)
        if loop.clip == "ours":
            checkmate.clip_grad_norm_(self.ddp.parameters(), _CLIP_NORM)
        elif loop.clip == "torch":
            torch.nn.utils.clip_grad_norm_(self.ddp.parameters(), _CLIP_NORM)
        self._at("before-step", turn)
        second = self._second_due(turn)
        if second is None or second.target % 2 == 0:
            self._step_first(turn)
        if second is not None and self.second is not None:
            self.second.step()
        self._at("after-step", turn)

    def _step_first(self, turn: int) -> None:
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif any(deed.kind == "step-closure" and deed.turn == turn for deed in self.plan.deeds):
            self.optimizer.step(lambda: self.total)
        else:
            self.optimizer.step()

    def _second_due(self, turn: int) -> Deed | None:
        """Return why the second optimizer steps in this turn, if it does."""
        for deed in self.plan.deeds:
            if deed.kind == "optimizer-second" and turn >= deed.turn and (turn - deed.turn) % 2 == 0:
                return deed
        return None

    @torch.no_grad()
    def _update_extra(self) -> None:
        self.counter += 1
        for name, parameter in self.model.named_parameters():
            self.ema[name].mul_(0.9).add_(parameter, alpha=0.1)

    @torch.no_grad()
    def evaluate(self, turn: int, *, wrapped: bool = False) -> None:
        """Evaluate the model with a random batch, `wrapped` in DDP or as it is."""
        self.model.eval()
        self.total += float((self.ddp if wrapped else self.model)(self.batch(), turn).mean())
        self.model.train()

    def _at(self, place: str, turn: int) -> None:
        """Do by hand what the plan says for this place, and die here if it says so."""
        for deed in self.plan.deeds:
            if (deed.turn, deed.place) == (turn, place):
                changes.do(deed, self)
        kill = self._kill
        if kill is not None and (kill.turn, kill.place) == (turn, place) and self.rank in kill.ranks:
            self._say("killed", turn=turn)
            time.sleep(kill.delay)
            os.kill(os.getpid(), signal.SIGKILL)
