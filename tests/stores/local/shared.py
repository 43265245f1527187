"""What tests of shared attempts do to them and look at."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def die(attempt: Any) -> None:
    """The process of this share has ended: its descriptors are closed, and nothing is removed."""
    attempt._guard.ended = True
    attempt._directory.close()
    os.close(attempt._owner_file._fd)
    attempt._owner_file._fd = -1


def files_of(directory: Path) -> list[str]:
    """Everything below a directory that attempts make, so not the lock and empty epochs."""
    found = sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))
    return [path for path in found if path not in ("lock", "epoch-0")]
