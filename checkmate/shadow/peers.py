"""Exchange of commit messages between nodes: one gRPC stream, with a thread, to each node with a lower id.

A node reports every change to the decider, and sends heartbeats to the others. Each answers up to which
iteration to step (`commit`).
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import grpc
from google.protobuf.message import Message

from checkmate.base.wording import shortened
from checkmate.job.addresses import split_address
from checkmate.nodes.standing import Shard
from checkmate.nodes.stubs import refusal
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc import shadow_pb2_grpc as rpc
from checkmate.rpc.channels import open_channel
from checkmate.rpc.protocol import PROTOCOL
from checkmate.shadow.logic.bounds import check_decision, check_progress
from checkmate.shadow.logic.commit import PATIENCE, KeptShard, Progress
from checkmate.shadow.logic.group import CallRefused, check_job
from checkmate.shadow.node import Node

M = TypeVar("M", bound=Message)

log = logging.getLogger("checkmate")

HEARTBEAT = 0.25
_BACKOFF = (0.05, 1.0)
_PROBE_SECONDS = 0.5
_PROBE_PAUSES = (0.0, 0.05, 0.2, 0.5)


class Peers:
    """Our streams to nodes with lower ids, and our answers to nodes with higher ids."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._stopping = threading.Event()
        self._calls: dict[int, grpc.Call] = {}
        self._newest: dict[int, threading.Event] = {}
        """The end of the newest stream from each node with a higher id."""
        self._complaints: dict[int, str] = {}
        lower = [peer.id for peer in node.job.shadow_nodes if peer.id < node.id]
        self._threads = [
            threading.Thread(
                target=self._tell_forever,
                args=(peer, open_channel(node.job, peer, node.access.keys)),
                name=f"peer {peer}",
                daemon=True,
            )
            for peer in lower
        ]

    def start(self) -> None:
        """Open the streams, and reopen them when they break."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Close the streams."""
        self._stopping.set()
        self._node.touch()
        for call in list(self._calls.values()):
            call.cancel()
        for thread in self._threads:
            thread.join()

    def answer(self, reports: Iterable[pb.Progress], call_end: threading.Event) -> Iterator[pb.Decision]:
        """Process the reports of a node with a higher id, and yield decisions, until its stream ends.

        Raises `CallRefused` if a report is invalid.
        """
        stream_end, why = threading.Event(), list[str]()
        hear = threading.Thread(
            target=self._hear, args=(reports, stream_end, why), name="peer reports", daemon=True
        )
        hear.start()
        news = News(self._decision, lambda: True)
        while not (stream_end.is_set() or call_end.is_set() or self._stopping.is_set()):
            if (decision := news.wait(self._node.state_changed)) is not None:
                yield decision
        if why:
            raise CallRefused(why[0])

    def _hear(self, reports: Iterable[pb.Progress], stream_end: threading.Event, why: list[str]) -> None:
        node = None
        try:
            for report in reports:
                self._check(report)
                if node is None:
                    node = report.node
                    if older := self._newest.get(node):
                        older.set()
                    self._newest[node] = stream_end
                if report.node != node or stream_end.is_set():
                    break  # an old stream that ends late
                self._take(report)
        except grpc.RpcError:
            pass  # a broken stream is handled like one that ended
        except CallRefused as error:
            why.append(str(error))
        finally:
            stream_end.set()
            if node is not None:
                self._ask_whether_ended(node, stream_end)

    def _check(self, report: pb.Progress) -> None:
        with self._node.state_changed:
            state = self._node.state
            check_job(state.job, report.job)
            check_progress(state.job, state.id, report, state.committee.start, state.newest)

    def _ask_whether_ended(self, peer: int, stream: threading.Event) -> None:
        """Probe the node of a stream that broke; again for a moment, because a dying process may listen."""
        for pause in _PROBE_PAUSES:
            if self._stopping.wait(pause) or self._newest[peer] is not stream or self._has_ended(peer):
                return

    def _has_ended(self, peer: int) -> bool:
        """Handle the end of a stream: if the node refuses connections, its process has ended. Return that."""
        address = split_address(self._node.job.node(peer).mgmt)
        try:
            socket.create_connection(address, _PROBE_SECONDS).close()
        except ConnectionRefusedError:
            with self._node.moving() as state:
                state.committee.note_end(peer)
            return True
        except OSError:
            pass  # unreachable: it may only be silent
        return False

    def _take(self, report: pb.Progress) -> None:
        progress = Progress(
            incarnation=report.incarnation,
            in_full=report.in_full,
            stepped=report.stepped,
            live=report.live,
            patience=report.patience or PATIENCE,
            shards=_shards_from(report.shards),
            kept_shards=_kept_from(report.kept),
            pressed=report.pressed,
            start=report.start,
        )
        with self._node.moving() as state:
            state.committee.hear_report(report.node, progress, self._node.now())

    def _tell_forever(self, peer: int, channel: grpc.Channel) -> None:
        stub = rpc.ShadowStub(channel)
        pause = _BACKOFF[0]
        while not self._stopping.is_set():
            try:
                call = stub.Commit(self._reports(peer))
                self._calls[peer] = call
                for decision in call:
                    self._complaints.pop(peer, None)
                    pause = _BACKOFF[0]
                    self._hear_decision(peer, decision)
            except grpc.RpcError as error:  # the committee reports a broken stream if it matters
                self._complain(peer, refusal(error))
            except CallRefused as error:
                call.cancel()
                self._complain(peer, str(error))
            self._has_ended(peer)
            self._stopping.wait(pause)
            pause = min(2 * pause, _BACKOFF[1])
        channel.close()

    def _complain(self, peer: int, why: str) -> None:
        """Log why a node and this one do not understand each other, unless that is known."""
        if why and self._complaints.get(peer) != why:
            self._complaints[peer] = why
            log.warning("shadow node %d: %s", peer, shortened(why))

    def _hear_decision(self, peer: int, decision: pb.Decision) -> None:
        with self._node.moving() as state:
            committee = state.committee
            check_decision(state.job, decision, committee.start, state.newest)
            if (decision.incarnation, decision.start) != (committee.incarnation, committee.start):
                decision = pb.Decision(step_to=committee.committed, patience=decision.patience)
            committee.hear_decision(
                peer,
                decision.step_to,
                decision.active,
                self._node.now(),
                _kept_from(decision.kept),
                _shards_from(decision.shards),
                decision.patience or PATIENCE,
                whole=decision.whole,
            )

    def _reports(self, peer: int) -> Iterator[pb.Progress]:
        def decides() -> bool:
            return self._node.state.committee.decider(self._node.now()) == peer

        news = News(self._progress, decides)
        while not self._stopping.is_set():
            if (report := news.wait(self._node.state_changed)) is not None:
                yield report

    def _progress(self) -> pb.Progress:
        progress = self._node.state.committee.progress
        return pb.Progress(
            job=self._node.job.job,
            protocol=PROTOCOL,
            node=self._node.id,
            incarnation=progress.incarnation % 256,
            in_full=progress.in_full,
            stepped=progress.stepped,
            live=progress.live,
            patience=progress.patience,
            shards=_to_shards(progress.shards),
            kept=_to_kept(progress.kept_shards),
            pressed=progress.pressed,
            start=progress.start,
        )

    def _decision(self) -> pb.Decision:
        committee = self._node.state.committee
        return pb.Decision(
            protocol=PROTOCOL,
            incarnation=committee.incarnation % 256,
            step_to=committee.committed,
            active=committee.active,
            start=committee.start,
            kept=_to_kept(committee.progress.kept_shards),
            shards=_to_shards(committee.progress.shards),
            patience=committee.progress.patience,
            whole=committee.is_whole(self._node.now()),
        )


