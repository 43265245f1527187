"""Fixtures of the crash tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.faults import ForkServer
from tests.crash.scenarios import IMPORTS

SHARED_MEMORY = Path("/dev/shm")
ENOUGH_NBYTES = 256 << 20


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """A fork server that has imported the scenarios."""
    with ForkServer(IMPORTS) as running:
        yield running


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory if there is one: thousands of flushes would wait for the disk.

    What a killed process leaves is the same on every file system. What power loss leaves is not,
    and is not tested by killing.
    """
    if not os.access(SHARED_MEMORY, os.W_OK) or _free(SHARED_MEMORY) < ENOUGH_NBYTES:
        yield tmp_path
        return
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-crash-", dir=SHARED_MEMORY))
    yield directory
    shutil.rmtree(directory)


def _free(path: Path) -> int:
    return shutil.disk_usage(path).free
