"""One attempt to save one checkpoint in a local directory."""

# Rule 1: the order is begin (directory, lock, owner file), data files and puts, directories,
#   record, attempt directory, rename, root. Each is durable before the next one depends on it.
# Rule 2: flushes that do not depend on each other run side by side.
# Rule 3: after a failed write or flush every further call raises that failure.

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncckpt.errors import AsyncCheckpointError, UsageError
from asyncckpt.flow.threads import ThreadAbandonedError, Workers
from asyncckpt.stores.birth import make_attempt_directory
from asyncckpt.stores.datafile import DirectWrites, LocalDataFile
from asyncckpt.stores.failures import reported
from asyncckpt.stores.layout import RECORD_FILE, Layout, clipped, path_parts
from asyncckpt.stores.locks import Machine, remove_owner, this_machine, unlock, write_owner
from asyncckpt.stores.posix import (
    Descriptor,
    flush_directory,
    flush_file,
    make_directories,
    remove_tree,
    write_all,
)
from asyncckpt.stores.publish import IsValid, Publication, refuse_unrelated
from asyncckpt.stores.waiting import side_by_side, to_the_end


@dataclass(frozen=True, slots=True)
class Context:
    """What all attempts of a store share."""

    layout: Layout
    workers: Workers
    given_machine: Machine | None
    direct: DirectWrites
    is_valid: IsValid

    def machine(self) -> Machine:
        """What owner files are written for and compared with. Blocking."""
        return self.given_machine or this_machine()


