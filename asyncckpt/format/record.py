"""The commit record `checkpoint.json`: the file that, written last, makes a checkpoint exist.

It is one JSON object in UTF-8 without spaces. Its last member is ``"crc32c"``, and the file ends
with exactly these 12 bytes: a quote, 8 lower-case hex digits, ``"}`` and a line feed. The digits
are the CRC-32C of every byte before that quote, so the name ``"crc32c":`` is covered. Every version
of the record ends like this and begins with the members ``format``, ``version`` and ``save_id``.

Version 2 lists the files that are written after the record (``fixed``) directly behind these, so
that the beginning of a record tells what should exist, and may hold the chunk index itself.
"""

# Encoding runs the checks of decoding: what is written can be read.

from __future__ import annotations

import base64
import json
import math
import re
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError, UsageError
from asyncckpt.format.crc import crc32c
from asyncckpt.format.damage import corrupt
from asyncckpt.format.fields import Fields, depth_fault
from asyncckpt.format.record_checks import check_consistency
from asyncckpt.format.record_values import (
    RECORD_VERSION,
    ArrayTable,
    CommitRecord,
    FileEntry,
    FixedName,
    IndexExtent,
    LeafTable,
    Outline,
    Piece,
    StoredSpec,
)
from asyncckpt.format.scalars import SCALAR_KINDS, JsonValue, decode_scalar, encode_scalar
from asyncckpt.options import MAX_RECORD_NBYTES, STEP_MAX
from asyncckpt.spec import DTYPES, ArraySpec

__all__ = [
    "RECORD_NAME",
    "RECORD_TAIL_NBYTES",
    "RECORD_VERSION",
    "SCALAR_KINDS",
    "STEP_NAME",
    "ArrayTable",
    "CommitRecord",
    "FileEntry",
    "FixedName",
    "IndexExtent",
    "JsonValue",
    "LeafTable",
    "Outline",
    "Piece",
    "StoredSpec",
    "decode_record",
    "decode_scalar",
    "encode_record",
    "encode_scalar",
    "is_record",
    "outline_of",
    "save_id_of",
    "seal",
]

RECORD_NAME = "checkpoint.json"

STEP_NAME = re.compile(r"0|[1-9][0-9]{0,18}")
"""Names that are steps of a run; all others are ignored, and never deleted."""
_FORMAT = "asyncckpt"
_WHAT = "the commit record"
RECORD_TAIL_NBYTES = 12
"""The checksum that ends a record: a quote, 8 digits, a quote, a brace and a line feed."""

_TAIL = re.compile(rb'"[0-9a-f]{8}"\}\n')

MAX_RANK = 32
_MAX_COUNT = 1 << 32

_SAVE_ID = re.compile(r"[0-9a-f]{8,64}")
_DIGEST = re.compile(r"[0-9a-f]{0,128}")
_LIBRARY = re.compile(r"[\x20-\x7e]{1,200}")
_KIND = re.compile(r"[a-z][a-z0-9_.]{0,63}")
_ANY = re.compile(r"[\s\S]*")
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

_HEAD = re.compile(
    rb'\{"format":"asyncckpt","version":([0-9]{1,9}),"save_id":"([0-9a-f]{8,64})"(,"fixed":)?'
)
"""The beginning of every record."""

_FIXED = ("path", "nbytes", "crc32c", "md5", "object")
_INDEX = ("file", "offset", "nbytes", "crc32c")
_MD5 = re.compile(r"[0-9a-f]{32}")

_MEMBERS = (
    "format",
    "version",
    "save_id",
    "fixed",
    "step",
    "epoch",
    "writer",
    "writers",
    "plan_digest",
    "created_ns",
    "library",
    "metadata",
    "metrics",
    "database",
    "tree",
    "leaves",
    "specs",
    "arrays",
    "files",
    "chunk_index",
    "manifest",
    "crc32c",
)


