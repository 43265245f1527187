"""The commit record `checkpoint.json`, which is written last and makes a checkpoint exist.

It is one JSON object in UTF-8 without spaces. Its last member is ``"crc32c"``, and the file ends
with exactly these 12 bytes: a quote, 8 lower-case hex digits, ``"}`` and a line feed. The digits
are the CRC-32C of every byte before that quote, so the name ``"crc32c":`` is covered. Every version
of the record ends like this and begins with the members ``format``, ``version`` and ``save_id``.

Version 2 lists the files that are written after the record (``fixed``) right after these members,
so that the beginning of a record is enough to find them. It may also contain the chunk index.
"""

# Encoding runs the checks of decoding, so that every written record can be read.

from __future__ import annotations

import base64
import json
import math
import re
import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np

from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError, UsageError
from asyncckpt.format.chunks import index_nbytes
from asyncckpt.format.crc import crc32c
from asyncckpt.format.damage import corrupt, path_fault
from asyncckpt.format.fields import MAX_RANK, check_depth, check_form
from asyncckpt.format.ocdbt.keys import MAX_KEY_NBYTES
from asyncckpt.format.record_values import (
    ArrayTable,
    CommitRecord,
    FixedName,
    IndexExtent,
    LeafTable,
    Outline,
    Piece,
    StoredSpec,
)
from asyncckpt.format.scalars import SCALAR_KINDS, JsonValue, decode_base64, decode_scalar
from asyncckpt.format.zarr3 import CRC_NBYTES
from asyncckpt.options import MAX_PIECES, MAX_RECORD_NBYTES, STEP_MAX
from asyncckpt.reports import FileInfo
from asyncckpt.spec import DTYPES, array_spec, nonempty_size

RECORD_NAME = "checkpoint.json"
RECORD_VERSION = 2

STEP_NAME = re.compile(r"0|[1-9][0-9]{0,18}")
"""Names of steps; other names are ignored and never deleted."""

_FORMAT = "asyncckpt"
_WHAT = "the commit record"
RECORD_TAIL_NBYTES = 12
"""Bytes of the checksum that ends a record, from its first quote to the line feed."""

_TAIL = re.compile(rb'"[0-9a-f]{8}"\}\n')

_MAX_COUNT = 1 << 32

_KIND = re.compile(r"[a-z][a-z0-9_.]{0,63}")
_ARRAY_INDEX = re.compile(r"0|[1-9][0-9]{0,17}")
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

# Keys are an array's name and "/zarr.json", or "/c/i/j…" with at most 32 numbers.
_MAX_NAME_NBYTES = MAX_KEY_NBYTES - 32 * 20 - 8

_HEAD = re.compile(
    rb'\{"format":"asyncckpt","version":([0-9]{1,9}),"save_id":"([0-9a-f]{8,64})"(,"fixed":)?'
)
"""The beginning of every record."""

_EPOCH = re.compile(rb'"step":(?:null|[0-9]{1,19}),"epoch":([0-9]{1,19}),"writer":')
"""Members after `fixed`. Nothing before them matches: rows of `fixed` have other names, and quotes
in strings are escaped."""

_MAX = (1 << 63) - 1
_CRC = re.compile(r"[0-9a-f]{8}")
_FILE = {"path": str, "nbytes": _MAX, "crc32c": _CRC}
_FIXED = [{**_FILE, "md5": re.compile(r"[0-9a-f]{32}"), "object": (str,)}]
_INDEX = {"file": _MAX, "offset": _MAX, "nbytes": _MAX, "crc32c": _CRC}

_MEMBERS: dict[str, Any] = {
    "format": str,
    "version": _MAX,
    "save_id": re.compile(r"[0-9a-f]{8,64}"),
    "fixed": _FIXED,
    "step": (STEP_MAX,),
    "epoch": _MAX,
    "writer": _MAX_COUNT,
    "writers": _MAX_COUNT,
    "plan_digest": re.compile(r"[0-9a-f]{0,128}"),
    "created_ns": _MAX,
    "library": re.compile(r"[\x20-\x7e]{1,200}"),
    "metadata": dict,
    "metrics": dict,
    "database": str,
    "tree": object,
    "leaves": {"kinds": [_KIND], "kind": [int], "values": list, "extra": dict, "pieces": dict},
    "specs": [{"shape": [_MAX], "dtype": str, "chunk_shape": [_MAX], "zstd": object}],
    "arrays": {"name": [str], "spec": [int], "tied": dict},
    "files": [_FILE],
    "chunk_index": {**_INDEX, "data": (str,)},
    "manifest": str,
    "crc32c": str,
}
"""Members of version 2 and their forms."""

