"""The phases of a restart on a shadow node."""

from __future__ import annotations

import enum


class Phase(enum.IntEnum):
    """Progress of a restart."""

    OPEN = 0
    DRAINING = 1
    """Recorded iterations are committed and stepped; known starts of training cannot begin again."""
    DRAINED = 2
    """As while draining, and no data has arrived for a while."""
    FENCED = 3
    """Nothing more is committed."""
    ANSWERED = 4
    """The status was returned, and does not change until the next `Fence` or `Begin`."""
