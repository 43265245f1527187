"""The index of a save: OCDBT keys, B+tree nodes and manifest, and the chunk index. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from asyncckpt.format.chunks import ChunkIndex, encode_chunk_index
from asyncckpt.format.crc import crc32c
from asyncckpt.format.entries import WrittenFile
from asyncckpt.format.ocdbt.btree import ValueColumns, encode_tree
from asyncckpt.format.ocdbt.keys import KeyColumns, key_columns
from asyncckpt.format.ocdbt.manifest import encode_manifest
from asyncckpt.format.stored_timeline import encode_timeline
from asyncckpt.format.zarr3 import chunk_keys, encode_metadata, metadata_key
from asyncckpt.options import INLINE_NBYTES, NODE_NBYTES
from asyncckpt.planning.held import HeldBox
from asyncckpt.planning.leaves import Arrays
from asyncckpt.reports import Timeline

NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Catalog:
    """The sorted keys of a database and their values; depends on the arrays alone.

    Attributes:
        columns: the sorted keys, prepared for encoding.
        chunk: number of the chunk per key, -1 for zarr metadata.
        inline: index into the inline values per key (templates first, then those of
            `inline_chunk`), or -1.
        templates: distinct `zarr.json` documents.
        inline_chunk: chunks of the arrays whose only chunk is in the B+tree.
        inline_key: per such array, the key whose value is its chunk.
    """

    columns: KeyColumns
    chunk: npt.NDArray[np.int64]
    inline: npt.NDArray[np.int64]
    templates: tuple[bytes, ...]
    inline_chunk: npt.NDArray[np.int64]
    inline_key: npt.NDArray[np.int64]


def make_catalog(arrays: Arrays) -> Catalog:
    """Return the catalog of these arrays, with the chunks of all processes."""
    templates: dict[bytes, int] = {}
    template_of: list[int] = []
    suffixes_of: list[list[bytes]] = []
    # Of every part: where its sorted keys are among metadata and chunks in C order.
    places_of: list[npt.NDArray[np.int64]] = []
    for part in arrays.parts:
        data = encode_metadata(part.spec, part.grid.chunk_shape, part.layout.zstd_level)
        template_of.append(templates.setdefault(data, len(templates)))
        suffixes = [metadata_key(""), *chunk_keys("", part.grid.counts)]
        places = sorted(range(len(suffixes)), key=suffixes.__getitem__)
        suffixes_of.append(list(map(suffixes.__getitem__, places)))
        places_of.append(np.array(places, np.int64))
    nbytes_of = [np.fromiter(map(len, suffixes), np.int64) for suffixes in suffixes_of]
    # Names have no slash, so keys of different arrays do not interleave.
    stems = list(map(str.encode, arrays.names))
    order = sorted(range(len(stems)), key=lambda array: stems[array] + b"/")
    kinds = arrays.part[order].tolist()
    text = b"".join(
        [
            stems[array] + stems[array].join(suffixes_of[kind])
            for array, kind in zip(order, kinds, strict=True)
        ]
    )
    stem_nbytes = np.array([len(stems[array]) for array in order], np.int64)
    counts = np.array(list(map(len, suffixes_of)), np.int64)[kinds]
    chunk = np.concatenate([NO_ROWS, *(places_of[kind] for kind in kinds)]) - 1
    lengths = np.concatenate([NO_ROWS, *(nbytes_of[kind] for kind in kinds)])
    lengths += np.repeat(stem_nbytes, counts)
    is_chunk = chunk >= 0
    chunk += np.where(is_chunk, np.repeat(arrays.first_chunk[order], counts), 0)
    index = np.repeat(np.array(template_of, np.int64)[kinds], counts)
    # Inline chunks, tied ones included, carry their value with every key.
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
            index; a small file is one block.
        chunk_index: the end of the file.
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
        chunks: place and checksum of every row of the plan (one process alone: of every chunk), or,
            merged, of every chunk of all processes. Inline ones have file -1.
        inline: stored bytes of every inline array that this process writes, in their order.
        files: every data file, with a path relative to the database.
        parts: boxes of small leaves that several processes hold in parts, and their values.
        checked: rows that are compared with replicas of other processes.
        checked_crc: CRC-32C of the payload of each of them.
        timeline: when the stages were busy so far.
    """

    chunks: ChunkIndex
    inline: Iterable[bytes | memoryview]
    files: list[WrittenFile]
    parts: Sequence[tuple[HeldBox, bytes]] = ()
    checked: npt.NDArray[np.int64] = field(default_factory=lambda: NO_ROWS)
    checked_crc: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    timeline: Timeline = field(default_factory=Timeline)


def encode_index(
    catalog: Catalog, payload: Payload, *, path: str, save_id: bytes, now_ns: int
) -> Index:
    """Encode B+tree, chunk index and manifest of a save. Blocking.

    `path` of the index file is relative to the database, `save_id` has 16 bytes, and `now_ns` is
    the commit time in nanoseconds since 1970.
    """
    chunks = payload.chunks
    values: list[bytes | memoryview] = [*catalog.templates, *payload.inline, b""]
    in_file = np.flatnonzero(catalog.inline < 0)
    chunk = catalog.chunk[in_file]
    file = np.full(len(catalog.chunk), -1, np.int64)
    offsets, lengths = np.zeros_like(file), np.zeros_like(file)
    file[in_file] = chunks.file[chunk]
    offsets[in_file] = chunks.offset[chunk]
    lengths[in_file] = chunks.nbytes[chunk]
    columns = ValueColumns(
        list(map(values.__getitem__, catalog.inline.tolist())), file, offsets, lengths
    )
    tree = encode_tree(
        catalog.columns,
        columns,
        data_files=list(map(itemgetter(0), payload.files)),
        node_file=path,
        node_offset=0,
        max_decoded_node_nbytes=NODE_NBYTES,
        commit_time_ns=now_ns,
    )
    chunks.file[catalog.inline_chunk] = len(payload.files)
    chunks.offset[catalog.inline_chunk] = tree.inline_offset[catalog.inline_key]
    chunk_index = encode_chunk_index(chunks)
    manifest = encode_manifest(
        save_id,
        tree.version,
        max_inline_value_bytes=INLINE_NBYTES,
        max_decoded_node_bytes=NODE_NBYTES,
    )
    blocks: list[bytes | bytearray] = [
        *tree.blocks,
        encode_timeline(payload.timeline),
        chunk_index,
    ]
    nbytes = sum(map(len, blocks))
    if nbytes <= NODE_NBYTES:
        blocks = [b"".join(blocks)]
    crc = 0
    for block in blocks:
        crc = crc32c(block, crc)
    return Index(blocks, chunk_index, manifest, nbytes, crc)
