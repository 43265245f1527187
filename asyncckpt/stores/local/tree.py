"""The directory of an attempt, and the files that this process writes in it."""

# Rule 1: every process flushes the directories that hold its names: the others may have flushed
#   them before these names existed.
# Rule 2: own files of a shared attempt are removed by path, never through the directory's
#   descriptor: if process 0 publishes meanwhile, the paths lead nowhere.
#   (test_an_abort_that_comes_after_publication_removes_nothing)
# Rule 3: once a thread was abandoned on an unresponsive mount, clean-up waits until the thread
#   returns. (tests/cancellation/test_stuck_mount.py)

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from asyncckpt.errors import UsageError
from asyncckpt.flow.shield import together
from asyncckpt.flow.threads import Workers
from asyncckpt.ports import RECORD_NAME, Buffer
from asyncckpt.stores.exchange import check_passed, too_large
from asyncckpt.stores.local.datafile import DirectWrites, LocalDataFile
from asyncckpt.stores.local.failures import Guard, reported
from asyncckpt.stores.local.locks import Machine, Terms, leads_to, unlock
from asyncckpt.stores.local.owners import (
    EXCHANGE,
    OwnerFile,
    is_abandoned,
    read_exchange,
    remove_attempt,
    write_exchange,
)
from asyncckpt.stores.local.posix import (
    Descriptor,
    flush_directory,
    flush_file,
    opened,
    remove_file,
    write_all,
)
from asyncckpt.stores.paths import Layout, check_file


@dataclass(frozen=True, slots=True)
class Context:
    """State that all attempts of a store share; see `LocalStore`. `machine` blocks."""

    layout: Layout
    workers: Workers
    machine: Callable[[], Machine]
    direct: DirectWrites
    is_valid: Callable[[bytes], bool]


