"""Claims of a local root, and the directories of their epochs.

A claim is the file ``claim-<e>`` and the directory ``epoch-<e>`` for its writer's attempts and
trash. A takeover makes the next claim, then takes away the directories of all lower claims. Epoch 0
belongs to no claim, and its directory is never taken away.
"""

# Rule 1: every rename that changes what is published has one end in the directory of the epoch:
#   publishing moves out of it, replacing exchanges with an entry of it, deleting moves into it. A
#   writer stopped before that rename finds the directory gone and changes nothing; a writer stopped
#   after it made its change before the next writer began. So two writers never change the run at
#   the same time. No lock is involved, because a stopped process may hold any lock.
#   (test_a_writer_that_was_stopped_anywhere_is_fenced)
# Rule 2: renaming the directory is not enough: a rename that has already looked it up, or an NFS
#   client that has cached it, still reaches it. So everything is moved out of it, and then it is
#   removed: nothing can be found or made in a removed directory.
#   (test_a_directory_that_a_fenced_writer_has_open_is_dead)
# Rule 3: the directory of an epoch is made once, by the process that made the claim, which then
#   looks for higher claims. If it finds one, the other process may have looked for the directory
#   too early, so nothing is written. If it finds none, a later claimant finds the directory.
#   (test_a_claim_that_was_overtaken_while_it_was_made_is_lost)
# Rule 4: only a takeover removes the directory of a claim, even if it is empty, since its writer
#   would not make it again. (test_tidying_leaves_the_directory_of_a_living_epoch)
# Rule 5: `claim` returns once the takeover, and everything published before, is durable. If it dies
#   half-way, the next claim completes it.
#   (test_a_takeover_that_dies_at_any_call_hides_and_loses_nothing)

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterator

from asyncckpt.errors import AsyncCheckpointError, FencedError
from asyncckpt.format.claim import CLAIM_NBYTES, Claim, decode_claim, encode_claim
from asyncckpt.stores.claims import CLAIM, claim_name, fenced_error, lost_error, new_claim
from asyncckpt.stores.local.posix import (
    flush_directory,
    landed,
    make_directories,
    names_in,
    open_regular,
    opened,
    read_at_most,
    write_all,
)
from asyncckpt.stores.local.sweep import put_back
from asyncckpt.stores.paths import FENCED, Layout

_EPOCH = re.compile(r"epoch-([1-9][0-9]*)")
"""Directories of claims, without that of epoch 0."""

_NUMBERED = re.compile(rf"(?:claim-|epoch-|{FENCED})([0-9]+)")

_TAKEN = "epoch"
"""Name of a directory that was taken away, inside the one that its contents move to."""

_ROUNDS = 100
"""Most retries when a directory is refilled while it is emptied, or removed while a claim is made
in it: each is a race of microseconds."""


def claims(layout: Layout) -> list[Claim]:
    """Return the readable claims, ascending. Blocking."""
    found = (_read(layout, epoch) for epoch in sorted(_numbers(layout)))
    return [claim for claim in found if claim is not None]


def claim(layout: Layout) -> Claim:
    """Make the next claim and take all lower ones away from their writers. Blocking.

    Raises:
        FencedError: another process made the claim first.
        OSError: the claim cannot be made, or a directory cannot be taken away.
    """
    made = _make(layout)
    os.mkdir(layout.epoch(made.epoch))
    flush_directory(layout.control)
    try:
        check(layout, made.epoch)
    except FencedError:
        with contextlib.suppress(OSError):
            os.rmdir(layout.epoch(made.epoch))
        raise
    _take_over(layout, made.epoch)
    # Renames from before the directories were taken away are now part of the run.
    flush_directory(layout.control)
    flush_directory(layout.root)
    return made


def check(layout: Layout, epoch: int) -> None:
    """Raise `FencedError` if there is a higher claim. Blocking."""
    if any(number > epoch for number in _numbers(layout)):
        raise fenced(layout, epoch)


