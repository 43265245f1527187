"""Publication of a checkpoint: the rename of a finished directory.

Onto a free name it is `renameat2(RENAME_NOREPLACE)` and a flush of the root. Replacing and moving
aside happen under the root's lock, and `RENAME_EXCHANGE` swaps two directories, so the name always
leads to a checkpoint.
"""

# Rule 1: an existing entry keeps its name until it was inspected under the lock. Every replacement
#   or deletion holds the lock, and a publication without the lock never replaces. So no other entry
#   is renamed away between the inspection and the rename.
#   (test_of_two_processes_exactly_one_wins_each_round)
# Rule 2: an old checkpoint is removed only after the root was flushed: before that, power loss may
#   bring its name back. (test_a_replaced_checkpoint_is_removed_after_the_flush)
# Rule 3: undoing a rename is a replacement like any other: under the lock, and only of the
#   directory that was published. Otherwise: A renames, its flush fails; B overwrites A's
#   checkpoint, is durable and acknowledged; A renames B's checkpoint back and removes it.
#   (test_a_publication_is_taken_back_only_while_it_has_the_name)
# Rule 4: a writer whose epoch was taken away changes nothing any more: stores/local/epochs.py.
# Rule 5: a directory that is not a checkpoint may be a person's work: unless empty it is moved,
#   never removed. Under a step's name it is a leftover of the run. Under another name, where it may
#   be a project, and if it is the root of a run, it is moved only with `overwrite`.
# Rule 6: nothing is published inside a checkpoint: deleting or replacing it would delete that, too.
#   (test_nothing_is_written_inside_a_checkpoint)

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from asyncckpt.errors import CheckpointExistsError, SaveError, StoreError, UsageError
from asyncckpt.format.record import STEP_NAME
from asyncckpt.log import logger
from asyncckpt.options import MAX_RECORD_NBYTES
from asyncckpt.ports import RECORD_NAME
from asyncckpt.stores.local.epochs import fenced, writing
from asyncckpt.stores.local.failures import reported
from asyncckpt.stores.local.locks import Terms, leads_to, remove_owner, root_lock, write_owner
from asyncckpt.stores.local.posix import (
    UnsupportedCallError,
    flush_directory,
    landed,
    open_regular,
    read_at_most,
    remove_tree,
    rename_exchange,
    rename_noreplace,
)
from asyncckpt.stores.local.sweep import forget_replaced
from asyncckpt.stores.local.tree import Context
from asyncckpt.stores.paths import CONTROL

Found = Literal["nothing", "checkpoint", "directory", "other"]

FOREIGN_NAMES = frozenset(("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", ".metadata"))
"""Files that identify checkpoints of Orbax, TensorStore and torch.distributed.checkpoint."""

NAMED_ENTRIES = 3
"""Entries of a directory that an error names to identify it."""


def check_place(target: str, *, overwrite: bool) -> None:
    """Check that a save may replace what exists at its place. Blocking.

    Without `overwrite`, a directory without a record file is replaced only if it is empty, or under
    a step's name and not the root of a run. With it, any is.

    Raises:
        CheckpointExistsError: a file, or a directory that must not be moved; names its entries.
        OSError: it cannot be inspected.
    """
    if os.path.lexists(target) and not os.path.isdir(target):
        raise file_in_the_way(target)
    if not overwrite:
        refuse_unrelated(target)


def check_outside(target: str, is_valid: Callable[[bytes], bool]) -> None:
    """Check that the place of a save or an export is not inside a checkpoint. Blocking.

    Raises:
        UsageError: it is; names the checkpoint.
    """
    above = os.path.realpath(os.path.dirname(target))
    while True:
        record = None
        with contextlib.suppress(OSError):
            record = record_at(above)
        if record is not None and is_valid(record):
            raise UsageError(
                f"{target}: this location is inside the checkpoint {above}, which is replaced and "
                "deleted as a whole; choose a location outside of it",
                location=target,
                found=above,
            )
        if os.path.ismount(above):  # a mounted file system is not deleted with a checkpoint
            return
        above = os.path.dirname(above)


def file_in_the_way(target: str) -> CheckpointExistsError:
    """Return the error for a file or a link that is in the way."""
    found = "a symbolic link" if os.path.islink(target) else "a file"
    return CheckpointExistsError(
        f"{target}: {found} exists here; move it away or choose another name",
        location=target,
        expected="nothing, or a checkpoint",
        found=found,
    )


