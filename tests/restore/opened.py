"""Open checkpoints without files, for tests of single stages of a restore."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from asyncckpt.checkpoint.metadata import Extents, OpenCheckpoint, Storage
from asyncckpt.format.codecs import RAW, Codec
from asyncckpt.format.crc import crc32c
from asyncckpt.format.record_values import ArrayTable, LeafTable
from asyncckpt.format.scalars import encode_scalar
from asyncckpt.options import RestoreOptions
from asyncckpt.ports import StoreCapabilities
from asyncckpt.reports import FileInfo
from asyncckpt.restore.plan import Destinations
from asyncckpt.restore.request import RestoreRequest, restore_request
from asyncckpt.spec import DTYPE_NAMES, ArraySpec
from asyncckpt.tree import flatten

LOCATION = "/run/1"

CAPABILITIES = StoreCapabilities(read_gap_nbytes=100)


def opened(
    tree: Any,
    *,
    tied: Mapping[int, int] | None = None,
    extra: Mapping[int, Mapping[str, Any]] | None = None,
    chunks: Mapping[str, tuple[int, ...]] | None = None,
    codec: Codec = RAW,
) -> OpenCheckpoint:
    """Return a checkpoint of NumPy arrays and Python scalars, each array of its own kind."""
    flat = flatten(tree)
    kinds: list[str] = []
    values: list[Any] = []
    storages: list[Storage] = []
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        is_array = isinstance(leaf, np.ndarray)
        kind, value = ("numpy", None) if is_array else encode_scalar(leaf)
        kinds.append(kind)
        values.append(value)
        if is_array:
            shape = (chunks or {}).get(path, tuple(max(n, 1) for n in leaf.shape))
            spec = ArraySpec(leaf.shape, DTYPE_NAMES[leaf.dtype])
            storages.append(Storage(spec, shape, codec))
    numbers = list(range(len(storages)))
    arrays = ArrayTable([str(n) for n in numbers], numbers, tied or {})

    async def read_extents(*_: Any) -> Extents:
        raise AssertionError("nothing is read here")

    return OpenCheckpoint(
        files=cast(Any, SimpleNamespace(location=LOCATION, capabilities=CAPABILITIES)),
        format="asyncckpt",
        tree=flat.structure,
        leaves=LeafTable(kinds, values, extra or {}),
        arrays=arrays,
        storages=tuple(storages),
        stored_files=(FileInfo("d/0", 1 << 30, None),),
        read_extents=read_extents,
        record=cast(Any, object()),
    )


def request(mode: Any, like: Any = None, **how: Any) -> RestoreRequest:
    """Return what `restore` or `restore_into` would ask for."""
    arguments: dict[str, Any] = {
        "leaves": "numpy",
        "include": None,
        "strict": True,
        "cast": False,
        "options": RestoreOptions(),
        "progress": None,
    }
    return restore_request(mode, like, **{**arguments, **how})[0]


def destinations(values: Mapping[str, Any]) -> Destinations:
    """Return memory by path, for the arrays in order."""
    made = Destinations()
    for number, (path, memory) in enumerate(values.items()):
        made.add(path, number, None, memory)
    return made


def packed(payloads: list[bytes]) -> tuple[bytes, Extents]:
    """Return the bytes of a data file with these chunks, one after the other, and their extents."""
    data, offsets = b"", []
    for payload in payloads:
        offsets.append(len(data))
        data += payload + crc32c(payload).to_bytes(4, "little")
    return data, Extents(
        np.zeros(len(payloads), np.int64),
        np.array(offsets, np.int64),
        np.array([len(payload) + 4 for payload in payloads], np.int64),
        np.array([crc32c(payload) for payload in payloads], np.uint32),
    )
