"""Differences that `diff` finds: leaves, kinds, shapes, dtypes and elements."""

from __future__ import annotations

import asyncio
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import asyncckpt
from asyncckpt import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DeadlineExceededError,
    DiffReport,
    LeafDifference,
    LeafOptions,
    RestoreOptions,
    SaveOptions,
    ShardedArray,
    UsageError,
    blocking,
)
from asyncckpt.convert.differences import Difference
from asyncckpt.options import MIB
from asyncckpt.spec import DTYPES, Box
from tests.convert.trees import dtypes, everything, numbers, saved

SMALL = RestoreOptions(host_memory_nbytes=64 * MIB)


def compared(tmp_path: Path, first: Any, second: Any, **arguments: Any) -> DiffReport:
    for name, tree in (("a", first), ("b", second)):
        saved(tmp_path / name, tree, overwrite=True)
    return blocking.diff(tmp_path / "a", tmp_path / "b", **arguments)


def only(report: DiffReport) -> LeafDifference:
    assert not report.only_first and not report.only_second
    (leaf,) = report.changed
    return leaf


# --------------------------------------------------------------------------------------- equality


def test_a_checkpoint_equals_itself(tmp_path: Path) -> None:
    saved(tmp_path / "a", everything() | {"dtypes": dtypes()})
    for bitwise in (False, True):
        report = blocking.diff(tmp_path / "a", tmp_path / "a", bitwise=bitwise)
        assert report and report.equal and report.changed == () and report.notes == ()
    assert report.leaf_count == len(blocking.inspect(tmp_path / "a").leaves)
    assert str(report).endswith("leaves, all equal")


def test_chunks_compression_and_pieces_make_no_difference(tmp_path: Path) -> None:
    values = numbers(6000, 50)
    rows = ShardedArray(
        values.shape,
        values.dtype,
        [((a, 0), values[a:b]) for a, b in ((0, 2001), (2001, 3500), (3500, 6000))],
    )
    columns = SaveOptions(
        compression="zstd", leaf_options=lambda _, __: LeafOptions(chunk_shape=(6000, 7))
    )
    saved(tmp_path / "a", {"w": rows})
    saved(tmp_path / "b", {"w": values}, options=columns)
    assert blocking.diff(tmp_path / "a", tmp_path / "b").equal
    assert blocking.diff(tmp_path / "b", tmp_path / "a", options=SMALL).equal


# ------------------------------------------------------------------------------------------ leaves


def test_leaves_of_one_side_are_listed(tmp_path: Path) -> None:
    report = compared(
        tmp_path, {"x": 1, "y": numbers(3), "z": {"p": 2}}, {"z": {"p": 2, "q": 3}, "x": 1}
    )
    assert (report.only_first, report.only_second) == (("y",), ("z/q",))
    assert not report and report.changed == () and report.leaf_count == 2
    assert "only in the first: y" in str(report)


def test_kinds_shapes_dtypes_and_scalars_are_compared(tmp_path: Path) -> None:
    first = {"a": 1, "b": 1, "c": numbers(3), "d": numbers(3), "e": "x", "f": 1, "g": b"x", "h": 1}
    second = first | {
        "a": 1.0,
        "b": True,
        "c": numbers(4),
        "d": numbers(3).astype(np.float64),
        "e": "y",
        "f": np.int64(1),
        "g": b"x" * 5000,
    }
    report = compared(tmp_path, first, second)
    found = {leaf.path: (leaf.what, leaf.first, leaf.second) for leaf in report.changed}
    assert found == {
        "a": ("kind", "int 1", "float 1.0"),
        "b": ("kind", "int 1", "bool True"),
        "c": ("shape", "float32[3]", "float32[4]"),
        "d": ("dtype", "float32", "float64"),
        "e": ("value", "str 'x'", "str 'y'"),
        "f": ("kind", "int 1", "array int64[]"),
        "g": ("value", "bytes b'x'", "bytes uint8[5000]"),
    }


