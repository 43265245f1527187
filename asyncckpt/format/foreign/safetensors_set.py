"""Sets of safetensors files, and their index.

The index, ``*.safetensors.index.json``, is one JSON object: ``weight_map`` maps the name of every
tensor to its file; other members (``metadata``, with a ``total_size`` that writers compute in
different ways) are ignored. Source: `huggingface_hub` 0.30, `serialization/_base.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.damage import corrupt, path_fault
from asyncckpt.format.fields import parse_json, parse_object
from asyncckpt.format.foreign.safetensors import MAX_NAME_CHARS, SUFFIX, Header
from asyncckpt.format.scalars import is_unicode

INDEX_SUFFIX = ".safetensors.index.json"

MAX_INDEX_NBYTES = 100_000_000
"""The limit of a header, which takes more bytes per tensor."""

SHARDS_KEY = "DCP_SHARDING_INFO"
"""Metadata of torch's `HuggingFaceStorageWriter`: offset of each shard in its tensor."""

SHARD_NAME = re.compile(r"shard-[0-9]+-.*")
"""Files of `HuggingFaceStorageWriter(save_distributed=True)`: shards of one rank. No file records
the number of ranks, so that an incomplete set looks complete."""

_INDEX = "the index of the safetensors files"


def holds_parts(metadata: Mapping[str, str], *, file: str) -> bool:
    """Return whether a file holds shards of larger tensors, according to its metadata."""
    text = metadata.get(SHARDS_KEY)
    if text is None:
        return False
    what = f"its {SHARDS_KEY}"
    tensors = parse_json(text.encode(), what, file=file, most_nbytes=MAX_INDEX_NBYTES)
    try:
        offsets = [n for info in tensors.values() for n in info.get("saved_offsets", ())]
    except (AttributeError, TypeError):
        offsets = [None]
    if set(map(type, offsets)) - {int}:
        raise corrupt(what, "it does not give the offsets of tensors by their names", file=file)
    return any(offsets)


def decode_index(data: bytes, *, file: str) -> dict[str, str]:
    """Return the file of every tensor from the index of a set."""
    document = parse_object(data, _INDEX, file=file, most_nbytes=MAX_INDEX_NBYTES)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict):
        raise _disagree(file, "weight_map is missing, or is not an object")
    if set(map(type, weight_map.values())) - {str}:
        raise _disagree(file, "weight_map has a file that is not a string")
    for path in dict.fromkeys(weight_map.values()):
        reason = path_fault(path)
        if reason is None and not path.endswith(SUFFIX):
            reason = f"does not end in {SUFFIX}"
        if reason is not None:
            raise _disagree(file, f"the file {path[:200]!a} {reason}")
    for name in weight_map:
        if len(name) > MAX_NAME_CHARS or not is_unicode(name):
            raise _disagree(file, f"a tensor cannot be named {name[:80]!a}")
    return weight_map


def check_set(weight_map: Mapping[str, str], headers: Mapping[str, Header], *, file: str) -> None:
    """Raise unless index and headers agree on the file of every tensor."""
    for name, path in weight_map.items():
        if name not in headers[path].specs:
            raise _disagree(file, f"it places {name[:200]!r} in {path}, which does not hold it")
    for path, header in headers.items():
        stray = next((name for name in header.specs if weight_map.get(name) != path), None)
        if stray is not None:
            says = f"places in {weight_map[stray]}" if stray in weight_map else "does not name"
            raise _disagree(file, f"{path} holds {stray[:200]!r}, which it {says}")


def _disagree(file: str, reason: str) -> CorruptCheckpointError:
    return corrupt(_INDEX, reason, file=file, offset=0)


def encode_index(weight_map: Mapping[str, str], nbytes: int) -> bytes:
    """Encode the index of a set whose tensors have `nbytes` in total."""
    document = {"metadata": {"total_size": nbytes}, "weight_map": dict(weight_map)}
    return json.dumps(document, ensure_ascii=False, indent=2).encode() + b"\n"
