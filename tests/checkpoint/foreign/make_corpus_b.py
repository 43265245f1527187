"""Makes the bad zarr documents, OCDBT databases and Orbax checkpoints below `corpus/`.

`python -m tests.checkpoint.foreign.make_corpus_b` writes them anew,
and `expected-b.toml` beside them: for
each the error that reading it must give, and a part of its message.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zstandard

from asyncckpt.format.ocdbt.datafiles import Location
from asyncckpt.format.ocdbt.manifest import Manifest, Version
from asyncckpt.format.ocdbt.wire import MANIFEST_MAGIC, NODE_MAGIC
from tests.checkpoint.foreign.databases import (
    CRC,
    DATA,
    LITTLE,
    NODES,
    UUID,
    VALUES,
    ZSTD,
    column,
    encode_varint,
    frame,
    grid,
    interior,
    leaf,
    node,
    packed,
    shard_index,
    sharding,
    write,
    write_database,
    write_root,
    zarr2,
    zarr3,
    zstd,
)
from tests.format.manifests import encode_manifest

CORPUS = Path(__file__).parent / "corpus"

CORRUPT = "CorruptCheckpointError"
UNSUPPORTED = "UnsupportedFormatError"
NOT_FOUND = "CheckpointNotFoundError"

# ------------------------------------------------------------------------------- zarr documents

Document = tuple[bytes, str, str]


def transpose(*order: int) -> dict[str, Any]:
    return {"name": "transpose", "configuration": {"order": list(order)}}


def nested_shards(depth: int) -> Any:
    codec: Any = LITTLE
    for _ in range(depth):
        codec = sharding([4], [codec])
    return codec


DOCUMENTS: dict[str, Document] = {
    "shape-bomb": (zarr3(shape=[1 << 62] * 2, chunk_grid=grid(1, 1)), CORRUPT, "bytes in total"),
    "empty-shape-bomb": (
        zarr3(shape=[0, 1 << 62], chunk_grid=grid(1, 1 << 35)), CORRUPT, "bytes in total",
    ),
    "chunk-bomb": (zarr3(chunk_grid=grid(1 << 40)), CORRUPT, "bytes per chunk"),
    "count-bomb": (
        zarr3(shape=[1 << 40], chunk_grid=grid(1)), CORRUPT, "claims 1099511627776 chunks",
    ),
    "many-chunks": (
        zarr3(shape=[1 << 24], chunk_grid=grid(1)), CORRUPT, "claim 16777216 chunks",
    ),
    "rank-1000": (
        zarr3(shape=[1] * 1000, chunk_grid=grid(*[1] * 1000)), CORRUPT, "at most 32 numbers",
    ),
    "rank-differs": (zarr3(chunk_grid=grid(4, 1)), CORRUPT, "rank 2, the array 1"),
    "negative-shape": (zarr3(shape=[-4]), CORRUPT, "shape has the entry -4"),
    "fractional-shape": (zarr3(shape=[4.5]), CORRUPT, "shape has the entry 4.5"),
    "no-shape": (zarr3(shape=...), CORRUPT, "shape is not a list"),
    "zero-chunk": (zarr3(chunk_grid=grid(0)), CORRUPT, "chunk_shape has the entry 0"),
    "other-dtype": (zarr3(data_type="float6_e2m3fn"), UNSUPPORTED, "data_type 'float6_e2m3fn'"),
    "other-grid": (zarr3(chunk_grid={"name": "rectilinear"}), UNSUPPORTED, "rectilinear"),
    "other-keys": (zarr3(chunk_key_encoding={"name": "v7"}), UNSUPPORTED, "v7"),
    "other-codec": (zarr3(codecs=[LITTLE, {"name": "lz4"}]), UNSUPPORTED, "lz4"),
    "no-codec": (zarr3(codecs=[]), UNSUPPORTED, "codecs []"),
    "many-codecs": (zarr3(codecs=[LITTLE, *[CRC] * 40]), CORRUPT, "at most 16"),
    "middle-endian": (
        zarr3(codecs=[{"name": "bytes", "configuration": {"endian": "middle"}}]),
        UNSUPPORTED, "endian 'middle'",
    ),
    "bad-transpose": (zarr3(codecs=[transpose(3), LITTLE]), CORRUPT, "transpose order is [3]"),
    "transpose-bomb": (
        zarr3(codecs=[transpose(*range(1000)), LITTLE]), CORRUPT, "at most 32 numbers",
    ),
    "shards-do-not-divide": (zarr3(codecs=[sharding([3])]), CORRUPT, "not made of whole chunks"),
    "shards-in-shards": (zarr3(codecs=[nested_shards(30)]), CORRUPT, "at most 16"),
    "shard-bomb": (
        zarr3(shape=[1 << 40], chunk_grid=grid(1 << 36), codecs=[sharding([1])]),
        UNSUPPORTED, "are implied fill values",
    ),
    "index-compressed": (
        zarr3(codecs=[sharding([4], index_codecs=[LITTLE, ZSTD])]), UNSUPPORTED, "index_codecs",
    ),
    "index-nowhere": (
        zarr3(codecs=[sharding([4], index_location="left")]), UNSUPPORTED, "index_location",
    ),
    "packed-shards": (zarr3(codecs=[sharding([4]), ZSTD]), UNSUPPORTED, "nothing after"),
    "bad-fill": (zarr3(fill_value="zero"), CORRUPT, "fill value 'zero' is not a float32"),
    "from-the-future": (zarr3(zarr_format=4), UNSUPPORTED, "zarr_format 4"),
    "must-understand": (
        zarr3(consolidation={"must_understand": True}), UNSUPPORTED, "consolidation",
    ),
    "transformers": (zarr3(storage_transformers=[{"name": "x"}]), UNSUPPORTED, "transformers"),
    "truncated": (zarr3()[:100], CORRUPT, "not JSON"),
    "not-an-object": (b"[]", CORRUPT, "not a JSON object"),
    "deep": (b"[" * 5000, CORRUPT, "not JSON"),
    "huge-number": (b'{"shape":[' + b"9" * 6000 + b"]}", CORRUPT, "not JSON"),
}  # fmt: skip

DOCUMENTS_2: dict[str, Document] = {
    "shape-bomb": (zarr2(shape=[1 << 62] * 2, chunks=[1, 1]), CORRUPT, "bytes in total"),
    "chunk-bomb": (zarr2(chunks=[1 << 40]), CORRUPT, "bytes per chunk"),
    "count-bomb": (zarr2(shape=[1 << 40], chunks=[1]), CORRUPT, "chunks"),
    "rank-1000": (zarr2(shape=[1] * 1000, chunks=[1] * 1000), CORRUPT, "at most 32 numbers"),
    "no-chunks": (zarr2(chunks=...), CORRUPT, "chunks is missing"),
    "structured": (zarr2(dtype=[["a", "<f4"]]), UNSUPPORTED, "dtype [['a', '<f4']]"),
    "objects": (zarr2(dtype="|O"), UNSUPPORTED, "dtype '|O'"),
    "dates": (zarr2(dtype="<M8[ns]"), UNSUPPORTED, "dtype '<M8[ns]'"),
    "other-compressor": (zarr2(compressor={"id": "lzma"}), UNSUPPORTED, "compressor 'lzma'"),
    "bad-compressor": (zarr2(compressor=7), CORRUPT, "neither null nor an object"),
    "filters": (zarr2(filters=[{"id": "delta"}]), UNSUPPORTED, "filters"),
    "other-order": (zarr2(order="Z"), UNSUPPORTED, "order 'Z'"),
    "other-separator": (zarr2(dimension_separator="-"), UNSUPPORTED, "dimension_separator"),
    "bad-fill": (zarr2(fill_value="zero"), CORRUPT, "fill value"),
    "version-3": (zarr2(zarr_format=3), UNSUPPORTED, "zarr_format 3"),
}

# ------------------------------------------------------------------------------------- databases

Make = Callable[[Path], None]
DATABASES: dict[str, tuple[Make, str, str]] = {}


def database(error: str, match: str) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        DATABASES[make.__name__.replace("_", "-")] = (make, error, match)
        return make

    return register


def good(directory: Path, **more: Any) -> None:
    write_database(directory, {b"w/zarr.json": zarr3(), b"w/c/0": VALUES}, **more)


@database(CORRUPT, "its height is 2, its parent says 1")
def cycle(directory: Path) -> None:
    """The root is its own child."""
    size = len(node(interior(2, [b"a"], [(0, 100)])))
    write_root(directory, node(interior(2, [b"a"], [(0, size)])), height=2)


@database(CORRUPT, "the tree has over")
def fan(directory: Path) -> None:
    """A hundred children of every node, all of them the same one: 100^20 nodes."""
    keys = [b"%02d" % n for n in range(100)]
    nodes = [node(leaf([b"a"], [(0, 0, 0)]))]
    offset = 0
    for height in range(1, 21):
        body = interior(height, keys, [(offset, len(nodes[-1]))] * 100, num_keys=0)
        offset += len(nodes[-1])
        nodes.append(node(body))
    data = nodes[-1] + b"".join(nodes[:-1])
    write_root(directory, nodes[-1], height=20, num_keys=0)
    write(directory / NODES, data)


@database(CORRUPT, "1048576 entries are not between 1 and")
def a_million_children(directory: Path) -> None:
    """Children without any bytes, in a node that is small when it is compressed."""
    count = 1 << 20
    body = b"".join(
        (
            b"\1\1\7\0", NODES.encode(), encode_varint(count), b"\1" * (count - 1),
            b"\2" * count, b"\0" * count, b"\0\0" * count, b"\0" * 6 * count,
        )
    )  # fmt: skip
    write_root(directory, packed(NODE_MAGIC, zstd(body)), height=1)


@database(CORRUPT, "entries are not between 1 and")
def a_million_keys(directory: Path) -> None:
    """A million keys in a node that is small when it is compressed."""
    count = 1 << 20
    body = b"\0\0" + encode_varint(count) + b"\0" * (count * 5)
    write_root(directory, packed(NODE_MAGIC, zstd(body)), num_keys=count)


@database(CORRUPT, "entries need more than")
def absurd_count(directory: Path) -> None:
    """2^40 entries in a node of ten bytes."""
    write_root(directory, node(b"\0\0" + encode_varint(1 << 40) + b"\0" * 10))


@database(CORRUPT, "it has 1 keys, its parent says 1152921504606846976")
def keys_that_are_not_there(directory: Path) -> None:
    """The manifest promises 2^60 keys."""
    write_root(directory, node(leaf([b"a"], [(0, 0, 0)])), num_keys=1 << 60)


@database(CORRUPT, "its keys are out of order")
def keys_out_of_order(directory: Path) -> None:
    """Two keys, the larger one first."""
    write_root(directory, node(leaf([b"b", b"a"], [(0, 0, 0)] * 2)), num_keys=2)


@database(CORRUPT, "its keys pass the limit")
def long_keys(directory: Path) -> None:
    """Keys of 64 KB that share all but their last byte with the one before, 2,000 of them."""
    long = b"k" * 60_000
    body = b"".join(
        (
            b"\0\0", encode_varint(2000), column([60_000] * 1999), column([60_001, *[1] * 1999]),
            long, *(bytes([33 + n // 20]) for n in range(2000)), b"\0" * 4000,
        )
    )  # fmt: skip
    write_root(directory, packed(NODE_MAGIC, zstd(body)), num_keys=2000)


@database(CORRUPT, "it decompresses to")
def node_bomb(directory: Path) -> None:
    """A node of 40 MB of zeros."""
    write_root(directory, packed(NODE_MAGIC, zstd(bytes(40_000_000))))


@database(CORRUPT, "it decompresses to more than")
def node_bomb_without_size(directory: Path) -> None:
    """The same, without a size in the zstd frame."""
    compressor = zstandard.ZstdCompressor(level=19, write_content_size=False).compressobj()
    data = compressor.compress(bytes(40_000_000)) + compressor.flush()
    write_root(directory, packed(NODE_MAGIC, data))


@database(CORRUPT, "cannot be decompressed")
def node_is_no_zstd(directory: Path) -> None:
    """Compressed, it says."""
    write_root(directory, packed(NODE_MAGIC, b"plain text"))


@database(CORRUPT, "data files are more than the limit")
def many_files(directory: Path) -> None:
    """A table of a million data files in a small node."""
    count = 1 << 20
    table = encode_varint(count) + b"\1" * (count - 1) + b"\1" + b"\0" * (count - 1)
    body = b"\0" + table + b"\0" * count + b"x" + b"\1\0\1a" + b"\0" * 4
    write_root(directory, packed(NODE_MAGIC, zstd(body)))


@database(CORRUPT, "has a part '..'")
def path_leads_out(directory: Path) -> None:
    """A chunk in the password file."""
    body = leaf([b"w/c/0", b"w/zarr.json"], [(0, 0, 16)] * 2, ["../../../../etc/passwd"])
    write_root(directory, node(body), num_keys=2)


@database(CORRUPT, "is absolute")
def path_is_absolute(directory: Path) -> None:
    """The same, from the root."""
    write_root(directory, node(leaf([b"w/zarr.json"], [(0, 0, 16)], ["/etc/passwd"])))


@database(CORRUPT, "has a part '..'")
def root_leads_out(directory: Path) -> None:
    """The root node in a directory above."""
    write_root(directory, node(leaf([b"a"], [(0, 0, 0)])), file="../nodes")


@database(CORRUPT, "d/gone is missing")
def file_is_missing(directory: Path) -> None:
    """A data file that nobody wrote."""
    write_root(directory, node(leaf([b"w/zarr.json"], [(0, 0, 16)], ["d/gone"])))


@database(CORRUPT, "it is truncated or damaged")
def value_behind_the_end(directory: Path) -> None:
    """2^40 bytes in a file of 16."""
    write_root(directory, node(leaf([b"w/zarr.json"], [(0, 0, 1 << 40)])))
    write(directory / DATA, VALUES)


@database(CORRUPT, "d/data ends at byte 8")
def truncated_data(directory: Path) -> None:
    """The data file lost its second half."""
    good(directory, max_inline=0)
    data = (directory / DATA).read_bytes()
    (directory / DATA).write_bytes(data[:8])


@database(CORRUPT, "d/nodes ends at byte 50")
def truncated_nodes(directory: Path) -> None:
    """The file of the nodes lost its end."""
    good(directory)
    (directory / NODES).write_bytes((directory / NODES).read_bytes()[:50])


@database(CORRUPT, "the B+tree node is damaged: its CRC-32C is")
def flipped_node(directory: Path) -> None:
    """One bit of the node is another."""
    good(directory)
    data = bytearray((directory / NODES).read_bytes())
    data[40] ^= 1
    (directory / NODES).write_bytes(data)


@database(CORRUPT, "the OCDBT manifest is damaged: its header says")
def truncated_manifest(directory: Path) -> None:
    """The manifest lost its end."""
    good(directory)
    path = directory / "manifest.ocdbt"
    path.write_bytes(path.read_bytes()[:-5])


@database(CORRUPT, "fewer than the 18 of an empty frame")
def empty_manifest(directory: Path) -> None:
    """Nothing was written into it."""
    write(directory / "manifest.ocdbt", b"")


@database(UNSUPPORTED, "OCDBT format version 1, this release reads version 0")
def manifest_from_the_future(directory: Path) -> None:
    """A later version of the format."""
    write(directory / "manifest.ocdbt", packed(MANIFEST_MAGIC, b"\0" * 60, version=1, method=0))


@database(UNSUPPORTED, "OCDBT format version 1, this release reads version 0")
def node_from_the_future(directory: Path) -> None:
    """A later version of the format, below a manifest of this one."""
    write_root(directory, packed(NODE_MAGIC, b"\0" * 60, version=1, method=0))


@database(UNSUPPORTED, "manifests of kind 2")
def kind_from_the_future(directory: Path) -> None:
    """Neither single nor numbered."""
    body = UUID + b"\2" + column([100, 1 << 20]) + b"\4\0"
    write(directory / "manifest.ocdbt", bytes(frame(MANIFEST_MAGIC, body)))


@database(CORRUPT, "compression method 7 is unknown")
def compression_from_the_future(directory: Path) -> None:
    """Neither plain nor zstd."""
    write_root(directory, packed(NODE_MAGIC, b"\0" * 60, method=7))


def numbered(directory: Path, name: str, manifest: Manifest) -> None:
    good(directory)
    root = encode_manifest(Manifest(UUID, numbered=True))
    write(directory / "manifest.ocdbt", root)
    write(directory / name, encode_manifest(manifest))


def version(generation: int) -> Version:
    return Version(generation, Location(NODES, 0, 100), 0, 2, 100, 0, 1)


@database(CORRUPT, "manifest.0000000000000007 holds generation 5")
def numbered_by_another_number(directory: Path) -> None:
    """The name of a numbered manifest is its generation."""
    numbered(directory, "manifest.0000000000000007", Manifest(UUID, versions=(version(5),)))


@database(CORRUPT, "or is of another database")
def numbered_of_another_database(directory: Path) -> None:
    """A numbered manifest with another uuid."""
    numbered(directory, "manifest.0000000000000005", Manifest(bytes(16), versions=(version(5),)))


@database(CORRUPT, "holds generation None")
def numbered_in_numbered(directory: Path) -> None:
    """A numbered manifest that is once more without versions."""
    numbered(directory, "manifest.0000000000000005", Manifest(UUID, numbered=True))


@database(NOT_FOUND, "there are no zarr arrays among its 1 keys")
def no_arrays(directory: Path) -> None:
    """A database of something else."""
    write_database(directory, {b"key": b"value"})


@database(NOT_FOUND, "there are no zarr arrays among its 0 keys")
def no_keys(directory: Path) -> None:
    """A database that nothing was written to."""
    write(directory / "manifest.ocdbt", encode_manifest(Manifest(UUID)))


@database(NOT_FOUND, "its commit record checkpoint.json is missing")
def ours_without_a_record(directory: Path) -> None:
    """The database of a checkpoint of ours, which was never committed."""
    good(directory, nodes="d/" + "0f" * 16 + "-index")


@database(UNSUPPORTED, "an array has no place in a tree: the path ['w']")
def array_in_an_array(directory: Path) -> None:
    """One is a leaf, and what is below it too."""
    write_database(directory, {b"w/zarr.json": zarr3(), b"w/x/zarr.json": zarr3()})


@database(UNSUPPORTED, "an array has no place in a tree: the path []")
def array_beside_the_root(directory: Path) -> None:
    """The tree itself is a leaf."""
    write_database(directory, {b"zarr.json": zarr3(), b"w/zarr.json": zarr3()})


@database(UNSUPPORTED, "has a name that is not UTF-8")
def name_is_no_text(directory: Path) -> None:
    """Keys are bytes, but names are text."""
    write_database(directory, {b"\xff/zarr.json": zarr3()})


@database(UNSUPPORTED, "more than 256 containers deep")
def deep_name(directory: Path) -> None:
    """A name of a thousand parts."""
    write_database(directory, {b"/".join([b"a"] * 1000) + b"/zarr.json": zarr3()})


@database(CORRUPT, "the chunks take 327680000 bytes")
def overlapping_chunks(directory: Path) -> None:
    """20,000 chunks of 16 KiB, which are all the same one."""
    count, nbytes = 20_000, 1 << 14
    document = zarr3(shape=[count * nbytes // 4], chunk_grid=grid(nbytes // 4))
    keys = sorted([b"w/zarr.json", *(b"w/c/%d" % n for n in range(count))])
    places = [(0, nbytes, len(document)) if key.endswith(b"n") else (0, 0, nbytes) for key in keys]
    root = packed(NODE_MAGIC, zstd(leaf(keys, places)))
    write_root(directory, root, num_keys=len(keys))
    write(directory / DATA, bytes(nbytes) + document)


def chunk(directory: Path, data: bytes, **changes: Any) -> None:
    write_database(directory, {b"w/zarr.json": zarr3(**changes), b"w/c/0": data}, max_inline=700)


@database(CORRUPT, "which cannot hold its 16 bytes of elements")
def short_chunk(directory: Path) -> None:
    """15 bytes where 16 are due."""
    chunk(directory, VALUES[:-1])


@database(CORRUPT, "the checksum behind the chunk differs")
def wrong_checksum(directory: Path) -> None:
    """A checksum of something else."""
    chunk(directory, VALUES + b"\0\0\0\0", codecs=[LITTLE, CRC])


@database(CORRUPT, "the zstd frame")
def chunk_is_no_zstd(directory: Path) -> None:
    """Compressed, it says."""
    chunk(directory, VALUES, codecs=[LITTLE, ZSTD])


@database(CORRUPT, "holds more bytes")
def chunk_bomb(directory: Path) -> None:
    """Forty megabytes where 16 bytes are due."""
    chunk(directory, zstd(bytes(40_000_000)), codecs=[LITTLE, ZSTD])


@database(CORRUPT, "the gzip data are cut off")
def cut_gzip(directory: Path) -> None:
    """The first half of a gzip stream."""
    gzip = {"name": "gzip", "configuration": {"level": 1}}
    chunk(directory, bytes.fromhex("1f8b0800000000000003"), codecs=[LITTLE, gzip])


BLOSC = {
    "name": "blosc",
    "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "noshuffle", "blocksize": 0},
}


@database(CORRUPT, "its Blosc header says 4294967280 bytes of content")
def blosc_bomb(directory: Path) -> None:
    """A header that claims four gigabytes."""
    header = struct.pack("<BBBBIII", 2, 1, 0x21, 4, 0xFFFFFFF0, 1 << 20, 32)
    chunk(directory, header + bytes(16), codecs=[LITTLE, BLOSC])


@database(CORRUPT, "its Blosc header says 99 bytes, there are 32")
def blosc_of_another_length(directory: Path) -> None:
    """A header that claims more than is there."""
    header = struct.pack("<BBBBIII", 2, 1, 0x21, 4, 16, 16, 99)
    chunk(directory, header + bytes(16), codecs=[LITTLE, BLOSC])


@database(CORRUPT, "its index alone needs 20")
def shard_shorter_than_its_index(directory: Path) -> None:
    """Four bytes of a shard."""
    chunk(directory, b"\0" * 4, codecs=[sharding([4])])


@database(CORRUPT, "the CRC-32C of the shard's index is")
def shard_with_a_damaged_index(directory: Path) -> None:
    """One bit of the index is another."""
    index = bytearray(shard_index((0, 16)))
    index[0] ^= 1
    chunk(directory, VALUES + index, codecs=[sharding([4])])


@database(CORRUPT, "the shard's index places chunk 0 at 1099511627776+16")
def shard_index_leads_out(directory: Path) -> None:
    """A chunk far behind the end of its shard, with a right checksum."""
    chunk(directory, VALUES + shard_index((1 << 40, 16)), codecs=[sharding([4])])


@database(CORRUPT, "the shard's index places chunk 0 at 8+18446744073709551600")
def shard_index_wraps(directory: Path) -> None:
    """Offset and length whose sum is small in 64 bits."""
    chunk(directory, VALUES + shard_index((8, (1 << 64) - 16)), codecs=[sharding([4])])


@database(CORRUPT, "which cannot hold its 1099511627776 bytes of elements")
def padding_bomb(directory: Path) -> None:
    """A chunk of 2^40 bytes for an array of four."""
    chunk(directory, zstd(bytes(1000)), chunk_grid=grid(1 << 38), codecs=[LITTLE, ZSTD])


# ----------------------------------------------------------------------------------------- Orbax

CHECKPOINTS: dict[str, tuple[Make, str, str]] = {}


def checkpoint(error: str, match: str) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        CHECKPOINTS[make.__name__.replace("_", "-")] = (make, error, match)
        return make

    return register


def key(name: str, kind: object = 2) -> dict[str, object]:
    return {"key": name, "key_type": kind}


def entry(*keys: object, kind: object = "np.ndarray", **value: Any) -> dict[str, Any]:
    metadata = {"value_type": kind, "skip_deserialize": False, **value}
    return {"key_metadata": list(keys), "value_metadata": metadata}


def item(directory: Path, *entries: Any, **more: Any) -> None:
    """An item with the array `w` and whatever `_METADATA` says."""
    good(directory)
    document = {
        "tree_metadata": {f"({number},)": value for number, value in enumerate(entries)},
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
        **more,
    }
    write(directory / "_METADATA", json.dumps(document).encode())


W = entry(key("w"))


@checkpoint(CORRUPT, "the Orbax metadata is damaged: it is not JSON")
def metadata_cut_off(directory: Path) -> None:
    """Half of `_METADATA`."""
    item(directory, W)
    path = directory / "_METADATA"
    path.write_bytes(path.read_bytes()[:80])


@checkpoint(CORRUPT, "its tree_metadata is not an object")
def metadata_without_a_tree(directory: Path) -> None:
    """No `tree_metadata`."""
    item(directory, tree_metadata=[1])


@checkpoint(CORRUPT, "it is nested deeper than 256")
def deep_metadata(directory: Path) -> None:
    """Lists in lists in the user's part of the metadata."""
    item(directory, W)
    path = directory / "_METADATA"
    deep = b'"custom_metadata": ' + b"[" * 400 + b"]" * 400
    path.write_bytes(path.read_bytes().replace(b'"custom_metadata": null', deep))