def _shards_from(messages: Iterable[pb.Shard]) -> frozenset[Shard]:
    return frozenset((shard.group, shard.shard) for shard in messages)


def _to_shards(shards: Iterable[Shard]) -> list[pb.Shard]:
    return [pb.Shard(group=group, shard=shard) for group, shard in sorted(shards)]


def _kept_from(messages: Iterable[pb.Kept]) -> tuple[KeptShard, ...]:
    return tuple(((message.shard.group, message.shard.shard), message.stepped) for message in messages)


def _to_kept(shards: Iterable[KeptShard]) -> list[pb.Kept]:
    return [pb.Kept(shard=pb.Shard(group=group, shard=shard), stepped=at) for (group, shard), at in shards]


class News(Generic[M]):
    """The next message of a stream: at once if it changed and is `urgent`, else every `HEARTBEAT` seconds."""

    def __init__(self, now: Callable[[], M], urgent: Callable[[], bool]) -> None:
        self._now, self._urgent = now, urgent
        self._last: M | None = None
        self._sent_at = 0.0

    def wait(self, condition: threading.Condition) -> M | None:
        """Wait for news or the next heartbeat. Return the message to send, if any."""
        with condition:
            fresh = condition.wait_for(lambda: self._now() != self._last and self._urgent(), HEARTBEAT)
            message = self._now()
        if not fresh and time.monotonic() - self._sent_at < HEARTBEAT:
            return None
        self._last, self._sent_at = message, time.monotonic()
        return message
