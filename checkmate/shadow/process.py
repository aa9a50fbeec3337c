"""The process that `checkmate shadow` runs: a node, its service, and its streams to other nodes."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Final

import torch

from checkmate.events.event_log import EventLog
from checkmate.events.kinds import ITERATION_COMMITTED, Occurrence
from checkmate.job.addresses import split_address
from checkmate.job.schema import Job
from checkmate.keys.access import Access, access
from checkmate.keys.callers import GRADIENT_STREAM
from checkmate.keys.roles import Role, Secret
from checkmate.optim.kernel import compile_for
from checkmate.rpc import shadow_pb2 as pb
from checkmate.shadow import memory
from checkmate.shadow.admission import CallerGate
from checkmate.shadow.calls.begin import node_status
from checkmate.shadow.calls.transfer import take
from checkmate.shadow.copier import Copier
from checkmate.shadow.inbox import Inbox
from checkmate.shadow.node import GRACE, Node
from checkmate.shadow.own_file import OwnJobFile
from checkmate.shadow.peers import Peers
from checkmate.shadow.receive.connect import (
    RECEIVE_BUFFER,
    TCP_MEM_UNSEEN,
    check_host,
    tcp_memory_shortfall,
)
from checkmate.shadow.receive.hold_plans import full_buffers
from checkmate.shadow.receive.part_listener import PartListener
from checkmate.shadow.receive.stream_threads import MakeSource
from checkmate.shadow.service import (
    Server,
    check_address,
    gradients_listener,
    records_listener,
    share_buffers,
)

_SPARE_CONNECTIONS: Final = 16

log = logging.getLogger("checkmate")


def _metrics_server(address: str, node: Node) -> AbstractContextManager[object]:
    from checkmate.base.metrics import MetricsServer  # noqa: PLC0415 - an extra
    from checkmate.shadow.metrics import families, not_ready  # noqa: PLC0415

    def status() -> pb.NodeStatus:
        return node_status(node, node.job.job)

    return MetricsServer(
        address,
        lambda: families(status(), node.state.tally, node.unread()),
        lambda: not_ready(status()),
    )


def _parts_source(job: Job, node_id: int, allowed: Access, undo: ExitStack) -> MakeSource:
    """Return what makes the source of a node's streams if hosts copy; `undo` closes the port's listener."""
    listener = gradients_listener(job, node_id)
    undo.callback(listener.close)
    gate = None
    if job.encrypt and allowed.keys is not None:
        gate = CallerGate(job, allowed.keys, GRADIENT_STREAM)
    return partial(PartListener, job, listener, allowed.secret(Secret.GRADIENTS), gate)


class Serving:
    """A running shadow node, as a context manager."""

    def __init__(
        self,
        job: Job,
        node_id: int,
        *,
        receive_buffer: int = RECEIVE_BUFFER,
        grace: float = GRACE,
        threads: int | None = None,
        insecure: bool = False,
        metrics: str | None = None,
        events: EventLog | None = None,
        file: Path | None = None,
    ) -> None:
        """Prepare a node, which runs from `__enter__` on.

        Args:
            job: the node's job.
            node_id: the node's id in the job.
            receive_buffer: bytes of each stream's socket buffer.
            grace: seconds until missing bytes of a stream count as lost.
            threads: threads of a step; by default one per core.
            insecure: serve everybody, without keys and TLS.
            metrics: HOST:PORT at which metrics are served.
            events: this process's event log, which is served.
            file: the job file, which the node reads again if training restarts with other ranks.

        Raises:
            StreamError: if this machine lacks the NICs' addresses or the right to such buffers.
            ServeError: if an address cannot be used.
            KeysError: if the node's keys are missing or can't be used.
            MetricsError: if `metrics` cannot be used.
        """
        at = job.node(node_id)
        hosts = dict.fromkeys((split_address(at.mgmt)[0], at.records_at[0]))
        allowed = access(job, Role.SHADOW, insecure=insecure, hosts=hosts)
        check_address(job, node_id)
        by_hosts = job.copies == "host"
        if not by_hosts:  # else what comes too fast waits in the trainers' memory
            check_host([str(nic.ip) for nic in job.node(node_id).nics], receive_buffer)
        memory.one_arena()
        memory.load_optimizers()
        compile_for([torch.float32])  # before training begins: that takes seconds, once on a machine
        with ExitStack() as undo:
            listener = records_listener(job, node_id, None if by_hosts else receive_buffer)
            undo.callback(listener.close)
            make_source = _parts_source(job, node_id, allowed, undo) if by_hosts else None
            gate = CallerGate(job, allowed.keys) if allowed.keys is not None else None
            self.node = Node(
                job,
                node_id,
                allowed,
                receive_buffer=receive_buffer,
                grace=grace,
                threads=threads,
                make_source=make_source,
                file=None if file is None else OwnJobFile(file, job, node_id),
            )
            undo.callback(self.node.close)
            self._metrics = _metrics_server(metrics, self.node) if metrics is not None else nullcontext()
            if by_hosts:
                self.node.on_take_up.append(partial(share_buffers, listener))
            else:
                self._check_memory(receive_buffer)
                self.node.on_take_up.append(lambda _: self._check_memory(receive_buffer))
            # Two of each rank, because an old connection may linger.
            self._inbox = Inbox(
                listener,
                partial(take, self.node),
                gate,
                lambda: 2 * self.node.job.rank_count + _SPARE_CONNECTIONS,
            )
            self.node.also_unread.append(self._inbox.unread)
            self.node.trainers = self._inbox.trainers
            self._peers = Peers(self.node)
            self._copier = Copier(self.node)
            self._server = Server(self.node, self._peers, events)
            self.node.on_take_up.append(self._server.follow)
            undo.pop_all()

    def _check_memory(self, receive_buffer: int) -> None:
        """Log if the kernel has too little memory for the node's streams, and add it to the status."""
        shortfall = tcp_memory_shortfall(full_buffers(self.node.plans), receive_buffer)
        if shortfall == TCP_MEM_UNSEEN:  # which is not a problem of the node
            log.warning("%s", shortfall)
        elif shortfall:
            with self.node.moving() as state:
                state.tell(shortfall)

    def __enter__(self) -> Serving:
        self._server.__enter__()
        self.node.start()
        self._inbox.start()
        self._peers.start()
        self._copier.start()
        self._metrics.__enter__()
        return self

    def reached(self) -> Occurrence | None:
        """Return the event of the last committed iteration, if there is one."""
        committee = self.node.state.committee
        if committee.committed < 0:
            return None
        return ITERATION_COMMITTED(incarnation=committee.incarnation, iteration=committee.committed)

    def __exit__(self, *_: object) -> None:
        self._metrics.__exit__(None, None, None)
        self._peers.stop()
        self._inbox.stop()
        self.node.close()
        self._copier.stop()
        self._server.__exit__()