@checkpoint(CORRUPT, "is malformed")
def key_of_another_type(directory: Path) -> None:
    """A kind of key from the future."""
    item(directory, entry(key("w", 3)))


@checkpoint(CORRUPT, "is malformed")
def entry_without_a_value(directory: Path) -> None:
    """Only the half of an entry."""
    item(directory, {"key_metadata": [key("w")]})


@checkpoint(CORRUPT, "'-1' is not an index of a list")
def index_below_zero(directory: Path) -> None:
    """A list has no index -1."""
    item(directory, entry(key("l"), key("-1", 1), kind="None", skip_deserialize=True))


@checkpoint(CORRUPT, "are not all from 0")
def list_with_gaps(directory: Path) -> None:
    """A list of which the millionth element is known."""
    item(directory, entry(key("l"), key("1000000", 1), kind="None", skip_deserialize=True))


@checkpoint(CORRUPT, "is both a leaf and a container")
def leaf_and_container(directory: Path) -> None:
    """`w`, and something in it."""
    item(directory, W, entry(key("w"), key("x"), kind="None", skip_deserialize=True))


@checkpoint(CORRUPT, "a list has the indices ['x', 0] of 2")
def list_and_dict(directory: Path) -> None:
    """A container with a key and an index."""
    empty = {"kind": "None", "skip_deserialize": True}
    item(directory, entry(key("a"), key("x"), **empty), entry(key("a"), key("0", 1), **empty))


