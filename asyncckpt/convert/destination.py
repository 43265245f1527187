"""Destination of a conversion."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from asyncckpt.arguments import ProgressCallback
from asyncckpt.errors import UsageError
from asyncckpt.format.foreign.safetensors import SUFFIX
from asyncckpt.options import GIB, SaveOptions
from asyncckpt.ports import Store
from asyncckpt.runtime import Runtime

Format = Literal["asyncckpt", "safetensors"]

Facts = dict[str, Any]
"""Fields of the `ConvertReport` that the writer of a format provides."""

SET_FILE_NBYTES = 5 * GIB
"""Size at which a set of safetensors files continues in the next file, as hubs require."""


def format_of(
    location: str | os.PathLike[str], to: str | None, max_file_nbytes: int | None
) -> tuple[Format, int | None]:
    """Return the format to write, and `Target.max_file_nbytes`.

    Raises:
        UsageError: the arguments contradict each other.
    """
    if not isinstance(location, (str, os.PathLike)):
        raise UsageError(
            f"destination={location!r:.80}: pass a path (str or os.PathLike) or a URL",
            found=location,
        )
    is_file = str(os.fspath(location)).endswith(SUFFIX)
    if to not in (None, "asyncckpt", "safetensors"):
        raise UsageError(
            f'to={to!r}: pass "asyncckpt" or "safetensors"',
            expected=("asyncckpt", "safetensors"),
            found=to,
        )
    if not (to == "safetensors" or (to is None and is_file)):
        if is_file or max_file_nbytes is not None:
            raise UsageError(
                f"{location}: {f'a name in {SUFFIX}' if is_file else 'max_file_nbytes'} is for "
                'safetensors files; pass to="safetensors", or leave it out'
            )
        return "asyncckpt", None
    if max_file_nbytes is not None:
        if isinstance(max_file_nbytes, bool) or not isinstance(max_file_nbytes, int):
            raise UsageError(f"max_file_nbytes={max_file_nbytes!r}: pass an int (bytes)")
        if max_file_nbytes < 1:
            raise UsageError(f"max_file_nbytes={max_file_nbytes}: pass a positive number of bytes")
        if is_file:
            raise UsageError(
                f"{location}: max_file_nbytes makes a set of files, which is a directory; pass a "
                f"destination that does not end in {SUFFIX}"
            )
    elif not is_file:
        max_file_nbytes = SET_FILE_NBYTES
    return "safetensors", max_file_nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Destination while it is being written: runtime, store and name.

    Attributes:
        orbax: whether Orbax must be able to restore it.
        overwrite: whether to replace an existing file, directory or checkpoint.
        max_file_nbytes: size at which a set of safetensors files continues in the next file; None
            for a single file.
        metadata: added to that of the source.
        largest_nbytes: largest chunk that may take the source's chunk shape.
    """

    format: Format
    orbax: bool
    overwrite: bool
    max_file_nbytes: int | None
    runtime: Runtime
    store: Store
    name: str
    options: SaveOptions
    metadata: Mapping[str, Any]
    largest_nbytes: int
    progress: ProgressCallback | None
