"""Orbax restores a checkpoint whose every file was made by `asyncckpt.format`."""

from __future__ import annotations

import builtins
import inspect
import json
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.experimental import v1 as ocp_v1

from asyncckpt.format import orbax, zarr3
from asyncckpt.format.crc import crc32c
from asyncckpt.format.ocdbt.btree import encode_tree
from asyncckpt.format.ocdbt.keys import prepare_keys
from asyncckpt.format.ocdbt.manifest import Manifest
from asyncckpt.format.orbax import OrbaxLeaf
from asyncckpt.spec import DTYPE_NAMES, ArraySpec
from tests.format.manifests import encode_manifest
from tests.format.values import value_columns

KEY = jax.random.key(7)
KEYS = jax.random.split(jax.random.key(8), 3)


@pytest.fixture(autouse=True)
def _plain_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    """The builtin `dir`: the one that blockbuster's forbiddenfruit puts in its place fails on
    objects whose `__getattr__` raises KeyError, such as Orbax's `Composite`."""
    monkeypatch.setattr(builtins, "dir", inspect.unwrap(dir))


@pytest.fixture(autouse=True)
def _third_party_warnings() -> Iterator[None]:
    """What Orbax warns about when it is asked to restore without a target."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sharding info not provided when restoring")
        warnings.filterwarnings("ignore", message=".*`target` is not specified.*")
        yield


def write_database(directory: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    """One data file, one chunk per array, small documents inline."""
    (directory / "d").mkdir(parents=True)
    inline: dict[bytes, bytes] = {}
    extents: dict[bytes, tuple[int, int]] = {}
    data = b""
    for name, value in arrays.items():
        spec = ArraySpec(value.shape, DTYPE_NAMES[value.dtype.newbyteorder("<")])
        chunk_shape = tuple(max(n, 1) for n in value.shape)
        inline[zarr3.metadata_key(name)] = zarr3.encode_metadata(spec, chunk_shape)
        if value.size:
            payload = value.tobytes()
            stored = payload + crc32c(payload).to_bytes(4, "little")
            extents[zarr3.chunk_keys(name, (1,) * value.ndim)[0]] = (len(data), len(stored))
            data += stored
    keys = sorted({*inline, *extents})
    rows = [extents.get(key, (0, 0)) for key in keys]
    tree = encode_tree(
        prepare_keys(keys),
        value_columns(
            [inline.get(key) for key in keys],
            np.array([-1 if key in inline else 0 for key in keys], np.int64),
            np.array([row[0] for row in rows], np.int64),
            np.array([row[1] for row in rows], np.int64),
        ),
        data_files=["d/data"],
        node_file="d/nodes",
        node_offset=0,
        max_decoded_node_nbytes=1 << 20,
        commit_time_ns=1,
    )
    (directory / "d" / "data").write_bytes(data)
    (directory / "d" / "nodes").write_bytes(b"".join(tree.blocks))
    (directory / "manifest.ocdbt").write_bytes(
        encode_manifest(Manifest(uuid.uuid4().bytes, (tree.version,)))
    )


def path_of(*keys: str | int) -> tuple[tuple[str, bool], ...]:
    return tuple((str(key), isinstance(key, int)) for key in keys)


def write_checkpoint(directory: Path, *, strings: bool = True) -> None:
    """The tree that `check` expects. `StandardCheckpointer` takes no strings in a target."""
    device = str(jax.devices()[0])
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    leaves: list[OrbaxLeaf] = []

    def add(keys: tuple[str | int, ...], value: Any, kind: orbax.Kind, **more: Any) -> None:
        name = ".".join(map(str, keys))
        array = np.asarray(value)
        arrays[name] = array
        if kind == "jax.Array":
            more = {"shape": array.shape, "chunk_shape": array.shape, "device": device, **more}
        leaves.append(OrbaxLeaf(path_of(*keys), kind, name, **more))

    add(("w",), np.arange(6, dtype=np.float32).reshape(2, 3), "np.ndarray")
    add(("bf",), np.arange(4).astype(ml_dtypes.bfloat16), "np.ndarray")
    add(("empty",), np.zeros((0, 3), np.int32), "np.ndarray")
    add(("z",), np.array([1 + 2j], np.complex64), "np.ndarray")
    add(("nested", 0), np.array(5, np.int8), "np.ndarray")
    add(("nested", 1, "x"), np.array([True, False]), "np.ndarray")
    add(("on_device",), np.ones(3, np.float32), "jax.Array")
    add(("key",), jax.random.key_data(KEY), "jax.Array", key_impl="threefry2x32")
    add(("keys",), jax.random.key_data(KEYS), "jax.Array", key_impl="threefry2x32")
    add(("count",), np.int64(41), "scalar")
    add(("rate",), np.float64(0.25), "scalar")
    add(("flag",), np.bool_(True), "scalar")
    if strings:
        leaves += [
            OrbaxLeaf(path_of("text"), "string", text="héllo"),
            OrbaxLeaf(path_of("a/b", 0), "string", text="slash"),
        ]
    leaves += [
        OrbaxLeaf(path_of("none"), "None"),
        OrbaxLeaf(path_of("dict"), "Dict"),
        OrbaxLeaf(path_of("list"), "List"),
        OrbaxLeaf(path_of("tuple"), "Tuple"),
    ]
    write_database(directory, arrays)
    assert orbax.conflicts(leaves) == []
    for path, data in orbax.encode_files(leaves).items():
        (directory / path).parent.mkdir(exist_ok=True)
        (directory / path).write_bytes(data)


def check(tree: dict[str, Any], *, strings: bool = True) -> None:
    def same(value: Any, wanted: Any, kind: type) -> None:
        assert isinstance(value, kind), (type(value), kind)
        assert value.dtype == np.asarray(wanted).dtype
        np.testing.assert_array_equal(np.asarray(value), wanted)

    either = (np.ndarray, jax.Array)
    same(tree["w"], np.arange(6, dtype=np.float32).reshape(2, 3), either)
    same(tree["bf"], np.arange(4).astype(ml_dtypes.bfloat16), either)
    same(tree["empty"], np.zeros((0, 3), np.int32), either)
    same(tree["z"], np.array([1 + 2j], np.complex64), either)
    same(tree["nested"][0], np.array(5, np.int8), either)
    same(tree["nested"][1]["x"], np.array([True, False]), either)
    same(tree["on_device"], np.ones(3, np.float32), jax.Array)
    for name, key in (("key", KEY), ("keys", KEYS)):
        assert tree[name].dtype == key.dtype
        np.testing.assert_array_equal(jax.random.key_data(tree[name]), jax.random.key_data(key))
    assert tree["count"] == 41 and type(tree["count"]) is int
    assert tree["rate"] == 0.25 and type(tree["rate"]) is float
    assert tree["flag"] is True
    if strings:
        assert tree["text"] == "héllo"
        assert tree["a/b"] == ["slash"]
    assert tree["none"] is None
    assert tree["dict"] == {} and tree["list"] == []
    assert tuple(tree["tuple"]) == ()


def target(*, strings: bool = True) -> dict[str, Any]:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def abstract(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return {
        "w": abstract((2, 3), np.float32),
        "bf": abstract((4,), jnp.bfloat16),
        "empty": abstract((0, 3), np.int32),
        "z": abstract((1,), np.complex64),
        "nested": [abstract((), np.int8), {"x": abstract((2,), np.bool_)}],
        "on_device": abstract((3,), np.float32),
        "key": abstract((), KEY.dtype),
        "keys": abstract((3,), KEY.dtype),
        "count": 0,
        "rate": 0.0,
        "flag": False,
        **({"text": "", "a/b": [""]} if strings else {}),
        "none": None,
        "dict": {},
        "list": [],
        "tuple": (),
    }


def test_pytree_checkpointer_restores_our_files_without_a_target(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "item")
    check(ocp.PyTreeCheckpointer().restore(tmp_path / "item"))


def test_standard_checkpointer_restores_our_files_without_a_target(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "item")
    with ocp.StandardCheckpointer() as checkpointer:
        check(checkpointer.restore(tmp_path / "item"))


def test_standard_checkpointer_restores_our_files_to_a_target(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "item", strings=False)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "item", target(strings=False))
    check(restored, strings=False)


def test_standard_checkpointer_finds_shapes_and_dtypes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "item")
    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(tmp_path / "item")
    item = metadata.item_metadata
    assert item["w"].shape == (2, 3) and item["w"].dtype == np.float32


def test_checkpoint_manager_restores_a_step_written_by_us(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "12" / "default", strings=False)
    (tmp_path / "12" / "checkpoint.json").write_text("{}")
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 12
        to_target = ocp.args.StandardRestore(target(strings=False))
        check(manager.restore(12, args=to_target), strings=False)
        check(manager.restore(12, args=ocp.args.StandardRestore()), strings=False)


def test_v1_load_restores_our_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "item")
    check(ocp_v1.load(tmp_path / "item"))
    check(ocp_v1.load(tmp_path / "item", target()))


def test_v1_load_restores_a_step_directory_by_the_name_of_its_item(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "12" / "default")
    (tmp_path / "12" / "checkpoint.json").write_text("{}")
    check(ocp_v1.load(tmp_path / "12", target(), checkpointable_name="default"))


def test_v1_load_restores_a_step_directory_in_its_own_layout(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "12" / "state")
    (tmp_path / "12" / "orbax.checkpoint").write_bytes(b"")
    (tmp_path / "12" / "_CHECKPOINT_METADATA").write_text(json.dumps({"item_handlers": {}}))
    check(ocp_v1.load(tmp_path / "12", target()))


def test_leaves_that_orbax_would_mistake_are_named() -> None:
    leaves = [
        OrbaxLeaf(path_of("a.b"), "np.ndarray", "a.b"),
        OrbaxLeaf(path_of("a", "b"), "np.ndarray", "a.b~2"),
        OrbaxLeaf(path_of("c"), "np.ndarray", "c"),
        OrbaxLeaf(path_of("d/e"), "np.ndarray", "d%2Fe"),
        OrbaxLeaf(path_of("s"), "string", text="x"),
        OrbaxLeaf(path_of("s/t"), "string", text="y"),
        OrbaxLeaf(path_of("~"), "string", text="z"),
        OrbaxLeaf(path_of("u"), "string", text="file\udc80"),
        OrbaxLeaf((), "np.ndarray", "root"),
    ]
    assert orbax.conflicts(leaves) == ["a.b", "a.b", "d/e", "s/t", "~", "u", ""]


def test_metadata_is_what_orbax_itself_writes(tmp_path: Path) -> None:
    tree = {
        "w": np.arange(3.0),
        "j": jnp.ones((4,), jnp.bfloat16),
        "l": [np.int32(4), (np.zeros(2),)],
        "s": "hello",
        "none": None,
        "d": {},
        "e": [],
        "t": (),
        "k": KEY,
    }
    ocp.PyTreeCheckpointer(use_ocdbt=True, use_zarr3=True).save(tmp_path / "theirs", tree)
    device = str(jax.devices()[0])
    leaves = [
        OrbaxLeaf(path_of("w"), "np.ndarray", "w"),
        OrbaxLeaf(path_of("j"), "jax.Array", "j", shape=(4,), chunk_shape=(4,), device=device),
        OrbaxLeaf(path_of("l", 0), "scalar", "l.0"),
        OrbaxLeaf(path_of("l", 1, 0), "np.ndarray", "l.1.0"),
        OrbaxLeaf(path_of("s"), "string", text="hello"),
        OrbaxLeaf(path_of("none"), "None"),
        OrbaxLeaf(path_of("d"), "Dict"),
        OrbaxLeaf(path_of("e"), "List"),
        OrbaxLeaf(path_of("t"), "Tuple"),
        OrbaxLeaf(
            path_of("k"), "jax.Array", "k", shape=(2,), chunk_shape=(2,), device=device,
            key_impl="threefry2x32",
        ),
    ]  # fmt: skip
    ours = orbax.encode_files(leaves)
    for name in ("_METADATA", "_strings.json", "_sharding"):
        theirs = json.loads((tmp_path / "theirs" / name).read_bytes())
        assert json.loads(ours[name]) == theirs, name
    theirs = json.loads((tmp_path / "theirs" / "array_metadatas" / "process_0").read_bytes())
    keys = [a for a in theirs["array_metadatas"] if a["array_metadata"]["ext_metadata"]]
    assert json.loads(ours["array_metadatas/process_0"])["array_metadatas"] == keys
