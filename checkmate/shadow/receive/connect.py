"""Connecting a stream: a TCP connection to the switch's stub, and one hello (design, section 4)."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Sequence
from ipaddress import IPv4Address
from pathlib import Path
from typing import Final

from checkmate.base.wording import counted
from checkmate.keys.macs import hello_mac
from checkmate.wire import tcp
from checkmate.wire.tag import Ends, Hello

RECEIVE_BUFFER = 64 << 20
"""Bytes per stream; enough for the longest pause of a shadow node."""
ORDINARY_BUFFER: Final = 4 << 20
"""Bytes of a socket's buffer that any user may have. With copies by hosts, more waits in trainers' memory."""

_TCP_MEM = Path("/proc/sys/net/ipv4/tcp_mem")
TCP_MEM_UNSEEN: Final = "net.ipv4.tcp_mem is not visible in this network namespace, and was not checked"


class StreamError(RuntimeError):
    """A stream cannot be connected; the message has the reason."""

    exit_code = 1


def connect_stream(
    nic_ip: str,
    stub: tuple[str, int],
    hello: Hello,
    key: bytes,
    *,
    device: str | None = None,
    receive_buffer: int = RECEIVE_BUFFER,
    timeout: float = 10,
) -> socket.socket:
    """Connect a stream from one of our NICs.

    Args:
        nic_ip: the NIC's address.
        stub: address and port of the switch's stub.
        hello: the hello to send; its time is the present one (`node_time`).
        key: the job's secret `hello.key`.
        device: the NIC's interface, if its address alone is ambiguous.
        receive_buffer: bytes of the socket's buffer; needs CAP_NET_ADMIN.
        timeout: seconds to wait for the connection, and for the acknowledgement of the hello.

    Returns:
        A blocking socket whose hello is acknowledged: from then on the switch sends copies.

    Raises:
        StreamError: if the controller refuses or does not answer, or the buffer is not permitted.
    """
    where = f"stream (boundary {hello.boundary}, channel {hello.channel}, shadow id {hello.shadow_id})"
    way = f"from {nic_ip} to the stub {stub[0]}:{stub[1]}"
    sock = socket.socket()
    try:
        _prepare(sock, nic_ip, device, receive_buffer)
        sock.settimeout(timeout)
        _open(sock, stub, way)
        try:
            mac = hello_mac(key, hello.covered(_ends(sock, stub)))
            sock.sendall(hello.pack(mac))  # into an empty buffer: one segment
            tcp.drain(sock, timeout)
            tcp.check_alive(sock)
        except ConnectionError:
            raise StreamError(
                f"{where} {way}: the controller refused the hello; its log has the reason "
                "(such as other keys, a clock that differs, another version, or another node's stream)"
            ) from None
        except TimeoutError:
            raise StreamError(
                f"{where} {way}: the controller did not acknowledge the hello within {timeout:g} s"
            ) from None
        sock.settimeout(None)
        return sock
    except BaseException:
        sock.close()
        raise


def node_time() -> int:
    """Return the time of a hello: microseconds since the epoch, by this machine's clock."""
    return time.time_ns() // 1000


def check_host(nic_ips: Sequence[str], receive_buffer: int = RECEIVE_BUFFER) -> None:
    """Raise `StreamError` if this machine lacks one of the addresses, or the right to such buffers."""
    for ip in nic_ips:
        with socket.socket() as sock:
            _prepare(sock, ip, None, receive_buffer)


def tcp_memory(streams: int, receive_buffer: int = RECEIVE_BUFFER) -> tuple[int, int, int]:
    """Return the least `net.ipv4.tcp_mem` for N streams, in pages of this machine."""
    # The kernel doubles the value of SO_RCVBUFFORCE for its own overhead (man 7 socket).
    pages = -(-2 * receive_buffer * streams // resource.getpagesize())
    return pages, pages * 5 // 4, pages * 3 // 2


def tcp_memory_shortfall(streams: int, receive_buffer: int = RECEIVE_BUFFER) -> str | None:
    """Return a warning, with a sysctl command, if the kernel has too little memory for N streams.

    Above tcp_mem's second value the kernel shrinks windows, which would cost gradients.
    """
    pages, *_ = setting = tcp_memory(streams, receive_buffer)
    try:
        pressure = int(_TCP_MEM.read_text().split()[1])
    except FileNotFoundError:
        return TCP_MEM_UNSEEN
    if pages <= pressure:
        return None
    megabytes = pages * resource.getpagesize() >> 20
    return (
        f"{counted(streams, 'stream')} may hold {megabytes} MB, more than net.ipv4.tcp_mem allows; "
        f'raise it: sysctl -w net.ipv4.tcp_mem="{" ".join(map(str, setting))}"'
    )


def _prepare(sock: socket.socket, nic_ip: str, device: str | None, receive_buffer: int) -> None:
    """Set buffer and NIC. The buffer must be set before the handshake, which fixes the window scale."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, tcp.SO_RCVBUFFORCE, receive_buffer)
        if device is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
    except PermissionError:
        raise StreamError(
            f"no right to a receive buffer of {receive_buffer >> 20} MB: run as root, or with CAP_NET_ADMIN"
        ) from None
    except OSError as error:
        raise StreamError(f"device {device}: {error.strerror}") from None
    try:
        sock.bind((nic_ip, 0))
    except OSError as error:
        raise StreamError(f"{nic_ip} is not an address of this machine ({error.strerror})") from None


def _ends(sock: socket.socket, stub: tuple[str, int]) -> Ends:
    ip, port = sock.getsockname()  # unlike the peer's name, it is known even after a RST
    return Ends(IPv4Address(ip), port, IPv4Address(stub[0]), stub[1])


def _open(sock: socket.socket, stub: tuple[str, int], way: str) -> None:
    try:
        sock.connect(stub)
    except TimeoutError:
        raise StreamError(f"no answer {way}: is the switch's controller running?") from None
    except ConnectionRefusedError:
        raise StreamError(f"refused {way}: the controller does not know this NIC, or that port") from None
    except OSError as error:
        raise StreamError(f"no connection {way}: {error.strerror}") from None
