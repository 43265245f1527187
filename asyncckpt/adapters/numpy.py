"""NumPy arrays and scalars."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.adapters.arrays import check_fillable, is_masked, selection, unsupported_dtype
from asyncckpt.errors import DtypeMismatchError, UnsupportedLeafError
from asyncckpt.ports import Source, Target
from asyncckpt.spec import DTYPE_NAMES, DTYPES, Box, array_spec


class NumpyAdapter:
    """`numpy.ndarray` and its subclasses, and NumPy scalars, which are rank-0 arrays.

    Big-endian arrays are stored little-endian, and restored in the byte order of the `like` leaf.
    Subclasses are stored as plain arrays, and restored as such unless they are filled in place.
    Masked arrays are refused.
    """

    name = "numpy"

    def owns(self, kind: type) -> bool:
        return issubclass(kind, (np.ndarray, np.generic))

    def opens_anywhere(self, leaf: Any) -> bool:
        return isinstance(leaf, np.generic) or type(leaf) is np.ndarray

    def source(self, path: str, leaf: Any) -> Source:
        name = _dtype_name(path, leaf)
        plain = np.asarray(leaf)
        view = plain if plain.dtype == DTYPES[name] else None
        identity = memory_identity(plain) if isinstance(leaf, np.ndarray) else None
        return Source(array_spec(plain.shape, name), plain, view, identity)

    def fetch(self, source: Source, shard: int, box: Box, out: npt.NDArray[Any]) -> None:
        np.copyto(out, source.leaf[selection(box)], casting="equiv")

    def target(self, path: str, leaf: Any, *, in_place: bool) -> Target:
        known = DTYPE_NAMES.get(leaf.dtype) if type(leaf) is np.ndarray else None
        name = known or _dtype_name(path, leaf)
        target = Target(array_spec(leaf.shape, name), leaf, path=path)
        if not in_place or not isinstance(leaf, np.ndarray):
            return target
        check_fillable(path, "this array", leaf)
        if leaf.dtype == DTYPES[name]:
            target.buffers = (leaf if known else leaf.view(np.ndarray),)
        else:
            target.fill = True
        return target

    def place(self, target: Target, parts: Sequence[npt.NDArray[Any]]) -> Any:
        (values,) = parts
        if target.buffers:
            return target.leaf
        if target.fill:
            np.copyto(target.leaf, values, casting="equiv")
            return target.leaf
        if isinstance(target.leaf, np.generic):
            return values[()]
        if target.leaf.dtype != values.dtype:
            return values.astype(target.leaf.dtype)
        return values

    def refuses(self, path: str, dtype: str) -> DtypeMismatchError | None:
        return None

    def leaf(self, path: str, values: npt.NDArray[Any], extra: Mapping[str, Any]) -> Any:
        return values


def memory_identity(array: npt.NDArray[Any]) -> Hashable | None:
    """Return a value that is equal only for arrays of the same memory, shape, strides and dtype.

    None for an empty array.
    """
    if not array.size:
        return None
    if array.base is None:
        # Getting the address is slow, and only views share the memory of an array that owns it.
        return id(array)
    root: Any = array.base
    pointer: int = array.__array_interface__["data"][0]
    facts = (array.shape, array.strides, array.dtype)
    if (
        type(root) is np.ndarray
        and root.base is None
        and (root.shape, root.strides, root.dtype) == facts
        and root.__array_interface__["data"][0] == pointer
    ):
        return id(root)
    return ("memory", pointer, *facts)


def _dtype_name(path: str, leaf: Any) -> str:
    if is_masked(leaf):
        raise UnsupportedLeafError(
            f"{path}: masked arrays cannot be stored; store {{'data': x.data, 'mask': x.mask}}",
            path=path,
        )
    dtype: np.dtype[Any] = leaf.dtype
    name = DTYPE_NAMES.get(dtype)
    if name is None and dtype.names is None and dtype.kind in "biufc":
        name = DTYPE_NAMES.get(dtype.newbyteorder("<"))
    if name is not None:
        return name
    cast = None
    if dtype.names is not None:
        cast = "store {name: x[name] for name in x.dtype.names}, one array per field"
    elif dtype.kind == "O":
        cast = "store a list of its items, or cast it to a numeric dtype with x.astype(...)"
    elif dtype.kind in "mM":
        cast = "store x.astype('int64') and the unit"
    elif dtype.kind in "SUT":
        cast = "store x.tolist(), a list of str or bytes"
    elif dtype.kind == "V" and dtype.subdtype is None and dtype.name.startswith("void"):
        cast = "store x.view('uint8')"
    raise unsupported_dtype(path, "numpy", dtype, cast)