_PLAIN = ("step", "epoch", "writer", "writers", "plan_digest", "created_ns", "library")
"""Members that equal attributes of the record, in the order of the document."""

_TABLES = ("tree", "leaves", "specs", "arrays")
"""Members that depend only on tree and layout, except for the values of scalars."""

_OWN_MEMBERS = {k: form for k, form in _MEMBERS.items() if k not in _TABLES}

_MEMBERS_1 = {k: form for k, form in _MEMBERS.items() if k != "fixed"} | {"chunk_index": _INDEX}


EncodedTables = tuple[str, str]
"""Checked JSON that all records of one tree and layout share: the members `_TABLES` up to the
values of scalars, and after these values."""


class _UnknownDtypeError(ValueError):
    """A dtype unknown to this release; the text is its name."""


def encode_tables(
    tree: JsonValue, leaves: LeafTable, specs: Sequence[StoredSpec], arrays: ArrayTable
) -> EncodedTables:
    """Encode and check the tables that several records can share.

    Raises:
        UsageError: a string is not valid Unicode.
        ValueError: the tables contradict each other.
    """
    kinds = sorted(set(leaves.kind))
    code_of = dict(zip(kinds, range(len(kinds)), strict=True))
    codes = list(map(code_of.__getitem__, leaves.kind))
    stored: list[Any] = []
    for one in specs:
        row = {"shape": one.spec.shape, "dtype": one.spec.dtype}
        stored.append({**row, "chunk_shape": one.chunk_shape, "zstd": one.zstd_level})
    owned = _json({"extra": dict(leaves.extra), "pieces": dict(leaves.pieces)})
    columns = {"name": arrays.name, "spec": arrays.spec, "tied": dict(arrays.tied)}
    tables = (
        f'"tree":{_json(tree)},"leaves":{{"kinds":{_json(kinds)},"kind":{_json(codes)},"values":',
        f',{owned[1:]},"specs":{_json(stored)},"arrays":{_json(columns)}',
    )
    # The document that a reader will decode: JSON changes neither the tree nor plain lists.
    values = json.loads(_json(_scalars(leaves)))
    document = {
        "tree": tree,
        "leaves": {"kinds": kinds, "kind": codes, "values": values, **json.loads(owned)},
        "specs": json.loads(_json(stored)),
        "arrays": {**columns, "tied": json.loads(_json(columns["tied"]))},
    }
    try:
        check_form(document, {name: _MEMBERS[name] for name in _TABLES})
        _tables(document)
    except ValueError as error:
        raise ValueError(f"the record contradicts itself: {error}") from error
    return tables


def encode_record(record: CommitRecord, tables: EncodedTables | None = None) -> bytes:
    """Return the bytes of the record; equal records have equal bytes.

    `tables` are its encoded tables, possibly from an earlier record; None encodes them.

    Raises:
        UsageError: the metadata cannot be written as JSON or is nested too deeply, or the record
            is longer than readers allow.
        ValueError: the record contradicts itself.
    """
    index, fixed = record.chunk_index, record.fixed
    own = record.files[: len(record.files) - len(fixed)]
    if record.files[len(own) :] != fixed:
        raise ValueError("the files with fixed names do not come last")
    try:
        check_depth(dict(record.metadata), "metadata")
    except ValueError as error:  # that of a foreign checkpoint is a level deeper than it was
        raise UsageError(f"{error}; save it as leaves") from None
    if tables is None:
        tables = encode_tables(record.tree, record.leaves, record.specs, record.arrays)
    head = {
        "format": _FORMAT,
        "version": RECORD_VERSION,
        "save_id": record.save_id,
        "fixed": [{**_row(f), "md5": f.md5, "object": f.object} for f in fixed],
        **{name: getattr(record, name) for name in _PLAIN},
        "metadata": dict(record.metadata),
        "metrics": {n: v if math.isfinite(v) else repr(v) for n, v in record.metrics.items()},
        "database": record.database,
    }
    tail = {
        "files": list(map(_row, own)),
        "chunk_index": {
            "file": index.file,
            "offset": index.offset,
            "nbytes": index.nbytes,
            "crc32c": f"{index.crc32c:08x}",
            "data": None if index.data is None else base64.b64encode(index.data).decode(),
        },
        "manifest": base64.b64encode(record.manifest).decode(),
    }
    first, values, last = _json(head), _json(_scalars(record.leaves)), _json(tail)
    try:
        _values(record.leaves.kind, json.loads(values))
        document = {**json.loads(first), **json.loads(last), "crc32c": ""}
        check_form(document, _OWN_MEMBERS)
        _record(document, record.tree, record.leaves, record.specs, record.arrays)
    except ValueError as error:
        raise ValueError(f"the record contradicts itself: {error}") from error
    data = seal(f"{first[:-1]},{tables[0]}{values}{tables[1]},{last[1:]}")
    if len(data) > MAX_RECORD_NBYTES:
        raise UsageError(
            f"the commit record would have {len(data)} bytes, and readers refuse more than "
            f"{MAX_RECORD_NBYTES}; store long strings as bytes, and lists of numbers as one array",
            expected=MAX_RECORD_NBYTES,
            found=len(data),
        )
    return data