@pytest.mark.filterwarnings("ignore:.*could not be verified")
@pytest.mark.parametrize("value", [3, 2.5, True, math.nan], ids=str)
def test_numbers_that_another_library_stores_as_arrays_are_numbers(
    tmp_path: Path, value: Any
) -> None:
    tree = {"n": value, "w": np.ones(2)}
    ocp.PyTreeCheckpointer().save(tmp_path / "orbax", tree)
    saved(tmp_path / "a", tree)
    saved(tmp_path / "b", tree | {"n": type(value)(0)})
    blocking.convert(tmp_path / "orbax", tmp_path / "converted")
    for other in ("orbax", "converted"):
        for pair in (("a", other), (other, "a")):
            assert blocking.diff(*(tmp_path / name for name in pair)).equal
        leaf = only(blocking.diff(tmp_path / "b", tmp_path / other))
        assert (leaf.path, leaf.what, leaf.count) == ("n", "value", 1)
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "converted" / "default")["n"]
    assert type(found) is type(value)
    cast = blocking.restore(tmp_path / "orbax", like=tree | {"n": 0.0}, cast=True)["n"]
    assert type(cast) is float and (cast == value or cast != cast)


@pytest.mark.filterwarnings("ignore:.*could not be verified")
def test_a_number_that_an_array_holds_only_rounded_differs(tmp_path: Path) -> None:
    saved(tmp_path / "a", {"n": 0.1})
    ocp.PyTreeCheckpointer().save(
        tmp_path / "orbax", {"n": 0.1}, save_args={"n": ocp.SaveArgs(dtype=np.dtype("f4"))}
    )
    assert blocking.inspect(tmp_path / "orbax")["n"].dtype == "float32"
    assert only(blocking.diff(tmp_path / "a", tmp_path / "orbax")).what == "value"


def test_complex_scalars_with_a_nan_are_compared_by_their_parts(tmp_path: Path) -> None:
    leaf = only(compared(tmp_path, {"z": complex("nan+1j")}, {"z": complex("nan+2j")}))
    assert (leaf.what, leaf.first, leaf.second) == ("value", "complex (nan+1j)", "complex (nan+2j)")


def test_scalars_that_are_nan_are_equal(tmp_path: Path) -> None:
    tree = {"x": math.nan, "z": complex(0, math.nan), "zero": 0.0}
    assert compared(tmp_path, tree, tree).equal
    assert compared(tmp_path, tree, tree | {"zero": -0.0}).equal
    assert only(compared(tmp_path, tree, tree | {"zero": -0.0}, bitwise=True)).path == "zero"


def test_containers_are_noted_and_make_no_difference(tmp_path: Path) -> None:
    report = compared(tmp_path, {"x": [1, 2], "e": {}}, {"x": (1, 2), "e": None})
    assert report.equal
    assert report.notes == ("containers differ: x (list and tuple), e (dict and none)",)


def test_keys_of_another_type_are_noted_and_make_no_difference(tmp_path: Path) -> None:
    report = compared(tmp_path, {"a": {1: 2}, "b": {3: 4}}, {"a": {"1": 2}, "b": {3: 4}})
    assert report.equal
    assert report.notes == ("containers differ: a (dict with int keys and dict)",)


# ------------------------------------------------------------------------------------------ values


def test_one_flipped_element_among_many_is_found(tmp_path: Path) -> None:
    first = numbers(3000, 3000)
    second = first.copy()
    second[2718, 281] += 8
    leaf = only(compared(tmp_path, {"w": first}, {"w": second}, options=SMALL))
    assert (leaf.path, leaf.what, leaf.size, leaf.count) == ("w", "value", 9_000_000, 1)
    assert leaf.index == (2718, 281) and leaf.largest == 8.0
    assert leaf.largest_relative == pytest.approx(8 / (2718 * 3000 + 289))


