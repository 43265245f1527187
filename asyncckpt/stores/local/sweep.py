"""Removal of the leftovers of dead saves and deletions, and only of those proven dead.

Proven dead: the owner file names this host and this boot, and the lock is free; or the file system
is certainly local, and the owner file names this boot and another host (a container on the same
kernel), and the lock is free, or this host and another boot. A shared attempt is dead when all of
its processes are. What a takeover has taken from a writer is dead, too, unless it is locked.
Everything else is kept for a person to remove, including claims and `aside-…` directories, which
were never ours.
"""

# Rule 1: a held lock keeps its directory, whatever the owner file says.
#   (test_a_held_lock_outweighs_an_owner_file_of_another_boot)
# Rule 2: a free lock proves death only among processes that share locks. Two machines may have the
#   same host name (clones of an image) and use the same network file system without seeing each
#   other's locks (local_flock, nolock): then a living attempt of one has, for the other, a free
#   lock and another boot.
#   (test_another_boot_proves_nothing_where_the_file_system_may_be_shared)
#   Nothing in a `fenced-…` directory can be published any more, by stores/local/epochs.py, rule 2:
#   its removal costs a fenced writer an error, never data.
#   (test_what_was_taken_from_a_writer_of_another_host_is_swept)
# Rule 3: a directory without a readable owner file may be in the making: it is removed only if it
#   is empty, which its maker notices (stores/local/attempt.py, rule 4).
# Rule 4: nothing below a link is a leftover. A run that was received may have one instead of the
#   control directory, an epoch or a `fenced-…`, and it leads to files of others. Nothing is done
#   about links that another process puts in place during a sweep.
#   (test_files_behind_a_link_are_not_leftovers)
# Rule 5: renames of the root are flushed before bytes are removed, so that power loss cannot
#   bring back a name whose files are gone. (tests/crash/test_power.py)

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable

from asyncckpt.errors import StoreError, UsageError
from asyncckpt.log import logger
from asyncckpt.stores.local.failures import reported
from asyncckpt.stores.local.locks import (
    Machine,
    leads_to,
    read_owner,
    remove_owner,
    root_lock,
    try_lock,
    unlock,
)
from asyncckpt.stores.local.notes import collect_notes
from asyncckpt.stores.local.owners import (
    is_abandoned,
    is_locked,
    owned_by_process,
    owner_files,
    remove_attempt,
    remove_dead_owner_files,
)
from asyncckpt.stores.local.posix import (
    UnsupportedCallError,
    flush_directory,
    landed,
    listing,
    names_in,
    rename_noreplace,
)
from asyncckpt.stores.paths import FENCED, OWNER_SUFFIX, Layout, check_name

_EPOCH = re.compile(r"epoch-[0-9]+")
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


def sweep(layout: Layout, this_machine: Callable[[], Machine]) -> list[str]:
    """Remove leftovers that are proven dead and return their names. Blocking.

    Does nothing while another process replaces, deletes or sweeps here, or if this process may not
    write.

    Raises:
        StoreError: removing failed.
    """
    removed: list[str] = []
    dead: list[str] = []
    with reported("sweeping", layout.control), contextlib.ExitStack() as held:
        try:
            if not _leftovers(layout):
                return []
            with root_lock(layout, wait_s=0.0) as alone:
                machine = this_machine()
                for path in _leftovers(layout):
                    with contextlib.ExitStack() as lock:
                        if _lock_dead(layout, machine, path, lock, removed, alone):
                            held.push(lock.pop_all())
                            dead.append(path)
                if dead:
                    flush_directory(layout.root)
                    flush_directory(layout.control)
            for path in dead:
                remove_attempt(path)
                removed.append(os.path.relpath(path, layout.control))
        except StoreError:
            return []  # the lock is held
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
    return removed


def _lock_dead(
    layout: Layout,
    machine: Machine,
    path: str,
    held: contextlib.ExitStack,
    removed: list[str],
    alone: bool,
) -> bool:
    """Lock a leftover until `held` is closed; return whether it is proven dead."""
    owner = read_owner(path)
    ours = owner is not None and (
        owner.machine.host == machine.host or owner.is_dead(machine, True, layout.root)
    )
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        # A torn owner file: those written before their directories are so under the root's lock.
        if ours or (owner is None and alone):
            remove_owner(path)
        remove_dead_owner_files(path, machine, layout.root)
        return False
    except OSError:
        return False  # not a directory: not made by this library
    held.callback(os.close, fd)
    held.callback(unlock, fd)
    locked = try_lock(fd)
    if locked is False or not leads_to(path, fd):
        return False
    if owner is None:
        if locked:
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(path)
                remove_owner(path)
                removed.append(os.path.relpath(path, layout.control))
        return False
    if os.path.basename(os.path.dirname(path)).startswith(FENCED):
        return not any(map(is_locked, owner_files(path))) and not put_back(layout, path)
    if not owner.is_dead(machine, locked, layout.root):
        return False
    return is_abandoned(path, fd, machine, layout.root) and not put_back(layout, path)


