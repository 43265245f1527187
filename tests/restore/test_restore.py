"""What a restore returns: what was saved, or the same values as things like a target."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.checkpoint import metadata
from asyncckpt.errors import (
    CorruptCheckpointError,
    DtypeMismatchError,
    MismatchError,
    ResourceError,
    ShapeMismatchError,
    TreeMismatchError,
    UnsupportedFormatError,
    UnsupportedLeafError,
    UsageError,
)
from asyncckpt.flow.buffers import allocating
from asyncckpt.format.chunks import index_nbytes
from asyncckpt.format.crc import crc32c
from asyncckpt.format.record import decode_record, encode_record
from asyncckpt.format.record_values import StoredSpec
from asyncckpt.spec import ArraySpec
from tests.restore.loader import Loader
from tests.script import Script

pytestmark = pytest.mark.usefixtures("no_blocking")


class State(NamedTuple):
    params: Any
    step: Any


@dataclasses.dataclass
class Schedule:
    rate: Any
    name: Any = "cosine"


@jax.tree_util.register_pytree_node_class
class Layer:
    """Registered and mutable, as modules of flax nnx."""

    def __init__(self, *children: Any) -> None:
        self.children = children

    def tree_flatten(self) -> Any:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Any:
        return cls(*children)


def optimized(value: float, framework: Any = jnp, name: str = "cosine") -> dict[str, Any]:
    """Return an object, and another one that refers to it."""
    model = Layer(framework.full(3, value), Schedule(framework.full((), value), name))
    return {"model": model, "opt": Layer(model, framework.zeros(2)), "free": framework.ones(1)}


async def saved(tmp_path: Path, tree: Any, **options: Any) -> Path:
    await asyncckpt.save(tmp_path / "x", tree, **options)
    return tmp_path / "x"


async def test_a_placeholder_in_a_target_is_refused_with_a_way_out(tmp_path: Path) -> None:
    await asyncckpt.save(tmp_path / "x", {"a": np.ones(2), "b": np.zeros(2)})
    with pytest.raises(UnsupportedLeafError, match=r"^b: `\.\.\.` is no array; .* with include=$"):
        await asyncckpt.restore(tmp_path / "x", like={"a": np.zeros(2), "b": ...})
    found = await asyncckpt.restore(tmp_path / "x", like={"a": np.zeros(2)}, include="a")
    assert found["a"].tolist() == [1, 1]


async def test_without_like_containers_are_plain_and_leaves_are_numpy(tmp_path: Path) -> None:
    tree = {
        "state": State({"w": np.ones((2, 3), np.float32)}, 7),
        "schedule": Schedule(0.5),
        "ordered": OrderedDict(b=1, a=2),
        "list": [1, (2.5, None), {}],
        3: "text",
        "bytes": b"\x00\xff" * 3000,
        "flag": True,
        "complex": 1 + 2j,
        "big": 1 << 200,
        "scalar": np.float16(2),
        "none": None,
    }
    place = await saved(tmp_path, tree)
    restored = await asyncckpt.restore(place)
    assert list(restored) == list(tree)
    assert list(restored["state"]) == ["params", "step"]
    np.testing.assert_array_equal(restored["state"]["params"]["w"], np.ones((2, 3), np.float32))
    assert restored["state"]["step"] == 7
    assert restored["schedule"] == {"rate": 0.5, "name": "cosine"}
    assert list(restored["ordered"].items()) == [("b", 1), ("a", 2)]
    assert restored["list"] == [1, (2.5, None), {}]
    for key in (3, "bytes", "flag", "complex", "big", "none"):
        assert restored[key] == tree[key] and type(restored[key]) is type(tree[key])
    assert restored["scalar"].dtype == np.float16 and restored["scalar"].shape == ()


async def test_a_tree_may_be_one_leaf_or_empty(tmp_path: Path) -> None:
    for name, tree in (("a", np.arange(5)), ("b", 3.5), ("c", {}), ("d", []), ("e", None)):
        await asyncckpt.save(tmp_path / name, tree)
        found = await asyncckpt.restore(tmp_path / name)
        np.testing.assert_equal(found, tree)
        assert type(found) is type(tree)
        assert (await asyncckpt.verify(tmp_path / name)).ok


@pytest.mark.parametrize("leaves", ["numpy", "jax", "torch"])
async def test_leaves_chooses_the_framework(tmp_path: Path, leaves: Any) -> None:
    tree = {"f": np.arange(6, dtype=np.float32).reshape(2, 3), "h": jnp.ones(3, jnp.bfloat16)}
    restored = await asyncckpt.restore(await saved(tmp_path, tree), leaves=leaves)
    kind = {"numpy": np.ndarray, "jax": jax.Array, "torch": torch.Tensor}[leaves]
    assert all(isinstance(leaf, kind) for leaf in restored.values())
    dtypes = [str(leaf.dtype).removeprefix("torch.") for leaf in restored.values()]
    assert dtypes == ["float32", "bfloat16"]
    values = [np.asarray(leaf.float() if leaves == "torch" else leaf) for leaf in restored.values()]
    np.testing.assert_array_equal(values[0], tree["f"])
    np.testing.assert_array_equal(values[1].astype(np.float32), np.ones(3))


async def test_leaves_of_a_framework_that_lacks_the_dtype_are_refused(tmp_path: Path) -> None:
    place = await saved(tmp_path, {"a": np.zeros(3, ml_dtypes.int4)})
    with pytest.raises(
        asyncckpt.AsyncCheckpointError,
        match="a: the checkpoint holds int4, which PyTorch does not have",
    ):
        await asyncckpt.restore(place, leaves="torch")


async def test_like_gives_types_containers_and_frameworks(tmp_path: Path) -> None:
    tree = {
        "state": State({"w": np.arange(4.0, dtype=np.float32)}, np.int32(7)),
        "s": Schedule(2.5),
    }
    place = await saved(tmp_path, tree)
    like = {
        "s": Schedule(0.0, ""),
        "state": State({"w": jax.ShapeDtypeStruct((4,), jnp.float32)}, 0),
    }
    restored = await asyncckpt.restore(place, like=like)
    assert list(restored) == ["s", "state"]  # the order of like
    assert isinstance(restored["state"], State) and restored["state"].step == 7
    assert type(restored["state"].step) is int
    assert restored["s"] == Schedule(2.5, "cosine")
    assert isinstance(restored["state"].params["w"], jax.Array)
    meta = {
        "state": State({"w": torch.empty(4, device="meta")}, torch.tensor(0, dtype=torch.int32))
    }
    restored = await asyncckpt.restore(place, like=meta, include="state/*")
    assert restored["state"].params["w"].tolist() == [0, 1, 2, 3]
    assert restored["state"].params["w"].device.type == "cpu"
    assert restored["state"].step.item() == 7


async def test_like_of_every_framework_gets_the_same_bits(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    place = await saved(tmp_path, {"a": torch.from_numpy(values.copy())})
    for like in (
        np.zeros((3, 5), np.float32),
        jnp.zeros((3, 5)),
        torch.zeros(3, 5),
        torch.nn.Parameter(torch.zeros(3, 5)),
        jax.ShapeDtypeStruct((3, 5), np.float32),
    ):
        restored = (await asyncckpt.restore(place, like={"a": like}))["a"]
        assert isinstance(restored, jax.Array) == isinstance(
            like, (jax.Array, jax.ShapeDtypeStruct)
        )
        assert isinstance(restored, torch.nn.Parameter) == isinstance(like, torch.nn.Parameter)
        if isinstance(restored, torch.Tensor):
            restored = restored.detach().numpy()
        assert np.asarray(restored).tobytes() == values.tobytes()


async def test_rank_0_arrays_and_python_scalars_restore_into_each_other(tmp_path: Path) -> None:
    tree = {"i": 5, "f": 0.1, "b": True, "ai": np.int32(6), "af": np.float32(0.5), "ab": np.True_}
    like = {
        "i": jnp.zeros((), jnp.int32),
        "f": np.zeros((), np.float32),
        "b": torch.tensor(False),
        "ai": 0,
        "af": 0.0,
        "ab": False,
    }
    restored = await asyncckpt.restore(await saved(tmp_path, tree), like=like)
    assert (restored["ai"], restored["af"], restored["ab"]) == (6, 0.5, True)
    assert [type(restored[key]) for key in ("ai", "af", "ab")] == [int, float, bool]
    assert isinstance(restored["i"], jax.Array) and restored["i"].dtype == jnp.int32
    assert int(restored["i"]) == 5
    assert restored["f"] == np.float32(0.1) and restored["f"].dtype == np.float32
    assert restored["b"].item() is True


async def test_a_scalar_that_does_not_fit_is_a_mismatch(tmp_path: Path) -> None:
    place = await saved(tmp_path, {"n": 300, "x": 0.5, "a": np.float32(1), "v": np.zeros(2)})
    like = {"n": np.zeros((), np.int8), "x": 1, "a": 1, "v": 1.0}
    with pytest.raises(DtypeMismatchError) as caught:
        await asyncckpt.restore(place, like=like)
    text = str(caught.value)
    for part in (
        "4 leaves do not fit the target; nothing was read",
        "n: 300 of the checkpoint does not fit into int8",
        "x: the checkpoint holds 0.5 (float), the target wants int; cast=True converts equal",
        "a: the checkpoint holds an array float32[], the target wants int",
        "v: the checkpoint holds an array float64[2], the target wants float",
    ):
        assert part in text


async def test_all_mismatches_are_listed_at_once_before_any_payload_is_read(
    tmp_path: Path,
) -> None:
    tree = {"w": np.zeros((2, 3)), "b": np.zeros(4, np.float32), "extra": np.zeros(1), "s": 1}
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, tree)
        script = Script(ckpt)
        like = {"w": np.zeros((3, 2)), "b": np.zeros(4), "new": np.zeros(2), "s": 1}
        with pytest.raises(MismatchError) as caught:
            await ckpt.restore(like=like)
        text = str(caught.value)
        for part in (
            f"{tmp_path / '1'}: 4 leaves do not fit the target; nothing was read.",
            "w: the checkpoint holds shape (2, 3), the target wants (3, 2)",
            "b: the checkpoint holds float32, the target wants float64; cast=True converts",
            "new: the target has this leaf, the checkpoint does not",
            "extra: the checkpoint has this leaf, the target does not",
            "Pass strict=False",
            "include=",
        ):
            assert part in text
        target = {key: np.full_like(value, 7) for key, value in like.items() if key != "s"}
        with pytest.raises(MismatchError):
            await ckpt.restore_into({**target, "s": 1})
        assert all((array == 7).all() for array in target.values())
        assert script.count("read_into") == 0  # neither index nor data were looked at


@pytest.mark.parametrize(
    ("like", "error", "text"),
    [
        ({}, TreeMismatchError, "w: the checkpoint has this leaf, the target does not"),
        ({"w": np.zeros(3), "v": 1}, TreeMismatchError, "v: the target has this leaf"),
        ({"w": np.zeros(4)}, ShapeMismatchError, r"holds shape \(3,\), the target wants \(4,\)"),
        ({"w": np.zeros(3, "f4")}, DtypeMismatchError, "holds float64, the target wants float32"),
        ({"w": "text"}, DtypeMismatchError, r"an array float64\[3\], the target wants str"),
        ({"w": {"v": np.zeros(3)}}, TreeMismatchError, "w/v: the target has this leaf"),
    ],
)
async def test_a_single_mismatch_is_an_error_of_its_kind(
    tmp_path: Path, like: Any, error: type[MismatchError], text: str
) -> None:
    place = await saved(tmp_path, {"w": np.arange(3.0)})
    with pytest.raises(error, match=text) as caught:
        await asyncckpt.restore(place, like=like)
    assert caught.value.path is not None
    assert caught.value.location == str(place)
    assert caught.value.stage == "plan"


async def test_a_long_list_of_mismatches_is_cut(tmp_path: Path) -> None:
    place = await saved(tmp_path, {f"l{i}": i for i in range(50)})
    with pytest.raises(TreeMismatchError, match=r"50 leaves do not fit") as caught:
        await asyncckpt.restore(place, like={})
    assert "… and 30 more" in str(caught.value)


async def test_not_strict_restores_what_both_have(tmp_path: Path) -> None:
    place = await saved(tmp_path, {"w": np.arange(3.0), "extra": 1})
    own = np.full(2, 9.0)
    restored = await asyncckpt.restore(place, like={"w": np.zeros(3), "new": own}, strict=False)
    np.testing.assert_array_equal(restored["w"], np.arange(3.0))
    assert restored["new"] is own
    report = await asyncckpt.restore_into(place, {"w": np.zeros(3), "new": own}, strict=False)
    assert (report.missing, report.unexpected) == (("new",), ("extra",))
    # Not strict is about the tree; a shape that differs is still an error.
    with pytest.raises(ShapeMismatchError):
        await asyncckpt.restore(place, like={"w": np.zeros(4)}, strict=False)


async def test_include_takes_globs_on_paths(tmp_path: Path) -> None:
    tree = {
        "params": {"a": np.ones(2), "b": {"c": np.ones(3)}},
        "opt": [np.zeros(1), np.zeros(2)],
        "odd/key": 1,
    }
    place = await saved(tmp_path, tree)
    only = await asyncckpt.restore(place, include="params/*")
    assert list(only) == ["params"] and list(only["params"]) == ["a", "b"]
    two = await asyncckpt.restore(place, include=["params/a", "opt/1"])
    assert list(two) == ["params", "opt"] and list(two["params"]) == ["a"]
    assert two["opt"][0] is None and two["opt"][1].shape == (2,)
    assert await asyncckpt.restore(place, include="odd%2Fkey") == {"odd/key": 1}
    kept = np.full(2, 5.0)
    like = {"params": {"a": kept, "b": {"c": np.zeros(3)}}, "opt": [None, None], "odd/key": 0}
    restored = await asyncckpt.restore(place, like=like, include="params/b/*")
    assert restored["params"]["a"] is kept and restored["odd/key"] == 0
    np.testing.assert_array_equal(restored["params"]["b"]["c"], np.ones(3))
    with pytest.raises(
        UsageError, match=r"include='nothing\*' matches no leaf of .*; it has params/a"
    ):
        await asyncckpt.restore(place, include=["params/a", "nothing*"])


@pytest.mark.parametrize("include", [[], ()])
async def test_an_include_of_nothing_is_refused(tmp_path: Path, include: Any) -> None:
    place = await saved(tmp_path, {"w": np.ones(2)})
    target = {"w": np.zeros(2)}
    text = r"include=.. selects nothing; pass a glob on paths"
    for like in (None, target):
        with pytest.raises(UsageError, match=text):
            await asyncckpt.restore(place, like=like, include=include)
    with pytest.raises(UsageError, match=text):
        await asyncckpt.restore_into(place, target, include=include)
    assert not target["w"].any()


async def test_include_reads_only_what_it_selects(tmp_path: Path) -> None:
    tree = {"large": np.zeros(2_000_000, np.uint8), "small": np.arange(3000.0)}
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, tree)
        target = np.zeros(3000)
        report = await ckpt.restore_into({"small": target}, include="small", strict=False)
        assert report.read_nbytes < 200_000
        np.testing.assert_array_equal(target, tree["small"])


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        (np.array([0.1, 1e30]), np.float32, np.array([0.1, 1e30], np.float32)),
        (np.array([1, -2], np.int64), np.float32, np.array([1, -2], np.float32)),
        (np.array([1.0, -2.0]), np.int32, np.array([1, -2], np.int32)),
        (np.array([300, -7], np.int32), np.int16, np.array([300, -7], np.int16)),
        (np.array([1.5, np.inf, np.nan]), ml_dtypes.bfloat16, None),
        (np.array([0, 1, 1], np.int8), np.bool_, np.array([False, True, True])),
        (np.array([0.0, -0.0, 1.0]), np.bool_, np.array([False, False, True])),
        (np.array([1 + 0j]), np.float64, np.array([1.0])),
        (np.zeros((0, 2)), np.int8, np.zeros((0, 2), np.int8)),
    ],
)
async def test_cast_converts_dtypes(tmp_path: Path, values: Any, dtype: Any, expected: Any) -> None:
    place = await saved(tmp_path, {"a": values})
    like = {"a": np.zeros(values.shape, dtype)}
    if expected is None:
        expected = values.astype(dtype)
    with pytest.raises(DtypeMismatchError, match="cast=True converts"):
        await asyncckpt.restore(place, like=like)
    restored = (await asyncckpt.restore(place, like=like, cast=True))["a"]
    assert restored.dtype == dtype and restored.tobytes() == expected.tobytes()
    await asyncckpt.restore_into(place, like, cast=True)
    assert like["a"].tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("values", "dtype", "bad"),
    [
        (np.array([1.0, 1e39]), np.float32, "1e\\+39"),
        (np.array([1, 200], np.int16), np.int8, "200"),
        (np.array([-1, 2], np.int16), np.uint64, "-1"),
        (np.array([2**63], np.uint64), np.int64, str(2**63)),
        (np.array([1.0, np.nan]), np.int32, "nan"),
        (np.array([1.0, 2.7]), np.int32, "2.7"),
        (np.array([1.0, 0.5]), np.bool_, "0.5"),
        (np.array([1, 2]), np.bool_, "2"),
        (np.array([3e9]), np.int32, "3000000000"),
        (np.array([1 + 2j]), np.float32, "1\\+2j"),
        (np.array([1e6]), ml_dtypes.float8_e5m2, "1000000"),
    ],
)
async def test_cast_refuses_values_that_do_not_fit(
    tmp_path: Path, values: Any, dtype: Any, bad: str
) -> None:
    place = await saved(tmp_path, {"layer": {"a": values}})
    with pytest.raises(DtypeMismatchError, match=f"layer/a: .*{bad}.* does not fit") as caught:
        await asyncckpt.restore(
            place, like={"layer": {"a": np.zeros(values.shape, dtype)}}, cast=True
        )
    assert caught.value.path == "layer/a"


async def test_a_64_bit_leaf_is_not_truncated_by_jax(tmp_path: Path) -> None:
    place = await saved(
        tmp_path, {"a": np.arange(3), "b": np.arange(3.0), "c": np.arange(3, dtype="f4")}
    )
    with pytest.raises(DtypeMismatchError, match="2 leaves do not fit") as caught:
        await asyncckpt.restore(place, leaves="jax")
    for text in ("a: int64 cannot be restored", "b: float64 cannot", "jax_enable_x64"):
        assert text in str(caught.value)
    with pytest.raises(DtypeMismatchError, match="a: int64 cannot be restored into JAX"):
        await asyncckpt.restore(place, like={"a": jax.ShapeDtypeStruct((3,), np.int64)})
    restored = await asyncckpt.restore(place, leaves="jax", include="c")
    assert restored["c"].dtype == jnp.float32
    with jax.enable_x64(True):
        restored = await asyncckpt.restore(place, leaves="jax")
        assert [leaf.dtype for leaf in restored.values()] == [jnp.int64, jnp.float64, jnp.float32]
        like = {"a": jnp.zeros(3, jnp.int64), "b": jnp.zeros(3), "c": jnp.zeros(3, jnp.float32)}
        assert (await asyncckpt.restore(place, like=like))["a"].dtype == jnp.int64


@pytest.mark.parametrize("fate", ["missing", "truncated"])
@pytest.mark.parametrize("compression", [None, "zstd"])
async def test_a_data_file_without_its_bytes_names_the_leaf(
    tmp_path: Path, fate: str, compression: Any
) -> None:
    options = asyncckpt.SaveOptions(compression=compression)
    values = np.random.default_rng(0).random(200_000)
    place = await saved(tmp_path, {"layer": {"w": values}}, options=options)
    (file,) = (place / "default" / "d").glob("*-0")
    if fate == "missing":
        file.unlink()
    else:
        with file.open("r+b") as opened:
            opened.truncate(1000)
    with pytest.raises(CorruptCheckpointError) as caught:
        await asyncckpt.restore(place)
    error = caught.value
    assert str(error).startswith(f"layer/w: {place}") and error.path == "layer/w"
    assert error.file == f"default/d/{file.name}" and file.name in str(error)


async def test_a_data_file_that_ends_early_names_the_leaf_in_which_it_ends(tmp_path: Path) -> None:
    """The leaves are read by one call, straight into place."""
    place = await saved(tmp_path, {name: np.full(20_000, 1.0) for name in "abc"})
    (file,) = (place / "default" / "d").glob("*-0")
    with file.open("r+b") as opened:
        opened.truncate(240_000)
    with pytest.raises(CorruptCheckpointError) as caught:
        await asyncckpt.restore(place)
    assert caught.value.path == "b" and str(caught.value).startswith(f"b: {place}")


async def test_a_chunk_index_of_a_newer_version_is_named_with_its_checkpoint(
    tmp_path: Path,
) -> None:
    place = await saved(tmp_path, {"w": np.arange(3)})
    path = place / "checkpoint.json"
    record = decode_record(path.read_bytes(), location="x")
    data = record.chunk_index.data
    assert data is not None
    newer = data[:4] + (9).to_bytes(4, "little") + data[8:-4]
    extent = dataclasses.replace(
        record.chunk_index, data=newer + crc32c(newer).to_bytes(4, "little"), crc32c=crc32c(newer)
    )
    path.write_bytes(encode_record(dataclasses.replace(record, chunk_index=extent)))
    file = record.files[extent.file].path
    message = f"^{place}: {file}: the chunk index has version 9, this release reads 1; restore"
    with pytest.raises(UnsupportedFormatError, match=message) as caught:
        await asyncckpt.restore(place)
    error = caught.value
    assert (error.location, error.file, error.offset) == (str(place), file, extent.offset)
    assert (error.expected, error.found) == (1, 9)


async def test_a_chunk_index_larger_than_its_file_is_damage_and_takes_no_memory(
    tmp_path: Path,
) -> None:
    place = await saved(tmp_path, {"w": np.arange(3)})
    path = place / "checkpoint.json"
    record = decode_record(path.read_bytes(), location="x")
    own, *others = record.files
    nbytes = index_nbytes(1 << 56)
    hostile = dataclasses.replace(
        record,
        specs=(StoredSpec(ArraySpec((1 << 56,), "uint8"), (1,)),),
        files=(dataclasses.replace(own, nbytes=own.nbytes + nbytes), *others),
        chunk_index=dataclasses.replace(record.chunk_index, nbytes=nbytes, data=None),
    )
    path.write_bytes(encode_record(hostile))
    for read in (asyncckpt.restore, asyncckpt.inspect):
        with pytest.raises(
            CorruptCheckpointError, match=f"{place}/{own.path}: .*truncated"
        ) as caught:
            await read(place)
        assert (caught.value.location, caught.value.file) == (str(place), own.path)
    first, *_ = (await asyncckpt.verify(place)).damages
    assert first.file == own.path and "truncated" in first.reason


async def test_too_little_memory_for_a_chunk_index_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def refused(nbytes: int) -> Iterator[None]:
        with allocating(nbytes):
            raise MemoryError
        yield

    place = await saved(tmp_path, {"w": np.arange(3)})
    path = place / "checkpoint.json"
    record = decode_record(path.read_bytes(), location="x")
    apart = dataclasses.replace(record.chunk_index, data=None)
    path.write_bytes(encode_record(dataclasses.replace(record, chunk_index=apart)))
    monkeypatch.setattr(metadata, "allocating", refused)
    message = f"^{place}: the chunk index in {record.files[0].path}: 44 bytes of host memory"
    with pytest.raises(ResourceError, match=message) as caught:
        await asyncckpt.restore(place)
    assert caught.value.location == str(place)


async def test_inspect_tells_what_a_checkpoint_holds_without_its_payload(tmp_path: Path) -> None:
    tied = np.arange(6.0)
    tree = {"w": np.zeros((3, 4), np.float32), "t": tied, "u": tied, "n": 5, "s": {"x": "text"}}
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        report = await ckpt.save(4, tree, metadata={"note": 1})
        script = Script(ckpt)
        info = await ckpt.inspect()
        assert script.count("read_into") == 0  # a small chunk index is in the record
        assert (info.step, info.save_id, info.metadata) == (4, report.save_id, {"note": 1})
        assert [leaf.path for leaf in info.leaves] == ["w", "t", "u", "n", "s/x"]
        assert (info["w"].shape, info["w"].dtype, info["w"].nbytes) == ((3, 4), "float32", 48)
        assert info["u"].tied_to == "t"
        assert (info["n"].kind, info["n"].value) == ("int", 5)
        assert info.tree["s"]["x"].value == "text"
        assert info.nbytes == 48 + 48
        assert info.stored_nbytes == sum(file.nbytes for file in info.files)
        with pytest.raises(KeyError, match="has no leaf 'nope'"):
            info["nope"]
        with pytest.raises(TypeError, match="a int has no array"):
            info["n"].tensorstore_spec()


async def test_bytes_and_the_array_of_their_memory_come_back_as_what_they_were(
    tmp_path: Path,
) -> None:
    text = b"0123456789" * 400
    view = np.frombuffer(text, np.uint8)
    for tree in ({"a": text, "b": view}, {"b": view, "a": text}):
        await asyncckpt.save(tmp_path / "x", tree, overwrite=True)
        restored = await asyncckpt.restore(tmp_path / "x")
        assert type(restored["a"]) is bytes and restored["a"] == text
        assert type(restored["b"]) is np.ndarray and restored["b"].tobytes() == text


async def test_a_jax_array_used_twice_comes_back_as_two_mutable_arrays(tmp_path: Path) -> None:
    array, mutable = jnp.arange(3000.0), np.arange(3000.0)
    tree = {"a": array, "b": array, "c": mutable, "d": mutable}
    await asyncckpt.save(tmp_path / "x", tree)
    restored = await asyncckpt.restore(tmp_path / "x")
    assert not np.shares_memory(restored["a"], restored["b"])
    restored["a"][:] = 0
    assert restored["b"].tobytes() == np.asarray(array).tobytes()
    assert np.shares_memory(restored["c"], restored["d"])
    assert restored["d"].tobytes() == mutable.tobytes()


@pytest.mark.parametrize("framework", [np, jnp])
@pytest.mark.parametrize("tied", [True, False])
async def test_an_object_that_a_target_holds_twice_comes_back_as_one(
    tmp_path: Path, tied: bool, framework: Any
) -> None:
    state = optimized(2.0, framework)
    if not tied:  # as other libraries store it
        state["opt"] = Layer(optimized(2.0, framework)["model"], framework.zeros(2))
    place = await saved(tmp_path, state)
    tied_to = (await asyncckpt.inspect(place))["opt/0/0"].tied_to
    assert tied_to == ("model/0" if tied else None)
    target = optimized(7.0, framework, "linear")
    new = await asyncckpt.restore(place, like=target)
    assert new["opt"].children[0] is new["model"] is not target["model"]
    weights, schedule = new["model"].children
    assert (weights.tolist(), schedule) == ([2, 2, 2], Schedule(2, "cosine"))
    assert type(weights) is type(target["model"].children[0])


@pytest.mark.parametrize(
    ("leaf", "value", "name"), [("0/0", -0.0, "cosine"), ("0/1/name", 0.0, "linear")]
)
async def test_different_values_for_an_object_that_a_target_holds_twice_are_an_error(
    tmp_path: Path, leaf: str, value: float, name: str
) -> None:
    other = optimized(value, name=name)["model"]
    place = await saved(tmp_path, {**optimized(0.0), "opt": Layer(other, jnp.zeros(2))})
    text = rf"model/{leaf[2:]} and opt/{leaf}: the checkpoint holds different values for"
    with pytest.raises(MismatchError, match=text) as caught:
        await asyncckpt.restore(place, like=optimized(1.0))
    assert caught.value.path == f"opt/{leaf}"


@pytest.mark.parametrize("include", ["model", "opt"])
async def test_a_part_of_the_occurrences_of_an_object_is_enough(
    tmp_path: Path, include: str
) -> None:
    other = optimized(5.0)["model"]
    place = await saved(tmp_path, {**optimized(3.0), "opt": Layer(other, jnp.zeros(2))})
    new = await asyncckpt.restore(place, like=optimized(1.0), include=include)
    assert new["opt"].children[0] is new["model"]
    assert new["model"].children[0].tolist() == [3 if include == "model" else 5] * 3


@pytest.mark.parametrize("leaves", ["numpy", "torch", "jax"])
async def test_a_restore_uses_the_memory_of_dropped_arrays_of_an_earlier_one(
    tmp_path: Path, leaves: Any
) -> None:
    def places(tree: Any) -> set[int]:
        arrays = [tree["a"], *tree["b"]]
        if leaves == "jax":
            return {array.unsafe_buffer_pointer() for array in arrays}
        return {a.data_ptr() if leaves == "torch" else a.ctypes.data for a in arrays}

    values = {"a": np.arange(1 << 18, dtype=np.int32), "b": [np.full(1 << 17, 7, np.uint8)] * 3}
    values["b"] = [array + np.uint8(i) for i, array in enumerate(values["b"])]
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(0, values)
        first = await ckpt.restore(0, leaves=leaves)
        second = await ckpt.restore(0, leaves=leaves)
        assert not places(first) & places(second), "the first is still in use"
        dropped = places(first)
        part = first["b"][1][100:200]
        kept = np.asarray(first["b"][1])
        del first
        if leaves == "jax":
            gc.collect()  # JAX frees host memory then
        third = await ckpt.restore(0, leaves=leaves)
        assert len(places(third) & dropped) == 3, "all but the one whose part is in use"
        for tree in (second, third):
            assert np.array_equal(np.asarray(tree["a"]), values["a"])
            for found, expected in zip(tree["b"], values["b"], strict=True):
                assert np.array_equal(np.asarray(found), expected)
        assert np.all(np.asarray(part) == 8) and np.all(kept == 8)
    assert np.array_equal(np.asarray(third["a"]), values["a"]), "closing takes nothing away"


async def test_a_restored_state_is_freed_with_its_last_reference(tmp_path: Path) -> None:
    """No cycle of the library's keeps it until the garbage collector runs."""
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(0, {"a": np.arange(9.0)})
        gc.collect()
        gc.disable()
        try:
            tree = await ckpt.restore(0)
            gone = weakref.ref(tree["a"])
            del tree
            # The engine's thread may still be leaving the task.
            async with asyncio.timeout(30):
                while gone() is not None:
                    await asyncio.sleep(0.001)
        finally:
            gc.enable()


