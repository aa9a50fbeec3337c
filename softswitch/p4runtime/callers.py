"""Authorization of callers: the URI in a certificate must be a controller's. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from softswitch.program.state import StatusError

SCHEME = "checkmate:"
CONTROLLER = re.compile(r"checkmate:[^/]+/controller")
MAX_LISTING = 100
"""Characters of a stranger's text in a message."""


def check_controller(auth: Mapping[str, Any]) -> None:
    """Check that a certificate is one of role controller, of any job.

    `auth` is the result of `auth_context` of gRPC's servicer context, whose values are sequences of bytes.

    Raises:
        StatusError: UNAUTHENTICATED. The certificate has no URI of Checkmate, another one, or several.
    """
    uris = [uri.decode("ascii", "replace") for uri in auth.get("peer_uri", ())]
    checkmate_uris = [uri for uri in uris if uri.startswith(SCHEME)]
    if len(checkmate_uris) != 1 or not CONTROLLER.fullmatch(checkmate_uris[0]):
        listing = ", ".join(checkmate_uris)[:MAX_LISTING] or f"no URI that begins with {SCHEME}"
        raise StatusError(
            "UNAUTHENTICATED",
            f"the client's certificate has {listing}; it must have one, checkmate:JOB/controller",
        )
