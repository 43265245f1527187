"""Header of a safetensors file, and the index of a set of files.

A file is the length of its header (`uint64` little endian), the header, and the data. The header
is one JSON object, padded with spaces: for every tensor its ``dtype``, ``shape`` and
``data_offsets`` (first byte and one past the last, from the start of the data), and under
``__metadata__`` strings by name. The tensors fill the data without gaps or overlaps, in C order,
little endian. Source: the format's description and `safetensors/src/tensor.rs` 0.8.

The index of a set, ``*.safetensors.index.json``, is one JSON object: ``weight_map`` maps the name
of every tensor to its file; other members (``metadata``, with a ``total_size`` that writers compute
in different ways) are ignored. Source: `huggingface_hub` 0.30, `serialization/_base.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.damage import corrupt, path_fault, unsupported
from asyncckpt.format.fields import MAX_RANK, check_form, parse_json, parse_object
from asyncckpt.format.scalars import JsonValue, is_unicode
from asyncckpt.spec import ArraySpec, array_spec, nonempty_size

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
METADATA_KEY = "__metadata__"

LENGTH_NBYTES = 8
MAX_HEADER_NBYTES = 100_000_000
"""The limit of the format itself; also of an index, which takes fewer bytes per tensor."""

MAX_NAME_CHARS = 1 << 16

# safetensors dtype -> zarr v3 data type name, except for the packed dtypes of 4 and 6 bits.
DTYPES: dict[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
CODES: dict[str, str] = {name: code for code, name in DTYPES.items()}

SHARDS_KEY = "DCP_SHARDING_INFO"
"""Metadata of torch's `HuggingFaceStorageWriter`: offset of each shard in its tensor."""

SHARD_NAME = re.compile(r"shard-[0-9]+-.*")
"""Files of `HuggingFaceStorageWriter(save_distributed=True)`: shards of one rank. No file records
the number of ranks, so that an incomplete set looks complete."""

_HEADER = "the safetensors header"
_INDEX = "the index of the safetensors files"
_TENSOR = {"dtype": str, "shape": [int], "data_offsets": [int]}


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """Tensors of a safetensors file in the order of its header, and its strings by name.

    `offsets` are the positions of the tensors in the file.
    """

    specs: Mapping[str, ArraySpec]
    offsets: Mapping[str, int]
    metadata: Mapping[str, str]


def header_nbytes(prefix: bytes, file_nbytes: int, *, file: str) -> int:
    """Return the length of the header, from the first 8 bytes of the file."""
    if len(prefix) < LENGTH_NBYTES:
        raise corrupt(
            "the safetensors file",
            f"it has {len(prefix)} bytes, the header's length alone takes {LENGTH_NBYTES}",
            file=file,
            offset=0,
            expected=LENGTH_NBYTES,
            found=len(prefix),
        )
    nbytes = int.from_bytes(prefix[:LENGTH_NBYTES], "little")
    limit = min(MAX_HEADER_NBYTES, file_nbytes - LENGTH_NBYTES)
    if not 2 <= nbytes <= limit:
        raise corrupt(
            "the safetensors file",
            f"it claims a header of {nbytes} bytes; a file of {file_nbytes} bytes has at most "
            f"{limit}",
            file=file,
            offset=0,
            expected=limit,
            found=nbytes,
        )
    return nbytes


