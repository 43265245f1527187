"""One attempt to save one checkpoint in a local directory."""

# Rule 1: the order is begin (directory, lock, owner file), data files and puts, directories,
#   record, attempt directory, rename, root. Each is durable before the next one depends on it.
#   (test_the_record_is_flushed_after_everything_and_before_the_rename; tests/crash/test_power.py)
# Rule 2: flushes that do not depend on each other run at the same time.
# Rule 3: after a failed write or flush every further call raises that failure: the kernel may have
#   dropped the pages, and a second flush would say that all is well.
#   (test_a_failed_flush_of_a_data_file_is_not_repeated_and_ends_the_attempt)
# Rule 4: a directory is locked and has an owner file before `begin` returns. The order is mkdir,
#   lock, owner file. A sweeper that finds the directory before it is locked takes the lock and
#   removes it, empty and without owner; that is noticed here, and another path is tried, so that a
#   slow sweeper never removes the directory of a later round.
#   (test_sweeping_never_takes_an_attempt_that_is_being_made)
# Rule 5: once a thread was abandoned, the mount does not answer, and clean-up waits until the
#   thread returns. (tests/cancellation/test_stuck_mount.py)

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import aiofiles

from asyncckpt.errors import AsyncCheckpointError, StoreError, UsageError
from asyncckpt.flow.shield import run_all
from asyncckpt.flow.threads import ThreadAbandonedError
from asyncckpt.stores.local.context import Context
from asyncckpt.stores.local.datafile import LocalDataFile
from asyncckpt.stores.local.export import FilesPublication
from asyncckpt.stores.local.failures import Guard, reported
from asyncckpt.stores.local.locks import leads_to, remove_owner, try_lock, unlock, write_owner
from asyncckpt.stores.local.posix import (
    Descriptor,
    flush_directory,
    flush_file,
    make_directories,
    remove_tree,
)
from asyncckpt.stores.local.publish import Publication, check_place
from asyncckpt.stores.paths import RECORD_FILE, check_file, clipped

BIRTH_ROUNDS = 100
"""Directories that sweepers may remove before they are locked; each has to hit a gap of
microseconds."""


