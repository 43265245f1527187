"""The coordinator of processes that share a directory and no runtime."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from asyncckpt.arguments import absolute, as_int, check_coordinator, check_path
from asyncckpt.coordinators.key_values import pauses
from asyncckpt.coordinators.service import ServiceCoordinator
from asyncckpt.errors import StoreError, UsageError

# Rule 1: a value appears whole: it is written to a temporary file, which is renamed or linked.
# Rule 2: a key `a/b` is the file `b=` in the directory `a`; keys contain no `=`, so a key never
#   collides with the directory of longer keys, nor with a temporary file (`b=` and random digits).
# Rule 3: opening a directory makes NFS ask its server again; looking up a name does not.

TRIES = 10
"""Attempts at creating a file whose directory others keep deleting."""


class DirectoryCoordinator(ServiceCoordinator["DirectoryService"]):
    """Coordinates processes through files in a directory that all of them share.

    For processes without a distributed runtime, such as NumPy programs started by a batch system.
    The directory is created at first use. It may hold the keys of an earlier run, which are
    ignored, and may be on NFS. It must support hard links, and should not be the checkpoint root.

    Args:
        path: the directory.
        process_index: number of this process, from 0.
        process_count: number of processes.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, process_index: int, process_count: int
    ) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise UsageError(f"path={path!r:.80}: pass a directory as str or os.PathLike")
        if "://" in os.fsdecode(path):
            raise UsageError(f"path={path!r:.80}: pass a directory that all processes share")
        check_path(path)
        self.path = Path(absolute(path))
        connect = partial(DirectoryService, self.path)  # can be pickled
        super().__init__("directory", as_int(process_index), as_int(process_count), connect)
        check_coordinator(self)


class DirectoryService:
    """Files as keys."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def put(self, key: str, value: bytes) -> None:
        """Replace the file of the key."""
        self._make(key, value, os.replace)

    def put_once(self, key: str, value: bytes) -> bytes:
        """Link a complete file to the name of the key, which only one process can do."""
        for _ in _tries():
            try:
                self._make(key, value, os.link)
            except FileExistsError:
                # Also raised if our link succeeded and NFS lost the response: the value is ours.
                first = self.look(key)
                if first is not None:
                    return first
                continue  # deleted meanwhile
            except OSError as error:
                if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                    raise StoreError(
                        f"{self._path}: hard links are not supported here ({error.strerror}); "
                        "use a directory on another file system for the coordinator",
                        location=str(self._path),
                    ) from error
                raise
            return value
        raise self._changed_too_often(key)

    def look(self, key: str) -> bytes | None:
        """Read the file of the key."""
        file = self._file(key)
        for _ in range(2):
            try:
                return file.read_bytes()
            except FileNotFoundError:
                with contextlib.suppress(FileNotFoundError):
                    os.close(os.open(file.parent, os.O_RDONLY))  # Rule 3
            except OSError as error:
                # Replaced on another host while it was being read.
                if error.errno != errno.ESTALE:
                    raise
        return None

    def list(self, prefix: str) -> Mapping[str, bytes]:
        """Read all files below the directory of the prefix."""
        top = self._path / prefix
        found = {}
        for directory, _, names in os.walk(top, onerror=_unless_missing):
            for name in names:
                if name.endswith("="):
                    key = os.path.relpath(os.path.join(directory, name[:-1]), top)
                    if (value := self.look(f"{prefix}/{key}")) is not None:
                        found[key] = value
        return found

    def delete(self, prefix: str) -> None:
        """Delete the file and the directory of the prefix, and parents that are then empty."""
        self._file(prefix).unlink(missing_ok=True)
        top = self._path / prefix
        for directory, _, names in os.walk(top, topdown=False, onerror=_unless_missing):
            for name in names:
                Path(directory, name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another process is putting keys there
                os.rmdir(directory)
        for parent in itertools.takewhile(self._path.__ne__, top.parents):
            with contextlib.suppress(OSError):
                parent.rmdir()

    def _file(self, key: str) -> Path:
        return self._path / f"{key}="

    def _make(self, key: str, value: bytes, finish: Callable[[Path, Path], None]) -> None:
        file = self._file(key)
        aside = file.with_name(f"{file.name}{secrets.token_hex(8)}")
        for _ in _tries():
            try:
                # Raised if the directory was deleted before `mkdir` could check its type.
                with contextlib.suppress(FileExistsError):
                    file.parent.mkdir(parents=True, exist_ok=True)
                aside.write_bytes(value)
                finish(aside, file)
            except FileNotFoundError:
                continue  # another process deleted the empty directory
            finally:
                aside.unlink(missing_ok=True)
            return
        raise self._changed_too_often(key)

    def _changed_too_often(self, key: str) -> StoreError:
        return StoreError(
            f"{self._path}: other processes deleted the coordinator's key {key} {TRIES} times "
            "while it was being set; check that no other program works in this directory",
            retryable=True,
            location=str(self._path),
        )


def _unless_missing(error: OSError) -> None:
    """Raise the error of a directory that cannot be listed, unless it was deleted."""
    if error.errno not in (errno.ENOENT, errno.ESTALE):
        raise error


def _tries() -> Iterator[None]:
    for _, pause in zip(range(TRIES), pauses(1), strict=False):
        yield
        time.sleep(pause)
