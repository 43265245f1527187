"""Plain OCDBT databases of TensorStore: all zarr arrays in them, nested by their names."""

from __future__ import annotations

from typing import Any

from asyncckpt.checkpoint.foreign.listing import list_files, place
from asyncckpt.checkpoint.foreign.tables import KeyTable, read_database
from asyncckpt.checkpoint.foreign.zarr_arrays import array_keys, make_checkpoint, read_arrays
from asyncckpt.checkpoint.metadata import OpenCheckpoint
from asyncckpt.errors import CheckpointNotFoundError, UnsupportedFormatError
from asyncckpt.format.foreign.foreign_tree import ForeignLeaf, nest
from asyncckpt.ports import CheckpointFiles


async def open_ocdbt(files: CheckpointFiles) -> OpenCheckpoint:
    """Open the arrays of the newest version of a database, as a tree of dicts.

    Array names are split at ``/`` into keys; an array at the root of the database is the whole
    tree. Unstored chunks consist of the fill value.

    Raises:
        CheckpointNotFoundError: it has no arrays, or is the database of an asyncckpt checkpoint
            without its record.
    """
    listing = await list_files(files, "")
    listing.refuse_ours()
    table = await read_database(listing)
    return make_checkpoint(files, "ocdbt", await tree_of(table))


async def tree_of(table: KeyTable) -> Any:
    """Return all arrays of a table, nested by their names.

    Raises:
        CheckpointNotFoundError: there are none.
    """
    listing = table.listing
    where = place(listing.files, listing.directory)
    found = await read_arrays(table, array_keys(table), complete=False)
    arrays = [array for array in found if array is not None]
    if not arrays:
        raise CheckpointNotFoundError(
            f"{where}: there are no zarr arrays among its {len(table.places)} keys",
            location=listing.files.location,
            expected="zarr.json or .zarray",
            found=list(table.places)[:5],
        )
    paths = [array.name.split("/") if array.name else () for array in arrays]
    try:
        return nest(paths, [ForeignLeaf("numpy", array) for array in arrays])
    except ValueError as error:
        raise UnsupportedFormatError(
            f"{where}: an array has no place in a tree: {error}; copy it to another name with "
            "TensorStore",
            location=listing.files.location,
            found=str(error),
        ) from None
