"""Names that pickles of torch may use, and their stubs.

For the metadata of `torch.distributed.checkpoint`, and for tensors and trees of `torch.save`. torch
is not imported: classes are stubs with the relevant fields, dtypes are their names. Source:
`metadata.py` and `filesystem.py` of `torch.distributed.checkpoint`, `torch/_utils.py` and
`torch/serialization.py` of torch 2.13; torch 2.15 adds a sixth item to the state of
`TensorProperties`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from asyncckpt.format.fields import MAX_RANK
from asyncckpt.format.foreign.torch.plain_values import (
    READ_NAMES,
    ValueLeaf,
    empty_dict,
    plain_value,
)
from asyncckpt.format.foreign.torch.unpickle import Allowance, Names, PickleSource, Stub, Unpickler
from asyncckpt.spec import ITEMSIZES

ENTRY_NBYTES = 64
"""Memory of one entry of a dict."""

_MAX_EXTENT = 1 << 62

DTYPES = tuple(
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float8_e4m3fn float8_e4m3fnuz "
    "float8_e5m2 float8_e5m2fnuz float8_e8m0fnu bfloat16 float16 float32 float64 complex64 "
    "complex128".split()
)
"""Torch dtypes that can be restored; zarr v3 uses the same names."""

_OTHER_DTYPES = (
    *"complex32 float4_e2m1fn_x2 qint8 qint32 quint8 quint4x2 quint2x4 "
    "bits1x8 bits2x4 bits4x2 bits8 bits16".split(),
    *(f"{sign}int{bits}" for bits in range(1, 8) for sign in ("", "u")),
)

_STORAGES = dict(
    pair.split(":")
    for pair in "BoolStorage:bool ByteStorage:uint8 CharStorage:int8 ShortStorage:int16 "
    "IntStorage:int32 LongStorage:int64 BFloat16Storage:bfloat16 HalfStorage:float16 "
    "FloatStorage:float32 DoubleStorage:float64 ComplexFloatStorage:complex64 "
    "ComplexDoubleStorage:complex128".split()
)


@dataclass(frozen=True, slots=True)
class Dtype(ValueLeaf):
    """Torch dtype, or with `storage` its storage class; the name of the untyped class is empty."""

    name: str
    storage: bool = False

    @property
    def fault(self) -> str:
        return "a class of storages" if self.storage else ""


_DTYPE_NAMES: Names = {("torch", name): Dtype(name) for name in DTYPES + _OTHER_DTYPES}
_STORAGE_NAMES: Names = {
    **{("torch", name): Dtype(dtype, True) for name, dtype in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): Dtype("", True),
    ("torch", "UntypedStorage"): Dtype("", True),
}


def extents(
    value: object, what: str = "a torch.Size", *, below: int = _MAX_EXTENT
) -> tuple[int, ...]:
    """Return a tuple of sizes or offsets after checking it.

    Raises:
        ValueError: it is anything else; calls it `what`.
    """
    if type(value) is not tuple or len(value) > MAX_RANK or any(type(n) is not int for n in value):
        raise ValueError(f"{what} is not a tuple of at most {MAX_RANK} integers")
    if any(not 0 <= n < below for n in value):
        raise ValueError(f"{what} has an item that is out of range")
    return value


# ------------------------------------------------------------- torch.distributed.checkpoint


_PROPERTIES = 5
"""Items in the state of `TensorProperties` up to torch 2.14."""


class Metadata(Stub):
    __slots__ = ("planner_data", "state_dict_metadata", "storage_data", "storage_meta", "version")


class TensorStorageMetadata(Stub):
    __slots__ = ("chunks", "properties", "size")


class BytesStorageMetadata(Stub):
    __slots__ = ()


class ChunkStorageMetadata(Stub):
    __slots__ = ("offsets", "sizes")


class TensorProperties(Stub):
    """Properties of a tensor; their state is a tuple of dtype, layout and ignored items."""

    __slots__ = ("dtype", "layout")

    def set_state(self, state: object) -> dict[str, object]:
        """Set dtype and layout; return the numbers of items that torch 2.14 does not have."""
        if type(state) is not tuple or len(state) < _PROPERTIES:
            raise ValueError(
                f"the state of TensorProperties is not a tuple of {_PROPERTIES} or more"
            )
        self.dtype, self.layout = state[:2]
        # Sizes and layout are stored elsewhere too, so any further items are only hints.
        return dict.fromkeys(map(str, range(_PROPERTIES, len(state))))


class MetadataIndex(Stub):
    __slots__ = ("fqn", "index", "offset")


class StorageMeta(Stub):
    __slots__ = ("checkpoint_id", "load_id", "modules", "save_id")


class StorageInfo(Stub):
    __slots__ = ("length", "offset", "relative_path", "transform_descriptors")


def _nothing(_: tuple[Any, ...], __: Allowance) -> None:
    """Return None for objects without use here."""


def _layout(arguments: tuple[Any, ...], _: Allowance) -> str:
    if len(arguments) != 1 or type(arguments[0]) is not str:
        raise ValueError("a torch.layout has no name")
    return arguments[0]


def metadata_names() -> Names:
    """Return a new table of the globals that one file `.metadata` may name."""
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}

    def size(arguments: tuple[Any, ...], allowance: Allowance) -> tuple[int, ...]:
        # Shards have few distinct shapes and offsets: keep each once.
        shape = extents(arguments[0] if len(arguments) == 1 else None)
        allowance.take(ENTRY_NBYTES)
        return shapes.setdefault(shape, shape)

    module = "torch.distributed.checkpoint.metadata"
    tensors = TensorStorageMetadata, ChunkStorageMetadata, TensorProperties
    stubs = Metadata, *tensors, BytesStorageMetadata, MetadataIndex, StorageMeta
    older = "torch.distributed._shard.sharded_tensor.metadata"  # of torch 2.2 and earlier
    paths = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    return {
        **_DTYPE_NAMES,
        **{(module, stub.__name__): stub for stub in stubs},
        (module, "_MEM_FORMAT_ENCODING"): _nothing,
        (older, "TensorProperties"): TensorProperties,
        (older, "MEM_FORMAT_ENCODING"): _nothing,
        ("builtins", "getattr"): _nothing,  # a memory format as Python 3.11.0 to 3.11.3 writes it
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageInfo,
        ("torch.serialization", "_get_layout"): _layout,
        ("torch", "Size"): size,
        **{(place, path): _nothing for path in paths for place in ("pathlib", "pathlib._local")},
    }


# --------------------------------------------------------------------------------- torch.save


@dataclass(frozen=True, slots=True)
class SavedStorage:
    """Member `data/<key>` of an archive: `count` elements, or bytes if `dtype` is empty."""

    key: str
    dtype: str
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of its payload."""
        return self.count * (ITEMSIZES[self.dtype] if self.dtype else 1)


