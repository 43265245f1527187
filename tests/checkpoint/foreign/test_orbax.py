"""Checkpoints that Orbax wrote, read through the same calls as ours."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from orbax.checkpoint.experimental import v1

import asyncckpt
from asyncckpt.checkpoint.foreign import orbax_items
from asyncckpt.checkpoint.foreign.orbax import open_orbax
from asyncckpt.checkpoint.metadata import OpenCheckpoint
from asyncckpt.flow.threads import Workers
from asyncckpt.ports import StoreCapabilities
from asyncckpt.stores.local.files import LocalFiles
from asyncckpt.tree import flatten
from tests.checkpoint.foreign.orbax_writers import (
    KEY,
    KEYS,
    WRITERS,
    as_orbax_likes_it,
    everything,
    handler,
    keys,
    manager,
    pytree,
    scalars,
    state,
    strings,
    version_1,
)
from tests.children import finish, start
from tests.ports import free_port


@pytest.fixture(autouse=True)
def unverified() -> Iterator[None]:
    """That nothing in them has a checksum is known here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*could not be verified")
        yield


def by_path(tree: Any) -> dict[str, Any]:
    flat = flatten(tree)
    return dict(zip(flat.structure.paths(), flat.leaves, strict=True))


def assert_same(found: Any, saved: Any) -> None:
    """Paths, types, dtypes, shapes and bits; arrays of JAX come back as those of NumPy or JAX."""
    leaves, expected = by_path(found), by_path(saved)
    assert sorted(leaves) == sorted(expected)
    for path, value in expected.items():
        leaf = leaves[path]
        if isinstance(value, (bool, int, float, str)):
            assert type(leaf) is type(value) and leaf == value, path
            continue
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
            if isinstance(leaf, jax.Array) and leaf.dtype != value.dtype:
                leaf = jax.random.key_data(leaf)
        leaf, value = np.asarray(leaf), np.asarray(value)
        assert (leaf.dtype, leaf.shape) == (value.dtype, value.shape), path
        assert leaf.tobytes() == value.tobytes(), path


