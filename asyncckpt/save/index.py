"""The index of a save: OCDBT keys, B+tree nodes and manifest, and the chunk index. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from asyncckpt.format.chunks import ChunkIndex, encode_chunk_index
from asyncckpt.format.crc import crc32c
from asyncckpt.format.ocdbt.btree import ValueColumns, encode_tree
from asyncckpt.format.ocdbt.keys import KeyColumns, prepare_keys
from asyncckpt.format.ocdbt.manifest import encode_manifest
from asyncckpt.format.zarr3 import chunk_keys, encode_metadata, metadata_key
from asyncckpt.options import INLINE_NBYTES, NODE_NBYTES
from asyncckpt.planning.save import SavePlan
from asyncckpt.save.serialize import Extents


@dataclass(frozen=True, slots=True, eq=False)
class Catalog:
    """The sorted keys of a database and what each leads to; depends on the plan alone.

    Attributes:
        columns: the sorted keys, prepared for encoding.
        row: chunk row per key, -1 for zarr metadata.
        inline: index into the inline values per key (templates first, then `plan.inline`), or -1.
        templates: distinct `zarr.json` documents.
        inline_key: per inline array, the key at whose value its row points.
    """

    columns: KeyColumns
    row: npt.NDArray[np.int64]
    inline: npt.NDArray[np.int64]
    templates: tuple[bytes, ...]
    inline_key: npt.NDArray[np.int64]


def make_catalog(plan: SavePlan) -> Catalog:
    """Return the catalog of a plan."""
    templates: dict[bytes, int] = {}
    template_of: list[int] = []
    suffixes_of: list[list[bytes]] = []
    for part in plan.arrays.parts:
        data = encode_metadata(part.spec, part.grid.chunk_shape, part.zstd_level)
        template_of.append(templates.setdefault(data, len(templates)))
        suffixes_of.append([metadata_key(""), *chunk_keys("", part.grid.counts)])
    keys: list[bytes] = []
    for name, number in zip(plan.arrays.names, plan.arrays.part.tolist(), strict=True):
        stem = name.encode()
        keys += [stem + suffix for suffix in suffixes_of[number]]
    # The metadata of each array, then its chunks.
    counts = np.array(list(map(len, suffixes_of)), np.int64)[plan.arrays.part]
    heads = np.cumsum(counts) - counts
    rows = np.repeat(plan.first_row - heads - 1, counts) + np.arange(len(keys))
    rows[heads] = -1
    inline = np.full(len(keys), -1, np.int64)
    inline[heads] = np.array(template_of, np.int64)[plan.arrays.part]
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__), np.intp)
    row = rows[order]
    index = inline[order]
    # Inline rows, tied ones included, carry their value with every key.
    value_of_row = np.full(len(plan.row_payload), -1, np.int64)
    own = plan.first_row[list(plan.inline)] if plan.inline else np.zeros(0, np.int64)
    value_of_row[own] = np.arange(len(own)) + len(templates)
    chunk = row >= 0
    index[chunk] = value_of_row[row[chunk]]
    key_of_row = np.zeros(len(plan.row_payload), np.int64)
    key_of_row[row[chunk]] = np.flatnonzero(chunk)
    return Catalog(
        columns=prepare_keys(list(map(keys.__getitem__, order.tolist()))),
        row=row,
        inline=index,
        templates=tuple(templates),
        inline_key=key_of_row[own],
    )


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """The encoded index of one save.

    Attributes:
        blocks: contents of the index file: B+tree nodes, then the chunk index.
        manifest: contents of the manifest.
        nbytes: length of the file.
        crc: its CRC-32C.
    """

    blocks: list[bytes]
    manifest: bytes
    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """What the data stages of a save hand to the commit.

    Attributes:
        chunks: place and checksum of every row; inline rows have file -1.
        inline: stored bytes of every inline array, in the order of `plan.inline`.
        files: (path relative to the database, bytes, CRC-32C) of every data file.
    """

    chunks: Extents
    inline: list[bytes]
    files: list[tuple[str, int, int]]


def encode_index(
    catalog: Catalog, plan: SavePlan, payload: Payload, *, path: str, save_id: bytes, now_ns: int
) -> Index:
    """Encode B+tree, chunk index and manifest of a save. Blocking.

    Args:
        catalog: keys of the plan.
        plan: the plan.
        payload: places and checksums of all chunks; its inline values are used up.
        path: path of the index file relative to the database.
        save_id: 16 bytes, identity of the database.
        now_ns: commit time, nanoseconds since 1970.
    """
    chunks = payload.chunks
    values: list[bytes | None] = [*catalog.templates, *payload.inline, None]
    payload.inline.clear()
    row = catalog.row
    in_file = np.flatnonzero(catalog.inline < 0)
    file = np.full(len(row), -1, np.int64)
    file[in_file] = chunks.file[row[in_file]]
    offsets, lengths = np.zeros_like(file), np.zeros_like(file)
    offsets[in_file] = chunks.offset[row[in_file]]
    lengths[in_file] = chunks.nbytes[row[in_file]]
    columns = ValueColumns(
        list(map(values.__getitem__, catalog.inline.tolist())), file, offsets, lengths
    )
    # From here on the nodes hold the values, and nothing else does.
    values.clear()
    tree = encode_tree(
        catalog.columns,
        columns,
        data_files=list(map(itemgetter(0), payload.files)),
        node_file=path,
        node_offset=0,
        max_decoded_node_nbytes=NODE_NBYTES,
    )
    own = plan.first_row[list(plan.inline)] if plan.inline else np.zeros(0, np.int64)
    chunks.file[own] = len(payload.files)
    chunks.offset[own] = tree.inline_offset[catalog.inline_key]
    chunk_index = encode_chunk_index(
        ChunkIndex(chunks.file, chunks.offset, chunks.nbytes, chunks.crc)
    )
    manifest = encode_manifest(
        save_id,
        tree,
        commit_time_ns=now_ns,
        max_inline_value_bytes=INLINE_NBYTES,
        max_decoded_node_bytes=NODE_NBYTES,
    )
    blocks = [*tree.blocks, chunk_index]
    crc = 0
    for block in blocks:
        crc = crc32c(block, crc)
    return Index(blocks, manifest, sum(map(len, blocks)), crc)
