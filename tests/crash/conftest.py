"""Fixtures of the crash tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.faults import ForkServer
from tests.crash.scenarios import IMPORTS


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """A fork server that has imported the scenarios."""
    with ForkServer(IMPORTS) as running:
        yield running
