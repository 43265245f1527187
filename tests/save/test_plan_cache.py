"""The plan cache: its key has every part of the schema, and its hits and misses can be seen."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt import LeafOptions, SaveOptions, ShardedArray
from asyncckpt.options import GIB, SLOT_NBYTES
from asyncckpt.planning.merge import OwnPart
from asyncckpt.ports import Sizes
from asyncckpt.save.plan_cache import (
    LayoutCache,
    Limits,
    Terms,
    add_mirrors,
    layout_key,
    make_layout,
)
from asyncckpt.save.snapshot import Snapshot, take_snapshot
from asyncckpt.spec import ArraySpec, Shard
from tests.eight_devices import eight_devices as eight_devices
from tests.eight_devices import on_eight_devices

SIZES = Sizes(GIB, SLOT_NBYTES, 6)
LIMITS = Limits(GIB, None, None)

BASE = np.arange(40_000, dtype=np.float32).reshape(200, 200)


def rows(*cuts: int) -> ShardedArray:
    edges = [0, *cuts, 200]
    parts = [((a, 0), BASE[a:b].copy()) for a, b in itertools.pairwise(edges)]
    return ShardedArray(BASE.shape, BASE.dtype, parts)


def tree() -> dict[str, Any]:
    return {
        "a": BASE + 1,
        "pair": [BASE[:2] + 2, BASE[:3] + 3],
        "long": b"x" * 2000,
        "text": "one",
        "big": 2**63 - 1,
        "count": 7,
        "sharded": rows(100),
    }


def halve(path: str, spec: asyncckpt.ArraySpec) -> LeafOptions | None:
    return LeafOptions(dtype="bfloat16") if path == "a" else None


def other_text() -> dict[str, Any]:
    return {**tree(), "text": "two"}


def tied() -> dict[str, Any]:
    found = tree()
    found["pair"] = [found["pair"][1]] * 2
    return found


def untied() -> dict[str, Any]:
    found = tree()
    found["pair"] = [found["pair"][1], found["pair"][1].copy()]
    return found


SCHEMAS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "path": (tree, lambda: {("b" if k == "a" else k): v for k, v in tree().items()}),
    "order": (tree, lambda: dict(reversed(tree().items()))),
    "more leaves": (tree, lambda: {**tree(), "z": BASE}),
    "container": (tree, lambda: {**tree(), "pair": tuple(tree()["pair"])}),
    "key type": (lambda: {"k": {"1": BASE}}, lambda: {"k": {1: BASE}}),
    "framework": (tree, lambda: {**tree(), "a": torch.from_numpy(BASE + 1)}),
    "scalar type": (tree, lambda: {**tree(), "count": 7.0}),
    "shape": (tree, lambda: {**tree(), "a": (BASE + 1).reshape(100, 400)}),
    "dtype": (tree, lambda: {**tree(), "a": (BASE + 1).astype(np.int32)}),
    "sharded or not": (tree, lambda: {**tree(), "sharded": BASE}),
    "boxes": (tree, lambda: {**tree(), "sharded": rows(50)}),
    "tie": (untied, tied),
    "extra": (tree, lambda: {**tree(), "long": np.frombuffer(b"x" * 2000, np.uint8)}),
    "text of a str": (tree, other_text),
    "int beyond 64 bits": (tree, lambda: {**tree(), "big": 2**63}),
}

OPTIONS: dict[str, SaveOptions] = {
    "target_data_file_nbytes": SaveOptions(target_data_file_nbytes=16 << 20),
    "chunk_nbytes": SaveOptions(chunk_nbytes=8192),
    "compression": SaveOptions(compression="zstd"),
    "compression_level": SaveOptions(compression="zstd", compression_level=5),
    "layout": SaveOptions(layout="regular"),
    "leaf_options": SaveOptions(leaf_options=halve),
}


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for child in value.values() for leaf in leaves(child)]
    if isinstance(value, (list, tuple)):
        return [leaf for child in value for leaf in leaves(child)]
    return [value]


def assert_same(found: Any, saved: Any, cast: bool = False) -> None:
    assert len(leaves(found)) == len(leaves(saved))
    for one, other in zip(leaves(found), leaves(saved), strict=True):
        wanted = other.to_numpy() if isinstance(other, ShardedArray) else other
        if isinstance(wanted, torch.Tensor):
            wanted = wanted.numpy()
        assert type(one) is type(wanted)
        if isinstance(wanted, np.ndarray):
            if not (cast and one.dtype == "bfloat16"):
                assert one.dtype == wanted.dtype
            np.testing.assert_array_equal(one, wanted.astype(one.dtype))
        else:
            assert one == wanted


@pytest.mark.parametrize("change", SCHEMAS)
async def test_a_change_of_the_schema_is_a_miss_and_saves_what_is_there(
    tmp_path: Path, change: str
) -> None:
    before, after = SCHEMAS[change]
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        reports = [await ckpt.save(step, t()) for step, t in enumerate((before, before, after))]
        assert [report.plan_cached for report in reports] == [False, True, False]
        for step, saved in ((1, before()), (2, after())):
            restored = await ckpt.restore(step)
            assert list(restored) == list(saved)
            assert_same(restored, saved)
        again = [await ckpt.save(step, t()) for step, t in enumerate((after, before), start=3)]
        assert [report.plan_cached for report in again] == [True, True]
        assert_same(await ckpt.restore(3), after())


@pytest.mark.parametrize("change", OPTIONS)
async def test_a_change_of_the_options_is_a_miss(tmp_path: Path, change: str) -> None:
    base = SaveOptions(compression="zstd") if change == "compression_level" else SaveOptions()
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        reports = [
            await ckpt.save(step, tree(), options=options)
            for step, options in enumerate((base, base, OPTIONS[change], base))
        ]
        assert [report.plan_cached for report in reports] == [False, True, False, True]
        for step in range(4):
            assert_same(await ckpt.restore(step), tree(), cast=change == "leaf_options")
        dtype = (await ckpt.restore(2))["a"].dtype
        assert (dtype == "bfloat16") == (change == "leaf_options")


async def test_what_is_no_part_of_a_layout_is_a_hit(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        first = await ckpt.save(0, tree())
        other = {**tree(), "a": BASE * 2, "count": -1, "big": 5, "sharded": rows(100)}
        options = SaveOptions(private=True, deadline_s=1000.0, concurrency=2, snapshot="reference")
        second = await ckpt.save(1, other, options=options, metadata={"a": 1}, metrics={"m": 2})
        assert (first.plan_cached, second.plan_cached) == (False, True)
        assert_same(await ckpt.restore(1), other)


async def test_hits_and_misses_are_counted_in_the_reports(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path / "run") as ckpt:
        trees = [{"a": BASE}, {"a": BASE}, {"b": BASE}, {"a": BASE}, {"a": BASE[:9]}, {"a": BASE}]
        reports = [await ckpt.save(step, leaf) for step, leaf in enumerate(trees)]
    seen = [(r.plan_cached, r.plan_cache_hits, r.plan_cache_misses) for r in reports]
    assert seen == [
        (False, 0, 1),
        (True, 1, 1),
        (False, 1, 2),
        (True, 2, 2),
        (False, 2, 3),
        (True, 3, 3),
    ]
    report = await asyncckpt.save(tmp_path / "one", {"a": BASE})
    assert (report.plan_cache_hits, report.plan_cache_misses) == (0, 1)


# ------------------------------------------------------------------------------ parts of the key


def taken(value: Any) -> Snapshot:
    snapshot = take_snapshot(value)
    snapshot.tie()
    return snapshot


def flat(key: list[object]) -> list[object]:
    """The parts of a key, those of the last one too."""
    *parts, options = key
    assert isinstance(options, tuple)
    return [*parts, *options]


def key_with(
    value: Any,
    options: SaveOptions | None = None,
    budget: int = GIB,
    holders: tuple[int, ...] | None = None,
    process: int = 0,
    processes: int = 1,
    sizes: Sizes = SIZES,
    held: dict[int, OwnPart] | None = None,
    uneven: bool = False,
) -> list[object]:
    found = taken(value)
    found.held = held or {}
    found.uneven = uneven
    if holders is not None:
        for source in found.sources:
            if source.shards is not None:
                source.shards = tuple(Shard(shard.box, holders) for shard in source.shards)
    limits = Limits(budget, sizes.chunk_nbytes, sizes.chunk_limit_nbytes)
    return layout_key(found, Terms(options or SaveOptions(), limits, sizes, process, processes))


def test_every_part_of_the_key_is_changed_by_something() -> None:
    changed: set[int] = set()
    cache = LayoutCache()

    def compare(before: list[object], after: list[object]) -> None:
        differing = {
            i for i, (a, b) in enumerate(zip(flat(before), flat(after), strict=True)) if a != b
        }
        assert differing
        changed.update(differing)
        cache.keep(before, None)  # type: ignore[arg-type]
        misses = cache.misses
        assert cache.find(after) is None
        assert cache.misses == misses + 1

    for before, after in SCHEMAS.values():
        compare(key_with(before()), key_with(after()))
    base = key_with(tree())
    for options in OPTIONS.values():
        size = options.target_data_file_nbytes
        sizes = SIZES if size == "auto" else Sizes(size, SLOT_NBYTES, 6)
        compare(base, key_with(tree(), options, sizes=sizes))
    compare(base, key_with(tree(), budget=2 * GIB))
    compare(base, key_with(tree(), holders=(0, 1)))
    compare(base, key_with(tree(), processes=2))
    compare(base, key_with(tree(), process=1))
    compare(base, key_with(tree(), held={0: OwnPart(None, None, (0, 2))}))
    compare(base, key_with(tree(), uneven=True))
    for sizes in (
        Sizes(2 * GIB, SLOT_NBYTES, 6),
        Sizes(GIB, 2 * SLOT_NBYTES, 6),
        dataclasses.replace(SIZES, chunk_nbytes=GIB),
        dataclasses.replace(SIZES, chunk_limit_nbytes=GIB),
        dataclasses.replace(SIZES, even_streams=8),
    ):
        compare(base, key_with(tree(), sizes=sizes))
    # Writes in flight change nothing of what is written.
    assert key_with(tree(), sizes=Sizes(GIB, SLOT_NBYTES, 9)) == base
    # The device of a typed key needs a second device; see below.
    (devices,) = set(range(len(flat(base)))) - changed
    assert flat(base)[devices] == {}
    assert flat(key_with({"k": jax.random.key(1)}))[devices] == {0: str(jax.devices()[0])}
    assert flat(key_with(tree())) == flat(base)


def test_scalars_that_a_dtype_holds_are_staged_as_rank_0_arrays_too() -> None:
    held = {"flag": True, "int": 3, "float": 0.5, "complex": 1j}
    others = {"large": 2**63, "low": -(2**63) - 1, "text": "a", "bytes": b"a"}
    snapshot = taken({**held, **others})
    layout = make_layout(snapshot, Terms(SaveOptions(), LIMITS, SIZES))
    add_mirrors(snapshot, layout.mirrors)
    arrays = [source.view for source in snapshot.sources]
    found = dict(zip([snapshot.paths[leaf] for leaf in layout.mirrors], arrays, strict=True))
    assert {path: array.item() for path, array in found.items()} == held
    assert {array.shape for array in arrays} == {()}
    dtypes = [array.dtype.name for array in arrays]
    assert dtypes == ["bool", "int64", "float64", "complex128"]


def test_equal_keys_give_equal_layouts() -> None:
    key = layout_key(taken(tree()), Terms(SaveOptions(), LIMITS, SIZES))
    again = layout_key(taken(tree()), Terms(SaveOptions(), LIMITS, SIZES))
    assert key == again
    one, other = (make_layout(taken(tree()), Terms(SaveOptions(), LIMITS, SIZES)) for _ in range(2))
    assert one.digest == other.digest
    assert (one.specs, one.arrays, one.pieces) == (other.specs, other.arrays, other.pieces)
    assert (one.orbax, one.notes) == (other.orbax, other.notes)


def test_the_digest_changes_with_everything_about_the_stored_arrays() -> None:
    a, b = np.zeros((4, 6)), np.zeros(3)
    trees = {
        "unchanged": {"a": a, "b": b},
        "name": {"a": a, "c": b},
        "order": {"b": b, "a": a},
        "shape": {"a": np.zeros((6, 4)), "b": b},
        "dtype": {"a": a.astype(np.int64), "b": b},
        "another array": {"a": a, "b": b, "c": b.copy()},
        "a tied array": {"a": a, "b": b, "c": b},
    }
    terms = Terms(SaveOptions(), LIMITS, SIZES)
    digests = {name: make_layout(taken(tree), terms).digest for name, tree in trees.items()}
    for options in (SaveOptions(compression="zstd"), SaveOptions(leaf_options=in_rows)):
        terms = terms._replace(options=options)
        digests[str(options)] = make_layout(taken(trees["unchanged"]), terms).digest
    assert len(set(digests.values())) == len(digests)


def in_rows(path: str, spec: ArraySpec) -> LeafOptions:
    return LeafOptions(chunk_shape=(1, *spec.shape[1:]))


def test_the_options_that_a_layout_does_not_depend_on_are_known() -> None:
    # A new option must be put into the key, or here.
    elsewhere = {
        "host_memory_nbytes",  # as the budget
        "concurrency",
        "direct_io",
        "deadline_s",
        "exit_deadline_s",
        "snapshot",
        "on_overlap",
        "on_failed_save",
        "private",
        "tree",
        "silence_s",
        "arrival_s",
    }
    assert {field.name for field in dataclasses.fields(SaveOptions)} == elsewhere | set(OPTIONS)


@on_eight_devices
def test_local_shards_are_divided_among_all_processes_and_compared() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    values = np.zeros((64, 1024), np.float32)
    for leaf in (ShardedArray.tiles(values, (8, 1)), jax.device_put(values, sharding)):
        terms = Terms(SaveOptions(), LIMITS, SIZES, process_count=2)
        plans = [
            make_layout(taken({"w": leaf}), terms._replace(process=process)).plan
            for process in range(2)
        ]
        assert plans[0].row_shared.tolist() == [True] * 8
        assert set(plans[0].row_writer.tolist()) == {0, 1}
        for column in ("row_chunk", "row_writer", "row_shared"):
            np.testing.assert_array_equal(getattr(plans[0], column), getattr(plans[1], column))


@on_eight_devices
async def test_the_device_of_a_typed_key_is_part_of_the_key(tmp_path: Path) -> None:
    # Orbax's files name it.
    tmp_path = Path(tmp_path)
    devices = jax.devices()
    key = jax.random.key(3)
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        places = (devices[2], devices[2], devices[5])
        trees = [{"key": jax.device_put(key, device)} for device in places]
        reports = [await ckpt.save(step, value) for step, value in enumerate(trees)]
        assert [report.plan_cached for report in reports] == [False, True, False]
    for step, device in enumerate(places):
        text = (tmp_path / str(step) / "default" / "_sharding").read_text()
        assert str(device) in text


@on_eight_devices
async def test_sharded_typed_keys_are_stored_as_one_array_that_orbax_restores(
    tmp_path: Path,
) -> None:
    import orbax.checkpoint as ocp

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    keys = jax.device_put(jax.random.split(jax.random.key(0), 16), sharding)
    report = await asyncckpt.save(Path(tmp_path) / "x", {"keys": keys})
    assert report.orbax
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sharding info not provided when restoring")
        found = ocp.PyTreeCheckpointer().restore(Path(tmp_path) / "x" / "default")["keys"]
    assert jax.random.key_impl(found) == jax.random.key_impl(keys)
    wanted = np.asarray(jax.random.key_data(keys))
    np.testing.assert_array_equal(np.asarray(jax.random.key_data(found)), wanted)