class LocalAttempt:
    """An attempt, made by `LocalStore.begin`."""

    def __init__(
        self,
        context: Context,
        name: str,
        save_id: str,
        *,
        epoch: int,
        overwrite: bool,
        private: bool,
    ) -> None:
        self.location = context.layout.target(name)
        self._context = context
        self._name = name
        self._save_id = save_id
        self._epoch = context.layout.epoch(epoch)
        self._overwrite = overwrite
        self._file_mode = 0o600 if private else 0o666
        self._directory_mode = 0o700 if private else 0o777
        self._path = ""
        self._directory: Descriptor | None = None
        self._files: list[LocalDataFile] = []
        self._directories: set[str] = set()
        self._poison: AsyncCheckpointError | None = None
        self._lock = threading.Lock()
        self._ended = False
        self._keep = False

    def __repr__(self) -> str:
        return f"LocalAttempt({self._path!r})"

    # ------------------------------------------------------------------------------------ begin

    def open(self) -> None:
        """The attempt's directory is new, locked and has an owner file. Blocking.

        Raises:
            CheckpointExistsError: something stands at its place that is not to be replaced.
            StoreError: the directory cannot be made.
        """
        context = self._context
        with reported("beginning a save", self.location):
            self._check_place()
            make_directories(context.layout.root, self._directory_mode)
            self._path, fd = make_attempt_directory(
                self._epoch,
                f"{clipped(self._name)}-{self._save_id}",
                partial(
                    write_owner,
                    machine=context.machine(),
                    name=self._name,
                    save_id=self._save_id,
                    mode=self._file_mode,
                ),
                self._directory_mode,
            )
        self._directory = Descriptor(fd)

    def _check_place(self) -> None:
        # `publish` looks again, under the lock: this is for those who would stage in vain.
        if not self._overwrite:
            refuse_unrelated(self.location)

    # ------------------------------------------------------------------------------------ files

    async def create(
        self, path: str, *, nbytes: int, window_nbytes: int | None = None
    ) -> LocalDataFile:
        """A new data file is open for writing; `nbytes` of space are reserved where possible.

        Writes may be of any size and in any order, whatever `window_nbytes`.

        Raises:
            UsageError: the path leaves the attempt or is the record's.
            StoreError: the file cannot be made; the attempt cannot be continued.
        """
        self._check()
        self._check_path(path)
        file = LocalDataFile(
            path,
            posixpath.join(self._path, path),
            self._context.workers,
            self._context.direct,
            self.poison,
            self._check,
        )
        self._files.append(file)
        await self._context.workers.run(
            self._in_directory, "creating a data file", path, partial(self._open_file, file, nbytes)
        )
        return file

    def _open_file(self, file: LocalDataFile, nbytes: int, directory: int) -> None:
        file.open(directory, self._file_mode, nbytes)
        if self._ended:  # aborted meanwhile
            file.close()

    async def put(self, path: str, data: bytes | memoryview) -> None:
        """A small file with this content exists and is durable.

        Cancellation: waits for the thread, then raises.

        Raises:
            UsageError: the path leaves the attempt or is the record's.
            StoreError: writing or flushing failed; the attempt cannot be continued.
        """
        self._check()
        self._check_path(path)
        view = memoryview(data).cast("B")
        await self._context.workers.run(
            self._in_directory,
            f"writing {len(view)} bytes",
            path,
            partial(self._write_small, path, view, True),
        )

    def _write_small(self, path: str, data: memoryview, flush: bool, directory: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        fd = os.open(path, flags, self._file_mode, dir_fd=directory)
        try:
            write_all(fd, data, 0)
            if flush:
                flush_file(fd)
        finally:
            os.close(fd)

    def _in_directory(self, action: str, path: str, call: Callable[[int], Any]) -> None:
        assert self._directory is not None
        try:
            with (
                reported(action, posixpath.join(self._path, path)),
                self._directory.use() as directory,
            ):
                self._make_parents(path, directory)
                call(directory)
        except AsyncCheckpointError as error:
            self.poison(error)
            raise

    def _make_parents(self, path: str, directory: int) -> None:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            parent = "/".join(parts[:depth])
            if parent not in self._directories:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(parent, self._directory_mode, dir_fd=directory)
                with self._lock:
                    self._directories.add(parent)

    def poison(self, error: AsyncCheckpointError) -> None:
        """Every further call raises this failure, the first one."""
        with self._lock:
            self._poison = self._poison or error

    def _check(self) -> None:
        if self._poison is not None:
            raise self._poison
        if self._ended or self._directory is None:
            raise UsageError(f"{self.location}: this attempt has ended", location=self.location)

    def _check_path(self, path: str) -> None:
        if path_parts(path) is None or path == RECORD_FILE:
            raise UsageError(
                f"{path!r} cannot be a file of a checkpoint: pass a relative path without '..' "
                f"that is not {RECORD_FILE!r}",
                location=self.location,
                found=path,
            )

    # ---------------------------------------------------------------------------------- publish

    async def publish(self, record: bytes) -> None:
        """The checkpoint is visible and durable, with `record` written last.

        If it fails, nothing of the attempt is left.

        Cancellation: until the rename is issued, ends the attempt and raises; from then on the
        outcome is awaited and returned or raised instead of the cancellation.

        Raises:
            CheckpointExistsError: the name is taken; nothing of the other checkpoint was touched.
            SaveError: the last flush failed; `visible` says what holds.
            StoreError: an earlier step failed; nothing is visible.
        """
        await self._conclude(self._publish(record))

    async def _conclude(self, publishing: Coroutine[Any, Any, None]) -> None:
        """The attempt has ended: it is published, or nothing of it is left."""
        try:
            await publishing
        except ThreadAbandonedError:
            # The file system does not answer: cleaning up would only block another thread.
            self._ended = True
            raise
        except BaseException as error:
            try:
                await self.abort()
            except AsyncCheckpointError as failure:
                error.add_note(f"cleaning up failed too: {failure}")
            raise

    async def _publish(self, record: bytes) -> None:
        workers = self._context.workers
        self._check_sealed()
        await side_by_side(
            workers, [partial(self._flush_directory, path) for path in self._directories]
        )
        # The record is written last: before it, nothing here is a checkpoint.
        await workers.run(
            self._in_directory,
            "writing the record",
            RECORD_FILE,
            partial(self._write_small, RECORD_FILE, memoryview(record), False),
        )
        await side_by_side(workers, [self._flush_record, partial(self._flush_directory, ".")])
        publication = Publication(
            self._context.layout,
            self._context.machine,
            self._context.is_valid,
            self._path,
            self._name,
            self._save_id,
            self._overwrite,
            self._file_mode,
        )
        await self._run(publication)

    def _check_sealed(self) -> None:
        self._check()
        for file in self._files:
            if not file.sealed:
                raise UsageError(
                    f"{file.path}: the data file is not sealed", location=self.location
                )

    async def _run(self, publication: Publication) -> None:
        """The publication was run; once it has begun, its outcome is awaited."""
        task = asyncio.current_task()
        cancelling = task.cancelling() if task is not None else 0
        try:
            await self._context.workers.run(self._rename, publication)
        except asyncio.CancelledError:
            # `run` has waited for the thread: if it began at all, the outcome is known.
            if not publication.started:
                raise
            while task is not None and task.cancelling() > cancelling:
                task.uncancel()
            if publication.error is not None:
                raise publication.error from None

    def _rename(self, publication: Publication) -> None:
        assert self._directory is not None
        try:
            with self._directory.use() as directory:
                publication.run(directory)
        finally:
            self._keep = publication.keep_source
        self._ended = True
        # A replaced checkpoint that could not be removed is there still, and is swept by its owner.
        if not os.path.lexists(self._path):
            with contextlib.suppress(OSError):
                remove_owner(self._path)
        self._release()

    def _flush_directory(self, path: str) -> None:
        self._in_directory("flushing the directory", path, partial(_flush_directory_at, path))

    def _flush_record(self) -> None:
        self._in_directory("flushing the record", RECORD_FILE, _flush_record_at)

    # ------------------------------------------------------------------------------------ abort

    async def abort(self) -> None:
        """Nothing of the attempt is left; nothing happens if it has ended.

        Cancellation: finishes, then raises.

        Raises:
            StoreError: files could not be removed; `LocalStore.sweep` will try again.
        """
        if self._ended:
            return
        self._ended = True
        await to_the_end(self._context.workers, self._remove)

    def _remove(self) -> None:
        for file in self._files:
            file.close()
        try:
            if self._path:
                with reported("removing the attempt", self._path):
                    # With `_keep` the path holds the replaced checkpoint, which is never swept
                    # without its owner.
                    if not self._keep:
                        remove_tree(self._path, first=RECORD_FILE)
                    remove_owner(self._path)
        finally:
            self._release()

    def _release(self) -> None:
        if self._directory is not None:
            with contextlib.suppress(OSError), self._directory.use() as fd:
                unlock(fd)
            self._directory.close()


def _flush_directory_at(path: str, directory: int) -> None:
    flush_directory(path, dir_fd=directory)


def _flush_record_at(directory: int) -> None:
    fd = os.open(RECORD_FILE, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory)
    try:
        flush_file(fd)
    finally:
        os.close(fd)
