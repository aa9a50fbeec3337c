"""A separate program that sends on connections to local ports until they are closed:

python sender.py IP PORT...
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading

CHUNK_BYTES = 1 << 20


def send(ip: str, port: int) -> None:
    """Send until the other side closes the connection."""
    data = bytes(CHUNK_BYTES)
    with contextlib.suppress(ConnectionError), socket.create_connection((ip, port)) as sock:
        while True:
            sock.sendall(data)


if __name__ == "__main__":
    for number in sys.argv[2:]:
        threading.Thread(target=send, args=(sys.argv[1], int(number))).start()