def refuse_unrelated(target: str) -> None:
    """Raise for a directory that is not a checkpoint but may be a person's work. Blocking."""
    try:
        names = sorted(os.listdir(target))
    except (FileNotFoundError, NotADirectoryError):
        return
    if not names or RECORD_NAME in names:
        return
    steps = [
        name
        for name in names
        if STEP_NAME.fullmatch(name) and os.path.lexists(os.path.join(target, name, RECORD_NAME))
    ]
    if steps:
        shown = sorted(steps, key=int)[-NAMED_ENTRIES:]
        found = f"the root of a run (it has step {', '.join(shown)})"
        advice = f"save a step of it with Checkpointer({target!r}), or choose another location"
    elif shown := [name for name in names if name in FOREIGN_NAMES]:
        found = f"a checkpoint of another library (it has {', '.join(shown)})"
        advice = "save another step, or choose another location"
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


def record_at(directory: str, *, dir_fd: int | None = None) -> bytes | None:
    """Return the record file in a directory; None if it is missing or not a regular file."""
    try:
        fd = open_regular(os.path.join(directory, RECORD_NAME), dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINVAL, errno.ELOOP, errno.EISDIR, errno.ENOTDIR):
            return None
        raise
    data = read_at_most(fd, MAX_RECORD_NBYTES)
    return data if isinstance(data, bytes) else None


