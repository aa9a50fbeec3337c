"""Host names and IP addresses in job files. Pure."""

from __future__ import annotations

import re
from ipaddress import ip_address

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?!\d+(\.\d+)*\.?$){_LABEL}(\.{_LABEL})*\.?")


def host_name(value: str) -> str:
    """Return a host name or IP address, the latter in its usual form. Raise `ValueError` for others."""
    try:
        return str(ip_address(value))
    except ValueError:
        if len(value) > 253 or not _HOST.fullmatch(value):
            raise ValueError("must be a host name or an IP address, such as 192.168.0.1") from None
    return value
