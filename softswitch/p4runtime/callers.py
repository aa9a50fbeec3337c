"""Who may call the switch: controllers, by the URIs in their certificates. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from softswitch.program.state import StatusError

SCHEME = "checkmate:"
CONTROLLER = re.compile(r"checkmate:[^/]+/controller")
SHOWN = 100
"""Characters of a stranger's text in a message."""


def check_controller(auth: Mapping[str, Any]) -> None:
    """Check that a certificate is one of role controller, of any job.

    `auth` is the result of `auth_context` of gRPC's servicer context, whose values are sequences of bytes.

    Raises:
        StatusError: UNAUTHENTICATED. The certificate has no URI of Checkmate, another one, or several.
    """
    uris = [each.decode("ascii", "replace") for each in auth.get("peer_uri", ())]
    found = [uri for uri in uris if uri.startswith(SCHEME)]
    if len(found) != 1 or not CONTROLLER.fullmatch(found[0]):
        shown = ", ".join(found)[:SHOWN] or f"no URI that begins with {SCHEME}"
        raise StatusError(
            "UNAUTHENTICATED",
            f"the client's certificate has {shown}; it must have one, checkmate:JOB/controller",
        )