def _row(file: FileInfo) -> dict[str, JsonValue]:
    return {"path": file.path, "nbytes": file.nbytes, "crc32c": f"{file.crc32c:08x}"}


def _scalars(leaves: LeafTable) -> list[JsonValue]:
    return [value for value in leaves.value if value is not None]


def _json(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"a string of the record is not valid Unicode ({error})") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"metadata cannot be written as JSON ({error})") from None
    return text


def seal(text: str) -> bytes:
    """Return the bytes of a JSON object, with its checksum added as the last member."""
    body = text[:-1].encode() + b',"crc32c":'
    return body + b'"%08x"}\n' % crc32c(body)


def decode_record(data: bytes, *, location: str) -> CommitRecord:
    """Decode a commit record; `location` is named in errors.

    Raises:
        CorruptCheckpointError: the record is damaged, contradicts itself, or names unsafe paths.
        UnsupportedFormatError: it is intact, but of a newer version or with a newer dtype.
    """

    def damaged(
        reason: str, *, expected: object = None, found: object = None
    ) -> CorruptCheckpointError:
        error = corrupt(_WHAT, reason, file=location, expected=expected, found=found)
        error.location = location
        error.file = RECORD_NAME
        return error

    if len(data) > MAX_RECORD_NBYTES:
        raise damaged(f"it has over {MAX_RECORD_NBYTES} bytes")
    if not _TAIL.fullmatch(data[-RECORD_TAIL_NBYTES:]):
        raise damaged("it does not end with its checksum")
    stored = int(data[-RECORD_TAIL_NBYTES + 1 : -3], 16)
    crc = crc32c(memoryview(data)[:-RECORD_TAIL_NBYTES])
    if crc != stored:
        raise damaged(
            f"its CRC-32C is {crc:08x}, the stored one {stored:08x}",
            expected=f"{stored:08x}",
            found=f"{crc:08x}",
        )
    check_version(data, location=location)
    try:
        document = json.loads(data.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise damaged(f"it is not JSON ({error})") from None
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise damaged(f"its format is not {_FORMAT!r}")
    version = document.get("version")
    if type(version) is not int or not 1 <= version <= RECORD_VERSION:
        raise damaged(f"its version is {repr(version)[:40]}")
    try:
        check_form(document, _MEMBERS if version > 1 else _MEMBERS_1)
        return _record(document, document["tree"], *_tables(document))
    except _UnknownDtypeError as error:
        text = f"the dtype {str(error)!r}, which this release does not know"
        raise _newer(text, location, None, str(error)) from None
    except ValueError as error:
        raise damaged(str(error)) from None


def check_version(data: bytes, *, location: str) -> None:
    """Check the version of an intact commit record without decoding it.

    Raises:
        UnsupportedFormatError: this release cannot read it.
    """
    found = _HEAD.match(data)
    if found is not None and (version := int(found[1])) > RECORD_VERSION:
        text = f"version {version}, this release reads versions up to {RECORD_VERSION}"
        raise _newer(text, location, RECORD_VERSION, version)


def _newer(what: str, location: str, expected: object, found: object) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"{location}: the commit record has {what}; restore with a newer release",
        location=location,
        file=RECORD_NAME,
        expected=expected,
        found=found,
    )


