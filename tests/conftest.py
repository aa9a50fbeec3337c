"""What tests of several modules are given."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from topologies import lab as labs


@pytest.fixture
def name() -> Iterator[str]:
    """A lab's name that nobody else has; what a failed test leaves of it is removed."""
    unique = f"t{os.getpid()}_{random.randrange(10**6)}"
    yield unique
    labs.down(unique)
