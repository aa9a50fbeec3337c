"""What systemd is told of a service: that it is ready, and that it is alive (sd_notify(3)).

Everything here does nothing if systemd has not asked for it.
"""

from __future__ import annotations

import asyncio
import os
import socket


def notify(*lines: str) -> None:
    """Send lines such as `READY=1` to the service manager. A manager that is gone does not matter."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            sock.sendto("\n".join(lines).encode(), address.replace("@", "\0", 1))
        except OSError:
            return


def watchdog_seconds() -> float | None:
    """Return the longest time between two `WATCHDOG=1`, or `None` without a watchdog."""
    period, process = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not period.isdecimal() or process not in ("", str(os.getpid())):
        return None
    return int(period) / 1e6


async def stay_alive() -> None:
    """Say that this process is alive, for ever, as long as its event loop runs."""
    period = watchdog_seconds()
    while True:
        await asyncio.sleep(3600 if period is None else period / 3)
        if period is not None:
            notify("WATCHDOG=1")
