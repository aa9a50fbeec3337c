"""A small training to drive shadow nodes with, in one process: torch's own optimizer, and no ring.

It plays the switch, too: ordinary TCP servers at the stubs' addresses, which send each stream what was
"tagged", from the hello's base on, and nothing more once a byte was missed, as a TCP receiver sees it.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc
import torch

from checkmate import optimizers, state
from checkmate.layout import Layout, Parameter, make_layout
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.channels import open_channel
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from checkmate.schedule import StreamLayout, stream_layout
from checkmate.schema import Job
from checkmate.wire import HELLO_LENGTH, Hello
from tests.jobs_made import job_data

SHAPES = ((64, 32), (32,), (40, 64), (40,), (3, 40), (3,))
RUN = "first"


def free_port(ip: str) -> int:
    with socket.create_server((ip, 0)) as server:
        return int(server.getsockname()[1])


def local_job(**kwargs: Any) -> Job:
    """A job whose shadow nodes and stubs are all on this machine's loopback."""
    data = job_data(**kwargs)
    for node in data["shadow_nodes"]:
        number = node["id"]
        node["mgmt"] = f"127.0.3.{number + 1}:{free_port(f'127.0.3.{number + 1}')}"
        for index, nic in enumerate(node["nics"]):
            nic["ip"] = f"127.0.{4 + index}.{number + 1}"
    for index, switch in enumerate(data["fabric"]["switches"]):
        switch["stub"]["ip"] = f"127.0.2.{index + 1}"
        switch["stub"]["port"] = free_port(switch["stub"]["ip"])
    return Job.model_validate(data)


StreamKey = tuple[int, int, int]
"""Boundary, channel, shard."""


class Copies:
    """The stubs of a job's switches. What is tagged goes to every connected holder."""

    def __init__(self, job: Job) -> None:
        self._lock = threading.Lock()
        self._streams: dict[tuple[StreamKey, str], Connected] = {}
        self._nodes = {str(nic.ip): node.id for node in job.shadow_nodes for nic in node.nics}
        self.hellos: list[tuple[int, Hello]] = []
        self.refusing = False
        self.resetting = False
        self._listeners = [
            socket.create_server((str(s.stub.ip), s.stub.port), backlog=64) for s in job.fabric.switches
        ]
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def tagged(self, key: StreamKey, incarnation: int, position: int, data: bytes) -> None:
        """Bytes of a stream, from `position` on."""
        with self._lock:
            found = [s for (k, _), s in self._streams.items() if k == key and s.incarnation == incarnation]
        for stream in found:
            stream.send(position, data)

    def sends(self, key: StreamKey, ip: str, incarnation: int) -> bool:
        """Whether that NIC gets the stream. (A real stub acknowledges a hello only then.)"""
        with self._lock:
            found = self._streams.get((key, ip))
            return found is not None and found.incarnation == incarnation

    def cut(self, node: int) -> None:
        """Break all of a node's connections."""
        with self._lock:
            for (key, ip), stream in list(self._streams.items()):
                if self._nodes[ip] == node:
                    stream.socket.close()
                    del self._streams[key, ip]

    def lose(self, node: int, count: int, key: StreamKey | None = None) -> None:
        """Lose so many bytes of a node's streams, or of the one that is named."""
        with self._lock:
            for (k, ip), stream in self._streams.items():
                if self._nodes[ip] == node and key in (None, k):
                    stream.lose += count

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        with self._lock:
            for stream in self._streams.values():
                stream.socket.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, address = listener.accept()
            except OSError:
                return  # closed
            if self.refusing:
                connection.close()
                continue
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
            hello = Hello.unpack(connection.recv(HELLO_LENGTH, socket.MSG_WAITALL))
            if self.resetting:  # what was acknowledged a moment ago
                self.hellos.append((self._nodes[address[0]], hello))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()
                continue
            key = (hello.boundary, hello.channel, hello.shadow_id)
            with self._lock:
                self.hellos.append((self._nodes[address[0]], hello))
                old = self._streams.get((key, address[0]))
                self._streams[key, address[0]] = Connected(connection, hello)
            if old is not None:
                old.socket.close()


