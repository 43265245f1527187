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
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiofiles

from asyncckpt.errors import AsyncCheckpointError, StoreError, UsageError
from asyncckpt.flow.shield import run_all
from asyncckpt.flow.threads import ThreadAbandonedError, Workers
from asyncckpt.stores.local.datafile import DirectWrites, LocalDataFile
from asyncckpt.stores.local.failures import reported
from asyncckpt.stores.local.locks import (
    Machine,
    leads_to,
    remove_owner,
    this_machine,
    try_lock,
    unlock,
    write_owner,
)
from asyncckpt.stores.local.posix import (
    Descriptor,
    flush_directory,
    flush_file,
    make_directories,
    remove_tree,
)
from asyncckpt.stores.local.publish import IsValid, Publication, check_place
from asyncckpt.stores.paths import RECORD_FILE, Layout, clipped, path_parts

BIRTH_ROUNDS = 100
"""Directories that sweepers may remove before they are locked; each has to hit a gap of
microseconds."""


@dataclass(frozen=True, slots=True)
class Context:
    """Everything that the attempts of a store share."""

    layout: Layout
    workers: Workers
    given_machine: Machine | None
    direct: DirectWrites
    is_valid: IsValid

    def machine(self) -> Machine:
        """Return the host and boot that owner files are compared with. Blocking."""
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
        self._stuck: Future[Any] | None = None
        self._lock = threading.Lock()
        self._ended = False
        self._keep = False

    def __repr__(self) -> str:
        return f"LocalAttempt({self._path!r})"

    # ------------------------------------------------------------------------------------ begin

    def open(self) -> None:
        """Make the attempt's directory, lock it and write its owner file. Blocking.

        Raises:
            CheckpointExistsError: the name is taken by something that is not to be replaced.
            UsageError: the save id was used before.
            StoreError: the directory cannot be made.
        """
        with reported("beginning a save", self.location):
            self._check_place()
            make_directories(self._context.layout.root, self._directory_mode)
            base = os.path.join(self._epoch, f"{clipped(self._name)}-{self._save_id}")
            for number in range(BIRTH_ROUNDS):
                path = f"{base}.{number}" if number else base
                try:
                    make_directories(self._epoch, self._directory_mode)
                    fd = self._make_locked(path)
                except FileNotFoundError:
                    continue  # swept, or the epoch's directory was tidied up
                if fd is not None:
                    self._path, self._directory = path, Descriptor(fd)
                    if self._ended:  # this thread was abandoned, and has returned
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

    def _check_place(self) -> None:
        # `publish` looks again, under the lock: this spares callers from staging in vain.
        check_place(self.location, overwrite=self._overwrite)

    # ------------------------------------------------------------------------------------ files

    async def create(
        self, path: str, *, nbytes: int, window_nbytes: int | None = None
    ) -> LocalDataFile:
        """Open a new data file; `nbytes` of space are reserved where possible.

        Writes may be of any size and in any order, whatever `window_nbytes`.

        Raises:
            UsageError: the path leaves the attempt or is the record's.
            StoreError: the file cannot be made; the attempt cannot be continued.
        """
        self._check()
        self._check_path(path)
        location = posixpath.join(self._path, path)
        context = self._context
        file = LocalDataFile(
            path, location, context.workers, context.direct, self.poison, self._check
        )
        self._files.append(file)
        await self._in_thread("creating a data file", path, partial(self._open_file, file, nbytes))
        return file

    def _open_file(self, file: LocalDataFile, nbytes: int, directory: int) -> None:
        self._make_parents(file.path, directory)
        file.open(directory, self._file_mode, nbytes)
        if self._ended:  # aborted meanwhile
            file.close()

    def source(self, path: str) -> str | None:
        """Return None: every file has its own name from the beginning."""
        return None

    async def put(self, path: str, data: bytes | memoryview, *, in_record: bool = False) -> None:
        """Write a small file, durably.

        Cancellation: waits until the file is closed, then raises.

        Raises:
            UsageError: the path leaves the attempt or is the record's.
            StoreError: writing or flushing failed; the attempt cannot be continued.
        """
        self._check()
        self._check_path(path)
        if posixpath.dirname(path) not in self._directories | {""}:
            await self._in_thread("making a directory", path, partial(self._make_parents, path))
        await self._write_small(path, memoryview(data).cast("B"), flush=True)

    async def _write_small(self, path: str, data: memoryview, *, flush: bool) -> None:
        with self._poisoned_by_errors():
            await self._context.workers.complete(
                self._write_and_close(path, data, flush), f"writing {path}"
            )

    async def _write_and_close(self, path: str, data: memoryview, flush: bool) -> None:
        assert self._directory is not None
        workers = self._context.workers
        with (
            self._poisoned_by_errors(),
            reported(f"writing {len(data)} bytes", posixpath.join(self._path, path)),
            self._directory.use() as directory,
        ):
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

    async def _in_thread(self, action: str, path: str, call: Callable[[int], object]) -> None:
        """Call a function of the attempt's directory in a worker thread; an error poisons."""
        with self._poisoned_by_errors():
            await self._context.workers.run(self._in_directory, action, path, call)

    def _in_directory(self, action: str, path: str, call: Callable[[int], object]) -> None:
        assert self._directory is not None
        with (
            self._poisoned_by_errors(),  # in the thread, whose caller may have been cancelled
            reported(action, posixpath.join(self._path, path)),
            self._directory.use() as directory,
        ):
            call(directory)

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
        """Make every further call raise this failure, or the first one."""
        with self._lock:
            self._poison = self._poison or error
            if isinstance(error, ThreadAbandonedError):
                self._stuck = error.future

    @contextlib.contextmanager
    def _poisoned_by_errors(self) -> Iterator[None]:
        try:
            yield
        except AsyncCheckpointError as error:
            self.poison(error)
            raise

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
        """Make the checkpoint visible and durable, with `record` written last.

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
        """Publish, or leave nothing of the attempt."""
        try:
            await publishing
        except BaseException as error:
            if isinstance(error, AsyncCheckpointError):
                self.poison(error)
            try:
                await self.abort()
            except AsyncCheckpointError as failure:
                error.add_note(f"cleaning up failed too: {failure}")
            raise

    async def _publish(self, record: bytes) -> None:
        self._check_sealed()
        await self._flush_directories(*self._directories)
        # The record is written last: before it, nothing here is a checkpoint.
        await self._write_small(RECORD_FILE, memoryview(record), flush=False)
        flush_record = partial(self._in_directory, "flushing the record", RECORD_FILE)
        await run_all(
            self._context.workers,
            [partial(flush_record, _flush_record_at), self._flusher(".")],
        )
        context = self._context
        await self._run(
            Publication(
                context.layout,
                context.machine,
                context.is_valid,
                self._path,
                self._name,
                self._save_id,
                self._overwrite,
                self._file_mode,
            )
        )

    def _check_sealed(self) -> None:
        self._check()
        for file in self._files:
            if not file.sealed:
                raise UsageError(
                    f"{file.path}: the data file is not sealed", location=self.location
                )

    async def _flush_directories(self, *paths: str) -> None:
        await run_all(self._context.workers, [self._flusher(path) for path in paths])

    def _flusher(self, path: str) -> Callable[[], None]:
        def flush(directory: int) -> None:
            flush_directory(path, dir_fd=directory)

        return partial(self._in_directory, "flushing the directory", path, flush)

    async def _run(self, publication: Publication) -> None:
        """Run the publication; once it has begun, its outcome is awaited."""
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

    def _rename(self, publication: Publication) -> None:
        assert self._directory is not None
        try:
            with self._directory.use() as directory:
                publication.run(directory)
        finally:
            self._keep = publication.keep_source
        self._ended = True
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
        if self._ended:
            return
        self._ended = True
        if self._stuck is not None:
            self._stuck.add_done_callback(self._remove_later)
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


def _flush_record_at(directory: int) -> None:
    fd = os.open(RECORD_FILE, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory)
    try:
        flush_file(fd)
    finally:
        os.close(fd)
