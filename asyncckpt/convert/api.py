"""Async functions `convert`, `export` and `diff`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Unpack

from asyncckpt.arguments import (
    ConvertArguments,
    Location,
    ProgressCallback,
    completed,
    documented,
)
from asyncckpt.convert.convert import run_conversion
from asyncckpt.convert.destination import Format
from asyncckpt.convert.diff import run_comparison
from asyncckpt.errors import UsageError
from asyncckpt.options import RestoreOptions
from asyncckpt.reports import ConvertReport, DiffReport


@documented
async def convert(
    source: Location,
    destination: Location,
    *,
    to: Format | None = None,
    max_file_nbytes: int | None = None,
    **arguments: Unpack[ConvertArguments],
) -> ConvertReport:
    """Convert `source` to another format at `destination`, whole and durable.

    Leaves are read, checked and written box by box, within the byte budget; nothing is visible
    before it is whole, and the next conversion removes leftovers of one that died. Ties, scalars,
    containers, metadata and metrics are kept.

    Args:
        source: a checkpoint of any format that `restore` reads, a safetensors file, or the root of
            a run, which means its newest step.
        destination: where to write. A path that ends in ``<root>/<step>`` becomes that step.
        to: ``"asyncckpt"`` or ``"safetensors"``; None: safetensors if the destination ends in
            ``.safetensors``, which is then a single file. Without that suffix a safetensors
            destination is a directory, with an index if it has several files.
        max_file_nbytes: size at which a safetensors directory continues in its next file.
        metadata: JSON values added to those of the source.
        overwrite: replace what is at the destination, atomically.
        options: as for saving; `host_memory_nbytes` covers reading and writing, and `leaf_options`
            may cast dtypes.
        storage_options: options of the file system for URLs.
        progress: called on an engine's thread with a `Progress`.

    Cancellation: waits for running reads and writes, removes what was written, then raises.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at `source`.
        CheckpointExistsError: something exists at `destination`.
        CorruptCheckpointError: names leaf, file and offset; nothing was written.
        UsageError: the format cannot hold a leaf; names it and a way out. Nothing was written.
    """
    given = completed(ConvertArguments, arguments)
    return await run_conversion(
        source, destination, to=to, max_file_nbytes=max_file_nbytes, **given
    )


@documented
async def export(
    source: Location,
    destination: Location,
    *,
    to: Literal["orbax"] = "orbax",
    **arguments: Unpack[ConvertArguments],
) -> ConvertReport:
    """Write `source` to `destination` in a form that Orbax can restore.

    Orbax restores checkpoints of this library as they are, unless a leaf is stored in pieces: this
    makes every leaf one array. Arguments, cancellation, errors: as `convert`; in addition:

    Raises:
        UnsupportedLeafError: Orbax cannot hold a leaf; names it. Nothing was written.
    """
    given = completed(ConvertArguments, arguments)
    if to != "orbax":
        raise UsageError(f'to={to!r}: pass "orbax"', expected="orbax", found=to)
    return await run_conversion(source, destination, to="asyncckpt", orbax=True, **given)


async def diff(
    first: Location,
    second: Location,
    *,
    bitwise: bool = False,
    options: RestoreOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
) -> DiffReport:
    """Compare two checkpoints of any formats: leaves, kinds, shapes, dtypes and values.

    Args:
        first: a checkpoint, a safetensors file, or the root of a run (its newest step).
        second: likewise.
        bitwise: compare bits: NaNs may differ, and 0.0 differs from -0.0.
        options: as for restoring; `host_memory_nbytes` covers both sides.
        storage_options: options of the file system for URLs.
        progress: called on an engine's thread with a `Progress`.

    Cancellation: waits for running reads, then raises.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at one of the locations.
        CorruptCheckpointError: names leaf, file and offset.
    """
    return await run_comparison(
        first,
        second,
        bitwise=bitwise,
        options=options,
        storage_options=storage_options,
        progress=progress,
    )
