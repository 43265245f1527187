"""Conversion of a checkpoint of any format to an asyncckpt checkpoint or safetensors files.

::

    reading runtime                        writing runtime
    files ──► chunks, decoded, cached ──► boxes ──► windows ──► files ──► rename
"""

# Rule 1: every refusal comes before the first byte is written.

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from typing import Any, Literal, Unpack

from asyncckpt.arguments import (
    ConvertArguments,
    Location,
    ProgressCallback,
    checked_metadata,
    completed,
    documented,
    guarded,
    typed,
)
from asyncckpt.convert.as_save import snapshot_of, write_checkpoint
from asyncckpt.convert.destination import Format, Target, format_of
from asyncckpt.convert.reader import LeafReader
from asyncckpt.convert.safetensors_writer import write_files
from asyncckpt.convert.source import Runtimes, options_of, shares
from asyncckpt.errors import (
    AsyncCheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    UsageError,
)
from asyncckpt.flow.driver import check_loop
from asyncckpt.flow.shield import within
from asyncckpt.log import logger
from asyncckpt.options import GIB, MAX_ENTRIES, SaveOptions
from asyncckpt.ports import CheckpointFiles
from asyncckpt.reports import ConvertReport, nbytes_text
from asyncckpt.save.commit import DATABASE
from asyncckpt.stores.objects.clients.opening import fsspec_options