def collect(layout: Layout, older_than_s: float, *, dry_run: bool) -> list[str]:
    """Remove leftovers in which nothing was written for so long; return their names. Blocking.

    They need not be proven dead: the caller vouches for that. A leftover that is locked, on this
    host or where its locks reach, is alive and stays.

    Raises:
        StoreError: removing failed, or another process replaces or deletes here.
    """
    found = collect_notes(layout, older_than_s, dry_run=dry_run)
    with reported("collecting leftovers", layout.control):
        leftovers = _leftovers(layout)
        if leftovers and not dry_run:
            flush_directory(layout.root)
            flush_directory(layout.control)
        for path in leftovers:
            if time.time() - _written_s(path) >= older_than_s:
                with contextlib.ExitStack() as held:
                    with root_lock(layout):
                        dead = _lock_old(layout, path, held, dry_run=dry_run)
                    # Without the root's lock: nobody who deletes or replaces waits for this.
                    if dead and not dry_run:
                        remove_attempt(path)
                if dead:
                    found.append(os.path.relpath(path, layout.control))
    return found


def _lock_old(layout: Layout, path: str, held: contextlib.ExitStack, *, dry_run: bool) -> bool:
    """Lock a leftover until `held` is closed; return whether it may be removed.

    A replaced checkpoint whose successor never arrived is put back.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        # Owner files whose directory is gone, unless somebody else has just removed them, too.
        owners = list(owner_files(path))
        left = any(map(os.path.lexists, (path + OWNER_SUFFIX, *owners)))
        return left and not any(map(is_locked, owners))
    except NotADirectoryError:
        return False  # not made by this library
    held.callback(os.close, fd)
    held.callback(unlock, fd)
    if try_lock(fd) is False or not leads_to(path, fd):
        return False
    if any(map(is_locked, owner_files(path))):
        return False
    return not put_back(layout, path, dry_run=dry_run)


def _written_s(path: str) -> float:
    """Return when the leftover was last written to, in seconds since 1970, or now."""
    newest = 0.0
    for top in (path, path + OWNER_SUFFIX, *owner_files(path)):
        with contextlib.suppress(FileNotFoundError):
            newest = max(newest, os.lstat(top).st_mtime)
    for directory, _, names in os.walk(path):
        for name in (".", *names):
            with contextlib.suppress(FileNotFoundError):
                newest = max(newest, os.lstat(os.path.join(directory, name)).st_mtime)
    return newest or time.time()


def tidy(layout: Layout) -> None:
    """Remove our empty directories, except those of claims. Blocking.

    See stores/local/epochs.py, rule 4.
    """
    unclaimed = os.path.basename(layout.epoch(0))
    with contextlib.suppress(OSError, StoreError):
        for name in names_in(layout.control):
            if name == unclaimed or name.startswith(FENCED):
                with contextlib.suppress(OSError):
                    os.rmdir(os.path.join(layout.control, name))
        left = os.listdir(layout.control)
        if left == [os.path.basename(layout.lock)]:
            with root_lock(layout, wait_s=0.0):
                if os.listdir(layout.control) == left:
                    os.unlink(layout.lock)
        if len(left) <= 1:
            os.rmdir(layout.control)


def _leftovers(layout: Layout) -> list[str]:
    """Return the paths of attempts, of trash and of replaced checkpoints, alive or not.

    Raises:
        OSError: the control directory cannot be listed, or is a link.
    """
    paths: list[str] = []
    try:
        names = names_in(layout.control)
    except FileNotFoundError:
        return []
    for name in names:
        path = os.path.join(layout.control, name)
        if _EPOCH.fullmatch(name) or name.startswith(FENCED):
            paths += [os.path.join(path, attempt) for attempt in listing(path)]
        elif name.startswith(("trash-", "old-")):
            paths.append(path)
    found: dict[str, None] = {}
    for path in paths:
        owned = owned_by_process(path) or path.removesuffix(OWNER_SUFFIX)
        # An owner file counts where its directory is gone.
        if owned == path or not os.path.lexists(owned):
            found[owned] = None
    return list(found)


def epochs(layout: Layout) -> list[str]:
    """Return the paths of the directories of all epochs that were not taken away."""
    return [
        os.path.join(layout.control, name)
        for name in listing(layout.control)
        if _EPOCH.fullmatch(name)
    ]


def put_back(layout: Layout, old: str, *, dry_run: bool = False) -> bool:
    """Put a leftover back if it is a replaced checkpoint without a successor. Blocking.

    Returns whether it is kept: put back, or not known well enough to be removed.
    """
    directory, name = os.path.split(old)
    # In epoch 0 this is an attempt, whose checkpoint may have any name.
    if not name.startswith("old-") or os.path.basename(directory) == "epoch-0":
        return False
    owner = read_owner(old)
    if owner is None:
        return True  # its name is unknown, and it may be the only one of it
    try:
        target = layout.target(check_name(owner.name))
    except UsageError:
        return True  # not written by this library: leave it alone
    if os.path.lexists(target):
        return False
    if dry_run:
        return True
    try:
        landed(rename_noreplace, old, target)
    except FileExistsError:
        return False
    except UnsupportedCallError:
        landed(os.rename, old, target)
    flush_directory(layout.root)
    remove_owner(old)
    logger.warning(
        "%s: replacing it was interrupted; the previous checkpoint is in place again", target
    )
    return True
