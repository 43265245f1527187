"""All errors of the library, a tree grouped by what a handler would do (docs/api.md).

Each error carries, if known, the leaf's `path`, the pipeline `stage`, the `location` of the
checkpoint, and what was `expected` and `found`; the message states all of them and the next step.
An error reported by another process also carries its index (`process`) and its `host`.
"""

from __future__ import annotations

import reprlib
from numbers import Number
from typing import TypedDict, Unpack

MAX_ITEMS = 10_000
"""Length of the longest list that an error keeps, such as the steps of a run."""

_short = reprlib.Repr()
_short.maxother = _short.maxstring = 80


class About(TypedDict, total=False):
    """Keyword arguments of errors; see the attributes of `AsyncCheckpointError`."""

    path: str | None
    stage: str | None
    location: str | None
    expected: object
    found: object


class AsyncCheckpointError(Exception):
    """Base of every error raised by this library.

    Attributes:
        path: path of the leaf concerned, parts joined by ``/``, or None.
        stage: pipeline stage (``plan``, ``stage``, ``serialize``, ``upload``, ``commit``,
            ``fetch``, ``decode``, ``place``), or None.
        location: path or URL of the checkpoint or file concerned, or None.
        expected: what was expected, or None: a string, a number, a tuple or list of them, the name
            of a type, or a short text for any other object.
        found: what was found instead, or None; likewise.
        written: paths of the targets that a failed `restore_into` wrote, in whole or in part;
            their contents are undefined.
        process: index of the process that raised it, or None for this process.
        host: name of that process's host, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        stage: str | None = None,
        location: str | None = None,
        expected: object = None,
        found: object = None,
    ) -> None:
        super().__init__(message)
        self.written: tuple[str, ...] = ()
        self.process: int | None = None
        self.host: str | None = None
        self.path = path
        self.stage = stage
        self.location = location
        self.expected = _described(expected)
        self.found = _described(found)


def _described(value: object, depth: int = 2) -> object:
    """Return the value, with texts in place of the caller's objects.

    An error may live long and travel to another process, so it must neither keep a state in memory
    nor hold objects that cannot be pickled.
    """
    if value is None or isinstance(value, (str, bytes, Number)):
        return value
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, (tuple, list)) and depth and len(value) <= MAX_ITEMS:
        items = [_described(item, depth - 1) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return _short.repr(value)


class UsageError(AsyncCheckpointError):
    """The call itself is wrong; nothing was read or written."""


class UnsupportedLeafError(UsageError):
    """A leaf or key cannot be stored; the message names its path and what can be stored."""


class ClosedError(UsageError):
    """A `Checkpointer` was used after `close()`, or in a forked child."""


class CheckpointNotFoundError(AsyncCheckpointError):
    """There is no (complete) checkpoint at the location."""


class CheckpointExistsError(AsyncCheckpointError):
    """A checkpoint already exists at the location and `overwrite` was not given."""


class _DamagedFileError(AsyncCheckpointError):
    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        offset: int | None = None,
        **about: Unpack[About],
    ) -> None:
        super().__init__(message, **about)
        self.file = file
        self.offset = offset


class CorruptCheckpointError(_DamagedFileError):
    """Stored bytes are damaged, missing or hostile.

    Attributes:
        file: path of the damaged file, relative to the checkpoint, or None.
        offset: byte offset in it, or None.
    """


class UnsupportedFormatError(_DamagedFileError):
    """The checkpoint is of a kind or version that this release does not read.

    Attributes:
        file: path of the file concerned, relative to the checkpoint, or None.
        offset: byte offset in it, or None.
    """


class MismatchError(AsyncCheckpointError):
    """The checkpoint does not match the target; no payload was read."""


class TreeMismatchError(MismatchError):
    """Leaves are missing from the checkpoint or from the target."""


class ShapeMismatchError(MismatchError):
    """A leaf has another shape in the checkpoint than in the target."""


class DtypeMismatchError(MismatchError):
    """A leaf has another dtype in the checkpoint than in the target, or its values do not fit."""


class StoreError(AsyncCheckpointError):
    """The file system or object store failed.

    Attributes:
        retryable: whether the same operation may succeed later without changes.
    """

    def __init__(self, message: str, *, retryable: bool = False, **about: Unpack[About]) -> None:
        super().__init__(message, **about)
        self.retryable = retryable


class FencedError(AsyncCheckpointError):
    """Another process has taken over the run; end this one, whose saves no longer count.

    It is not a `SaveError`, because saving again cannot help. Steps that this process saved before
    the takeover are part of the run, and the other process continues from them.

    Attributes:
        epoch: claim under which this process wrote, or None.
        claimed_by: host and process id of the process that took over, or None if unknown.
        claimed_ns: time of the takeover by that process's clock, nanoseconds since 1970, or None.
        visible: whether the step of the save that raised is part of the run; None if unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        epoch: int | None = None,
        claimed_by: str | None = None,
        claimed_ns: int | None = None,
        visible: bool | None = False,
        **about: Unpack[About],
    ) -> None:
        super().__init__(message, **about)
        self.epoch = epoch
        self.claimed_by = claimed_by
        self.claimed_ns = claimed_ns
        self.visible = visible


class SaveError(AsyncCheckpointError):
    """A save failed, or a call of several processes lost one of them.

    Attributes:
        visible: whether the step is listed (it was published, but a later flush failed).
        durable: whether it is known to survive power loss.
    """

    def __init__(
        self, message: str, *, visible: bool = False, durable: bool = False, **about: Unpack[About]
    ) -> None:
        super().__init__(message, **about)
        self.visible = visible
        self.durable = durable


class StagingError(SaveError):
    """Copying a leaf to host memory failed."""


class SaveAbortedError(SaveError):
    """The save was aborted by `PendingSave.cancel()` or by the end of the process."""


class DeadlineExceededError(SaveError):
    """A save or restore exceeded its deadline; it was aborted and cleaned up."""


class SaveOutcomeUnknownError(SaveError):
    """It is unknown whether a save succeeded.

    Process 0, which decides, fell silent after all processes had written, an object store did not
    answer whether it has stored the record, or the claims could not be read after that.
    `latest_step` tells later whether the checkpoint exists; the state in memory is unharmed.
    """


class RestoreError(AsyncCheckpointError):
    """An object refused its restored state, or a framework could not make an array of values."""


class ResourceError(AsyncCheckpointError):
    """Memory or threads ran out, or the interpreter is exiting; no checkpoint was changed."""


class EngineDiedError(AsyncCheckpointError):
    """The engine's thread ended while work was outstanding; create a new `Checkpointer`."""


class RestoreWarning(UserWarning):
    """Remark of a successful restore, which is also in the `notes` of its report.

    For example, a checkpoint of another library lacks checksums for some leaves.
    """
