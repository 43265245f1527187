"""The last step of a save: one rename that makes a finished directory the checkpoint.

Onto a free name it is `renameat2(RENAME_NOREPLACE)` and a flush of the root. Replacing and moving
aside happen under the root's lock, and two directories change places with `RENAME_EXCHANGE`, so
that there is no moment without a checkpoint.
"""

# Rule 1: whatever has the name keeps it until it was inspected under the lock. Others that replace
#   or delete hold the lock too, and a publication without the lock never replaces: so nothing
#   unexpected is renamed away between the look and the rename.
#   (test_of_two_processes_exactly_one_wins_each_round)
# Rule 2: an old checkpoint is removed only after the flush of the root has succeeded: before, power
#   loss may bring its name back. (test_a_replaced_checkpoint_is_removed_after_the_flush)
# Rule 3: taking a rename back is a replacement like any other: under the lock, and only of the very
#   directory that was published. Without it: A renames, its flush fails; B overwrites A's
#   checkpoint, is durable and acknowledged; A renames B's checkpoint back and removes it.
#   (test_a_publication_is_taken_back_only_while_it_has_the_name)
# Rule 4: a directory that is no checkpoint may be a person's work: it is moved, never removed,
#   unless it is empty. At the place of a step it is a leftover of the run; elsewhere, where it may
#   be a project, and if it is the root of a run, it is moved only with `overwrite`.

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from asyncckpt.errors import CheckpointExistsError, SaveError, StoreError
from asyncckpt.format.record import STEP_NAME
from asyncckpt.options import MAX_RECORD_NBYTES
from asyncckpt.stores.local.failures import reported, store_error
from asyncckpt.stores.local.locks import Machine, leads_to, remove_owner, root_lock, write_owner
from asyncckpt.stores.local.posix import (
    UnsupportedCallError,
    flush_directory,
    landed,
    open_regular,
    read_all,
    remove_tree,
    rename_exchange,
    rename_noreplace,
)
from asyncckpt.stores.paths import CONTROL, RECORD_FILE, Layout

log = logging.getLogger("asyncckpt.stores")

IsValid = Callable[[bytes], bool]
"""Whether the content of a record file is a commit record. Stores know no records."""

Found = Literal["nothing", "ours", "checkpoint", "directory", "other"]


NAMED_ENTRIES = 3
"""Entries of a directory that an error names: enough to tell whose it is."""


def check_place(target: str, *, overwrite: bool) -> None:
    """Refuse to save where something is that a save does not replace. Blocking.

    Without `overwrite`, a directory without a record file makes way only if it is empty, or at the
    place of a step and not the root of a run.

    Raises:
        CheckpointExistsError: a file, or a directory that is not to be moved; says what is in it.
        OSError: it cannot be looked at.
    """
    if os.path.lexists(target) and not os.path.isdir(target):
        raise file_in_the_way(target)
    if not overwrite:
        refuse_unrelated(target)


def file_in_the_way(target: str) -> CheckpointExistsError:
    """Return the error for a file, or a dangling link, at the place of a checkpoint."""
    return CheckpointExistsError(
        f"{target}: a file exists here; move it away or choose another name",
        location=target,
        expected="nothing, or a checkpoint",
        found="a file",
    )


