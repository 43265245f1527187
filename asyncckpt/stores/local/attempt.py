"""One attempt to save one checkpoint in a local directory, and a share in another process's."""

# Rule 1: the order is begin (directory, lock, owner file), data files and puts, directories,
#   record, attempt directory, rename, root. Each is durable before the next one depends on it.
#   (test_the_record_is_flushed_after_everything_and_before_the_rename; tests/crash/test_power.py)
# Rule 2: independent flushes run concurrently.
# Rule 3: after a failed write or flush, every call raises that failure: the kernel may have dropped
#   the pages, and a second flush would report success.
#   (test_a_failed_flush_of_a_data_file_is_not_repeated_and_ends_the_attempt)
# Rule 4: a directory is locked and has an owner file before `begin` returns. The order is mkdir,
#   lock, owner file. A sweeper that finds the directory before it is locked takes the lock and
#   removes the empty directory. `begin` notices this and tries another path, so a slow sweeper
#   never removes the directory of a later round.
#   (test_sweeping_never_takes_an_attempt_that_is_being_made)
# Rule 5: the mark of a shared attempt is written last, and exchanged files are removed before the
#   record is written.
# Rule 6: a share makes no directory of attempt and epoch: if they are missing, the root is not
#   shared. Every epoch is searched for the attempt, since only process 0 knows its claim. A fenced
#   attempt is in none of them and is not joined.

from __future__ import annotations

import asyncio
import contextlib
import os

from asyncckpt.errors import StoreError, UsageError
from asyncckpt.flow.shield import cleaned_up
from asyncckpt.flow.threads import ThreadAbandonedError
from asyncckpt.log import logger
from asyncckpt.ports import RECORD_NAME
from asyncckpt.stores.exchange import MARK, mark_of
from asyncckpt.stores.local.epochs import fenced, writing
from asyncckpt.stores.local.export import FilesPublication
from asyncckpt.stores.local.locks import leads_to, remove_owner, try_lock, unlock, write_owner
from asyncckpt.stores.local.owners import EXCHANGE, has_mark, make_owner_file, write_exchange
from asyncckpt.stores.local.posix import Descriptor, listing, make_directories, remove_tree
from asyncckpt.stores.local.publish import Publication, check_outside, check_place
from asyncckpt.stores.local.sweep import EPOCH
from asyncckpt.stores.local.tree import AttemptTree
from asyncckpt.stores.paths import Layout, clipped

BIRTH_ROUNDS = 100
"""Attempts to make a directory that sweepers may remove in the microseconds before its lock."""


