"""The decoders under test, and inputs that they accept.

Lengths and checksums are put around every input (`surround`), so that mutations reach what is
behind them; the first byte of an input says how, and one kind leaves the input as it is.
"""

from __future__ import annotations

import json
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from asyncckpt.checkpoint.metadata import resolve
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.chunks import (
    ChunkIndex,
    decode_chunk_index,
    encode_chunk_index,
    index_nbytes,
)
from asyncckpt.format.ocdbt.btree import encode_tree
from asyncckpt.format.ocdbt.datafiles import Location
from asyncckpt.format.ocdbt.keys import prepare_keys
from asyncckpt.format.ocdbt.manifest import Manifest, Version, decode_manifest
from asyncckpt.format.ocdbt.nodes import decode_node
from asyncckpt.format.ocdbt.walk import TreeLimits, decode_tree
from asyncckpt.format.ocdbt.wire import MANIFEST_MAGIC, NODE_MAGIC
from asyncckpt.format.record import encode_record
from asyncckpt.format.record_values import (
    ArrayTable,
    CommitRecord,
    IndexExtent,
    LeafTable,
    Piece,
    StoredSpec,
)
from asyncckpt.format.scalars import encode_scalar
from asyncckpt.reports import FileInfo
from asyncckpt.spec import ArraySpec
from asyncckpt.tree import flatten, unflatten
from tests.format.manifests import VersionNode, encode_manifest
from tests.format.values import value_columns
from tests.fuzz import hostile
from tests.fuzz.engine import Target
from tests.fuzz.foreign import targets as foreign_targets
from tests.fuzz.mutate import mutate_json
from tests.fuzz.surround import PACKED, PLAIN, RAW, framed, recorded, sealed, unframed

# ------------------------------------------------------------------------------------------ OCDBT


def _manifest() -> Target:
    root = Location("d/0123", 4096, 777)
    versions = tuple(
        Version(n, root, 2, 5, 900, 123_456, 1_700_000_000_000_000_000) for n in (1, 2, 300)
    )
    older = VersionNode(2, root, 2, 1_600_000_000_000_000_000, 1)
    bodies = [
        unframed(encode_manifest(manifest, nodes=nodes))
        for manifest, nodes in (
            (Manifest(bytes(16)), ()),
            (Manifest(bytes(range(16)), versions=versions[:1]), ()),
            (Manifest(bytes(range(16)), versions=versions), ()),
            (Manifest(bytes(range(16)), versions=versions[2:]), (older,)),
            (Manifest(bytes(16), numbered=True), ()),
        )
    ]
    seeds = [kind + body for kind in (PLAIN, PACKED) for body in bodies]

    def decode(data: bytes) -> object:
        return decode_manifest(framed(data, MANIFEST_MAGIC), file="manifest.ocdbt")

    return Target("manifest", tuple(seeds), decode, head=1, hostile=hostile.manifests)


@cache
def _nodes(names: str = "abcde") -> tuple[bytes, ...]:
    """The bodies of a tree of three levels with these arrays, the root last."""
    keys = sorted(
        f"{name}/{tail}".encode() for name in names for tail in ("c/0", "c/1", "zarr.json")
    )
    inline = [b'{"x":1}' * 9 if key.endswith(b"json") else None for key in keys]
    count = len(keys)
    file = np.array([-1 if value else row % 2 for row, value in enumerate(inline)], np.int64)
    tree = encode_tree(
        prepare_keys(keys),
        value_columns(inline, file, np.arange(count) * 4096, np.full(count, 4100)),
        data_files=["d/00ff-0", "d/00ff-1"],
        node_file="d/index",
        node_offset=0,
        max_decoded_node_nbytes=110,
    )
    return tuple(unframed(block) for block in map(bytes, tree.blocks))


def _node() -> Target:
    prefixes = (b"", b"params.")

    def decode(data: bytes) -> object:
        kind = data[1] if len(data) > 1 else 0
        return decode_node(
            framed(data[:1] + data[2:], NODE_MAGIC),
            file="d/index",
            offset=4096,
            expected_height=(None, 0, 1, 2)[kind >> 1 & 3],
            key_prefix=prefixes[kind & 1],
        )

    seeds = [kind + b"\0" + body for kind in (PLAIN, PACKED) for body in _nodes()]
    return Target("node", tuple(seeds), decode, head=2)