class Connected:
    """One connection: `next` is the byte (mod 2^32) that its receiver waits for."""

    def __init__(self, connection: socket.socket, hello: Hello) -> None:
        self.socket, self.incarnation = connection, hello.incarnation
        self.next = hello.base
        self.lose = 0

    def send(self, position: int, data: bytes) -> None:
        if self.lose:
            lost = min(self.lose, len(data))
            self.lose -= lost
            position, data = position + lost, data[lost:]
        behind = (self.next - position) % (1 << 32)
        if behind >= 1 << 31 or not data:
            return  # a byte was missed: TCP waits for it for ever
        rest = data[behind:]
        try:
            self.socket.sendall(rest)
        except OSError:
            return  # the node has gone
        self.next = (self.next + len(rest)) % (1 << 32)


class Training:
    """One DP group: parameters, optimizer, and a Record stream of each rank to each node."""

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
        self.ranks = len(job.dp_groups[group].ranks)
        generator = torch.Generator().manual_seed(seed)
        self.parameters = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
        self.optimizer = (make or (lambda ps: torch.optim.AdamW(ps, lr=0.01)))(self.parameters)
        self.layout: Layout = make_layout(
            [Parameter(f"p{i}", tuple(p.shape), "float32") for i, p in enumerate(self.parameters)],
            job.shards(group),
            6000,
        )
        self.incarnation = 0
        self.run = RUN
        self.buffers: dict[str, torch.Tensor] = {}
        """What records bring: those whose names are in `saying`, with the next one."""
        self.saying: list[str] = []
        self.first = 0
        self.iteration = -1
        self.states: dict[int, dict[int, tuple[torch.Tensor, dict[str, Any]]]] = {}
        self._note()
        self.stubs = {n.id: ShadowStub(self._channel(n.id)) for n in job.shadow_nodes}
        self.lines: dict[tuple[int, int], Line] = {}
        self.layouts: dict[StreamKey, StreamLayout] = {
            (2 * group + side, channel, shard): stream_layout(
                self.layout.schedule, job.channels, channel, self.ranks, side=side, shadow_id=shard
            )
            for side in (0, 1)
            for channel in range(job.channels)
            for shard in range(job.shards(group))
        }

    def _channel(self, node: int) -> grpc.Channel:
        return open_channel(self.job, node)

    def holders(self, shard: int) -> list[int]:
        return [self.job.holder(self.group, shard, i + 1).id for i in range(self.job.replicas)]

    def begin(self, nodes: Sequence[int], *, keep: bool = False, run: str = RUN, **other: Any) -> list[str]:
        """Begin, on these nodes, and open their Record streams; the warnings."""
        found: list[str] = []
        self.run = run
        for node in nodes:
            request = self.begin_request(keep=keep, run=run)
            for name, value in other.items():
                setattr(request, name, value)
            found += self.stubs[node].Begin(request, timeout=10).warnings
            for position in range(self.ranks):
                self.lines[node, position] = Line(self.stubs[node])
        return found

    def begin_request(self, *, keep: bool = False, run: str = RUN) -> pb.BeginRequest:
        number = {parameter: i for i, parameter in enumerate(self.parameters)}
        return pb.BeginRequest(
            job=self.job.job,
            group=self.group,
            incarnation=self.incarnation,
            first_iteration=self.first,
            next_iteration=self.iteration + 1,
            layout=self.layout.to_json(),
            optimizer=optimizers.spec_of(self.optimizer, number),
            keep=keep,
            torch=torch.__version__,
            capability=torch.backends.cpu.get_cpu_capability(),
            device="cpu",
            ranks=self.ranks,
            run=run,
            buffers=sorted(self.buffers),
        )

    def seed(self, node: int, shard: int, parameters: Sequence[int] | None = None) -> list[int]:
        """Send a shard's parameters, or those named, as they are now; those that are asked for again."""
        numbers = self.layout.of_shard(shard) if parameters is None else list(parameters)
        header = pb.SeedHeader(
            job=self.job.job,
            incarnation=self.incarnation,
            run=self.run,
            shard=pb.Shard(group=self.group, shard=shard),
            iteration=self.iteration,
            parameters=numbers,
        )
        now = self.states[self.iteration]
        seeds = state.to_seeds(header, ((n, *now[n]) for n in numbers))
        return list(self.stubs[node].Seed(seeds, timeout=10).again)

    def seed_all(self) -> None:
        for shard in range(self.job.shards(self.group)):
            for node in self.holders(shard):
                assert self.seed(node, shard) == []

    def iterate(self, *, send: bool = True, records: Sequence[int] | None = None) -> int:
        """One iteration: gradients, their copies, the step, the records (to those nodes)."""
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
            self.copies.tagged(key, self.incarnation, layout.nbytes * (self.iteration - self.first), data)

    def record(self, nodes: Sequence[int] | None = None) -> None:
        for (node, position), line in list(self.lines.items()):
            if nodes is None or node in nodes:
                line.send(self.part(position))

    def part(self, position: int) -> pb.RecordPart:
        part = pb.RecordPart(
            job=self.job.job,
            incarnation=self.incarnation,
            run=self.run,
            group=self.group,
            position=position,
            iteration=self.iteration,
            rng=b"rng %d of %d" % (self.iteration, position),
            answer=True,
        )
        for side, boundary in ((0, 0), (1, self.ranks - 1)):
            for (number, channel, shard), layout in self.layouts.items():
                if position == boundary and number % 2 == side:
                    end = layout.nbytes * (self.iteration - self.first + 1)
                    part.ends.add(side=side, channel=channel, shard=shard, end=end)
        if position == 0:
            if self.saying:
                part.buffers = state.dumps({name: self.buffers[name] for name in self.saying})
            part.step.options.extend(optimizers.options_of(g) for g in self.optimizer.param_groups)
            number = self.iteration % len(self.parameters)
            piece = bytes(state.bytes_of(self.parameters[number].detach().contiguous()))[:256]
            part.step.slices.add(parameter=number, offset=0, data=piece)
        return part

    def give_wanted(self) -> None:
        """Seed what the nodes have asked for in their replies."""
        for (node, position), line in list(self.lines.items()):
            for wanted in line.wanted():
                assert wanted.shard % self.ranks == position
                self.seed(node, wanted.shard, wanted.parameters)

    def close(self) -> None:
        for line in self.lines.values():
            line.close()

    def _gradients(self) -> dict[int, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 + self.iteration)
        found = {}
        for index, bucket in enumerate(self.layout.buckets):
            flat = torch.randn(bucket.elements, generator=generator)
            found[index] = flat
            for place in bucket.places:
                parameter = self.parameters[place.parameter]
                parameter.grad = flat[place.start : place.stop].view(parameter.shape).clone()
        return found

    def _note(self) -> None:
        self.states[self.iteration] = {
            number: (
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
        reader = state.from_seeds(self.stubs[node].Fetch(request, timeout=10))
        return reader.header, reader.all()

    def check(self, node: int, shard: int, iteration: int) -> pb.SeedHeader:
        """What a node serves of an iteration is what the optimizer had."""
        header, found = self.fetch(node, shard, iteration)
        assert set(found) == set(self.layout.of_shard(shard))
        for number, (tensor, values) in found.items():
            expected, theirs = self.states[iteration][number]
            assert torch.equal(tensor, expected), f"parameter {number} after {iteration}"
            assert set(values) == set(theirs)
            for name, value in values.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[name])), name
        return header


class Line:
    """A rank's Record stream to a node."""

    def __init__(self, stub: ShadowStub) -> None:
        self._queue: queue.SimpleQueue[pb.RecordPart | None] = queue.SimpleQueue()
        self.replies: list[pb.RecordReply] = []
        self.error: grpc.RpcError | None = None
        self._taken = 0
        self._call = stub.Record(self._parts())
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def send(self, part: pb.RecordPart) -> None:
        self._queue.put(part)

    def wanted(self) -> list[pb.SeedWanted]:
        """What replies since the last call have asked for."""
        replies = self.replies[self._taken :]
        self._taken += len(replies)
        return [wanted for reply in replies for wanted in reply.wanted]

    def close(self) -> None:
        self._queue.put(None)
        self._call.cancel()
        self._thread.join()

    def _parts(self) -> Iterator[pb.RecordPart]:
        while (part := self._queue.get()) is not None:
            yield part

    def _read(self) -> None:
        try:
            for reply in self._call:
                self.replies.append(reply)
        except grpc.RpcError as error:
            self.error = error
