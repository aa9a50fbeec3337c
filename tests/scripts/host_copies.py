"""A script whose job has copies by hosts: clipping by torch, a scheduler, dropout, state of its own.

Usage: python -m tests.scripts.host_copies KIND FOLDER ITERATIONS SECONDS [in-place | keep]

Kinds: `ddp`, in several buckets; `fsdp`, without replicas, and `hsdp`, with replicas that FSDP reduces,
both of which reduce each of two micro-batches; `bare`, without a wrapper, whose script reduces gradients;
`gan`, with two optimizers and two backwards a turn; `hooked`, DDP with a communication hook of the script's,
which also scales gradients by hand; `mixed`, FSDP that reduces in fp16, with a GradScaler that skips a step;
`tensor`, FSDP of what tensor parallelism has split; `zero`, DDP with a ZeroRedundancyOptimizer; `alone`, one
process without a process group. A kind may name an optimizer of `tests.scripts.any_optimizer`: `ddp-muon`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import checkmate
from tests.scripts.any_optimizer import optimizers_of

SHARDED = ("fsdp", "hsdp", "mixed", "tensor")
OVERFLOW_AT = 7
"""An iteration whose loss is infinite, if there is a GradScaler."""
PAUSED_AT = 5
"""An iteration after which all ranks wait as long as their folder has a file `pause`."""


def batch(iteration: int, rank: int) -> torch.Tensor:
    """Return a rank's batch of an iteration."""
    generator = torch.Generator().manual_seed(1000 * iteration + rank)
    return torch.randn(8, 64, generator=generator)


def sharded(kind: str, layers: nn.Sequential) -> nn.Module:
    """Shard a model on a mesh of the script's own."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415
    from torch.distributed.tensor import Replicate, parallel  # noqa: PLC0415

    names = {"hsdp": ("dp_replicate", "dp_shard"), "tensor": ("dp_shard", "tp")}.get(kind, ("dp_shard",))
    mesh = init_device_mesh("cpu", (2, 2) if len(names) > 1 else (4,), mesh_dim_names=names)
    policy = MixedPrecisionPolicy()
    if kind == "mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
    if kind == "tensor":
        plan = {"0": parallel.ColwiseParallel(), "3": parallel.RowwiseParallel()}
        plan[str(len(layers) - 1)] = parallel.ColwiseParallel(output_layouts=Replicate())
        parallel.parallelize_module(layers, mesh["tp"], plan)
        mesh = mesh["dp_shard"]
    fully_shard(layers[0], mesh=mesh, mp_policy=policy)
    fully_shard(layers, mesh=mesh, mp_policy=policy)
    return layers


def wrapped(kind: str, model: nn.Sequential) -> nn.Module:
    """Return the model as the script of a kind trains it."""
    if kind in SHARDED:
        return sharded(kind, model)
    if kind == "hooked":  # whose buckets stay as they are
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        ddp.register_comm_hook(None, fp16_compress_hook)
        return ddp
    return DistributedDataParallel(model, bucket_cap_mb=0.03) if kind in ("ddp", "zero") else model


def average(model: nn.Module) -> None:
    """Average gradients over all ranks, as a script without a wrapper does."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@torch.no_grad()
def scale(model: nn.Module, factor: float) -> None:
    """Multiply all parameters, which no optimizer does."""
    for parameter in model.parameters():
        parameter.mul_(factor)


@dataclass
class Turns:
    """The turns of a kind of script."""

    kind: str
    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler

    def take(self, data: torch.Tensor) -> torch.Tensor:
        """Take the steps of a turn; return the loss."""
        return self._adversarial(data) if self.kind == "gan" else self._simple(data)

    def _simple(self, data: torch.Tensor) -> torch.Tensor:
        for half in data.chunk(2) if self.kind in SHARDED else (data,):
            loss: torch.Tensor = self.model(half).float().square().mean()
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if self.kind == "bare":
            average(self.model)
        for parameter in self.model.parameters() if self.kind == "hooked" else ():
            if parameter.grad is not None:
                parameter.grad *= 0.5
        if self.kind != "mixed":
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        return loss

    def _adversarial(self, data: torch.Tensor) -> torch.Tensor:
        """Let both halves of a model step, each after a backward of its own."""
        for optimizer, sign in zip(self.optimizers, (1, -1), strict=True):
            self.model.zero_grad()
            loss: torch.Tensor = sign * self.model(data).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            average(self.model)
            optimizer.step()
        return loss