@checkpoint(CORRUPT, "containers deep")
def deep_tree(directory: Path) -> None:
    """A leaf in 500 dicts."""
    path = [key("a") for _ in range(500)]
    item(directory, entry(*path, kind="None", skip_deserialize=True))


@checkpoint(CORRUPT, "it is empty, but there are other leaves")
def leaf_without_a_path(directory: Path) -> None:
    """The tree itself, and a leaf of it."""
    item(directory, W, entry(kind="None", skip_deserialize=True))


@checkpoint(CORRUPT, "two leaves have the array 'w'")
def colliding_names(directory: Path) -> None:
    """Orbax joins keys by dots."""
    item(directory, W, W)


@checkpoint(CORRUPT, "the array 'v' has no zarr.json")
def missing_array(directory: Path) -> None:
    """A leaf whose array nobody wrote."""
    item(directory, W, entry(key("v")))


@checkpoint(UNSUPPORTED, "was written by the handler 'my.Handler'")
def unknown_handler(directory: Path) -> None:
    """A leaf that somebody's own handler wrote."""
    item(directory, W, entry(key("v"), kind="my.Handler"))


@checkpoint(UNSUPPORTED, "in the file `checkpoint` of an older release")
def value_elsewhere(directory: Path) -> None:
    """A leaf in the msgpack file that early releases wrote."""
    item(directory, entry(key("w"), skip_deserialize=True))


