"""A small training in one process that drives shadow nodes, with PyTorch's own optimizer and no ring.

Its "tagged" bytes reach the nodes through `copies`, the emulated switch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import torch

from checkmate import state
from checkmate.job.schema import Job
from checkmate.keys.roles import Role
from checkmate.nodes.other_ranks import job_ranks
from checkmate.optim import supported
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.channels import open_channel
from checkmate.rpc.protocol import PROTOCOL
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.training.record.windows import Slices, to_message
from checkmate.wire.layout import Layout, make_layout
from checkmate.wire.parameter import Parameter
from checkmate.wire.schedule import StreamLayout, stream_layout
from testbed.copies import Copies, StreamKey
from testbed.jobs import keys_of
from testbed.record_line import RecordLine

SHAPES = ((64, 32), (32,), (40, 64), (40,), (3, 40), (3,))
RUN = "first"
START = b"the first start."


def status(job: Job, node: int) -> pb.NodeStatus:
    """Return a shadow node's status."""
    with open_channel(job, node, keys_of(job, Role.READER)) as channel:
        return ShadowStub(channel).Status(pb.StatusRequest(protocol=PROTOCOL, job=job.job), timeout=10)


class SmallTraining:
    """One DP group: parameters, optimizer, and a connection for records of each rank to each node.

    The third of each four parameters is stored column by column in memory.
    """

    def __init__(
        self,
        job: Job,
        copies: Copies,
        make: Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer] | None = None,
        *,
        group: int = 0,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        seed: int = 1,
    ) -> None:
        self.job, self.copies, self.group = job, copies, group
        self.keys = keys_of(job, Role.TRAINER)
        self.ranks = len(job.dp_groups[group].ranks)
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(shape, generator=generator) for shape in shapes]
        self.parameters = [
            torch.nn.Parameter(weight.t().contiguous().t() if number % 4 == 2 else weight)
            for number, weight in enumerate(weights)
        ]
        self.optimizer = (make or (lambda ps: torch.optim.AdamW(ps, lr=0.01)))(self.parameters)
        self.layout: Layout = make_layout(
            [Parameter.of(f"p{i}", p.shape, p.stride(), "float32") for i, p in enumerate(self.parameters)],
            job.shards(group),
            6000,
        )
        self.incarnation = 0
        self.run = RUN
        self.start = START
        self.continues = START
        """The start whose state `begin` keeps."""
        self.last = False
        """The next record announces the end of training."""
        self.buffers: dict[str, torch.Tensor] = {}
        """Buffers in records; the next record has those whose names are in `saying`."""
        self.saying: list[str] = []
        self.slices: Slices | None = None
        """A trainer's slices; without them, a record has the first bytes of one parameter in turn."""
        self.first = 0
        self.iteration = -1
        self.states: dict[int, dict[int, tuple[torch.Tensor, dict[str, Any]]]] = {}
        """State after each iteration, in the form in which shadow nodes hold it."""
        self._note()
        self.stubs = {n.id: ShadowStub(self._channel(n.id)) for n in job.shadow_nodes}
        self.lines: dict[tuple[int, int], RecordLine] = {}
        self.layouts: dict[StreamKey, StreamLayout] = {
            (2 * group + side, channel, shard): stream_layout(
                self.layout.schedule, job.channels, channel, self.ranks, side=side, shadow_id=shard
            )
            for side in (0, 1)
            for channel in range(job.channels)
            for shard in range(job.shards(group))
        }

    def _channel(self, node: int) -> grpc.Channel:
        return open_channel(self.job, node, self.keys)

    def holders(self, shard: int) -> list[int]:
        return [self.job.holder(self.group, shard, i + 1).id for i in range(self.job.replicas)]

    def begin(self, nodes: Sequence[int], *, keep: bool = False, run: str = RUN, **fields: Any) -> list[str]:
        """Begin on these nodes, and open connections for records; return the warnings."""
        warnings: list[str] = []
        self.run = run
        self.start = fields.get("start", self.start)
        for node in nodes:
            request = self.begin_request(keep=keep, run=run)
            for name, value in fields.items():
                setattr(request, name, value)
            # A channel to a node that was away would fail at once, until its next attempt to connect.
            warnings += self.stubs[node].Begin(request, timeout=10, wait_for_ready=True).warnings
            for position in range(self.ranks):
                self.lines[node, position] = RecordLine(self.job, node, self.keys)
        return warnings

    def begin_request(self, *, keep: bool = False, run: str = RUN) -> pb.BeginRequest:
        number = {parameter: i for i, parameter in enumerate(self.parameters)}
        return pb.BeginRequest(
            job=self.job.job,
            group=self.group,
            incarnation=self.incarnation,
            first_iteration=self.first,
            next_iteration=self.iteration + 1,
            layout=self.layout.to_json(),
            optimizer=supported.spec_of(self.optimizer, number),
            keep=keep,
            torch=torch.__version__,
            capability=torch.backends.cpu.get_cpu_capability(),
            device="cpu",
            ranks=self.ranks,
            job_ranks=job_ranks(self.job),
            run=run,
            start=self.start,
            continues=self.continues,
            protocol=PROTOCOL,
            buffers=sorted(self.buffers),
        )

    def seed(self, node: int, shard: int, parameters: Sequence[int] | None = None) -> list[int]:
        """Seed a shard's parameters, or some of them; return those that the node asks for again."""
        numbers = self.layout.of_shard(shard) if parameters is None else list(parameters)
        header = pb.SeedHeader(
            job=self.job.job,
            incarnation=self.incarnation,
            run=self.run,
            start=self.start,
            shard=pb.Shard(group=self.group, shard=shard),
            iteration=self.iteration,
            parameters=numbers,
        )
        seeds = state.to_seeds(header, ((n, *self.states[self.iteration][n]) for n in numbers))
        return list(self.stubs[node].Seed(seeds, timeout=10).again)

    def seed_all(self) -> None:
        for shard in range(self.job.shards(self.group)):
            for node in self.holders(shard):
                assert self.seed(node, shard) == []

    def iterate(self, *, send: bool = True, records: Sequence[int] | None = None) -> int:
        """Train one iteration and return its number.

        Args:
            send: Send copies of the gradients.
            records: Nodes that get records; by default all.
        """
        self.iteration += 1
        buckets = self._gradients()
        if send:
            self.send(buckets)
        self.optimizer.step()
        self._note()
        self.record(records)
        return self.iteration

    def send(self, buckets: Mapping[int, torch.Tensor]) -> None:
        for key, layout in self.layouts.items():
            data = b"".join(
                bytes(state.bytes_of(buckets[p.bucket])[p.where.start * 4 : p.where.stop * 4])
                for p in layout.pieces
            )
            self.copies.send_tagged(
                key, self.incarnation, layout.nbytes * (self.iteration - self.first), data
            )

    def record(self, nodes: Sequence[int] | None = None) -> None:
        for (node, position), line in list(self.lines.items()):
            if nodes is None or node in nodes:
                line.send(self.part(position))

    def author(self, position: int) -> pb.RecordPart:
        """Return the fields that all parts of a rank share."""
        return pb.RecordPart(
            job=self.job.job,
            incarnation=self.incarnation,
            run=self.run,
            start=self.start,
            group=self.group,
            position=position,
        )

    def part(self, position: int) -> pb.RecordPart:
        part = self.author(position)
        part.iteration, part.rng = self.iteration, b"rng %d of %d" % (self.iteration, position)
        for side, boundary in ((0, 0), (1, self.ranks - 1)):
            for (number, channel, shard), layout in self.layouts.items():
                if position == boundary and number % 2 == side:
                    end = layout.nbytes * (self.iteration - self.first + 1)
                    part.ends.add(channel=channel, shard=shard, end=end)
        if position == 0:
            part.step.last = self.last
            if self.saying:
                part.buffers = state.dumps({name: self.buffers[name] for name in self.saying})
            part.step.options.extend(supported.options_of(g) for g in self.optimizer.param_groups)
            part.step.slices.extend(self._slices())
        return part

    def _slices(self) -> list[pb.Slice]:
        if self.slices is not None:
            return [to_message(window, later()) for window, later in self.slices.take()]
        number = self.iteration % len(self.parameters)
        piece = bytes(state.bytes_of(self.states[self.iteration][number][0]))[:256]
        return [pb.Slice(parameter=number, offset=0, data=piece)]

    def send_requested_seeds(self) -> None:
        """Send the seeds that the nodes have asked for in their replies."""
        for (node, position), line in list(self.lines.items()):
            if self.slices is not None and line.replies and line.replies[-1].suspects:
                self.slices.look_first(line.replies[-1].suspects)
            for request in line.new_seed_requests():
                assert request.shard % self.ranks == position
                self.seed(node, request.shard, request.parameters)

    def close(self) -> None:
        for line in self.lines.values():
            line.close()

    def _gradients(self) -> dict[int, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 + self.iteration)
        gradients = {}
        for index, bucket in enumerate(self.layout.buckets):
            flat = torch.randn(bucket.elements, generator=generator)
            gradients[index] = flat
            for place in bucket.places:
                parameter = self.parameters[place.parameter]
                place_parameter = self.layout.parameters[place.parameter]
                run = flat[place.start : place.stop].view(place_parameter.memory_shape).clone()
                parameter.grad, _ = state.from_held(place_parameter, run, {})
        return gradients

    def _note(self) -> None:
        self.states[self.iteration] = {
            number: state.to_held(
                self.layout.parameters[number],
                parameter.detach().clone(),
                {
                    name: value.clone() if isinstance(value, torch.Tensor) else value
                    for name, value in self.optimizer.state.get(parameter, {}).items()
                },
            )
            for number, parameter in enumerate(self.parameters)
        }

    def fetch(self, node: int, shard: int, iteration: int) -> tuple[pb.SeedHeader, dict[int, Any]]:
        request = pb.FetchRequest(
            job=self.job.job, shard=pb.Shard(group=self.group, shard=shard), iteration=iteration
        )
        reader = state.SeedReader(self.stubs[node].Fetch(request, timeout=10))
        return reader.header, reader.read_all(self.layout.parameters)

    def check(self, node: int, shard: int, iteration: int) -> pb.SeedHeader:
        """Check that a node's state of an iteration is the optimizer's; return its header."""
        header, tensors = self.fetch(node, shard, iteration)
        assert set(tensors) == set(self.layout.of_shard(shard))
        for number, (tensor, values) in tensors.items():
            expected, expected_values = self.states[iteration][number]
            assert torch.equal(tensor, expected), f"parameter {number} after {iteration}"
            assert set(values) == set(expected_values)
            for name, value in values.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected_values[name])), name
        return header