def refuse_unrelated(target: str) -> None:
    """Raise for a directory that is no checkpoint and may be a person's work. Blocking."""
    try:
        with os.scandir(target) as entries:
            names = sorted(entry.name for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return
    if not names or RECORD_FILE in names:
        return
    steps = [
        name
        for name in names
        if STEP_NAME.fullmatch(name) and os.path.lexists(os.path.join(target, name, RECORD_FILE))
    ]
    if steps:
        shown = sorted(steps, key=int)[-NAMED_ENTRIES:]
        found = f"the root of a run (it has step {', '.join(shown)})"
        advice = f"save a step of it with Checkpointer({target!r}), or choose another location"
    elif not STEP_NAME.fullmatch(os.path.basename(target)):
        shown = [name for name in names if name != CONTROL][:NAMED_ENTRIES] or names
        more = ", …" if len(names) > len(shown) else ""
        found = f"a directory that is not a checkpoint (it has {', '.join(shown)}{more})"
        advice = f"choose another location, such as {target}/checkpoint, or move it away"
    else:
        return
    raise CheckpointExistsError(
        f"{target}: {found} exists here and was left untouched; {advice}. With overwrite=True it "
        f"is moved to {CONTROL}/aside-… next to it",
        location=target,
        expected="nothing, or a checkpoint",
        found=tuple(shown),
    )


def record_at(directory: str) -> bytes | None:
    """Return the record file in a directory, or None if none can be read."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        file = open_regular(fd, (RECORD_FILE,))
        try:
            data = read_all(file, MAX_RECORD_NBYTES)
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINVAL, errno.ELOOP, errno.EISDIR, errno.ENOTDIR):
            return None
        raise
    finally:
        os.close(fd)
    return data if len(data) <= MAX_RECORD_NBYTES else None


@dataclass(slots=True)
class Publication:
    """One publication, run once in a worker thread, and its outcome.

    Attributes:
        source: the attempt's directory.
        started: the rename may have been issued; from here on the outcome must be awaited.
        error: why it failed, or None.
        keep_source: a checkpoint that may be needed again is at `source` now.
        directory: a descriptor of the attempt's directory, which distinguishes it from others.
    """

    layout: Layout
    machine: Callable[[], Machine]
    is_valid: IsValid
    source: str
    name: str
    save_id: str
    overwrite: bool
    mode: int
    started: bool = False
    error: BaseException | None = None
    keep_source: bool = False
    directory: int = -1

    def run(self, directory: int) -> None:
        """Make the checkpoint visible and durable, and remove the one it replaces. Blocking.

        Args:
            directory: a descriptor of the attempt's directory, to which `source` must still lead.
                Unlike the record's bytes it cannot be mistaken for that of another attempt.

        Raises:
            CheckpointExistsError: the name is taken by a file, or without `overwrite` by a
                checkpoint or an unrelated directory.
            SaveError: the flush failed; `visible` says whether the rename could be taken back.
            StoreError: the rename failed; nothing is visible.
        """
        self.started = True
        self.directory = directory
        try:
            with reported("publishing the checkpoint", self.target):
                old = self._publish()
            if old is not None:
                self._remove_old(old)
        except BaseException as error:
            self.error = error
            raise

    @property
    def target(self) -> str:
        """Path at which the checkpoint is published."""
        return self.layout.target(self.name)

    def _publish(self) -> str | None:
        self._check_source()
        try:
            landed(rename_noreplace, self.source, self.target)
        except (FileExistsError, UnsupportedCallError):
            return self._publish_locked()
        except OSError as error:
            raise self._rename_error(error) from error
        self._flush_root(None, locked=False)
        return None

    def _check_source(self) -> None:
        # A takeover renames the epoch's directory: then this path leads nowhere.
        if not leads_to(self.source, self.directory):
            raise self._gone()

    def _gone(self) -> SaveError:
        return SaveError(
            f"{self.source}: the directory of this attempt disappeared before it was published: "
            "another process has taken over or removed it; nothing of this save is visible",
            location=self.target,
        )

    def _publish_locked(self) -> str | None:
        with root_lock(self.layout):
            while True:
                found = self._find()
                if found == "other" or (found == "checkpoint" and not self.overwrite):
                    raise self._exists_error(found)
                if found == "checkpoint":
                    return self._replace()
                if found == "directory":
                    if not self.overwrite:
                        refuse_unrelated(self.target)
                    self._clear_target()
                try:
                    self._rename_free()
                except FileExistsError:
                    continue
                except OSError as error:
                    raise self._rename_error(error) from error
                self._flush_root(None)
                return None

    def _find(self) -> Found:
        try:
            mode = os.lstat(self.target).st_mode
        except FileNotFoundError:
            return "nothing"
        if not stat.S_ISDIR(mode) and not os.path.isdir(self.target):
            return "other"
        if leads_to(self.target, self.directory):
            return "ours"
        record = record_at(self.target)
        if record is None:
            return "directory" if stat.S_ISDIR(mode) else "other"
        return "checkpoint" if self.is_valid(record) else "directory"

    def _rename_free(self) -> None:
        try:
            landed(rename_noreplace, self.source, self.target)
        except UnsupportedCallError:
            # Under the lock no other store gets between the look and the rename.
            if os.path.lexists(self.target):
                raise FileExistsError(errno.EEXIST, "File exists", self.target) from None
            landed(os.rename, self.source, self.target)

    def _replace(self) -> str:
        """Put the new checkpoint in place, durably, and return the path of the old one."""
        try:
            landed(rename_exchange, self.source, self.target)
        except UnsupportedCallError:
            return self._replace_in_two_steps()
        except OSError as error:
            raise self._rename_error(error) from error
        self._flush_root(self.source)
        return self.source

    def _replace_in_two_steps(self) -> str:
        # A crash between the two renames: `sweep` finds the owner file and puts the old one back.
        old = self.layout.leftover("old", self.name, self.save_id)
        try:
            write_owner(old, self.machine(), self.name, self.save_id, self.mode)
            flush_directory(self.layout.control)
            landed(os.rename, self.target, old)
        except OSError as error:
            remove_owner(old)
            raise self._rename_error(error) from error
        try:
            self._rename_free()
        except OSError as error:
            landed(os.rename, old, self.target)
            remove_owner(old)
            raise self._rename_error(error) from error
        self._flush_root(old)
        return old

    def _clear_target(self) -> None:
        """Remove the directory at the target if it is empty; else move it aside."""
        with contextlib.suppress(OSError):
            os.rmdir(self.target)  # fails unless it is empty
            return
        aside = self.layout.leftover("aside", self.name, self.save_id)
        try:
            if os.path.lexists(aside):
                raise FileExistsError(errno.EEXIST, "File exists", aside)
            landed(os.rename, self.target, aside)
        except OSError as error:
            raise self._rename_error(error) from error
        log.warning(
            "%s: a directory without a valid commit record was in the way; it was moved to %s "
            "and is kept until you remove it",
            self.target,
            aside,
        )

    def _flush_root(self, old: str | None, *, locked: bool = True) -> None:
        """Make the renames durable, or take them back.

        Raises:
            SaveError: they are not durable.
        """
        try:
            flush_directory(self.layout.root)
        except OSError as error:
            undone = self._undo(old, locked=locked)
            self.keep_source = old == self.source and not undone
            visible = not undone and self._is_visible()
            name = errno.errorcode.get(error.errno or 0, "OSError")
            state = "the rename was taken back and nothing of this save is visible"
            if visible:
                state = "the checkpoint is visible but may not survive power loss"
            elif not undone:
                state = "another process has replaced or deleted this checkpoint meanwhile"
            raise SaveError(
                f"{self.target}: flushing the directory after the rename failed: "
                f"{error.strerror} ({name}); {state}. Check the disk, then save again",
                visible=visible,
                durable=False,
                location=self.target,
                found=name,
            ) from error

    def _undo(self, old: str | None, *, locked: bool) -> bool:
        """Take the renames back and return True, or False if that is not possible."""
        try:
            with contextlib.nullcontext() if locked else root_lock(self.layout):
                if not leads_to(self.target, self.directory):
                    return False  # another writer has replaced or deleted it
                if old == self.source:
                    landed(rename_exchange, self.source, self.target)
                else:
                    landed(os.rename, self.target, self.source)
                    if old is not None:
                        landed(os.rename, old, self.target)
                        remove_owner(old)
        except (OSError, UnsupportedCallError, StoreError):
            return False
        return True

    def _is_visible(self) -> bool:
        try:
            return self._find() == "ours"
        except OSError:
            return True

    def _remove_old(self, old: str) -> None:
        # The save has succeeded: a checkpoint that cannot be removed now is left to `sweep`.
        try:
            remove_tree(old, first=RECORD_FILE)
            remove_owner(old)
        except OSError as error:
            log.warning("%s: removing the replaced checkpoint failed: %s", old, error)

    def _rename_error(self, error: OSError) -> Exception:
        return store_error("publishing the checkpoint", self.target, error)

    def _exists_error(self, found: Found) -> CheckpointExistsError:
        if found == "other":
            return file_in_the_way(self.target)
        return CheckpointExistsError(
            f"{self.target}: a checkpoint already exists here; pass overwrite=True to replace it",
            location=self.target,
        )
