"""Linux TCP on end hosts: socket options, and the state of connections."""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import struct
import termios
import time
from collections.abc import Callable

SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33  # missing in Python's socket module

_POLL_SECONDS = 0.001
_TOTAL_RETRANS = 100  # tcpi_total_retrans in struct tcp_info


SO_MAX_PACING_RATE = 47  # missing in Python's socket module


def connect(
    address: tuple[str, int], timeout: float, prepare: Callable[[socket.socket], None]
) -> socket.socket:
    """Return a connection to the first of a host's addresses that accepts one.

    `prepare` is called with each socket before it connects. Raise the last attempt's `OSError`.
    """
    failure: OSError | None = None
    for family, kind, protocol, _, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(timeout)
            prepare(sock)
            sock.connect(place)
        except OSError as error:
            failure = error
            sock.close()
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure or OSError(f"{address[0]} has no address")


def mark_class(sock: socket.socket, dscp: int) -> None:
    """Give a socket's packets a DSCP."""
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << 2)
    else:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)


def pace(sock: socket.socket, rate: int) -> None:
    """Have the kernel send at most this many bytes per second, without bursts, on any device."""
    sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("Q", rate))


def tune_for_bulk(sock: socket.socket) -> None:
    """Use loss-based congestion control (BBR's pacing is slow over veth) and disable Nagle."""
    for algorithm in (b"cubic", b"reno"):
        with contextlib.suppress(OSError):  # cubic may be missing, reno never
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm)
            break
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def notice_vanished(sock: socket.socket, seconds: int) -> None:
    """Make reads fail if the peer's machine does not respond to keep-alives for `seconds` (RFC 9293).

    Otherwise a process that only reads waits forever if the peer loses power. The machine of a busy or
    stopped process still responds.
    """
    probes = 5
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, seconds // (probes + 1)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, seconds // (probes + 1)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def end_unacknowledged(sock: socket.socket, seconds: int) -> None:
    """Have the connection end if the peer does not acknowledge what was sent for `seconds` (RFC 5482)."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)


def receive_exactly(sock: socket.socket, nbytes: int, deadline: float | None = None) -> bytes:
    """Return exactly N bytes, by a deadline if there is one, else each within the socket's timeout.

    Raise `TimeoutError` if they do not come in time, `ConnectionResetError` if the connection ends before.
    """
    data = b""
    while len(data) < nbytes:
        if deadline is not None:
            if (seconds := deadline - time.monotonic()) <= 0:
                raise TimeoutError("it says nothing")
            sock.settimeout(seconds)
        more = sock.recv(nbytes - len(data))
        if not more:
            raise ConnectionResetError("it closed the connection")
        data += more
    return data


def unacknowledged(sock: socket.socket) -> int:
    """Return the number of written bytes that the peer has not acknowledged (SIOCOUTQ)."""
    answer = fcntl.ioctl(sock, termios.TIOCOUTQ, b"\0" * 4)
    return int(struct.unpack("i", answer)[0])


def drain(sock: socket.socket, timeout: float) -> None:
    """Wait until all data is acknowledged. Raise `TimeoutError`, or `OSError` if the connection broke."""
    deadline = time.monotonic() + timeout
    while nbytes := unacknowledged(sock):
        check_alive(sock)
        if time.monotonic() > deadline:
            raise TimeoutError(f"the peer did not acknowledge {nbytes} bytes within {timeout:g} s")
        time.sleep(_POLL_SECONDS)


def end_sending(sock: socket.socket) -> None:
    """Tell the peer that nothing follows. Nothing happens if the connection is broken."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)


def check_alive(sock: socket.socket) -> None:
    """Raise `ConnectionError` if the connection is broken. A half-closed one is not."""
    poller = select.poll()
    poller.register(sock, 0)
    if poller.poll(0):
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        raise ConnectionResetError(error, "the connection broke with bytes unacknowledged")


def retransmitted(sock: socket.socket) -> int:
    """Return the number of segments that the kernel has retransmitted on this connection (TCP_INFO)."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TOTAL_RETRANS + 4)
    return int(struct.unpack_from("I", info, _TOTAL_RETRANS)[0])