def test_every_single_bit_is_found_in_every_dtype(tmp_path: Path) -> None:
    first = dtypes()
    second = {}
    for name, values in first.items():
        changed = values.copy()
        changed.view(np.uint8)[1, 2] ^= 1
        second[name] = changed
    report = compared(tmp_path, first, second, bitwise=True)
    assert {leaf.path: leaf.count for leaf in report.changed} == dict.fromkeys(first, 1)
    assert all(leaf.index[0] == 1 for leaf in report.changed)


def test_nans_are_equal_to_nans_and_counted_against_numbers(tmp_path: Path) -> None:
    first = np.array([1, math.nan, math.nan, 4, math.inf, 0.0], np.float32)
    second = np.array([1, math.nan, 3, 6, -math.inf, -0.0], np.float32)
    leaf = only(compared(tmp_path, {"w": first}, {"w": second}))
    assert (leaf.count, leaf.nan_count, leaf.largest) == (3, 1, math.inf)
    assert leaf.largest_relative == math.inf and leaf.index == (4,)
    bits = only(compared(tmp_path, {"w": first}, {"w": second}, bitwise=True))
    assert bits.count == 4
    lone = only(compared(tmp_path, {"w": first[2:3]}, {"w": second[2:3]}))
    assert (lone.count, lone.nan_count, lone.largest, lone.index) == (1, 1, 0.0, (0,))
    assert "1 are NaN in one of them" in str(lone)


def test_integers_are_compared_exactly(tmp_path: Path) -> None:
    big = 1 << 62
    first = np.array([big, -(1 << 63), 5], np.int64)
    second = np.array([big + 1, (1 << 63) - 1, 5], np.int64)
    leaf = only(compared(tmp_path, {"w": first}, {"w": second}))
    assert (leaf.count, leaf.largest, leaf.index) == (2, float(1 << 64), (1,))
    unsigned = only(
        compared(
            tmp_path,
            {"w": np.array([1 << 63, 0], np.uint64)},
            {"w": np.array([(1 << 63) - 3, 0], np.uint64)},
        )
    )
    assert (unsigned.count, unsigned.largest) == (1, 3.0)


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("value", [2**53 + 1, -(2**53) - 1, 2**63 - 1], ids=str)
def test_integers_that_a_float_holds_only_rounded_differ_from_it(
    tmp_path: Path, dtype: type[Any], value: int
) -> None:
    whole = np.array([5, value], np.int64)
    leaf = only(compared(tmp_path, {"w": whole}, {"w": whole.astype(dtype)}))
    assert (leaf.what, leaf.count, leaf.nan_count, leaf.index) == ("dtype", 1, 0, (1,))
    assert leaf.largest == 1.0


def test_distances_of_small_integers_from_floats_are_exact(tmp_path: Path) -> None:
    whole = np.array([-1, -3, 7, -(2**40)], np.int64)
    near = whole + np.array([-1e-9, 0.25, -0.5, 2**-10])
    leaf = only(compared(tmp_path, {"w": whole[:1]}, {"w": near[:1]}))
    assert leaf.largest == float(-1 - near[0])
    leaf = only(compared(tmp_path, {"w": whole}, {"w": near}))
    assert (leaf.count, leaf.largest, leaf.index) == (4, 0.5, (2,))


def test_values_of_different_dtypes_are_compared_too(tmp_path: Path) -> None:
    exact = np.array([1, 2, 1.001], np.float32)
    leaf = only(compared(tmp_path, {"w": exact}, {"w": exact.astype(DTYPES["bfloat16"])}))
    assert (leaf.what, leaf.count, leaf.index) == ("dtype", 1, (2,))
    assert leaf.largest == pytest.approx(0.001, rel=1e-3)


def test_a_rank_0_array_differs_without_an_index(tmp_path: Path) -> None:
    leaf = only(compared(tmp_path, np.float32(1), np.float32(3)))
    assert (leaf.path, leaf.count, leaf.largest, leaf.index) == ("", 1, 2.0, ())
    assert str(leaf).startswith("(the tree itself): value, 1 of 1 elements differ")


