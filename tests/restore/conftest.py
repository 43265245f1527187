"""Fixtures of the tests of single stages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asyncckpt.flow.threads import Workers


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Two threads, which have ended after the test."""
    made = Workers(2, "test-restore")
    yield made
    made.shutdown()
