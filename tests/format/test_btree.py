"""Writing and reading B+trees."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.ocdbt import walk
from asyncckpt.format.ocdbt.btree import EncodedTree, encode_tree
from asyncckpt.format.ocdbt.datafiles import Location, encode_data_files
from asyncckpt.format.ocdbt.keys import prepare_keys
from asyncckpt.format.ocdbt.manifest import Version
from asyncckpt.format.ocdbt.nodes import decode_node
from asyncckpt.format.ocdbt.walk import TreeDecoder, TreeLimits, decode_tree
from asyncckpt.format.ocdbt.wire import (
    FRAME_HEADER,
    FRAME_TRAILER,
    NODE_MAGIC,
    encode_varint,
    encode_varints,
    frame,
)
from tests.checkpoint.foreign.databases import packed
from tests.format.values import value_columns

FILES = ("d/a", "d/b", "data/c")
Value = bytes | tuple[int, int, int]

keys = st.lists(
    st.sampled_from([b"", b"a", b"params.", b"layer", b"/c/", b"\0", b"\xff", b"0", b"1"]),
    max_size=5,
).map(b"".join) | st.binary(max_size=20)
values = st.binary(max_size=30) | st.tuples(
    st.integers(0, 2), st.integers(0, 2**40), st.integers(0, 2**40)
)


def encode(
    entries: dict[bytes, Value], max_nbytes: int = 1 << 20, node_offset: int = 0
) -> EncodedTree:
    ordered = sorted(entries)
    rows = [entries[key] for key in ordered]
    columns = [[-1 if isinstance(v, bytes) else v[i] for v in rows] for i in range(3)]
    return encode_tree(
        prepare_keys(ordered),
        value_columns(
            [v if isinstance(v, bytes) else None for v in rows],
            *(np.array(column, np.int64) for column in columns),
        ),
        data_files=FILES,
        node_file="d/nodes",
        node_offset=node_offset,
        max_decoded_node_nbytes=max_nbytes,
    )


def fetcher(tree: EncodedTree, node_offset: int = 0) -> Callable[[Location], bytes]:
    data = b"".join(tree.blocks)

    def fetch(location: Location) -> bytes:
        assert location.file == "d/nodes"
        start = location.offset - node_offset
        return data[start : start + location.nbytes]

    return fetch


@given(
    st.dictionaries(keys, values, max_size=60),
    st.sampled_from([1, 40, 90, 300, 1 << 20]),
    st.sampled_from([0, 4096]),
)
def test_trees_round_trip_at_any_node_size(
    entries: dict[bytes, Value], max_nbytes: int, node_offset: int
) -> None:
    tree = encode(entries, max_nbytes, node_offset)
    version, fetch = tree.version, fetcher(tree, node_offset)
    found: dict[bytes, Value] = {
        key: value if isinstance(value, bytes) else (FILES.index(value[0]), *value[1:])
        for key, value in decode_tree(version, fetch).items()
    }
    assert found == entries
    assert list(found) == sorted(entries)
    assert tree.version.num_keys == len(entries)
    assert tree.version.tree_nbytes == sum(map(len, tree.blocks))
    assert tree.version.indirect_value_nbytes == sum(
        v[2] for v in entries.values() if not isinstance(v, bytes)
    )
    data = b"".join(tree.blocks)
    for key, offset in zip(sorted(entries), tree.inline_offset.tolist(), strict=True):
        value = entries[key]
        if isinstance(value, bytes):
            start = offset - node_offset
            assert data[start : start + len(value)] == value
        else:
            assert offset == -1


@given(st.dictionaries(keys, values, min_size=1, max_size=80), st.integers(60, 400))
def test_nodes_stay_within_their_size(entries: dict[bytes, Value], max_nbytes: int) -> None:
    tree = encode(entries, max_nbytes)
    offset = 0
    for block in map(bytes, tree.blocks):
        node = decode_node(block, file="d/nodes", offset=offset)
        least = 1 if isinstance(node, dict) else 2
        assert len(block) - 18 <= max_nbytes or len(node) <= least
        offset += len(block)


def test_small_nodes_make_high_trees() -> None:
    tree = encode({b"key%05d" % i: b"value" for i in range(2000)}, 100)
    assert tree.version.root_height >= 3
    assert len(decode_tree(tree.version, fetcher(tree))) == 2000


def test_nodes_are_filled() -> None:
    tree = encode({b"key%05d" % i: (0, i, 10) for i in range(20_000)}, 10_000)
    nodes = [(b, decode_node(b, file="", offset=0)) for b in map(bytes, tree.blocks)]
    leaves = [b for b, node in nodes if isinstance(node, dict)]
    assert sum(map(len, leaves)) > 0.9 * len(leaves) * 10_000


def test_a_tree_without_keys_has_no_root() -> None:
    tree = encode({})
    assert tree.version.root is None and tree.blocks == []
    assert decode_tree(tree.version, fetcher(tree)) == {}


def test_two_hundred_thousand_keys_do_not_take_quadratic_time() -> None:
    names = [f"params.layers_{i // 10}.attention.block_{i % 10}.kernel" for i in range(100_000)]
    unsorted = [f"{n}{tail}".encode() for tail in ("/zarr.json", "/c/0/0") for n in names]
    begin = time.process_time()
    ordered = sorted(unsorted)
    columns = prepare_keys(ordered)
    prepared = time.process_time()
    document = b"{}" * 100
    inline = [document if key.endswith(b"json") else None for key in ordered]
    file = np.array([0 if value is None else -1 for value in inline], np.int64)
    tree = encode_tree(
        columns,
        value_columns(inline, file, np.arange(file.size) * 4100, np.full(file.size, 4100)),
        data_files=["d/a"],
        node_file="d/nodes",
        node_offset=0,
        max_decoded_node_nbytes=1 << 20,
    )
    encoded = time.process_time()
    result = decode_tree(tree.version, fetcher(tree))
    decoded = time.process_time()
    assert list(result) == ordered
    # Measured 0.2, 0.05 and 0.2 s. A pass through all keys for each key takes 75 s or more.
    assert prepared - begin < 5.0
    assert encoded - prepared < 5.0
    assert decoded - encoded < 5.0


@given(st.lists(keys, unique=True, min_size=2))
def test_shared_prefixes_are_those_of_neighbours(unsorted: list[bytes]) -> None:
    ordered = sorted(unsorted)
    columns = prepare_keys(ordered)
    for row, (a, b) in enumerate(itertools.pairwise(ordered)):
        n = int(columns.shared[row + 1])
        assert a[:n] == b[:n] and a[: n + 1] != b[: n + 1]
    assert [columns.key(row) for row in range(len(columns))] == ordered
    rests = [key[n:] for key, n in zip(ordered, columns.shared.tolist(), strict=True)]
    assert columns.suffixes == b"".join(rests)


@given(st.lists(keys, min_size=2))
def test_keys_out_of_order_are_refused(unsorted: list[bytes]) -> None:
    if sorted(set(unsorted)) == unsorted:
        prepare_keys(unsorted)
    else:
        with pytest.raises(ValueError, match="does not sort after"):
            prepare_keys(unsorted)


def test_a_key_beyond_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than 65536"):
        prepare_keys([b"k" * 65_537])


# -------------------------------------------------------------------------------- damaged nodes

ENTRIES: dict[bytes, Value] = {
    b"params.a/c/0": (1, 300, 77),
    b"params.a/zarr.json": b"{}",
    b"params.b/c/0": (0, 5, 6),
    b"x": b"",
}
LEAF = bytes(encode(ENTRIES).blocks[0])
INTERIOR = bytes(encode({b"params.%d" % i: b"abc" for i in range(20)}, 80).blocks[-1])


@pytest.mark.parametrize("block", [LEAF, INTERIOR], ids=["leaf", "interior"])
def test_every_flipped_bit_of_a_node_is_found(block: bytes) -> None:
    for row in range(len(block)):
        for bit in range(8):
            bad = bytearray(block)
            bad[row] ^= 1 << bit
            with pytest.raises(CorruptCheckpointError) as caught:
                decode_node(bytes(bad), file="d/nodes", offset=1000)
            assert caught.value.file == "d/nodes"
            assert caught.value.offset is not None and caught.value.offset >= 1000


@pytest.mark.parametrize("block", [LEAF, INTERIOR], ids=["leaf", "interior"])
def test_every_truncation_of_a_node_is_found(block: bytes) -> None:
    for length in range(len(block)):
        with pytest.raises(CorruptCheckpointError):
            decode_node(block[:length], file="d/nodes", offset=0)


@pytest.mark.parametrize("block", [LEAF, INTERIOR], ids=["leaf", "interior"])
@settings(max_examples=400)
@given(data=st.data())
def test_changed_bytes_with_a_right_checksum_are_a_node_or_an_error(
    block: bytes, data: st.DataObject
) -> None:
    body = bytearray(block[14:-4])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, 3))
    try:
        node = decode_node(
            bytes(frame(NODE_MAGIC, body[: len(body) - cut])), file="d/nodes", offset=0
        )
    except CorruptCheckpointError as error:
        assert "d/nodes, byte" in str(error)
        return
    found = list(node) if isinstance(node, dict) else [child.first_key for child in node]
    assert found == sorted(set(found))


@given(st.binary(max_size=80))
def test_any_bytes_with_a_right_checksum_are_a_node_or_an_error(body: bytes) -> None:
    try:
        decode_node(bytes(frame(NODE_MAGIC, body)), file="d/nodes", offset=0)
    except CorruptCheckpointError:
        pass


def leaf_body(count: int, *columns: bytes) -> bytes:
    return b"\0\0" + encode_varint(count) + b"".join(columns)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (leaf_body(0), "0 entries are not between"),
        (leaf_body(1 << 50), "entries need more than"),
        (leaf_body(1, b"\x01", b"k", b"\x00", b"\x02"), "value kind 2 is unknown"),
        (leaf_body(1, b"\x01", b"k", b"\x00", b"\x01", b"\x00\x00"), "not in a table of 0"),
        (leaf_body(1, b"\x01", b"k", b"\x05", b"\x00", b"abc"), "do not fill the 3 bytes"),
        (leaf_body(2, b"\x01", b"\x01\x00", b"k", bytes(4)), "keys are out of order"),
        (leaf_body(2, b"\x05", b"\x01\x01", b"kl", bytes(4)), "shares more bytes"),
        (leaf_body(2, b"\x00", b"\x01\x01", b"ba", bytes(4)), "keys are out of order"),
    ],
)
def test_contradictions_inside_a_node_are_named(body: bytes, reason: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=reason):
        decode_node(bytes(frame(NODE_MAGIC, body)), file="d/nodes", offset=0)


def test_keys_that_share_prefixes_cannot_stand_for_gigabytes() -> None:
    count = 1 << 12
    long = 60_000
    columns = (
        encode_varint(long) * (count - 1),
        encode_varint(long) + encode_varint(2) * (count - 1),
        b"k" * long + b"".join(b"%c%c" % (i >> 6, i & 63) for i in range(1, count)),
        bytes(2 * count),
    )
    data = bytes(frame(NODE_MAGIC, leaf_body(count, *columns)))
    with pytest.raises(CorruptCheckpointError, match="keys pass the limit"):
        decode_node(data, file="d/nodes", offset=0, max_keys_nbytes=1 << 24)


# -------------------------------------------------------------------------------- damaged trees

TREE = encode({b"key%04d" % i: b"v%d" % i for i in range(200)}, 100)


def replaced(height: int, root: Location | None = None, **more: int) -> Version:
    good = TREE.version
    return Version(
        1, root or good.root, height, more.get("num_keys", good.num_keys), 0, 0, 0
    )  # fmt: skip


def test_height_falls_by_one_per_level() -> None:
    with pytest.raises(CorruptCheckpointError, match="its parent says"):
        decode_tree(replaced(TREE.version.root_height + 1), fetcher(TREE))


def test_a_node_that_points_to_itself_is_found() -> None:
    """A cycle would need a child of its own height."""
    root = bytes(TREE.blocks[-1])
    with pytest.raises(CorruptCheckpointError, match=r"parent says|instead of"):
        decode_tree(TREE.version, lambda _: root)


def test_a_root_with_another_number_of_keys_is_refused() -> None:
    with pytest.raises(CorruptCheckpointError, match="it has 200 keys, its parent says 7"):
        decode_tree(replaced(TREE.version.root_height, num_keys=7), fetcher(TREE))


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (TreeLimits(max_nodes=10), "more than 10 nodes"),
        (TreeLimits(max_keys=50), "more than 50 keys"),
        (TreeLimits(max_keys_nbytes=500), "keys pass the limit"),
        (TreeLimits(max_nodes_nbytes=300), "over 300 bytes"),
    ],
)
def test_limits_of_a_tree_hold(limits: TreeLimits, reason: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=reason):
        decode_tree(TREE.version, fetcher(TREE), limits=limits)


def test_nodes_that_compress_well_are_read() -> None:
    """Orbax keeps the documents of all arrays in one node, and most arrays of a model are equal."""
    document = json.dumps(
        {"shape": [32, 32], "codecs": [{"name": f"codec{i}", "level": i} for i in range(40)]}
    ).encode()
    entries: dict[bytes, Value] = {}
    for i in range(30_000):
        name = b"params.layers_%d.mlp.scale_%d" % divmod(i, 10)
        entries |= {name + b"/zarr.json": document, name + b"/c/0/0": (0, 1030 * i, 1030)}
    tree = encode(entries, 100_000_000)
    (block,) = tree.blocks
    body = zstandard.ZstdCompressor().compress(block[FRAME_HEADER:-FRAME_TRAILER])
    stored = packed(NODE_MAGIC, body)
    assert len(block) > 100 * len(stored)
    version = dataclasses.replace(tree.version, root=Location("d/nodes", 0, len(stored)))
    found = decode_tree(version, lambda _: stored, limits=TreeLimits.of_files(1, 46_000_000))
    assert len(found) == len(entries)


def test_many_nodes_that_compress_well_cannot_stand_for_gigabytes() -> None:
    """Each leaf is within the limit of a node."""
    zeros = bytes(9 << 20)
    blocks = {}
    children: list[tuple[int, int]] = []
    for key in (b"k0", b"k1"):
        body = leaf_body(1, b"\x02", key, encode_varint(len(zeros)), b"\x00", zeros)
        block = packed(NODE_MAGIC, zstandard.ZstdCompressor().compress(body))
        children.append((sum(map(len, blocks.values())), len(block)))
        blocks[children[-1][0]] = block
    offsets, sizes = (np.array(column, np.int64) for column in zip(*children, strict=True))
    root = bytes(
        frame(
            NODE_MAGIC,
            b"\x01",
            encode_data_files(["d/nodes"]),
            b"\x02\x00\x02\x02\x00\x00k0k1\x00\x00",
            encode_varints(offsets),
            encode_varints(sizes),
            b"\x01\x01",
            encode_varints(sizes),
            b"\x00\x00",
        )
    )
    at = int(sizes.sum())
    blocks[at] = root
    version = Version(1, Location("d/nodes", at, len(root)), 1, 2, 0, 0, 0)
    limits = TreeLimits.of_files(1, at + len(root))
    with pytest.raises(CorruptCheckpointError, match="values of the tree take over"):
        decode_tree(version, lambda location: blocks[location.offset], limits=limits)


def test_the_limit_of_a_node_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "MAX_BODY_NBYTES", 20)
    with pytest.raises(CorruptCheckpointError, match="passes the limit 20"):
        decode_tree(TREE.version, fetcher(TREE))


def test_exchanged_leaves_are_found() -> None:
    """Two leaves of one prefix and one length, each intact."""
    tree = encode({b"k%c" % letter: b"v" for letter in range(65, 90)}, 80)
    decoder = TreeDecoder(tree.version)
    decoder.feed([fetcher(tree)(location) for location in decoder.wanted])
    blocks = [fetcher(tree)(location) for location in decoder.wanted]
    assert len(blocks[0]) == len(blocks[1])
    blocks[:2] = blocks[1], blocks[0]
    with pytest.raises(CorruptCheckpointError, match="first key sorts before"):
        decoder.feed(blocks)


def test_a_node_of_another_length_is_refused() -> None:
    with pytest.raises(CorruptCheckpointError, match=r"bytes were read instead of"):
        decode_tree(TREE.version, lambda location: fetcher(TREE)(location)[:-1])
