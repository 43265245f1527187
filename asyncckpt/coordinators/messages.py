"""Errors as messages between processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from asyncckpt import errors
from asyncckpt.errors import AsyncCheckpointError, SaveAbortedError, SaveError
from asyncckpt.ports import MAX_MESSAGE_NBYTES

PART_NBYTES = MAX_MESSAGE_NBYTES - 1
"""Payload of one part of a large message."""

PARTS_MAX = 255
"""Most parts of a message, 16 MiB in all: the number of parts is one byte."""

ERROR_NBYTES = 60 << 10
"""Largest encoded error, below `MAX_MESSAGE_NBYTES` to leave room for what precedes it."""

FIELD_LIMITS = (16384, 4096, 1024, 256)
"""Limits of text lengths, tried in order; JSON may need six bytes per character."""

CLASSES: Mapping[str, type[AsyncCheckpointError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type)
    and issubclass(kind, AsyncCheckpointError)
    and not name.startswith("_")
}

TEXTS = ("path", "stage", "location", "expected", "found", "file", "host", "claimed_by")
FIELDS = (*TEXTS, "retryable", "visible", "durable", "offset", "process", "epoch", "claimed_ns")


def parts_of(message: bytes) -> list[tuple[int, bytes]]:
    """Return the numbered parts of a large message, in the order to send them.

    The first part begins with the number of parts and is sent last: once it is there, all are.

    Raises:
        ValueError: the message is larger than 16 MiB.
    """
    starts = range(0, max(len(message), 1), PART_NBYTES)
    if len(starts) > PARTS_MAX:
        raise ValueError(f"a message of {len(message)} bytes")
    parts = [message[start : start + PART_NBYTES] for start in starts]
    parts[0] = bytes((len(parts),)) + parts[0]
    return list(enumerate(parts))[::-1]


def encode_error(
    error: BaseException,
    *,
    process: int,
    host: str,
    stage: str | None = None,
    limit_nbytes: int = ERROR_NBYTES,
) -> bytes:
    """Return a message that reports an error to other processes.

    Args:
        error: an error of this process, or one from `decode_error`, which keeps its process.
        process: index of this process.
        host: name of its host.
        stage: stage that failed, unless the error has one.
        limit_nbytes: largest size of the message, at least 16 KiB; longer texts are cut.
    """
    kind, text = _described(error)
    fields: dict[str, Any] = {"kind": kind, "text": text}
    for name in FIELDS:
        value = getattr(error, name, None) if isinstance(error, AsyncCheckpointError) else None
        if value is not None:
            fields[name] = _text(value) if name in TEXTS else value
    fields.setdefault("process", process)
    fields.setdefault("host", host)
    if stage is not None:
        fields.setdefault("stage", stage)
    for limit in FIELD_LIMITS:
        data = json.dumps({name: _cut(value, limit) for name, value in fields.items()}).encode()
        if len(data) <= limit_nbytes:
            break
    return data


def decode_error(data: bytes) -> AsyncCheckpointError:
    """Return the error in a message, of its original class.

    Its text begins with process and host; `expected` and `found` are texts. A message that
    `encode_error` did not make becomes a `SaveError`.
    """
    try:
        fields = json.loads(data)
        process, host, text = int(fields["process"]), str(fields["host"]), str(fields["text"])
        kind = CLASSES.get(fields["kind"], SaveError)
    except (ValueError, TypeError, KeyError):
        return SaveError(
            f"another process failed and sent a message that cannot be read ({data[:80]!r}); "
            "check that all processes run the same version of asyncckpt"
        )
    start = f"process {process} ({host}): "
    error = kind(text if text.startswith(start) else start + text)
    error.process, error.host = process, host
    for name in FIELDS:
        if name in fields and hasattr(error, name):
            setattr(error, name, fields[name])
    return error


def _described(error: BaseException) -> tuple[str, str]:
    """Return the name of the nearest class in `errors`, and the complete text with all notes."""
    if isinstance(error, (asyncio.CancelledError, KeyboardInterrupt)):
        return SaveAbortedError.__name__, "the call was cancelled there"
    text = "\n".join((_text(error), *getattr(error, "__notes__", ())))
    for kind in type(error).__mro__:
        if CLASSES.get(kind.__name__) is kind:
            return kind.__name__, text
    return SaveError.__name__, f"{type(error).__name__}: {text}"


def _text(value: object) -> str:
    # A user's value may have a broken __str__, which must not hide the error.
    try:
        return str(value)
    except Exception as error:
        return f"{type(value).__name__} whose str() raised {type(error).__name__}"


def _cut(value: Any, limit: int) -> Any:
    if isinstance(value, str) and len(value) > limit:
        return f"{value[: limit - 1]}…"
    return value