@given(st.data())
def test_parts_add_up_in_any_order(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(DTYPES)))
    dtype = DTYPES[name]
    count = data.draw(st.integers(1, 30))
    raw = st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize)
    both = [np.frombuffer(data.draw(raw), np.uint8) for _ in range(2)]
    if name in ("bool", "int2", "int4", "float4_e2m1fn"):
        both = [values % 2 for values in both]
    a, b = (values.view(dtype) for values in both)
    bitwise = data.draw(st.booleans())
    whole = Difference()
    whole.add(Box((0,), (count,)), a, b, bitwise=bitwise)
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, count)))), count]
    parts = []
    for start, stop in itertools.pairwise(cuts):
        part = Difference()
        part.add(Box((start,), (stop - start,)), a[start:stop], b[start:stop], bitwise=bitwise)
        parts.append(part)
    merged = Difference()
    for part in data.draw(st.permutations(parts)):
        merged.merge(part)
    assert merged == whole
    plain = [i for i in range(count) if _differ(a[i], b[i], bitwise=bitwise)]
    assert whole.count == len(plain)
    assert not plain or whole.index[0] in plain


def _differ(a: Any, b: Any, *, bitwise: bool) -> bool:
    exact = bitwise or a.dtype.kind in "iub" or a.dtype.name.startswith("int")
    if a.tobytes() == b.tobytes() or exact:
        return a.tobytes() != b.tobytes()
    x, y = (complex(v) if v.dtype.kind == "c" else complex(float(v)) for v in (a, b))
    pairs = ((x.real, y.real), (x.imag, y.imag))
    return any(p != q and not (p != p and q != q) for p, q in pairs)


# --------------------------------------------------------------------------------------- the call


async def test_damage_is_an_error_that_names_the_leaf(tmp_path: Path) -> None:
    for name in ("a", "b"):
        await asyncckpt.save(tmp_path / name, {"x": numbers(1000, 1000)})
    file = next((tmp_path / "b" / "default" / "d").glob("*-0"))
    data = bytearray(file.read_bytes())
    data[70_000] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"^x: ") as caught:
        await asyncckpt.diff(tmp_path / "a", tmp_path / "b")
    assert str(tmp_path / "b") in str(caught.value)


async def test_wrong_calls_are_refused(tmp_path: Path) -> None:
    await asyncckpt.save(tmp_path / "a", {"x": numbers(100)})
    with pytest.raises(CheckpointNotFoundError):
        await asyncckpt.diff(tmp_path / "a", tmp_path / "gone")
    with pytest.raises(UsageError, match="RestoreOptions"):
        await asyncckpt.diff(tmp_path / "a", tmp_path / "a", options=3)  # type: ignore[arg-type]
    with pytest.raises(DeadlineExceededError, match="deadline_s"):
        await asyncckpt.diff(
            tmp_path / "a", tmp_path / "a", options=RestoreOptions(deadline_s=1e-9)
        )


async def test_runs_stand_for_their_newest_steps(tmp_path: Path) -> None:
    for name, last in (("a", 3), ("b", 7)):
        async with asyncckpt.Checkpointer(tmp_path / name) as run:
            await run.save(1, {"x": 0})
            await run.save(last, {"x": 5})
    report = await asyncckpt.diff(tmp_path / "a", tmp_path / "b")
    assert report.equal
    assert (report.first, report.second) == (str(tmp_path / "a" / "3"), str(tmp_path / "b" / "7"))


async def test_progress_and_cancelling(tmp_path: Path, leak_check: None) -> None:
    await asyncckpt.save(tmp_path / "a", {"x": numbers(3000, 3000)})
    seen: list[asyncckpt.Progress] = []
    await asyncckpt.diff(tmp_path / "a", tmp_path / "a", options=SMALL, progress=seen.append)
    assert [p.done_nbytes for p in seen] == sorted(p.done_nbytes for p in seen)
    assert (seen[-1].stage, seen[-1].done_nbytes) == ("diff", 36_000_000)
    task = asyncio.ensure_future(asyncckpt.diff(tmp_path / "a", tmp_path / "a"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
