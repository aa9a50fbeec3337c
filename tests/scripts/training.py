"""A rank of a small training job, like a user's script: `python -m tests.scripts.training ORDERS.json`.

torchrun's environment determines the rank. It writes rank{r}.jsonl (a line per iteration) and rank{r}.pt.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import checkmate
from checkmate import Restored
from checkmate.state import local_of
from checkmate.training.start import nccl_runtime
from tests.support.nccl.double import DoubleNccl
from tests.support.training.orders import ScriptOrders


class OddShapes(nn.Module):
    """Dense parameters, some of which are not stored row by row.

    There are a scalar, a wider type, and one without elements. `earlier` is frozen, but has optimizer state.
    """

    def __init__(self, turned: Sequence[str]) -> None:
        super().__init__()
        formats = [torch.channels_last if "flat" in turned else torch.contiguous_format]
        formats.append(torch.channels_last_3d if "deep" in turned else torch.contiguous_format)
        flat, deep = nn.Conv2d(4, 6, 3), nn.Conv3d(2, 3, 2)
        self.flat, self.deep = (
            module.to(memory_format=memory_format)  # type: ignore[call-overload]
            for module, memory_format in zip((flat, deep), formats, strict=True)
        )
        weight = torch.randn(24, 5)
        self.empty = nn.Parameter(torch.zeros(0))
        self.scalar, self.wide = (
            nn.Parameter(torch.ones(())),
            nn.Parameter(torch.ones(3, dtype=torch.float64)),
        )
        self.earlier = nn.Parameter(torch.randn(4), requires_grad=False)
        self.weight = nn.Parameter(weight.t().contiguous().t() if "weight" in turned else weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a number for each row, of its first 64 values."""
        x = nn.functional.pad(x, (0, 64 - x.shape[1]))
        flat = self.flat(x.view(-1, 4, 4, 4)).flatten(1)
        deep = self.deep(x.view(-1, 2, 2, 4, 4)).flatten(1)
        result: torch.Tensor = (flat @ self.weight).tanh().sum(1) + deep.tanh().sum(1) + self.empty.sum()
        return result * self.scalar + self.wide.float().sum()


