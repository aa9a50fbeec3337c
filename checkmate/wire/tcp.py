"""What the end hosts need of Linux's TCP: tuned sockets, and what the peer has acknowledged."""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import struct
import termios
import time

SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33  # not among Python's names

_POLL_SECONDS = 0.001
_TOTAL_RETRANS = 100  # tcpi_total_retrans in struct tcp_info


def tune_for_bulk(sock: socket.socket) -> None:
    """Loss-based congestion control, for BBR paces and is slow over veth; and no Nagle delay."""
    for algorithm in (b"cubic", b"reno"):
        with contextlib.suppress(OSError):  # not in this kernel; reno always is
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm)
            break
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def notice_vanished(sock: socket.socket, seconds: int) -> None:
    """Have reading fail once the peer's machine has said nothing for so long, not even that it is there.

    Without this, whoever only reads waits for ever for a machine that lost its power. (RFC 9293, keep-alives;
    a process that is merely busy, or stopped, is there.)
    """
    probes = 5
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, seconds // (probes + 1)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, seconds // (probes + 1)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def unacknowledged(sock: socket.socket) -> int:
    """How many of the written bytes the peer has not acknowledged (SIOCOUTQ)."""
    answer = fcntl.ioctl(sock, termios.TIOCOUTQ, b"\0" * 4)
    return int(struct.unpack("i", answer)[0])


def drain(sock: socket.socket, timeout: float) -> None:
    """Wait until all is acknowledged; `TimeoutError` after `timeout` seconds, `OSError` where it broke."""
    deadline = time.monotonic() + timeout
    while left := unacknowledged(sock):
        check_alive(sock)
        if time.monotonic() > deadline:
            raise TimeoutError(f"the peer has not acknowledged {left} bytes in {timeout:g} s")
        time.sleep(_POLL_SECONDS)


def check_alive(sock: socket.socket) -> None:
    """`ConnectionError` where the connection is broken; a half-closed one is not."""
    poller = select.poll()
    poller.register(sock, 0)
    if poller.poll(0):
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        raise ConnectionResetError(error, "the connection broke with bytes unacknowledged")


def retransmitted(sock: socket.socket) -> int:
    """How many segments the kernel has sent again on this connection (TCP_INFO)."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TOTAL_RETRANS + 4)
    return int(struct.unpack_from("I", info, _TOTAL_RETRANS)[0])