def decode_header(data: bytes, file_nbytes: int, *, file: str) -> Header:
    """Decode the header of a file of `file_nbytes`; errors give the offset of the tensor's name."""
    document = parse_object(
        data, _HEADER, file=file, most_nbytes=MAX_HEADER_NBYTES, base=LENGTH_NBYTES
    )
    metadata = document.pop(METADATA_KEY, {})
    specs: dict[str, ArraySpec] = {}
    offsets: dict[str, int] = {}
    start = LENGTH_NBYTES + len(data)
    name = METADATA_KEY
    try:
        if not isinstance(metadata, dict):
            raise ValueError(f"{METADATA_KEY} is not an object")
        for name, text in metadata.items():
            if not isinstance(text, str):
                raise ValueError(f"{METADATA_KEY} {name[:80]!a} is not a string")
            if not is_unicode(name) or not is_unicode(text):
                raise ValueError(f"{METADATA_KEY} {name[:80]!a} is not valid Unicode")
        for name, tensor in document.items():
            if len(name) > MAX_NAME_CHARS or not is_unicode(name):
                raise ValueError(f"a tensor cannot be named {name[:80]!a}")
            where = f"tensor {name[:200]!r}"
            check_form(tensor, _TENSOR, where)
            code, shape, span = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
            if len(shape) > MAX_RANK:
                raise ValueError(f"{where} has more than {MAX_RANK} dimensions")
            if len(span) != 2 or not 0 <= span[0] <= span[1] < 1 << 63:
                shown = str(span)[:80]
                raise ValueError(f"data_offsets of {where} are {shown}, not first and last byte")
            begin, end = span
            dtype = DTYPES.get(code)
            if dtype is None:
                raise unsupported(
                    f"this release does not read the dtype {code[:40]!a} of {where}; convert the "
                    "tensor with the library that wrote it",
                    file=file,
                    offset=_place(data, name),
                    expected=tuple(CODES.values()),
                    found=code[:40],
                )
            spec = array_spec(tuple(shape), dtype)
            nbytes = nonempty_size(shape) * spec.itemsize
            if min(shape, default=0) < 0 or nbytes >= 1 << 62:
                raise ValueError(f"shape of {where} is {str(shape)[:80]}, which no array has")
            if spec.nbytes != end - begin:
                raise ValueError(
                    f"data_offsets of {where} span {end - begin} bytes, {spec} takes {spec.nbytes}"
                )
            specs[name], offsets[name] = spec, start + begin
    except ValueError as error:
        raise corrupt(_HEADER, str(error), file=file, offset=_place(data, name)) from None
    _check_cover(document, file_nbytes - start, start, file)
    return Header(specs, offsets, metadata)


def _place(data: bytes, name: str) -> int:
    """Return the offset of a name in the file; of the header if the name is escaped there."""
    at = data.find(f'"{name}"'.encode("utf-8", "replace")) if name else 0
    return LENGTH_NBYTES + max(0, at)


def _check_cover(document: dict[str, Any], nbytes: int, start: int, file: str) -> None:
    """Raise unless the tensors fill the `nbytes` of data from `start` without gaps or overlaps."""
    due = 0
    for name in sorted(document, key=lambda name: document[name]["data_offsets"]):
        begin, end = document[name]["data_offsets"]
        if begin != due:
            what = "overlap" if begin < due else "leave a gap"
            raise corrupt(
                _HEADER,
                f"its tensors {what}: {name[:200]!r} begins at byte {begin} of the data, the one "
                f"before it ends at {due}",
                file=file,
                offset=start + begin,
                expected=due,
                found=begin,
            )
        due = end
    if due != nbytes:
        short = "is truncated" if due > nbytes else "continues after them"
        raise corrupt(
            "the safetensors file",
            f"its tensors take {due} bytes and it has {nbytes} after the header: it {short}",
            file=file,
            offset=start + min(due, nbytes),
            expected=due,
            found=nbytes,
        )


def encode_header(
    tensors: Sequence[tuple[str, ArraySpec]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[int]]:
    """Return the first bytes of a file with these tensors, and the position of each tensor.

    `convert.safetensors_plan` has checked names and dtypes. Tensors are stored by decreasing
    element size, so that each is aligned to its elements.
    """
    order = sorted(range(len(tensors)), key=lambda row: (-tensors[row][1].itemsize, row))
    document: dict[str, JsonValue] = {}
    if metadata:
        document[METADATA_KEY] = dict(metadata)
    begins = [0] * len(tensors)
    end = 0
    for row in order:
        name, spec = tensors[row]
        begins[row], end = end, end + spec.nbytes
        document[name] = {
            "dtype": CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begins[row], end],
        }
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = LENGTH_NBYTES + len(text)
    return len(text).to_bytes(LENGTH_NBYTES, "little") + text, [start + b for b in begins]


# ------------------------------------------------------------------------------------------- sets


def holds_parts(metadata: Mapping[str, str], *, file: str) -> bool:
    """Return whether a file holds shards of larger tensors, according to its metadata."""
    text = metadata.get(SHARDS_KEY)
    if text is None:
        return False
    what = f"its {SHARDS_KEY}"
    tensors = parse_json(text.encode(), what, file=file, most_nbytes=MAX_HEADER_NBYTES)
    try:
        offsets = [n for info in tensors.values() for n in info.get("saved_offsets", ())]
    except (AttributeError, TypeError):
        offsets = [None]
    if set(map(type, offsets)) - {int}:
        raise corrupt(what, "it does not give the offsets of tensors by their names", file=file)
    return any(offsets)


def decode_index(data: bytes, *, file: str) -> dict[str, str]:
    """Return the file of every tensor from the index of a set."""
    document = parse_object(data, _INDEX, file=file, most_nbytes=MAX_HEADER_NBYTES)
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