@dataclass
class Training:
    """A script of one kind: what it makes once in a process, and its loop."""

    kind: str
    folder: Path
    iterations: int
    seconds: float
    rank: int
    layers: nn.Sequential | None = None
    optimizers: Sequence[torch.optim.Optimizer] = ()
    optimizer: str = ""
    """One of `any_optimizer`; by default AdamW."""

    def make(self) -> tuple[nn.Sequential, Sequence[torch.optim.Optimizer]]:
        """Make the model, and optimizers if they need no process group."""
        torch.manual_seed(0)
        layers = [nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 128), nn.ReLU()]
        layers += [nn.BatchNorm1d(128)] if self.kind in ("ddp", "zero") else []
        model = nn.Sequential(*layers, nn.Linear(128, 16))
        model[0].register_forward_hook(self.pause)
        return model, [] if self.kind in (*SHARDED, "zero") else self.make_optimizers(model)

    def pause(self, *_: object) -> None:
        """Wait in a forward: as in long training, each rank then has sent the record of the iteration before.

        Die there if the folder has a file with this rank's number.
        """
        time.sleep(self.seconds)
        if (order := self.folder / f"die{self.rank}").exists():
            order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def make_optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Make the optimizers of a model."""
        parameters = list(model.parameters())
        if self.kind == "zero":
            kind: Any = torch.optim.AdamW
            if self.optimizer:
                (kind,) = map(type, optimizers_of(self.optimizer, [nn.Parameter(torch.zeros(1))]))
            return [ZeroRedundancyOptimizer(parameters, kind, lr=1e-2)]
        if self.optimizer:
            return optimizers_of(self.optimizer, parameters)
        parts = [parameters[:2], parameters[2:]] if self.kind == "gan" else [parameters]
        return [torch.optim.AdamW(part, lr=1e-2) for part in parts]

    def make_once(self) -> None:
        """Make what is not sharded before the first call of `train`, which otherwise makes it each time."""
        if self.kind not in (*SHARDED, "zero"):
            self.layers, self.optimizers = self.make()

    def train(self) -> None:
        """Train, and note each iteration's loss to the bit."""
        kind, rank, iterations = self.kind, self.rank, self.iterations
        layers, optimizers = (self.layers, self.optimizers) if self.layers is not None else self.make()
        model = wrapped(kind, layers)
        optimizers = optimizers or self.make_optimizers(model)
        for member in optimizers:
            getattr(member, "train", bool)()  # protect tries it out, which it refuses in its other mode
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 5) for optimizer in optimizers]
        torch.manual_seed(rank + 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3, enabled=kind == "mixed")
        turns = Turns(kind, model, optimizers, scaler)
        parts_of: dict[str, Any] = {"scheduler": schedulers, "scaler": scaler}
        if len(optimizers) == 1:  # several can't have a scaler
            parts_of["scheduler"] = schedulers[0]
        optimizer = optimizers if len(optimizers) > 1 else optimizers[0]
        follow: Any = "state" if self.optimizer == "copied" else "auto"
        begin, seen = checkmate.restore(model, optimizer, **parts_of, follow=follow)
        count = seen or 0
        with (
            checkmate.protect(model, optimizer, **parts_of, extra=lambda: count, follow=follow) as protection,
            (self.folder / f"rank{rank}.jsonl").open("a") as log,
        ):
            for iteration in protection.steps(range(begin, iterations)):
                data = batch(iteration, rank // 2 if kind == "tensor" else rank)
                if kind == "mixed" and iteration == OVERFLOW_AT:
                    data = data * float("inf")
                if self.optimizer == "lion":  # a turn begins with it, so it is not of the one before
                    scale(model, 0.99)
                for member in optimizers:
                    getattr(member, "train", bool)()  # of schedule-free ones
                loss = turns.take(data)
                for member in optimizers:
                    getattr(member, "eval", bool)()
                for scheduler in schedulers:
                    scheduler.step()
                model.zero_grad()
                count += 1
                line = {
                    "iteration": iteration,
                    "loss": float(loss.detach()).hex(),
                    "count": count,
                    "begin": begin,
                    "pid": os.getpid(),
                    "time": time.time(),
                }
                print(json.dumps(line), file=log, flush=True)
                while iteration == PAUSED_AT and (self.folder / "pause").exists():
                    time.sleep(0.05)
            if self.optimizer == "lion":  # neither is what comes after the loop
                torch.save(model.state_dict(), self.folder / f"end{rank}.pt")
                scale(model, 0.5)


def main() -> None:
    """Train, in place of a failure or without."""
    name, folder, iterations, seconds, *in_place = sys.argv[1:]
    kind, _, optimizer = name.partition("-")
    rank = int(os.environ.get("RANK", "0"))
    training = Training(kind, Path(folder), int(iterations), float(seconds), rank, optimizer=optimizer)
    if in_place:
        training.make_once()
        checkmate.resilient(training.train, keep=in_place == ["keep"])
        return
    if kind != "alone":
        dist.init_process_group("gloo")
    training.train()
    if kind != "alone":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
