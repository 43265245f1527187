"""Sets of safetensors files and the index that names the file of every tensor.

The index, ``*.safetensors.index.json``, is one JSON object: ``weight_map`` has the file of every
tensor by its name; other members (``metadata``, with a ``total_size`` that writers count in
different ways) say nothing that is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.faults import corrupt
from asyncckpt.format.json_reader import JsonReader
from asyncckpt.format.paths import path_fault
from asyncckpt.format.safetensors import MAX_NAME_CHARS, MAX_RANK, SUFFIX, Header

INDEX_SUFFIX = ".safetensors.index.json"

MAX_INDEX_NBYTES = 100_000_000
"""As much as one header may have; an index holds less of every tensor."""

SHARDS_KEY = "DCP_SHARDING_INFO"
"""Metadata of torch's `HuggingFaceStorageWriter`: where in its whole each tensor begins."""

_INDEX = "the index of the safetensors files"


def holds_parts(metadata: Mapping[str, str], *, file: str) -> bool:
    """Whether the file's metadata says that its tensors are parts of larger ones.

    Raises:
        CorruptCheckpointError: what it says is malformed.
    """
    text = metadata.get(SHARDS_KEY)
    if text is None:
        return False
    reader = JsonReader(text.encode(), f"its {SHARDS_KEY}", file)
    found = False
    for _ in reader.members():
        for field in reader.members():
            if field == "saved_offsets":
                found |= any(reader.integers(most=MAX_RANK))
            else:
                reader.value()
    reader.end()
    return found


def decode_index(data: bytes, *, file: str) -> dict[str, str]:
    """File by tensor, of a set of safetensors files.

    Raises:
        CorruptCheckpointError: it is malformed, or names files outside its directory.
    """
    reader = JsonReader(data, _INDEX, file)
    weight_map: dict[str, str] | None = None
    files: dict[str, str] = {}
    for member in reader.members():
        if member != "weight_map":
            reader.value()
            continue
        if weight_map is not None:
            raise reader.fault("weight_map stands there twice")
        weight_map = {}
        for name in reader.members():
            path = reader.string()
            if name in weight_map or len(name) > MAX_NAME_CHARS:
                raise reader.fault(f"the tensor {name[:80]!r} stands there twice, or is too long")
            if path not in files:
                _check_file(path, reader)
            weight_map[name] = files.setdefault(path, path)
    reader.end()
    if weight_map is None:
        raise reader.fault("weight_map is missing")
    return weight_map


def _check_file(path: str, reader: JsonReader) -> None:
    reason = path_fault(path) or (None if path.endswith(SUFFIX) else f"does not end in {SUFFIX}")
    if reason is not None:
        raise reader.fault(f"the file {path[:200]!r} {reason}")


def check_set(
    weight_map: Mapping[str, str], headers: Mapping[str, Header], *, file: str
) -> Iterator[tuple[str, str, int]]:
    """Name, file and row in its header of every tensor of a set, in the order of the index.

    Raises:
        CorruptCheckpointError: index and headers do not name the same tensors.
    """
    rows = {path: {name: row for row, name in enumerate(h.names)} for path, h in headers.items()}
    for name, path in weight_map.items():
        row = rows[path].get(name)
        if row is None:
            raise _disagree(file, f"it places {name[:200]!r} in {path}, which does not hold it")
        yield name, path, row
    for path, header in headers.items():
        stray = next((name for name in header.names if weight_map.get(name) != path), None)
        if stray is not None:
            placed = weight_map.get(stray)
            says = "which it does not name" if placed is None else f"which it places in {placed}"
            raise _disagree(file, f"{path} holds {stray[:200]!r}, {says}")


def _disagree(file: str, reason: str) -> CorruptCheckpointError:
    return corrupt(_INDEX, reason, file=file)


def encode_index(weight_map: Mapping[str, str], nbytes: int) -> bytes:
    """The index of a set of files, whose tensors take `nbytes` in all."""
    document = {"metadata": {"total_size": nbytes}, "weight_map": dict(weight_map)}
    return json.dumps(document, ensure_ascii=False, indent=2).encode() + b"\n"