class LocalAttempt:
    """An attempt, made by `LocalStore.begin`, or by `LocalStore.begin_export` for plain files."""

    def __init__(
        self, context: Context, name: str, save_id: str, *, overwrite: bool, private: bool
    ) -> None:
        self.location = context.layout.target(name)
        self._context = context
        self._name = name
        self._save_id = save_id
        self._overwrite = overwrite
        self._file_mode = 0o600 if private else 0o666
        self._directory_mode = 0o700 if private else 0o777
        self._guard = Guard(self.location, context.workers)
        self._path = ""
        self._directory: Descriptor | None = None
        self._files: list[LocalDataFile] = []
        self._directories: set[str] = set()
        self._lock = threading.Lock()
        self._keep = False

    def __repr__(self) -> str:
        return f"LocalAttempt({self._path!r})"

    # ------------------------------------------------------------------------------------ begin

    def open(self, epoch: int, *, exports: bool = False) -> None:
        """Make the attempt's directory, lock it and write its owner file. Blocking.

        Args:
            epoch: the claim under which the attempt writes.
            exports: only `publish_files` knows whether a file or a directory is made.

        Raises:
            CheckpointExistsError: the name is taken by something that is not to be replaced.
            UsageError: the save id was used before.
            StoreError: the directory cannot be made.
        """
        layout = self._context.layout
        base = os.path.join(layout.epoch(epoch), f"{clipped(self._name)}-{self._save_id}")
        with reported("beginning a save", self.location):
            if not exports:
                # `publish` looks again, under the lock: this spares callers from staging in vain.
                check_place(self.location, overwrite=self._overwrite)
            make_directories(layout.root, self._directory_mode)
            for number in range(BIRTH_ROUNDS):
                path = f"{base}.{number}" if number else base
                try:
                    make_directories(layout.epoch(epoch), self._directory_mode)
                    fd = self._make_locked(path)
                except FileNotFoundError:
                    continue  # swept, or the epoch's directory was tidied up
                if fd is not None:
                    self._path, self._directory = path, Descriptor(fd)
                    if self._guard.ended:  # this thread was abandoned, and has returned
                        self._remove()
                    return
        raise StoreError(
            f"{base}: the directory was removed {BIRTH_ROUNDS} times while it was being made; "
            "another process sweeps this root in a loop",
            retryable=True,
            location=base,
        )

    def _make_locked(self, path: str) -> int | None:
        """Return a locked descriptor of a new directory with an owner; None if it was swept."""
        try:
            os.mkdir(path, self._directory_mode)
        except FileExistsError:
            raise UsageError(
                f"{path}: an attempt of this save id exists; a save id is used once", location=path
            ) from None
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        alive = False
        try:
            if try_lock(fd) is not False and leads_to(path, fd):
                machine = self._context.machine()
                write_owner(path, machine, self._name, self._save_id, self._file_mode)
                # Where locks do not reach other hosts, one of them may have swept meanwhile.
                alive = leads_to(path, fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.rmdir(path)
            raise
        finally:
            if not alive:
                unlock(fd)
                os.close(fd)
                remove_owner(path)
        return fd if alive else None

    # ------------------------------------------------------------------------------------ files

    async def create(
        self, path: str, *, nbytes: int, window_nbytes: int | None = None
    ) -> LocalDataFile:
        """Open a new data file; `nbytes` of space are reserved where possible.

        Writes may be of any size and in any order, whatever `window_nbytes`.
        """
        self._guard.check()
        check_file(path, self.location)
        location = posixpath.join(self._path, path)
        file = LocalDataFile(path, location, self._guard, self._context.direct)
        self._files.append(file)
        await self._guard.run(self._open_file, file, nbytes)
        return file

    def _open_file(self, file: LocalDataFile, nbytes: int) -> None:
        with self._step("creating a data file", file.path) as directory:
            self._make_parents(file.path, directory)
            file.open(directory, self._file_mode, nbytes)
            if self._guard.ended:  # aborted meanwhile
                file.close()

    def source(self, path: str) -> str | None:
        """Return None: every file has its own name from the beginning."""
        return None

    async def put(self, path: str, data: bytes | memoryview, *, in_record: bool = False) -> None:
        """Write a small file, durably. Cancellation: waits until it is closed, then raises."""
        self._guard.check()
        check_file(path, self.location)
        writing = self._write_file(path, memoryview(data).cast("B"), flush=True)
        with self._guard.step():
            await self._context.workers.complete(writing, f"writing {path}")

    async def _write_file(self, path: str, data: memoryview, *, flush: bool) -> None:
        workers = self._context.workers
        with self._step(f"writing {len(data)} bytes", path) as directory:
            if posixpath.dirname(path) not in self._directories | {""}:
                await workers.run(self._make_parents, path, directory)
            # "x" makes the flags O_CREAT | O_EXCL, which also refuse a link.
            opener = partial(os.open, mode=self._file_mode, dir_fd=directory)
            file = await aiofiles.open(path, "xb", buffering=0, opener=opener, executor=workers)
            try:
                while len(data):
                    data = data[await file.write(data) :]
                if flush:
                    await workers.run(flush_file, file.fileno())
            finally:
                await file.close()  # `async with` would close it in a thread that is not ours

    def _make_parents(self, path: str, directory: int) -> None:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            parent = "/".join(parts[:depth])
            if parent not in self._directories:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(parent, self._directory_mode, dir_fd=directory)
                with self._lock:
                    self._directories.add(parent)

    @contextlib.contextmanager
    def _step(self, action: str, path: str) -> Iterator[int]:
        """Yield the attempt's directory for work on `path` in it; see `Guard.step`."""
        assert self._directory is not None
        location = posixpath.join(self._path, path)
        with self._guard.step(action, location), self._directory.use() as directory:
            yield directory

    # ---------------------------------------------------------------------------------- publish

    async def publish(self, record: bytes) -> None:
        """Make the checkpoint visible and durable, or leave nothing of it. As `Attempt.publish`.

        Cancellation: until the rename is issued, ends the attempt and raises; from then on the
        outcome is awaited and returned or raised instead of the cancellation.

        Raises:
            CheckpointExistsError: the name is taken; nothing of the other checkpoint was touched.
            SaveError: the last flush failed; `visible` says what holds.
            StoreError: an earlier step failed; nothing is visible.
        """
        await self._conclude(Publication, record)

    async def publish_files(self, path: str = "") -> None:
        """Publish the file `path` of an export, or with ``""`` all of it, durably.

        If it fails, nothing of the attempt is left. Cancellation, errors: as `publish`.
        """
        await self._conclude(FilesPublication, None, path)

    async def _conclude(
        self, kind: type[Publication], record: bytes | None, path: str = ""
    ) -> None:
        """Publish, or leave nothing of the attempt."""
        publication = kind(
            self._context,
            self._path,
            path,
            self._name,
            self._save_id,
            overwrite=self._overwrite,
            mode=self._file_mode,
        )
        try:
            with self._guard.step():
                await self._publish(publication, record)
        except BaseException as error:
            try:
                await self.abort()
            except AsyncCheckpointError as failure:
                error.add_note(f"cleaning up failed too: {failure}")
            raise

    async def _publish(self, publication: Publication, record: bytes | None) -> None:
        self._guard.check()
        for file in self._files:
            if not file.sealed:
                raise UsageError(
                    f"{file.path}: the data file is not sealed", location=self.location
                )
        await self._flush(*self._directories)
        # The record is written last: before it, nothing here is a checkpoint.
        if record is None:
            await self._flush(".")
        else:
            writing = self._write_file(RECORD_FILE, memoryview(record), flush=False)
            await self._context.workers.complete(writing, f"writing {RECORD_FILE}")
            await self._flush(RECORD_FILE, ".")
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
        except ThreadAbandonedError as error:
            if publication.started:
                error.add_note("it is not known whether the checkpoint was published: see steps()")
            raise

    async def _flush(self, *paths: str) -> None:
        """Flush the record file and directories, all at the same time."""
        await run_all(self._context.workers, [partial(self._flush_one, path) for path in paths])

    def _flush_one(self, path: str) -> None:
        if path != RECORD_FILE:
            with self._step("flushing the directory", path) as directory:
                flush_directory(path, dir_fd=directory)
            return
        with self._step("flushing the record", path) as directory:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory)
            try:
                flush_file(fd)
            finally:
                os.close(fd)

    def _rename(self, publication: Publication) -> None:
        assert self._directory is not None
        try:
            with self._directory.use() as directory:
                publication.run(directory)
        finally:
            self._keep = publication.keep_source
        self._guard.ended = True
        # If a replaced checkpoint could not be removed, the owner file lets a sweep find it.
        if not os.path.lexists(self._path):
            with contextlib.suppress(OSError):
                remove_owner(self._path)
        self._release()

    # ------------------------------------------------------------------------------------ abort

    async def abort(self) -> None:
        """Remove everything of the attempt; do nothing if it has ended.

        After a thread was abandoned, the rest is removed when that thread returns, or swept.

        Cancellation: finishes, then raises.

        Raises:
            StoreError: files could not be removed; `LocalStore.sweep` will try again.
            ThreadAbandonedError: the file system does not answer.
        """
        if self._guard.ended:
            return
        self._guard.ended = True
        if self._guard.stuck is not None:
            self._guard.stuck.add_done_callback(self._remove_later)
        else:
            await self._context.workers.clean_up(self._remove)

    def _remove_later(self, _: Future[Any]) -> None:
        try:
            self._context.workers.submit(self._remove)
        except RuntimeError:  # the engine has ended: this is the thread that was stuck
            with contextlib.suppress(AsyncCheckpointError):
                self._remove()

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
