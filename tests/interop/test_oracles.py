"""TensorStore and Orbax read what `asyncckpt.save` wrote, leaf by leaf and bit by bit."""

from __future__ import annotations

import builtins
import inspect
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
import tensorstore as ts
import torch
from flax import nnx
from orbax.checkpoint.experimental import v1 as ocp_v1

import asyncckpt
from asyncckpt.spec import DTYPES

SHAPES: tuple[tuple[int, ...], ...] = (
    (),
    (7,),
    (0,),
    (5, 3),
    (4, 0),
    (3, 4, 5),
    (2, 3, 2, 3),
    (2, 1, 3, 2, 2),
    (1, 0, 2, 1, 3),
)
"""Ranks 0 to 5, with and without elements."""

CHUNKS: dict[str, Any] = {
    "whole": None,
    "cut": lambda path, spec: asyncckpt.LeafOptions(
        chunk_shape=tuple(max(1, -(-n // 2)) for n in spec.shape)
    ),
    "single": lambda path, spec: asyncckpt.LeafOptions(chunk_shape=(1,) * len(spec.shape)),
}


@pytest.fixture(autouse=True)
def _as_orbax_expects(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # blockbuster replaces the builtin `dir` by one that fails on Orbax's Composite.
    monkeypatch.setattr(builtins, "dir", inspect.unwrap(dir))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sharding info not provided when restoring")
        warnings.filterwarnings("ignore", message=".*`target` is not specified.*")
        yield


def values(dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    size = int(np.prod(shape))
    numbers = np.arange(size) % (2 if dtype == "bool" else 7)
    return numbers.astype(DTYPES[dtype]).reshape(shape)


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("chunks", CHUNKS)
async def test_tensorstore_reads_every_dtype_rank_and_chunk_shape(
    tmp_path: Path, chunks: str, compression: Any
) -> None:
    tree = {dtype: {str(n): values(dtype, s) for n, s in enumerate(SHAPES)} for dtype in DTYPES}
    options = asyncckpt.SaveOptions(compression=compression, leaf_options=CHUNKS[chunks])
    report = await asyncckpt.save(tmp_path / "x", tree, options=options)
    assert report.orbax
    info = await asyncckpt.inspect(tmp_path / "x")
    context = ts.Context()
    opened = [
        (leaf, ts.open(leaf.tensorstore_spec(), read=True, open=True, context=context))
        for leaf in info.leaves
    ]
    checked = 0
    for leaf, future in opened:
        dtype, number = leaf.path.split("/")
        expected = tree[dtype][number]
        read = (await future).read()
        found = np.asarray(await read)
        assert found.shape == expected.shape, leaf.path
        assert found.dtype == expected.dtype.newbyteorder("="), leaf.path
        assert found.tobytes() == expected.tobytes(), leaf.path
        checked += 1
    assert checked == len(DTYPES) * len(SHAPES)
    restored = await asyncckpt.restore(tmp_path / "x")
    for dtype, arrays in tree.items():
        for number, expected in arrays.items():
            assert restored[dtype][number].tobytes() == expected.tobytes()
    assert await asyncckpt.verify(tmp_path / "x")


@pytest.mark.parametrize("compression", [None, "zstd"])
async def test_tensorstore_reads_arrays_of_many_windows(tmp_path: Path, compression: Any) -> None:
    rng = np.random.default_rng(0)
    tree = {
        "large": rng.integers(0, 255, (5, 1 << 20), dtype=np.uint8).view(np.int32),
        "odd": rng.random(1_234_567, dtype=np.float32),
        "strided": rng.random((1500, 1100))[:, ::2].T,
        "complex": (rng.random(600_001) + 1j).astype(np.complex128),
    }
    options = asyncckpt.SaveOptions(compression=compression, chunk_nbytes=3 << 20)
    await asyncckpt.save(tmp_path / "x", tree, options=options)
    info = await asyncckpt.inspect(tmp_path / "x")
    assert sum(leaf.chunk_count for leaf in info.leaves) > len(tree)
    for path, expected in tree.items():
        array = await ts.open(info[path].tensorstore_spec(), read=True, open=True)
        np.testing.assert_array_equal(await array.read(), expected)


async def test_tensorstore_reads_tied_leaves_under_both_names(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    small = torch.ones(2)
    tree = {"a": weight, "b": weight, "c": small, "d": small, "big": torch.ones(1 << 18)}
    report = await asyncckpt.save(tmp_path / "x", {**tree, "big2": tree["big"]})
    assert report.array_count == 3
    info = await asyncckpt.inspect(tmp_path / "x")
    assert (info["b"].tied_to, info["d"].tied_to, info["big2"].tied_to) == ("a", "c", "big")
    for path, expected in {**tree, "big2": tree["big"]}.items():
        array = await ts.open(info[path].tensorstore_spec(), read=True, open=True)
        np.testing.assert_array_equal(await array.read(), expected.numpy())


def state() -> dict[str, Any]:
    return {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "bf": jnp.arange(4, dtype=jnp.bfloat16),
        "large": jnp.arange(300_000, dtype=jnp.float32).reshape(3, -1),
        "torch": torch.arange(5, dtype=torch.bfloat16),
        "nested": [np.int8(5), {"x": np.array([True, False])}],
        "pair": (np.zeros((0, 3), np.int32), np.array(1 + 2j, np.complex64)),
        "count": 41,
        "rate": 0.25,
        "flag": True,
        "complex": 1 - 2j,
        "none": None,
        "dict": {},
        "list": [],
        "tuple": (),
    }


def check(found: Any) -> None:
    np.testing.assert_array_equal(found["w"], state()["w"])
    np.testing.assert_array_equal(np.asarray(found["bf"]), np.arange(4).astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(
        found["large"], np.arange(300_000, dtype=np.float32).reshape(3, -1)
    )
    np.testing.assert_array_equal(
        np.asarray(found["torch"]), np.arange(5).astype(ml_dtypes.bfloat16)
    )
    assert found["nested"][0] == 5
    np.testing.assert_array_equal(found["nested"][1]["x"], [True, False])
    assert found["pair"][0].shape == (0, 3)
    assert found["pair"][1] == np.complex64(1 + 2j)
    assert found["count"] == 41
    assert found["rate"] == 0.25
    assert bool(found["flag"]) is True
    assert found["complex"] == 1 - 2j
    assert found["none"] is None


async def save_step(root: Path, **options: Any) -> Path:
    async with asyncckpt.Checkpointer(root) as ckpt:
        report = await ckpt.save(12, state(), options=asyncckpt.SaveOptions(**options))
    assert report.orbax, report.notes
    return root / "12" / "default"


@pytest.mark.parametrize("compression", [None, "zstd"])
async def test_pytree_checkpointer_restores_our_checkpoint(
    tmp_path: Path, compression: Any
) -> None:
    item = await save_step(tmp_path, compression=compression)
    check(ocp.PyTreeCheckpointer().restore(item))


async def test_standard_checkpointer_restores_our_checkpoint(tmp_path: Path) -> None:
    item = await save_step(tmp_path)
    with ocp.StandardCheckpointer() as checkpointer:
        check(checkpointer.restore(item))
        check(checkpointer.restore(item, _target()))


async def test_checkpoint_manager_restores_our_steps(tmp_path: Path) -> None:
    await save_step(tmp_path)
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [12]
        check(manager.restore(12, args=ocp.args.StandardRestore()))
        check(manager.restore(12, args=ocp.args.StandardRestore(_target())))


async def test_v1_load_restores_our_checkpoint(tmp_path: Path) -> None:
    item = await save_step(tmp_path)
    check(ocp_v1.load(item))
    check(ocp_v1.load(tmp_path / "12", _target(), checkpointable_name="default"))


async def test_orbax_restores_strings_and_typed_keys(tmp_path: Path) -> None:
    key = jax.random.key(7)
    await asyncckpt.save(tmp_path / "x", {"text": "héllo", "key": key, "a/b": {"c": "slash"}})
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "x" / "default")
    assert found["text"] == "héllo"
    assert found["a/b"]["c"] == "slash"
    assert jnp.array_equal(jax.random.key_data(found["key"]), jax.random.key_data(key))


async def test_orbax_and_we_read_the_small_dtypes_of_each_other(tmp_path: Path) -> None:
    every = {
        "int2": np.arange(-2, 2).astype(ml_dtypes.int2),
        "float4": np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn),
        "scales": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu),
    }
    # TensorStore stores no chunk that equals the fill value 0, which the scales do not have.
    zeros = {name: np.zeros(3, np.uint8).view(values.dtype) for name, values in every.items()}
    saved = {"every": every, "zeros": zeros, "jax": jax.tree.map(jnp.asarray, every)}
    orbax = ocp.PyTreeCheckpointer()
    await asyncckpt.save(tmp_path / "ours", saved)
    orbax.save(tmp_path / "theirs", saved)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*could not be verified")
        found = [
            await asyncckpt.restore(tmp_path / name, like=saved) for name in ("ours", "theirs")
        ]
    found.append(orbax.restore(tmp_path / "ours/default"))
    for tree in found:
        assert jax.tree.structure(tree) == jax.tree.structure(saved)
        for value, expected in zip(jax.tree.leaves(tree), jax.tree.leaves(saved), strict=True):
            assert value.dtype == expected.dtype
            assert np.asarray(value).tobytes() == np.asarray(expected).tobytes()


@jax.tree_util.register_pytree_node_class
class Keyless:
    """A node whose children have no keys in the registry of JAX."""

    def __init__(self, *children: Any) -> None:
        self.children = children

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Keyless:
        return cls(*children)


async def test_orbax_restores_registered_nodes_without_keys_and_mappings_with_int_keys(
    tmp_path: Path,
) -> None:
    a, b = jnp.ones(2), jnp.zeros(3)
    saved = {
        "keyless": Keyless(a, Keyless(b, {"x": [a]})),
        "partial": jax.tree_util.Partial(print, a, b, flush=a),
        "state": nnx.state(nnx.List([nnx.Param(a), nnx.Param(b)])),
        "dict": {0: a, 1: b},
    }
    assert (await asyncckpt.save(tmp_path / "x", saved)).orbax
    await asyncckpt.export(tmp_path / "x", tmp_path / "y", to="orbax")
    for name in ("x", "y"):
        found = ocp.PyTreeCheckpointer().restore(tmp_path / name / "default", item=saved)
        assert jax.tree.structure(found) == jax.tree.structure(saved)
        assert jax.tree.all(jax.tree.map(np.array_equal, found, saved))
    assert (await asyncckpt.save(tmp_path / "own", {"n": asyncckpt.PerProcess(5)})).orbax
    assert ocp.PyTreeCheckpointer().restore(tmp_path / "own" / "default") == {"n": {"0": 5}}


async def test_what_orbax_cannot_restore_is_said_and_not_offered(tmp_path: Path) -> None:
    # Orbax joins keys by dots, so that these two arrays would be one to it.
    tree = {"a.b": np.zeros(3), "a": {"b": np.ones(3)}}
    report = await asyncckpt.save(tmp_path / "x", tree)
    assert not report.orbax
    assert "Orbax" in report.notes[0]
    assert not (tmp_path / "x" / "default" / "_METADATA").exists()
    restored = await asyncckpt.restore(tmp_path / "x")
    np.testing.assert_array_equal(restored["a.b"], np.zeros(3))
    np.testing.assert_array_equal(restored["a"]["b"], np.ones(3))


def _target() -> Any:
    def abstract(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return jnp.zeros(tuple(leaf.shape), jnp.bfloat16)
        if isinstance(leaf, complex):
            return jnp.zeros((), jnp.complex64)
        if hasattr(leaf, "dtype"):
            return jnp.zeros(leaf.shape, leaf.dtype)
        return leaf

    return jax.tree.map(abstract, state())
