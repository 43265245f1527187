"""What one framework saved another restores: values, dtypes and shapes exactly, or not at all."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt import blocking
from asyncckpt.spec import DTYPES

Array = np.ndarray[Any, Any]

FRAMEWORKS = ("numpy", "jax", "torch")
PAIRS = list(itertools.product(FRAMEWORKS, FRAMEWORKS))

WIDE = ("int64", "uint64", "float64", "complex128")
"""Dtypes that JAX has only with 64-bit types enabled."""

NOT_IN_TORCH = ("int2", "int4", "float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz")

TORCH_DTYPES = {name: getattr(torch, name) for name in DTYPES if name not in NOT_IN_TORCH}


@pytest.fixture(autouse=True)
def _wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


# Every array starts as bits, so that NaNs with payloads, infinities, subnormals and negative zeros
# of every dtype are among its values; nothing here computes with them.


def bits(dtype: str, shape: tuple[int, ...]) -> Array:
    rng = np.random.default_rng(len(dtype) + 10 * len(shape))
    itemsize = DTYPES[dtype].itemsize
    drawn = rng.integers(0, 256, (*shape, itemsize), dtype=np.uint8)
    if dtype == "bool":
        drawn &= 1
    if dtype in ("int2", "int4"):
        count = 2 ** int(dtype[3:])
        return np.array(drawn.view(np.int8)[..., 0] % count - count // 2).astype(DTYPES[dtype])
    if dtype == "float4_e2m1fn":
        drawn %= 16
    return drawn.view(DTYPES[dtype]).reshape(shape)


def as_torch(array: Array) -> torch.Tensor:
    """A tensor of the same bits, in memory of its own."""
    dtype = TORCH_DTYPES[array.dtype.name]
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.tobytes()), dtype=dtype).reshape(array.shape)


MAKE: dict[str, Callable[[Array], Any]] = {
    "numpy": np.copy,
    "jax": jnp.array,
    "torch": as_torch,
}


def content(leaf: Any) -> tuple[str, str, tuple[int, ...], bytes]:
    """Framework, dtype, shape and bits."""
    if isinstance(leaf, torch.Tensor):
        plain = leaf.detach().contiguous().reshape(-1)
        nbytes = plain.view(torch.uint8).numpy().tobytes() if leaf.numel() else b""
        return "torch", str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape), nbytes
    if isinstance(leaf, jax.Array):
        return ("jax", *content(np.asarray(leaf))[1:])
    assert isinstance(leaf, np.ndarray), type(leaf)
    return "numpy", leaf.dtype.name, leaf.shape, leaf.tobytes()


def shared(*frameworks: str) -> list[str]:
    """Dtypes that all of these have."""
    return [name for name in DTYPES if "torch" not in frameworks or name not in NOT_IN_TORCH]


SHAPES: dict[str, tuple[int, ...]] = {
    "rank 0": (),
    "empty": (0, 3),
    "vector": (257,),
    "matrix": (6, 8),
}


def arrays(dtypes: list[str]) -> dict[str, dict[str, Array]]:
    return {dtype: {name: bits(dtype, s) for name, s in SHAPES.items()} for dtype in dtypes}


def mapped(make: Callable[[Array], Any], tree: dict[str, dict[str, Array]]) -> Any:
    return {a: {b: make(leaf) for b, leaf in inner.items()} for a, inner in tree.items()}


def expected(framework: str, tree: dict[str, dict[str, Array]]) -> Any:
    return mapped(lambda leaf: (framework, *content(leaf)[1:]), tree)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_shared_dtype_and_shape_keeps_its_bits(
    tmp_path: Path, source: str, target: str
) -> None:
    tree = arrays(shared(source, target))
    assert len(tree) == (25 if "torch" not in (source, target) else 20)
    blocking.save(tmp_path / "x", mapped(MAKE[source], tree))
    restored = blocking.restore(tmp_path / "x", leaves=target)
    assert mapped(content, restored) == expected(target, tree)


def abstract(framework: str, leaf: Array) -> Any:
    """A target that has no values, where the framework has such."""
    if framework == "jax":
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if framework == "torch":
        return torch.empty(leaf.shape, dtype=TORCH_DTYPES[leaf.dtype.name], device="meta")
    return np.zeros_like(leaf)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_like_decides_the_framework(tmp_path: Path, source: str, target: str) -> None:
    tree = arrays(shared(source, target))
    blocking.save(tmp_path / "x", mapped(MAKE[source], tree))
    like = mapped(lambda leaf: abstract(target, leaf), tree)
    restored = blocking.restore(tmp_path / "x", like=like)
    assert mapped(content, restored) == expected(target, tree)


def strided(framework: str, leaf: Array) -> Any:
    """Zeros of the leaf's shape, every second element of a transposed array."""
    large = (*(2 * n for n in leaf.shape[::-1]),)
    zeros: Any = np.zeros(large, leaf.dtype)
    if framework == "torch":
        zeros = torch.zeros(large, dtype=TORCH_DTYPES[leaf.dtype.name])
    view = zeros[(..., *(slice(None, None, 2) for _ in large))]
    axes = tuple(range(view.ndim))[::-1]
    transposed = view.permute(axes) if framework == "torch" else view.transpose(axes)
    assert tuple(transposed.shape) == leaf.shape
    return transposed