@checkpoint(CORRUPT, "_strings.json is missing")
def no_strings(directory: Path) -> None:
    """A string, but no file of strings."""
    item(directory, W, entry(key("s"), kind="string"))


@checkpoint(CORRUPT, "_strings.json has no string 's'")
def string_is_a_number(directory: Path) -> None:
    """A string that is none."""
    item(directory, W, entry(key("s"), kind="string"))
    write(directory / "_strings.json", b'{"s": 7}')


@checkpoint(CORRUPT, "manifest.ocdbt is missing")
def no_manifest(directory: Path) -> None:
    """An OCDBT database, it says, but there is no manifest."""
    item(directory, W)
    (directory / "manifest.ocdbt").unlink()


@checkpoint(CORRUPT, "chunk 'w/c/0' of array 'w' is missing")
def missing_chunk(directory: Path) -> None:
    """All chunks are stored, it says."""
    item(directory, W)
    write_database(directory, {b"w/zarr.json": zarr3()})


@checkpoint(CORRUPT, "chunk 0 of the shard is missing")
def missing_chunk_of_a_shard(directory: Path) -> None:
    """All chunks are stored, it says, but the index of the shard has none."""
    item(directory, W)
    nowhere = shard_index(((1 << 64) - 1, (1 << 64) - 1))
    documents = {b"w/zarr.json": zarr3(codecs=[sharding([4])]), b"w/c/0": nowhere}
    write_database(directory, documents)


