"""A rank's description of this start of training for shadow nodes: at each connect, and before seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel

from checkmate.rpc import shadow_pb2 as pb
from checkmate.training.record.buffers import Buffers, state_names
from checkmate.training.record.publisher import Author
from checkmate.training.start.membership import Membership
from checkmate.training.start.standing import Start
from checkmate.wire.layout import Layout


@dataclass(frozen=True)
class Opening:
    """Creates a rank's messages to nodes. `iteration` returns the last one whose backward has begun."""

    place: Membership
    start: Start
    ddp: DistributedDataParallel
    layout: Layout
    optimizer: pb.OptimizerSpec
    device: str
    buffers: Buffers | None
    iteration: Callable[[], int]

    def author(self) -> Author:
        """Return the author of this rank's step records."""
        place, plan = self.place, self.start.plan
        return Author(
            place.job.job, plan.incarnation, plan.run, plan.start, place.group, place.position, place.side
        )

    def begin_request(self) -> pb.BeginRequest:
        """Return the group's first rank's request to a node, at each connect."""
        start = self.start
        return pb.BeginRequest(
            job=self.place.job.job,
            group=self.place.group,
            incarnation=start.plan.incarnation,
            first_iteration=start.next_iteration,
            next_iteration=self.iteration() + 1,
            layout=self.layout.to_json(),
            optimizer=self.optimizer,
            keep=start.keep,
            torch=torch.__version__,
            capability=torch.backends.cpu.get_cpu_capability(),
            device=self.device,
            ranks=self.place.ranks,
            run=start.plan.run,
            start=start.plan.start,
            generation=start.plan.generation,
            names=self._names(),
            buffers=sorted(self.buffers.names) if self.buffers is not None else (),
        )

    def seed_header(self, shard: int, iteration: int) -> pb.SeedHeader:
        """Return the header of a stream of seeds, without parameters."""
        start = self.start
        record = start.record if iteration == start.next_iteration - 1 else None
        return pb.SeedHeader(
            job=self.place.job.job,
            incarnation=start.plan.incarnation,
            run=start.plan.run,
            start=start.plan.start,
            shard=pb.Shard(group=self.place.group, shard=shard),
            iteration=iteration,
            record=record,
        )

    def _names(self) -> dict[str, str]:
        """Return the keys of the model's `state_dict()` whose tensors the nodes receive, with their names."""
        given = {parameter.name for parameter in self.layout.parameters}
        given |= self.buffers.names if self.buffers is not None else set()
        return {key: name for key, name in state_names(self.ddp).items() if name in given}
