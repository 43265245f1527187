"""Leaves stored in another dtype: a save or a conversion keeps every value, or fails and says why.

What `LeafOptions(dtype=…)` of a save does, it does in conversions too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import asyncckpt
from asyncckpt import LeafOptions, SaveOptions, blocking
from asyncckpt.errors import DtypeMismatchError, UsageError
from tests.script import in_thread


def stored_as(dtype: str, *paths: str, **options: Any) -> SaveOptions:
    """These leaves are cast."""
    return SaveOptions(
        leaf_options=lambda path, _: LeafOptions(dtype=dtype) if path in paths else None, **options
    )


LARGE = np.concatenate([np.zeros(300_000, np.int64), [2**40]])


@pytest.mark.parametrize(
    ("leaf", "dtype", "text"),
    [
        (np.array([2**40, 1]), "int32", "1099511627776 does not fit into int32"),
        (LARGE, "int32", "1099511627776 does not fit into int32"),
        (np.array([1e300]), "uint8", r"1e\+300 does not fit into uint8"),
        (np.array([1.0, 2.7]), "int8", "2.7 does not fit into int8"),
        (np.array([0, 1, 2]), "bool", "2 does not fit into bool"),
        (np.array([1.0, np.nan], np.float32), "int64", "nan does not fit into int64"),
        (np.array([70_000]), "float16", "70000 does not fit into float16"),
        (np.array([1 + 2j]), "float32", "an imaginary part does not fit into float32"),
    ],
    ids=["small", "large", "float", "fraction", "bool", "nan", "narrow float", "complex"],
)
@pytest.mark.parametrize("compression", [None, "zstd"])
async def test_a_value_that_does_not_fit_fails_the_save_and_leaves_nothing(
    tmp_path: Path, leaf: Any, dtype: str, text: str, compression: Any
) -> None:
    tree = {"net": {"ok": np.ones(40_000), "bad": leaf}}
    options = stored_as(dtype, "net/bad", compression=compression)
    async with asyncckpt.Checkpointer(tmp_path / "run") as ckpt:
        for call in (
            lambda: ckpt.save(1, tree, options=options),
            lambda: ckpt.start_save(1, tree, options=options),
            lambda: asyncckpt.save(tmp_path / "x", tree, options=options),
        ):
            with pytest.raises(DtypeMismatchError, match=f"^net/bad: .*{text}") as caught:
                await call()
            assert (caught.value.path, caught.value.stage) == ("net/bad", "stage")
        assert await ckpt.steps() == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


async def test_casts_lose_precision_and_make_infinities_of_floats_only(tmp_path: Path) -> None:
    tree = {"a": np.array([1e6, -1e300, 1 / 3]), "b": np.array([2**31 - 1, -(2**31)])}
    options = SaveOptions(
        leaf_options=lambda path, _: LeafOptions(dtype={"a": "float16", "b": "int32"}[path])
    )
    await asyncckpt.save(tmp_path / "x", tree, options=options)
    restored = await asyncckpt.restore(tmp_path / "x")
    assert restored["a"].dtype == np.float16 and restored["b"].dtype == np.int32
    assert restored["a"].tolist() == [np.inf, -np.inf, float(np.float16(1 / 3))]
    assert restored["b"].tolist() == tree["b"].tolist()


OPAQUE: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: bytes(range(256)) * 10, "float32", "a bytes object"),
    (lambda: jax.random.key(1), "bfloat16", "a PRNG key"),
    (lambda: jax.random.split(jax.random.key(1), 3), "uint64", "a PRNG key"),
]


@pytest.mark.parametrize(("leaf", "dtype", "text"), OPAQUE, ids=["bytes", "key", "keys"])
async def test_what_is_no_number_is_not_cast(
    tmp_path: Path, leaf: Callable[[], Any], dtype: str, text: str
) -> None:
    tree = {"w": np.ones(3), "rng": [leaf()]}
    with pytest.raises(UsageError, match=f"^rng/0: this leaf is {text}, which has no values to"):
        await asyncckpt.save(tmp_path / "x", tree, options=stored_as(dtype, "rng/0"))
    assert list(tmp_path.iterdir()) == []
    # In the dtype of its own it is stored, and converted, as ever.
    await asyncckpt.save(tmp_path / "x", tree, options=stored_as("float32", "w"))
    own = (await asyncckpt.inspect(tmp_path / "x"))["rng/0"].dtype
    assert own is not None
    options = stored_as(own, "rng/0")
    await asyncckpt.convert(tmp_path / "x", tmp_path / "y", options=options)
    assert (await asyncckpt.diff(tmp_path / "x", tmp_path / "y")).equal
    for target in ("z", "z.safetensors"):
        with pytest.raises(UsageError, match=f"^rng/0: this leaf is {text}") as caught:
            await asyncckpt.convert(
                tmp_path / "x", tmp_path / target, options=stored_as(dtype, "rng/0")
            )
        assert caught.value.path == "rng/0"
        assert not (tmp_path / target).exists()


@pytest.mark.parametrize("target", ["y", "y.safetensors"])
async def test_a_conversion_loses_no_value_either(tmp_path: Path, target: str) -> None:
    await asyncckpt.save(tmp_path / "x", {"ok": np.ones(3), "bad": LARGE})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DtypeMismatchError, match=r"^bad: 1099511627776 does not fit into int32"):
        await asyncckpt.convert(
            tmp_path / "x", tmp_path / target, options=stored_as("int32", "ok", "bad")
        )
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("deadline_s", [None, 60.0])
async def test_a_timeout_in_leaf_options_is_no_deadline_of_the_save(
    tmp_path: Path, deadline_s: float | None
) -> None:
    def slow(path: str, _: Any) -> LeafOptions | None:
        raise TimeoutError("the catalog does not answer")

    options = SaveOptions(leaf_options=slow, deadline_s=deadline_s)
    with pytest.raises(TimeoutError, match="the catalog does not answer") as caught:
        await asyncckpt.save(tmp_path / "x", {"a": np.ones(3)}, options=options)
    assert type(caught.value) is TimeoutError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("blocked", [False, True], ids=["async", "blocking"])
async def test_a_stop_iteration_of_leaf_options_is_an_error_and_no_hang(
    tmp_path: Path, blocked: bool
) -> None:
    options = SaveOptions(leaf_options=lambda path, _: next(iter(())))
    tree = {"a": np.ones(3)}
    with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
        if blocked:
            await in_thread(lambda: blocking.save(tmp_path / "x", tree, options=options))
        else:
            await asyncckpt.save(tmp_path / "x", tree, options=options)
    assert caught.value.__notes__ == ["raised by leaf_options for a (float64[3])"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit]
)
async def test_leaf_options_that_end_the_program_fail_their_save_only(
    tmp_path: Path, kind: type[BaseException]
) -> None:
    def leave(path: str, _: Any) -> LeafOptions | None:
        raise kind("no rule")

    options = SaveOptions(leaf_options=leave)
    tied = np.ones(3)
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        for tree in ({"a": np.ones(3)}, {"a": tied, "b": tied}):
            with pytest.raises(UsageError, match=rf"^a: .* raised {kind.__name__}: no rule") as at:
                await ckpt.save(1, tree, options=options)
            assert at.value.path == "a" and type(at.value.__cause__) is kind
        assert (await ckpt.save(1, {"a": np.ones(3)})).step == 1


async def test_an_error_of_leaf_options_names_the_leaf(tmp_path: Path) -> None:
    def broken(path: str, _: Any) -> LeafOptions | None:
        return {"a": LeafOptions()}[path]

    await asyncckpt.save(tmp_path / "x", {"a": np.ones(3), "b": {"c": np.ones((2, 3))}})
    options = SaveOptions(leaf_options=broken)
    tree = {"a": np.ones(3), "b": {"c": np.ones((2, 3))}}
    for call in (
        lambda: asyncckpt.save(tmp_path / "y", tree, options=options),
        lambda: asyncckpt.convert(tmp_path / "x", tmp_path / "y", options=options),
        lambda: asyncckpt.convert(tmp_path / "x", tmp_path / "y.safetensors", options=options),
    ):
        with pytest.raises(KeyError) as caught:
            await call()
        assert caught.value.__notes__ == ["raised by leaf_options for b/c (float64[2,3])"]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
