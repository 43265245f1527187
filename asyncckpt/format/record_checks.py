"""Consistency checks between the parts of a commit record."""

from __future__ import annotations

import math

import numpy as np

from asyncckpt.format.chunks import index_nbytes
from asyncckpt.format.crc import crc32c
from asyncckpt.format.damage import path_fault
from asyncckpt.format.fields import Fields
from asyncckpt.format.ocdbt.keys import MAX_KEY_NBYTES
from asyncckpt.format.record_values import CommitRecord, Piece
from asyncckpt.format.scalars import SCALAR_KINDS
from asyncckpt.format.zarr3 import CRC_NBYTES
from asyncckpt.options import MAX_PIECES

# Keys append "/zarr.json" or "/c/i/j…" of at most 32 numbers to an array's name.
_MAX_NAME_NBYTES = MAX_KEY_NBYTES - 32 * 20 - 8


def check_consistency(record: CommitRecord, fields: Fields) -> None:
    """Check that counts, indices, names, paths and extents agree.

    Raises:
        CorruptCheckpointError: names the member that does not fit.
    """
    if record.writer >= record.writers:
        raise fields.fault("writer", f"is {record.writer} of {record.writers} writers")
    if "/" in record.database or path_fault(record.database):
        raise fields.fault("database", f"is {record.database[:80]!r}, not one safe path part")
    _check_files(record, fields)
    _check_arrays(record, fields)
    _check_leaves(record, fields)
    rows = 0
    per_spec = [stored.grid.chunk_count for stored in record.specs]
    for array, spec in enumerate(record.arrays.spec):
        if array not in record.arrays.tied:
            rows += per_spec[spec]
    extent = record.chunk_index
    if extent.nbytes != index_nbytes(rows):
        raise fields.fault(
            "chunk_index",
            f"has {extent.nbytes} bytes, {rows} chunks take {index_nbytes(rows)}",
        )
    own = len(record.files) - len(record.fixed)
    if extent.file >= own:
        raise fields.fault("chunk_index", f"names file {extent.file} of {own}")
    if extent.offset + extent.nbytes > record.files[extent.file].nbytes:
        raise fields.fault("chunk_index", f"ends behind {record.files[extent.file].path}")
    if extent.data is not None:
        found = crc32c(memoryview(extent.data)[:-CRC_NBYTES])
        if (len(extent.data), found) != (extent.nbytes, extent.crc32c):
            raise fields.fault("chunk_index.data", "is not the index that its CRC-32C says")


def _check_files(record: CommitRecord, fields: Fields) -> None:
    for row, entry in enumerate(record.files):
        reason = path_fault(entry.path)
        if reason is not None:
            raise fields.fault(f"files[{row}].path", f"{entry.path[:200]!r} {reason}")
    if len({entry.path for entry in record.files}) != len(record.files):
        raise fields.fault("files", "names a path twice")
    for row, name in enumerate(record.fixed):
        for path in filter(None, (name.path, name.object)):
            reason = path_fault(path)
            if reason is not None:
                raise fields.fault(f"fixed[{row}]", f"{path[:200]!r} {reason}")
        if name.object is None and name.path != record.manifest_path:
            raise fields.fault(f"fixed[{row}].object", "is missing")


def _check_arrays(record: CommitRecord, fields: Fields) -> None:
    names, arrays = record.arrays.name, record.arrays
    if len(arrays.spec) != len(names):
        raise fields.fault("arrays.spec", f"has {len(arrays.spec)} entries for {len(names)} names")
    if len(set(names)) != len(names):
        raise fields.fault("arrays.name", "names an array twice")
    joined = "\0".join(names)
    if names and joined.count("\0") != len(names) - 1:
        raise fields.fault("arrays.name", "has a name with a NUL character")
    try:
        joined.encode()
    except UnicodeEncodeError:
        raise fields.fault("arrays.name", "has a name that is not valid Unicode") from None
    for name in names:
        if not name or (len(name) * 4 > _MAX_NAME_NBYTES and len(name.encode()) > _MAX_NAME_NBYTES):
            raise fields.fault("arrays.name", f"has an empty or too long name: {name[:80]!r}")
    for array, source in arrays.tied.items():
        if arrays.spec[array] != arrays.spec[source]:
            raise fields.fault(f"arrays.tied[{array}]", f"and array {source} differ in their spec")


def _check_leaves(record: CommitRecord, fields: Fields) -> None:
    pieces = record.leaves.pieces
    owned = [piece.array for parts in pieces.values() for piece in parts]
    if len(set(owned)) != len(owned):
        raise fields.fault("leaves.pieces", "names an array twice")
    for leaf, parts in pieces.items():
        kind = record.leaves.kind[leaf]
        reason = "is a scalar" if kind in SCALAR_KINDS else _pieces_fault(record, parts)
        if reason is not None:
            raise fields.fault(f"leaves.pieces[{leaf}]", reason)
    scalars = sum(kind in SCALAR_KINDS for kind in record.leaves.kind)
    whole = len(record.leaves.kind) - scalars - len(pieces)
    # Behind the arrays of leaves there may be scalars once more, as arrays for other readers.
    if not 0 <= len(record.arrays.name) - whole - len(owned) <= scalars:
        raise fields.fault(
            "arrays.name",
            f"has {len(record.arrays.name)} entries, the leaves own {whole + len(owned)} arrays "
            f"and {scalars} scalars",
        )


def _pieces_fault(record: CommitRecord, pieces: tuple[Piece, ...]) -> str | None:
    """Explain why the pieces do not tile a box; return None when they do."""
    if len(pieces) > MAX_PIECES:
        return f"has more than {MAX_PIECES} pieces"
    specs = [record.specs[record.arrays.spec[piece.array]].spec for piece in pieces]
    rank = len(specs[0].shape)
    if any(spec.dtype != specs[0].dtype or len(spec.shape) != rank for spec in specs):
        return "has pieces of different dtypes or ranks"
    if any(len(piece.offset) != rank for piece in pieces):
        return f"has an offset that is not of rank {rank}"
    starts = np.array([piece.offset for piece in pieces], np.int64).reshape(len(pieces), rank)
    shapes = np.array([spec.shape for spec in specs], np.int64).reshape(len(pieces), rank)
    stops = starts + shapes
    whole = stops.max(axis=0) if rank else np.empty(0, np.int64)
    if sum(spec.size for spec in specs) != math.prod(whole.tolist()):
        return "has pieces that leave gaps or overlap"
    filled = np.flatnonzero((shapes > 0).all(axis=1))
    for row in filled.tolist():
        others = filled[filled > row]
        apart = (starts[others] >= stops[row]) | (stops[others] <= starts[row])
        if not apart.any(axis=1).all():
            return "has pieces that overlap"
    return None
