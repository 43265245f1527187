"""Checkpoints in a local directory: durable, atomic, and safe against other processes.

Reading needs no write permission and creates nothing. POSIX only.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, ParamSpec, TypeVar

from asyncckpt.arguments import absolute
from asyncckpt.errors import CheckpointNotFoundError
from asyncckpt.flow.shield import cleaned_up
from asyncckpt.flow.threads import Workers
from asyncckpt.format.claim import Claim
from asyncckpt.log import logger
from asyncckpt.options import (
    DEFAULT_CHUNK_NBYTES,
    DEFAULT_DATA_FILE_NBYTES,
    LOCAL_CONCURRENCY,
    SLOT_NBYTES,
)
from asyncckpt.ports import RECORD_NAME, Removal, Sizes, StoreCapabilities
from asyncckpt.stores.claims import check_epoch
from asyncckpt.stores.exchange import check_process, find_mark
from asyncckpt.stores.local.attempt import LocalAttempt, LocalJoinedAttempt
from asyncckpt.stores.local.datafile import DirectWrites
from asyncckpt.stores.local.epochs import check, claim, claims, writing
from asyncckpt.stores.local.failures import FULL, reported
from asyncckpt.stores.local.files import LocalFiles
from asyncckpt.stores.local.locks import (
    Machine,
    Terms,
    leads_to,
    remove_owner,
    root_lock,
    this_machine,
    try_lock,
    unlock,
    write_owner,
)
from asyncckpt.stores.local.notes import keep_note, take_notes
from asyncckpt.stores.local.posix import flush_directory, landed, opened, remove_tree
from asyncckpt.stores.local.publish import record_at
from asyncckpt.stores.local.sweep import collect, forget_replaced, sweep, tidy
from asyncckpt.stores.local.tree import Context
from asyncckpt.stores.paths import CONTROL, Layout, check_name, check_save_id

P = ParamSpec("P")
T = TypeVar("T")

JOIN_PAUSES_S = 0.001, 0.1
"""First and longest interval of polling for an attempt to join: a poll is a few system calls."""


@dataclass(frozen=True, slots=True)
class Unlisted:
    """The bytes of a checkpoint that has lost its name.

    Attributes:
        path: their location.
        delete: deletes them. Blocking.
        held: the lock and descriptor that keep sweepers away.
    """

    path: str
    delete: Callable[[], None]
    held: contextlib.ExitStack

    def remove(self) -> None:
        """Delete the bytes and release the lock. Blocking."""
        with self.held:
            self.delete()


class LocalStore:
    """A directory that holds checkpoints by name.

    Cancelling a call waits for its thread, then raises.

    Args:
        root: the directory; created by the first save.
        workers: threads for every blocking call.
        direct_io: write past the page cache where possible (``"auto"``), always, or never.
        is_valid: whether the content of a record file is a commit record. A directory without one
            is not a checkpoint: saving moves it to `.asyncckpt/aside-…`, under a name other than a
            step's only with `overwrite`.
        machine: returns the host and boot to compare owner files with.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        workers: Workers,
        *,
        direct_io: bool | Literal["auto"] = "auto",
        is_valid: Callable[[bytes], bool] = lambda record: True,
        machine: Callable[[], Machine] = this_machine,
    ) -> None:
        self.url = absolute(root)
        self.capabilities = StoreCapabilities()
        self._layout = Layout(self.url)
        self._workers = workers
        self._context = Context(self._layout, workers, machine, DirectWrites(direct_io), is_valid)
        self._files: list[LocalFiles] = []
        self._wrote = False
        self._identity: tuple[int, int] | None = None  # device and inode of the root
        self._noted: set[int] = set()

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    def sizes(
        self,
        nbytes: int,
        *,
        budget_nbytes: int,
        chunk_nbytes: int = DEFAULT_CHUNK_NBYTES,
        data_file_nbytes: int | None = None,
        concurrency: int | None = None,
    ) -> Sizes:
        """Return the requested sizes, with windows of one slot."""
        return Sizes(
            data_file_nbytes or DEFAULT_DATA_FILE_NBYTES,
            SLOT_NBYTES,
            concurrency or LOCAL_CONCURRENCY,
        )

    async def claim(self) -> Claim:
        """Take over the root. As `Store.claim`.

        Cancellation: waits for the thread, then raises; the claim may have been made.
        """
        self._wrote = True
        return await self._run("making a claim", self._layout.control, claim, self._layout)

    async def claims(self) -> Sequence[Claim]:
        """Return the readable claims, ascending; none if there is no root."""
        return await self._run("reading the claims", self._layout.control, claims, self._layout)

    async def check_claim(self, epoch: int) -> None:
        """Raise `FencedError` if a higher claim was made. As `Store.check_claim`."""
        if epoch:
            control = self._layout.control
            await self._run("reading the claims", control, check, self._layout, epoch)

    async def begin(
        self,
        name: str,
        save_id: str,
        *,
        epoch: int = 0,
        overwrite: bool = False,
        private: bool = False,
        shared: bool = False,
        exports: bool = False,
    ) -> LocalAttempt:
        """Make and lock a directory for an attempt, with durable parents. As `Store.begin`.

        Raises:
            UsageError: the name is not one path part, the save id was used before, or the root is
                inside a checkpoint.
            CheckpointExistsError: the name is taken by something that a save does not replace.
            FencedError: another process took over the claim.
            StoreError: the directory cannot be made.
        """
        check_name(name)
        check_save_id(save_id)
        check_epoch(epoch)
        attempt = LocalAttempt(self._context, Terms(name, save_id, epoch, overwrite, private))
        self._wrote = True
        action, place = "beginning a save", attempt.location
        try:
            await self._run(action, place, attempt.open, exports=exports, shared=shared)
        except BaseException as error:
            await cleaned_up(attempt.abort(), error)
            raise
        return attempt

    async def join(
        self, name: str, save_id: str, *, process: int, timeout_s: float, private: bool = False
    ) -> LocalJoinedAttempt:
        """Join an attempt that another process begins; make no directory. As `Store.join`.

        Cancellation: aborts the share, then raises.

        Raises:
            UsageError: the name is not one path part, or the process has already joined.
            CheckpointNotFoundError: no such attempt appeared within `timeout_s`.
            StoreError: the root cannot be read or an owner file cannot be written.
        """
        check_name(name)
        check_save_id(save_id)
        check_process(process)
        attempt = LocalJoinedAttempt(self._context, Terms(name, save_id, private=private))
        self._wrote = True
        try:
            await find_mark(
                partial(self._run, "joining a save", attempt.location, attempt.look, process),
                location=attempt.location,
                save_id=save_id,
                timeout_s=timeout_s,
                pauses_s=JOIN_PAUSES_S,
            )
        except BaseException as error:
            await cleaned_up(attempt.abort(), error)
            raise
        return attempt

    async def begin_export(
        self, name: str, save_id: str, *, overwrite: bool = False, private: bool = False
    ) -> LocalAttempt:
        """Open an attempt for files of another format, without a commit record; see `begin`."""
        return await self.begin(name, save_id, overwrite=overwrite, private=private, exports=True)

    async def settled(self) -> None:
        """Log a warning if the root is not the directory of the previous save.

        A published checkpoint is already complete for other programs.
        """
        await self._run("looking at", self.url, self._check_root)

    def _check_root(self) -> None:
        try:
            found = os.stat(self.url)
        except OSError:
            return
        before, self._identity = self._identity, (found.st_dev, found.st_ino)
        if before not in (None, self._identity):
            logger.warning(
                "%s is not the directory of the previous save: a mount was lost, or it was "
                "moved or replaced; earlier steps are not in it",
                self.url,
            )

    async def names(self) -> list[str]:
        """Return the names of all directories in the root, if it exists.

        Also `RECORD_NAME`, if the root is itself a checkpoint. As `Store.names`.
        """
        return await self._run("listing", self.url, self._names)

    def _names(self) -> list[str]:
        try:
            with os.scandir(self.url) as entries:
                return [
                    entry.name
                    for entry in entries
                    if entry.name == RECORD_NAME or (entry.name != CONTROL and _is_dir(entry))
                ]
        except FileNotFoundError:
            return []

    def files(self, name: str) -> LocalFiles:
        """Return read access to one checkpoint; nothing is opened yet. As `Store.files`."""
        files = LocalFiles(self._layout.target(check_name(name)), self._workers, self.capabilities)
        self._files = [open_files for open_files in self._files if not open_files.closed]
        self._files.append(files)
        return files

    async def unlist(self, name: str, *, epoch: int = 0, seal: bytes = b"") -> Removal:
        """Delete the name durably; of a link, not the target. As `Store.unlist`.

        A directory that cannot be moved, because the disk is full or it belongs to a lower layer of
        an overlay, loses its record instead. After a cancellation, `sweep` removes the bytes.
        """
        check_name(name)
        check_epoch(epoch)
        self._wrote = True
        unlisted: list[Unlisted] = []
        target = self._layout.target(name)
        with reported("deleting", target):
            try:
                await self._workers.run(lambda: unlisted.append(self._unlist(name, epoch, seal)))
            except BaseException:
                if unlisted:
                    await self._workers.clean_up(unlisted[0].held.close)
                raise
        return partial(self._remove, unlisted[0])

    async def _remove(self, unlisted: Unlisted) -> None:
        with reported("deleting", unlisted.path):
            try:
                await self._workers.run(unlisted.remove)
            except asyncio.CancelledError:
                # If the queued call was dropped, it did not release the lock.
                await self._workers.clean_up(unlisted.held.close)
                raise

    def _unlist(self, name: str, epoch: int, seal: bytes) -> Unlisted:
        target = self._layout.target(name)
        with writing(self._layout, epoch, target):
            if not os.path.isdir(target):
                raise _absent(target)
            try:
                return self._move_to_trash(name, epoch, seal)
            except OSError as error:
                # Under a claim a deletion must be a move: stores/local/epochs.py, rule 1.
                if epoch or not self._is_immovable(error, target):
                    raise
            return self._unlist_in_place(target, seal)

    def _move_to_trash(self, name: str, epoch: int, seal: bytes) -> Unlisted:
        target = self._layout.target(name)
        trash = self._layout.leftover("trash", name, secrets.token_hex(8), epoch)
        with contextlib.ExitStack() as held:
            held.callback(_disown, trash)
            with root_lock(self._layout):
                if seal and not (record_at(target) or b"").endswith(seal):
                    raise _absent(target)
                try:
                    write_owner(trash, self._context.machine(), Terms(name, "", private=True))
                except OSError as error:
                    if error.errno not in FULL:
                        raise
                    remove_owner(trash)  # if this process is killed, only `collect` removes `trash`
                try:
                    # This lock, or a live publisher's, keeps sweepers away.
                    fd = held.enter_context(opened(target, os.O_RDONLY | os.O_DIRECTORY))
                    held.callback(unlock, fd)
                    try_lock(fd)
                    forget_replaced(self._layout, name)
                    landed(os.rename, target, trash)
                except FileNotFoundError:  # another process has deleted it
                    raise _absent(target) from None
                try:
                    flush_directory(self._layout.root)
                    flush_directory(os.path.dirname(trash))
                except OSError:
                    # After power loss the name could be back, and must then lead to the bytes.
                    landed(os.rename, trash, target)
                    raise
            return Unlisted(trash, partial(remove_tree, trash, first=RECORD_NAME), held.pop_all())

    def _is_immovable(self, error: OSError, target: str) -> bool:
        """Return whether a directory must be deleted in place, because it cannot be moved."""
        if error.errno == errno.EXDEV:  # unless it is a mount point
            return os.stat(target).st_dev == os.stat(self._layout.root).st_dev
        return error.errno in FULL

    def _unlist_in_place(self, target: str, seal: bytes) -> Unlisted:
        # Without the root's lock, which may need space: if another checkpoint takes the name, this
        # continues in the opened directory. If this process is killed, it leaves a directory
        # without a record, which is not a step and which a save of this step moves aside.
        with contextlib.ExitStack() as held:
            if os.path.islink(target):
                os.unlink(target)
                flush_directory(self._layout.root)
                return Unlisted(target, lambda: None, held)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            fd = held.enter_context(opened(target, flags))
            if seal and not (record_at(".", dir_fd=fd) or b"").endswith(seal):
                raise _absent(target)
            os.unlink(RECORD_NAME, dir_fd=fd)
            os.fsync(fd)
            return Unlisted(target, partial(_delete_in_place, target, fd), held.pop_all())

    async def sweep(self) -> Sequence[str]:
        """Remove leftovers that are proven dead, as defined in stores/local/sweep.py."""
        self._wrote = True  # so that `close` removes directories that become empty
        control, machine = self._layout.control, self._context.machine
        return await self._run("sweeping", control, sweep, self._layout, machine)

    async def collect(self, older_than_s: float, *, dry_run: bool = False) -> Sequence[str]:
        """Remove unlocked leftovers without recent writes. As `Store.collect`."""
        self._wrote |= not dry_run
        action, control = "collecting leftovers", self._layout.control
        return await self._run(
            action, control, collect, self._layout, older_than_s, dry_run=dry_run
        )

    async def keep_note(self, process: int, note: bytes | None) -> None:
        """Keep a note of a process. As `NotingStore.keep_note`."""
        if note is not None or process in self._noted:
            self._noted.add(process)
            control = self._layout.control
            await self._run("keeping a note", control, keep_note, self._layout, process, note)

    async def take_notes(self) -> Sequence[bytes]:
        """Remove and return all notes. As `NotingStore.take_notes`."""
        return await self._run("taking the notes", self._layout.control, take_notes, self._layout)

    async def close(self) -> None:
        """Close descriptors and remove empty control directories. Idempotent."""
        for files in self._files:
            await files.close()
        if self._wrote:
            self._wrote = False
            with reported("tidying up", self._layout.control):
                await self._workers.clean_up(partial(tidy, self._layout))

    async def _run(
        self, action: str, path: str, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Make a call in a worker thread; its errors name action and path. As `Workers.run`."""
        with reported(action, path):
            return await self._workers.run(call, *args, **kwargs)


def _is_dir(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is or leads to a directory; True if that cannot be found out."""
    try:
        return entry.is_dir()
    except OSError as error:
        return error.errno != errno.ELOOP


def _absent(target: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(f"{target}: there is no checkpoint to delete", location=target)


def _disown(trash: str) -> None:
    with contextlib.suppress(OSError):  # else a sweep removes it
        if not os.path.lexists(trash):
            remove_owner(trash)


def _delete_in_place(target: str, fd: int) -> None:
    for name in os.listdir(fd):
        remove_tree(name, dir_fd=fd)
    if leads_to(target, fd):
        os.rmdir(target)