@dataclass(eq=False, repr=False)
class Publication:
    """One publication, run once in a worker thread, and its outcome.

    Attributes:
        attempt: path of the attempt's directory.
        file: for exports, the only file to publish; empty for the whole directory.
        started: whether the rename may have been issued, so the outcome must be awaited.
        error: why it failed, or None.
        done: whether the checkpoint is visible and durable; what it replaced may still exist.
        keep_source: whether the attempt's path holds a replaced checkpoint that must be kept.
    """

    context: Context
    terms: Terms
    attempt: str
    file: str = ""

    def __post_init__(self) -> None:
        self._layout = self.context.layout
        self._source = os.path.join(self.attempt, self.file) if self.file else self.attempt
        self._target = self.context.layout.target(self.terms.name)
        self._directory = -1
        self.started = False
        self.error: BaseException | None = None
        self.done = False
        self.keep_source = False

    def run(self, directory: int) -> None:
        """Make the checkpoint visible and durable, and remove the one it replaces. Blocking.

        Args:
            directory: a descriptor of the attempt's directory; its path must still lead to it.

        Raises:
            CheckpointExistsError: the name is taken by a file, or without `overwrite` by a
                checkpoint or an unrelated directory.
            FencedError: another process took over the claim; `visible` says whether this
                checkpoint was published before.
            SaveError: the flush failed; `visible` says whether the rename was undone.
            StoreError: the rename failed; nothing is visible.
        """
        self.started = True
        self._directory = directory
        old = None
        try:
            with (
                reported("publishing the checkpoint", self._target),
                writing(self._layout, self.terms.epoch, self._target),
            ):
                # After a takeover the path leads nowhere.
                if not leads_to(self.attempt, directory):
                    raise SaveError(
                        f"{self._source}: the directory of this attempt disappeared before it was "
                        "published: another process has taken over or removed it; nothing of this "
                        "save is visible",
                        location=self._target,
                    )
                try:
                    landed(rename_noreplace, self._source, self._target)
                except (FileExistsError, UnsupportedCallError):
                    old = self._publish_locked()
                else:
                    self._flush_root(None, locked=False)
            if self.terms.epoch and not os.path.isdir(self._layout.epoch(self.terms.epoch)):
                raise fenced(self._layout, self.terms.epoch, self._target, visible=True)
        except BaseException as error:
            self.error = error
            raise
        self.done = True
        if old is not None:
            self._remove(old)
        if self.file:
            self._remove(self.attempt)  # the file has left this directory

    def _publish_locked(self) -> str | None:
        with root_lock(self._layout):
            while True:
                found = self._find()
                if found == "other" or (found == "checkpoint" and not self.terms.overwrite):
                    raise self._exists_error(found)
                if found == "checkpoint":
                    return self._replace()
                if found == "directory":
                    if not self.terms.overwrite:
                        refuse_unrelated(self._target)
                    self._clear_target()
                try:
                    self._rename_free()
                except FileExistsError:
                    continue
                self._flush_root(None)
                return None

    def _find(self) -> Found:
        try:
            mode = os.lstat(self._target).st_mode
        except FileNotFoundError:
            return "nothing"
        if not stat.S_ISDIR(mode) and not os.path.isdir(self._target):
            return "other"
        record = record_at(self._target)
        if record is None:
            return "directory" if stat.S_ISDIR(mode) else "other"
        return "checkpoint" if self.context.is_valid(record) else "directory"

    def _rename_free(self) -> None:
        try:
            landed(rename_noreplace, self._source, self._target)
        except UnsupportedCallError:
            # The lock excludes other stores' renames between this check and the rename.
            if os.path.lexists(self._target):
                raise FileExistsError(errno.EEXIST, "File exists", self._target) from None
            landed(os.rename, self._source, self._target)

    def _replace(self) -> str:
        """Put the new checkpoint in place, durably; return the path of the old one."""
        try:
            landed(rename_exchange, self._source, self._target)
        except UnsupportedCallError:
            return self._replace_in_two_steps()
        self._flush_root(self._source)
        return self._source

    def _replace_in_two_steps(self) -> str:
        # After a crash between the two renames, `sweep` finds the owner file and puts `old` back.
        old = self._layout.leftover("old", self.terms.name, self.terms.save_id, self.terms.epoch)
        try:
            forget_replaced(self._layout, self.terms.name)
            write_owner(old, self.context.machine(), self.terms)
            flush_directory(os.path.dirname(old))
            landed(os.rename, self._target, old)
        except OSError:
            remove_owner(old)
            raise
        try:
            self._rename_free()
        except OSError:
            landed(os.rename, old, self._target)
            remove_owner(old)
            raise
        self._flush_root(old)
        return old

    def _clear_target(self) -> None:
        """Remove the directory at the target if it is empty; otherwise move it aside."""
        with contextlib.suppress(OSError):
            os.rmdir(self._target)  # fails unless it is empty
            return
        aside = self._layout.leftover("aside", self.terms.name, self.terms.save_id)
        if os.path.lexists(aside):
            raise FileExistsError(errno.EEXIST, "File exists", aside)
        landed(os.rename, self._target, aside)
        logger.warning(
            "%s: a directory without a valid commit record was in the way; it was moved to %s "
            "and is kept until you remove it",
            self._target,
            aside,
        )

    def _flush_root(self, old: str | None, *, locked: bool = True) -> None:
        """Make the renames durable, or undo them.

        Raises:
            SaveError: they are not durable.
        """
        try:
            flush_directory(self._layout.root)
        except OSError as error:
            undone = self._undo(old, locked=locked)
            self.keep_source = old == self._source and not undone
            visible = not undone and self._is_visible()
            name = errno.errorcode.get(error.errno or 0, "OSError")
            state = "the rename was undone and nothing of this save is visible"
            if visible:
                state = "it is visible but may not survive power loss"
            elif not undone:
                state = "another process has replaced or deleted this checkpoint meanwhile"
            raise SaveError(
                f"{self._target}: flushing the directory after the rename failed: "
                f"{error.strerror} ({name}); {state}. Check the disk, then try again",
                visible=visible,
                durable=False,
                location=self._target,
                found=name,
            ) from error

    def _undo(self, old: str | None, *, locked: bool) -> bool:
        """Undo the renames; return whether that succeeded."""
        try:
            with contextlib.nullcontext() if locked else root_lock(self._layout):
                if not leads_to(self._target, self._directory):
                    return False  # another writer has replaced or deleted it
                if old == self._source:
                    landed(rename_exchange, self._source, self._target)
                else:
                    landed(os.rename, self._target, self._source)
                    if old is not None:
                        landed(os.rename, old, self._target)
                        remove_owner(old)
        except (OSError, UnsupportedCallError, StoreError):
            return False
        return True

    def _is_visible(self) -> bool:
        try:
            return leads_to(self._target, self._directory)
        except OSError:
            return True

    def _remove(self, path: str) -> None:
        try:
            remove_tree(path, first=RECORD_NAME)
            remove_owner(path)
        except OSError as error:  # the save has succeeded, and `sweep` will try again
            logger.warning("%s: removing this leftover failed: %s", path, error)

    def _exists_error(self, found: Found) -> CheckpointExistsError:
        if found == "other":
            return file_in_the_way(self._target)
        return CheckpointExistsError(
            f"{self._target}: a checkpoint already exists here; pass overwrite=True to replace it",
            location=self._target,
        )