class SmallModel(nn.Module):
    """Linear layers, optionally with BatchNorm and dropout between them."""

    def __init__(self, orders: ScriptOrders) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(orders.layers):
            layers.append(nn.Linear(orders.width, orders.width))
            if orders.batch_norm:
                layers.append(nn.BatchNorm1d(orders.width))
            layers += [nn.ReLU(), nn.Dropout(orders.dropout)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(orders.width, 1)
        self.unused = nn.Parameter(torch.ones(3))
        self.odd = OddShapes(orders.turned) if orders.turned else None
        for number in range(orders.frozen_mb):
            frozen = nn.Parameter(torch.randn(1 << 18), requires_grad=False)
            self.register_parameter(f"frozen{number}", frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a number for each row."""
        result: torch.Tensor = self.head(self.body(x)).squeeze(1)
        return result if self.odd is None else result + self.odd(x)


def local(state: Any) -> Any:
    """Return a state with this rank's part of each sharded tensor."""
    if isinstance(state, dict):
        return {key: local(value) for key, value in state.items()}
    if isinstance(state, list):
        return [local(value) for value in state]
    return local_of(state) if isinstance(state, torch.Tensor) else state


def collect(worker: int) -> None:
    """Collect garbage, as may happen in a DataLoader's worker when it starts."""
    gc.collect()


def main() -> None:
    """Train according to the orders."""
    orders = ScriptOrders.read(Path(sys.argv[1]))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    if orders.nccl:
        nccl_runtime.runtime = DoubleNccl(orders.nccl)
    dist.init_process_group("gloo")
    ScriptRank(orders).run()
    dist.destroy_process_group()


class ScriptRank:
    """One rank: its model, data and log."""

    def __init__(self, orders: ScriptOrders) -> None:
        self.orders = orders
        self.rank = dist.get_rank()
        self.folder = Path(orders.folder)
        torch.manual_seed(orders.seed)
        self.device = torch.device(orders.device)
        self.model = SmallModel(orders).to(self.device)
        self.group = self._dp_group()
        self.ddp = self._sharded() if orders.sharded else self._replicated()
        kind = getattr(torch.optim, orders.optimizer)
        self.optimizer = kind(self._groups(), **orders.options)
        if self.model.odd is not None:
            self.model.odd.earlier.grad = torch.randn(4).to(self.device)
            self.optimizer.step()
            self.model.odd.earlier.grad = None
        self.scheduler = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 5) * 0.97**step)
        self.scaler = (
            torch.amp.GradScaler(orders.device, init_scale=2.0**10, growth_interval=3) if orders.amp else None
        )
        self.sampler = {"seen": 0}
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(orders.seed + 1 + (self._replica() if orders.tensor else self.rank))

    def run(self) -> None:
        """Restore, protect, train, and save the result."""
        orders = self.orders
        resumed = self.restore() if orders.restore else Restored(0)
        if resumed.extra is not None:
            self.sampler = resumed.extra
        self.say("resumed", iteration=resumed.iteration, sampler=dict(self.sampler))
        if orders.keep_each:
            self.save("restored.")
        if orders.only_restore:
            self.save()
            return
        protection = checkmate.protect(
            self.ddp,
            self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            extra=lambda: self.sampler,
            wait=orders.wait,
        )
        self.say("protected")
        with nullcontext() if orders.plain else protection:
            iteration = resumed.iteration
            while iteration < self.end():
                self.die_if_due(iteration)
                if iteration == orders.fail_at:
                    raise ArithmeticError("as ordered")
                if len(self.orders.groups) > 1:
                    dist.barrier()  # groups depend on one another, as stages and shards do
                began = time.monotonic()
                loss = self.iterate(iteration)
                self.say("iteration", iteration=iteration, loss=loss, seconds=time.monotonic() - began)
                if orders.keep_each:
                    self.save(f"after{iteration}.")
                iteration += 1
        self.save()

    def restore(self) -> Restored:
        """Restore, as a script does first."""
        return checkmate.restore(
            self.ddp,
            self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            timeout=self.orders.timeout,
            checkpoints=self.orders.checkpoints,
        )

    def end(self) -> float:
        """Return the number of iterations, as far as it is known."""
        if not self.orders.open_end:
            return self.orders.iterations
        file = self.folder / "end"
        return int(file.read_text()) if file.exists() else math.inf

    def iterate(self, iteration: int) -> float:
        """Train one iteration; return its loss over all micro-batches."""
        orders, total = self.orders, 0.0
        for micro in range(orders.accumulate):
            last = micro == orders.accumulate - 1
            with self._synchronising(last):
                x, y = self.batch()
                with torch.autocast(orders.device, torch.bfloat16, enabled=orders.autocast):
                    loss = ((self.ddp(x.to(self.model.head.weight.dtype)) - y) ** 2).mean()
                if iteration in orders.infinite:
                    loss = loss * float("inf")
                total += float(loss.detach())
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if orders.clip:
            self.clip()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        time.sleep(orders.pause)
        return total

    def clip(self) -> None:
        """Clip gradients, in the way of those who combine norms themselves beside tensor parallelism."""
        if not self.orders.tensor:
            checkmate.clip_grad_norm_(self.ddp.parameters(), self.orders.clip)
            return
        parameters = list(self.ddp.parameters())
        norm: Any = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        checkmate.clip_grads_with_norm_(parameters, self.orders.clip, norm.full_tensor())

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows from all random generators, so that each of them matters."""
        self.sampler["seen"] += 1
        if self.orders.workers:
            data = TensorDataset(torch.arange(8))
            list(DataLoader(data, num_workers=self.orders.workers, worker_init_fn=collect))
        x = torch.randn(self.orders.batch, self.orders.width)
        x[0, 0] += random.random() + float(np.random.rand())
        x = x.to(self.device)
        return x, x.sum(1) * 0.1

    def die_if_due(self, iteration: int) -> None:
        """Kill this process if the orders require it."""
        if [self.rank, iteration] in [list(kill) for kill in self.orders.kills]:
            os.kill(os.getpid(), signal.SIGKILL)

    def say(self, event: str, **more: Any) -> None:
        """Write a line to this rank's log."""
        with self.folder.joinpath(f"rank{self.rank}.jsonl").open("a") as log:
            print(json.dumps({"event": event, **more}), file=log)

    def save(self, suffix: str = "") -> None:
        """Save all state, for comparison; drawn random numbers are restored."""
        generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
        state = {
            "model": local(self.model.state_dict()),
            "optimizer": local(self.optimizer.state_dict()),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "random": torch.rand(3),
            "python": random.random(),
            "numpy": float(np.random.rand()),
            "sampler": self.sampler,
        }
        torch.save(state, self.folder / f"rank{self.rank}.{suffix}pt")
        torch.set_rng_state(generators[0])
        random.setstate(generators[1])
        np.random.set_state(generators[2])

    def _replicated(self) -> DistributedDataParallel:
        return DistributedDataParallel(
            self.model,
            process_group=self.group,
            bucket_cap_mb=self.orders.bucket_mb,
            find_unused_parameters=True,
        )

    def _sharded(self) -> nn.Module:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415 - takes seconds

        mesh = self._split() if self.orders.tensor else checkmate.shard_mesh(self.orders.device)
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if self.orders.autocast else None,
            reduce_dtype=torch.float32 if self.orders.narrow else None,
        )
        if self.orders.narrow:
            self.model.bfloat16()
        for layer in [*self.model.body, self.model]:
            if isinstance(layer, nn.Linear | SmallModel):
                fully_shard(layer, mesh=mesh, mp_policy=policy)
        return self.model

    def _split(self) -> Any:
        """Split all layers over the DP groups; return the mesh of a single shard."""
        from torch.distributed import tensor  # noqa: PLC0415 - takes seconds
        from torch.distributed.tensor import parallel  # noqa: PLC0415

        ranks = torch.tensor(self.orders.groups).t().unsqueeze(1)
        names = ("dp_replicate", "dp_shard", "tp")
        mesh = dist.device_mesh.DeviceMesh(self.orders.device, ranks, mesh_dim_names=names)
        whole = tensor.Replicate()
        rows = parallel.RowwiseParallel(input_layouts=whole)
        parallel.parallelize_module(self.model.head, mesh["tp"], rows)
        for layer in self.model.body:
            if isinstance(layer, nn.Linear):
                columns = parallel.ColwiseParallel(output_layouts=whole)
                parallel.parallelize_module(layer, mesh["tp"], columns)
        return mesh["dp_shard"]

    def _replica(self) -> int:
        """Return this rank's position in its DP group."""
        return next(group.index(self.rank) for group in self.orders.groups if self.rank in group)

    def _synchronising(self, last: bool) -> AbstractContextManager[None]:
        """Have the backward of a micro-batch reduce gradients if it is the last one."""
        if isinstance(self.ddp, DistributedDataParallel):
            return nullcontext() if last else self.ddp.no_sync()
        sharded: Any = self.ddp
        sharded.set_requires_gradient_sync(last)
        return nullcontext()

    def _groups(self) -> list[dict[str, Any]]:
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        return [{"params": decayed}, {"params": vectors, "weight_decay": 0.0}]

    def _dp_group(self) -> Any:
        """Return this rank's DP group; every rank has to create all of them."""
        own_group = None
        single_group = [list(range(dist.get_world_size()))]
        for ranks in (not self.orders.together and self.orders.groups) or single_group:
            group = dist.new_group(ranks)
            if self.rank in ranks:
                own_group = group
        return own_group


if __name__ == "__main__":
    main()
