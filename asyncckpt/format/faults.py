"""One way to report damaged bytes: file, offset, what was expected and found, what to do next."""

from __future__ import annotations

from asyncckpt.errors import CorruptCheckpointError


def corrupt(
    what: str,
    reason: str,
    *,
    file: str,
    offset: int | None = None,
    expected: object = None,
    found: object = None,
) -> CorruptCheckpointError:
    """The error for damaged bytes in `file`; `offset` counts from the start of the file."""
    at = "" if offset is None else f", byte {offset}"
    return CorruptCheckpointError(
        f"{file}{at}: {what} is damaged: {reason}; restore another step or copy",
        file=file,
        offset=offset,
        expected=expected,
        found=found,
    )
