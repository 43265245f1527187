"""Reports as portable JSON, for `--json`."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import json
import math
from collections.abc import Mapping
from typing import Any

from asyncckpt.reports import CheckpointInfo, DiffReport, FileInfo, LeafInfo, Span, VerifyReport

_OF_ARRAYS = (
    *("path", "kind", "framework", "dtype", "shape", "chunk_shape", "chunk_count"),
    *("nbytes", "stored_nbytes", "compression", "array", "tied_to"),
)
"""Fields of a `LeafInfo` whose values are valid JSON."""


def summary(info: CheckpointInfo) -> dict[str, Any]:
    """Return the JSON of a checkpoint without its leaves and files."""
    same = ("location", "step", "save_id", "epoch", "format", "library", "nbytes", "stored_nbytes")
    return {
        **{name: getattr(info, name) for name in same},
        "created": created(info).astimezone(datetime.UTC).isoformat() if info.created_ns else None,
        "created_ns": info.created_ns or None,
        "leaf_count": len(info.leaves),
        "file_count": len(info.files),
        "metrics": {name: number(value) for name, value in info.metrics.items()},
        "metadata": info.metadata,
    }


def details(info: CheckpointInfo) -> dict[str, Any]:
    """Return the JSON of a checkpoint with its leaves and files."""
    return {
        **summary(info),
        "leaves": [leaf_document(leaf) for leaf in info.leaves],
        "files": [
            {"path": file.path, "nbytes": file.nbytes, "crc32c": crc_text(file)}
            for file in info.files
        ],
    }


def crc_text(file: FileInfo) -> str | None:
    """Return the checksum of a file as hex, None if it has none."""
    return None if file.crc32c is None else f"{file.crc32c:08x}"


def leaf_document(leaf: LeafInfo) -> dict[str, Any]:
    """Return the JSON of a leaf: the layout of an array, or the value of a scalar."""
    if leaf.kind != "array":
        return {"path": leaf.path, "kind": leaf.kind, "value": scalar(leaf.value)}
    document = {name: getattr(leaf, name) for name in _OF_ARRAYS}
    parts = ("offset", "array", "shape")
    return {**document, "pieces": [dict(zip(parts, piece, strict=True)) for piece in leaf.pieces]}


def verification(report: VerifyReport) -> dict[str, Any]:
    """Return the JSON of a verification."""
    document = dataclasses.asdict(report)
    del document["total_s"]
    return {"ok": report.ok, **document}


def timeline(info: CheckpointInfo) -> dict[str, Any]:
    """Return the JSON of the timeline of a save."""
    spans = [dict(zip(Span._fields, span, strict=True)) for span in info.timeline.spans]
    return {"process": info.timeline.process, "spans": spans}


def difference(report: DiffReport) -> dict[str, Any]:
    """Return the JSON of a comparison."""
    document = dataclasses.asdict(report)
    for leaf in document["changed"]:
        leaf.update({name: number(leaf[name]) for name in ("largest", "largest_relative")})
    return {"equal": report.equal, **document}


def scalar(value: Any) -> Any:
    """Return a scalar as JSON: bytes as base64, complex numbers as [real, imaginary]."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, complex):
        return [number(value.real), number(value.imag)]
    return number(value) if isinstance(value, float) else value


def number(value: float) -> float | str:
    """Return a float as JSON; NaN and infinities, which JSON lacks, become strings."""
    return value if math.isfinite(value) else repr(value)


def created(info: CheckpointInfo) -> datetime.datetime:
    """Return the commit time in the local time zone."""
    return datetime.datetime.fromtimestamp(info.created_ns / 1e9).astimezone()


def compact(value: Mapping[str, Any]) -> str:
    """Return JSON on one line, empty for an empty object."""
    return json.dumps(value, separators=(",", ":")) if value else ""