@pytest.mark.parametrize("target", ["numpy", "torch"])
@pytest.mark.parametrize("source", FRAMEWORKS)
def test_strided_memory_is_saved_and_filled_in_place(
    tmp_path: Path, source: str, target: str
) -> None:
    tree = arrays(shared(source, target))
    saved = mapped(MAKE[source], tree)
    if source != "jax":
        saved = mapped(lambda leaf: strided(source, leaf), tree)
        for dtype, inner in tree.items():
            for name, leaf in inner.items():
                saved[dtype][name][...] = MAKE[source](leaf)
    blocking.save(tmp_path / "x", saved)
    filled = mapped(lambda leaf: strided(target, leaf), tree)
    held = [filled[dtype]["matrix"] for dtype in tree]
    blocking.restore_into(tmp_path / "x", filled)
    assert all(filled[dtype]["matrix"] is leaf for dtype, leaf in zip(tree, held, strict=True))
    assert mapped(content, filled) == expected(target, tree)


def test_a_round_trip_over_all_frameworks_gives_what_was_there(tmp_path: Path) -> None:
    tree = arrays(shared("torch"))
    step: Any = mapped(as_torch, tree)
    for number, framework in enumerate(("jax", "numpy", "torch", "numpy", "jax", "torch")):
        blocking.save(tmp_path / str(number), step)
        step = blocking.restore(tmp_path / str(number), leaves=framework)
    assert mapped(content, step) == expected("torch", tree)


@pytest.mark.parametrize("target", FRAMEWORKS)
def test_frameworks_mixed_in_one_tree_come_out_as_one(tmp_path: Path, target: str) -> None:
    leaf = bits("bfloat16", (3, 2))
    scalars = {"i": 2**70, "f": 0.1, "c": 1j, "b": True, "s": "x", "y": b"\0\1", "none": None}
    tree = {**{name: make(leaf) for name, make in MAKE.items()}, **scalars}
    blocking.save(tmp_path / "x", tree)
    restored = blocking.restore(tmp_path / "x", leaves=target)
    for name in MAKE:
        assert content(restored[name]) == (target, *content(leaf)[1:])
    assert {name: restored[name] for name in scalars} == scalars


# ------------------------------------------------------------------- modules, tied, random numbers


def test_a_torch_module_becomes_a_tree_of_jax_arrays_and_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    module.to(torch.bfloat16)
    state = module.state_dict()
    blocking.save(tmp_path / "torch", {"model": module})
    like = {
        name: jax.ShapeDtypeStruct(tuple(leaf.shape), content(leaf)[1])
        for name, leaf in state.items()
    }
    params = blocking.restore(tmp_path / "torch", like={"model": like})
    assert {name: content(leaf) for name, leaf in params["model"].items()} == {
        name: ("jax", *content(leaf)[1:]) for name, leaf in state.items()
    }

    blocking.save(tmp_path / "jax", params)
    fresh = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    fresh.to(torch.bfloat16)
    weight = fresh[0].weight
    blocking.restore_into(tmp_path / "jax", {"model": fresh})
    assert {name: content(leaf) for name, leaf in fresh.state_dict().items()} == {
        name: content(leaf) for name, leaf in state.items()
    }
    assert fresh[0].weight is weight
    assert weight.requires_grad


@pytest.mark.parametrize("source", FRAMEWORKS)
def test_parameters_take_the_values_of_any_framework(tmp_path: Path, source: str) -> None:
    leaf = bits("float16", (3, 2))
    blocking.save(tmp_path / "x", {"w": MAKE[source](leaf), "frozen": MAKE[source](leaf)})
    like = {
        "w": torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.float16)),
        "frozen": torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.float16), requires_grad=False),
    }
    restored = blocking.restore(tmp_path / "x", like=like)
    for name, parameter in restored.items():
        assert type(parameter) is torch.nn.Parameter
        assert parameter is not like[name]
        assert parameter.requires_grad == like[name].requires_grad
        assert content(parameter) == ("torch", *content(leaf)[1:])
    blocking.save(tmp_path / "parameters", restored)
    for target in FRAMEWORKS:
        back = blocking.restore(tmp_path / "parameters", leaves=target)
        assert content(back["w"]) == (target, *content(leaf)[1:])