@contextlib.contextmanager
def writing(layout: Layout, epoch: int, location: str = "") -> Iterator[None]:
    """Raise `FencedError` instead of the block's errors if the epoch was taken away."""
    try:
        yield
    except FencedError:
        raise
    except (OSError, AsyncCheckpointError) as error:
        if epoch and not os.path.isdir(layout.epoch(epoch)):
            raise fenced(layout, epoch, location) from error
        raise


def fenced(layout: Layout, epoch: int, location: str = "", *, visible: bool = False) -> FencedError:
    """Return the error of a writer whose directory was taken away. Blocking."""
    above = [number for number in _numbers(layout) if number > epoch]
    successor = _read(layout, min(above)) if above else None
    return fenced_error(layout.root, epoch, successor, location=location, visible=visible)


def _make(layout: Layout) -> Claim:
    """Make the file of the next claim, durably."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    for _ in range(_ROUNDS):
        make_directories(layout.control, 0o777)
        made = new_claim(_next(layout))
        try:
            with opened(_path(layout, made.epoch), flags, 0o666) as fd:
                write_all(fd, memoryview(encode_claim(made)), 0)
                os.fsync(fd)
        except FileNotFoundError:
            continue  # the empty control directory was removed
        except FileExistsError:
            raise lost_error(layout.root, made.epoch, _read(layout, made.epoch)) from None
        return made
    raise OSError(errno.EBUSY, "the directory keeps being removed", layout.control)


def _take_over(layout: Layout, epoch: int) -> None:
    """Take away the directories of all lower epochs, and finish interrupted takeovers."""
    for name in sorted(os.listdir(layout.control)):
        found = _EPOCH.fullmatch(name)
        if found is not None and int(found[1]) < epoch:
            taken = os.path.join(layout.control, f"{FENCED}{found[1]}-{secrets.token_hex(8)}")
            os.mkdir(taken)
            with contextlib.suppress(FileNotFoundError):  # another takeover has moved it
                landed(os.rename, os.path.join(layout.control, name), os.path.join(taken, _TAKEN))
    for name in sorted(os.listdir(layout.control)):
        taken = os.path.join(layout.control, name)
        if name.startswith(FENCED) and not os.path.islink(taken):
            _empty(layout, taken)


def _empty(layout: Layout, taken: str) -> None:
    """Move everything out of a directory that was taken away, and remove it.

    A link stays: stores/local/sweep.py, rule 4.
    """
    inner = os.path.join(taken, _TAKEN)
    for _ in range(_ROUNDS):
        try:
            names = names_in(inner)
        except (FileNotFoundError, NotADirectoryError):
            break
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another takeover has moved it
                os.rename(os.path.join(inner, name), os.path.join(taken, name))
        with contextlib.suppress(FileNotFoundError):
            try:
                os.rmdir(inner)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
    else:
        raise OSError(errno.EBUSY, "the directory keeps being filled", inner)
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(taken):
            if os.path.isdir(path := os.path.join(taken, name)):
                put_back(layout, path)


def _numbers(layout: Layout) -> list[int]:
    try:
        names = os.listdir(layout.control)
    except FileNotFoundError:
        return []
    return [int(found[1]) for name in names if (found := CLAIM.fullmatch(name)) is not None]


def _next(layout: Layout) -> int:
    """Return the next claim's number, even if a person has removed claim files."""
    names = names_in(layout.control)
    return 1 + max([int(found[1]) for name in names if (found := _NUMBERED.match(name))], default=0)


def _read(layout: Layout, epoch: int) -> Claim | None:
    """Return a claim; None if it is damaged or unreadable."""
    try:
        fd = open_regular(_path(layout, epoch))
    except OSError:
        return None
    data = read_at_most(fd, CLAIM_NBYTES)
    found = decode_claim(data) if isinstance(data, bytes) else None
    return found if found is not None and found.epoch == epoch else None


def _path(layout: Layout, epoch: int) -> str:
    return os.path.join(layout.control, claim_name(epoch))
