"""zarr arrays of a key table, and the checkpoint that they form."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from asyncckpt.checkpoint.foreign.extents import FoundArray, read_extents
from asyncckpt.checkpoint.foreign.listing import BATCH_NBYTES, batches, damaged, located
from asyncckpt.checkpoint.foreign.tables import KeyTable
from asyncckpt.checkpoint.foreign.tensorstore import unpack_blosc
from asyncckpt.checkpoint.metadata import OpenCheckpoint, Storage
from asyncckpt.errors import UnsupportedFormatError
from asyncckpt.format import zarr3
from asyncckpt.format.foreign import zarr2
from asyncckpt.format.foreign.foreign_tree import ForeignLeaf, structure_of
from asyncckpt.format.foreign.zarr_codecs import make_codec
from asyncckpt.format.record_values import ArrayTable, LeafTable
from asyncckpt.format.scalars import JsonValue, encode_scalar
from asyncckpt.format.zarr import MAX_DOCUMENT_NBYTES, ZarrArray
from asyncckpt.ports import CheckpointFiles
from asyncckpt.reports import FileInfo

UNSTORED_CHUNKS = 1 << 19
"""Most unstored chunks: each takes 24 bytes in the table of extents."""

UNSTORED_FILES = 1 << 12
"""Most unstored chunks if each is a file: a missing file may be a link, which takes a request."""

_DECODERS: Mapping[str, Callable[..., ZarrArray | None]] = {
    zarr3.METADATA_NAME: zarr3.decode_metadata,
    zarr2.METADATA_NAME: zarr2.decode_metadata,
}


def array_key(name: str, document: str) -> bytes:
    """Return the key of the metadata document of an array."""
    # Names with lone surrogates are keys of no table.
    return (f"{name}/{document}" if name else document).encode("utf-8", "surrogatepass")


def array_keys(table: KeyTable) -> list[bytes]:
    """Return the keys of the metadata documents of all zarr arrays and groups in a table."""
    documents = {document.encode() for document in _DECODERS}
    return [key for key in table.places if key.rpartition(b"/")[2] in documents]


async def read_arrays(
    table: KeyTable, keys: Sequence[bytes], *, complete: bool
) -> list[FoundArray | None]:
    """Return the arrays with these metadata documents; None for groups.

    `complete` means that the writer stored every chunk.
    """
    listing = table.listing
    listing.check_claimed(
        f"the metadata documents of {len(keys)} arrays",
        sum(min(table.nbytes(key), MAX_DOCUMENT_NBYTES) for key in keys),
        beyond=BATCH_NBYTES,
    )
    known: dict[tuple[str, bytes], ZarrArray | None] = {}
    found: list[FoundArray | None] = []
    for batch in batches(keys, table.nbytes):
        documents = await table.values(batch, max_nbytes=MAX_DOCUMENT_NBYTES)
        for key, data in zip(batch, documents, strict=True):
            name, _, document = _text(table, key).rpartition("/")
            path = listing.path(posixpath.join(name, document))
            if (document, data) not in known:
                with located(listing.files):
                    known[document, data] = _DECODERS[document](data, file=path)
            zarr = known[document, data]
            base = key[: -len(document)]
            found.append(FoundArray(name, table, base, zarr, path, complete) if zarr else None)
    return found


def _text(table: KeyTable, key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError:
        location = table.listing.files.location
        raise UnsupportedFormatError(
            f"{location}: the array {key!r} has a name that is not UTF-8; copy it to another name "
            "with TensorStore",
            location=location,
            found=key,
        ) from None


def make_checkpoint(
    files: CheckpointFiles,
    format: str,
    root: Any,
    *,
    metadata: Mapping[str, JsonValue] | None = None,
    metrics: Mapping[str, float] | None = None,
    created_ns: int = 0,
    database: str = "",
    notes: Sequence[str] = (),
) -> OpenCheckpoint:
    """Return the checkpoint whose tree is `root`, with `FoundArray`s as arrays."""
    try:
        structure, leaves = structure_of(root)
    except ValueError as error:
        reason = f"the tree of the checkpoint is malformed: {error}; use another checkpoint"
        raise damaged(files, None, reason) from None
    arrays: list[FoundArray] = [leaf.array for leaf in leaves if isinstance(leaf, ForeignLeaf)]
    rows = [
        (leaf.kind, None, leaf.extra)
        if isinstance(leaf, ForeignLeaf)
        else (*encode_scalar(leaf), None)
        for leaf in leaves
    ]
    listings = {array.table.listing for array in arrays}
    if len(listings) > 1:  # of several trees, each in a directory of its own
        arrays = [replace(each, name=each.table.listing.path(each.name)) for each in arrays]
    numbers: dict[tuple[ZarrArray, bool, str], int] = {}
    storages: list[Storage] = []
    specs: list[int] = []
    for array in arrays:
        key = array.zarr, array.complete, _driver(array)
        if key not in numbers:
            numbers[key] = len(storages)
            with located(files):
                storages.append(_storage(array))
        specs.append(numbers[key])
    nbytes_of = {path: n for listing in listings for path, n in listing.nbytes_of.items()}
    stored_files = tuple(FileInfo(path, n, None) for path, n in sorted(nbytes_of.items()))
    opened = OpenCheckpoint(
        files=files,
        format=format,
        tree=structure,
        leaves=LeafTable(
            [kind for kind, _, _ in rows],
            [value for _, value, _ in rows],
            {row: extra for row, (_, _, extra) in enumerate(rows) if extra},
        ),
        arrays=ArrayTable([array.name for array in arrays], specs),
        storages=tuple(storages),
        stored_files=stored_files,
        read_extents=partial(read_extents, arrays),
        metadata=metadata or {},
        metrics=metrics or {},
        created_ns=created_ns,
        library=format,
        database=database,
        notes=tuple(notes),
    )
    _check_chunk_count(arrays, opened)
    return opened


def _storage(array: FoundArray) -> Storage:
    zarr = array.zarr
    # A codec does not know which shard it decodes, so it requires only the chunks that lie inside
    # the array in every shard, even in one that reaches past the array.
    inside = tuple(n % c or c for n, c in zip(zarr.spec.shape, zarr.chunk_shape, strict=True))
    codec = make_codec(
        zarr.chain,
        zarr.chunk_shape,
        zarr.spec.dtype,
        fill=zarr.fill_value,
        stored=inside if array.complete else None,
        more={"blosc": unpack_blosc},
        file=array.document,
    )
    return Storage(zarr.spec, zarr.chunk_shape, codec, zarr.fill_value, _driver(array))


def _driver(array: FoundArray) -> str:
    return "zarr" if array.document.endswith(zarr2.METADATA_NAME) else "zarr3"


def _check_chunk_count(arrays: Sequence[FoundArray], opened: OpenCheckpoint) -> None:
    """Check that there are not many more chunks than keys, to bound the table of extents."""
    keys = sum(len(table.places) for table in {array.table for array in arrays})
    in_files = any(array.table.is_directory for array in arrays)
    unstored = UNSTORED_FILES if in_files else UNSTORED_CHUNKS
    if opened.row_count > keys + unstored:
        worst = max(arrays, key=lambda array: array.zarr.grid.chunk_count)
        raise damaged(
            opened.files,
            worst.document,
            f"the arrays claim {opened.row_count} chunks, of which at most {keys} are stored; "
            f"array {worst.name!r} alone claims {worst.zarr.grid.chunk_count}; the metadata is "
            f"damaged or hostile, up to {unstored} chunks may be missing",
            expected=keys + unstored,
            found=opened.row_count,
        )
