"""Publication of files for other programs: a file or a directory without a commit record.

Like a checkpoint, they are written in an attempt's directory: nothing is visible before it is
durable, and the leftovers of a dead process are swept.
"""

# Rule: without `overwrite` nothing existing is touched; with it, a file replaces only a file, and a
#   directory only a directory that contains nothing but safetensors files, so never a checkpoint.
#   (test_safetensors_files_never_replace_a_checkpoint)

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from asyncckpt.errors import CheckpointExistsError
from asyncckpt.stores.local.posix import landed
from asyncckpt.stores.local.publish import NAMED_ENTRIES, Found, Publication, file_in_the_way

REPLACEABLE_SUFFIXES = (".safetensors", ".safetensors.index.json")
"""Suffixes of an earlier export's files; a directory of such files alone may be replaced."""

IRREPLACEABLE = "something other than a directory of safetensors files exists here"


class FilesPublication(Publication):
    """A publication of one file of the attempt, or of its whole directory."""

    _others: Sequence[str] = ()

    def _find(self) -> Found:
        try:
            mode = os.lstat(self._target).st_mode
        except FileNotFoundError:
            return "nothing"
        if self.file:
            return "checkpoint" if stat.S_ISREG(mode) else "other"
        if not stat.S_ISDIR(mode):
            return "other"
        names = sorted(os.listdir(self._target))
        if not names:
            os.rmdir(self._target)
            return "nothing"
        self._others = [
            name
            for name in names
            if not name.endswith(REPLACEABLE_SUFFIXES)
            or os.path.isdir(os.path.join(self._target, name))
        ]
        return "other" if self._others else "checkpoint"

    def _replace(self) -> str:
        if not self.file:
            return super()._replace()
        landed(os.rename, self._source, self._target)  # replaces a file atomically
        self._flush_root(None)
        return self._source

    def _is_visible(self) -> bool:
        return bool(self.file) or super()._is_visible()

    def _exists_error(self, found: Found) -> CheckpointExistsError:
        if found != "other":
            text = "something already exists here; pass overwrite=True to replace it"
        elif self.file and (os.path.islink(self._target) or not os.path.isdir(self._target)):
            return file_in_the_way(self._target)
        elif self.file:
            text = "a directory exists here; move it away or choose another name"
        else:
            names = ", ".join(self._others[:NAMED_ENTRIES])
            has = f" (it has {names})" if names else ""
            text = (
                f"{IRREPLACEABLE}{has} and was left untouched, because the whole directory would "
                "be replaced; move it away or choose another name"
            )
        return CheckpointExistsError(f"{self._target}: {text}", location=self._target)