@pytest.fixture(scope="module", params=WRITERS)
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A checkpoint and what was saved in it."""
    write, tree_of = WRITERS[request.param]
    tree = tree_of()
    return write(tmp_path_factory.mktemp("orbax") / "checkpoint", tree), tree


# ------------------------------------------------------------------------------------- every kind


async def test_every_leaf_has_the_value_that_orbax_was_given(
    written: tuple[Path, dict[str, Any]],
) -> None:
    path, saved = written
    assert_same(await asyncckpt.restore(path), saved)


async def test_containers_are_those_of_orbax(written: tuple[Path, dict[str, Any]]) -> None:
    """Tuples are lists and namedtuples dicts, as Orbax itself restores them; empties stay."""
    path, saved = written
    found = await asyncckpt.restore(path)
    for name in scalars():
        assert found[name] == saved[name] and type(found[name]) is type(saved[name])
    assert type(found["list"][2]) is list
    assert found["state"]["opt"][0] is None


async def test_a_target_gets_its_types_back(written: tuple[Path, dict[str, Any]]) -> None:
    path, saved = written
    like = jax.tree.map(lambda leaf: leaf, saved)
    found = await asyncckpt.restore(path, like=like)
    assert jax.tree.structure(found) == jax.tree.structure(saved)
    assert_same(found, saved)
    for name in keys().keys() & saved.keys():
        assert found[name].dtype == saved[name].dtype


async def test_inspect_reads_the_metadata_alone(
    written: tuple[Path, dict[str, Any]], leak_check: None
) -> None:
    path, saved = written
    info = await asyncckpt.inspect(path)
    assert info.format == "orbax"
    paths = by_path(saved)
    assert sorted(leaf.path for leaf in info.leaves) == sorted(paths)
    large = next(leaf for leaf in info.leaves if leaf.path == "large")
    assert (large.shape, large.dtype) == ((300, 70), "float32")
    assert large.stored_nbytes > 70_000
    assert sum(file.nbytes for file in info.files) > large.stored_nbytes


async def test_verify_reads_every_chunk_and_names_what_has_no_checksum(
    written: tuple[Path, dict[str, Any]],
) -> None:
    path, saved = written
    report = await asyncckpt.verify(path)
    assert report.damages == ()
    arrays = [name for name, leaf in by_path(saved).items() if not isinstance(leaf, str)]
    assert sorted(report.unverified) == sorted(arrays)


async def test_verify_counts_values_in_the_metadata(tmp_path: Path) -> None:
    path = pytree(tmp_path / "c", {"w": np.arange(3.0), "n": np.int32(1)})
    report = await asyncckpt.verify(path)
    assert report.ok and report.read_nbytes > 0
    assert " 0 B" not in str(report)


async def test_a_tree_of_flat_leaves_restores_into_its_targets(
    written: tuple[Path, dict[str, Any]],
) -> None:
    path, saved = written
    target = {"large": np.zeros((300, 70), np.float32), "int": np.zeros(7, np.int8)}
    await asyncckpt.restore_into(path, target, include=["large", "int"])
    assert_same(target, {name: saved[name] for name in target})


# ------------------------------------------------------------------------------------------- parts


async def opened(path: Path, workers: Workers) -> OpenCheckpoint:
    return await open_orbax(LocalFiles(str(path), workers, StoreCapabilities()))


@pytest.fixture
def workers() -> Iterator[Workers]:
    pool = Workers(2, "test")
    try:
        yield pool
    finally:
        pool.shutdown()


@pytest.mark.parametrize("kind", ["directories-zarr2", "directories-zarr3", "small-files", "v1"])
async def test_only_the_chunks_of_wanted_leaves_are_looked_for(kind: str, tmp_path: Path) -> None:
    write, tree_of = WRITERS[kind]
    path = write(tmp_path / "checkpoint", tree_of())
    target = {"large": np.zeros((300, 70), np.float32)}
    report = await asyncckpt.restore_into(path, target, include="large")
    info = {leaf.path: leaf for leaf in (await asyncckpt.inspect(path)).leaves}
    stored = info["large"].stored_nbytes
    assert report.read_nbytes == stored


async def test_what_is_damaged_elsewhere_does_not_concern_a_partial_restore(
    tmp_path: Path,
) -> None:
    tree = everything()
    path = pytree(tmp_path / "c", {"a": tree["large"], "b": tree["jax"]["large"]}, use_ocdbt=False)
    (path / "b" / "0.0").unlink()
    assert_same(await asyncckpt.restore(path, include="a"), {"a": tree["large"]})
    with pytest.raises(asyncckpt.CorruptCheckpointError, match=r"chunk 'b/0\.0' of array 'b'"):
        await asyncckpt.restore(path)


async def test_shards_of_an_array_are_rows_of_their_own(tmp_path: Path, workers: Workers) -> None:
    value = jax.numpy.arange(24 * 100, dtype=jax.numpy.float32).reshape(24, 100)
    path = handler(
        tmp_path / "c",
        {"w": value},
        {"save_args": {"w": ocp.SaveArgs(chunk_byte_size=1200)}},
        use_zarr3=True,
    )
    checkpoint = await opened(path, workers)
    (storage,) = checkpoint.storages
    assert storage.grid.chunk_count > 1
    assert storage.chunk_nbytes <= 1200
    extents = await checkpoint.read_extents(checkpoint, [0])
    assert len(extents) == storage.grid.chunk_count
    assert_same(await asyncckpt.restore(path), {"w": value})


# -------------------------------------------------------------------------------------- structure


@pytest.mark.parametrize("tree", [np.arange(5), [np.arange(3), {"a": 1}], {"a.b": 1, "c/d": [2]}])
async def test_trees_are_restored_in_their_own_shape(tree: Any, tmp_path: Path) -> None:
    for write in (pytree, version_1):
        path = write(tmp_path / write.__name__, tree)
        found = await asyncckpt.restore(path)
        assert type(found) is type(tree)
        assert_same(found, tree)


@pytest.mark.parametrize("path", [[], ["a", "b"]], ids=len)
@pytest.mark.parametrize(
    ("kind", "value"),
    [("None", None), ("Dict", {}), ("List", []), ("Tuple", ()), ("NamedTuple", {})],
)
async def test_empty_containers_keep_their_kinds(
    kind: str, value: Any, path: list[str], tmp_path: Path, workers: Workers
) -> None:
    entry = {
        "key_metadata": [{"key": key, "key_type": 2} for key in path],
        "value_metadata": {"value_type": kind, "skip_deserialize": True},
    }
    document = {"tree_metadata": {"x": entry}, "use_ocdbt": False}
    (tmp_path / "_METADATA").write_text(json.dumps(document))
    found = await asyncckpt.restore(tmp_path)
    assert found == ({"a": {"b": value}} if path else value)
    checkpoint = await opened(tmp_path, workers)
    assert checkpoint.tree.nodes[-1].kind == kind.lower()


async def test_strings_and_scalars_are_python_values_without_a_target(tmp_path: Path) -> None:
    tree = {**strings(), **scalars()}
    found = await asyncckpt.restore(pytree(tmp_path / "c", tree))
    assert found["n"] == -41 and type(found["n"]) is int
    assert found["rate"] == 0.1 and type(found["rate"]) is float
    assert found["flag"] is True
    assert found["text"] == "héllo" and found["deep"][1]["x"] == "two\nlines"


async def test_typed_keys_come_back_as_keys_of_their_implementation(tmp_path: Path) -> None:
    path = version_1(tmp_path / "c", keys())
    found = await asyncckpt.restore(path, leaves="jax")
    for name, saved in (("key", KEY), ("keys", KEYS)):
        assert found[name].dtype == saved.dtype
        np.testing.assert_array_equal(jax.random.key_data(found[name]), jax.random.key_data(saved))


@pytest.fixture(params=["threefry2x32", "rbg"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """The default of all threads: Orbax saves as items only keys of that."""
    before = jax.config.jax_default_prng_impl
    jax.config.update("jax_default_prng_impl", request.param)
    yield request.param
    jax.config.update("jax_default_prng_impl", before)


@pytest.mark.filterwarnings("ignore:.*read as rbg")
async def test_keys_that_are_items_are_typed_if_they_were(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, implementation: str
) -> None:
    typed, raw = jax.random.key(7), jax.random.PRNGKey(7)
    given = {"typed": typed, "several": jax.random.split(typed, 3), "raw": raw}
    with as_orbax_likes_it(), ocp.CheckpointManager(tmp_path) as checkpoints:
        items = {name: ocp.args.JaxRandomKeySave(key) for name, key in given.items()}
        checkpoints.save(0, args=ocp.args.Composite(**items))
        checkpoints.wait_until_finished()
    for targets in ({"like": given}, {"leaves": "jax"}):
        found = await asyncckpt.restore(tmp_path / "0", **targets)
        assert_same(found, given)
        assert [found[name].dtype for name in given] == [key.dtype for key in given.values()]
    # The data of rbg and unsafe_rbg has one shape, and Orbax stores nothing else.
    notes = [m for m in caplog.messages if "keys of rbg and unsafe_rbg alike: read as rbg" in m]
    assert len(notes) == (4 if implementation == "rbg" else 0)


async def test_items_of_a_step_are_a_dict_by_their_names(tmp_path: Path) -> None:
    with as_orbax_likes_it(), ocp.CheckpointManager(tmp_path / "c") as checkpoints:
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state()),
            other=ocp.args.PyTreeSave({"a": np.arange(3)}),
            data=ocp.args.JsonSave({"epoch": 3, "files": ["x", None, 0.5], "done": False}),
            array=ocp.args.ArraySave(np.arange(4.0)),
            key=ocp.args.JaxRandomKeySave(jax.random.PRNGKey(1)),
            typed=ocp.args.JaxRandomKeySave(KEY),
            numpy=ocp.args.NumpyRandomKeySave(np.random.RandomState(0).get_state()),
        )
        checkpoints.save(4, args=args)
        checkpoints.wait_until_finished()
    info = await asyncckpt.inspect(tmp_path / "c" / "4")
    found = await asyncckpt.restore(tmp_path / "c" / "4")
    assert set(found) == {"state", "other", "data", "array", "key", "typed", "numpy"}
    assert_same(found["state"], state())
    assert_same(found["other"], {"a": np.arange(3)})
    assert found["data"] == {"epoch": 3, "files": ["x", None, 0.5], "done": False}
    assert info.metadata["data"] == found["data"]
    assert_same({"a": found["array"]}, {"a": np.arange(4.0)})
    assert_same({"k": found["typed"]}, {"k": KEY})
    assert_same({"k": found["key"]}, {"k": jax.random.PRNGKey(1)})
    name, words, *rest = np.random.RandomState(0).get_state()
    assert found["numpy"][0] == name and found["numpy"][2:] == rest
    np.testing.assert_array_equal(found["numpy"][1], words)
    names = [leaf.array for leaf in info.leaves if leaf.array is not None]
    assert len(set(names)) == len(names)


async def test_one_tree_beside_json_is_that_tree_and_the_json_is_metadata(tmp_path: Path) -> None:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with as_orbax_likes_it(), ocp.CheckpointManager(tmp_path / "c", options=options) as checkpoints:
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state()), data=ocp.args.JsonSave({"epoch": 3})
        )
        checkpoints.save(4, args=args, metrics={"loss": 0.5, "note": "x"})
        checkpoints.wait_until_finished()
    path = tmp_path / "c" / "4"
    assert_same(await asyncckpt.restore(path), state())
    info = await asyncckpt.inspect(path)
    # What is no number is kept.
    assert info.metadata == {"data": {"epoch": 3}, "metrics": {"loss": 0.5, "note": "x"}}
    assert info.metrics == {"loss": 0.5}


@pytest.mark.parametrize(("depth", "in_tree"), [(255, True), (256, False)])
async def test_json_that_is_too_deep_for_a_tree_is_only_in_the_metadata(
    depth: int, in_tree: bool, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "_METADATA").write_text('{"tree_metadata": {}, "use_ocdbt": false}')
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "metadata").write_text("[" * depth + "]" * depth)
    deep = json.loads("[" * depth + "]" * depth)
    assert (await asyncckpt.inspect(tmp_path)).metadata == {"data": deep}
    found = await asyncckpt.restore(tmp_path)
    assert found == {"a": {}, "b": {}, **({"data": deep} if in_tree else {})}


async def test_items_of_version_1_are_read_too(tmp_path: Path) -> None:
    with as_orbax_likes_it():
        v1.save_checkpointables(
            tmp_path / "c", {"state": state(), "other": {"w": np.arange(3)}, "meta": {"a": 1}}
        )
    found = await asyncckpt.restore(tmp_path / "c")
    assert_same(found, {"state": state(), "other": {"w": np.arange(3)}, "meta": {"a": 1}})


async def test_custom_metadata_is_metadata(tmp_path: Path) -> None:
    tree = {"w": np.arange(3)}
    path = handler(tmp_path / "c", tree, {"custom_metadata": {"tokens": 10**9}})
    assert (await asyncckpt.inspect(path)).metadata == {"tokens": 10**9}


async def test_custom_metadata_with_the_name_of_an_item_is_kept_beside_it(tmp_path: Path) -> None:
    with as_orbax_likes_it(), ocp.CheckpointManager(tmp_path / "c") as checkpoints:
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave({"w": np.arange(3)}), data=ocp.args.JsonSave({"epoch": 3})
        )
        checkpoints.save(4, args=args, custom_metadata={"data": "imagenet", "run": 7})
        checkpoints.wait_until_finished()
    with pytest.warns(asyncckpt.RestoreWarning, match=r"metadata\['custom_metadata'\] for 'data'"):
        await asyncckpt.restore(tmp_path / "c" / "4")
    info = await asyncckpt.inspect(tmp_path / "c" / "4")
    assert info.metadata == {
        "data": {"epoch": 3},
        "run": 7,
        "custom_metadata": {"data": "imagenet"},
    }


async def test_numbers_that_json_lacks_are_texts_in_the_metadata(tmp_path: Path) -> None:
    facts = {"loss": {"best": math.nan, "all": [1.5, -math.inf]}, "tokens": 3}
    path = handler(tmp_path / "c", {"w": np.arange(3)}, {"custom_metadata": facts})
    expected = {"loss": {"best": "nan", "all": [1.5, "-inf"]}, "tokens": 3}
    with pytest.warns(asyncckpt.RestoreWarning, match=r"metadata\['loss'\] has numbers"):
        await asyncckpt.restore(path)
    assert (await asyncckpt.inspect(path)).metadata == expected
    await asyncckpt.convert(path, tmp_path / "d")
    assert (await asyncckpt.inspect(tmp_path / "d")).metadata == expected


async def test_items_of_unknown_kinds_are_named_by_a_warning(tmp_path: Path) -> None:
    path = manager(tmp_path / "c", {"w": np.arange(3)})
    (path / "proto").mkdir()
    (path / "proto" / "proto.pbtxt").write_text("x: 1")
    with pytest.warns(asyncckpt.RestoreWarning, match="the item 'proto' was not read"):
        assert_same(await asyncckpt.restore(path), {"w": np.arange(3)})


async def test_items_that_are_gone_are_named_by_a_warning(tmp_path: Path) -> None:
    with as_orbax_likes_it(), ocp.CheckpointManager(tmp_path / "c") as checkpoints:
        save = ocp.args.PyTreeSave
        tree = {"w": np.arange(3)}
        args = ocp.args.Composite(params=save(tree), opt=save(tree), _ema=save(tree))
        checkpoints.save(4, args=args)
        checkpoints.wait_until_finished()
    path = tmp_path / "c" / "4"
    assert_same(await asyncckpt.restore(path), {"_ema": tree, "opt": tree, "params": tree})
    shutil.rmtree(path / "opt")
    with pytest.warns(asyncckpt.RestoreWarning, match="the item 'opt' is missing"):
        assert_same(await asyncckpt.restore(path), {"_ema": tree, "params": tree})


@pytest.mark.parametrize("tree", [{"a": "text"}, {"a": None, "b": [None, None]}, {"a": {}}])
async def test_a_tree_without_arrays_has_no_database(tree: Any, tmp_path: Path) -> None:
    path = pytree(tmp_path / "c", tree)
    assert await asyncckpt.restore(path) == tree
    assert (await asyncckpt.verify(path)).ok


async def test_without_metadata_arrays_stand_under_their_names(tmp_path: Path) -> None:
    tree = {"a": np.arange(3), "b": {"c": np.arange(2.0)}}
    flat = {"a": np.arange(3), "b.c": np.arange(2.0)}
    for number, options in enumerate(({}, {"use_ocdbt": False})):
        path = pytree(tmp_path / str(number), tree, **options)
        (path / "_METADATA").unlink()
        (path / "_CHECKPOINT_METADATA").unlink()
        assert_same(await asyncckpt.restore(path), flat)


async def test_what_orbax_has_not_finished_is_no_checkpoint(tmp_path: Path) -> None:
    path = pytree(tmp_path / "c", {"w": np.arange(3)})
    unfinished = path.rename(tmp_path / "7.orbax-checkpoint-tmp-1")
    with pytest.raises(asyncckpt.CheckpointNotFoundError, match="has not finished"):
        await asyncckpt.restore(unfinished)


SAMPLES = Path(v1.__file__).parent / "_src/testing/compatibility/checkpoints"


def samples() -> list[Path]:
    """What Orbax keeps to test its own reading of older checkpoints, by path."""
    return sorted(p for p in SAMPLES.glob("*/*/*/*") if p.is_dir())


@pytest.mark.parametrize("path", samples(), ids=lambda p: "/".join(p.parts[-4:]))
async def test_checkpoints_that_orbax_ships_are_read(path: Path) -> None:
    name = str(path)
    reasons = {
        "missing_pytree_data_dir_d": "is missing, the checkpoint's metadata lists it",
        "dummy_checkpointable_added": "the Orbax metadata is damaged",
        "deleted_checkpointable": "there is no tree in this Orbax checkpoint",
    }
    if path.name in reasons:
        with pytest.raises(asyncckpt.AsyncCheckpointError, match=reasons[path.name]):
            await asyncckpt.restore(path)
        return
    a, c = np.arange(8, dtype=np.int32), np.arange(1, 4, dtype=np.int32)
    nameless = name.endswith("pytree_checkpointable_missing_metadata")
    expected = {"a": a, "b.c": c} if nameless else {"a": a, "b": {"c": c}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*_METADATA is missing")
        assert_same(await asyncckpt.restore(path), expected)


# ------------------------------------------------------------------------------- several processes


TWO_PROCESSES = """
    import sys
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize("localhost:" + sys.argv[2], 2, int(sys.argv[1]))

    import numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("x",))

    def sharded(value, *spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    tree = {
        "rows": sharded(np.arange(24, dtype=np.float32).reshape(8, 3), "x"),
        "columns": sharded(np.arange(8000, dtype=np.int32).reshape(40, 200), None, "x"),
        "same": sharded(np.arange(5, dtype=np.int8)),
        "numpy": np.arange(4),
        "step": 3,
        "text": "x",
    }
    ocp.PyTreeCheckpointer(use_ocdbt=True, use_zarr3=True).save(sys.argv[3], tree)
"""

FROM_TWO = {
    "rows": np.arange(24, dtype=np.float32).reshape(8, 3),
    "columns": np.arange(8000, dtype=np.int32).reshape(40, 200),
    "same": np.arange(5, dtype=np.int8),
    "numpy": np.arange(4),
    "step": 3,
    "text": "x",
}


async def test_databases_of_two_processes_are_read_merged_and_unmerged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, both = orbax_items.read_database, asyncio.Barrier(2)

    async def read_at_once(listing: Any, name: str = "") -> Any:
        if name:
            async with asyncio.timeout(30):
                await both.wait()
        return await read(listing, name)

    monkeypatch.setattr(orbax_items, "read_database", read_at_once)
    path, port = tmp_path / "c", free_port()
    processes = [start(TWO_PROCESSES, n, port, path, warnings="ignore") for n in range(2)]
    for status, _, error in [finish(process) for process in processes]:
        assert status == 0, error
    assert {p.name for p in path.glob("ocdbt.process_*")} == {"ocdbt.process_0", "ocdbt.process_1"}
    assert_same(await asyncckpt.restore(path), FROM_TWO)
    (path / "manifest.ocdbt").unlink()
    shutil.rmtree(path / "d")
    assert_same(await asyncckpt.restore(path), FROM_TWO)
    monkeypatch.undo()
    shutil.rmtree(path / "ocdbt.process_1")
    with pytest.raises(asyncckpt.CorruptCheckpointError, match="is missing, and this checkpoint"):
        await asyncckpt.restore(path)


# ------------------------------------------------------------------------------------------ links


LINKS = [
    "w", "w/.zarray", "w/0", "_METADATA", "_CHECKPOINT_METADATA", "_strings.json",
    "array_metadatas", "array_metadatas/process_0",
]  # fmt: skip


@pytest.mark.parametrize("name", LINKS)
async def test_what_is_reached_through_a_link_is_refused(name: str, tmp_path: Path) -> None:
    tree = {"w": np.arange(9), "s": "x", "j": jax.numpy.arange(3)}
    path = pytree(tmp_path / "c", tree, use_ocdbt=False)
    elsewhere = tmp_path / "elsewhere"
    (path / name).rename(elsewhere)
    (path / name).symlink_to(elsewhere)
    with pytest.raises(asyncckpt.CorruptCheckpointError, match="symbolic link"):
        await asyncckpt.restore(path)


async def test_an_item_that_is_a_link_is_refused(tmp_path: Path) -> None:
    path = manager(tmp_path / "c", {"w": np.arange(9)})
    item = (path / "default").rename(tmp_path / "elsewhere")
    (path / "default").symlink_to(item)
    with pytest.raises(asyncckpt.AsyncCheckpointError, match="symbolic link"):
        await asyncckpt.restore(path)


async def test_a_linked_chunk_is_never_taken_for_one_that_was_not_stored(tmp_path: Path) -> None:
    path = pytree(tmp_path / "c", {"w": np.arange(9)}, use_ocdbt=False)
    metadata = json.loads((path / "_METADATA").read_text())
    metadata["store_array_data_equal_to_fill_value"] = False
    (path / "_METADATA").write_text(json.dumps(metadata))
    chunk = path / "w" / "0"
    moved = chunk.rename(tmp_path / "elsewhere")
    assert_same(await asyncckpt.restore(path), {"w": np.zeros(9, np.int64)})
    chunk.symlink_to(moved)
    with pytest.raises(asyncckpt.CorruptCheckpointError, match="symbolic link"):
        await asyncckpt.restore(path)


async def test_a_linked_manifest_is_refused(tmp_path: Path) -> None:
    path = pytree(tmp_path / "c", {"w": np.arange(9)})
    manifest = path / "manifest.ocdbt"
    manifest.rename(tmp_path / "m")
    manifest.symlink_to(tmp_path / "m")
    shutil.rmtree(path / "ocdbt.process_0")
    with pytest.raises(asyncckpt.CorruptCheckpointError, match="symbolic link"):
        await asyncckpt.restore(path)


# --------------------------------------------------------------------------------------- mutations


async def test_a_changed_byte_of_metadata_is_a_tree_or_an_error(tmp_path: Path) -> None:
    """Chunks have no checksum here; all else gives what was saved, or an error of ours."""
    path = pytree(tmp_path / "c", {"w": np.arange(9), "k": KEY, "s": "x", "n": 1})
    rng = np.random.default_rng(0)
    data_files = list((path / "ocdbt.process_0" / "d").iterdir())
    for file in sorted(p for p in path.rglob("*") if p.is_file() and p not in data_files):
        data = file.read_bytes()
        for at in rng.integers(0, max(len(data), 1), 8).tolist() if data else []:
            bad = bytearray(data)
            bad[at] ^= 1 << int(rng.integers(8))
            file.write_bytes(bad)
            try:
                await asyncckpt.restore(path)
            except asyncckpt.AsyncCheckpointError as error:
                assert str(path) in str(error)
        file.write_bytes(data)


async def test_every_truncation_is_a_tree_or_an_error(tmp_path: Path) -> None:
    path = pytree(tmp_path / "c", {"w": np.arange(9), "k": KEY, "s": "x", "n": 1})
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        data = file.read_bytes()
        for length in {0, 1, len(data) // 2, max(len(data) - 1, 0)} - {len(data)}:
            os.truncate(file, length)
            try:
                await asyncckpt.restore(path)
            except asyncckpt.AsyncCheckpointError as error:
                assert str(path) in str(error)
            file.write_bytes(data)


@pytest.mark.parametrize("name", ["\ud800", "a\0b", "../w", "/w", ""])
@pytest.mark.parametrize("use_ocdbt", [True, False])
async def test_an_array_that_no_file_can_be_named_after_is_missing(
    name: str, use_ocdbt: bool, tmp_path: Path
) -> None:
    path = pytree(tmp_path / "c", {"w": np.arange(9)}, use_ocdbt=use_ocdbt)
    metadata = json.loads((path / "_METADATA").read_text())
    (entry,) = metadata["tree_metadata"].values()
    entry["key_metadata"][0]["key"] = name
    (path / "_METADATA").write_text(json.dumps(metadata))
    with pytest.raises(asyncckpt.CorruptCheckpointError, match=r"has no \.zarray") as caught:
        await asyncckpt.restore(path)
    assert repr(name) in str(caught.value) and str(path) in str(caught.value)


async def test_a_document_of_nothing_but_brackets_is_refused_before_it_is_parsed(
    tmp_path: Path,
) -> None:
    path = pytree(tmp_path / "c", {"w": np.arange(9)})
    (path / "_METADATA").write_bytes(b"[" + b"[]," * 300_000 + b"[]]")
    with pytest.raises(asyncckpt.CorruptCheckpointError, match="it has 600002 values in 900004"):
        await asyncckpt.inspect(path)


async def test_leaving_leaves_out_makes_no_leaf_unstored(tmp_path: Path) -> None:
    """What is not asked for is not looked for, and counts as nothing that has to be implied."""
    zeros = np.zeros((16, 1 << 20), np.float32)
    ocp.PyTreeCheckpointer().save(tmp_path / "o", {"w": zeros, "other": zeros})
    restored = await asyncckpt.restore(tmp_path / "o", include="w")
    assert np.array_equal(restored["w"], zeros)


async def test_arrays_of_every_version_open_in_tensorstore(tmp_path: Path) -> None:
    values = np.arange(12.0).reshape(3, 4)
    for use_zarr3 in (False, True):
        place = tmp_path / f"zarr3={use_zarr3}"
        handler = ocp.PyTreeCheckpointHandler(use_zarr3=use_zarr3)
        ocp.Checkpointer(handler).save(place, {"w": values})
        info = await asyncckpt.inspect(place)
        found = ts.open(info["w"].tensorstore_spec()).result().read().result()
        assert np.array_equal(found, values)