def encode_record(record: CommitRecord) -> bytes:
    """Return the bytes of the record; equal records give equal bytes.

    Raises:
        UsageError: `metadata` or `metrics` cannot be written as JSON and read back.
        ValueError: the record contradicts itself.
    """
    for name, value in (("metadata", dict(record.metadata)), ("tree", record.tree)):
        reason = depth_fault(value)
        if reason is not None:
            raise UsageError(f"{name} {reason}; use dicts, lists, strings and numbers")
    kinds = sorted(set(record.leaves.kind))
    codes = {kind: code for code, kind in enumerate(kinds)}
    own = len(record.files) - len(record.fixed)
    named = [(name.path, name.nbytes, name.crc32c) for name in record.fixed]
    if named != [(entry.path, entry.nbytes, entry.crc32c) for entry in record.files[own:]]:
        raise ValueError("the fixed names are not the last of the files")
    document = {
        "format": _FORMAT,
        "version": RECORD_VERSION,
        "save_id": record.save_id,
        "fixed": [
            {
                "path": name.path,
                "nbytes": name.nbytes,
                "crc32c": f"{name.crc32c:08x}",
                "md5": name.md5,
                "object": name.object,
            }
            for name in record.fixed
        ],
        "step": record.step,
        "epoch": record.epoch,
        "writer": record.writer,
        "writers": record.writers,
        "plan_digest": record.plan_digest,
        "created_ns": record.created_ns,
        "library": record.library,
        "metadata": dict(record.metadata),
        "metrics": {name: _metric_json(name, value) for name, value in record.metrics.items()},
        "database": record.database,
        "tree": record.tree,
        "leaves": {
            "kinds": kinds,
            "kind": [codes[kind] for kind in record.leaves.kind],
            "values": [
                value
                for kind, value in zip(record.leaves.kind, record.leaves.value, strict=True)
                if kind in SCALAR_KINDS
            ],
            "extra": {str(leaf): dict(extra) for leaf, extra in record.leaves.extra.items()},
            "pieces": {
                str(leaf): [[piece.offset, piece.array] for piece in pieces]
                for leaf, pieces in record.leaves.pieces.items()
            },
        },
        "specs": [
            {
                "shape": stored.spec.shape,
                "dtype": stored.spec.dtype,
                "chunk_shape": stored.chunk_shape,
                "zstd": stored.zstd_level,
            }
            for stored in record.specs
        ],
        "arrays": {
            "name": record.arrays.name,
            "spec": record.arrays.spec,
            "tied": {str(array): source for array, source in record.arrays.tied.items()},
        },
        "files": [
            {"path": entry.path, "nbytes": entry.nbytes, "crc32c": f"{entry.crc32c:08x}"}
            for entry in record.files[:own]
        ],
        "chunk_index": {
            "file": record.chunk_index.file,
            "offset": record.chunk_index.offset,
            "nbytes": record.chunk_index.nbytes,
            "crc32c": f"{record.chunk_index.crc32c:08x}",
            "data": None
            if record.chunk_index.data is None
            else base64.b64encode(record.chunk_index.data).decode(),
        },
        "manifest": base64.b64encode(record.manifest).decode(),
    }
    try:
        text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        data = seal(text)
    except UnicodeEncodeError as error:
        raise UsageError(f"a string of the record is not valid Unicode ({error})") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"metadata cannot be written as JSON ({error})") from None
    try:
        _decode_document({**json.loads(text), "crc32c": ""}, RECORD_NAME)
    except CorruptCheckpointError as error:
        raise ValueError(f"the record contradicts itself: {error}") from error
    return data


def seal(text: str) -> bytes:
    """Return the bytes of a JSON object with its checksum as the last member."""
    body = text[:-1].encode() + b',"crc32c":'
    return body + b'"%08x"}\n' % crc32c(body)


def decode_record(data: bytes, *, location: str) -> CommitRecord:
    """Return the record whose bytes are `data`; `location` is named in errors.

    Raises:
        CorruptCheckpointError: the bytes are damaged, contradict each other, or name unsafe paths.
        UnsupportedFormatError: they are intact, of a newer version.
    """
    try:
        return _decode_document(_parse(data, location), location)
    except CorruptCheckpointError as error:
        error.location = location
        error.file = RECORD_NAME
        raise


def is_record(data: bytes) -> bool:
    """Return whether these bytes are a commit record whose checksum holds, without decoding it."""
    tail = data[-RECORD_TAIL_NBYTES:]
    if len(tail) < RECORD_TAIL_NBYTES or not data.startswith(b'{"format":"asyncckpt",'):
        return False
    return tail == b'"%08x"}\n' % crc32c(memoryview(data)[:-RECORD_TAIL_NBYTES])


def save_id_of(data: bytes) -> str | None:
    """Return the save id of a commit record whose checksum holds, or None for anything else."""
    found = _HEAD.match(data) if is_record(data) else None
    return None if found is None else found[2].decode()


def outline_of(data: bytes, *, head: bool = False) -> Outline | None:
    """Return the outline of a commit record, or None for anything else.

    Of a newer version, only the save id is known.

    Args:
        data: the record.
        head: `data` is only its beginning, which no checksum covers, so nothing may be changed
            because of it; the outline has no more than the save id and `fixed`. None if `data`
            ends before these do.
    """
    if head:
        found = _HEAD.match(data)
        if found is None:
            return None
        if found[3] is None:
            return Outline(found[2].decode())
        try:
            text = data[found.end() :].decode(errors="ignore")
            rows, _ = json.JSONDecoder().raw_decode(text)
            return Outline(found[2].decode(), fixed=_decode_fixed({"fixed": rows}, ""))
        except (ValueError, RecursionError, CorruptCheckpointError):
            return None
    save_id = save_id_of(data)
    if save_id is None:
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


