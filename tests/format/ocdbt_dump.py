"""Manifests and nodes as JSON that a person can read, and back.

Bytes (keys, inline values, uuids) are written as text where they are printable ASCII, else as
``{"hex": "…"}``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from asyncckpt.format.ocdbt.datafiles import Location
from asyncckpt.format.ocdbt.manifest import Manifest, Version
from asyncckpt.format.ocdbt.nodes import Child, Value

Dump = dict[str, Any]
Structure = Manifest | dict[bytes, Value] | list[Child]


def dump(structure: Structure) -> Dump:
    """JSON that `load` turns into an equal structure."""
    if isinstance(structure, Manifest):
        return {
            "type": "manifest",
            "uuid": structure.uuid.hex(),
            "versions": [asdict(version) for version in structure.versions],
            **({"numbered": True} if structure.numbered else {}),
        }
    if isinstance(structure, dict):
        return {
            "type": "leaf",
            "entries": [
                {"key": _dump_bytes(key), "inline": _dump_bytes(value)}
                if isinstance(value, bytes)
                else {"key": _dump_bytes(key), **dict(zip(_PLACE, value, strict=True))}
                for key, value in structure.items()
            ],
        }
    return {
        "type": "interior",
        "children": [
            {
                "first_key": _dump_bytes(child.first_key),
                "prefix": _dump_bytes(child.prefix),
                "location": asdict(child.location),
                "num_keys": child.num_keys,
            }
            for child in structure
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


_PLACE = ("file", "offset", "nbytes")


def _load_manifest(document: Dump) -> Manifest:
    def location(value: Dump | None) -> Location | None:
        return None if value is None else Location(**value)

    return Manifest(
        bytes.fromhex(document["uuid"]),
        tuple(Version(**{**v, "root": location(v["root"])}) for v in document["versions"]),
        document.get("numbered", False),
    )


def _load_leaf(document: Dump) -> dict[bytes, Value]:
    return {
        _load_bytes(entry["key"]): _load_bytes(entry["inline"])
        if "inline" in entry
        else (entry["file"], entry["offset"], entry["nbytes"])
        for entry in document["entries"]
    }


def _load_interior(document: Dump) -> list[Child]:
    return [
        Child(
            Location(**child["location"]),
            _load_bytes(child["first_key"]),
            _load_bytes(child["prefix"]),
            child["num_keys"],
        )
        for child in document["children"]
    ]


def _dump_bytes(value: bytes) -> str | Dump:
    if all(32 <= byte < 127 for byte in value):
        return value.decode()
    return {"hex": value.hex()}


def _load_bytes(value: str | Dump) -> bytes:
    return value.encode() if isinstance(value, str) else bytes.fromhex(value["hex"])
