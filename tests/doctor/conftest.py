"""Fixtures for tests of the doctor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.namespace_host import namespace_host


@pytest.fixture
def host() -> Iterator[str]:
    """Yield the name of a namespace with a host in it."""
    with namespace_host() as name:
        yield name
