"""Train a model in two pipeline stages, each of which is a DP group of the same job.

CHECKMATE_JOB=job.yaml torchrun --nnodes 4 ... --max-restarts 10 -m checkmate.examples.pipeline

The job has two groups under `dp_groups`. The first half of the ranks has the first stage, the other half the
second. Rank i of a stage sends its activations to rank i of the other, and gets their gradients back. Each
stage has its own DDP, over its own process group, and is protected by itself; a restart brings both stages to
the same iteration.

With --shard, FSDP2 shards each stage. The job then has a `mesh` with two stages (`pp: 2`), and
`checkmate.shard_mesh` returns the part of it that has this rank's stage and replica. With --schedule too,
micro-batches pass through the stages as one of PyTorch's schedules orders them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import checkmate
from checkmate.examples.common import LossLog, add_in_place, parser, run, whole_state

BATCH, INPUTS, WIDTH = 32, 64, 128
MICROS = 4
"""Micro-batches of a schedule."""


def batch(iteration: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, which both stages draw alike: they depend on iteration and place only."""
    generator = torch.Generator().manual_seed(1000 * iteration + place)
    inputs = torch.randn(BATCH, INPUTS, generator=generator)
    return inputs, inputs.flip(1).tanh()


class Stage:
    """One of the two stages on this rank: its model, and how data crosses to the other stage."""

    def __init__(self, seed: int, *, shard: bool) -> None:
        ranks = dist.get_world_size() // 2
        self.number, self.place = divmod(dist.get_rank(), ranks)
        self.peer = (1 - self.number) * ranks + self.place
        torch.manual_seed(seed + self.number)  # the same model on all ranks of a stage
        sizes = [(INPUTS, WIDTH), (WIDTH, INPUTS)][self.number]
        model = nn.Sequential(nn.Linear(*sizes), nn.Tanh() if self.number == 0 else nn.Identity())
        self.model: nn.Module = model
        if shard:
            fully_shard(model, mesh=checkmate.shard_mesh("cpu"))
        else:
            groups = [dist.new_group(list(range(first, first + ranks))) for first in (0, ranks)]
            self.model = DistributedDataParallel(model, process_group=groups[self.number])

    def train(self, iteration: int) -> torch.Tensor:
        """Run forward and backward; return the loss, which both stages know."""
        inputs, targets = batch(iteration, self.place)
        return self._first(inputs) if self.number == 0 else self._second(targets)

    def _first(self, inputs: torch.Tensor) -> torch.Tensor:
        activations = self.model(inputs)
        dist.send(activations.detach(), self.peer)
        gradients, loss = torch.empty_like(activations), torch.empty(())
        dist.recv(gradients, self.peer)
        dist.recv(loss, self.peer)
        activations.backward(gradients)
        return loss

    def _second(self, targets: torch.Tensor) -> torch.Tensor:
        activations = torch.empty(BATCH, WIDTH)
        dist.recv(activations, self.peer)
        loss = functional.mse_loss(self.model(activations.requires_grad_()), targets)
        loss.backward()
        assert activations.grad is not None
        dist.send(activations.grad, self.peer)
        dist.send(loss.detach(), self.peer)
        return loss


class ScheduledStage(Stage):
    """The same, under PyTorch's schedule of one forward and one backward."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, shard=True)
        self._group = checkmate.job_mesh("cpu")["pp"].get_group()
        stage = PipelineStage(self.model, self.number, 2, torch.device("cpu"), group=self._group)
        # Scaling would change gradients after their reduction, so the loss is divided instead.
        self._schedule = Schedule1F1B(stage, MICROS, loss_fn=self._loss, scale_grads=False)

    def train(self, iteration: int) -> torch.Tensor:
        """Run forward and backward of all micro-batches; return their mean loss."""
        inputs, targets = batch(iteration, self.place)
        losses: list[torch.Tensor] = []
        if self.number == 0:
            self._schedule.step(inputs)
            loss = torch.empty(())
        else:
            self._schedule.step(target=targets, losses=losses)
            loss = torch.stack(losses).sum().detach()
        dist.broadcast(loss, group=self._group, group_src=1)
        return loss

    @staticmethod
    def _loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(outputs, targets) / MICROS


def main() -> None:
    """Train, and print the loss of each iteration."""
    arg_parser = parser("checkmate.examples.pipeline", __doc__, 60)
    arg_parser.add_argument(
        "--shard", action="store_true", help="shard each stage with FSDP2, instead of DDP"
    )
    arg_parser.add_argument(
        "--schedule", action="store_true", help="with --shard: train by PyTorch's Schedule1F1B"
    )
    add_in_place(arg_parser)
    options = arg_parser.parse_args()
    if options.schedule and not options.shard:
        arg_parser.error("--schedule needs --shard")

    def train() -> None:
        stage = ScheduledStage(options.seed) if options.schedule else Stage(options.seed, shard=options.shard)
        model, optimizer = stage.model, torch.optim.AdamW(stage.model.parameters(), lr=1e-2)

        start, _ = checkmate.restore(model, optimizer)
        protection = checkmate.protect(model, optimizer)
        log = LossLog(options.out)

        with protection:
            for iteration in protection.steps(range(start, options.iterations)):
                loss = stage.train(iteration)
                optimizer.step()
                optimizer.zero_grad()
                log(iteration, loss.item())
        log.save(whole_state(model, optimizer))

    run(train, in_place=options.in_place)


if __name__ == "__main__":
    main()
