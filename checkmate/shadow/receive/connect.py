"""Connects a stream: an ordinary TCP connection to the switch's stub, and one hello (design, section 4)."""

from __future__ import annotations

import resource
import socket
from collections.abc import Sequence
from pathlib import Path

from checkmate.wire import tcp
from checkmate.wire.tag import Hello

RECEIVE_BUFFER = 64 << 20
"""Bytes a stream: covers the shadow node's longest pause."""

_TCP_MEM = Path("/proc/sys/net/ipv4/tcp_mem")


class StreamError(RuntimeError):
    """A stream can't be connected, and why."""

    exit_code = 1


def connect_stream(
    nic_ip: str,
    stub: tuple[str, int],
    hello: Hello,
    *,
    device: str | None = None,
    receive_buffer: int = RECEIVE_BUFFER,
    timeout: float = 10,
) -> socket.socket:
    """A connected stream from one of our NICs (`device` where its address alone doesn't say which).

    Returns a blocking socket once the controller has acknowledged the hello, from when on the switch sends
    copies. `StreamError` where it refuses, doesn't answer in `timeout` seconds, or this process may not
    have so large a buffer.
    """
    where = f"stream (boundary {hello.boundary}, channel {hello.channel}, shadow id {hello.shadow_id})"
    way = f"from {nic_ip} to the stub {stub[0]}:{stub[1]}"
    sock = socket.socket()
    try:
        _prepare(sock, nic_ip, device, receive_buffer)
        sock.settimeout(timeout)
        _open(sock, stub, way)
        try:
            sock.sendall(hello.pack())  # into an empty buffer: one segment
            tcp.drain(sock, timeout)
            tcp.check_alive(sock)
        except ConnectionError:
            raise StreamError(
                f"{where} {way}: the controller refused the hello; its log says why "
                "(another node's or NIC's stream, or an unknown boundary)"
            ) from None
        except TimeoutError:
            raise StreamError(
                f"{where} {way}: the controller has not acknowledged the hello in {timeout:g} s"
            ) from None
        sock.settimeout(None)
        return sock
    except BaseException:
        sock.close()
        raise


def check_host(nic_ips: Sequence[str], receive_buffer: int = RECEIVE_BUFFER) -> None:
    """`StreamError` where this machine can't have streams: not its addresses, no right to buffers."""
    for ip in nic_ips:
        with socket.socket() as sock:
            _prepare(sock, ip, None, receive_buffer)


def tcp_memory_shortfall(streams: int, receive_buffer: int = RECEIVE_BUFFER) -> str | None:
    """What is wrong with the kernel's memory for so many streams, and the sysctl that mends it; else `None`.

    Above tcp_mem's second value the kernel shrinks windows, which would cost gradients.
    """
    # The kernel takes twice what SO_RCVBUFFORCE says, for its own overhead (man 7 socket).
    needed = -(-2 * receive_buffer * streams // resource.getpagesize())
    try:
        pressure = int(_TCP_MEM.read_text().split()[1])
    except FileNotFoundError:
        return "net.ipv4.tcp_mem is not shown in this network namespace, and was not checked"
    if needed <= pressure:
        return None
    megabytes = needed * resource.getpagesize() >> 20
    return (
        f"{streams} streams may hold {megabytes} MB, more than net.ipv4.tcp_mem allows; "
        f'raise it: sysctl -w net.ipv4.tcp_mem="{needed} {needed * 5 // 4} {needed * 3 // 2}"'
    )


def _prepare(sock: socket.socket, nic_ip: str, device: str | None, receive_buffer: int) -> None:
    """Buffer and NIC; the buffer before connect, for the handshake fixes the window's scale."""
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
        raise StreamError(f"{nic_ip} is no address of this machine ({error.strerror})") from None


def _open(sock: socket.socket, stub: tuple[str, int], way: str) -> None:
    try:
        sock.connect(stub)
    except TimeoutError:
        raise StreamError(f"no answer {way}: is the switch's controller running?") from None
    except ConnectionRefusedError:
        raise StreamError(f"refused {way}: the controller does not know this NIC, or that port") from None
    except OSError as error:
        raise StreamError(f"no connection {way}: {error.strerror}") from None
