"""The formats as they were when they were fixed: readable JSON beside the bytes.

A change here is a change of the format. `python -m tests.format.test_golden` writes the files
anew; look at what differs before keeping them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from asyncckpt.format.chunks import (
    ChunkIndex,
    decode_chunk_index,
    encode_chunk_index,
)
from asyncckpt.format.crc import crc32c
from asyncckpt.format.ocdbt.btree import EncodedTree, encode_tree
from asyncckpt.format.ocdbt.datafiles import Location
from asyncckpt.format.ocdbt.keys import prepare_keys
from asyncckpt.format.ocdbt.manifest import Manifest, Version, decode_manifest
from asyncckpt.format.ocdbt.nodes import decode_node
from asyncckpt.format.record import decode_record, encode_record
from asyncckpt.format.record_values import (
    ArrayTable,
    CommitRecord,
    FixedName,
    IndexExtent,
    LeafTable,
    Piece,
    StoredSpec,
)
from asyncckpt.format.zarr3 import decode_metadata, encode_metadata
from asyncckpt.reports import FileInfo
from asyncckpt.spec import ArraySpec
from tests.format.dump import Structure, dump, load
from tests.format.manifests import encode_manifest
from tests.format.values import value_columns

GOLDEN = Path(__file__).parent / "golden"


def manifest() -> bytes:
    root = Location("d/index-00ff", 4096, 777)
    version = Version(1, root, 2, 5, 900, 123_456, 1_700_000_000_000_000_000)
    return encode_manifest(Manifest(bytes(range(16)), (version,)))


def tree() -> EncodedTree:
    keys = sorted(
        f"params.{name}/{tail}".encode() for name in "ab" for tail in ("c/0", "c/1", "zarr.json")
    )
    inline = [b'{"x":1}' if key.endswith(b"json") else None for key in keys]
    file = np.array([-1 if value else row % 2 for row, value in enumerate(inline)], np.int64)
    return encode_tree(
        prepare_keys(keys),
        value_columns(inline, file, np.arange(6) * 4096, np.full(6, 4100)),
        data_files=["d/00ff-0", "d/00ff-1"],
        node_file="d/index-00ff",
        node_offset=0,
        max_decoded_node_nbytes=110,
    )


def chunk_index() -> bytes:
    return encode_chunk_index(
        ChunkIndex(
            np.array([0, 0, 1]),
            np.array([0, 4096, 2**40]),
            np.array([100, 2**33, 4]),
            np.array([0, 1, 2**32 - 1], np.uint32),
        )
    )


FIXED = (
    FixedName.of("default/manifest.ocdbt", b"\x0c\xdb:*"),
    FixedName.of("default/_METADATA", b"{}", ".asyncckpt-0123456789abcdef-fixed-0"),
)
INDEX = encode_chunk_index(
    ChunkIndex(np.zeros(5), np.arange(5) * 8, np.full(5, 4), np.zeros(5, np.uint32))
)


def record() -> bytes:
    wide, scalar = ArraySpec((4, 6), "bfloat16"), ArraySpec((), "int64")
    return encode_record(
        CommitRecord(
            save_id="0123456789abcdef",
            step=12,
            epoch=3,
            writer=0,
            writers=2,
            plan_digest="00ff",
            created_ns=1_700_000_000_000_000_000,
            library="asyncckpt 0.1.0",
            tree={"dict": {"w": "*", "lr": "*", "pieces": "*", "count": "*"}},
            leaves=LeafTable(
                ["torch", "float", "jax", "numpy"],
                [None, "3fb999999999999a", None, None],
                {0: {"requires_grad": True}},
                {2: (Piece((0, 0), 1), Piece((4, 0), 2))},
            ),
            specs=(StoredSpec(wide, (2, 6)), StoredSpec(scalar, (), 3)),
            arrays=ArrayTable(["w", "pieces.0", "pieces.1", "count"], [0, 0, 0, 1], {2: 1}),
            files=(FileInfo("default/d/00ff-0", 5000, 0xDEADBEEF), *FIXED),
            chunk_index=IndexExtent(0, 100, len(INDEX), crc32c(INDEX[:-4]), INDEX),
            manifest=b"\x0c\xdb:*",
            metadata={"tokens": 10**9, "note": "ö"},
            metrics={"loss": 0.25, "worst": float("inf")},
        )
    )


CASES: dict[str, tuple[Callable[[], bytes], Callable[[bytes], Structure]]] = {
    "manifest": (manifest, lambda data: decode_manifest(data, file="manifest.ocdbt")),
    "leaf": (
        lambda: bytes(tree().blocks[0]),
        lambda data: decode_node(data, file="d/index-00ff", offset=0),
    ),
    "interior": (
        lambda: bytes(tree().blocks[-1]),
        lambda data: decode_node(data, file="d/index-00ff", offset=0, expected_height=1),
    ),
    "chunk_index": (chunk_index, lambda data: decode_chunk_index(data, file="d/index-00ff")),
    "record": (record, lambda data: decode_record(data, location="12")),
    "zarr": (
        lambda: encode_metadata(ArraySpec((4, 6), "complex64"), (2, 6), 3),
        lambda data: decode_metadata(data, file="w/zarr.json"),
    ),
}


def text_of(structure: Structure) -> str:
    return json.dumps(dump(structure), indent=1, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_the_golden_file(name: str) -> None:
    encode, _ = CASES[name]
    assert encode() == (GOLDEN / f"{name}.bin").read_bytes()


@pytest.mark.parametrize("name", [*CASES, "record_1"])
def test_golden_bytes_decode_to_the_golden_dump(name: str) -> None:
    """Also those of version 1 of the record, which is read and no longer written."""
    _, decode = CASES[name.removesuffix("_1")]
    structure = decode((GOLDEN / f"{name}.bin").read_bytes())
    assert text_of(structure) == (GOLDEN / f"{name}.json").read_text()


@pytest.mark.parametrize("name", CASES)
def test_golden_dumps_load_to_what_the_bytes_decode_to(name: str) -> None:
    _, decode = CASES[name]
    loaded = load(json.loads((GOLDEN / f"{name}.json").read_text()))
    decoded = decode((GOLDEN / f"{name}.bin").read_bytes())
    assert type(loaded) is type(decoded)
    if isinstance(decoded, dict | list):
        assert loaded == decoded
        assert list(loaded) == list(decoded)  # the order of the keys, too
        return
    for field in dataclasses.fields(decoded):
        a, b = getattr(loaded, field.name), getattr(decoded, field.name)
        assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b, field.name


def test_bytes_that_are_no_text_are_dumped_as_hex() -> None:
    keys = [b"\0", b"key", b"\xff"]
    tree_of_bytes = encode_tree(
        prepare_keys(keys),
        value_columns([b"\x80", b"x", b""], *(np.full(3, -1, np.int64) for _ in range(3))),
        data_files=[],
        node_file="n",
        node_offset=0,
        max_decoded_node_nbytes=1000,
    )
    node = decode_node(bytes(tree_of_bytes.blocks[0]), file="n", offset=0)
    document = json.loads(json.dumps(dump(node)))
    assert [entry["key"] for entry in document["entries"]] == [{"hex": "00"}, "key", {"hex": "ff"}]
    again = load(document)
    assert dump(again) == document


def test_a_document_of_no_known_type_is_refused() -> None:
    with pytest.raises(ValueError, match="'tree' is no dumped structure"):
        load({"type": "tree"})


def write_golden_files() -> None:
    for name, (encode, decode) in CASES.items():
        data = encode()
        (GOLDEN / f"{name}.bin").write_bytes(data)
        (GOLDEN / f"{name}.json").write_text(text_of(decode(data)))


if __name__ == "__main__":
    write_golden_files()
