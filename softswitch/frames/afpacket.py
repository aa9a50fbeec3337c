"""Ports that are network interfaces: AF_PACKET sockets with virtio-net headers (packet(7)).

With PACKET_VNET_HDR, a 64 KB segment is forwarded whole, and the next kernel completes its checksum. The
kernel removes VLAN tags from received frames; they are restored here.
"""

from __future__ import annotations

import array
import errno
import fcntl
import logging
import socket
import struct

from softswitch.frames.checksums import (
    GSO_ECN,
    NEEDS_CHECKSUM,
    NO_OFFLOAD,
    TCP_CHECKSUM,
    UDP_CHECKSUM,
    UDP_HEADER,
    VIRTIO_HEADER,
    Offload,
    defer,
    locate,
)
from softswitch.frames.ports import Handler, PortConnection, PortStats

log = logging.getLogger(__name__)

# From linux/if_packet.h, linux/if_ether.h, asm/socket.h, linux/sockios.h and linux/ethtool.h.
ETH_P_ALL = 3
SOL_PACKET = 263
PACKET_ADD_MEMBERSHIP = 1
PACKET_STATISTICS = 6
PACKET_AUXDATA = 8
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
PACKET_MR_PROMISC = 1
SO_SNDBUFFORCE = 32
SO_RCVBUFFORCE = 33
SIOCETHTOOL = 0x8946
ETHTOOL_GLINK = 0x0A
RTMGRP_LINK = 1
MSG_TRUNC = int(socket.MSG_TRUNC)

TP_STATUS_VLAN_VALID = 1 << 4
TP_STATUS_VLAN_TPID_VALID = 1 << 6
VLAN_TYPE = 0x8100
VLAN_BYTES = 4
# tp_status, tp_len, tp_snaplen, tp_mac, tp_net, tp_vlan_tci, tp_vlan_tpid
_AUXDATA = struct.Struct("=IIIHHHH")
_ANCILLARY = socket.CMSG_SPACE(_AUXDATA.size)

RECEIVE_BUFFER = 64 << 20
"""Bytes of frames that wait for the switch; the kernel drops and counts further frames."""
SEND_BUFFER = 8 << 20
"""Bytes of frames in transit to the next kernel; a port with more refuses copies."""
MAX_FRAME = 1 << 18

# Errors of a send while the port has no room.
_FULL = frozenset({errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM})
# Errors of a send if its interface is down or removed.
_DOWN = frozenset({errno.ENETDOWN, errno.ENXIO, errno.ENODEV})


class PacketPort:
    """A network interface as a port.

    Raises `OSError` if the interface does not exist or cannot be opened.
    """

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.stats = PortStats()
        self.connection = PortConnection(f"port {number} ({name})")
        self._dropped = 0
        self._buffer = bytearray(MAX_FRAME)
        self._view = memoryview(self._buffer)
        self._vector = [self._buffer]
        self._socket = _open(name)
        self._index: int | None = socket.if_nametoindex(name)
        self.refresh()

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def refresh(self) -> None:
        """Check whether the link is up; `fileno` changes if the interface is new. May raise `OSError`."""
        index = {name: index for index, name in socket.if_nameindex()}.get(self.name)
        if index is not None and index != self._index:
            replacement = _open(self.name)
            self._socket.close()
            self._socket, self._index = replacement, index
        self._look()

    def _look(self) -> None:
        try:
            up = _has_link(self._socket, self.name)
        except OSError as error:
            if error.errno not in _DOWN:
                raise
            up = False
        self.connection.set_up(up)

    def drop_count(self) -> int:
        """Return the number of received frames that the kernel dropped because the switch was too slow."""
        counts = self._socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8)
        self._dropped += int(struct.unpack("II", counts)[1])
        return self._dropped

    def poll(self, handle: Handler, limit: int) -> None:
        """Hand at most `limit` waiting frames to `handle`."""
        receive, vector, view, stats = self._socket.recvmsg_into, self._vector, self._view, self.stats
        number = self.number
        for _ in range(limit):
            try:
                size, ancillary, flags, _ = receive(vector, _ANCILLARY)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _DOWN:
                    raise
                # It was down; it may be up again.
                self._look()
                return
            if flags & MSG_TRUNC:
                stats.oversized += 1
                continue
            offload: Offload | None = None
            if _AUXDATA.unpack_from(ancillary[0][2])[0] & TP_STATUS_VLAN_VALID:
                frame, shift = _with_tag(view[10:size], ancillary[0][2]), VLAN_BYTES
            else:
                frame, shift = bytes(view[10:size]), 0
            stats.rx_packets += 1
            stats.rx_bytes += len(frame)
            # Flags and GSO type: in nearly all frames, one of them is enough.
            if view[0] & NEEDS_CHECKSUM or view[1]:
                offload = _offload(frame, view, shift)
            stats.rx_segments += offload.segments() if offload else 1
            handle(number, frame, offload)

    def send(self, frame: bytes, offload: Offload | None) -> bool:
        """Send a frame; return `False` if the port refused it, which withholds the original (admission)."""
        stats = self.stats
        connection = self.connection
        if not connection.healthy and not connection.usable():
            stats.disconnected += 1
            return True
        parts = (NO_OFFLOAD, frame) if offload is None else defer(frame, offload)
        if parts is None:
            if not stats.unsendable:
                log.warning(
                    "port %d (%s): a frame with an incomplete checksum was dropped because its payload has "
                    "changed; switch the sending host's tx checksum offload off",
                    self.number,
                    self.name,
                )
            stats.unsendable += 1
            return True
        try:
            self._socket.sendmsg(parts)
        except OSError as error:
            return self._handle_send_error(error)
        if not connection.healthy:
            connection.note_accepted()
        stats.tx_packets += 1
        stats.tx_bytes += len(frame)
        stats.tx_segments += 1 if offload is None else offload.segments()
        return True

    def _handle_send_error(self, error: OSError) -> bool:
        if error.errno in _FULL and self.connection.note_refused():
            self.stats.refused += 1
            return False
        if error.errno in _DOWN:
            self._look()
        if error.errno in _FULL | _DOWN:
            self.stats.disconnected += 1
            return True
        # Mostly EMSGSIZE: longer than the interface's MTU.
        if not self.stats.unsendable:
            log.warning("port %d (%s): could not send a frame: %s", self.number, self.name, error.strerror)
        self.stats.unsendable += 1
        return True

    def close(self) -> None:
        """Close the socket, which ends the interface's promiscuous mode."""
        self._socket.close()