LARGEST_CHUNK_NBYTES = 1 * GIB
"""Largest chunk that takes the source's chunk shape to avoid repeated reads."""


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

    Leaves are read, checked and written box by box, within the byte budget. The result becomes
    visible only when complete; the next conversion removes leftovers of one that died. Ties,
    scalars, containers, metadata and metrics are kept.

    Args:
        source: a checkpoint of any format that `restore` reads, a safetensors file, or the root of
            a run, which means its newest step.
        destination: where to write. A path that ends in ``<root>/<step>`` becomes that step.
        to: ``"asyncckpt"`` or ``"safetensors"``; None: safetensors if the destination ends in
            ``.safetensors``, which is then a single file. Without that suffix a safetensors
            destination is a directory, with an index if it has several files.
        max_file_nbytes: size at which a safetensors directory continues in its next file.
        metadata: JSON values added to those of the source.
        overwrite: replace the destination atomically, a directory as a whole. safetensors files
            never replace a checkpoint, or a directory that contains other files.
        options: as for saving; `host_memory_nbytes` covers reading and writing, and `leaf_options`
            may cast dtypes.
        storage_options: options of the file system for URLs.
        progress: called on an engine's thread with a `Progress`.

    Cancellation: waits for running reads and writes, removes what was written, then raises.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at `source`.
        CheckpointExistsError: something exists at `destination`.
        CorruptCheckpointError: names leaf, file and offset; nothing was written.
        UsageError: a local `destination` is inside a checkpoint, or the format cannot hold a leaf;
            names it and a way out. Nothing was written.
    """
    given = completed(ConvertArguments, arguments)
    return await _run(source, destination, to=to, max_file_nbytes=max_file_nbytes, **given)


@documented
async def export(
    source: Location,
    destination: Location,
    *,
    to: Literal["orbax"] = "orbax",
    **arguments: Unpack[ConvertArguments],
) -> ConvertReport:
    """Write `source` to `destination` in a form that Orbax can restore.

    Orbax restores asyncckpt checkpoints as they are, unless a leaf is stored in pieces: `export`
    makes every leaf one array. Arguments, cancellation, errors: as `convert`; in addition:

    Raises:
        UnsupportedLeafError: Orbax cannot hold a leaf; names it. Nothing was written.
    """
    given = completed(ConvertArguments, arguments)
    if to != "orbax":
        raise UsageError(f'to={to!r}: pass "orbax"', expected="orbax", found=to)
    return await _run(source, destination, to="asyncckpt", orbax=True, **given)


async def _run(
    source: Location,
    destination: Location,
    *,
    to: str | None,
    orbax: bool = False,
    max_file_nbytes: int | None = None,
    overwrite: bool,
    metadata: Mapping[str, Any] | None,
    options: SaveOptions | None,
    storage_options: Mapping[str, Any] | None,
    progress: ProgressCallback | None,
) -> ConvertReport:
    check_loop()
    form, max_file_nbytes = format_of(destination, to, max_file_nbytes)
    metadata, progress = checked_metadata(metadata), guarded(progress)
    source_options, destination_options = options_of((source, destination), storage_options)
    # Stored leaves do not change, so the snapshot need not hold or wait for them.
    chosen = dataclasses.replace(typed("options", options, SaveOptions), snapshot="copy")
    if form == "safetensors":
        if chosen.compression is not None:
            raise UsageError(
                f"{destination}: safetensors files are not compressed; leave compression out"
            )
        # A file of any size is one object.
        destination_options = fsspec_options(destination, destination_options)
    packing = chosen.compression is not None or chosen.leaf_options is not None
    reading, cache, writing = shares(chosen.host_memory_nbytes, packing=packing)
    runtimes = Runtimes("convert", reading_nbytes=reading, working_nbytes=writing)

    async def work() -> ConvertReport:
        begun = time.perf_counter()
        failure = "nothing was written, because the conversion did not finish"
        option = "SaveOptions.deadline_s"
        async with within(chosen.deadline_s, os.fspath(destination), failure, option):
            # Opening a client imports libraries: in a thread.
            store, name = await runtimes.working.engine.compute.run(
                runtimes.working.one,
                destination,
                direct_io=chosen.direct_io,
                storage_options=destination_options,
            )
            target = Target(
                format=form,
                orbax=orbax,
                overwrite=overwrite,
                max_file_nbytes=max_file_nbytes,
                runtime=runtimes.working,
                store=store,
                name=name,
                options=chosen,
                metadata=metadata,
                # A chunk is held before and after it is packed.
                largest_nbytes=writing // 2 if packing else LARGEST_CHUNK_NBYTES,
                progress=progress,
            )
            await _refuse_existing(target)
            reader = await runtimes.open(source, source_options, cache)
            try:  # remove leftovers of dead conversions and saves next to the destination
                await store.sweep()
            except AsyncCheckpointError as error:
                logger.warning("%s could not be swept: %s", store.url, error)
            return await _convert(target, reader, begun)

    return await runtimes.run(work)


async def _convert(target: Target, reader: LeafReader, begun: float) -> ConvertReport:
    opened = reader.opened
    snapshot = await target.runtime.engine.compute.run(snapshot_of, reader)
    write = write_files if target.format == "safetensors" else write_checkpoint
    facts = await write(target, reader, snapshot)
    arrays = [leaf for leaf, pieces in enumerate(reader.pieces) if pieces]
    unverified = [
        reader.paths[leaf]
        for leaf in arrays
        if not opened.is_verified(piece.array for piece in reader.pieces[leaf])
    ]
    notes = [*facts.pop("notes", ()), *opened.notes]
    if unverified:
        notes.append(opened.unverified_note(len(unverified), len(arrays)))
    large = max((storage.chunk_nbytes for storage in opened.storages), default=0)
    if large > reader.cache_nbytes:
        notes.append(
            f"its largest chunk takes {nbytes_text(large)} and was decoded alone, beyond the "
            f"{nbytes_text(reader.cache_nbytes)} kept for reading"
        )
    return ConvertReport(
        source=opened.location,
        source_format=opened.format,
        format=target.format,
        read_nbytes=reader.read_nbytes,
        total_s=time.perf_counter() - begun,
        unverified=tuple(unverified),
        notes=tuple(notes),
        **facts,
    )


async def _refuse_existing(target: Target) -> None:
    if target.overwrite:
        return
    files = target.store.files(target.name)
    try:
        exists = await _has_content(files)
    except CheckpointNotFoundError:
        return
    finally:
        await files.close()
    if exists:
        raise CheckpointExistsError(
            f"{files.location}: something already exists here; pass overwrite=True "
            "(--overwrite) to replace it, or choose another name",
            location=files.location,
        )


async def _has_content(files: CheckpointFiles) -> bool:
    names = {entry.name for entry in await files.entries(max_entries=MAX_ENTRIES)}
    others = {name for name in names if not name.startswith(".asyncckpt-")}
    if files.capabilities.proves_dead or others - {DATABASE}:
        return bool(names)
    if not others:
        return False
    # On object stores, aborted attempts leave data below the same name.
    below = await files.entries(DATABASE, max_entries=MAX_ENTRIES)
    return any(entry.name != "d" for entry in below)
