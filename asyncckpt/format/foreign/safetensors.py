"""The header of a safetensors file.

A file is the length of its header (`uint64` little endian), the header, and the data. The header
is one JSON object, padded with spaces: for every tensor its ``dtype``, ``shape`` and
``data_offsets`` (first byte and one past the last, from the start of the data), and under
``__metadata__`` strings by name. The tensors fill the data without gaps or overlaps, in C order,
little endian. Source: the format's description and `safetensors/src/tensor.rs` 0.8.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.format.faults import corrupt
from asyncckpt.format.json_reader import JsonReader
from asyncckpt.format.scalars import JsonValue
from asyncckpt.spec import ArraySpec, array_spec

SUFFIX = ".safetensors"
METADATA_KEY = "__metadata__"

LENGTH_NBYTES = 8
MAX_HEADER_NBYTES = 100_000_000
"""The limit of the format itself."""

MAX_RANK = 32
MAX_NAME_CHARS = 1 << 16

_TENSOR_NBYTES = 112
"""What a tensor takes in memory beside its name and its spec."""

_SPEC_NBYTES = 384
"""What a spec takes in memory that no other tensor has."""

# safetensors dtype -> zarr v3 data type name; what is missing on the right cannot be restored.
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
    "F8_E8M0": None,
    "F6_E2M3": None,
    "F6_E3M2": None,
    "F4": None,
}
CODES: dict[str, str] = {name: code for code, name in DTYPES.items() if name is not None}

_HEADER = "the safetensors header"
_NUMBER = rb"(?:0|[1-9][0-9]{0,18})"
_USUAL = re.compile(
    rb'\{"dtype":"([A-Z0-9_]{1,16})","shape":\[((?:%b(?:,%b){0,31})?)\],'
    rb'"data_offsets":\[(%b),(%b)\]\}' % (_NUMBER, _NUMBER, _NUMBER, _NUMBER)
)
"""A tensor as all known writers describe it: read in one go, a fifth of the time."""

_FIELDS = frozenset(("dtype", "shape", "data_offsets"))


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """What a safetensors file holds, by column.

    Attributes:
        names: the tensors in the order of the header.
        specs: shape and zarr dtype of each.
        offsets: first byte of each in the file.
        metadata: strings by name.
    """

    names: Sequence[str]
    specs: Sequence[ArraySpec]
    offsets: Sequence[int]
    metadata: Mapping[str, str]


def header_nbytes(prefix: bytes, file_nbytes: int, *, file: str) -> int:
    """Length of the header, from the first 8 bytes of the file.

    Raises:
        CorruptCheckpointError: the file is no safetensors file, or too short for its header.
    """
    if len(prefix) < LENGTH_NBYTES:
        raise corrupt(
            "the safetensors file",
            f"it has {len(prefix)} bytes, its length alone takes {LENGTH_NBYTES}",
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
            f"it claims a header of {nbytes} bytes; with {file_nbytes} bytes in all it has at "
            f"most {limit}",
            file=file,
            offset=0,
            expected=limit,
            found=nbytes,
        )
    return nbytes


def decode_header(data: bytes, file_nbytes: int, *, file: str) -> Header:
    """The header whose bytes are `data`, of a file of `file_nbytes`.

    Raises:
        CorruptCheckpointError: it is malformed, or its tensors do not fill the data exactly.
        UnsupportedFormatError: a tensor has a dtype that is unknown or cannot be restored.
    """
    decoder = _Decoder(JsonReader(data, _HEADER, file, LENGTH_NBYTES))
    decoder.run()
    start = LENGTH_NBYTES + len(data)
    names, begins = list(decoder.names), decoder.begins
    _check_cover(names, begins, decoder.ends, file_nbytes - start, start, file)
    offsets = array("q", (start + begin for begin in begins))
    return Header(names, decoder.specs, offsets, decoder.metadata or {})


class _Decoder:
    """The members of a header, read one after the other into columns."""

    def __init__(self, reader: JsonReader) -> None:
        self._reader = reader
        self._known: dict[tuple[bytes, bytes], ArraySpec] = {}
        self.names: dict[str, None] = {}
        self.specs: list[ArraySpec] = []
        self.begins, self.ends = array("q"), array("q")
        self.metadata: dict[str, str] | None = None

    def run(self) -> None:
        reader = self._reader
        for name in reader.members():
            if name == METADATA_KEY:
                self._read_metadata()
                continue
            if name in self.names or len(name) > MAX_NAME_CHARS:
                raise reader.fault(f"the tensor {name[:80]!r} stands there twice, or is too long")
            spec, begin, end = self._read_tensor(f"of tensor {name[:200]!r}")
            if not 0 <= begin <= end < 1 << 63:
                raise reader.fault(
                    f"data_offsets of tensor {name[:200]!r} are [{begin}, {end}], not first and "
                    "last byte"
                )
            if spec.nbytes != end - begin:
                raise reader.fault(
                    f"data_offsets of tensor {name[:200]!r} span {end - begin} bytes, {spec} takes "
                    f"{spec.nbytes}"
                )
            reader.take(_TENSOR_NBYTES)
            self.names[name] = None
            self.specs.append(spec)
            self.begins.append(begin)
            self.ends.append(end)
        reader.end()

    def _read_metadata(self) -> None:
        if self.metadata is not None:
            raise self._reader.fault(f"{METADATA_KEY} stands there twice")
        self.metadata = {}
        for key in self._reader.members():
            if key in self.metadata:
                raise self._reader.fault(f"{METADATA_KEY} names {key[:80]!r} twice")
            self._reader.take(_TENSOR_NBYTES)
            self.metadata[key] = self._reader.string()

    def _read_tensor(self, where: str) -> tuple[ArraySpec, int, int]:
        found = self._reader.match(_USUAL)
        if found is None:
            return self._read_members(where)
        code, shape, begin, end = found.groups()
        spec = self._known.get((code, shape))
        if spec is None:
            sizes = tuple(map(int, shape.split(b","))) if shape else ()
            spec = self._known[code, shape] = self._spec(code.decode(), sizes, where)
        return spec, int(begin), int(end)

    def _read_members(self, where: str) -> tuple[ArraySpec, int, int]:
        """A tensor whose members stand in another order, or with spaces, or are malformed."""
        reader = self._reader
        begun = reader.position
        fields: dict[str, str | tuple[int, ...]] = {}
        for field in reader.members():
            if field not in _FIELDS:
                raise reader.fault(f"{field[:80]!r} {where} is no member of this version")
            if field in fields:
                raise reader.fault(f"{field!r} {where} stands there twice")
            if field == "dtype":
                fields[field] = reader.string()
            else:
                fields[field] = reader.integers(most=MAX_RANK if field == "shape" else 2)
        code, shape, span = (fields.get(name) for name in ("dtype", "shape", "data_offsets"))
        if not isinstance(code, str) or not isinstance(shape, tuple) or not isinstance(span, tuple):
            missing = ", ".join(sorted(_FIELDS - fields.keys()))
            raise reader.fault(f"{missing} {where} is missing", begun)
        if len(span) != 2:
            raise reader.fault(f"data_offsets {where} are {list(span)}, not first and last byte")
        return self._spec(code, shape, where), span[0], span[1]

    def _spec(self, code: str, shape: tuple[int, ...], where: str) -> ArraySpec:
        dtype = DTYPES.get(code)
        if dtype is None:
            known = "cannot be restored" if code in DTYPES else "is unknown to this release"
            raise self._reader.unsupported(
                f"the dtype {code[:40]!r} {where} {known}; convert the tensor with the library "
                "that wrote it",
                expected=tuple(CODES.values()),
                found=code[:40],
            )
        self._reader.take(_SPEC_NBYTES)
        spec = array_spec(shape, dtype)
        elements = math.prod(max(1, n) for n in shape)
        if any(n < 0 for n in shape) or elements * spec.itemsize >= 1 << 62:
            raise self._reader.fault(
                f"shape {where} is {str(list(shape))[:80]}, which no array has"
            )
        return spec


def _check_cover(
    names: Sequence[str], begins: array[int], ends: array[int], nbytes: int, start: int, file: str
) -> None:
    """The tensors fill the data, each byte once."""
    first, last = np.array(begins, np.int64), np.array(ends, np.int64)
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
            f"its tensors {what}: {names[order[row]][:200]!r} begins at byte {first[row]} of the "
            f"data, the one before it ends at {due[row]}",
            file=file,
            offset=start + int(first[row]),
            expected=int(due[row]),
            found=int(first[row]),
        )
    if due[-1] != nbytes:
        short = "is truncated" if due[-1] > nbytes else "goes on behind them"
        raise corrupt(
            "the safetensors file",
            f"its tensors take {due[-1]} bytes and it has {nbytes} behind the header: it {short}",
            file=file,
            offset=start + min(int(due[-1]), nbytes),
            expected=int(due[-1]),
            found=nbytes,
        )


def encode_header(
    tensors: Sequence[tuple[str, ArraySpec]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[int]]:
    """The first bytes of a file with these tensors, and where in the file the data of each begins.

    Tensors stand in the order of falling element size, so that each is aligned to its elements.

    Raises:
        UnsupportedLeafError: a name or dtype that safetensors does not have.
    """
    order = sorted(range(len(tensors)), key=lambda row: (-tensors[row][1].itemsize, row))
    document: dict[str, JsonValue] = {}
    if metadata:
        document[METADATA_KEY] = dict(metadata)
    begins = [0] * len(tensors)
    end = 0
    for row in order:
        name, spec = tensors[row]
        code = CODES.get(spec.dtype)
        if code is None or name in document or name == METADATA_KEY:
            reason = f"has no dtype {spec.dtype}" if code is None else f"cannot hold {name!r} twice"
            raise UnsupportedLeafError(
                f"{name}: a safetensors file {reason}; cast the leaf, or give it another name",
                path=name,
                expected=tuple(CODES),
                found=spec.dtype,
            )
        begins[row], end = end, end + spec.nbytes
        document[name] = {
            "dtype": code,
            "shape": list(spec.shape),
            "data_offsets": [begins[row], end],
        }
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = LENGTH_NBYTES + len(text)
    return len(text).to_bytes(LENGTH_NBYTES, "little") + text, [start + b for b in begins]
