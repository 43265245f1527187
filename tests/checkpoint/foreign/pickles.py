"""Pickles and archives of torch, put together byte by byte, without torch and pickle."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

METADATA = "torch.distributed.checkpoint.metadata"


@dataclass(frozen=True)
class Raw:
    """Opcodes as they are."""

    code: bytes


def named(module: str, name: str) -> Raw:
    """A global."""
    return Raw(b"c" + module.encode() + b"\n" + name.encode() + b"\n")


def call(function: Raw, *arguments: object) -> Raw:
    """What a function gives."""
    return Raw(function.code + program(arguments) + b"R")


def instance(cls: Raw, state: object) -> Raw:
    """An instance with a state."""
    return Raw(cls.code + b")\x81" + program(state) + b"b")


def program(value: object) -> bytes:
    """The opcodes that make a value."""
    if isinstance(value, Raw):
        return value.code
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
    if isinstance(value, tuple):
        return b"(" + b"".join(map(program, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(program, value)) + b"e"
    assert isinstance(value, dict)
    return b"}(" + b"".join(program(k) + program(v) for k, v in value.items()) + b"u"


def pickled(value: object, protocol: int = 4) -> bytes:
    """A pickle of a value."""
    return b"\x80" + bytes([protocol]) + program(value) + b"."


# ------------------------------------------------------------------------------------ torch.save


def size(*extents: int) -> Raw:
    return call(named("torch", "Size"), tuple(extents))


def tensor(
    shape: Sequence[int],
    strides: Sequence[int],
    *,
    storage: str = "FloatStorage",
    count: int | None = None,
    offset: int = 0,
) -> Raw:
    """A tensor as torch.save describes it, over the member `data/0`."""
    nelements = 1
    for n in shape:
        nelements *= n
    identity = (
        "storage",
        named("torch", storage),
        "0",
        "cpu",
        nelements if count is None else count,
    )
    hooks = call(named("collections", "OrderedDict"))
    return call(
        named("torch._utils", "_rebuild_tensor_v2"),
        Raw(program(identity) + b"Q"),
        offset,
        tuple(shape),
        tuple(strides),
        False,
        hooks,
    )


def archive(
    value: object,
    payload: bytes | None = None,
    *,
    byteorder: bytes = b"little",
    method: int = zipfile.ZIP_STORED,
    first: str = "data.pkl",
) -> bytes:
    """What torch.save writes of a value, with the bytes of its one tensor."""
    members = {first: pickled(value, 2), "byteorder": byteorder}
    if payload is not None:
        members["data/0"] = payload
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        for name, content in {**members, "version": b"3\n"}.items():
            info = zipfile.ZipInfo(f"archive/{name}")
            info.compress_type = method
            file.writestr(info, content)
    return buffer.getvalue()


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


# ----------------------------------------------------------------------- the metadata of DCP


def described(
    extents: Sequence[int],
    shards: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    dtype: str = "float32",
    layout: str = "torch.strided",
) -> Raw:
    """A tensor and its shards, each with offset and size."""
    strided = call(named("torch.serialization", "_get_layout"), layout)
    encoding = call(named(METADATA, "_MEM_FORMAT_ENCODING"), 0)
    properties = instance(
        named(METADATA, "TensorProperties"),
        (named("torch", dtype), strided, False, encoding, False),
    )
    chunks = [
        instance(
            named(METADATA, "ChunkStorageMetadata"),
            {"offsets": size(*offset), "sizes": size(*shape)},
        )
        for offset, shape in shards
    ]
    return instance(
        named(METADATA, "TensorStorageMetadata"),
        {"properties": properties, "size": size(*extents), "chunks": chunks},
    )


def bytes_described() -> Raw:
    """A value that is no tensor."""
    return Raw(named(METADATA, "BytesStorageMetadata").code + b")\x81")


def index(key: str, offset: Sequence[int] | None = None) -> Raw:
    state: dict[str, Any] = {"fqn": key, "index": None}
    if offset is not None:
        state["offset"] = size(*offset)
    return instance(named(METADATA, "MetadataIndex"), state)


def place(path: object, offset: object, length: object, **more: object) -> Raw:
    cls = named("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    return instance(cls, {"relative_path": path, "offset": offset, "length": length, **more})


def metadata(
    state_dict_metadata: Mapping[str, Raw],
    storage_data: Sequence[tuple[Raw, Raw]],
    *,
    planner_data: object = None,
    version: object = "1.0.0",
    **more: object,
) -> Raw:
    """The whole."""
    places = Raw(b"}(" + b"".join(program(k) + program(v) for k, v in storage_data) + b"u")
    return instance(
        named(METADATA, "Metadata"),
        {
            "state_dict_metadata": dict(state_dict_metadata),
            "planner_data": planner_data,
            "storage_data": places,
            "storage_meta": None,
            "version": version,
            **more,
        },
    )