@checkpoint(CORRUPT, "random_key_impl is")
def key_implementation(directory: Path) -> None:
    """A PRNG whose name is a path."""
    item(directory, entry(key("w"), kind="jax.Array"))
    row = {"param_name": "w", "ext_metadata": {"random_key_impl": "../evil"}}
    document = {"array_metadatas": [{"array_metadata": row}]}
    write(directory / "array_metadatas" / "process_0", json.dumps(document).encode())


@checkpoint(CORRUPT, "the checkpoint metadata is damaged: its item_handlers is 7")
def step_metadata(directory: Path) -> None:
    """`_CHECKPOINT_METADATA` of another shape."""
    item(directory / "default", W)
    write(directory / "_CHECKPOINT_METADATA", b'{"item_handlers": 7}')


@checkpoint(NOT_FOUND, "there is no tree in this Orbax checkpoint")
def step_without_a_tree(directory: Path) -> None:
    """A step of nothing but JSON."""
    write(directory / "_CHECKPOINT_METADATA", b"{}")
    write(directory / "meta" / "metadata", b'{"a": 1}')


@checkpoint(CORRUPT, "the JSON item is damaged")
def json_item(directory: Path) -> None:
    """A JSON item that is none."""
    item(directory / "default", W)
    write(directory / "_CHECKPOINT_METADATA", b"{}")
    write(directory / "meta" / "metadata", b'{"a": ')


