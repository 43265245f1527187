"""The index of a save: OCDBT keys, B+tree nodes and manifest, and the chunk index. No I/O."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from asyncckpt.format.chunks import ChunkIndex, encode_chunk_index
from asyncckpt.format.crc import crc32c
from asyncckpt.format.ocdbt.btree import ValueColumns, encode_tree
from asyncckpt.format.ocdbt.keys import KeyColumns, key_columns
from asyncckpt.format.ocdbt.manifest import encode_manifest
from asyncckpt.format.stored_timeline import encode_timeline
from asyncckpt.format.zarr3 import chunk_keys, encode_metadata, metadata_key
from asyncckpt.options import NODE_NBYTES
from asyncckpt.planning.held import HeldBox
from asyncckpt.planning.leaves import Arrays
from asyncckpt.planning.table import expanded
from asyncckpt.reports import FileInfo, Timeline


@dataclass(frozen=True, slots=True, eq=False)
class Catalog:
    """The sorted keys of a database and their values; depends only on the arrays.

    Attributes:
        columns: the sorted keys, prepared for encoding.
        chunk: chunk number per key, -1 for zarr metadata.
        inline: index per key into the inline values (`templates`, then `inline_chunk`), or -1.
        templates: distinct `zarr.json` documents.
        inline_chunk: chunks stored inline in the B+tree.
        inline_key: per inline chunk, its key.
    """

    columns: KeyColumns
    chunk: npt.NDArray[np.int64]
    inline: npt.NDArray[np.int64]
    templates: tuple[bytes, ...]
    inline_chunk: npt.NDArray[np.int64]
    inline_key: npt.NDArray[np.int64]


def make_catalog(arrays: Arrays) -> Catalog:
    """Return the catalog of the arrays, with the chunks of all processes."""
    templates: dict[bytes, int] = {}
    template_of: list[int] = []
    suffixes_of: list[list[bytes]] = []
    # For every part, the positions of its sorted keys among metadata and chunks in C order.
    places_of: list[int] = []
    for part in arrays.parts:
        data = encode_metadata(part.spec, part.grid.chunk_shape, part.layout.zstd_level)
        template_of.append(templates.setdefault(data, len(templates)))
        suffixes = [metadata_key(""), *chunk_keys("", part.grid.counts)]
        places = sorted(range(len(suffixes)), key=suffixes.__getitem__)
        suffixes_of.append([b"", *map(suffixes.__getitem__, places)])
        places_of += 0, *places
    nbytes_of = np.fromiter(map(len, itertools.chain.from_iterable(suffixes_of)), np.int64)
    count_of = np.array(list(map(len, suffixes_of)), np.int64)
    # Names contain no slash, so keys of different arrays do not interleave.
    stems = list(map(str.encode, arrays.names))
    ends = [stem + b"/" for stem in stems]
    order = sorted(range(len(stems)), key=ends.__getitem__)
    kinds = arrays.part[order]
    pairs = zip(order, kinds.tolist(), strict=True)
    # The first suffix is empty, so that joining puts the name before each other one.
    text = b"".join([stems[number].join(suffixes_of[kind]) for number, kind in pairs])
    stem_nbytes = np.fromiter(map(len, stems), np.int64, len(stems))[order]
    array, place = expanded(count_of[kinds] - 1)
    row = (np.cumsum(count_of) - count_of)[kinds][array] + 1 + place
    chunk = np.array(places_of, np.int64)[row] - 1
    lengths = nbytes_of[row] + stem_nbytes[array]
    is_chunk = chunk >= 0
    chunk += np.where(is_chunk, arrays.first_chunk[order][array], 0)
    index = np.array(template_of, np.int64)[kinds][array]
    # Every key of an inline chunk, tied ones included, has its value.
    value_of_chunk = np.full(arrays.chunk_count, -1, np.int64)
    inline_chunk = arrays.first_chunk[arrays.inline]
    value_of_chunk[inline_chunk] = np.arange(len(inline_chunk)) + len(templates)
    index[is_chunk] = value_of_chunk[chunk[is_chunk]]
    key_of_chunk = np.zeros(arrays.chunk_count, np.int64)
    key_of_chunk[chunk[is_chunk]] = np.flatnonzero(is_chunk)
    return Catalog(
        columns=key_columns(text, lengths),
        chunk=chunk,
        inline=index,
        templates=tuple(templates),
        inline_chunk=inline_chunk,
        inline_key=key_of_chunk[inline_chunk],
    )


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """The encoded index of one save.

    Attributes:
        blocks: contents of the index file: B+tree nodes of about 1 MiB, the timeline, and the chunk
            index; one block if the file is small.
        chunk_index: the chunk index, at the end of the file.
        manifest: contents of the manifest.
        nbytes: length of the file.
        crc: its CRC-32C.
    """

    blocks: list[bytes | bytearray]
    chunk_index: bytes
    manifest: bytes
    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """Output of the data stages of a save, input of the commit.

    Attributes:
        chunks: place and checksum of every row of the plan or, merged, of every chunk of all
            processes. Inline ones have file -1.
        inline: stored chunks of all inline arrays that this process writes, concatenated in order.
        files: every data file, with a path relative to the database.
        parts: boxes of small leaves that several processes hold in parts, and their values.
        checked_crc: payload CRC-32C of each row in `Commit.checked`.
        timeline: when the stages have been busy so far.
    """

    chunks: ChunkIndex
    inline: bytes | bytearray
    files: list[FileInfo]
    parts: Sequence[tuple[HeldBox, bytes]] = ()
    checked_crc: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    timeline: Timeline = field(default_factory=Timeline)


def encode_index(
    catalog: Catalog, payload: Payload, *, path: str, save_id: bytes, now_ns: int
) -> Index:
    """Encode B+tree, chunk index and manifest of a save. Blocking.

    The `path` of the index file is relative to the database, `save_id` has 16 bytes, and `now_ns`
    is the commit time in nanoseconds since 1970.
    """
    chunks, templates = payload.chunks, catalog.templates
    inline_nbytes = chunks.nbytes[catalog.inline_chunk]
    # Buffer, offset and length of every inline value; each template is a buffer of its own.
    count = len(templates)
    buffer = np.minimum(np.arange(count + len(inline_nbytes)), count)
    lengths = np.array([*map(len, templates), *inline_nbytes.tolist()], np.int64)
    offset = np.where(buffer < count, 0, np.cumsum(lengths) - lengths - lengths[:count].sum())
    columns = np.stack([-1 - buffer, offset, lengths])[:, catalog.inline]
    in_file = np.flatnonzero(catalog.inline < 0)
    chunk = catalog.chunk[in_file]
    columns[:, in_file] = chunks.file[chunk], chunks.offset[chunk], chunks.nbytes[chunk]
    tree = encode_tree(
        catalog.columns,
        ValueColumns([*templates, payload.inline], *columns),
        data_files=[file.path for file in payload.files],
        node_file=path,
        node_offset=0,
        max_decoded_node_nbytes=NODE_NBYTES,
        commit_time_ns=now_ns,
    )
    chunks.file[catalog.inline_chunk] = len(payload.files)
    chunks.offset[catalog.inline_chunk] = tree.inline_offset[catalog.inline_key]
    chunk_index = encode_chunk_index(chunks)
    manifest = encode_manifest(save_id, tree.version)
    timeline = encode_timeline(payload.timeline)
    blocks: list[bytes | bytearray] = [*tree.blocks, timeline, chunk_index]
    nbytes = sum(map(len, blocks))
    if nbytes <= NODE_NBYTES:
        blocks = [b"".join(blocks)]
    crc = 0
    for block in blocks:
        crc = crc32c(block, crc)
    return Index(blocks, chunk_index, manifest, nbytes, crc)
