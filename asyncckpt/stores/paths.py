"""Paths below the root of a store, and legal names.

::

    <root>/<name>/                                  a published checkpoint
    <root>/.asyncckpt/lock                          held while a published checkpoint is replaced
    <root>/.asyncckpt/claim-<e>                     the right to write in epoch e (epoch 0: none)
    <root>/.asyncckpt/epoch-<e>/<name>-<save id>/   an attempt
    <root>/.asyncckpt/epoch-<e>/<name>-<save id>.owner
    <root>/.asyncckpt/epoch-<e>/<name>-<save id>.owner-<p>
                                                    owner file of each process of a shared attempt
    <root>/.asyncckpt/epoch-<e>/<name>-<save id>/.asyncckpt-exchange/
                                                    files exchanged by processes; never published
    <root>/.asyncckpt/fenced-<e>-<token>/           contents of epoch-<e> when it was taken over
    <root>/.asyncckpt/trash-<name>-<token>/         deleted, being removed; with .owner
    <root>/.asyncckpt/old-<name>-<save id>/         being replaced, if two directories cannot be
                                                    exchanged atomically; with .owner. A writer
                                                    with a claim keeps both in epoch-<e>
    <root>/.asyncckpt/error-<p>                     last error of process p, for the next job
    <root>/.asyncckpt/aside-<name>-<save id>/       not a checkpoint, moved aside by a save; kept
                                                    until a person removes it
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from asyncckpt.arguments import absolute
from asyncckpt.errors import CorruptCheckpointError, UsageError
from asyncckpt.ports import RECORD_NAME

CONTROL = ".asyncckpt"
"""Directory below the root for everything but checkpoints."""

OWNER_SUFFIX = ".owner"

FENCED = "fenced-"
"""Prefix of directories that hold the files of a fenced writer."""

NOTE_NBYTES = 64 << 10
"""Maximum size of a note that is read."""

NOTE = re.compile(r"error-[0-9]{1,9}")
"""Name of a process's note in the control directory."""

# A file name has at most 255 bytes; the prefix, the save id and the suffix need the rest.
_NAME_NBYTES = 120
_SAVE_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of one root."""

    root: str

    @property
    def control(self) -> str:
        """The directory of attempts and leftovers."""
        return os.path.join(self.root, CONTROL)

    @property
    def lock(self) -> str:
        """The lock file of the root."""
        return os.path.join(self.control, "lock")

    def target(self, name: str) -> str:
        """Return the path of the published checkpoint of this name."""
        return os.path.join(self.root, name)

    def epoch(self, epoch: int) -> str:
        """Return the directory of the attempts of one claim."""
        return os.path.join(self.control, f"epoch-{epoch}")

    def attempt(self, epoch: int, name: str, save_id: str) -> str:
        """Return the path of an attempt's directory; callers may append a number."""
        return os.path.join(self.epoch(epoch), f"{clipped(name)}-{save_id}")

    def leftover(self, kind: str, name: str, token: str, epoch: int = 0) -> str:
        """Return a path for a directory moved out of the run; below that of `epoch` unless it is 0.

        See stores/local/epochs.py, rule 1.
        """
        directory = self.epoch(epoch) if epoch else self.control
        return os.path.join(directory, f"{kind}-{clipped(name)}-{token}")


def below(root: str, name: str) -> str:
    """Join a root, which may end with a slash like `memory://`, and a name."""
    return f"{root}{name}" if root.endswith("/") else f"{root}/{name}"


def note_name(process: int) -> str:
    """Return the name of a process's note."""
    return f"error-{process}"


def clipped(name: str) -> str:
    """Return the name, truncated so that a suffix still fits in a file name."""
    return os.fsencode(name)[:_NAME_NBYTES].decode("utf-8", "ignore")


def check_name(name: object) -> str:
    """Return the name, or raise `UsageError` unless it is one path part and not reserved."""
    text = name if isinstance(name, str) else ""
    if path_parts(text) != (text,) or text == CONTROL:
        raise UsageError(
            f"{name!r} cannot name a checkpoint: pass one path part, not empty, "
            f"'.', '..' or {CONTROL!r}",
            found=name,
        )
    return text


def check_save_id(save_id: str) -> None:
    """Raise `UsageError` for a save id that is not safe in a file name."""
    if not _SAVE_ID.fullmatch(save_id):
        raise UsageError(
            f"save id {save_id!r}: pass 1 to 100 of the characters A-Z a-z 0-9 _ -", found=save_id
        )


def path_parts(path: str) -> tuple[str, ...] | None:
    """Return the parts of a relative path, or None if it could escape its directory."""
    parts = tuple(path.split("/"))
    return None if "\0" in path or not {"", ".", ".."}.isdisjoint(parts) else parts


def check_file(path: str, location: str) -> None:
    """Check that a path can be a file of the checkpoint or export at `location`.

    Raises:
        UsageError: the path escapes the directory, or is the record's.
    """
    if path_parts(path) is None or path == RECORD_NAME:
        raise UsageError(
            f"{path!r} cannot be a file of a checkpoint: pass a relative path without '..' "
            f"that is not {RECORD_NAME!r}",
            location=location,
            found=path,
        )


def read_parts(path: str, location: str) -> tuple[str, ...]:
    """Return the parts of a path in the checkpoint at `location`.

    Raises:
        CorruptCheckpointError: the path escapes the checkpoint.
    """
    parts = path_parts(path)
    if parts is None:
        raise CorruptCheckpointError(
            f"{location}: {path!r} leads out of the checkpoint; "
            "it is damaged or hostile: use another checkpoint",
            file=path,
            location=location,
            found=path,
        )
    return parts


def open_local(location: str | os.PathLike[str]) -> tuple[str, str]:
    """Return root and name of a one-shot location: `/a/b/final` is `final` in `/a/b`.

    Raises:
        UsageError: the location has no last part.
    """
    root, name = os.path.split(absolute(location))
    return root, check_name(name)