class LocalAttempt(AttemptTree):
    """An attempt, made by `LocalStore.begin`, or by `LocalStore.begin_export` for plain files."""

    _keep = False

    # ------------------------------------------------------------------------------------ begin

    def open(self, *, exports: bool = False, shared: bool = False) -> None:
        """Make the attempt's directory, lock it and write its owner file. Blocking.

        Args:
            exports: leave the check of the name to `publish_files`, which knows whether a file or a
                directory is published.
            shared: let other processes join the attempt.

        Errors: as `LocalStore.begin`.
        """
        layout, terms = self._context.layout, self._terms
        epoch = terms.epoch
        base = layout.attempt(epoch, terms.name, terms.save_id)
        check_outside(self.location, self._context.is_valid)
        with writing(layout, epoch, self.location):
            if not exports:
                # `publish` checks again under the lock; this fails before anything is staged.
                check_place(self.location, overwrite=terms.overwrite)
            make_directories(layout.root, terms.directory_mode)
            for number in range(BIRTH_ROUNDS):
                path = f"{base}.{number}" if number else base
                try:
                    if not epoch:
                        make_directories(layout.epoch(epoch), terms.directory_mode)
                    elif not os.path.isdir(layout.epoch(epoch)):
                        raise fenced(layout, epoch, self.location)
                    fd = self._make_locked(path)
                except FileNotFoundError:
                    continue  # swept, tidied up or taken away
                if fd is not None:
                    self._path, self._directory = path, Descriptor(fd)
                    if shared:
                        self._share_attempt(fd)
                    if self._guard.ended:  # aborted after this thread was abandoned
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
            os.mkdir(path, self._terms.directory_mode)
        except FileExistsError:
            raise UsageError(
                f"{path}: an attempt of this save id exists; a save id is used once", location=path
            ) from None
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        alive = False
        try:
            if try_lock(fd) is not False and leads_to(path, fd):
                write_owner(path, self._context.machine(), self._terms)
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

    def _share_attempt(self, directory: int) -> None:
        """Let other processes join: make an owner file, then the mark."""
        terms, machine = self._terms, self._context.machine()
        self._owner_file = make_owner_file(self._path, 0, machine, terms)
        if self._owner_file is None:
            raise StoreError(
                f"{self._path}: another process removed the owner file while it was being made; "
                "save again",
                retryable=True,
                location=self._path,
            )
        os.mkdir(EXCHANGE, terms.directory_mode, dir_fd=directory)
        mark = mark_of(terms.save_id, machine.host)
        write_exchange(directory, MARK, memoryview(mark), terms.file_mode)
        self._own.append(f"{EXCHANGE}/{MARK}")

    def source(self, path: str) -> str | None:
        """Return None: every file has its final name from the start."""
        return None

    # ---------------------------------------------------------------------------------- publish

    async def publish(self, record: bytes) -> None:
        """Make the checkpoint visible and durable, or leave nothing of it. As `Attempt.publish`.

        The step that makes it visible is the rename.

        Raises:
            SaveError: the last flush failed; see `visible`.
            StoreError: an earlier step failed; nothing is visible.
        """
        await self._conclude(Publication(self._context, self._terms, self._path), record)

    async def publish_files(self, path: str = "") -> None:
        """Publish an export. As `Export.publish_files`. Cancellation, errors: as `publish`."""
        await self._conclude(FilesPublication(self._context, self._terms, self._path, path), None)

    async def _conclude(self, publication: Publication, record: bytes | None) -> None:
        """Publish, or leave nothing of the attempt."""
        try:
            with self._guard.step():
                await self._publish(publication, record)
        except BaseException as error:
            await cleaned_up(self.abort(), error)
            raise

    async def _publish(self, publication: Publication, record: bytes | None) -> None:
        self._check_sealed()
        workers = self._context.workers
        if self._owner_file is not None:
            await workers.run(self._end_exchange)
        await self._flush(*self._directories)
        # The record is written last: without it, this is not a checkpoint.
        if record is None:
            await self._flush(".")
        else:
            await workers.run(self._write_file, RECORD_NAME, [record], False)
            await self._flush(RECORD_NAME, ".")
        task = asyncio.current_task()
        cancelling = task.cancelling() if task is not None else 0
        try:
            await workers.run(self._rename, publication)
        except (asyncio.CancelledError, ThreadAbandonedError) as error:
            # `run` has waited for the thread: if it started and is not stuck, the outcome is known.
            if not publication.done and publication.error is None:
                if publication.started:
                    error.add_note(
                        "it is not known whether the checkpoint was published: see steps()"
                    )
                raise
            while task is not None and task.cancelling() > cancelling:
                task.uncancel()
            if publication.error is not None:
                raise publication.error from None
            if isinstance(error, ThreadAbandonedError):
                logger.warning("%s: removing the replaced checkpoint: %s", self.location, error)
            self._guard.ended = True

    def _end_exchange(self) -> None:
        with self._step("removing passed-on files", EXCHANGE) as directory:
            remove_tree(EXCHANGE, dir_fd=directory)

    def _rename(self, publication: Publication) -> None:
        assert self._directory is not None
        try:
            with self._directory.use() as directory:
                publication.run(directory)
        finally:
            self._keep = publication.keep_source
        self._guard.ended = True
        # If the replaced checkpoint could not be removed, the owner file lets a sweep do so.
        if not os.path.lexists(self._path):
            with contextlib.suppress(OSError):
                remove_owner(self._path)
        self._release()

    # ------------------------------------------------------------------------------------ abort

    def _remove_files(self) -> None:
        # With `_keep` the path holds the replaced checkpoint, never swept without its owner file.
        if self._keep:
            remove_owner(self._path)
        if self._owner_file is not None:
            super()._remove_files()
        elif not self._keep:
            remove_tree(self._path, first=RECORD_NAME)
            remove_owner(self._path)


class LocalJoinedAttempt(AttemptTree):
    """A share in an attempt, made by `LocalStore.join`."""

    def look(self, process: int) -> bool:
        """Join the attempt if it exists; return whether it does. Blocking.

        Errors: as `LocalStore.join`.
        """
        name = f"{clipped(self._terms.name)}-{self._terms.save_id}"
        return any(self._join(path, process) for path in _attempts(self._context.layout, name))

    def _join(self, path: str, process: int) -> bool:
        """Make an owner file; return False if there is no attempt, or it was removed meanwhile."""
        terms, machine = self._terms, self._context.machine()
        try:
            with contextlib.ExitStack() as undo:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                directory = Descriptor(fd)
                undo.callback(directory.close)
                if not has_mark(fd, terms.save_id):
                    return False
                owner_file = make_owner_file(path, process, machine, terms)
                if owner_file is None:
                    return False
                undo.pop_all()
        except (FileNotFoundError, NotADirectoryError):  # or the epoch's directory was tidied up
            return False
        self._path, self._directory, self._owner_file = path, directory, owner_file
        with directory.use() as fd:
            if has_mark(fd, terms.save_id) and leads_to(path, fd):
                if self._guard.ended:  # aborted after this thread was abandoned
                    self._remove()
                return True
        self._remove()  # the process that removes the attempt may rely on this one
        self._path, self._directory, self._owner_file = "", None, None
        return False

    async def settle(self) -> None:
        """Flush the directories with own files. As `JoinedAttempt.settle`."""
        self._check_sealed()
        await self._flush(*self._directories, ".")

    async def leave(self) -> None:
        """End the share. As `JoinedAttempt.leave`.

        Cancellation: finishes, then raises.
        """
        # A stopped process 0 may still publish, so only the whole attempt is removed, once all its
        # processes have ended.
        self._own.clear()
        await self.abort()


def _attempts(layout: Layout, name: str) -> list[str]:
    """Return the possible paths of the attempt; listing makes NFS look for new names."""
    epochs = filter(EPOCH.fullmatch, listing(layout.control))
    return [
        os.path.join(directory, this)
        for directory in [os.path.join(layout.control, epoch) for epoch in epochs]
        for this in listing(directory)
        if this == name or (this.startswith(f"{name}.") and this[len(name) + 1 :].isdecimal())
    ]