def address(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor):
        return leaf.data_ptr()
    if isinstance(leaf, jax.Array):
        return leaf.unsafe_buffer_pointer()
    return int(leaf.ctypes.data)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_leaf_that_stands_twice_is_stored_once_and_shares_memory_again(
    tmp_path: Path, source: str, target: str
) -> None:
    leaf = bits("float32", (40, 50))
    weight = MAKE[source](leaf)
    report = blocking.save(tmp_path / "x", {"embedding": weight, "head": weight})
    assert (report.leaf_count, report.array_count, report.nbytes) == (2, 1, leaf.nbytes)
    restored = blocking.restore(tmp_path / "x", leaves=target)
    assert content(restored["embedding"]) == content(restored["head"])
    assert content(restored["head"]) == (target, *content(leaf)[1:])
    # A JAX array is immutable: as two mutable arrays, its copies must not change each other.
    together = source != "jax" or target == "jax"
    assert (address(restored["embedding"]) == address(restored["head"])) is together


def test_keys_are_their_data_elsewhere_and_no_arrays_become_keys(tmp_path: Path) -> None:
    key = jax.random.key(7)
    data = np.asarray(jax.random.key_data(key))
    blocking.save(tmp_path / "key", {"key": key})
    for target in ("numpy", "torch"):
        restored = blocking.restore(tmp_path / "key", leaves=target)["key"]
        assert content(restored) == (target, "uint32", (2,), data.tobytes())
    blocking.save(tmp_path / "torch", {"key": as_torch(data)})
    with pytest.raises(asyncckpt.DtypeMismatchError, match=r"key: .* holds an array, .* PRNG"):
        blocking.restore(tmp_path / "torch", like={"key": key})
    raw = blocking.restore(tmp_path / "torch", like={"key": jax.random.PRNGKey(0)})["key"]
    assert bool(jax.random.wrap_key_data(raw) == key)


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("source", ["numpy", "jax"])
def test_dtypes_that_torch_lacks_are_refused_by_name(tmp_path: Path, source: str) -> None:
    tree = {name: MAKE[source](bits(name, (4,))) for name in (*NOT_IN_TORCH, "int8")}
    blocking.save(tmp_path / "x", {"layer": tree})
    with pytest.raises(asyncckpt.DtypeMismatchError) as caught:
        blocking.restore(tmp_path / "x", leaves="torch")
    text = str(caught.value)
    for name in NOT_IN_TORCH:
        assert f"layer/{name}: the checkpoint holds {name}, which PyTorch does not have" in text
    assert "layer/int8" not in text
    assert "nothing was read" in text
    only = blocking.restore(tmp_path / "x", leaves="torch", include="layer/int8")
    assert content(only["layer"]["int8"])[:2] == ("torch", "int8")


def test_int4_goes_to_torch_as_int8_with_cast(tmp_path: Path) -> None:
    leaf = np.arange(-8, 8).astype(ml_dtypes.int4)
    blocking.save(tmp_path / "x", {"q": jnp.asarray(leaf)})
    target = {"q": torch.zeros(16, dtype=torch.int8)}
    with pytest.raises(asyncckpt.DtypeMismatchError, match=r"q: .* holds int4, .* wants int8"):
        blocking.restore_into(tmp_path / "x", target)
    blocking.restore_into(tmp_path / "x", target, cast=True)
    assert target["q"].tolist() == list(range(-8, 8))


UNSTORABLE: dict[str, Callable[[], Any]] = {
    "complex32": lambda: torch.zeros(2, dtype=torch.complex32),
    "float4_e2m1fn_x2": lambda: torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "qint8": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "uint4": lambda: jnp.zeros(2, jnp.uint4),
    "float8_e4m3": lambda: jnp.zeros(2, jnp.float8_e4m3),
    "float6_e2m3fn": lambda: np.zeros(2, ml_dtypes.float6_e2m3fn),
}


