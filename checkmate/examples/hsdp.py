"""Train a GPT that FSDP2 shards, with replicas of each shard (HSDP).

CHECKMATE_JOB=job.yaml torchrun --nnodes 2 --nproc-per-node 2 ... --max-restarts 10 -m checkmate.examples.hsdp

The job has a DP group for each shard, and `checkmate.shard_mesh` makes FSDP's mesh from them. FSDP reduces
and scatters gradients over the shards of a replica, and Checkmate reduces the rest over the replicas. Of what
concerns Checkmate, two lines differ from a script with DistributedDataParallel: the one that makes this mesh,
and accumulation, for which FSDP has `set_requires_gradient_sync`. In a job with copies by hosts, FSDP reduces
over the replicas, too (--both).
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim.lr_scheduler import LambdaLR

import checkmate
from checkmate.examples.common import LossLog, add_in_place, parser, run, whole_state
from checkmate.examples.gpt import text
from checkmate.examples.gpt.model import Gpt, Shape
from checkmate.examples.gpt.train import warm_up_then_cosine

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
"""Parameters and optimizer state are fp32, forward and backward bf16, and gradients are reduced in fp32."""


def parallelize(model: Gpt, mesh: DeviceMesh, *, offload: bool = False) -> None:
    """Shard each block, and then the rest: tied embeddings belong to the root.

    With `offload`, parameters and optimizer state stay in the host's memory.
    """
    where = CPUOffloadPolicy() if offload else OffloadPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=POLICY, offload_policy=where)
    fully_shard(model, mesh=mesh, mp_policy=POLICY, offload_policy=where)


class Trainer:
    """A rank's model, optimizer, scheduler and data."""

    def __init__(self, options: argparse.Namespace, device: torch.device, mesh: DeviceMesh) -> None:
        self.options, self.device = options, device
        torch.manual_seed(options.seed)  # the same model on all ranks, of which each keeps its part
        shape = Shape(options.layers, options.width, options.heads, tied=True)
        self.model: Any = Gpt(shape).to("cpu" if options.offload else device)
        parallelize(self.model, mesh, offload=options.offload)
        rate = options.learning_rate
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.1)
        self.scheduler = LambdaLR(self.optimizer, lambda step: warm_up_then_cosine(step, options.iterations))
        self.data = text.read()
        self.context = shape.context
        torch.manual_seed(options.seed + 1 + dist.get_rank())  # different batches and dropout on each rank

    def train(self) -> None:
        """Restore, train to the end, and print the loss of each iteration."""
        model, optimizer, scheduler = self.model, self.optimizer, self.scheduler
        start, _ = checkmate.restore(model, optimizer, scheduler=scheduler)
        log = LossLog(self.options.out)
        with checkmate.protect(model, optimizer, scheduler=scheduler) as protection:
            for iteration in protection.steps(range(start, self.options.iterations)):
                log(iteration, self.step())
        log.save(whole_state(model, optimizer))

    def step(self) -> float:
        """Train one iteration of several micro-batches; return their mean loss."""
        micros, total = self.options.accumulate, 0.0
        for micro in range(micros):
            self.model.set_requires_gradient_sync(micro == micros - 1)  # reduce once, with the last one
            batch = self.data.batch(self.options.batch, self.context)
            loss = self.model(*(tokens.to(self.device) for tokens in batch)) / micros
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return total


def device_of(device_type: str) -> torch.device:
    """Return this rank's device."""
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def backend_of(device: torch.device) -> str:
    """Return the backend of the default process group for models on a device."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def parse() -> argparse.Namespace:
    arg_parser = parser("checkmate.examples.hsdp", __doc__, 60)
    arg_parser.add_argument("--batch", type=int, default=2, help="size of a rank's micro-batches")
    arg_parser.add_argument("--accumulate", type=int, default=3, help="micro-batches in an iteration")
    arg_parser.add_argument("--layers", type=int, default=2)
    arg_parser.add_argument("--width", type=int, default=128)
    arg_parser.add_argument("--heads", type=int, default=4)
    arg_parser.add_argument("--learning-rate", type=float, default=1e-3)
    arg_parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    arg_parser.add_argument(
        "--offload", action="store_true", help="a GPU's parameters stay in the host's memory"
    )
    arg_parser.add_argument(
        "--both",
        action="store_true",
        help="FSDP reduces over both dimensions of the mesh: for copies by hosts",
    )
    add_in_place(arg_parser)
    options = arg_parser.parse_args()
    if options.offload and options.device == "cpu":
        arg_parser.error("--offload needs --device cuda: on CPUs, parameters are in the host's memory anyway")
    return options


def main() -> None:
    """Train, and print the loss of each iteration."""
    options = parse()
    device = device_of(options.device)

    def train() -> None:
        if options.both:
            mesh = checkmate.job_mesh(device.type)["dp_replicate", "dp_shard"]
        else:
            mesh = checkmate.shard_mesh(device.type)
        Trainer(options, device, mesh).train()

    run(train, in_place=options.in_place, backend=backend_of(device))


if __name__ == "__main__":
    main()
