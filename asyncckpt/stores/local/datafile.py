"""A data file of an attempt: positional writes, past the page cache where possible."""

# Rule 1: a page of the file is written either directly or through the page cache, never both: only
#   pages that a write covers completely are written directly.
# Rule 2: nothing is durable before `seal`, and `seal` flushes once.

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from asyncckpt.errors import StoreError, UsageError
from asyncckpt.ports import Bytes
from asyncckpt.stores.local.failures import Guard
from asyncckpt.stores.local.posix import (
    DIRECT_MIN_NBYTES,
    NO_DIRECT_IO,
    PAGE_NBYTES,
    Descriptor,
    flush_file,
    preallocate,
    write_all,
)

if sys.platform != "win32":
    import fcntl


@dataclass(slots=True)
class DirectWrites:
    """The direct-write mode of a store, and the devices that have refused direct writes.

    Attributes:
        mode: as `SaveOptions.direct_io`.
        refused: numbers of these devices.
    """

    mode: bool | Literal["auto"]
    refused: set[int] = field(default_factory=set)

    def refuse(self, device: int, path: str, error: OSError) -> None:
        """Use buffered writes on this device from now on.

        Raises:
            StoreError: `mode` is True.
        """
        self.refused.add(device)
        if self.mode is True:
            raise StoreError(
                f"{path}: this file system refuses direct writes ({error.strerror}), and "
                "direct_io=True requires them; pass direct_io='auto'",
                location=path,
            )


class LocalDataFile:
    """An open data file. Made by `LocalAttempt.create`.

    Cancelling a call waits for its thread, then raises.
    """

    def __init__(self, path: str, location: str, guard: Guard, direct: DirectWrites) -> None:
        self.path = path
        self.sealed = False
        self._location = location
        self._guard = guard
        self._direct_writes = direct
        self._buffered: Descriptor | None = None
        self._direct: Descriptor | None = None
        self._device = 0

    def __repr__(self) -> str:
        return f"LocalDataFile({self._location!r})"

    def open(self, directory: int, mode: int, nbytes: int) -> None:
        """Create and open the file, also for direct writes where possible. Blocking."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        fd = os.open(self.path, flags, mode, dir_fd=directory)
        self._buffered = Descriptor(fd)
        self._device = os.fstat(fd).st_dev
        if self._direct_writes.mode is False or self._device in self._direct_writes.refused:
            pass
        elif sys.platform == "darwin":
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        else:
            try:
                flags = os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW
                self._direct = Descriptor(os.open(self.path, flags, dir_fd=directory))
            except OSError as error:
                if error.errno not in NO_DIRECT_IO:
                    raise
                self._direct_writes.refuse(self._device, self._location, error)
        preallocate(fd, nbytes)

    async def write(self, offset: int, data: Bytes | bytearray) -> bool:
        """Write all of `data` at `offset`. As `DataFile.write`."""
        self._check_open()
        if len(data):
            await self._guard.run(
                self._write, offset, np.frombuffer(data, np.uint8), path=self._location
            )
        return True

    async def write_runs(self, offsets: Sequence[int], runs: Sequence[Bytes]) -> None:
        """Write many short runs. As `ScatteredFile.write_runs`."""
        self._check_open()
        await self._guard.run(self._write_runs, offsets, runs, path=self._location)

    async def seal(self, nbytes: int) -> None:
        """Set the file's length, flush it once and close it. As `DataFile.seal`."""
        self._check_open()
        await self._guard.run(self._seal, nbytes, path=self._location)

    def _check_open(self) -> None:
        self._guard.check()
        if self._buffered is None or self.sealed:
            raise UsageError(f"{self._location}: the data file is sealed", location=self._location)

    def _write_runs(self, offsets: Sequence[int], runs: Sequence[Bytes]) -> None:
        assert self._buffered is not None
        action = f"writing {len(runs)} runs"
        with self._guard.step(action, self._location), self._buffered.use() as fd:
            for offset, run in zip(offsets, runs, strict=True):
                write_all(fd, memoryview(run), offset)

    def _write(self, offset: int, data: Bytes) -> None:
        assert self._buffered is not None
        view = memoryview(data)
        head = -offset % PAGE_NBYTES
        middle = (len(view) - head) // PAGE_NBYTES * PAGE_NBYTES
        done = 0
        address = data.__array_interface__["data"][0]
        with self._guard.step(f"writing {data.size} bytes at offset {offset}", self._location):
            direct = self._direct
            if self._device in self._direct_writes.refused:
                direct = None
            aligned = middle >= DIRECT_MIN_NBYTES and (address + head) % PAGE_NBYTES == 0
            if aligned and direct is not None:
                done = self._write_direct(direct, view[head : head + middle], offset + head)
            with self._buffered.use() as fd:
                if not done:
                    write_all(fd, view, offset)
                    return
                write_all(fd, view[:head], offset)
                write_all(fd, view[head + done :], offset + head + done)

    def _write_direct(self, direct: Descriptor, view: memoryview, offset: int) -> int:
        """Return the number of bytes written; the rest must go through the page cache."""
        done = 0
        try:
            with direct.use() as fd:
                while done < len(view):
                    written = os.pwrite(fd, view[done:], offset + done)
                    done += written
                    if written <= 0 or done % PAGE_NBYTES:
                        break  # a direct write cannot continue in the middle of a page
        except OSError as error:
            if error.errno not in NO_DIRECT_IO:
                raise
            # Some file systems refuse only the write itself (overlay, FUSE). `close` closes the
            # descriptor: another thread may be about to use it.
            self._direct_writes.refuse(self._device, self._location, error)
        return done

    def _seal(self, nbytes: int) -> None:
        assert self._buffered is not None
        try:
            action = f"flushing {nbytes} bytes"
            with self._guard.step(action, self._location), self._buffered.use() as fd:
                if os.fstat(fd).st_size != nbytes:
                    os.ftruncate(fd, nbytes)
                flush_file(fd)
        finally:
            self.close()
        self.sealed = True

    def close(self) -> None:
        """Close the descriptors after their last use. Idempotent."""
        for descriptor in (self._direct, self._buffered):
            if descriptor is not None:
                descriptor.close()