@pytest.mark.parametrize("dtype", UNSTORABLE)
def test_a_dtype_that_no_checkpoint_holds_is_refused_by_name_with_what_to_store(
    tmp_path: Path, dtype: str
) -> None:
    with warnings.catch_warnings():
        # torch says that its quantized and half complex tensors are of the past, or experiments.
        warnings.simplefilter("ignore")
        leaf = UNSTORABLE[dtype]()
    with pytest.raises(asyncckpt.UnsupportedLeafError) as caught:
        blocking.save(tmp_path / "x", {"layer": {"w": leaf}})
    assert caught.value.path == "layer/w"
    assert dtype in str(caught.value)
    assert any(advice in str(caught.value) for advice in ("cast it to", "store x."))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("source", ["numpy", "torch"])
def test_64_bit_leaves_are_refused_by_name_where_jax_would_truncate_them(
    tmp_path: Path, source: str
) -> None:
    names = [*WIDE, "int32", "bfloat16"]
    tree = {name: bits(name, (3,)) for name in names}
    blocking.save(tmp_path / "x", {name: MAKE[source](leaf) for name, leaf in tree.items()})
    abstracts = {name: jax.ShapeDtypeStruct((3,), leaf.dtype) for name, leaf in tree.items()}
    with jax.enable_x64(False):
        with pytest.raises(asyncckpt.DtypeMismatchError) as caught:
            blocking.restore(tmp_path / "x", leaves="jax")
        for name in names:
            refused = f"{name}: {name} cannot be restored into JAX with 64-bit types disabled"
            assert (refused in str(caught.value)) == (name in WIDE)
        with pytest.raises(asyncckpt.DtypeMismatchError, match="64-bit types disabled"):
            blocking.restore(tmp_path / "x", like=abstracts)
        rest = blocking.restore(tmp_path / "x", leaves="jax", include=["int32", "bfloat16"])
    assert {name: content(leaf) for name, leaf in rest.items()} == {
        name: ("jax", *content(tree[name])[1:]) for name in ("int32", "bfloat16")
    }


# -------------------------------------------------------------------------------------------- cast

CASTS = [
    ("torch", "bfloat16", "jax", "float32"),
    ("torch", "float32", "jax", "bfloat16"),
    ("torch", "float64", "jax", "float32"),
    ("torch", "int64", "jax", "int32"),
    ("torch", "float8_e5m2", "jax", "float16"),
    ("jax", "float32", "torch", "float8_e4m3fn"),
    ("jax", "complex64", "torch", "complex128"),
    ("jax", "bool", "torch", "int8"),
    ("jax", "int4", "torch", "float16"),
    ("numpy", "uint16", "torch", "int64"),
    ("torch", "uint8", "numpy", "int4"),
    ("numpy", "float16", "jax", "float8_e3m4"),
]


@pytest.mark.parametrize(("source", "saved", "target", "wanted"), CASTS)
def test_cast_converts_between_frameworks_as_numpy_does(
    tmp_path: Path, source: str, saved: str, target: str, wanted: str
) -> None:
    values = np.array([0, 1, 1, 0, 1] if saved == "bool" else [0, 1, 2.5, 7, 3.1])
    leaf = values.astype(DTYPES[saved])
    like = {"x": MAKE[target](np.zeros(5, DTYPES[wanted]))}
    blocking.save(tmp_path / "x", {"x": MAKE[source](leaf)})
    with jax.enable_x64(False):
        with pytest.raises(
            asyncckpt.DtypeMismatchError, match=f"x: the checkpoint holds {saved}, .* {wanted}"
        ):
            blocking.restore(tmp_path / "x", like=like)
        restored = blocking.restore(tmp_path / "x", like=like, cast=True)["x"]
    assert content(restored) == (target, *content(leaf.astype(DTYPES[wanted]))[1:])


@pytest.mark.parametrize(
    ("saved", "value", "target", "wanted"),
    [
        ("int64", 2**31, "jax", "int32"),
        ("int64", -1, "torch", "uint8"),
        ("float32", 7e4, "jax", "float16"),
        ("float64", 1e300, "torch", "float32"),
        ("float32", 500.0, "torch", "float8_e4m3fn"),
    ],
)
def test_cast_never_makes_another_number_of_what_is_out_of_range(
    tmp_path: Path, saved: str, value: float, target: str, wanted: str
) -> None:
    source = "torch" if target == "jax" else "jax"
    leaf = np.array([1, value], DTYPES[saved])
    blocking.save(tmp_path / "x", {"layer": {"w": MAKE[source](leaf)}})
    like = {"layer": {"w": MAKE[target](np.zeros(2, DTYPES[wanted]))}}
    with pytest.raises(asyncckpt.DtypeMismatchError, match=f"layer/w: .* not fit into {wanted}"):
        blocking.restore(tmp_path / "x", like=like, cast=True)
