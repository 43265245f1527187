"""Another program, written from docs/format.md alone, reads what the library saves.

Nothing of `asyncckpt.format` is used here: where this reader and the page differ, one is wrong.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import crc32c
import jax
import ml_dtypes
import numpy as np
import pytest
import zstandard

from asyncckpt import (
    CorruptCheckpointError,
    DirectoryCoordinator,
    FencedError,
    LeafOptions,
    PerProcess,
    SaveOptions,
    ShardedArray,
    blocking,
)
from tests.checkpoint.test_version_1 import assert_same, expected
from tests.simulator import simulator

SCALARS = ("int", "float", "complex", "bool", "str", "bytes")


# ----------------------------------------------------------------------- the record, by the page


def read_record(directory: Path) -> dict[str, Any]:
    data = (directory / "checkpoint.json").read_bytes()
    tail = data[-12:]
    assert tail == b'"%08x"}\n' % crc32c.crc32c(data[:-12])
    record: dict[str, Any] = json.loads(data)
    assert list(record)[:3] == ["format", "version", "save_id"] and list(record)[-1] == "crc32c"
    assert record["format"] == "asyncckpt" and record["version"] in (1, 2)
    assert (record["version"] == 2) == ("fixed" in record) == ("data" in record["chunk_index"])
    return record


def escape(part: str | int) -> str:
    if isinstance(part, int):
        return str(part)
    if part in ("", ".", ".."):
        return part.replace(".", "%2E") or "%"

    def one(c: str) -> str:
        if c in "/%" or ord(c) < 0x20 or 0x7F <= ord(c) <= 0x9F or 0xD800 <= ord(c) <= 0xDFFF:
            return "".join(f"%{byte:02X}" for byte in c.encode("utf-8", "surrogatepass"))
        return c

    return "".join(map(one, part))


def parts_of(node: dict[str, Any]) -> list[str]:
    if node["kind"] in ("list", "tuple"):
        return [str(i) for i in range(len(node.get("children", [])))]
    keys = node.get("keys", [])
    numbers = {str(key) for key in keys if isinstance(key, int)}
    return [
        f"%{ord(key[0]):02X}{key[1:]}"
        if isinstance(key, str) and key in numbers and len(numbers) < len(keys)
        else escape(key)
        for key in keys
    ]


def paths_of(tree: dict[str, Any]) -> list[str]:
    nodes, found = tree["nodes"], {}

    def walk(child: int, path: str) -> None:
        if not nodes:
            found[child] = path
            return
        node = nodes[-child]
        children = node.get("children", [])
        parts = [""] if node["kind"] == "stateful" else parts_of(node)
        for part, inner in zip(parts, children, strict=True):
            below = "/".join(p for p in (path, part) if p)
            if inner >= 0:
                found[inner] = below
            else:
                walk(inner, below)

    walk(0, "")
    return [found[leaf] for leaf in range(tree["leaves"])]


def build(tree: dict[str, Any], leaves: list[Any]) -> Any:
    nodes = tree["nodes"]
    if not nodes:
        return leaves[0]

    def make(index: int) -> Any:
        node = nodes[index]
        children = [leaves[c] if c >= 0 else make(-c) for c in node.get("children", [])]
        match node["kind"]:
            case "none":
                return None
            case "list":
                return children
            case "tuple":
                return tuple(children)
            case "stateful":
                return children[0]
        return dict(zip(node.get("keys", []), children, strict=True))

    return make(0)


def scalar(kind: str, value: Any) -> Any:
    def number(bits: str) -> float:
        return float(struct.unpack(">d", bytes.fromhex(bits))[0])

    match kind:
        case "int":
            return int(value)
        case "float":
            return number(value)
        case "complex":
            return complex(number(value[0]), number(value[1]))
        case "bytes":
            return base64.b64decode(value)
        case "str" if isinstance(value, dict):
            return base64.b64decode(value["utf8"]).decode("utf-8", "surrogatepass")
    return value


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or name).newbyteorder("<")


# ----------------------------------------------------------------------- chunk index and chunks


class Row(NamedTuple):
    file: int
    offset: int
    nbytes: int
    crc: int


def read_index(directory: Path, record: dict[str, Any]) -> list[Row]:
    place = record["chunk_index"]
    data = (directory / record["files"][place["file"]]["path"]).read_bytes()
    data = data[place["offset"] : place["offset"] + place["nbytes"]]
    if record["version"] > 1:
        inside = place["data"] and base64.b64decode(place["data"])
        assert inside == (data if len(data) <= 24 << 10 else None)
    magic, version, rows = struct.unpack_from("<4sIQ", data)
    assert (magic, version) == (b"ACKI", 1)
    (stored,) = struct.unpack("<I", data[-4:])
    assert stored == crc32c.crc32c(data[:-4])
    assert f"{stored:08x}" == place["crc32c"]
    at, columns = 16, []
    for code in "IQQI":
        columns.append(struct.unpack_from(f"<{rows}{code}", data, at))
        at += struct.calcsize(f"<{rows}{code}")
    assert at + 4 == len(data)
    return [Row(*row) for row in zip(*columns, strict=True)]


def counts_of(spec: dict[str, Any]) -> list[int]:
    return [-(-n // c) for n, c in zip(spec["shape"], spec["chunk_shape"], strict=True)]


def first_rows(record: dict[str, Any]) -> list[int]:
    starts, row = [], 0
    tied = record["arrays"]["tied"]
    for array, spec in enumerate(record["arrays"]["spec"]):
        source = tied.get(str(array))
        starts.append(row if source is None else starts[source])
        if source is None:
            row += math.prod(counts_of(record["specs"][spec]))
    return starts


def read_array(
    directory: Path, record: dict[str, Any], index: list[Row], start: int, spec: dict[str, Any]
) -> np.ndarray[Any, Any]:
    dtype, chunk = dtype_of(spec["dtype"]), spec["chunk_shape"]
    result = np.empty(spec["shape"], dtype)
    for row, cell in zip(index[start:], product(*map(range, counts_of(spec)))):  # noqa: B905
        with open(directory / record["files"][row.file]["path"], "rb") as file:
            file.seek(row.offset)
            stored = file.read(row.nbytes)
        payload, trailer = stored[:-4], stored[-4:]
        assert crc32c.crc32c(payload) == row.crc == int.from_bytes(trailer, "little")
        if spec["zstd"] is not None:
            payload = zstandard.ZstdDecompressor().decompress(payload)
        values = np.frombuffer(payload, dtype).reshape(chunk)
        corner = tuple(slice(i * c, (i + 1) * c) for i, c in zip(cell, chunk, strict=True))
        target = result[..., *corner]
        inside = (..., *map(slice, target.shape))
        target[...] = values[inside]
        outside = values.copy()
        outside[inside] = np.zeros((), outside.dtype)
        assert not any(outside.tobytes())
    return result


def joined(pieces: list[tuple[list[int], np.ndarray[Any, Any]]]) -> np.ndarray[Any, Any]:
    """The leaf that these pieces tile."""
    shape = np.max([np.add(offset, piece.shape) for offset, piece in pieces], axis=0)
    whole = np.empty(shape, pieces[0][1].dtype)
    times = np.zeros(shape, int)
    assert len(pieces) <= 4096
    for offset, piece in pieces:
        box = tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))
        whole[box] = piece
        times[box] += 1
    assert (times == 1).all()
    return whole


def check_fixed(directory: Path, record: dict[str, Any]) -> None:
    for entry in record.get("fixed", []):
        if entry["object"] is None:
            data = base64.b64decode(record["manifest"])
            assert entry["path"] == "default/manifest.ocdbt"
        else:
            data = (directory / entry["object"]).read_bytes()
        assert (len(data), f"{crc32c.crc32c(data):08x}") == (entry["nbytes"], entry["crc32c"])
        assert hashlib.md5(data).hexdigest() == entry["md5"]
        assert (directory / entry["path"]).read_bytes() == data


def restore(directory: Path) -> tuple[list[str], Any]:
    """Paths and tree of a checkpoint."""
    record = read_record(directory)
    for entry in record["files"]:
        data = (directory / entry["path"]).read_bytes()
        assert len(data) == entry["nbytes"] and f"{crc32c.crc32c(data):08x}" == entry["crc32c"]
    check_fixed(directory, record)
    table = record["leaves"]
    index, starts = read_index(directory, record), first_rows(record)

    def array_at(array: int) -> np.ndarray[Any, Any]:
        spec = record["specs"][record["arrays"]["spec"][array]]
        return read_array(directory, record, index, starts[array], spec)

    named = {array for pieces in table["pieces"].values() for _, array in pieces}
    free = [array for array in range(len(record["arrays"]["name"])) if array not in named]
    values, arrays = iter(table["values"]), iter(free)
    leaves: list[Any] = []
    for leaf, code in enumerate(table["kind"]):
        kind = table["kinds"][code]
        if kind in SCALARS:
            leaves.append(scalar(kind, next(values)))
            continue
        if str(leaf) in table["pieces"]:
            found = joined([(o, array_at(array)) for o, array in table["pieces"][str(leaf)]])
        else:
            found = array_at(next(arrays))
        if table["extra"].get(str(leaf)) == {"python": "bytes"}:
            leaves.append(found.tobytes())
        else:
            leaves.append(found)
    return paths_of(record["tree"]), build(record["tree"], leaves)


# ------------------------------------------------------------------------------- the database


class Cursor:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, nbytes: int) -> bytes:
        self.at += nbytes
        assert self.at <= len(self.data)
        return self.data[self.at - nbytes : self.at]

    def varint(self) -> int:
        value = shift = 0
        while True:
            (byte,) = self.take(1)
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def varints(self, count: int) -> list[int]:
        return [self.varint() for _ in range(count)]

    def paths(self) -> list[str]:
        count = self.varint()
        shared = [0, *self.varints(count - 1)] if count else []
        lengths, bases = self.varints(count), self.varints(count)
        assert not any(bases)
        found: list[str] = []
        for common, length in zip(shared, lengths, strict=True):
            found.append((found[-1] if found else "")[:common] + self.take(length).decode())
        return found


def body_of(frame: bytes, magic: int) -> Cursor:
    assert struct.unpack_from(">I", frame) == (magic,)
    assert struct.unpack_from("<QBB", frame, 4) == (len(frame), 0, 0)
    assert struct.unpack("<I", frame[-4:]) == (crc32c.crc32c(frame[:-4]),)
    return Cursor(frame[14:-4])


def entries_of(database: Path, record: dict[str, Any]) -> Iterator[tuple[bytes, Any]]:
    """Keys with their values, or (path, offset, length) of those in data files."""
    manifest = (database / "manifest.ocdbt").read_bytes()
    assert manifest == base64.b64decode(record["manifest"])
    body = body_of(manifest, 0x0CDB3A2A)
    assert body.take(16).hex() == record["save_id"]
    assert body.varints(3) == [0, 1024, 1048576]
    assert body.take(1) == b"\4" and body.varint() == 0
    files = body.paths()
    assert body.varints(2) == [1, 1]
    (height,) = body.take(1)
    file, offset, nbytes, keys, _, outside = body.varints(6)
    assert int.from_bytes(body.take(8), "little") == record["created_ns"]
    assert body.varint() == 0 and body.at == len(body.data)
    found = list(node(database, files[file], offset, nbytes, height, b""))
    assert len(found) == keys
    assert outside == sum(value[2] for _, value in found if isinstance(value, tuple))
    return iter(found)


def node(
    database: Path, path: str, offset: int, nbytes: int, height: int, prefix: bytes
) -> Iterator[tuple[bytes, Any]]:
    body = body_of((database / path).read_bytes()[offset : offset + nbytes], 0x0CDB20DE)
    assert nbytes <= 1 << 20
    assert body.take(1) == bytes([height])
    files = body.paths()
    count = body.varint()
    shared, lengths = [0, *body.varints(count - 1)], body.varints(count)
    common = body.varints(count) if height else []
    keys, key = [], b""
    for cut, length in zip(shared, lengths, strict=True):
        key = key[:cut] + body.take(length)
        keys.append(prefix + key)
    assert keys == sorted(keys)
    if height:
        columns = [body.varints(count) for _ in range(6)]
        for key, cut, place in zip(keys, common, zip(*columns, strict=True), strict=True):
            inner = key[: len(prefix) + cut]
            below = list(node(database, files[place[0]], *place[1:3], height - 1, inner))
            assert len(below) == place[3]
            yield from below
        return
    sizes, kinds = body.varints(count), list(body.take(count))
    outside = sum(kinds)
    places = zip(body.varints(outside), body.varints(outside), strict=True)
    for key, size, kind in zip(keys, sizes, kinds, strict=True):
        if kind:
            number, start = next(places)
            yield key, (files[number], start, size)
        else:
            yield key, body.take(size)
    assert body.at == len(body.data)


def zarr_json(spec: dict[str, Any]) -> bytes:
    dtype = spec["dtype"]
    fill: Any = 0.0
    if dtype == "bool":
        fill = False
    elif "int" in dtype:
        fill = 0
    elif dtype.startswith("complex"):
        fill = [0.0, 0.0]
    codecs: list[Any] = [{"name": "bytes"}]
    if dtype_of(dtype).itemsize > 1:
        codecs[0]["configuration"] = {"endian": "little"}
    if spec["zstd"] is not None:
        level = spec["zstd"]
        codecs.append({"name": "zstd", "configuration": {"level": level, "checksum": False}})
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": spec["shape"],
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": spec["chunk_shape"]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill,
        "codecs": [*codecs, {"name": "crc32c"}],
        "attributes": {},
    }
    return json.dumps(document, separators=(",", ":")).encode()


def expected_entries(directory: Path, record: dict[str, Any]) -> dict[bytes, Any]:
    """What the database must hold, by record and chunk index."""
    index, starts = read_index(directory, record), first_rows(record)
    found: dict[bytes, Any] = {}
    for name, number, start in zip(
        record["arrays"]["name"], record["arrays"]["spec"], starts, strict=True
    ):
        spec = record["specs"][number]
        found[f"{name}/zarr.json".encode()] = zarr_json(spec)
        cells = product(*map(range, counts_of(spec)))
        for row, cell in zip(index[start:], cells):  # noqa: B905
            path = record["files"][row.file]["path"]
            key = "/".join((name, "c", *map(str, cell))).encode()
            if path.endswith("-index"):
                data = (directory / path).read_bytes()
                found[key] = data[row.offset : row.offset + row.nbytes]
            else:
                found[key] = (path.removeprefix("default/"), row.offset, row.nbytes)
    return found


# --------------------------------------------------------------------------------------- tests


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Config:
    rate: float
    table: Any


class Stateful:
    def state_dict(self) -> dict[str, Any]:
        return {"m": np.arange(4.0), "count": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def tree_of_everything() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    tied = rng.standard_normal(1000).astype(np.float32)
    return {
        "dtypes": {
            name: rng.integers(0, 2, (3, 5)).astype(dtype_of(name))
            for name in (
                "bool int2 int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float4_e2m1fn "
                "float8_e3m4 float8_e4m3fn float8_e4m3fnuz float8_e4m3b11fnuz float8_e5m2 "
                "float8_e5m2fnuz float8_e8m0fnu bfloat16 float16 float32 float64 complex64 "
                "complex128"
            ).split()
        },
        "large": rng.standard_normal((1301, 1733)),
        "strided": rng.standard_normal((60, 70, 11)).transpose(2, 0, 1),
        "zstd": np.arange(100_000).reshape(100, 1000) % 7,
        "ranks": [np.zeros((2,) * rank, np.int16) + rank for rank in range(6)],
        "empty": [np.zeros((0, 3)), {}, [], (), None],
        "tied": (tied, {"again": tied}),
        "ints": [0, -7, 10**40],
        "floats": [0.1, -0.0, math.inf, math.nan],
        "more": [True, False, 1 - 2j, "", "naïve", "\ud800", b"", b"\xff" * 3, b"x" * 3000],
        "point": Point(1, np.ones(3)),
        "config": Config(0.5, {"deep": [Point(None, 2)]}),
        "object": Stateful(),
        1: {"1": "a", 1: "b", 2: "c"},
        "odd/%": {"": 1, ".": 2, "..": 3, "\x1f\x9f": 4, "a.b": np.zeros(2), "é": 5},
        "a": {"b": np.zeros(1)},
        "a.b": np.ones(1),
    }


def plain(tree: Any) -> Any:
    """The containers as a restore without a target returns them."""
    if isinstance(tree, Stateful):
        return tree.state_dict()
    if isinstance(tree, Config):
        return {"rate": tree.rate, "table": plain(tree.table)}
    if isinstance(tree, Point):
        return {"x": plain(tree.x), "y": plain(tree.y)}
    if isinstance(tree, dict):
        return {key: plain(child) for key, child in tree.items()}
    return type(tree)(map(plain, tree)) if isinstance(tree, list | tuple) else tree


def same(first: Any, second: Any) -> bool:
    if isinstance(first, dict) and isinstance(second, dict):
        # Keys with their types: 1 and "1" differ.
        return list(map(repr, first)) == list(map(repr, second)) and all(
            map(same, first.values(), second.values())
        )
    if isinstance(first, list | tuple):
        return (
            type(first) is type(second)
            and len(first) == len(second)
            and all(map(same, first, second))
        )
    if isinstance(first, np.ndarray | np.generic):
        return (
            isinstance(second, np.ndarray)
            and (first.dtype, first.shape) == (second.dtype, second.shape)
            and first.tobytes() == second.tobytes()
        )
    if isinstance(first, float):
        return isinstance(second, float) and struct.pack("d", first) == struct.pack("d", second)
    return type(first) is type(second) and bool(first == second)


OPTIONS = SaveOptions(
    chunk_nbytes=2 << 20,
    target_data_file_nbytes=8 << 20,
    leaf_options=lambda path, spec: {
        "zstd": LeafOptions(compression="zstd", chunk_shape=(33, 999)),
        "strided": LeafOptions(chunk_shape=(4, 60, 13)),
    }.get(path),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("page") / "everything"
    blocking.save(directory, tree_of_everything(), options=OPTIONS)
    return directory


def test_the_page_suffices_to_restore_what_was_saved(saved: Path) -> None:
    paths, tree = restore(saved)
    assert same(plain(tree_of_everything()), tree)
    assert same(tree, blocking.restore(saved))
    assert paths == [leaf.path for leaf in blocking.inspect(saved).leaves]
    record = read_record(saved)
    stored = {info.path: info for info in blocking.inspect(saved).leaves}
    # What the page describes did occur: many chunks, several files, compression, ties.
    assert stored["large"].chunk_count > 3 and stored["zstd"].compression == "zstd"
    assert record["arrays"]["tied"] and len(record["files"]) >= 4


def test_the_page_covers_object_stores(tmp_path: Path) -> None:
    tree = {"w": np.arange(2000.0), "n": 3, "s": "text"}
    with simulator() as sim:
        blocking.save("s3://bucket/x", tree, storage_options=sim.s3_options())
        stored = sim.objects("bucket")
    for key, data in stored.items():
        path = tmp_path / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    record = read_record(tmp_path / "x")
    assert len(record["fixed"]) >= 3
    assert not [entry for entry in record["files"] if record["save_id"] not in entry["path"]]
    _, found = restore(tmp_path / "x")
    assert np.array_equal(found["w"], tree["w"]) and (found["n"], found["s"]) == (3, "text")


def read_sealed(data: bytes, kind: str) -> dict[str, Any] | None:
    """A claim or a list, by the page; None if it is damaged."""
    if data[-12:] != b'"%08x"}\n' % crc32c.crc32c(data[:-12]):
        return None
    document: dict[str, Any] = json.loads(data)
    assert (document["format"], document["version"]) == (kind, 1)
    return document


def counts(objects: dict[str, bytes], step: int) -> bool:
    """Whether the record of a step of the run at the root counts, by the page."""
    record = json.loads(objects[f"run/{step}/checkpoint.json"])
    lists = {}
    taken = []
    for key, data in objects.items():
        name = key.removeprefix("run/.asyncckpt/")
        if re.fullmatch("inherited-[1-9][0-9]*", name):
            found = read_sealed(data, "asyncckpt-inherited")
            if found is not None and found["epoch"] > record["epoch"]:
                lists[found["epoch"]] = found["save_ids"]
        elif match := re.fullmatch("replaces-([0-9a-f]{32})-([0-9a-f]{32})", name):
            taken.append((match[1], match[2]))
    if record["epoch"] == 0 or not lists:
        return True
    line = {record["save_id"]}
    for _ in taken:
        line |= {old for new, old in taken if new in line}
    return not line.isdisjoint(lists[max(lists)])


def test_the_page_covers_claims(tmp_path: Path) -> None:
    tree = {"w": np.arange(5.0)}
    with simulator() as sim:
        options: dict[str, Any] = {"storage_options": sim.s3_options()}
        with blocking.Checkpointer("s3://bucket/run", **options) as run:
            run.save(0, tree)
        with blocking.Checkpointer("s3://bucket/run", takeover=True, **options) as run:
            run.save(1, tree)
            run.save(2, tree)
            with blocking.Checkpointer("s3://bucket/run", takeover=True, **options) as later:
                later.save(3, tree)
                with pytest.raises(FencedError):
                    run.save(4, tree)
                assert later.steps() == [0, 1, 2, 3]
        stored = dict(sim.objects("bucket"))
    for step in range(5):
        assert counts(stored, step) == (step < 4)
        assert json.loads(stored[f"run/{step}/checkpoint.json"])["epoch"] == [0, 1, 1, 2, 1][step]
    claim = read_sealed(stored["run/.asyncckpt/claim-2"], "asyncckpt-claim")
    assert claim is not None and (claim["epoch"], claim["pid"]) == (2, os.getpid())
    assert re.fullmatch("[0-9a-f]{32}", claim["token"])
    # Without the list, or with a damaged one, everything counts.
    stored["run/.asyncckpt/inherited-2"] += b"x"
    assert counts(stored, 4)


@pytest.mark.parametrize("store", ["local", "objects"])
def test_the_page_covers_version_1(store: str) -> None:
    directory = Path(__file__).parents[1] / "checkpoint" / "version_1" / store / "3"
    assert read_record(directory)["version"] == 1
    _, found = restore(directory)
    assert_same(found, expected())


@pytest.mark.parametrize("tree", [np.arange(5.0), 3, {}, None])
def test_the_page_covers_small_trees(tree: Any, tmp_path: Path) -> None:
    blocking.save(tmp_path / "small", tree)
    assert same(tree, restore(tmp_path / "small")[1])


def test_the_page_covers_leaves_in_pieces(tmp_path: Path) -> None:
    values = np.arange(10_000 * 30, dtype=np.int64).reshape(10_000, 30)
    edges = [0, 3001, 5000, 8001, 10_000]
    shards = [((a, 0), values[a:b].copy()) for a, b in pairwise(edges)]
    leaf = ShardedArray(values.shape, values.dtype, shards)
    tree = {"before": np.arange(3), "uneven": leaf, "n": 7, "head": leaf, "after": np.arange(4)}
    blocking.save(tmp_path / "x", tree)
    assert same({**tree, "uneven": values, "head": values}, restore(tmp_path / "x")[1])
    record = read_record(tmp_path / "x")
    assert record["arrays"]["name"][1:5] == [f"uneven%~{i}" for i in range(4)]
    assert record["arrays"]["tied"] == {str(array): array - 4 for array in range(5, 9)}
    found = dict(entries_of(tmp_path / "x" / "default", record))
    assert found == expected_entries(tmp_path / "x", record)
    assert not (tmp_path / "x" / "default" / "_METADATA").exists()


def test_the_page_covers_what_several_processes_save(tmp_path: Path) -> None:
    count = 4
    rows = np.arange(8000 * 40, dtype=np.float64).reshape(8000, 40)
    uneven = np.arange(10_000 * 30, dtype=np.int64).reshape(10_000, 30)
    edges = [0, 3001, 5000, 8001, 10_000]
    small, seconds = np.arange(12, dtype=np.int16), np.arange(4000, dtype=np.float32)

    def of(process: int, whole: np.ndarray[Any, Any], start: int, stop: int) -> ShardedArray:
        offset = (start, *(0,) * (whole.ndim - 1))
        return ShardedArray(whole.shape, whole.dtype, [(offset, whole[start:stop].copy())])

    def tree(process: int) -> dict[str, Any]:
        next_ = process + 1
        return {
            "rows": of(process, rows, 2000 * process, 2000 * next_),
            "uneven": of(process, uneven, edges[process], edges[next_]),
            "small": of(process, small, 3 * process, 3 * next_),
            "seconds": of(process, seconds, 1000 * process, 1000 * next_),
            "local": np.ones((1000, 1000), np.float32),
            "n": 7,
            "own": PerProcess({"seed": process, "draws": np.full(process + 1, process)}),
        }

    def save(process: int) -> None:
        coordinator = DirectoryCoordinator(
            tmp_path / "keys", process_index=process, process_count=count
        )
        try:
            blocking.save(tmp_path / "x", tree(process), coordinator=coordinator)
        finally:
            asyncio.run(coordinator.close())

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(save, range(count)))
    _, found = restore(tmp_path / "x")
    own = found.pop("own")
    expected = {"rows": rows, "uneven": uneven, "small": small, "seconds": seconds}
    assert same({**expected, "local": np.ones((1000, 1000), np.float32), "n": 7}, found)
    for process in range(count):
        wanted = {"seed": process, "draws": np.full(process + 1, process)}
        assert same(wanted, own[process])

    record = read_record(tmp_path / "x")
    assert (record["writer"], record["writers"], record["epoch"]) == (0, count, 0)
    name = re.compile(rf"default/d/{record['save_id']}-([0-9]+-)?[0-9]+")
    others = re.compile(rf"default/d/{record['save_id']}-(index[0-9]*|parts[0-9]+)")
    data = [file["path"] for file in record["files"] if "/d/" in file["path"]]
    assert [p for p in data if not (name.fullmatch(p) or others.fullmatch(p))] == []
    processes = {found[1] for path in data if (found := name.fullmatch(path))}
    assert processes == {None, "1-", "2-", "3-"}
    assert any("-parts" in path for path in data)
    (node,) = [node for node in record["tree"]["nodes"] if "PerProcess" in node.get("type", "")]
    assert (node["kind"], node["type"]) == ("registered", "asyncckpt.tree.per_process.PerProcess")
    assert node["keys"] == list(range(count))
    assert node["type"] in (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def test_chunks_stand_where_the_page_says(saved: Path) -> None:
    record = read_record(saved)
    index = read_index(saved, record)
    starts = first_rows(record)
    row_spec: dict[int, dict[str, Any]] = {}
    for start, number in zip(starts, record["arrays"]["spec"], strict=True):
        spec = record["specs"][number]
        for row in range(start, start + math.prod(counts_of(spec))):
            row_spec[row] = spec
    for number, row in enumerate(index):
        spec = row_spec[number]
        inline = record["files"][row.file]["path"].endswith("-index")
        one = math.prod(counts_of(spec)) == 1
        raw = math.prod(spec["chunk_shape"]) * dtype_of(spec["dtype"]).itemsize
        assert inline == (one and spec["zstd"] is None and raw + 4 <= 1024)
        if not inline and spec["zstd"] is None:
            assert row.offset % 8 == 0 if raw < 1 << 20 else row.offset % 4096 == 2048
            assert row.nbytes == raw + 4


def test_the_database_holds_what_the_page_says(saved: Path) -> None:
    record = read_record(saved)
    found = dict(entries_of(saved / "default", record))
    assert list(found) == sorted(found)
    assert found == expected_entries(saved, record)


def test_a_database_of_several_nodes_is_as_the_page_says(tmp_path: Path) -> None:
    tree = {f"layer{i:04}": {"w": np.full(200, i, np.float32)} for i in range(2500)}
    blocking.save(tmp_path / "many", tree)
    record = read_record(tmp_path / "many")
    manifest = base64.b64decode(record["manifest"])
    assert dict(entries_of(tmp_path / "many" / "default", record)) == expected_entries(
        tmp_path / "many", record
    )
    body = body_of(manifest, 0x0CDB3A2A)
    body.take(16 + 1 + 2 + 3 + 1 + 1)
    body.paths()
    body.varints(2)
    assert body.take(1) != b"\0"  # the root is an interior node


def test_array_names_are_as_the_page_says(saved: Path) -> None:
    names = read_record(saved)["arrays"]["name"]
    assert {"large", "ranks.0", "dtypes.bool", "tied.1.again"} <= set(names)
    assert {"a%2Eb", "a.b", "odd%2F%25.a%2Eb"} <= set(names)


def test_a_typed_key_is_its_data_and_its_implementation(tmp_path: Path) -> None:
    key = jax.random.key(7)
    blocking.save(tmp_path / "key", {"key": key})
    record = read_record(tmp_path / "key")
    assert record["leaves"]["extra"] == {"0": {"prng_impl": "threefry2x32"}}
    data = restore(tmp_path / "key")[1]["key"]
    assert data.tobytes() == np.asarray(jax.random.key_data(key)).tobytes()


def test_index_and_data_of_another_save_are_refused(tmp_path: Path) -> None:
    """The record vouches for the contents of the chunk index, not only for its length."""
    for step in (1, 2):
        tree = {"w": np.full(5000, step, np.float32), "small": np.full(3, step)}
        blocking.save(tmp_path / str(step), tree)
    for suffix in ("0", "index"):
        (old,) = (tmp_path / "1" / "default" / "d").glob(f"*-{suffix}")
        (new,) = (tmp_path / "2" / "default" / "d").glob(f"*-{suffix}")
        shutil.copyfile(old, new)
    with pytest.raises(CorruptCheckpointError, match=r"chunk at byte \d+ of .* is damaged"):
        blocking.restore(tmp_path / "2")
