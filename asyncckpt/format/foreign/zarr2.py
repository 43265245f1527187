"""zarr v2 arrays: the metadata document `.zarray`.

Source: zarr-specs v2, as the `zarr` driver of TensorStore reads and writes it: dtypes of
`ml_dtypes` have names, and a fill value of null means zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncckpt.format.zarr import Chain, ChunkKeys, Document, ZarrArray
from asyncckpt.spec import DTYPE_NAMES, DTYPES, ITEMSIZES, ArraySpec

METADATA_NAME = ".zarray"
"""Last part of the key of a metadata document."""

_COMPRESSORS = ("zstd", "zlib", "gzip", "bz2", "blosc")
_REQUIRED = ("shape", "chunks", "dtype", "compressor", "fill_value", "order", "filters")

# NumPy's names with byte order, kind and size, for example <f4, >i8 or |b1.
_TYPESTRS = {
    order + dtype.str[1:]: (name, order == ">")
    for dtype, name in DTYPE_NAMES.items()
    if dtype.isbuiltin != 2  # registered by ml_dtypes
    for order in ("|" if dtype.itemsize == 1 else "<>")
}


def decode_metadata(data: bytes, *, file: str) -> ZarrArray:
    """Decode a metadata document within limits; `file` is named in errors."""
    return _Zarr2(file).decode(data)


@dataclass(frozen=True, slots=True)
class _Zarr2(Document):
    def decode(self, data: bytes) -> ZarrArray:
        document = self.members(data)
        if document.get("zarr_format") != 2:
            raise self.unsupported("zarr_format", document.get("zarr_format"), 2)
        for name in _REQUIRED:
            if name not in document:
                raise self.fault(f"its {name} is missing")
        if document["filters"] not in (None, []):
            raise self.unsupported("filters", document["filters"], None)
        dtype, big_endian = self.dtype(document["dtype"])
        shape = self.integers(document["shape"], "shape", least=0)
        chunk_shape = self.integers(document["chunks"], "chunks", least=1)
        order = document["order"]
        if order not in ("C", "F"):
            raise self.unsupported("order", order, "C or F")
        dimensions = tuple(range(len(chunk_shape)))
        separator = document.get("dimension_separator", ".")
        if separator not in (".", "/"):
            raise self.unsupported("dimension_separator", separator, "/ or .")
        fill = document["fill_value"]
        fill_value = bytes(ITEMSIZES[dtype]) if fill is None else self.fill_value(fill, dtype)
        spec = ArraySpec(shape, dtype)
        self.check_limits(spec, chunk_shape)
        return ZarrArray(
            spec,
            chunk_shape,
            Chain(
                order=dimensions[::-1] if order == "F" and len(dimensions) > 1 else (),
                big_endian=big_endian,
                packing=self.compressor(document["compressor"]),
            ),
            fill_value,
            ChunkKeys(prefix=False, separator=separator),
        )

    def dtype(self, value: object) -> tuple[str, bool]:
        if isinstance(value, str):
            if value in _TYPESTRS:
                return _TYPESTRS[value]
            if value in DTYPES:
                return value, False
        raise self.unsupported("dtype", value, [*_TYPESTRS, "names of ml_dtypes"])

    def compressor(self, value: object) -> tuple[str, ...]:
        if value is None:
            return ()
        if not isinstance(value, dict):
            raise self.fault("its compressor is neither null nor an object")
        name = value.get("id")
        if name not in _COMPRESSORS:
            raise self.unsupported("compressor", name, list(_COMPRESSORS))
        return (name,)
