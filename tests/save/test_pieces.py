"""Sharded leaves, saved and restored: one array where a grid follows the shards, else pieces."""

from __future__ import annotations

import gc
import itertools
import json
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import asyncckpt
from asyncckpt import (
    LeafOptions,
    MismatchError,
    RestoreOptions,
    RestoreReport,
    SaveOptions,
    ShardedArray,
    UsageError,
)
from asyncckpt.options import MIB
from asyncckpt.spec import DTYPES, Box
from tests.script import Script

Values = np.ndarray[Any, Any]

CUTS = (0, 3001, 5000, 8001, 10_000)
"""Rows of Linear(3, 10) on 2 x 2 devices, larger: no common grid has few enough chunks. An array of
more than 1 MiB, which must not be padded much, is stored in four pieces then."""


def numbers(*shape: int, dtype: str = "float32") -> Values:
    # Every dtype holds the integers below 16 exactly; the period is prime to all lengths here.
    count = int(np.prod(shape))
    values = np.arange(count) if DTYPES[dtype].itemsize > 2 else np.arange(count) % 13
    return values.reshape(shape).astype(DTYPES[dtype])


def in_rows(values: Values, *cuts: int) -> ShardedArray:
    rest = (0,) * (values.ndim - 1)
    shards = [((a, *rest), values[a:b].copy()) for a, b in itertools.pairwise(cuts)]
    return ShardedArray(values.shape, values.dtype, shards)


def same(found: Any, values: Values) -> bool:
    array = found.to_numpy() if isinstance(found, ShardedArray) else found
    return array.dtype == values.dtype and np.array_equal(array, values)


def record_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "checkpoint.json").read_bytes())


async def opened(leaf: asyncckpt.LeafInfo) -> Values:
    """The leaf as TensorStore reads it, by itself."""
    array = await ts.open(leaf.tensorstore_spec(), read=True, open=True)
    return await array.read()


# ------------------------------------------------------------------------------------ one array


async def test_even_shards_are_stored_as_one_array(
    tmp_path: Path,
) -> None:
    values = numbers(512, 300)
    tree = {
        "rows": in_rows(values, 0, 128, 256, 384, 512),
        "tiles": ShardedArray.tiles(values, (2, 2), replicas=2),
        "composed": in_rows(values, 0, 128, 192, 320, 512),
    }
    report = await asyncckpt.save(tmp_path / "x", tree)
    assert (report.array_count, report.orbax, report.notes) == (3, True, ())
    assert report.nbytes == 3 * values.nbytes
    record = record_of(tmp_path / "x")
    assert record["leaves"]["pieces"] == {}
    assert [spec["chunk_shape"] for spec in record["specs"]] == [[128, 300], [256, 150], [64, 300]]
    info = await asyncckpt.inspect(tmp_path / "x")
    restored = await asyncckpt.restore(tmp_path / "x")
    for key in tree:
        assert same(await opened(info[key]), values)
        assert same(restored[key], values)


@pytest.mark.parametrize("dtype", ["bool", "int4", "bfloat16", "complex128"])
async def test_small_sharded_leaves_are_one_chunk(tmp_path: Path, dtype: str) -> None:
    values = numbers(23, 9, dtype=dtype)
    tree = {
        "uneven": in_rows(values, 0, 3, 5, 8, 23),
        "tiles": ShardedArray.tiles(values, (7, 4), replicas=2),
        "inline": in_rows(values[:3, 0], 0, 1, 3),
    }
    await asyncckpt.save(tmp_path / "x", tree)
    assert record_of(tmp_path / "x")["arrays"]["name"] == list(tree)
    info = await asyncckpt.inspect(tmp_path / "x")
    restored = await asyncckpt.restore(tmp_path / "x")
    for key, leaf in tree.items():
        assert info[key].chunk_count == 1
        assert same(await opened(info[key]), leaf.to_numpy())
        assert same(restored[key], leaf.to_numpy())