def _open(name: str) -> socket.socket:
    # Protocol 0 receives no frames until bind, when the options are set.
    packet_socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    try:
        index = socket.if_nametoindex(name)
        for option in (PACKET_VNET_HDR, PACKET_AUXDATA, PACKET_IGNORE_OUTGOING):
            packet_socket.setsockopt(SOL_PACKET, option, 1)
        packet_socket.setsockopt(
            SOL_PACKET, PACKET_ADD_MEMBERSHIP, struct.pack("iHH8s", index, PACKET_MR_PROMISC, 0, b"")
        )
        packet_socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER)
        packet_socket.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, SEND_BUFFER)
        packet_socket.bind((name, ETH_P_ALL))
        packet_socket.setblocking(False)
    except OSError:
        packet_socket.close()
        raise
    return packet_socket


def _has_link(packet_socket: socket.socket, name: str) -> bool:
    # Not IFF_RUNNING, which the kernel sets up to a second after the carrier is there.
    answer = array.array("I", (ETHTOOL_GLINK, 0))
    try:
        fcntl.ioctl(
            packet_socket, SIOCETHTOOL, struct.pack("16sP16x", name.encode(), answer.buffer_info()[0])
        )
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return True
    return bool(answer[1])


def _with_tag(view: memoryview, auxdata: bytes) -> bytes:
    """Return the frame with the VLAN tag that the kernel has removed."""
    status, _, _, _, _, tci, tpid = _AUXDATA.unpack_from(auxdata)
    if not status & TP_STATUS_VLAN_TPID_VALID:
        tpid = VLAN_TYPE
    return b"".join((view[:12], tpid.to_bytes(2), tci.to_bytes(2), view[12:]))


def _offload(frame: bytes, virtio: memoryview, shift: int) -> Offload | None:
    """Return a frame's incomplete TCP or UDP checksum; `None` if it has none."""
    flags, gso_type, _, gso_size, start, offset = VIRTIO_HEADER.unpack_from(virtio)
    start += shift
    if not gso_type & ~GSO_ECN:
        gso_size = 0
    if not flags & NEEDS_CHECKSUM or offset not in (TCP_CHECKSUM, UDP_CHECKSUM):
        # A complete checksum over many segments is useless, because each segment gets its own.
        where = locate(frame)
        if where is None:
            return None
        return Offload(frame, b"", where.start, where.checksum - where.start, gso_type, gso_size)
    # The kernel's own hdr_len is the length of the linear part, not of the headers.
    length = start + ((frame[start + 12] >> 4) * 4 if offset == TCP_CHECKSUM else UDP_HEADER)
    header = VIRTIO_HEADER.pack(NEEDS_CHECKSUM, gso_type, length, gso_size, start, offset)
    return Offload(frame, header, start, offset, gso_type, gso_size)


class LinkWatch(socket.socket):
    """A socket that is readable when an interface has gone up or down (rtnetlink(7))."""

    def __init__(self) -> None:
        super().__init__(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self.bind((0, RTMGRP_LINK))
        self.setblocking(False)

    def drain(self) -> None:
        """Discard the notices; the state of each port is checked separately, so lost ones do not matter."""
        try:
            while self.recv(1 << 16):
                continue
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ENOBUFS):
                log.warning("notices of links could not be read: %s", error)
