"""Sends on connections to this machine's ports until they are closed. A program of its own, of plain Python:

python sender.py IP PORT...
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading

CHUNK_BYTES = 1 << 20


def send(ip: str, port: int) -> None:
    """Until the other side closes, or ends: nobody needs to stop us."""
    data = bytes(CHUNK_BYTES)
    with contextlib.suppress(ConnectionError), socket.create_connection((ip, port)) as sock:
        while True:
            sock.sendall(data)


if __name__ == "__main__":
    for number in sys.argv[2:]:
        threading.Thread(target=send, args=(sys.argv[1], int(number))).start()
