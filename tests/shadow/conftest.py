"""Fixtures for tests of shadow nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from checkmate.job.schema import Job
from checkmate.shadow.process import Serving
from testbed.copies import local_job


@pytest.fixture
def job() -> Iterator[Job]:
    """Yield a job whose only shadow node serves in this process."""
    local = local_job(nodes=1)
    with Serving(local, 0):
        yield local
