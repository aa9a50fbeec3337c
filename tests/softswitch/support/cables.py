"""Far ends of a switch's interfaces, as raw sockets."""

from __future__ import annotations

import select
import socket
import struct

ETH_P_ALL = 3
SOL_PACKET = 263
PACKET_AUXDATA = 8
PACKET_IGNORE_OUTGOING = 23
SO_RCVBUFFORCE = 33
TP_STATUS_VLAN_VALID = 1 << 4
# tp_status, tp_len, tp_snaplen, tp_mac, tp_net, tp_vlan_tci, tp_vlan_tpid
_AUXDATA = struct.Struct("=IIIHHHH")
_ANCILLARY = socket.CMSG_SPACE(_AUXDATA.size)
_BUFFER = bytearray(65536)
RECEIVE_BUFFER = 16 << 20


def open_cable(interface: str) -> socket.socket:
    """Return a socket that sends from an interface and receives what arrives there."""
    # Protocol 0 receives nothing until bind: any other receives from all interfaces until then.
    cable = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    cable.bind((interface, ETH_P_ALL))
    cable.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    cable.setsockopt(SOL_PACKET, PACKET_AUXDATA, 1)
    cable.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER)
    return cable


def receive(cable: socket.socket, timeout: float) -> bytes | None:
    """Return the next frame, or `None` after `timeout` seconds."""
    try:
        return _arrived(cable)
    except BlockingIOError:
        ready, _, _ = select.select([cable], [], [], max(timeout, 0))
        return _arrived(cable) if ready else None


def _arrived(cable: socket.socket) -> bytes:
    """Return the next frame, with the VLAN tag that the kernel has removed."""
    size, ancillary, _, _ = cable.recvmsg_into([_BUFFER], _ANCILLARY, socket.MSG_DONTWAIT)
    status, *_, control, kind = _AUXDATA.unpack(ancillary[0][2])
    frame = bytes(memoryview(_BUFFER)[:size])
    if not status & TP_STATUS_VLAN_VALID:
        return frame
    return frame[:12] + struct.pack("!HH", kind, control) + frame[12:]
