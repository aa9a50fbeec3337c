"""A node whose process is stopped: its kernel accepts connections, but nothing answers until `go_on`."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType


class HeldBack:
    """A relay to a node, which holds back all that clients send until `go_on`. It is a context manager."""

    def __init__(self, node: str) -> None:
        """Listen. `node`: the address to relay to."""
        host, _, port = node.partition(":")
        self._node = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> HeldBack:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._sockets:
            with contextlib.suppress(OSError):  # it is not connected any more
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def go_on(self) -> None:
        """Relay connections, those that wait first."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._node)
                self._sockets += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=_relay, args=(source, sink), daemon=True).start()


def _relay(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):  # one side has broken the connection
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
