"""The clocks of other hosts, by ICMP timestamps (RFC 792), which Linux answers unless a firewall forbids it.

Each is the number of milliseconds since midnight, UTC, so a difference of whole days is not seen.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from checkmate.base.wording import counted
from checkmate.doctor.deadlines import within
from checkmate.doctor.findings import Finding, failed, ok, skipped, warning
from checkmate.keys.roles import Role

SECONDS: Final = 1.0
"""For all answers."""
MAX_DIFFERENCE: Final = 60.0
"""Seconds by which the clocks of a shadow node and the controller must not differ (design, section 4)."""

_NEAR: Final = MAX_DIFFERENCE / 2
_DAY: Final = 86_400_000
_REQUEST, _REPLY = 13, 14
_MESSAGE: Final = struct.Struct("!BBHHHIII")
_NOT_STANDARD: Final = 1 << 31
_NAME: Final = "clocks of nodes"


def differences(hosts: Iterable[str], seconds: float = SECONDS) -> dict[str, float] | None:
    """Ask all hosts at once how late it is. Needs CAP_NET_RAW.

    Args:
        hosts: names or addresses; only IPv4 is asked.
        seconds: how long to wait for addresses, and then for answers.

    Returns:
        The seconds by which the clock of each host that has answered is ahead of this one's; `None` if this
        process may not ask.
    """
    hosts_by_address = _addresses(list(dict.fromkeys(hosts)), seconds)
    result: dict[str, float] = {}
    try:
        sock = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    except PermissionError:
        return None
    with sock:
        identifier, now = os.getpid() & 0xFFFF, _now()
        for number, address in enumerate(hosts_by_address):
            with suppress(OSError):  # without a route
                sock.sendto(request(identifier, number & 0xFFFF, now), (address, 0))
        deadline = time.monotonic() + seconds
        while len(result) < len(hosts_by_address) and (remaining := deadline - time.monotonic()) > 0:
            sock.settimeout(remaining)
            try:
                packet, (sender, _) = sock.recvfrom(2048)
            except TimeoutError:
                break
            if sender in hosts_by_address and (host_time := reply(packet, identifier)) is not None:
                result[hosts_by_address[sender]] = ahead(host_time, _now())
    return result


def _addresses(hosts: Sequence[str], seconds: float) -> dict[str, str]:
    """Return the hosts by their IPv4 addresses, as far as they are found in time."""

    def look_up(host: str) -> str:
        with suppress(OSError):
            return socket.gethostbyname(host)
        return ""

    addresses = within(seconds, [partial(look_up, host) for host in hosts], "")
    result = dict(zip(addresses, hosts, strict=True))
    result.pop("", None)
    return result


def _now() -> int:
    return time.time_ns() // 1_000_000 % _DAY


def request(identifier: int, number: int, now: int) -> bytes:
    """Return the request for a timestamp. `now`: in milliseconds since midnight."""
    bare = _MESSAGE.pack(_REQUEST, 0, 0, identifier, number, now, 0, 0)
    total = sum(struct.unpack("!10H", bare))
    total = (total & 0xFFFF) + (total >> 16)
    return _MESSAGE.pack(_REQUEST, 0, ~(total + (total >> 16)) & 0xFFFF, identifier, number, now, 0, 0)


def reply(packet: bytes, identifier: int) -> int | None:
    """Return the time in an IPv4 packet with the answer to a request; `None` for anything else."""
    start = (packet[0] & 0xF) * 4 if packet else 0
    if len(packet) < start + _MESSAGE.size or not start:
        return None
    kind, _, _, reply_identifier, _, _, _, sending_time = _MESSAGE.unpack_from(packet, start)
    return (
        sending_time
        if kind == _REPLY and reply_identifier == identifier and sending_time < min(_NOT_STANDARD, _DAY)
        else None
    )


def ahead(other_time: int, own_time: int) -> float:
    """Return by how many seconds one time of day is ahead of another, both in milliseconds."""
    return ((other_time - own_time + _DAY // 2) % _DAY - _DAY // 2) / 1000


def compare(role: Role, hosts: Sequence[str], seconds_ahead: Mapping[str, float] | None) -> Finding:
    """Return what shadow nodes' clocks mean for a controller, or for another node. Pure."""
    if not hosts:
        return skipped(_NAME, "the job has no other shadow node")
    if seconds_ahead is None:
        return skipped(_NAME, "not compared without CAP_NET_RAW")
    if not seconds_ahead:
        return skipped(_NAME, "not compared: none has answered an ICMP timestamp")
    host = max(seconds_ahead, key=lambda name: abs(seconds_ahead[name]))
    seconds = seconds_ahead[host]
    difference = f"that of {host} is {abs(seconds):,.1f} s {'ahead' if seconds > 0 else 'behind'}"
    remedy = "run an NTP client, such as chrony, on both"
    if abs(seconds) >= MAX_DIFFERENCE and role is Role.CONTROLLER:
        return failed(_NAME, f"{difference}: from {MAX_DIFFERENCE:g} s on, its streams are refused", remedy)
    if abs(seconds) >= _NEAR:
        return warning(
            _NAME,
            f"{difference}, and no node's may differ by {MAX_DIFFERENCE:g} s from the controller's",
            remedy,
        )
    return ok(
        _NAME,
        f"{difference}, the most of {counted(len(seconds_ahead), 'node')} of {len(hosts)} that answered",
    )