# --------------------------------------------------------------------------------------- pieces


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("dtype", ["bool", "int4", "bfloat16", "float32", "complex128"])
async def test_uneven_shards_are_stored_in_pieces_and_restored_as_one_leaf(
    tmp_path: Path, dtype: str, compression: Any
) -> None:
    values = numbers(10_000, 120 // DTYPES[dtype].itemsize, dtype=dtype)
    tree = {"a": np.arange(5), "params": {"w": in_rows(values, *CUTS)}, "n": 3}
    report = await asyncckpt.save(
        tmp_path / "x", tree, options=SaveOptions(compression=compression)
    )
    assert report.array_count == 5
    assert report.nbytes == values.nbytes + 40
    record = record_of(tmp_path / "x")
    names = [f"params.w%~{i}" for i in range(4)]
    assert record["arrays"]["name"] == ["a", *names, "n"]
    assert record["leaves"]["pieces"] == {"1": [[[CUTS[i], 0], i + 1] for i in range(4)]}

    restored = await asyncckpt.restore(tmp_path / "x")
    assert same(restored["params"]["w"], values)
    assert restored["n"] == 3
    assert (await asyncckpt.verify(tmp_path / "x")).ok
    info = await asyncckpt.inspect(tmp_path / "x")
    leaf = info["params/w"]
    assert (leaf.shape, leaf.dtype, leaf.nbytes) == (values.shape, dtype, values.nbytes)
    assert (leaf.array, leaf.chunk_count) == (names[0], 4)
    # Every piece is a zarr array of its own, and TensorStore stacks them to the whole leaf.
    for i, name in enumerate(names):
        spec = {**info["a"].tensorstore_spec()}
        spec["kvstore"] = {**spec["kvstore"], "path": f"{name}/"}
        assert same(await (await ts.open(spec)).read(), values[CUTS[i] : CUTS[i + 1]])
    assert same(await opened(leaf), values)
    stack = await ts.open(leaf.tensorstore_spec())
    assert same(await stack[2990:5010, 3:7].read(), values[2990:5010, 3:7])


async def test_a_leaf_in_pieces_is_restored_to_any_target(tmp_path: Path) -> None:
    values = numbers(10_000, 30)
    await asyncckpt.save(tmp_path / "x", {"w": in_rows(values, *CUTS)})
    for like in (
        np.zeros_like(values),
        np.zeros_like(values.T).T,
        ShardedArray.tiles(values.shape, (3, 7), dtype="float32"),
        in_rows(np.zeros_like(values), *CUTS),
        in_rows(np.zeros_like(values), 0, 10_000),
    ):
        restored = await asyncckpt.restore(tmp_path / "x", like={"w": like})
        assert type(restored["w"]) is type(like)
        assert same(restored["w"], values)
        assert not same(like, values)
        await asyncckpt.restore_into(tmp_path / "x", {"w": like})
        assert same(like, values)


async def test_tied_leaves_share_all_pieces(tmp_path: Path) -> None:
    values = numbers(10_000, 30)
    leaf = in_rows(values, *CUTS)
    plain = numbers(50, 50)
    tree = {"plain": plain, "embed": leaf, "again": plain, "head": leaf}
    report = await asyncckpt.save(tmp_path / "x", tree)
    assert (report.array_count, report.nbytes) == (5, values.nbytes + plain.nbytes)
    on_disk = sum(p.stat().st_size for p in (tmp_path / "x" / "default" / "d").iterdir())
    assert on_disk < 1.1 * report.nbytes
    record = record_of(tmp_path / "x")
    assert record["arrays"]["tied"] == {"5": 0, "6": 1, "7": 2, "8": 3, "9": 4}
    assert record["leaves"]["pieces"]["3"] == [[[CUTS[i], 0], i + 6] for i in range(4)]
    restored = await asyncckpt.restore(tmp_path / "x")
    assert restored["embed"] is restored["head"]
    assert same(restored["head"], values)
    info = await asyncckpt.inspect(tmp_path / "x")
    assert info["head"].tied_to == "embed"
    assert same(await opened(info["head"]), values)


async def test_a_checkpoint_with_pieces_is_not_offered_to_orbax(tmp_path: Path) -> None:
    values = numbers(10_000, 30)
    report = await asyncckpt.save(
        tmp_path / "x", {"v": np.ones(3), "w": in_rows(values, *CUTS), "s": "text"}
    )
    assert not report.orbax
    (note,) = report.notes
    assert note.startswith("w: this leaf is stored in pieces")
    assert "Orbax" in note and "export --orbax converts it" in note
    assert not list((tmp_path / "x").rglob("_*"))


async def test_regular_insists_on_one_array(tmp_path: Path) -> None:
    values = numbers(10_000, 30)
    options = SaveOptions(layout="regular")
    even = {"w": in_rows(values, 0, 2000, 6000, 10_000)}
    await asyncckpt.save(tmp_path / "even", even, options=options)
    assert record_of(tmp_path / "even")["arrays"]["name"] == ["w"]
    with pytest.raises(UsageError, match=r"^a/w: .* has 10000 chunks, and layout=") as caught:
        await asyncckpt.save(tmp_path / "x", {"a": {"w": in_rows(values, *CUTS)}}, options=options)
    assert (caught.value.path, caught.value.found) == ("a/w", 10_000)
    assert not (tmp_path / "x").exists()
    # A chunk shape settles it too: in one process chunks may be gathered from several shards.
    await asyncckpt.save(
        tmp_path / "shaped",
        {"w": in_rows(values, *CUTS)},
        options=SaveOptions(
            layout="regular", leaf_options=lambda *_: LeafOptions(chunk_shape=(4096, 30))
        ),
    )
    assert same((await asyncckpt.restore(tmp_path / "shaped"))["w"], values)


async def test_a_gap_between_shards_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    values = numbers(10, 4)
    leaf = ShardedArray((10, 4), "float32", [((0, 0), values[:3]), ((5, 0), values[5:])])
    with pytest.raises(UsageError, match=r"^a/w: .* nothing holds \[3:5, 0:4\]"):
        await asyncckpt.save(tmp_path / "x", {"a": {"w": leaf}})
    assert not (tmp_path / "x").exists()


async def test_a_sharded_leaf_is_cast_on_its_way(tmp_path: Path) -> None:
    values = numbers(10_000, 30)
    for name, shards in (("even", (0, 5000, 10_000)), ("uneven", CUTS)):
        options = SaveOptions(leaf_options=lambda *_: LeafOptions(dtype="bfloat16"))
        await asyncckpt.save(tmp_path / name, {"w": in_rows(values, *shards)}, options=options)
        restored = await asyncckpt.restore(tmp_path / name)
        assert same(restored["w"], values.astype(DTYPES["bfloat16"]))


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, int]) -> list[Box]:
    """Boxes that tile a matrix, cut in two again and again."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 7))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, 1))
        first = draw(st.integers(0, box.shape[axis]))
        for start, stop in ((0, first), (first, box.shape[axis])):
            offset, lengths = list(box.offset), list(box.shape)
            offset[axis] += start
            lengths[axis] = stop - start
            boxes.append(Box(tuple(offset), tuple(lengths)))
    return boxes


@given(st.data())
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_layout_is_restored_to_any_other(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = (131, 97)
    values = numbers(*shape, dtype="float64")

    def sharded(boxes: list[Box], source: Values) -> ShardedArray:
        held = [(box.offset, source[box.slices()].copy()) for box in boxes]
        return ShardedArray(shape, "float64", held)

    saved = sharded(data.draw(layouts(shape)), values)
    like = sharded(data.draw(layouts(shape)), np.zeros(shape))
    options = SaveOptions(chunk_nbytes=data.draw(st.sampled_from([4096, 20_000, MIB])))
    path = tmp_path_factory.mktemp("layout") / "x"
    await asyncckpt.save(path, {"w": saved}, options=options)
    restored = await asyncckpt.restore(path, like={"w": like})
    assert same(restored["w"], values)
    assert [(o, p.shape) for o, p in restored["w"].shards] == [(o, p.shape) for o, p in like.shards]
    await asyncckpt.restore_into(path, {"w": like})
    assert same(like, values)
    assert same(await opened((await asyncckpt.inspect(path))["w"]), values)


async def test_targets_whose_shards_overlap_are_refused_unless_they_are_tied(
    tmp_path: Path,
) -> None:
    values = numbers(40, 30)
    await asyncckpt.save(tmp_path / "x", {"a": values, "b": values + 1, "tied": values})
    memory = np.zeros_like(values)
    halves = [((0, 0), memory[:20]), ((20, 0), memory[20:])]
    leaf = ShardedArray(values.shape, "float32", halves)
    columns = [((0, i), memory[:, i : i + 15]) for i in (0, 15)]
    for other in (memory, ShardedArray(values.shape, "float32", columns), memory[::-1]):
        with pytest.raises(UsageError, match=r"[ab] and [ab]: these targets overlap in memory"):
            await asyncckpt.restore_into(
                tmp_path / "x", {"a": leaf, "b": other}, include=["a", "b"], strict=False
            )
    assert not memory.any()
    with pytest.raises(MismatchError, match="a and b: the checkpoint holds different values"):
        await asyncckpt.restore_into(
            tmp_path / "x", {"a": leaf, "b": leaf}, include=["a", "b"], strict=False
        )
    # The same memory for leaves that are one array; and shards that lie between each other.
    tree = {"a": leaf, "tied": ShardedArray(values.shape, "float32", halves)}
    await asyncckpt.restore_into(tmp_path / "x", tree, include=["a", "tied"])
    assert same(memory, values)
    wide = np.zeros((40, 60), np.float32)
    left = ShardedArray(values.shape, "float32", [((0, 0), wide[:, :30])])
    right = ShardedArray(
        values.shape, "float32", [((0, i), wide[:, 30 + i :][:, :15]) for i in (0, 15)]
    )
    await asyncckpt.restore_into(tmp_path / "x", {"a": left, "b": right}, include=["a", "b"])
    assert same(wide, np.hstack([values, values + 1]))


# ------------------------------------------------------------------------------- emulated meshes


@pytest.mark.parametrize(
    ("shape", "saved", "wanted", "items"),
    [
        ((128, 64), (4, 1), (2, 2), 8),
        ((128, 64), (2, 2), (4, 1), 8),
        ((128, 64), (4, 4), (2, 2), 16),
        ((128, 64), (2, 2), (4, 4), 16),
        ((10, 6), (4, 1), (2, 2), 10),
        ((10, 6), (2, 2), (4, 1), 10),
        ((10, 6), (4, 4), (2, 2), 20),
        ((10, 6), (2, 2), (4, 4), 20),
        ((5, 3), (4, 1), (2, 2), 8),
        ((5, 3), (2, 2), (4, 1), 8),
        ((5, 3), (4, 4), (2, 2), 12),
        ((5, 3), (2, 2), (4, 4), 12),
    ],
)
async def test_resharding_tiles_reads_one_item_per_overlapping_pair(
    tmp_path: Path,
    shape: tuple[int, int],
    saved: tuple[int, int],
    wanted: tuple[int, int],
    items: int,
) -> None:
    # The counts of PEERS.md; tiles that are all padding have none. Leaves of this size would be
    # one chunk; their chunks are made the tiles here, as those of larger leaves are by themselves.
    values = numbers(*shape)
    source = ShardedArray.tiles(values, saved, replicas=2)
    tile = source.shards[0][1].shape
    options = SaveOptions(leaf_options=lambda *_: LeafOptions(chunk_shape=tile))
    await asyncckpt.save(tmp_path / "x", {"w": source}, options=options)
    reports: list[RestoreReport] = []
    explain = RestoreOptions(explain=True)
    like = ShardedArray.tiles(shape, wanted, dtype="float32", replicas=2)
    restored = (
        await asyncckpt.restore(
            tmp_path / "x", like={"w": like}, options=explain, on_report=reports.append
        )
    )["w"]
    wanted_tiles = ShardedArray.tiles(values, wanted, replicas=2)
    for (_, found), (_, tile_values) in zip(restored.shards, wanted_tiles.shards, strict=True):
        np.testing.assert_array_equal(found, tile_values)
    for _, part in like.shards:
        part.fill(-7)
    reports.append(await asyncckpt.restore_into(tmp_path / "x", {"w": like}, options=explain))
    for report in reports:
        read = [item for one in report.reads for item in one.items]
        assert len(read) == items
        # The items tile the array: every element is wanted once, replicas included.
        seen = np.zeros(shape, int)
        for item in read:
            seen[Box(item.offset, item.shape).slices()] += 1
        assert (seen == 1).all()
        assert sum(item.wanted_nbytes for item in read) == values.nbytes
        assert sum(one.nbytes for one in report.reads) == report.read_nbytes
    for (offset, found), (_, tile_values) in zip(like.shards, wanted_tiles.shards, strict=True):
        padding = np.ones(found.shape, bool)
        padding[tuple(map(slice, values[Box(offset, found.shape).slices()].shape))] = False
        assert (found[padding] == -7).all()
        np.testing.assert_array_equal(found[~padding], tile_values[~padding])


async def test_tiles_of_large_leaves_are_their_chunks(tmp_path: Path) -> None:
    values = numbers(128, 64, dtype="complex128")
    await asyncckpt.save(tmp_path / "x", {"w": ShardedArray.tiles(values, (4, 2))})
    (spec,) = record_of(tmp_path / "x")["specs"]
    assert spec["chunk_shape"] == [32, 32]
    like = {"w": ShardedArray.tiles((128, 64), (2, 4), dtype="complex128")}
    report = await asyncckpt.restore_into(tmp_path / "x", like)
    # Every chunk is read once, though two targets want it.
    assert values.nbytes <= report.read_nbytes <= 1.01 * values.nbytes
    assert same(like["w"], values)


# -------------------------------------------------------------------- what is held and for how long


@pytest.mark.parametrize("snapshot", ["copy", "reference"])
async def test_shards_may_change_once_start_save_has_returned(
    tmp_path: Path, snapshot: Any
) -> None:
    values = numbers(10_000, 30)
    # One of the pieces is so small that it stands in the B+tree, copied before the others.
    tree = {
        "even": in_rows(values, 0, 5000, 10_000),
        "uneven": in_rows(values, 0, 5, 3001, 5000, 10_000),
        "tiles": ShardedArray.tiles(values, (3, 3), replicas=2),
        "small": in_rows(values[:9], 0, 4, 9),
    }
    wanted = {key: leaf.to_numpy() for key, leaf in tree.items()}
    options = SaveOptions(snapshot=snapshot)
    async with asyncckpt.Checkpointer(tmp_path, save_options=options) as ckpt:
        pending = await ckpt.start_save(1, tree)
        for leaf in tree.values():
            for _, part in leaf.shards:
                part.fill(-1)
        report = await pending
        assert report.referenced_nbytes == 0
        restored = await ckpt.restore(1)
    for key, expected in wanted.items():
        assert same(restored[key], expected)


async def test_shards_that_were_staged_are_not_kept_alive_by_the_save(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        write = Script(ckpt).hold("write")
        values = numbers(10_000, 30)
        state = {"w": in_rows(values, *CUTS), "v": ShardedArray.tiles(values, (2, 2))}
        gone = [weakref.ref(part) for leaf in state.values() for _, part in leaf.shards]
        pending = await ckpt.start_save(1, state)
        await write.reached()
        state.clear()
        gc.collect()
        assert [ref() is None for ref in gone] == [True] * 8
        write.go()
        await pending
        assert all(same(leaf, values) for leaf in (await ckpt.restore(1)).values())


async def test_a_sharded_leaf_is_never_assembled_and_staged_within_the_budget(
    tmp_path: Path,
) -> None:
    nbytes = 96 * MIB
    shape = (96, MIB)
    for snapshot in ("copy", "reference"):
        leaf = ShardedArray(
            shape, "uint8", [((i, 0), np.full((8, MIB), i, np.uint8)) for i in range(0, 96, 8)]
        )
        options = SaveOptions(host_memory_nbytes=64 * MIB, snapshot=snapshot)
        tracemalloc.start()
        try:
            report = await asyncckpt.save(tmp_path / snapshot, {"w": leaf}, options=options)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert report.nbytes == nbytes
        assert report.peak_staged_nbytes <= 64 * MIB
        # Slots are mappings, which tracemalloc does not see; an array would be seen.
        assert peak < 4 * MIB
    assert (await asyncckpt.verify(tmp_path / "copy")).ok


# ------------------------------------------------------------------------------- faults found here


async def test_a_chunk_shape_beyond_a_small_array_is_padded_in_the_tree_too(
    tmp_path: Path,
) -> None:
    options = SaveOptions(leaf_options=lambda path, _: LeafOptions(chunk_shape=(20,)))
    values = np.arange(10, dtype=np.float32)
    await asyncckpt.save(tmp_path / "x", {"a": values}, options=options)
    assert same((await asyncckpt.restore(tmp_path / "x"))["a"], values)
    assert same(await opened((await asyncckpt.inspect(tmp_path / "x"))["a"]), values)
    assert (await asyncckpt.verify(tmp_path / "x")).ok


@pytest.mark.parametrize(
    "own", [LeafOptions(compression="zstd"), LeafOptions(dtype="float32"), LeafOptions()]
)
async def test_a_tied_leaf_is_stored_as_the_one_that_it_shares(
    tmp_path: Path, own: LeafOptions
) -> None:
    values = np.arange(5000, dtype=np.float32)
    options = SaveOptions(leaf_options=lambda path, _: own if path == "b" else None)
    report = await asyncckpt.save(tmp_path / "x", {"a": values, "b": values}, options=options)
    assert report.array_count == 1
    restored = await asyncckpt.restore(tmp_path / "x")
    assert restored["a"] is restored["b"]
    assert same(restored["b"], values)


async def test_tied_leaves_are_stored_apart_if_their_options_ask_for_different_dtypes(
    tmp_path: Path,
) -> None:
    values = np.linspace(0, 1, 5000, dtype=np.float32)
    own = {"b": "bfloat16", "c": "bfloat16", "d": "float64"}
    options = SaveOptions(
        leaf_options=lambda path, _: LeafOptions(dtype=own[path]) if path in own else None
    )
    async with asyncckpt.Checkpointer(tmp_path, save_options=options) as ckpt:
        for step in range(2):
            report = await ckpt.save(step, dict.fromkeys("abcde", values))
            assert (report.array_count, report.nbytes) == (3, 3 * values.nbytes)
        info = await ckpt.inspect()
        assert [info[path].tied_to for path in "abcde"] == [None, None, "b", None, "a"]
        restored = await ckpt.restore()
    assert same(restored["a"], values) and restored["e"] is restored["a"]
    assert same(restored["b"], values.astype(ml_dtypes.bfloat16))
    assert restored["d"].dtype == np.float64


async def test_a_location_with_characters_of_urls_is_opened_by_tensorstore(tmp_path: Path) -> None:
    place = tmp_path / "a b%20#c?d" / "é"
    place.mkdir(parents=True)
    values = numbers(10_000, 30)
    await asyncckpt.save(place / "x", {"v": values, "w": in_rows(values, *CUTS)})
    info = await asyncckpt.inspect(place / "x")
    assert same(await opened(info["v"]), values)
    assert same(await opened(info["w"]), values)


def test_a_leaf_without_a_database_has_no_tensorstore_spec() -> None:
    leaf = asyncckpt.LeafInfo("a/w", "array", shape=(3,), dtype="int8", array="a.w")
    with pytest.raises(UsageError, match=r"^a/w: .* is not an OCDBT database") as caught:
        leaf.tensorstore_spec()
    assert caught.value.path == "a/w"
    with pytest.raises(TypeError, match=r"n: a int has no array"):
        asyncckpt.LeafInfo("n", "int", value=3).tensorstore_spec()