@checkpoint(NOT_FOUND, "its commit record checkpoint.json is missing")
def ours_without_a_record_in_a_step(directory: Path) -> None:
    """The item directory of a step of ours, with all that Orbax needs, but without the record."""
    item(directory / "default", W)
    good(directory / "default", nodes="d/" + "0f" * 16 + "-index")


# ----------------------------------------------------------------------------------------- writing


def toml_string(text: str) -> str:
    return json.dumps(text)


def write_corpus(corpus: Path) -> None:
    """All files, and `expected-b.toml`."""
    lines = [f"# Written by {Path(__file__).name}.\n"]

    def expect(path: str, error: str, match: str) -> None:
        lines.append(f"[{toml_string(path)}]")
        lines.append(f"error = {toml_string(error)}\nmatch = {toml_string(match)}\n")

    for name, (data, error, match) in DOCUMENTS.items():
        write(corpus / "zarr" / f"{name}.zarr.json", data)
        expect(f"zarr/{name}.zarr.json", error, match)
    for name, (data, error, match) in DOCUMENTS_2.items():
        write(corpus / "zarr" / f"{name}.zarray", data)
        expect(f"zarr/{name}.zarray", error, match)
    for kind, cases in (("ocdbt", DATABASES), ("orbax", CHECKPOINTS)):
        for name, (make, error, match) in cases.items():
            make(corpus / kind / name)
            expect(f"{kind}/{name}", error, match)
    write(corpus / "expected-b.toml", "\n".join(lines).encode())


if __name__ == "__main__":
    for kind in ("zarr", "ocdbt", "orbax"):
        shutil.rmtree(CORPUS / kind, ignore_errors=True)
    write_corpus(CORPUS)