class AttemptTree:
    """One process's view of an attempt's directory.

    Subclasses open the directory and end the attempt. Cancelling a call waits for its threads, then
    raises.
    """

    def __init__(self, context: Context, terms: Terms) -> None:
        self.location = context.layout.target(terms.name)
        self._context = context
        self._terms = terms
        self._guard = Guard(self.location, context.workers)
        self._path = ""
        self._directory: Descriptor | None = None
        self._owner_file: OwnerFile | None = None
        self._files: list[LocalDataFile] = []
        self._own: list[str] = []
        self._directories: set[str] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._path!r})"

    # ------------------------------------------------------------------------------------ files

    async def create(
        self, path: str, *, nbytes: int, window_nbytes: int | None = None
    ) -> LocalDataFile:
        """Open a new data file and reserve `nbytes` if possible; ignore `window_nbytes`."""
        self._guard.check()
        check_file(path, self.location)
        location = posixpath.join(self._path, path)
        file = LocalDataFile(path, location, self._guard, self._context.direct)
        self._files.append(file)
        await self._guard.run(self._open_file, file, nbytes, path=location)
        return file

    def _open_file(self, file: LocalDataFile, nbytes: int) -> None:
        with self._step("creating a data file", file.path) as directory:
            self._make_parents(file.path, directory)
            file.open(directory, self._terms.file_mode, nbytes)
            self._own.append(file.path)
            if self._guard.ended:  # aborted meanwhile
                file.close()

    async def put(self, path: str, *blocks: Buffer, in_record: bool = False) -> None:
        """Write a file durably, with one flush. As `AttemptFiles.put`."""
        self._guard.check()
        check_file(path, self.location)
        at = posixpath.join(self._path, path)
        await self._guard.run(self._write_file, path, blocks, True, path=at)

    def _write_file(self, path: str, blocks: Sequence[Buffer], flush: bool) -> None:
        views = [memoryview(block).cast("B") for block in blocks]
        with self._step(f"writing {sum(map(len, views))} bytes", path) as directory:
            self._make_parents(path, directory)
            # O_EXCL refuses a link, too.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with opened(path, flags, self._terms.file_mode, dir_fd=directory) as fd:
                self._own.append(path)
                offset = 0
                for view in views:
                    write_all(fd, view, offset)
                    offset += len(view)
                if flush:
                    flush_file(fd)

    def _make_parents(self, path: str, directory: int) -> None:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            parent = "/".join(parts[:depth])
            if parent not in self._directories:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(parent, self._terms.directory_mode, dir_fd=directory)
                self._directories.add(parent)

    @contextlib.contextmanager
    def _step(self, action: str, path: str) -> Iterator[int]:
        """Yield the attempt's directory for work on `path` in it; see `Guard.step`."""
        assert self._directory is not None
        location = posixpath.join(self._path, path)
        with self._guard.step(action, location), self._directory.use() as directory:
            yield directory

    # --------------------------------------------------------------------------------- exchange

    async def pass_on(self, path: str, data: bytes | memoryview) -> None:
        """Write a file for the other processes, not durably. As `AttemptFiles.pass_on`."""
        self._check_exchange(path)
        content, at = memoryview(data).cast("B"), posixpath.join(self._path, EXCHANGE, path)
        await self._guard.run(self._pass_on, path, content, path=at)

    def _pass_on(self, path: str, data: memoryview) -> None:
        where = f"{EXCHANGE}/{path}"
        with self._step(f"passing on {len(data)} bytes", where) as directory:
            write_exchange(directory, path, data, self._terms.file_mode)
            self._own.append(where)

    async def taken(self, path: str, *, max_nbytes: int) -> bytes | None:
        """Return what a process passed on, or None. As `AttemptFiles.taken`."""
        self._check_exchange(path)
        at = posixpath.join(self._path, EXCHANGE, path)
        found = await self._guard.run(self._taken, path, max_nbytes, path=at)
        if isinstance(found, int):
            raise too_large(path, self.location, found, max_nbytes)
        return found

    def _taken(self, path: str, max_nbytes: int) -> bytes | int | None:
        with self._step("reading what was passed on", f"{EXCHANGE}/{path}") as directory:
            return read_exchange(directory, path, max_nbytes)

    def _check_exchange(self, path: str) -> None:
        self._guard.check()
        check_passed(path, self.location, shared=self._owner_file is not None)

    # ------------------------------------------------------------------------------------ flush

    def _check_sealed(self) -> None:
        self._guard.check()
        for file in self._files:
            if not file.sealed:
                raise UsageError(
                    f"{file.path}: the data file is not sealed", location=self.location
                )

    async def _flush(self, *paths: str) -> None:
        """Flush the record file and directories concurrently."""
        await together(
            self._guard.run(self._flush_one, path, path=posixpath.join(self._path, path))
            for path in paths
        )

    def _flush_one(self, path: str) -> None:
        if path != RECORD_NAME:
            with self._step("flushing the directory", path) as directory:
                flush_directory(path, dir_fd=directory)
            return
        with self._step("flushing the record", path) as directory:
            with opened(path, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory) as fd:
                flush_file(fd)

    # ------------------------------------------------------------------------------------ abort

    async def abort(self) -> None:
        """Remove everything of the attempt; do nothing if it has ended.

        Of a shared attempt, remove own files, and the rest unless another of its processes is
        alive. If threads were abandoned, this happens when they return, or in a sweep.

        Cancellation: finishes, then raises.

        Raises:
            StoreError: files could not be removed; `LocalStore.sweep` tries again.
            ThreadAbandonedError: the file system does not respond.
        """
        if self._guard.ended:
            return
        self._guard.ended = True
        if not self._guard.stuck:
            with reported("removing the attempt", self._path or self.location):
                await self._context.workers.clean_up(self._remove)
        # An abandoned call may still create a file, which is removed when it returns.
        for call in self._guard.stuck:
            call.add_done_callback(self._remove_later)

    def _remove_later(self, _: Future[Any]) -> None:
        try:
            self._context.workers.submit(self._remove)
        except RuntimeError:  # the engine has ended, and this is the thread that was stuck
            with contextlib.suppress(OSError):
                self._remove()

    def _remove(self) -> None:
        for file in self._files:
            file.close()
        try:
            if self._path:
                self._remove_files()
        finally:
            self._release()

    def _remove_files(self) -> None:
        """Remove own files and owner file, then everything unless another process is alive."""
        assert self._directory is not None and self._owner_file is not None
        with self._directory.use() as directory:
            try:
                if leads_to(self._path, directory):
                    # The record first: without it, this is not a checkpoint.
                    for path in sorted(self._own, key=lambda path: path != RECORD_NAME):
                        remove_file(os.path.join(self._path, path))
            finally:
                self._owner_file.drop()
                unlock(directory)  # of process 0
            machine, root = self._context.machine(), self._context.layout.root
            if leads_to(self._path, directory) and is_abandoned(
                self._path, directory, machine, root
            ):
                remove_attempt(self._path)

    def _release(self) -> None:
        if self._owner_file is not None:
            with contextlib.suppress(OSError):
                self._owner_file.drop()
        if self._directory is not None:
            with contextlib.suppress(OSError), self._directory.use() as fd:
                unlock(fd)
            self._directory.close()