def _parse(data: bytes, location: str) -> dict[str, Any]:
    if len(data) > MAX_RECORD_NBYTES:
        raise corrupt(_WHAT, f"it has over {MAX_RECORD_NBYTES} bytes", file=location)
    if not _TAIL.fullmatch(data[-RECORD_TAIL_NBYTES:]):
        raise corrupt(_WHAT, "it does not end with its checksum", file=location)
    stored = int(data[-RECORD_TAIL_NBYTES + 1 : -3], 16)
    crc = crc32c(memoryview(data)[:-RECORD_TAIL_NBYTES])
    if crc != stored:
        raise corrupt(
            _WHAT,
            f"its CRC-32C is {crc:08x}, the stored one {stored:08x}",
            file=location,
            expected=f"{stored:08x}",
            found=f"{crc:08x}",
        )
    try:
        document = json.loads(data.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise corrupt(_WHAT, f"it is not JSON ({error})", file=location) from None
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise corrupt(_WHAT, f"its format is not {_FORMAT!r}", file=location)
    version = document.get("version")
    if type(version) is not int or version < 1:
        raise corrupt(_WHAT, f"its version is {repr(version)[:40]}", file=location)
    if version > RECORD_VERSION:
        raise UnsupportedFormatError(
            f"{location}: the commit record has version {version}, this release reads versions up "
            f"to {RECORD_VERSION}; restore with a newer release",
            location=location,
            expected=RECORD_VERSION,
            found=version,
        )
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _decode_document(document: dict[str, Any], location: str) -> CommitRecord:
    top = Fields(document, _WHAT, location)
    version = document["version"]
    top.only(_MEMBERS if version > 1 else [name for name in _MEMBERS if name != "fixed"])
    fixed = _decode_fixed(document, location) if version > 1 else ()
    files = tuple(
        FileEntry(row.text("path", _ANY), row.integer("nbytes"), row.crc("crc32c"))
        for row in top.each("files", ("path", "nbytes", "crc32c"))
    )
    specs = tuple(
        _decode_spec(row) for row in top.each("specs", ("shape", "dtype", "chunk_shape", "zstd"))
    )
    table = top.inner("arrays", ("name", "spec", "tied"))
    names = table.strings("name")
    arrays = ArrayTable(
        names,
        table.integers("spec", below=len(specs)),
        _decode_tied(table, len(names)),
    )
    index = top.inner("chunk_index", (*_INDEX, "data") if version > 1 else _INDEX)
    metadata = top.json("metadata")
    if not isinstance(metadata, dict):
        raise top.fault("metadata", "is not an object")
    record = CommitRecord(
        save_id=top.text("save_id", _SAVE_ID),
        step=None if document["step"] is None else top.integer("step", most=STEP_MAX),
        epoch=top.integer("epoch"),
        writer=top.integer("writer", most=_MAX_COUNT),
        writers=top.integer("writers", most=_MAX_COUNT),
        plan_digest=top.text("plan_digest", _DIGEST),
        created_ns=top.integer("created_ns"),
        library=top.text("library", _LIBRARY),
        tree=top.json("tree"),
        leaves=_decode_leaves(
            top.inner("leaves", ("kinds", "kind", "values", "extra", "pieces")), len(names)
        ),
        specs=specs,
        arrays=arrays,
        files=files + tuple(FileEntry(name.path, name.nbytes, name.crc32c) for name in fixed),
        chunk_index=IndexExtent(
            index.integer("file"),
            index.integer("offset"),
            index.integer("nbytes"),
            index.crc("crc32c"),
            None if index.members.get("data") is None else _decode_base64(index, "data"),
        ),
        manifest=_decode_base64(top, "manifest"),
        metadata=metadata,
        metrics=_decode_metrics(top),
        database=top.text("database", _ANY),
        fixed=fixed,
        version=version,
    )
    check_consistency(record, top)
    return record


def _decode_fixed(document: dict[str, Any], location: str) -> tuple[FixedName, ...]:
    return tuple(
        FixedName(
            row.text("path", _ANY),
            row.integer("nbytes"),
            row.crc("crc32c"),
            row.text("md5", _MD5),
            None if row.members["object"] is None else row.text("object", _ANY),
        )
        for row in Fields(document, _WHAT, location).each("fixed", _FIXED)
    )


def _decode_spec(row: Fields) -> StoredSpec:
    shape = row.integers("shape", below=1 << 63)
    chunk_shape = row.integers("chunk_shape", below=1 << 63)
    dtype = row.text("dtype", _ANY)
    if dtype not in DTYPES:
        raise row.fault("dtype", f"is {dtype[:40]!r}, which is unknown")
    if len(shape) > MAX_RANK or len(chunk_shape) != len(shape):
        raise row.fault("chunk_shape", f"and shape do not have one rank of at most {MAX_RANK}")
    if 0 in chunk_shape:
        raise row.fault("chunk_shape", "has a zero")
    level = row.members["zstd"]
    if level is not None and (type(level) is not int or not -(1 << 17) <= level <= 22):
        raise row.fault("zstd", f"is {repr(level)[:40]}, not a level or null")
    stored = StoredSpec(ArraySpec(tuple(shape), dtype), tuple(chunk_shape), level)
    if max(stored.spec.nbytes, stored.chunk_nbytes, stored.grid.chunk_count) >= 1 << 62:
        raise row.fault("shape", "is of an array beyond 2^62 bytes")
    return stored


def _decode_tied(table: Fields, count: int) -> dict[int, int]:
    tied = table.by_index("tied", below=count)
    for array, source in tied.items():
        if type(source) is not int or not 0 <= source < array or source in tied:
            raise table.fault(
                f"tied[{array}]", f"is {repr(source)[:40]}, not an earlier array with own chunks"
            )
    return tied


def _decode_leaves(table: Fields, array_count: int) -> LeafTable:
    kinds = table.strings("kinds")
    for word in kinds:
        if not _KIND.fullmatch(word):
            raise table.fault("kinds", f"has {word[:40]!r}, not of the form {_KIND.pattern}")
    if len(set(kinds)) != len(kinds):
        raise table.fault("kinds", "names a kind twice")
    kind = [kinds[code] for code in table.integers("kind", below=len(kinds))]
    values = table.items("values")
    rows = [row for row, name in enumerate(kind) if name in SCALAR_KINDS]
    if len(rows) != len(values):
        raise table.fault("values", f"has {len(values)} entries for {len(rows)} scalar leaves")
    column: list[JsonValue] = [None] * len(kind)
    for row, value in zip(rows, values, strict=True):
        try:
            decode_scalar(kind[row], value)
        except ValueError as error:
            raise table.fault(f"values (leaf {row})", str(error)) from None
        column[row] = value
    extra = table.by_index("extra", below=len(kind))
    for leaf, facts in extra.items():
        reason = depth_fault(facts) if isinstance(facts, dict) else "is not an object"
        if reason is not None:
            raise table.fault(f"extra[{leaf}]", reason)
    pieces = {
        leaf: tuple(_decode_piece(table, leaf, item, array_count) for item in items)
        for leaf, items in table.by_index("pieces", below=len(kind)).items()
        if _is_list(table, leaf, items)
    }
    return LeafTable(kind, column, extra, pieces)


def _is_list(table: Fields, leaf: int, items: object) -> bool:
    if not isinstance(items, list) or not items:
        raise table.fault(f"pieces[{leaf}]", "is not a list of pieces")
    return True


def _decode_piece(table: Fields, leaf: int, item: object, array_count: int) -> Piece:
    if isinstance(item, list) and len(item) == 2:
        offset, array = item
        if (
            isinstance(offset, list)
            and all(type(n) is int and 0 <= n < 1 << 62 for n in offset)
            and type(array) is int
            and 0 <= array < array_count
        ):
            return Piece(tuple(offset), array)
    raise table.fault(f"pieces[{leaf}]", "has an entry that is not [offset, array]")


def _decode_base64(fields: Fields, name: str) -> bytes:
    try:
        return base64.b64decode(fields.text(name, _ANY), validate=True)
    except ValueError:
        raise fields.fault(name, "is not base64") from None


def _metric_json(name: object, value: object) -> float | str:
    if not isinstance(name, str) or isinstance(value, bool):
        raise UsageError(f"the metric {name!r} is not a name with a number: {value!r}")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"the metric {name!r} is not a number: {value!r}") from None
    return number if math.isfinite(number) else repr(number)


def _decode_metrics(fields: Fields) -> Mapping[str, float]:
    metrics = {}
    for name, value in fields.object("metrics").items():
        if isinstance(value, str) and value in _NON_FINITE:
            metrics[name] = _NON_FINITE[value]
        elif type(value) in (int, float) and abs(value) <= sys.float_info.max:
            metrics[name] = float(value)
        else:
            raise fields.fault(f"metrics[{name[:40]!r}]", f"is {repr(value)[:40]}, not a number")
    return metrics
