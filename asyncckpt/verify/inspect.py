"""Inspection of a checkpoint from its metadata alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from asyncckpt.checkpoint.metadata import Extents, OpenCheckpoint, missing
from asyncckpt.errors import CheckpointNotFoundError
from asyncckpt.flow.threads import Workers
from asyncckpt.format.record_values import Piece
from asyncckpt.format.scalars import decode_scalar
from asyncckpt.format.stored_timeline import MAX_TIMELINE_NBYTES, decode_timeline
from asyncckpt.reports import CheckpointInfo, FileInfo, LeafInfo, Timeline
from asyncckpt.tree import unflatten


async def info_of(
    opened: OpenCheckpoint, step: int | None, compute: Workers, *, timeline: bool = False
) -> CheckpointInfo:
    """Describe a checkpoint from its metadata, with the timeline of its save if `timeline`.

    Raises:
        CorruptCheckpointError: a required file is missing or damaged.
    """
    extents = await opened.read_extents(opened, None) if opened.arrays.name else None
    info = await compute.run(_info, opened, extents, step)
    if not timeline or opened.record is None:
        return info
    index = opened.record.chunk_index
    path = opened.record.files[index.file].path
    start = max(0, index.offset - MAX_TIMELINE_NBYTES)
    data = np.empty(index.offset - start, np.uint8)
    try:
        await opened.files.read_into(path, start, [data])
    except CheckpointNotFoundError as error:
        raise missing(opened.location, path) from error
    return replace(info, timeline=decode_timeline(data.tobytes()) or Timeline())


def _info(opened: OpenCheckpoint, extents: Extents | None, step: int | None) -> CheckpointInfo:
    structure = opened.structure()
    paths = structure.paths()
    table = opened.leaves
    leaves: list[LeafInfo] = []
    first: dict[tuple[int, ...], str] = {}
    tied = opened.arrays.tied
    for leaf, (path, pieces) in enumerate(zip(paths, opened.leaf_pieces(), strict=True)):
        kind = table.kind[leaf]
        if not pieces:
            value = decode_scalar(kind, table.value[leaf])
            leaves.append(LeafInfo(path, kind, value=value))
            continue
        arrays = tuple(piece.array for piece in pieces)
        shared = tuple(tied.get(array, -1) for array in arrays)
        first[arrays] = path
        assert extents is not None
        leaves.append(_array_info(opened, extents, path, kind, pieces, first.get(shared)))
    return CheckpointInfo(
        location=opened.location,
        step=step,
        save_id=opened.save_id,
        created_ns=opened.created_ns,
        library=opened.library,
        leaves=tuple(leaves),
        files=tuple(FileInfo(file.path, file.nbytes, file.crc32c) for file in opened.stored_files),
        metadata=opened.metadata,
        metrics=opened.metrics,
        tree=unflatten(structure, leaves),
        format=opened.format,
        epoch=0 if opened.record is None else opened.record.epoch,
    )


def _array_info(
    opened: OpenCheckpoint,
    extents: Extents,
    path: str,
    kind: str,
    pieces: Sequence[Piece],
    tied_to: str | None,
) -> LeafInfo:
    storages = [opened.storage(piece.array) for piece in pieces]
    spec = opened.leaf_spec(pieces)
    counts = [storage.grid.chunk_count for storage in storages]
    stored = 0
    for piece, count in zip(pieces, counts, strict=True):
        start = opened.first_rows[piece.array]
        stored += int(extents.nbytes[start : start + count].sum())
    names = opened.arrays.name
    database = ""
    if opened.database or opened.format == "ocdbt":
        database = f"{opened.location}/{opened.database}".removesuffix("/.").rstrip("/")
    return LeafInfo(
        path=path,
        kind="array",
        framework=kind,
        shape=spec.shape,
        dtype=spec.dtype,
        chunk_shape=storages[0].chunk_shape,
        chunk_count=sum(counts),
        nbytes=spec.nbytes,
        stored_nbytes=stored,
        compression=storages[0].codec.name or None,
        array=names[pieces[0].array],
        tied_to=tied_to,
        location=database,
        driver=storages[0].driver,
        pieces=tuple((p.offset, names[p.array], opened.storage(p.array).spec.shape) for p in pieces)
        if len(pieces) > 1
        else (),
    )
