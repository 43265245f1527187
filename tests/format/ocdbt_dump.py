"""Manifests and nodes as JSON that a person can read, and back.

Bytes (keys, inline values, uuids) are written as text where they are printable ASCII, else as
``{"hex": "…"}``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from asyncckpt.format.ocdbt.datafiles import DataFile, Location
from asyncckpt.format.ocdbt.manifest import Manifest, Version
from asyncckpt.format.ocdbt.nodes import InteriorNode, LeafNode

Dump = dict[str, Any]
Structure = Manifest | LeafNode | InteriorNode


def dump(structure: Structure) -> Dump:
    """JSON that `load` turns into an equal structure."""
    if isinstance(structure, Manifest):
        return {
            "type": "manifest",
            "uuid": structure.uuid.hex(),
            "versions": [asdict(version) for version in structure.versions],
            **({"numbered": True} if structure.numbered else {}),
        }
    files = [asdict(file) for file in structure.files]
    if isinstance(structure, LeafNode):
        values = zip(
            structure.inline,
            structure.file.tolist(),
            structure.offset.tolist(),
            structure.nbytes.tolist(),
            strict=True,
        )
        return {
            "type": "leaf",
            "files": files,
            "entries": [
                {"key": _dump_bytes(key), "inline": _dump_bytes(value)}
                if value is not None
                else {"key": _dump_bytes(key), "file": file, "offset": offset, "nbytes": nbytes}
                for key, (value, file, offset, nbytes) in zip(structure.keys, values, strict=True)
            ],
        }
    rows = zip(*(getattr(structure, name).tolist() for name in _CHILD_COLUMNS), strict=True)
    return {
        "type": "interior",
        "height": structure.height,
        "files": files,
        "children": [
            {"key": _dump_bytes(key), **dict(zip(_CHILD_COLUMNS, row, strict=True))}
            for key, row in zip(structure.keys, rows, strict=True)
        ],
    }


def load(document: Dump) -> Structure:
    """The structure that `dump` made the document of.

    Raises:
        ValueError: the document is of no known type.
    """
    loaders: dict[str, Callable[[Dump], Structure]] = {
        "manifest": _load_manifest,
        "leaf": _load_leaf,
        "interior": _load_interior,
    }
    kind = document.get("type")
    if kind not in loaders:
        raise ValueError(f"{kind!r} is no dumped structure; expected one of {sorted(loaders)}")
    return loaders[kind](document)


_CHILD_COLUMNS = (
    "prefix_nbytes",
    "file",
    "offset",
    "nbytes",
    "child_num_keys",
    "child_tree_nbytes",
    "child_indirect_nbytes",
)


def _load_manifest(document: Dump) -> Manifest:
    def location(value: Dump | None) -> Location | None:
        return None if value is None else Location(**value)

    return Manifest(
        bytes.fromhex(document["uuid"]),
        tuple(Version(**{**v, "root": location(v["root"])}) for v in document["versions"]),
        document.get("numbered", False),
    )


def _load_leaf(document: Dump) -> LeafNode:
    entries = document["entries"]
    inline = [_load_bytes(e["inline"]) if "inline" in e else None for e in entries]
    sizes = [e["nbytes"] if v is None else len(v) for e, v in zip(entries, inline, strict=True)]
    return LeafNode(
        [_load_bytes(e["key"]) for e in entries],
        tuple(DataFile(**file) for file in document["files"]),
        np.array([e.get("file", -1) for e in entries], np.int64),
        np.array([e.get("offset", -1) for e in entries], np.int64),
        np.array(sizes, np.int64),
        inline,
    )


def _load_interior(document: Dump) -> InteriorNode:
    children = document["children"]
    columns = {
        name: np.array([child[name] for child in children], np.int64) for name in _CHILD_COLUMNS
    }
    return InteriorNode(
        height=document["height"],
        keys=[_load_bytes(child["key"]) for child in children],
        files=tuple(DataFile(**file) for file in document["files"]),
        **columns,
    )


def _dump_bytes(value: bytes) -> str | Dump:
    if all(32 <= byte < 127 for byte in value):
        return value.decode()
    return {"hex": value.hex()}


def _load_bytes(value: str | Dump) -> bytes:
    return value.encode() if isinstance(value, str) else bytes.fromhex(value["hex"])
