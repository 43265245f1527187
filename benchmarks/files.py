"""Files of checkpoints: made durable, brought into the page cache, put out of it, and removed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def scratch(directory: Path | None) -> Iterator[Path]:
    """Make a directory for the block, which SIGTERM ends like any exception.

    Thus files and processes are removed then, too.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with tempfile.TemporaryDirectory(prefix="asyncckpt-bench-", dir=directory) as name:
            yield Path(name)
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file or directory for the block, which gets its descriptor."""
    fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def files_under(path: Path) -> list[Path]:
    """Return the file itself, or every file below the directory."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file())


def fsync_tree(path: Path) -> None:
    """Every file and directory at and below `path`, and its parent directory, is durable."""
    entries = [path] if path.is_file() else [*files_under(path), *_directories(path)]
    for entry in [*entries, path.parent]:
        with opened(entry) as fd:
            os.fsync(fd)


def warm(path: Path) -> None:
    """Every page of the files is in the page cache."""
    buffer = bytearray(4 << 20)
    with open(os.devnull, "wb", buffering=0) as nowhere:
        for file in files_under(path):
            with open(file, "rb", buffering=0) as stream:
                if sys.platform == "linux":  # reads what is missing, and copies nothing
                    while os.sendfile(nowhere.fileno(), stream.fileno(), None, 1 << 30):
                        pass
                while stream.readinto(buffer):
                    pass


def chill(path: Path) -> None:
    """No page of the files is in the page cache, as far as the system takes the advice."""
    for file in files_under(path):
        with opened(file) as fd:
            os.fsync(fd)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def settle(directory: Path) -> None:
    """Wait until what was deleted below the directory is deleted on disk too.

    Everything measured ends with an fsync, so that only deletions are left to wait for. A sync of
    the whole system would wait for everybody else's data as well. A directory that was never made
    stands for the nearest one that was.
    """
    while not directory.exists():
        directory = directory.parent
    with opened(directory) as fd:
        os.fsync(fd)


def _directories(path: Path) -> list[Path]:
    below = [directory for directory in path.rglob("*") if directory.is_dir()]
    return [*sorted(below, key=lambda directory: -len(directory.parts)), path]
