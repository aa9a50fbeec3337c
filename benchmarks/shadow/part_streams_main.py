"""The ranks of a benchmark of streams of parts, in one process: each sends iterations until it is ended.

python -m benchmarks.shadow.part_streams_main PORT STREAMS BYTES ITERATIONS

Parts are zeros. Headers and MACs are made before anything is sent, so that the receiving side alone pays for
MACs while it is measured.
"""

from __future__ import annotations

import resource
import select
import socket
import sys
from collections import deque

from checkmate.keys.macs import GRADIENTS, ConnectionProof, ConnectionSide, PartMacs, new_nonce
from checkmate.wire import copies, tcp
from checkmate.wire.copies import PartGreeting, PartHeader

JOB, START, KEY = "streams", b"s" * 16, bytes(32)
READY = "ready"
_AUTHENTICATED_AT_ONCE = 1 << 20


def raise_descriptors(count: int) -> None:
    """Have this process open as many files as it needs, if it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, count), hard), hard))


class SendingRank:
    """A connection to a node, and what it sends."""

    def __init__(self, port: int, position: int, part: memoryview, iterations: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        tcp.tune_for_bulk(self.sock)
        nonce = new_nonce()
        greeting = PartGreeting(
            group=0,
            position=position,
            shard=0,
            incarnation=0,
            nbytes=len(part),
            job=copies.job_digest(JOB),
            start=START,
            nonce=nonce,
        ).pack()
        self.sock.sendall(greeting)
        node_nonce = copies.unpack_challenge(tcp.receive_exactly(self.sock, copies.CHALLENGE_BYTES))
        proof = ConnectionProof(KEY, greeting, nonce, node_nonce, GRADIENTS)
        self.sock.sendall(proof.mac(ConnectionSide.CONNECTS))
        tcp.receive_exactly(self.sock, copies.ANSWER_BYTES)
        self._pieces = deque[memoryview]()
        macs = PartMacs(proof)
        for iteration in range(iterations):
            header = PartHeader(iteration, len(part)).pack()
            mac = macs.begin(header)
            for start in range(0, len(part), _AUTHENTICATED_AT_ONCE):
                mac.update(part[start : start + _AUTHENTICATED_AT_ONCE])
            self._pieces.extend((memoryview(header), part, memoryview(mac.end())))
        self.sock.setblocking(False)

    def send(self) -> bool:
        """Send what the socket takes. Return whether something is left."""
        while self._pieces:
            pieces = [self._pieces[index] for index in range(min(3, len(self._pieces)))]
            try:
                count = self.sock.sendmsg(pieces)
            except BlockingIOError:
                return True
            while count and count >= len(self._pieces[0]):
                count -= len(self._pieces.popleft())
            if count:
                self._pieces[0] = self._pieces[0][count:]
        return False


def main() -> None:
    port, streams, nbytes, iterations = map(int, sys.argv[1:5])
    raise_descriptors(streams + 64)
    part = memoryview(bytes(nbytes))
    ranks = [SendingRank(port, position, part, iterations) for position in range(streams)]
    print(READY, flush=True)
    of_socket = {rank.sock.fileno(): rank for rank in ranks}
    epoll = select.epoll()
    for number in of_socket:
        epoll.register(number, select.EPOLLOUT)
    while of_socket:
        for number, events in epoll.poll():
            if events & (select.EPOLLHUP | select.EPOLLERR):
                return
            if not of_socket[number].send():
                epoll.modify(number, 0)


if __name__ == "__main__":
    main()
