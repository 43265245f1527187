"""Trees that Orbax saved: documents, strings and arrays of one item."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from asyncckpt.checkpoint.foreign.extents import FoundArray
from asyncckpt.checkpoint.foreign.listing import (
    Listing,
    concurrently,
    damaged,
    located,
    refuse_link,
)
from asyncckpt.checkpoint.foreign.ocdbt import tree_of
from asyncckpt.checkpoint.foreign.tables import KeyTable, directory_table, merge, read_database
from asyncckpt.checkpoint.foreign.zarr_arrays import array_key, read_arrays
from asyncckpt.checkpoint.metadata import missing
from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format import zarr3
from asyncckpt.format.damage import path_fault
from asyncckpt.format.foreign import zarr2
from asyncckpt.format.foreign.foreign_tree import EMPTY_NAMEDTUPLE, ForeignLeaf, nest
from asyncckpt.format.foreign.orbax_read import (
    CHECKPOINT_METADATA_FILE,
    MAX_DOCUMENT_NBYTES,
    PROCESS_DIRECTORY,
    TreeEntry,
    TreeMetadata,
    decode_array_metadatas,
    decode_metadata,
    find_string,
    parse_document,
)
from asyncckpt.format.ocdbt.manifest import MANIFEST_NAME
from asyncckpt.format.orbax import (
    ARRAY_METADATA_FILE,
    ARRAY_METADATAS,
    EMPTY,
    KINDS,
    METADATA_FILE,
    STRINGS_FILE,
)
from asyncckpt.format.scalars import JsonValue
from asyncckpt.ports import CheckpointFiles
from asyncckpt.spec import numeric_class

T = TypeVar("T")

ABSENT = object()
"""Marks an item without a tree or without JSON; None is a value of both."""

_EMPTY: Mapping[str, Any] = {
    "None": None,
    "Dict": {},
    "List": [],
    "Tuple": (),
    "NamedTuple": EMPTY_NAMEDTUPLE,
}


@dataclass(slots=True, eq=False)
class Item:
    """Content of a directory.

    Attributes:
        tree: its tree as in `foreign_tree`, or `ABSENT`.
        directory: directory of the tree's database, if one database holds all its arrays.
        document: its JSON, or `ABSENT`; for nested items, their JSON by name.
        custom: JSON that the user saved with the tree.
        notes: remarks on parts that could not be read.
    """

    tree: Any = ABSENT
    directory: str = ""
    document: Any = ABSENT
    custom: dict[str, JsonValue] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


async def read_document(files: CheckpointFiles, path: str, decode: Callable[..., T]) -> T:
    """Read and decode a document; errors name the file and the checkpoint."""
    data = await files.read(path, max_nbytes=MAX_DOCUMENT_NBYTES)
    with located(files):
        return decode(data, file=path)


async def read_tree(listing: Listing) -> Item:
    """Read the tree in the directory of a listing.

    Without `_METADATA`, arrays are nested by their names, as in a plain database.

    Raises:
        CheckpointNotFoundError: there are no arrays, or it is the database of an asyncckpt
            checkpoint without its record.
    """
    listing.refuse_ours()
    metadata = None
    path = listing.path(METADATA_FILE)
    if await listing.exists(METADATA_FILE):
        metadata = await read_document(listing.files, path, decode_metadata)
    table = await _table(listing, metadata)
    is_database = not table.is_directory and listing.has(MANIFEST_NAME)
    item = Item(directory=(listing.directory or ".") if is_database else "")
    if metadata is None:
        item.tree = await tree_of(table)
        if listing.has(STRINGS_FILE) or listing.has(CHECKPOINT_METADATA_FILE):
            item.notes.append(
                f"{path} is missing: lists are dicts, and strings and empty containers are left out"
            )
        return item
    leaves = await _leaves(listing, table, metadata)
    try:
        item.tree = nest([entry.path for entry in metadata.entries], leaves, strict=True)
    except ValueError as error:
        reason = f"{METADATA_FILE} contradicts itself: {error}; use another checkpoint"
        raise _contradiction(listing, reason, found=str(error)) from None
    if isinstance(metadata.custom, dict):
        item.custom = metadata.custom
    elif metadata.custom is not None:
        item.custom = {"custom_metadata": metadata.custom}
    return item


def _contradiction(
    listing: Listing, text: str, expected: object = None, found: object = None
) -> CorruptCheckpointError:
    """Return the error for metadata that contradicts the files or itself."""
    path = listing.path(METADATA_FILE)
    return damaged(listing.files, path, text, expected=expected, found=found)


async def _table(listing: Listing, metadata: TreeMetadata | None) -> KeyTable:
    use_ocdbt = None if metadata is None else metadata.use_ocdbt
    if use_ocdbt is not False:
        if await listing.exists(MANIFEST_NAME):
            return await read_database(listing)
        base = listing.path("")
        split = [posixpath.split(path.removeprefix(base)) for path in listing.nbytes_of]
        directories = {directory for directory, name in split if name == MANIFEST_NAME}
        processes = sorted(filter(PROCESS_DIRECTORY.fullmatch, directories))
        if processes:
            read = partial(read_database, listing)
            return merge(await concurrently(listing.files, read, processes))
        # Orbax writes no database for a tree without arrays.
        kinds = {entry.kind for entry in metadata.entries} if metadata is not None else set()
        if use_ocdbt and not kinds <= {*EMPTY, "string"}:
            raise missing(listing.files.location, listing.path(MANIFEST_NAME))
    return directory_table(listing)


async def _leaves(listing: Listing, table: KeyTable, metadata: TreeMetadata) -> list[Any]:
    arrays = await _arrays(listing, table, metadata)
    strings = await _strings(listing, metadata)
    implementations = await _implementations(listing, metadata)
    leaves: list[Any] = []
    for entry in metadata.entries:
        if entry.kind in EMPTY:
            leaves.append(_EMPTY[entry.kind])
            continue
        name = entry.name
        if entry.kind == "string":
            leaves.append(strings[name])
        elif entry.kind == "jax.Array":
            extra = {"prng_impl": implementations[name]} if name in implementations else None
            leaves.append(ForeignLeaf("jax", arrays[name], extra))
        else:
            spec = arrays[name].zarr.spec
            number = entry.kind == "scalar" and not spec.shape
            extra = {"python": numeric_class(spec.dtype)} if number else None
            leaves.append(ForeignLeaf("numpy", arrays[name], extra))
    return leaves


async def _arrays(
    listing: Listing, table: KeyTable, metadata: TreeMetadata
) -> dict[str, FoundArray]:
    """Find the arrays of all leaves that are arrays, by name."""
    location = listing.files.location
    keys: dict[str, bytes] = {}
    names = (zarr3.METADATA_NAME, zarr2.METADATA_NAME)
    for entry in metadata.entries:
        if entry.kind in EMPTY or entry.kind == "string":
            continue
        if entry.elsewhere:
            raise UnsupportedFormatError(
                f"{location}: the value of {entry.name!r} is not among the arrays but in the file "
                "`checkpoint` of an older release of Orbax, which is not read; restore it with "
                "that release, and save it again",
                file=listing.path(METADATA_FILE),
                location=location,
                found=entry.kind,
            )
        if entry.name in keys:
            raise _contradiction(
                listing,
                f"two leaves have the array {entry.name!r}: Orbax joins keys by dots, and one leaf "
                "has overwritten the other; leave both out with include=",
                found=entry.name,
            )
        for document in names if metadata.use_zarr3 else reversed(names):
            key = array_key(entry.name, document)
            if key in table.places:
                keys[entry.name] = key
                break
        else:
            await _refuse(listing, table, metadata, entry)
    found = await read_arrays(table, list(keys.values()), complete=metadata.complete)
    arrays = {}
    for name, array in zip(keys, found, strict=True):
        if array is None:
            reason = f"{name!r} is a zarr group, {METADATA_FILE} says an array; use another copy"
            raise _contradiction(listing, reason)
        arrays[name] = array
    return arrays


async def _refuse(
    listing: Listing, table: KeyTable, metadata: TreeMetadata, entry: TreeEntry
) -> None:
    """Raise the error for an array that is missing."""
    location = listing.files.location
    document = zarr3.METADATA_NAME if metadata.use_zarr3 else zarr2.METADATA_NAME
    if entry.kind not in KINDS:
        raise UnsupportedFormatError(
            f"{location}: {entry.name!r} was written by the handler {entry.kind!r}, which is "
            "not known here, and there is no array of that name; leave it out with include=",
            file=listing.path(METADATA_FILE),
            location=location,
            found=entry.kind,
        )
    path = listing.path(posixpath.join(entry.name, document))
    if table.is_directory and path_fault(path) is None:
        await refuse_link(listing.files, path)
    raise _contradiction(
        listing,
        f"the array {entry.name!r} has no {document}, {METADATA_FILE} lists it; use another copy",
        expected=document,
        found="nothing",
    )


async def _strings(listing: Listing, metadata: TreeMetadata) -> dict[str, str]:
    names = [entry.name for entry in metadata.entries if entry.kind == "string"]
    if not names:
        return {}
    path = listing.path(STRINGS_FILE)
    if not await listing.exists(STRINGS_FILE):
        raise missing(listing.files.location, path)
    parse = partial(parse_document, what="the document of strings")
    document = await read_document(listing.files, path, parse)
    found: dict[str, str] = {}
    for name in names:
        text = find_string(document, name)
        if text is None:
            raise damaged(
                listing.files,
                path,
                f"{path} has no string {name!r}, {METADATA_FILE} lists it; use another checkpoint",
                expected=name,
                found="nothing",
            )
        found[name] = text
    return found


async def _implementations(listing: Listing, metadata: TreeMetadata) -> dict[str, str]:
    """Read the PRNG implementations of key arrays, by name."""
    if not any(entry.kind == "jax.Array" for entry in metadata.entries):
        return {}
    directory = listing.path(ARRAY_METADATAS)
    await listing.exists(ARRAY_METADATA_FILE)  # raises if it is a link
    paths = sorted(p for p in listing.nbytes_of if posixpath.dirname(p) == directory)
    read = partial(read_document, listing.files, decode=decode_array_metadatas)
    found = await concurrently(listing.files, read, paths)
    return {name: prng for document in found for name, prng in document.items()}