def _tree() -> Target:
    """A whole tree in one file, the root last; before each node its kind and its length."""
    names = "ab"

    def decode(data: bytes) -> object:
        blocks = []
        while data:
            end = 5 + int.from_bytes(data[1:5], "little")
            blocks.append(framed(data[:1] + data[5:end], NODE_MAGIC))
            data = data[end:]
        file = b"".join(blocks)
        if not blocks:
            raise CorruptCheckpointError("no node at all")

        def fetch(location: Location) -> bytes:
            block = file[location.offset : location.offset + location.nbytes]
            if len(block) < location.nbytes:
                raise CorruptCheckpointError("the file is shorter")
            return block

        root = Location("d/index", len(file) - len(blocks[-1]), len(blocks[-1]))
        height = blocks[-1][14] if len(blocks[-1]) > 18 and blocks[-1][13] == 0 else 0
        version = Version(1, root, height, 3 * len(names), 0, 0, 0)
        return decode_tree(version, fetch, limits=TreeLimits.of_files(1, len(file)))

    def stored(data: bytes) -> bytes:
        return data[:1] + (len(data) - 1).to_bytes(4, "little") + data[1:]

    seed = b"".join(stored(PLAIN + body) for body in _nodes(names))
    return Target("tree", (seed,), decode, hostile=lambda: [stored(n) for n in hostile.nodes()])


# ------------------------------------------------------------------------------------- our record


@cache
def _record() -> CommitRecord:
    wide, scalar = ArraySpec((4, 6), "bfloat16"), ArraySpec((), "int64")
    tree = {"w": 0, "lr": 0.1, "p": [0, 0, (None, {})], "n": 3, "s": "x", "z": 1j, "b": b"\0"}
    structure = flatten(tree).structure
    values = [None, 0.1, None, None, 3, "x", 1j, b"\0"]
    kinds = ["torch", "float", "jax", "numpy", "int", "str", "complex", "bytes"]
    return CommitRecord(
        save_id="0123456789abcdef",
        step=12,
        epoch=3,
        writer=0,
        writers=2,
        plan_digest="00ff",
        created_ns=1_700_000_000_000_000_000,
        library="asyncckpt 0.1.0",
        tree=structure.to_json(),
        leaves=LeafTable(
            kinds,
            [None if v is None else encode_scalar(v)[1] for v in values],
            {0: {"requires_grad": True}},
            {2: (Piece((0, 0), 1), Piece((4, 0), 2))},
        ),
        specs=(StoredSpec(wide, (2, 6)), StoredSpec(scalar, (), 3)),
        arrays=ArrayTable(["w", "p.0", "p.1", "count"], [0, 0, 0, 1], {2: 1}),
        files=(FileInfo("default/d/00ff-0", 5000, 0xDEADBEEF),),
        chunk_index=IndexExtent(0, 100, index_nbytes(5), 7),
        manifest=b"\x0c\xdb:*",
        metadata={"tokens": 10**9, "note": "ö", "list": [1, [2, None]]},
        metrics={"loss": 0.25, "worst": float("inf")},
    )


def _commit_record() -> Target:
    files: Any = SimpleNamespace(location="run/12")

    def decode(data: bytes) -> object:
        opened = resolve(files, recorded(data), cast(Any, None))
        record = opened.record
        assert record is not None
        structure = opened.structure()
        paths = structure.paths()
        return unflatten(structure, paths), opened.leaf_pieces()

    document = json.loads(encode_record(_record()))
    del document["crc32c"]
    seeds = [PLAIN + json.dumps(document, separators=(",", ":")).encode()]

    def bad() -> list[bytes]:
        return [PLAIN + text for text in hostile.json_members(seeds[0][1:])]

    return Target("record", tuple(seeds), decode, mutate_json, head=1, hostile=bad)


def _chunk_index() -> Target:
    record = _record()

    def decode(data: bytes) -> object:
        kind, body = data[:1], data[1:]
        index = decode_chunk_index(body if kind == RAW else sealed(body), file="d/index")
        record.validate_index(index)
        return index

    chunk_nbytes = np.array([24, 24, 24, 24, 20]) + 4
    index = ChunkIndex(
        np.zeros(5, np.int64),
        np.array([0, 100, 200, 300, 400]),
        chunk_nbytes,
        np.array([0, 1, 2, 3, 2**32 - 1], np.uint32),
    )
    return Target("chunk-index", (PLAIN + encode_chunk_index(index)[:-4],), decode, head=1)


def targets() -> dict[str, Target]:
    """All targets by name."""
    own = [_manifest(), _node(), _tree(), _commit_record(), _chunk_index()]
    return {target.name: target for target in (*own, *foreign_targets())}