def test_a_state_that_was_restored_in_one_call_is_freed_with_its_last_reference(
    tmp_path: Path,
) -> None:
    asyncckpt.blocking.save(tmp_path / "x", {"a": np.arange(9.0)})
    gc.collect()
    gc.disable()
    try:
        tree = asyncckpt.blocking.restore(tmp_path / "x")
        gone = weakref.ref(tree["a"])
        del tree
        assert gone() is None, "the engine has ended, and its thread with it"
    finally:
        gc.enable()


@pytest.mark.parametrize("stateful", [Loader(a=1, w=np.ones(3)), torch.nn.Linear(2, 2)])
async def test_leaves_beside_an_object_with_a_state_dict_come_from_the_checkpoint(
    tmp_path: Path, stateful: Any
) -> None:
    def tree(value: float) -> dict[str, Any]:
        return {
            "first": np.full(3, value),
            "object": stateful,
            "large": np.full((300, 1000), value, np.float32),
            "strided": np.full((4, 6), value)[::2],
            "tensor": torch.full((3,), value),
            "array": jnp.full(3, value),
            "number": value,
            "none": None,
        }

    place = await saved(tmp_path, tree(1.0))
    like = tree(7.0)
    restored = await asyncckpt.restore(place, like=like)
    for key in ("first", "large", "strided", "tensor", "array", "number"):
        assert np.all(np.asarray(restored[key]) == 1.0), key
        assert np.all(np.asarray(like[key]) == 7.0), key
    for key, value in stateful.state_dict().items():
        assert np.array_equal(restored["object"][key], value)
