"""The way of a rank's streams to shadow nodes: source, rate, class of traffic, and encryption."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass, replace
from ipaddress import IPv6Address, ip_network
from pathlib import Path
from typing import Final

from checkmate.job.schema import DEFAULT_SENDING, Job, Sending
from checkmate.keys.access import Access
from checkmate.keys.contexts import client_context
from checkmate.nccl.interfaces import interface_names
from checkmate.wire import tcp

_ENCRYPTED_AT_ONCE: Final = 1 << 18
_READ_BYTES: Final = 1 << 14
_IF_INET6: Final = Path("/proc/net/if_inet6")


class Channel:
    """A connection to a node. `written`: bytes that its kernel was given."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.written = 0

    @property
    def end(self) -> int:
        """What `written` will be once all that was taken is in the kernel."""
        return self.written

    def write(self, data: memoryview) -> int:
        """Return how many bytes were taken; 0 if the socket is full and does not block."""
        try:
            count = self.sock.send(data)
        except BlockingIOError:
            return 0
        self.written += count
        return count

    def receive(self, nbytes: int) -> bytes:
        """Return exactly N bytes, while the socket still blocks. Raise `OSError` as `tcp.receive_exactly`."""
        return tcp.receive_exactly(self.sock, nbytes)

    def flush(self) -> bool:
        """Give the kernel what was taken. Return whether it has all."""
        return True

    def close(self) -> None:
        """Close the connection."""
        self.sock.close()


class EncryptedChannel(Channel):
    """A connection in TLS. It counts what it has encrypted itself, to know what the node has acknowledged."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str) -> None:
        """Encrypt a connection that blocks, after a handshake. Raise `OSError` if that fails."""
        super().__init__(sock)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._rest = memoryview(b"")
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self.flush()
                self._read_more()
        self.flush()

    def write(self, data: memoryview) -> int:
        """Encrypt some of the data once all before it is in the kernel. Return how much."""
        if not self.flush():
            return 0
        count = self._tls.write(data[:_ENCRYPTED_AT_ONCE])
        self.flush()
        return count

    def receive(self, nbytes: int) -> bytes:
        """Return exactly N bytes, while the socket still blocks. Raise `OSError` if they do not come."""
        data = b""
        while len(data) < nbytes:
            try:
                data += self._tls.read(nbytes - len(data))
            except ssl.SSLWantReadError:
                self._read_more()
            except ssl.SSLError as error:  # the node's view of our certificate comes after the handshake
                raise _without_tls(error) from None
        return data

    @property
    def end(self) -> int:
        """What `written` will be once all that was taken is in the kernel."""
        return self.written + len(self._rest) + self._outgoing.pending

    def flush(self) -> bool:
        """Give the kernel what was encrypted. Return whether it has all."""
        while self._rest or self._outgoing.pending:
            self._rest = self._rest or memoryview(self._outgoing.read())
            if not (count := super().write(self._rest)):
                return False
            self._rest = self._rest[count:]
        return True

    def _read_more(self) -> None:
        data = self.sock.recv(_READ_BYTES)
        if not data:
            raise ConnectionResetError("it closed the connection")
        self._incoming.write(data)


@dataclass(frozen=True)
class Route:
    """The way of one stream. `tls`: with which it is encrypted. `rate`: bytes per second at most."""

    sending: Sending = DEFAULT_SENDING
    tls: ssl.SSLContext | None = None
    rate: int | None = None

    @classmethod
    def of(cls, job: Job, allowed: Access) -> Route:
        """Return the way of a job's streams. Raise `KeysError` if TLS refuses the keys."""
        encrypted = job.encrypt and allowed.keys is not None
        return cls(job.sending, client_context(allowed.keys) if encrypted and allowed.keys else None)

    def share(self, nbytes: int, total: int) -> Route:
        """Return the way of a stream that has this share of all bytes of an iteration.

        The kernel paces each stream to its share of the limit, so their sum is within it, without bursts.
        """
        limit = self.sending.bytes_per_second
        return self if limit is None else replace(self, rate=max(1, int(limit * nbytes / total)))

    def prepare(self, sock: socket.socket) -> None:
        """Set up a socket before it connects. Raise `OSError` if this host lacks the source."""
        source = self.sending.source
        if source is not None and "/" in source:
            address = _address_in(source, sock.family)
            if address is None:
                raise OSError(f"this host has no address in {source}, the job's sending.source")
            sock.bind((address, 0))
        elif source is not None:
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, source.encode())
            except OSError as error:
                raise OSError(f"interface {source}, the job's sending.source: {error.strerror}") from None
        if self.sending.dscp is not None:
            tcp.mark_class(sock, self.sending.dscp)
        if self.rate is not None:
            tcp.pace(sock, self.rate)

    def channel(self, sock: socket.socket, host: str) -> Channel:
        """Return a connection to a node whose certificate names a host. Raise `OSError` if TLS fails."""
        if self.tls is None:
            return Channel(sock)
        try:
            return EncryptedChannel(sock, self.tls, host)
        except (ssl.SSLError, ConnectionResetError) as error:
            raise _without_tls(error) from None


PLAIN: Final = Route()


def _without_tls(error: OSError) -> OSError:
    why = (error.reason if isinstance(error, ssl.SSLError) else "") or error
    return OSError(
        f"TLS fails ({why}): trainers and shadow nodes must read the same job file, with the same `encrypt`, "
        "and have keys of one authority"
    )


def _address_in(network: str, family: int) -> str | None:
    """Return the first address of this host that is in a network."""
    within = ip_network(network)
    addresses = _ipv6_addresses() if family == socket.AF_INET6 else interface_names()
    return next((str(address) for address in addresses if address in within), None)


def _ipv6_addresses() -> list[IPv6Address]:
    lines = _IF_INET6.read_text().splitlines() if _IF_INET6.exists() else []
    return [IPv6Address(int(line.split()[0], 16)) for line in lines]
