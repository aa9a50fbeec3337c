"""The process with a case's shadow nodes and its emulated switch, which is killed at the end of the case."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import ExitStack
from multiprocessing.connection import Connection
from unittest import mock

from checkmate.job.schema import Job
from checkmate.shadow.process import Serving
from checkmate.wire import tcp
from testbed.copies import Copies
from tests.script_fuzz.children import prepare_child
from tests.script_fuzz.reducer import HEADER

GRACE = 0.5
"""Seconds until missing bytes of a stream count as lost."""


def serve(job: Job, switch: str, log: str, ready: Connection) -> None:
    """Serve a job's shadow nodes, and its switch at a path, until this process is killed."""
    prepare_child(log)
    logging.basicConfig(level=logging.INFO)
    _allow_buffers()
    with ExitStack() as stack:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(switch)
        listener.listen()
        copies = Copies(job)  # none, if hosts copy
        for node in job.shadow_nodes:
            stack.enter_context(Serving(job, node.id, grace=GRACE, threads=1))
        ready.send(True)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_forward, args=(copies, connection), daemon=True).start()


def _allow_buffers() -> None:
    """Have streams take smaller buffers if this process has no right to large ones. They need none."""
    with socket.socket() as trial:
        try:
            trial.setsockopt(socket.SOL_SOCKET, tcp.SO_RCVBUFFORCE, 1 << 20)
        except PermissionError:
            mock.patch.object(tcp, "SO_RCVBUFFORCE", socket.SO_RCVBUF).start()


def _forward(copies: Copies, connection: socket.socket) -> None:
    """Give the streams of one rank to the switch until the rank ends."""
    with connection, connection.makefile("rb", buffering=1 << 20) as stream:
        while len(header := stream.read(HEADER.size)) == HEADER.size:
            boundary, channel, shard, incarnation, position, length = HEADER.unpack(header)
            data = stream.read(length)
            copies.send_tagged((boundary, channel, shard), incarnation, position % (1 << 32), data)
