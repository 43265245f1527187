"""Publication of files that other programs read: a file or a directory without a commit record.

They are written in an attempt's directory like a checkpoint: nothing of them is visible before
they are durable, and the leftovers of a dead process are swept.
"""

# Rule 1: without `overwrite` nothing that exists is touched; with it, only the same kind is
#   replaced: a file by a file, a directory of tensors or a checkpoint by a directory.

from __future__ import annotations

import logging
import os
import stat
from dataclasses import dataclass

from asyncckpt.errors import CheckpointExistsError, SaveError
from asyncckpt.stores.local.attempt import LocalAttempt
from asyncckpt.stores.local.locks import leads_to, remove_owner
from asyncckpt.stores.local.posix import (
    UnsupportedCallError,
    flush_directory,
    landed,
    remove_tree,
    rename_exchange,
)
from asyncckpt.stores.local.publish import Found, Publication, record_at

log = logging.getLogger("asyncckpt.stores")

REPLACEABLE_SUFFIXES = (".safetensors", ".safetensors.index.json")
"""A directory with such a file may have been made by an earlier export."""


@dataclass(slots=True)
class FilesPublication(Publication):
    """A publication of one file of the attempt, or of its directory as it is.

    Attributes:
        attempt: the attempt's directory; `source` is it, or a file in it.
    """

    attempt: str = ""

    def _check_source(self) -> None:
        if not leads_to(self.attempt, self.directory):
            raise self._gone()

    def _find(self) -> Found:
        try:
            mode = os.lstat(self.target).st_mode
        except FileNotFoundError:
            return "nothing"
        if self.source != self.attempt:
            return "checkpoint" if stat.S_ISREG(mode) else "other"
        if leads_to(self.target, self.directory):
            return "ours"
        if not stat.S_ISDIR(mode):
            return "other"
        names = os.listdir(self.target)
        if not names:
            os.rmdir(self.target)
            return "nothing"
        ours = any(name.endswith(REPLACEABLE_SUFFIXES) for name in names)
        record = None if ours else record_at(self.target)
        return "checkpoint" if ours or (record and self.is_valid(record)) else "other"

    def _replace(self) -> str:
        try:
            landed(rename_exchange, self.source, self.target)
        except UnsupportedCallError:
            if self.source == self.attempt:
                return self._replace_in_two_steps()
            return self._rename_over()
        except OSError as error:
            raise self._rename_error(error) from error
        self._flush_root(self.source)
        return self.source

    def _rename_over(self) -> str:
        landed(os.rename, self.source, self.target)
        try:
            flush_directory(self.layout.root)
        except OSError as error:
            # The file that was replaced is gone already: there is nothing to go back to.
            raise SaveError(
                f"{self.target}: flushing the directory after the rename failed: "
                f"{error.strerror}; the file is visible but may not survive power loss. Check the "
                "disk, then convert again",
                visible=True,
                durable=False,
                location=self.target,
            ) from error
        return self.source

    def _is_visible(self) -> bool:
        return self.source != self.attempt or Publication._is_visible(self)

    def _exists_error(self, found: Found) -> CheckpointExistsError:
        if found != "other":
            text = "something already exists here; pass overwrite=True to replace it"
        elif self.source == self.attempt:
            text = "something that is not a directory of tensors exists here"
        else:
            text = "a directory exists here"
        advice = "" if found != "other" else "; move it away or choose another name"
        return CheckpointExistsError(f"{self.target}: {text}{advice}", location=self.target)


class LocalExport(LocalAttempt):
    """An attempt that ends in plain files. Made by `LocalStore.begin_export`."""

    def _check_place(self) -> None:
        """Leave the check to `publish_files`, which knows whether a file or a directory is made."""

    async def publish_files(self, path: str = "") -> None:
        """Publish the file `path` of the attempt, or with ``""`` all of it, durably.

        If it fails, nothing of the attempt is left. Cancellation, errors: as `publish`.
        """
        await self._conclude(self._publish_files(path))

    async def _publish_files(self, path: str) -> None:
        self._check_sealed()
        await self._flush_directories(*self._directories, ".")
        publication = FilesPublication(
            self._context.layout,
            self._context.machine,
            self._context.is_valid,
            os.path.join(self._path, path) if path else self._path,
            self._name,
            self._save_id,
            self._overwrite,
            self._file_mode,
            attempt=self._path,
        )
        await self._run(publication)
        await self._context.workers.run(self._remove_rest)

    def _remove_rest(self) -> None:
        """Remove the attempt's directory, which one file has left."""
        if self._keep:
            return
        try:
            remove_tree(self._path)
            remove_owner(self._path)
        except OSError as error:
            # The files are published; `sweep` will try again.
            log.warning("%s: removing the attempt failed: %s", self._path, error)
