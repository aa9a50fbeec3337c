"""The servers of a shadow node, which record the messages of trainers and send given answers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc import shadow_pb2_grpc as rpc
from checkmate.rpc.channels import OPTIONS
from checkmate.rpc.protocol import PROTOCOL
from checkmate.shadow.inbox import Inbox
from checkmate.state import SeedReader
from testbed.ports import free_port

SECONDS = 20.0
"""Longer than any wait in tests."""


def current(status: pb.NodeStatus) -> pb.NodeStatus:
    """Return an answer as a node of this version gives it."""
    answer = pb.NodeStatus(protocol=PROTOCOL)
    answer.MergeFrom(status)
    return answer


class RecordingNode(rpc.ShadowServicer):
    """A node that serves at an address until `stop`; it can be restarted there without state."""

    def __init__(self, address: str = "", shards: Sequence[int] = ()) -> None:
        """Serve at `address`, by default a free one; `shards` are reported as held and seeded after begin."""
        self.address = address or f"127.0.0.1:{free_port()}"  # no connection takes it while the node is away
        self.shards = shards
        self.begins: list[pb.BeginRequest] = []
        self.warnings: list[str] = []
        """Those in each answer to `Begin`."""
        self.filled: list[pb.FilledShard] = []
        """The same, of parameters that it has."""
        self.fences: list[pb.FenceRequest] = []
        self.settles: list[pb.SettleRequest] = []
        self.records_at = f"{self.address.partition(':')[0]}:{free_port()}"
        """Port for step records."""
        self.records: list[pb.RecordPart] = []
        self.reply: Callable[[pb.RecordPart], pb.RecordReply] = lambda part: pb.RecordReply()
        """Returns what replies to records have beside what is wanted."""
        self.refusals: list[pb.RefusedRequest] = []
        self.seeds: list[tuple[pb.SeedHeader, dict[int, object]]] = []
        self.wanted_seeds: list[pb.SeedWanted] = []
        self.again: Callable[[pb.SeedHeader], list[int]] = lambda header: []
        self.status = pb.NodeStatus(holds_nothing=True)
        self.settled = pb.NodeStatus(holds_nothing=True)
        self.hanging = False
        self.answering = threading.Event()
        self.answering.set()
        self.start()

    def start(self) -> None:
        """Serve."""
        self._stopping = False
        self._server = grpc.server(ThreadPoolExecutor(16), options=OPTIONS)
        rpc.add_ShadowServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        self._server.start()
        host, _, port = self.records_at.partition(":")
        self._inbox = Inbox(socket.create_server((host, int(port))), self._take)
        self._inbox.start()

    def stop(self) -> None:
        """Break all connections."""
        self._stopping = True
        self._inbox.stop()
        self._server.stop(0).wait()
        self.answering.set()

    def Begin(self, request: pb.BeginRequest, context: grpc.ServicerContext) -> pb.BeginReply:
        self.begins.append(request)
        while self.hanging and not self._stopping:
            time.sleep(0.05)
        del self.status.holds[:]
        for shard in self.shards:
            self.status.holds.add(
                shard=pb.Shard(group=request.group, shard=shard), incarnation=request.incarnation, seeded=True
            )
        return pb.BeginReply(protocol=PROTOCOL, warnings=self.warnings, filled=self.filled)

    def Refused(self, request: pb.RefusedRequest, context: grpc.ServicerContext) -> pb.RefusedReply:
        while self.hanging and not self._stopping:
            time.sleep(0.05)
        self.refusals.append(request)
        return pb.RefusedReply()

    def _take(self, part: pb.RecordPart, answer: bool, host: str) -> pb.RecordReply | None:
        self.records.append(part)
        while not self.answering.wait(0.05):
            if self._stopping:
                return None
        if not answer:
            return None
        seeds, self.wanted_seeds = self.wanted_seeds, []
        reply = pb.RecordReply(iteration=part.iteration, wanted=seeds)
        reply.MergeFrom(self.reply(part))
        return reply

    def Seed(self, request_iterator: Iterator[pb.Seeds], context: grpc.ServicerContext) -> pb.SeedReply:
        reader = SeedReader(request_iterator)
        self.seeds.append((reader.header, dict(reader.read_all(None))))
        return pb.SeedReply(again=self.again(reader.header))

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.NodeStatus:
        self.answering.wait(SECONDS)
        return current(self.status)

    def Events(self, request: pb.EventsRequest, context: grpc.ServicerContext) -> pb.EventsReply:
        return pb.EventsReply()

    def Fence(self, request: pb.FenceRequest, context: grpc.ServicerContext) -> pb.NodeStatus:
        self.fences.append(request)
        return current(self.status)

    def Reset(self, request: pb.ResetRequest, context: grpc.ServicerContext) -> pb.NodeStatus:
        self.status = pb.NodeStatus(
            holds_nothing=True, discarded=request.generation, generation=request.generation
        )
        return current(self.status)

    def Leave(self, request: pb.LeaveRequest, context: grpc.ServicerContext) -> pb.NodeStatus:
        raise NotImplementedError

    def Reserve(self, request: pb.ReserveRequest, context: grpc.ServicerContext) -> pb.ReserveReply:
        return pb.ReserveReply(granted=False)

    def Release(self, request: pb.ReleaseRequest, context: grpc.ServicerContext) -> pb.ReleaseReply:
        return pb.ReleaseReply()

    def Fetch(self, request: pb.FetchRequest, context: grpc.ServicerContext) -> Iterator[pb.Seeds]:
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "there is nothing to fetch")

    def Meet(self, request: pb.MeetRequest, context: grpc.ServicerContext) -> Iterator[pb.MeetEvent]:
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "nobody meets here")

    def Store(self, request: pb.StoreRequest, context: grpc.ServicerContext) -> pb.StoreReply:
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "nobody has met here")

    def Conclude(self, request: pb.ConcludeRequest, context: grpc.ServicerContext) -> pb.ConcludeReply:
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "nobody has met here")

    def Commit(
        self, request_iterator: Iterator[pb.Progress], context: grpc.ServicerContext
    ) -> Iterator[pb.Decision]:
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "there is nothing to decide")

    def Copy(self, request: pb.CopyRequest, context: grpc.ServicerContext) -> pb.CopyReply:
        return pb.CopyReply()

    def Parts(self, request: pb.PartsRequest, context: grpc.ServicerContext) -> Iterator[pb.RecordPart]:
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "parts are not available")

    def Settle(self, request: pb.SettleRequest, context: grpc.ServicerContext) -> pb.NodeStatus:
        self.settles.append(request)
        return current(self.settled)
