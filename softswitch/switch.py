"""The switch: one thread that forwards frames from ports through the program to ports.

Control-plane threads take turns with it (`turn`); nothing else changes the state between two packets.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from softswitch.codegen.program import Output, Program
from softswitch.frames.afpacket import LinkWatch, PacketPort
from softswitch.frames.checksums import Offload, complete
from softswitch.frames.ports import Port
from softswitch.program.trace import Trace

log = logging.getLogger(__name__)

BATCH = 16
"""Frames from one port before the next port, or a waiting control-plane thread, has its turn."""
HANDOVER_S = 50e-6
PASS_S = 0.02
RETRY_S = 1.0
"""Seconds between two looks at ports, if one has failed."""


class SoftSwitch:
    """Ports around a program.

    `cpu_port` is the program's port for the controller (`None`: there is none); `on_packet_in` gets the
    frames that the program sends there. `trace` gets the trace of each packet.
    """

    def __init__(
        self,
        ports: Iterable[Port],
        cpu_port: int | None = None,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        self.ports = {port.number: port for port in ports}
        self.cpu_port = cpu_port
        self.program: Program | None = None
        self.on_packet_in: Callable[[bytes], None] | None = None
        self.unknown_port = 0
        """Number of copies to port numbers that do not exist."""
        self._trace = trace
        self._packet_in_header = 0
        self._sums_payload = False
        self._lock = threading.Lock()
        self._waiting = 0
        self._waiting_lock = threading.Lock()
        self._hungry = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._stopping = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Keep packets out while a control-plane thread reads or changes the program's state."""
        with self._waiting_lock:
            self._waiting += 1
        self._lock.acquire()
        try:
            with self._waiting_lock:
                self._waiting -= 1
            yield
        finally:
            self._lock.release()

    def let_packets_pass(self) -> None:
        """Wait between two turns of a long operation until waiting packets have had theirs.

        The lock is not fair: a thread that releases it and takes it again at once nearly always wins.
        """
        deadline = time.monotonic() + PASS_S
        while self._hungry and time.monotonic() < deadline:
            time.sleep(HANDOVER_S)

    def install(self, program: Program, packet_in_header: int = 0, sums_payload: bool = False) -> None:
        """Run `program` from the next packet on.

        Args:
        program: The program.
        packet_in_header: Length of its packet-in header, in bytes.
        sums_payload: The program gets frames only with complete checksums.
        """
        with self.turn():
            self.program = program
            self._packet_in_header = packet_in_header
            self._sums_payload = sums_payload

    def packet_out(self, frame: bytes) -> None:
        """Process a frame from the controller, as if received on the CPU port."""
        if self.cpu_port is not None:
            with self.turn():
                self.handle(self.cpu_port, frame, None)

    def handle(self, number: int, frame: bytes, offload: Offload | None) -> None:
        """Process one frame and send the outputs."""
        program = self.program
        if program is None:
            return
        if offload is not None and self._sums_payload:
            frame = complete(frame) or frame
        if self._trace is None:
            outputs = program.process(number, frame)
        else:
            trace = Trace(program.notations)
            outputs = program.process(number, frame, trace)
            self._show(trace)
        if len(outputs) == 1 and not outputs[0].group:
            self._send(outputs[0], offload)
        else:
            self._admit(outputs, offload)

    def _admit(self, outputs: list[Output], offload: Offload | None) -> None:
        """Send copies with an instance first; send the others only if none of these was refused.

        So a sender's TCP retransmits segments for which a replica's port had no room (design, section 4).
        """
        refused_group = 0
        for output in outputs:
            if output.group and not output.instance and output.group == refused_group:
                port = self.ports.get(output.port)
                if port is not None:
                    port.stats.withheld += 1
            elif not self._send(output, offload) and output.instance:
                refused_group = output.group

    def _send(self, output: Output, offload: Offload | None) -> bool:
        port = self.ports.get(output.port)
        if port is not None:
            return port.send(output.frame, offload)
        if output.port == self.cpu_port and self.on_packet_in is not None:
            self.on_packet_in(self._for_controller(output.frame, offload))
        else:
            self.unknown_port += 1
        return True

    def _for_controller(self, frame: bytes, offload: Offload | None) -> bytes:
        if offload is None:
            return frame
        at = self._packet_in_header
        whole = complete(frame[at:])
        return frame if whole is None else frame[:at] + whole

    def _show(self, trace: Trace) -> None:
        """Hand out a packet's trace. If that fails, as on a closed terminal, tracing ends, not forwarding."""
        if self._trace is not None:
            try:
                self._trace(trace.text())
            except OSError as error:
                log.warning("tracing ends, because a trace could not be written: %s", error)
                self._trace = None

    def run(self) -> None:
        """Forward frames until `stop`; an error of the system is logged, and ends nothing."""
        ready: dict[int, Port] = {}
        with LinkWatch() as links, select.epoll() as poller:
            for port in self.ports.values():
                ready[port.fileno()] = port
                poller.register(port, select.EPOLLIN)
            poller.register(self._wake, select.EPOLLIN)
            poller.register(links, select.EPOLLIN)
            look_at: float | None = None  # when to look at the ports
            while not self._stopping:
                for descriptor, _ in poller.poll(None if look_at is None else RETRY_S):
                    port_ready = ready.get(descriptor)
                    if port_ready is not None:
                        self._receive(port_ready)
                    elif descriptor == links.fileno():
                        links.drain()
                        look_at = 0.0
                    while self._waiting:
                        time.sleep(HANDOVER_S)
                if look_at is not None and time.monotonic() >= look_at:
                    look_at = None if self._refresh(poller, ready) else time.monotonic() + RETRY_S

    def _receive(self, port: Port) -> None:
        """Process frames that wait at a port."""
        self._hungry = True
        with self._lock:
            self._hungry = False
            try:
                port.poll(self.handle, BATCH)
            except OSError as error:
                log.warning("port %d (%s): could not receive: %s", port.number, port.name, error)

    def _refresh(self, poller: select.epoll, ready: dict[int, Port]) -> bool:
        """Look which ports are up; return whether that is known of all."""
        all_known = True
        for port in self.ports.values():
            if not isinstance(port, PacketPort):
                continue
            before = port.fileno()
            try:
                port.refresh()
            except OSError as error:
                all_known = False
                log.warning("port %d (%s): its state is unknown: %s", port.number, port.name, error)
            if port.fileno() != before:
                ready.pop(before, None)
                ready[port.fileno()] = port
                poller.register(port, select.EPOLLIN)
        return all_known

    def stop(self) -> None:
        """Let `run` return; may be called from a signal handler or another thread."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