@dataclass(frozen=True, slots=True)
class SavedTensor(ValueLeaf):
    """Tensor of a pickle: a view of a storage, with offset and strides in elements.

    `conj` and `neg` mean that values are the complex conjugates or negatives of the stored ones.
    """

    storage: SavedStorage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    conj: bool = False
    neg: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZES[self.dtype]

    @property
    def fault(self) -> str:
        return "" if self.dtype in DTYPES else f"a tensor of the dtype {self.dtype}"


def saved_storage(identity: object) -> SavedStorage:
    """Return the storage that a persistent id names.

    Raises:
        ValueError: it does not name one.
    """
    if type(identity) is tuple and len(identity) == 5 and identity[0] == "storage":
        _, kind, key, _, count = identity
        if isinstance(kind, Dtype) and kind.storage and type(key) is str and type(count) is int:
            if 0 <= count < _MAX_EXTENT:
                return SavedStorage(key, kind.name, count)
    raise ValueError("a persistent id names no storage")


def _tensor(arguments: tuple[Any, ...], _: Allowance) -> SavedTensor:
    """Rebuild a tensor as `torch._utils._rebuild_tensor_v2`; the dtype is the storage's."""
    if len(arguments) not in (6, 7):
        raise ValueError(f"a tensor is made of {len(arguments)} arguments")
    storage = arguments[0]
    dtype = storage.dtype if isinstance(storage, SavedStorage) else ""
    return _view(arguments[:4], dtype, arguments[6] if len(arguments) == 7 else None)


def _tensor_of_dtype(arguments: tuple[Any, ...], _: Allowance) -> SavedTensor:
    """Rebuild a tensor as `torch._utils._rebuild_tensor_v3`: a dtype without a storage class."""
    if len(arguments) not in (7, 8) or not isinstance(arguments[6], Dtype):
        raise ValueError(f"a tensor is made of {len(arguments)} arguments, or has no dtype")
    return _view(arguments[:4], arguments[6].name, arguments[7] if len(arguments) == 8 else None)


def _view(arguments: tuple[Any, ...], dtype: str, bits: object) -> SavedTensor:
    storage, offset, shape, strides = arguments
    if not isinstance(storage, SavedStorage) or not dtype:
        raise ValueError("a tensor has no storage, or none with a dtype")
    shape, strides = extents(shape), extents(strides)
    if type(offset) is not int or not 0 <= offset < _MAX_EXTENT or len(shape) != len(strides):
        raise ValueError("a tensor's offset, shape and strides do not fit")
    if bits is None:
        return SavedTensor(storage, dtype, offset, shape, strides)
    if type(bits) is not dict or not bits.keys() <= {"conj", "neg"}:
        raise ValueError("a tensor has unsupported attributes")
    return SavedTensor(
        storage, dtype, offset, shape, strides, bits.get("conj") is True, bits.get("neg") is True
    )


_TENSOR_NAMES: Names = {
    **_DTYPE_NAMES,
    **_STORAGE_NAMES,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_dtype,
    ("collections", "OrderedDict"): empty_dict,
}


def load_tensor(source: PickleSource, allowance: Allowance) -> tuple[SavedTensor, int]:
    """Return the tensor that a pickle holds, and the pickle's length."""
    unpickler = Unpickler(source, _TENSOR_NAMES, allowance, persistent=saved_storage)
    value = unpickler.run()
    if not isinstance(value, SavedTensor):
        raise source.refused(f"a {type(value).__name__} instead of a tensor", source.start)
    return value, unpickler.nbytes


def load_tree(
    source: PickleSource, allowance: Allowance, depth: int
) -> tuple[Any, dict[str, SavedStorage], int]:
    """Return the value of a pickle, its storages by key, and its length.

    The value has plain containers; leaves are scalars, arrays, tensors and dtypes.
    """
    storages: dict[str, SavedStorage] = {}

    def persistent(identity: object) -> SavedStorage:
        found = saved_storage(identity)
        if storages.setdefault(found.key, found) != found:
            raise ValueError(f"the storage {found.key[:80]!r} is named in two ways")
        return found

    names = {**READ_NAMES, **_TENSOR_NAMES}
    unpickler = Unpickler(source, names, allowance, persistent=persistent)
    value = plain_value(unpickler, source, allowance, depth=depth)
    return value, storages, unpickler.nbytes