def is_record(data: bytes) -> bool:
    """Return whether these bytes are a commit record with a valid checksum, without decoding it."""
    return data.startswith(b'{"format":"asyncckpt",') and is_sealed(data)


def is_sealed(data: bytes) -> bool:
    """Return whether these bytes end with a valid checksum, as `seal` writes it."""
    found = crc32c(memoryview(data)[:-RECORD_TAIL_NBYTES])
    return data[-RECORD_TAIL_NBYTES:] == b'"%08x"}\n' % found


def save_id_of(data: bytes) -> str | None:
    """Return the save id of a commit record with a valid checksum; None for anything else."""
    found = _HEAD.match(data) if is_record(data) else None
    return None if found is None else found[2].decode()


def epoch_of(data: bytes) -> int | None:
    """Return the epoch from a commit record or its beginning; None if there is none."""
    found = _EPOCH.search(data)
    return None if found is None else int(found[1])


def outline_of(data: bytes, *, head: bool = False) -> Outline | None:
    """Return the outline of a commit record; None for anything else.

    For a newer version it has only the save id. With `head`, `data` is the beginning of a record,
    which no checksum covers: change nothing because of it. The outline then has only the save id
    and `fixed`; it is None if `data` ends before these do.
    """
    found = _HEAD.match(data)
    if found is None or not (head or is_record(data)):
        return None
    save_id = found[2].decode()
    if head and found[3] is None:
        return Outline(save_id)
    if head:
        try:
            text = data[found.end() :].decode(errors="ignore")
            rows, _ = json.JSONDecoder().raw_decode(text)
            check_form(rows, _FIXED)
            return Outline(save_id, fixed=tuple(map(_fixed, rows)))
        except (ValueError, RecursionError):
            return None
    try:
        record = decode_record(data, location="")
    except (CorruptCheckpointError, UnsupportedFormatError):
        return Outline(save_id)
    return Outline(
        save_id,
        frozenset(entry.path for entry in record.files),
        record.fixed,
        {record.manifest_path: record.manifest},
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _record(
    document: dict[str, Any],
    tree: JsonValue,
    leaves: LeafTable,
    specs: tuple[StoredSpec, ...],
    arrays: ArrayTable,
) -> CommitRecord:
    """Return the record in a JSON document of checked form, given its checked tables.

    Raises:
        ValueError: a member is wrong; names it and says why.
    """
    check_depth(document["metadata"], "metadata")
    index = document["chunk_index"]
    files = [
        FileInfo(row["path"], row["nbytes"], int(row["crc32c"], 16)) for row in document["files"]
    ]
    files += map(_fixed, document.get("fixed", ()))
    encoded = index.get("data")
    record = CommitRecord(
        save_id=document["save_id"],
        **{name: document[name] for name in _PLAIN},
        tree=tree,
        leaves=leaves,
        specs=specs,
        arrays=arrays,
        files=tuple(files),
        chunk_index=IndexExtent(
            index["file"],
            index["offset"],
            index["nbytes"],
            int(index["crc32c"], 16),
            None if encoded is None else decode_base64(encoded, "chunk_index.data"),
        ),
        manifest=decode_base64(document["manifest"], "manifest"),
        metadata=document["metadata"],
        metrics={name: _metric(name, value) for name, value in document["metrics"].items()},
        database=document["database"],
    )
    _check_files(record)
    return record


def _tables(document: dict[str, Any]) -> tuple[LeafTable, tuple[StoredSpec, ...], ArrayTable]:
    """Return leaves, specs and arrays of a document, after checking them against each other."""
    check_depth(document["tree"], "tree")
    columns = document["arrays"]
    tied = _by_index(columns["tied"], len(columns["name"]), "arrays.tied")
    arrays = ArrayTable(columns["name"], columns["spec"], tied)
    leaves = _leaves(document["leaves"], len(arrays.name))
    specs = tuple(map(_spec, document["specs"]))
    _check_arrays(leaves, specs, arrays)
    return leaves, specs, arrays


def _fixed(row: dict[str, Any]) -> FixedName:
    crc = int(row["crc32c"], 16)
    return FixedName(row["path"], row["nbytes"], crc, row["md5"], row["object"])


def _spec(row: dict[str, Any]) -> StoredSpec:
    shape, chunk_shape, dtype, level = row["shape"], row["chunk_shape"], row["dtype"], row["zstd"]
    if dtype not in DTYPES:
        raise _UnknownDtypeError(dtype[:40])
    if len(shape) > MAX_RANK or len(chunk_shape) != len(shape):
        raise ValueError(f"specs has a shape and chunk_shape not of one rank of at most {MAX_RANK}")
    if 0 in chunk_shape:
        raise ValueError("specs has a chunk_shape that has a zero")
    if level is not None and (type(level) is not int or not -(1 << 17) <= level <= 22):
        raise ValueError(f"specs has zstd {repr(level)[:40]}, not a level or null")
    stored = StoredSpec(array_spec(tuple(shape), dtype), tuple(chunk_shape), level)
    nbytes = nonempty_size(stored.spec.shape) * stored.spec.itemsize
    if max(nbytes, stored.chunk_nbytes, stored.grid.chunk_count) >= 1 << 62:
        raise ValueError(f"specs has the shape {shape} of an array beyond 2^62 bytes")
    return stored


def _leaves(table: dict[str, Any], array_count: int) -> LeafTable:
    kinds, codes, values = table["kinds"], table["kind"], table["values"]
    if len(set(kinds)) != len(kinds):
        raise ValueError("leaves.kinds names a kind twice")
    if codes and not 0 <= min(codes) <= max(codes) < len(kinds):
        raise ValueError(f"leaves.kind has an entry that is not between 0 and {len(kinds) - 1}")
    kind = list(map(kinds.__getitem__, codes))
    column = _values(kind, values)
    extra = _by_index(table["extra"], len(kind), "leaves.extra")
    for leaf, facts in extra.items():
        name = f"leaves.extra[{leaf}]"
        check_form(facts, dict, name)
        check_depth(facts, name)
    pieces = _by_index(table["pieces"], len(kind), "leaves.pieces")
    for leaf, items in pieces.items():
        name = f"leaves.pieces[{leaf}]"
        if not isinstance(items, list) or not items:
            raise ValueError(f"{name} is not a list of pieces")
        for item in items:
            if not isinstance(item, list) or list(map(type, item)) != [list, int]:
                raise ValueError(f"{name} has an entry that is not [offset, array]")
            check_form(item[0], [1 << 62], name)
            if not 0 <= item[1] < array_count:
                raise ValueError(f"{name} has an array that is not [offset, array] of the record")
        pieces[leaf] = tuple([Piece(tuple(offset), array) for offset, array in items])
    return LeafTable(kind, column, extra, pieces)


def _values(kind: Sequence[str], values: Sequence[JsonValue]) -> list[JsonValue]:
    """Return the value of every leaf, given the values of the scalars."""
    rows = [row for row, name in enumerate(kind) if name in SCALAR_KINDS]
    if len(rows) != len(values):
        raise ValueError(f"leaves.values has {len(values)} entries for {len(rows)} scalar leaves")
    column: list[JsonValue] = [None] * len(kind)
    for row, value in zip(rows, values, strict=True):
        try:
            decode_scalar(kind[row], value)
        except ValueError as error:
            raise ValueError(f"leaves.values (leaf {row}) {error}") from None
        column[row] = value
    return column


def _by_index(table: dict[str, Any], below: int, name: str) -> dict[int, Any]:
    """Convert the keys of an object to indices below `below`; they are canonical decimal."""
    result = {}
    for key, value in table.items():
        if not _ARRAY_INDEX.fullmatch(key) or int(key) >= below:
            raise ValueError(f"{name} has the key {key[:40]!r}, not an index below {below}")
        result[int(key)] = value
    return result


def _metric(name: str, value: Any) -> float:
    if isinstance(value, str) and value in _NON_FINITE:
        return _NON_FINITE[value]
    if type(value) not in (int, float) or abs(value) > sys.float_info.max:
        raise ValueError(f"metrics[{name[:40]!r}] is {repr(value)[:40]}, not a number")
    return float(value)


# ------------------------------------------------------- checks of the parts against each other


def _check_files(record: CommitRecord) -> None:
    """Check the paths, and the location and size of the chunk index."""
    if record.writer >= record.writers:
        raise ValueError(f"writer is {record.writer} of {record.writers} writers")
    if "/" in record.database or path_fault(record.database):
        raise ValueError(f"database is {record.database[:80]!r}, not one safe path part")
    paths: list[str] = list(map(attrgetter("path"), record.files))
    if len(set(paths)) != len(paths):
        raise ValueError("files names a path twice")
    fixed = record.fixed
    for name in fixed:
        if name.object is not None:
            paths.append(name.object)
        elif name.path != record.manifest_path:
            raise ValueError(f"fixed ({name.path[:200]!r}) object is missing")
    for path in paths:
        reason = path_fault(path)
        if reason is not None:
            raise ValueError(f"files name {path[:200]!r}, which {reason}")
    arrays, extent = record.arrays, record.chunk_index
    counts = np.array([stored.grid.chunk_count for stored in record.specs], np.int64)
    rows = sum(counts[np.array(arrays.spec, np.intp)[arrays.own()]].tolist())
    if extent.nbytes != index_nbytes(rows):
        raise ValueError(
            f"chunk_index has {extent.nbytes} bytes, {rows} chunks take {index_nbytes(rows)}"
        )
    most = len(record.files) - len(fixed)
    if extent.file >= most:
        raise ValueError(f"chunk_index names file {extent.file} of {most}")
    if extent.offset + extent.nbytes > record.files[extent.file].nbytes:
        raise ValueError(f"chunk_index ends behind {record.files[extent.file].path}")
    if extent.data is not None:
        found = crc32c(memoryview(extent.data)[:-CRC_NBYTES])
        if (len(extent.data), found) != (extent.nbytes, extent.crc32c):
            raise ValueError("chunk_index.data is not the index that its CRC-32C says")


def _check_arrays(leaves: LeafTable, specs: Sequence[StoredSpec], arrays: ArrayTable) -> None:
    """Check the names, specs and ties of the arrays, and that the leaves own all of them."""
    names = arrays.name
    if len(arrays.spec) != len(names):
        raise ValueError(f"arrays.spec has {len(arrays.spec)} entries for {len(names)} names")
    if arrays.spec and not 0 <= min(arrays.spec) <= max(arrays.spec) < len(specs):
        raise ValueError(f"arrays.spec has an entry that is not between 0 and {len(specs) - 1}")
    if len(set(names)) != len(names):
        raise ValueError("arrays.name names an array twice")
    joined = "\0".join(names)
    if names and joined.count("\0") != len(names) - 1:
        raise ValueError("arrays.name has a name with a NUL character")
    try:
        joined.encode()
    except UnicodeEncodeError:
        raise ValueError("arrays.name has a name that is not valid Unicode") from None
    for name in names:
        if not name or (len(name) * 4 > _MAX_NAME_NBYTES and len(name.encode()) > _MAX_NAME_NBYTES):
            raise ValueError(f"arrays.name has an empty or too long name: {name[:80]!r}")
    tied = arrays.tied
    for array, source in tied.items():
        if type(source) is not int or not 0 <= source < array or source in tied:
            text = f"is {repr(source)[:40]}, not an earlier array with own chunks"
            raise ValueError(f"arrays.tied[{array}] {text}")
        if arrays.spec[array] != arrays.spec[source]:
            raise ValueError(f"arrays.tied[{array}] and array {source} differ in their spec")
    pieces, kinds = leaves.pieces, leaves.kind
    owned = [piece.array for parts in pieces.values() for piece in parts] if pieces else []
    if len(set(owned)) != len(owned):
        raise ValueError("leaves.pieces names an array twice")
    for leaf, parts in pieces.items():
        scalar = kinds[leaf] in SCALAR_KINDS
        reason = "is a scalar" if scalar else _pieces_fault(specs, arrays, parts)
        if reason is not None:
            raise ValueError(f"leaves.pieces[{leaf}] {reason}")
    scalars = sum(map(SCALAR_KINDS.__contains__, kinds))
    whole = len(kinds) - scalars - len(pieces)
    # After the arrays of leaves come scalars that are stored as arrays too, for other readers.
    if not 0 <= len(names) - whole - len(owned) <= scalars:
        raise ValueError(
            f"arrays.name has {len(names)} entries, the leaves own {whole + len(owned)} arrays "
            f"and {scalars} scalars"
        )


def _pieces_fault(
    stored: Sequence[StoredSpec], arrays: ArrayTable, pieces: tuple[Piece, ...]
) -> str | None:
    """Return why the pieces do not tile a box, or None if they do."""
    if len(pieces) > MAX_PIECES:
        return f"has more than {MAX_PIECES} pieces"
    specs = [stored[arrays.spec[piece.array]].spec for piece in pieces]
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
