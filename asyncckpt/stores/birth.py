"""Making a directory that is locked and has an owner before anybody can take it for a dead one."""

# The order is mkdir, lock, owner file. A sweeper that meets the directory before it is locked takes
# the lock itself and removes it, being empty and without owner; that is noticed here, and the next
# round uses another path, so that a slow sweeper never removes what a later round made.

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from asyncckpt.errors import StoreError, UsageError
from asyncckpt.stores.locks import leads_to, remove_owner, try_lock, unlock
from asyncckpt.stores.posix import make_directories

BIRTH_ROUNDS = 100
"""How often sweepers may take the directory away; each needs to hit a gap of microseconds."""


def make_attempt_directory(
    parent: str, name: str, own: Callable[[str], None], mode: int
) -> tuple[str, int]:
    """Path and locked descriptor of a new directory below `parent`, which is made if missing.

    Args:
        parent: directory of the attempts of one epoch.
        name: unique name of the attempt.
        own: writes the owner file of a path.
        mode: of directories that are made.

    Raises:
        UsageError: the name was used before.
        StoreError: sweepers took the directory away in every round.
        OSError: it cannot be made.
    """
    base = os.path.join(parent, name)
    for number in range(BIRTH_ROUNDS):
        path = base if number == 0 else f"{base}.{number}"
        try:
            make_directories(parent, mode)
            fd = _try_make(path, own, mode)
        except FileNotFoundError:
            continue  # swept, or the parent was tidied up
        if fd is not None:
            return path, fd
    raise StoreError(
        f"{base}: the directory was removed {BIRTH_ROUNDS} times while it was being made; "
        "another process sweeps this root in a loop",
        retryable=True,
        location=base,
    )


def _try_make(path: str, own: Callable[[str], None], mode: int) -> int | None:
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        raise UsageError(
            f"{path}: an attempt of this save id exists; a save id is used once", location=path
        ) from None
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    born = False
    try:
        if try_lock(fd) is not False and leads_to(path, fd):
            own(path)
            # Where locks do not reach other hosts, one of them may have been in between.
            born = leads_to(path, fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.rmdir(path)
        raise
    finally:
        if not born:
            unlock(fd)
            os.close(fd)
            remove_owner(path)
    return fd if born else None
