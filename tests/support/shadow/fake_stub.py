"""An emulated stub and its rewritten copies, frame by frame, for real sockets of shadow nodes.

It shares no code with the controller's.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import ARP, Ether

from tests.support.labs.end_hosts import ETH_P_ALL, inside

MAC = "02:00:00:00:77:01"
BEFORE_ZERO = 0xFFFFFFFF


class FakeStub:
    """A stub at `ip` on a namespace's end of a veth. `mode` is the failure that it emulates, if any."""

    def __init__(self, namespace: str, ip: str, port: int, mode: str = "accept") -> None:
        self.ip, self.port, self.mode = ip, port, mode
        self.hellos: list[bytes] = []
        self.syn_options: list[str] = []
        self.window = 0
        with inside(namespace):
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self._socket.bind((namespace, ETH_P_ALL))
        self._socket.settimeout(0.05)
        self._peer: Any = None
        self._shift = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def send(self, sequence: int, payload: bytes) -> None:
        """Send one copy: a segment at this position of the stream."""
        self._answer("A", sequence, payload, window=65535)

    def stop(self) -> None:
        """Stop the stub."""
        self._stop.set()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                frame, address = self._socket.recvfrom(1 << 17)
            except TimeoutError:
                continue
            if address[2] != socket.PACKET_OUTGOING:
                self._take(Ether(frame))

    def _take(self, frame: Any) -> None:
        if ARP in frame and frame[ARP].op == 1 and frame[ARP].pdst == self.ip:
            reply = ARP(op=2, hwsrc=MAC, psrc=self.ip, hwdst=frame.src, pdst=frame[ARP].psrc)
            self._socket.send(bytes(Ether(src=MAC, dst=frame.src) / reply))
        elif TCP in frame and frame[IP].dst == self.ip:
            self._segment(frame)

    def _segment(self, frame: Any) -> None:
        segment = frame[TCP]
        payload = bytes(segment.payload)[: frame[IP].len - 20 - 4 * segment.dataofs]
        if segment.flags.S and self.mode != "mute":
            options = dict(segment.options)
            self.syn_options = list(options)
            self._shift = options["WScale"]
            self._peer = (frame.src, frame[IP].src, segment.sport, segment.seq + 1)
            self._answer("SA", BEFORE_ZERO, options=[("MSS", 1460), ("NOP", None), ("WScale", 7)])
        elif payload and self.mode == "refuse_hello":
            self._answer("RA", 0)
        elif payload and self.mode == "accept":
            self.hellos.append(payload)
            self._peer = (*self._peer[:3], segment.seq + len(payload))
            self._answer("A", 0)
        elif not payload:
            self.window = segment.window << self._shift

    def _answer(
        self, flags: str, sequence: int, payload: bytes = b"", *, window: int = 65535, options: Any = ()
    ) -> None:
        mac, ip, port, acknowledgement = self._peer
        segment = TCP(
            sport=self.port,
            dport=port,
            seq=sequence,
            ack=acknowledgement % (1 << 32),
            flags=flags,
            window=window,
        )
        segment.options = list(options)
        self._socket.send(bytes(Ether(src=MAC, dst=mac) / IP(src=self.ip, dst=ip) / segment / payload))
