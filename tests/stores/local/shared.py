"""Helpers for tests of shared attempts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def die(attempt: Any) -> None:
    """Simulate the death of the share's process: close its descriptors, remove nothing."""
    attempt._guard.ended = True
    attempt._directory.close()
    os.close(attempt._owner_file._fd)
    attempt._owner_file._fd = -1


def files_of(directory: Path) -> list[str]:
    """Everything that attempts made below a directory, without the lock and empty epochs."""
    found = sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))
    return [path for path in found if path not in ("lock", "epoch-0")]
