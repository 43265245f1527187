"""Header of a safetensors file.

A file is the length of its header (`uint64` little endian), the header, and the data. The header
is one JSON object, padded with spaces: for every tensor its ``dtype``, ``shape`` and
``data_offsets`` (first byte and one past the last, from the start of the data), and under
``__metadata__`` strings by name. The tensors fill the data without gaps or overlaps, in C order,
little endian. Source: the format's description and `safetensors/src/tensor.rs` 0.8.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncckpt.format.damage import corrupt, unsupported
from asyncckpt.format.fields import MAX_RANK, check_form, parse_object
from asyncckpt.format.scalars import JsonValue, is_unicode
from asyncckpt.spec import ArraySpec, array_spec

SUFFIX = ".safetensors"
METADATA_KEY = "__metadata__"

LENGTH_NBYTES = 8
MAX_HEADER_NBYTES = 100_000_000
"""The limit of the format itself."""

MAX_NAME_CHARS = 1 << 16

# safetensors dtype -> zarr v3 data type name; None for dtypes that cannot be restored.
DTYPES: dict[str, str | None] = {
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
    "F6_E2M3": None,
    "F6_E3M2": None,
    "F4": None,
}
CODES: dict[str, str] = {name: code for code, name in DTYPES.items() if name is not None}

_HEADER = "the safetensors header"
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
                known = "cannot be restored" if code in DTYPES else "is unknown to this release"
                raise unsupported(
                    f"the dtype {code[:40]!a} of {where} {known}; convert the tensor with the "
                    "library that wrote it",
                    file=file,
                    offset=_place(data, name),
                    expected=tuple(CODES.values()),
                    found=code[:40],
                )
            spec = array_spec(tuple(shape), dtype)
            elements = math.prod(filter(None, shape))
            if min(shape, default=0) < 0 or elements * spec.itemsize >= 1 << 62:
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
    spans = np.array([t["data_offsets"] for t in document.values()], np.int64).reshape(-1, 2)
    first, last = spans.T
    order = np.lexsort((last, first))
    first, last = first[order], last[order]
    due = np.zeros(len(first) + 1, np.int64)
    due[1:] = last
    wrong = np.flatnonzero(first != due[:-1])
    if len(wrong):
        row = int(wrong[0])
        what = "overlap" if first[row] < due[row] else "leave a gap"
        raise corrupt(
            _HEADER,
            f"its tensors {what}: {list(document)[order[row]][:200]!r} begins at byte {first[row]} "
            f"of the data, the one before it ends at {due[row]}",
            file=file,
            offset=start + int(first[row]),
            expected=int(due[row]),
            found=int(first[row]),
        )
    if due[-1] != nbytes:
        short = "is truncated" if due[-1] > nbytes else "continues after them"
        raise corrupt(
            "the safetensors file",
            f"its tensors take {due[-1]} bytes and it has {nbytes} after the header: it {short}",
            file=file,
            offset=start + min(int(due[-1]), nbytes),
            expected=int(due[-1]),
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
