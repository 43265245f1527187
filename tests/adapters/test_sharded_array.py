from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import asyncckpt
from asyncckpt import ShardedArray, UsageError, errors
from asyncckpt.adapters.sharded_array import ShardedAdapter
from asyncckpt.spec import DTYPES, ArraySpec, Box, Shard
from tests.adapters.fetching import fetch_box

adapter = ShardedAdapter()


def numbers(*shape: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.arange(int(np.prod(shape))).reshape(shape).astype(DTYPES[dtype])


def halves(values: np.ndarray[Any, Any]) -> ShardedArray:
    """Its upper and lower half, as views."""
    n = values.shape[0] // 2
    rest = (0,) * (values.ndim - 1)
    shards = [((0, *rest), values[:n]), ((n, *rest), values[n:])]
    return ShardedArray(values.shape, values.dtype, shards)


# ----------------------------------------------------------------------------------- the value


def test_it_has_shape_dtype_and_shards_and_does_not_change() -> None:
    values = numbers(4, 3)
    array = halves(values)
    assert (array.shape, array.dtype) == ((4, 3), np.float32)
    assert [offset for offset, _ in array.shards] == [(0, 0), (2, 0)]
    assert all(np.shares_memory(part, values) for _, part in array.shards)
    for name in ("shape", "dtype", "shards"):
        with pytest.raises(AttributeError):
            setattr(array, name, None)
    with pytest.raises(AttributeError):
        array.other = 1  # type: ignore[attr-defined]


def test_nothing_assembles_it_without_being_asked() -> None:
    array = halves(numbers(4, 3))
    assert not hasattr(array, "__array__")
    assert not hasattr(array, "__array_interface__")
    np.testing.assert_array_equal(array.to_numpy(), numbers(4, 3))
    assert not np.shares_memory(array.to_numpy(), array.shards[0][1])


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (halves(numbers(4, 3)), "ShardedArray(float32[4,3], shards: 2, distinct boxes: 2)"),
        (
            ShardedArray.tiles(numbers(5, 3), (4, 4)),
            "ShardedArray(float32[5,3], shards: 16, distinct boxes: 9)",
        ),
        (
            ShardedArray((4, 3), "int8", [((1, 0), numbers(3, 3, dtype="int8"))]),
            "ShardedArray(int8[4,3], shards: 1, distinct boxes: 1; nothing holds [0:1, 0:3])",
        ),
    ],
)
def test_its_repr_says_what_it_holds(array: ShardedArray, text: str) -> None:
    assert repr(array) == text


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_named_as_numpy_or_zarr_name_it(name: str) -> None:
    values = numbers(6, dtype=name)
    for dtype in (name, DTYPES[name]):
        array = ShardedArray((6,), dtype, [((0,), values[:3]), ((3,), values[3:])])
        assert array.dtype == DTYPES[name]
        assert array.to_numpy().tobytes() == values.tobytes()


A = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("shards", "text"),
    [
        (None, "shards is a NoneType; pass pairs of an offset and an array"),
        ([A], r"shards\[0\] is not a pair of an offset and an array"),
        ([((0, 0), A), 7], r"shards\[1\] is not a pair"),
        ([((0, 0), [[1.0]])], r"shards\[0\] is a list; pass a NumPy array"),
        ([((0, 0), np.ma.masked_array(A, mask=True))], r"shards\[0\] is a MaskedArray"),
        ([((0, 0), A.astype(np.float64))], r"shards\[0\] has dtype float64, .* float32; convert"),
        ([((0, 0), A.astype(">f4"))], r"shards\[0\] has dtype >f4, the array has float32"),
        ([((0,), A)], r"shards\[0\] has shape \(2, 3\) at offset \(0,\), .* its rank"),
        ([((0, 0), A[0])], r"shards\[0\] has shape \(3,\) at offset \(0, 0\)"),
        ([((0, -1), A)], r"the offset of shards\[0\] is \(0, -1\)"),
        ([((0, 0.5), A)], r"the offset of shards\[0\] is"),
        ([((3, 0), A)], r"shards\[0\] holds \[3:5, 0:3\], which reaches past .* padded=True"),
        (
            [((0, 0), A), ((1, 0), A)],
            r"two shards hold \[0:2, 0:3\] and \[1:3, 0:3\], which overlap",
        ),
    ],
)
def test_a_shard_that_does_not_fit_is_named(shards: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        ShardedArray((4, 3), "float32", shards)


def test_shapes_and_dtypes_that_cannot_be_are_refused() -> None:
    for shape in ((-1,), (2.5,), (True,), 3, None, (1 << 63,)):
        with pytest.raises(UsageError, match=r"shape is .* non-negative ints"):
            ShardedArray(shape, "float32", [])  # type: ignore[arg-type]
    for dtype in (None, "float31", object, ">f4", "M8[s]", ml_dtypes.uint4, "f4,,", "\ud800"):
        with pytest.raises(UsageError, match=r"dtype .* cannot be stored; use one of"):
            ShardedArray((1,), dtype, [])


# ------------------------------------------------------------------------------ emulated meshes


@pytest.mark.parametrize("replicas", [0, -1, 1.5, True, None])
def test_tiles_have_at_least_one_replica(replicas: Any) -> None:
    with pytest.raises(UsageError, match=r"replicas=.*: pass the number of shards that hold each"):
        ShardedArray.tiles((4,), (2,), dtype="float32", replicas=replicas)


@pytest.mark.parametrize(
    ("shape", "mesh", "tile", "held"),
    [
        ((128, 64), (4, 1), (32, 64), [4, 1]),
        ((10, 6), (4, 4), (3, 2), [4, 3]),
        ((5, 3), (4, 4), (2, 1), [3, 3]),
        ((5, 3), (4, 1), (2, 3), [3, 1]),
        ((3,), (8,), (1,), [3]),
        ((), (), (), []),
    ],
)
def test_tiles_are_of_one_size_and_those_beyond_the_edge_hold_nothing(
    shape: tuple[int, ...], mesh: tuple[int, ...], tile: tuple[int, ...], held: list[int]
) -> None:
    values = np.asarray(numbers(*shape) + 1)
    array = ShardedArray.tiles(values, mesh)
    assert [part.shape for _, part in array.shards] == [tile] * int(np.prod(mesh))
    source = adapter.source("p", array)
    boxes = source.shards or (None,)
    assert len(boxes) == int(np.prod(held))
    np.testing.assert_array_equal(array.to_numpy(), values)
    # What is outside is zero, and every tile has its own memory.
    assert sum(part.sum(dtype=np.float64) for _, part in array.shards) == values.sum()
    assert not any(np.shares_memory(part, values) for _, part in array.shards)


def test_tiles_of_a_shape_are_zeros_and_replicas_are_alike() -> None:
    array = ShardedArray.tiles((6, 4), (2, 2), dtype="bfloat16", replicas=3)
    assert len(array.shards) == 12
    assert array.dtype == ml_dtypes.bfloat16
    assert not array.to_numpy().any()
    assert len({offset for offset, _ in array.shards}) == 4
    parts = [part for _, part in array.shards]
    assert not any(np.shares_memory(a, b) for i, a in enumerate(parts) for b in parts[:i])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (((6, 4), (2, 2)), "pass a NumPy array, or a shape and dtype="),
        ((A, (2,)), r"mesh_shape=\(2,\) for shape \(2, 3\)"),
        ((A, (2, 0)), r"mesh_shape=\(2, 0\)"),
        ((A, (2, -1)), "mesh_shape is"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(arguments: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        ShardedArray.tiles(*arguments)
    with pytest.raises(UsageError, match="pass a NumPy array, or"):
        ShardedArray.tiles(A, (1, 1), dtype="float32")
    with pytest.raises(UsageError, match="masked arrays cannot be stored"):
        ShardedArray.tiles(np.ma.masked_equal(A, 1), (1, 1))  # its mask would be lost


# ------------------------------------------------------------------------------------ saving it


def test_the_source_views_the_shards_and_never_the_whole() -> None:
    values = numbers(6, 4)
    source = adapter.source("p", halves(values))
    assert (source.spec, source.view) == (ArraySpec((6, 4), "float32"), None)
    assert source.shards is not None
    assert [shard.box for shard in source.shards] == [Box((0, 0), (3, 4)), Box((3, 0), (3, 4))]
    for shard, view in zip(source.shards, source.views, strict=True):
        assert view is not None
        assert np.shares_memory(view, values)
        np.testing.assert_array_equal(view, values[shard.box.slices()])


def test_padding_empty_shards_and_further_replicas_are_no_part_of_the_source() -> None:
    array = ShardedArray.tiles(numbers(5, 3), (4, 4), replicas=2)
    source = adapter.source("p", array)
    assert source.shards is not None
    assert len(source.shards) == len(source.views) == 9
    assert sum(shard.box.size for shard in source.shards) == 15
    assert [view.shape for view in source.views if view is not None] == [
        shard.box.shape for shard in source.shards
    ]


def test_equal_layouts_have_one_object_of_shards() -> None:
    # Which makes it cheap to compare the schemas of two saves.
    one, other = (adapter.source("p", halves(numbers(6, 4))) for _ in range(2))
    assert one.shards is other.shards


def test_one_shard_that_is_all_of_it_is_an_ordinary_array() -> None:
    values = numbers(3, 4)
    for array in (
        ShardedArray((3, 4), "float32", [((0, 0), values), ((0, 0), values.copy())]),
        ShardedArray((3, 4), "float32", [((3, 4), A), ((0, 0), values)], padded=True),
    ):
        source = adapter.source("p", array)
        assert source.shards is None
        assert source.view is values
    empty = adapter.source("p", ShardedArray((0, 4), "float32", []))
    assert empty.view is not None
    assert (empty.shards, empty.view.shape) == (None, (0, 4))


def test_shards_that_leave_a_gap_are_a_part_of_the_array() -> None:
    array = ShardedArray((4, 3), "float32", [((2, 0), A)])
    source = adapter.source("a/b", array)
    assert source.partial
    assert source.view is None
    assert source.shards == (Shard(Box((2, 0), (2, 3))),)
    assert source.views[0] is A
    with pytest.raises(UsageError, match=r"leave gaps: nothing holds \[0:2, 0:3\]"):
        array.to_numpy()


def test_a_padded_tile_is_a_part_of_the_array_without_its_padding() -> None:
    values = numbers(5, 3)
    whole = ShardedArray.tiles(values, (4, 2))
    assert not adapter.source("p", whole).partial
    for offset, tile in whole.shards:
        source = adapter.source("p", ShardedArray((5, 3), "float32", [(offset, tile)], padded=True))
        assert source.partial
        for shard, view in zip(source.shards or (), source.views, strict=True):
            assert view is not None
            assert np.shares_memory(view, tile)
            np.testing.assert_array_equal(view, values[shard.box.slices()])
            out = np.empty(shard.box.shape, np.float32)
            fetch_box(adapter, source, shard.box, out)
            np.testing.assert_array_equal(out, view)
    beyond = adapter.source("p", ShardedArray((5, 3), "float32", []))
    assert (beyond.partial, beyond.shards, beyond.views) == (True, (), ())


def test_arrays_of_one_memory_and_one_layout_are_tied_and_no_others() -> None:
    values = numbers(6, 4)
    identity = adapter.source("p", halves(values)).identity
    assert identity == adapter.source("q", halves(values)).identity
    assert identity is not None
    others = [
        halves(values.copy()),
        ShardedArray((6, 4), "float32", [((0, 0), values[:2]), ((2, 0), values[2:])]),
        ShardedArray((6, 4), "float32", [((3, 0), values[:3]), ((0, 0), values[3:])]),
        ShardedArray((6, 4), "int32", [(o, p.view(np.int32)) for o, p in halves(values).shards]),
    ]
    assert all(adapter.source("p", other).identity != identity for other in others)
    assert adapter.source("p", ShardedArray((0,), "int8", [])).identity is None


@given(st.data())
def test_any_box_can_be_fetched(data: st.DataObject) -> None:
    shape = (7, 5)
    values = numbers(*shape)
    mesh = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    array = ShardedArray.tiles(values, mesh, replicas=data.draw(st.integers(1, 2)))
    ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    box = Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
    out = np.full(box.shape, -1, np.float32)
    fetch_box(adapter, adapter.source("p", array), box, out)
    np.testing.assert_array_equal(out, values[box.slices()])


# --------------------------------------------------------------------------------- restoring it


def parts_of(target: Any, values: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    return [values[box.slices()].copy() for box in target.boxes]


def test_like_gives_a_new_array_with_the_same_boxes() -> None:
    like = ShardedArray.tiles((5, 3), (4, 2), dtype="float32", replicas=2)
    before = [part.copy() for _, part in like.shards]
    values = numbers(5, 3) + 1
    target = adapter.target("p", like, in_place=False)
    assert target.buffers == ()
    assert len(target.boxes or ()) == 6
    parts = parts_of(target, values)
    made = adapter.place(target, parts)
    assert type(made) is ShardedArray
    np.testing.assert_array_equal(made.to_numpy(), values)
    assert [(o, p.shape) for o, p in made.shards] == [(o, p.shape) for o, p in like.shards]
    # Replicas are equal and apart, padding is zero, and what was restored is not copied again.
    wanted = ShardedArray.tiles(values, (4, 2), replicas=2)
    for (_, a), (_, b) in zip(made.shards, wanted.shards, strict=True):
        np.testing.assert_array_equal(a, b)
    held = [part for _, part in made.shards]
    assert not any(np.shares_memory(a, b) for i, a in enumerate(held) for b in held[:i])
    full = [part for part in parts if part.shape == (2, 2)]
    assert all(any(part is held_part for held_part in held) for part in full)
    for (_, part), old in zip(like.shards, before, strict=True):
        np.testing.assert_array_equal(part, old)


def test_in_place_fills_the_shards_and_their_replicas_and_leaves_padding_alone() -> None:
    leaf = ShardedArray.tiles((5, 3), (4, 2), dtype="int32", replicas=2)
    for _, part in leaf.shards:
        part.fill(-7)
    target = adapter.target("p", leaf, in_place=True)
    values = numbers(5, 3, dtype="int32")
    for buffer, part in zip(target.buffers, parts_of(target, values), strict=True):
        buffer[...] = part
    assert adapter.place(target, target.buffers) is leaf
    for offset, part in leaf.shards:
        inside = values[Box(offset, part.shape).slices()]
        wanted = np.full(part.shape, -7, np.int32)
        wanted[tuple(map(slice, inside.shape))] = inside
        np.testing.assert_array_equal(part, wanted)


def test_a_target_may_leave_gaps() -> None:
    like = ShardedArray((4, 3), "float32", [((2, 0), A), ((4, 0), A)], padded=True)
    target = adapter.target("p", like, in_place=False)
    assert target.boxes == (Box((2, 0), (2, 3)),)
    made = adapter.place(target, [numbers(2, 3)])
    np.testing.assert_array_equal(made.shards[0][1], numbers(2, 3))
    assert made.shards[1][1].shape == (2, 3)


def test_shards_that_cannot_be_filled_are_refused() -> None:
    values = numbers(4, 3)
    values.flags.writeable = False
    with pytest.raises(errors.UnsupportedLeafError, match="p: shard 0 is read-only"):
        adapter.target("p", halves(values), in_place=True)
    adapter.target("p", halves(values), in_place=False)
    twice = np.broadcast_to(np.zeros(3, np.float32), (2, 3))
    twice.flags.writeable = True
    shards = [((0, 0), A.copy()), ((2, 0), twice)]
    with pytest.raises(errors.UnsupportedLeafError, match="elements of shard 1 share memory"):
        adapter.target("p", ShardedArray((4, 3), "float32", shards), in_place=True)


@pytest.mark.parametrize(
    "shards",
    [
        # One buffer for two boxes; parts of one; one turned.
        lambda m: [((0, 0), m[:2]), ((2, 0), m[:2])],
        lambda m: [((0, 0), m[:2]), ((2, 0), m[1:3])],
        lambda m: [((0, 0), m[:2]), ((2, 0), m[2:0:-1])],
        # Replicas that overlap, but not element by element.
        lambda m: [((0, 0), m[:2]), ((0, 0), m[1:3]), ((2, 0), m[4:])],
    ],
)
def test_shards_that_overlap_in_memory_are_refused(shards: Any) -> None:
    leaf = ShardedArray((4, 3), "float32", shards(numbers(6, 3)))
    with pytest.raises(errors.UnsupportedLeafError, match=r"p: shards \d and \d share memory"):
        adapter.target("p", leaf, in_place=True)


def test_shards_that_lie_close_in_memory_are_filled() -> None:
    memory = np.zeros((4, 6), np.float32)
    columns = [((0, i), memory[:, i : i + 2]) for i in (0, 2, 4)]
    # Interleaved in memory, and one replica that is the same memory.
    leaf = ShardedArray((4, 6), "float32", [*columns, columns[1]])
    target = adapter.target("p", leaf, in_place=True)
    values = numbers(4, 6)
    for buffer, part in zip(target.buffers, parts_of(target, values), strict=True):
        buffer[...] = part
    adapter.place(target, target.buffers)
    np.testing.assert_array_equal(memory, values)


# ------------------------------------------------------------------------------------- the set


def test_the_adapter_is_there_once_a_sharded_array_can_be() -> None:
    code = (
        "import asyncckpt, asyncckpt.adapters as a;"
        "names = lambda: [type(x).__name__ for x in a.adapters_for_loaded_frameworks().adapters];"
        "print(names()); asyncckpt.ShardedArray; print(names())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split("\n")
    assert found[:2] == ["['NumpyAdapter']", "['NumpyAdapter', 'ShardedAdapter']"]
    assert asyncckpt.ShardedArray is ShardedArray
    assert "ShardedArray" in asyncckpt.__all__
