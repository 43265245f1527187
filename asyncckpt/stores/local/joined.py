"""A share in an attempt that another process has begun in the same directory."""

# Rule 1: the directories of attempt and epoch are never made here: if they are missing, the root is
#   not shared.
# Rule 2: every epoch is searched for the attempt, since only process 0 knows its claim. A fenced
#   attempt is in none of them and is not joined.

from __future__ import annotations

import contextlib
import os

from asyncckpt.stores.local.locks import leads_to
from asyncckpt.stores.local.owners import has_mark, make_owner_file
from asyncckpt.stores.local.posix import Descriptor, listing
from asyncckpt.stores.local.sweep import EPOCH
from asyncckpt.stores.local.tree import AttemptTree
from asyncckpt.stores.paths import Layout, clipped


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
