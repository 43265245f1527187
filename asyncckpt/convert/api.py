"""The async functions between checkpoints: `convert`, `export` and `diff`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from asyncckpt.checkpointer.api import ProgressCallback
from asyncckpt.checkpointer.comparison import Comparison
from asyncckpt.checkpointer.conversion import Conversion
from asyncckpt.checkpointer.destination import (
    Destination,
    Format,
    destination_of,
    export_destination,
)
from asyncckpt.flow.shield import uninterrupted
from asyncckpt.options import RestoreOptions, SaveOptions
from asyncckpt.reports import ConvertReport, DiffReport


async def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: Format | None = None,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    max_file_nbytes: int | None = None,
    options: SaveOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
) -> ConvertReport:
    """What `source` holds is at `destination` too, in another format, whole and durable.

    Leaves are read, checked and written box by box, within the byte budget; nothing is visible
    before it is whole, and what a conversion that died has left is removed by the next one. Ties,
    scalars, containers, metadata and metrics go along.

    Args:
        source: a checkpoint of any format that `restore` reads, a safetensors file, or the root of
            a run, which stands for its newest step.
        destination: where to write. A path that ends in ``<root>/<step>`` becomes that step.
        to: ``"asyncckpt"`` or ``"safetensors"``; None: safetensors where the destination ends in
            ``.safetensors``, which is then one file. Without that suffix a safetensors destination
            is a directory, with an index where it has several files.
        metadata: JSON values added to those of the source.
        overwrite: replace what stands at the destination, atomically.
        max_file_nbytes: size at which a safetensors directory goes on in its next file.
        options: as for saving; `host_memory_nbytes` covers reading and writing, and `leaf_options`
            may cast dtypes.
        storage_options: options of the file system for URLs.
        progress: called on an engine's thread with a `Progress`.

    Cancellation: waits for reads and writes that are running, removes what was written, then
    raises.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at `source`.
        CheckpointExistsError: something stands at `destination`.
        CorruptCheckpointError: names leaf, file and offset; nothing was written.
        UsageError: the format cannot hold a leaf; names it, and what to do. Nothing was written.
    """
    target = destination_of(
        destination, to, orbax=False, overwrite=overwrite, max_file_nbytes=max_file_nbytes
    )
    return await _convert(source, target, metadata, options, storage_options, progress)


async def export(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: Literal["orbax"] = "orbax",
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    options: SaveOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
) -> ConvertReport:
    """What `source` holds is at `destination`, where Orbax can restore it.

    Checkpoints of this library are ones of Orbax already, unless a leaf is stored in pieces: here
    every leaf becomes one array. Arguments, cancellation, errors: as `convert`; in addition:

    Raises:
        UnsupportedLeafError: Orbax cannot hold a leaf; names it. Nothing was written.
    """
    target = export_destination(destination, to, overwrite=overwrite)
    return await _convert(source, target, metadata, options, storage_options, progress)


async def diff(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    bitwise: bool = False,
    options: RestoreOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
) -> DiffReport:
    """How two checkpoints of any formats differ: leaves, kinds, shapes, dtypes and values.

    Args:
        first: a checkpoint, a safetensors file, or the root of a run (its newest step).
        second: likewise.
        bitwise: compare bits: NaNs may differ, and 0.0 differs from -0.0.
        options: as for restoring; `host_memory_nbytes` covers both sides.
        storage_options: options of the file system for URLs.
        progress: called on an engine's thread with a `Progress`.

    Cancellation: waits for reads that are running, then raises.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at one of the locations.
        CorruptCheckpointError: names leaf, file and offset.
    """
    work = Comparison(
        first,
        second,
        bitwise=bitwise,
        options=options,
        storage_options=storage_options,
        progress=progress,
    )
    try:
        return await work.submit().wait()
    finally:
        await uninterrupted(work.aclose())


async def _convert(
    source: str | os.PathLike[str],
    destination: Destination,
    metadata: Mapping[str, Any] | None,
    options: SaveOptions | None,
    storage_options: Mapping[str, Any] | None,
    progress: ProgressCallback | None,
) -> ConvertReport:
    work = Conversion(
        source,
        destination,
        metadata=metadata,
        options=options,
        storage_options=storage_options,
        progress=progress,
    )
    try:
        return await work.submit().wait()
    finally:
        await uninterrupted(work.aclose())
