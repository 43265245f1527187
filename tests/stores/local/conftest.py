"""Threads for the stores of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asyncckpt.flow.threads import Workers


@pytest.fixture
def workers() -> Iterator[Workers]:
    threads = Workers(2, "test-io")
    yield threads
    threads.shutdown()
