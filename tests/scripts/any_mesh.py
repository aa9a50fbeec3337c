"""A script that trains one model on any mesh, with copies by hosts.

Usage: python -m tests.scripts.any_mesh KIND FOLDER ITERATIONS [SECONDS] [--digests]

Kinds: `ddp`; `fsdp`, without replicas; `hsdp`, two replicas; `tensor`, FSDP of what tensor parallelism has
split in two. Each rank notes the digest of the state that it has restored, and each iteration's loss.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import checkmate
from checkmate import state
from tests.scripts.any_optimizer import optimizers_of


def make(kind: str) -> nn.Module:
    """Return a model with a frozen parameter, a buffer and dropout, for ranks of a kind."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(64, 126),
        nn.ReLU(),
        nn.BatchNorm1d(126),
        nn.Dropout(0.1),
        nn.Linear(126, 30),
        nn.Linear(30, 15),
    )
    layers[4].bias.requires_grad_(False)
    if kind == "ddp":
        return DistributedDataParallel(layers)
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415
    from torch.distributed.tensor import parallel  # noqa: PLC0415

    names = {"hsdp": ("dp_replicate", "dp_shard"), "tensor": ("dp_shard", "tp")}.get(kind, ("dp_shard",))
    world = dist.get_world_size()
    sizes = {"hsdp": (2, world // 2), "tensor": (world // 2, 2)}.get(kind, (world,))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    if kind == "tensor":
        plan = {"4": parallel.ColwiseParallel(), "5": parallel.RowwiseParallel()}
        parallel.parallelize_module(layers, mesh["tp"], plan)
        mesh = mesh["dp_shard"]
    fully_shard(layers[0], mesh=mesh)
    fully_shard(layers, mesh=mesh)
    return layers


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of this rank's part of a model, its optimizer's state and its random generator."""
    result = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    tensors: list[Any] = list(model.state_dict().values())
    tensors += [value for entries in optimizer.state.values() for value in entries.values()]
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            result.update(bytes(state.bytes_of(state.local_of(tensor.detach()).contiguous().clone())))
    return result.hexdigest()


def whole_digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of the whole model and its optimizer's state: the same on all ranks and meshes."""
    result = hashlib.sha256()
    for name, parameter in sorted(inner(model).named_parameters()):
        entries = sorted(optimizer.state.get(parameter, {}).items())
        for tensor in (parameter, *(value for _, value in entries)):
            whole: Any = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            result.update(name.encode())
            result.update(bytes(state.bytes_of(whole.detach().contiguous().clone())))
    return result.hexdigest()


def inner(model: nn.Module) -> nn.Module:
    """Return the model within its wrapper."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def main() -> None:
    """Resume, and train up to an iteration."""
    name, folder, iterations, *more = [argument for argument in sys.argv[1:] if argument != "--digests"]
    has_digests = "--digests" in sys.argv
    kind, _, optimizer_name = name.partition("-")
    seconds = float(more[0]) if more else 0.0
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = make(kind)
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    if optimizer_name:
        (optimizer,) = optimizers_of(optimizer_name, parameters)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    sample = rank // 2 if kind == "tensor" else rank
    torch.manual_seed(sample + 1)
    begin, seen = checkmate.restore(model, optimizer, scheduler=scheduler)
    count = seen or 0
    file = Path(folder) / f"rank{rank}.jsonl"
    with (
        file.open("a") as log,
        checkmate.protect(model, optimizer, scheduler=scheduler, extra=lambda: count) as protection,
    ):
        first: dict[str, Any] = {"begin": begin, "count": count, "state": digest(model, optimizer)}
        if has_digests:
            first["whole"] = whole_digest(model, optimizer)
        print(json.dumps(first), file=log, flush=True)
        for iteration in protection.steps(range(begin, int(iterations))):
            data = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * iteration + sample))
            loss = model(data).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            model.zero_grad()
            count += 1
            line: dict[str, Any] = {"iteration": iteration, "loss": float(loss.detach()).hex()}
            if has_digests:
                line["whole"] = whole_digest(model, optimizer)
            print(json.dumps(line), file=log, flush=True)
            time.sleep(seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
