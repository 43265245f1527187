from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt import errors
from asyncckpt.adapters.arrays import Place, host_span, may_overlap_itself, overlapping
from asyncckpt.adapters.numpy import NumpyAdapter
from asyncckpt.spec import DTYPES, ArraySpec, Box

adapter = NumpyAdapter()


def values(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    count = int(np.prod(shape))
    numbers = np.arange(count) % 7 + (name == "float8_e8m0fnu")  # which has no zero
    return np.array(numbers.reshape(shape).astype(DTYPES[name]))


LAYOUTS = {
    "rank 0": lambda n: values(n, ()),
    "empty": lambda n: values(n, (0, 3)),
    "plain": lambda n: values(n, (3, 4)),
    "fortran": lambda n: np.asfortranarray(values(n, (3, 4))),
    "reversed": lambda n: values(n, (3, 4))[::-1, ::-2],
    "sliced": lambda n: values(n, (6, 8))[1::2, ::3],
    "transposed": lambda n: values(n, (2, 3, 4)).transpose(2, 0, 1),
    "broadcast": lambda n: np.broadcast_to(values(n, (4,)), (3, 4)),
    "matrix": lambda n: values(n, (3, 4)).view(np.matrix),
}


def boxes(shape: tuple[int, ...]) -> list[Box]:
    whole = Box.whole(shape)
    part = Box(tuple(n // 3 for n in shape), tuple(n - n // 3 for n in shape))
    return [whole, part]


@st.composite
def views(draw: st.DrawFn) -> list[np.ndarray[Any, Any]]:
    """Views of one matrix: blocks with steps, rows, columns and single elements."""
    memory = np.zeros((6, 8), np.int16)
    number = st.integers(-8, 8)
    slices = st.builds(slice, number, number, st.sampled_from([1, 2, 3, -1]))
    index = st.tuples(st.one_of(slices, st.integers(0, 5)), st.one_of(slices, st.integers(0, 7)))
    return [memory[(*chosen, ...)] for chosen in draw(st.lists(index, max_size=8))]


@given(views())
def test_all_pairs_that_share_memory_are_candidates(views: list[np.ndarray[Any, Any]]) -> None:
    pairs = list(overlapping([Place.of(view) for view in views]))
    assert len(pairs) == len(set(pairs))
    for (n, one), (m, other) in itertools.combinations(enumerate(views), 2):
        assert (n, m) in pairs or not np.shares_memory(one, other)


def test_different_columns_of_a_matrix_are_no_candidates() -> None:
    memory = np.zeros((50, 40))
    columns = [Place.of(memory[:, n]) for n in range(40)]
    assert list(overlapping(columns)) == []
    assert list(overlapping([*columns, columns[3]])) == [(3, 40)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_and_layout_round_trips(name: str, layout: str) -> None:
    leaf = LAYOUTS[layout](name)
    source = adapter.source("p", leaf)
    assert source.spec == ArraySpec(leaf.shape, name)
    assert source.view is not None
    assert source.view.dtype == DTYPES[name]
    assert type(source.view) is np.ndarray
    assert not leaf.size or np.shares_memory(source.view, leaf)
    plain = np.asarray(leaf)
    for box in boxes(leaf.shape):
        out = np.empty(box.shape, DTYPES[name])
        adapter.fetch(source, 0, box, out)
        np.testing.assert_array_equal(out, plain[box.slices()])

    target = adapter.target("p", leaf, in_place=False)
    restored = np.empty(target.spec.shape, DTYPES[target.spec.dtype])
    restored[...] = plain
    placed = adapter.place(target, [restored])
    assert placed is restored
    assert adapter.leaf("p", restored, {}) is restored

    if leaf.flags.writeable and layout != "broadcast":
        zeros = np.zeros_like(leaf, subok=True)
        filled = zeros[::-1] if leaf.ndim else zeros
        target = adapter.target("p", filled, in_place=True)
        (memory,) = target.buffers
        memory[...] = plain
        assert adapter.place(target, target.buffers) is filled
        np.testing.assert_array_equal(np.asarray(filled), plain)


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c16", ">u2"])
def test_byte_order_is_normalised_and_given_back(dtype: str) -> None:
    leaf = np.arange(6).astype(dtype).reshape(2, 3)
    source = adapter.source("p", leaf)
    assert source.view is None
    out = np.empty((2, 2), DTYPES[source.spec.dtype])
    adapter.fetch(source, 0, Box((0, 1), (2, 2)), out)
    np.testing.assert_array_equal(out, leaf[:, 1:])
    target = adapter.target("p", leaf, in_place=False)
    restored = adapter.place(target, [leaf.astype(DTYPES[source.spec.dtype])])
    assert restored.dtype == leaf.dtype
    np.testing.assert_array_equal(restored, leaf)

    empty = np.zeros_like(leaf)
    target = adapter.target("p", empty, in_place=True)
    assert target.buffers == ()
    assert adapter.place(target, [leaf.astype(DTYPES[source.spec.dtype])]) is empty
    np.testing.assert_array_equal(empty, leaf)


@pytest.mark.parametrize(
    "scalar", [np.float32(1.5), np.int64(-3), np.bool_(True), np.complex64(2j)]
)
def test_numpy_scalars_are_rank_0_arrays(scalar: Any) -> None:
    source = adapter.source("p", scalar)
    assert source.spec.shape == ()
    assert source.identity is None
    assert source.view is not None
    assert source.view[()] == scalar
    for in_place in (False, True):
        target = adapter.target("p", scalar, in_place=in_place)
        assert target.buffers == ()
        placed = adapter.place(target, [np.asarray(scalar)])
        assert type(placed) is type(scalar)
        assert placed == scalar


def test_memory_maps_are_viewed_and_filled(tmp_path: Path) -> None:
    leaf = np.memmap(tmp_path / "x", np.float32, "w+", shape=(3, 4))
    leaf[:] = 1
    source = adapter.source("p", leaf)
    assert source.view is not None
    assert np.shares_memory(source.view, leaf)
    target = adapter.target("p", leaf, in_place=True)
    (memory,) = target.buffers
    memory[:] = 2
    assert leaf[2, 3] == 2


def test_a_matrix_is_filled_in_place_and_otherwise_becomes_a_plain_array() -> None:
    leaf, part = np.ones((2, 3)).view(np.matrix), np.zeros((2, 3))
    assert adapter.place(adapter.target("p", leaf, in_place=False), [part]) is part
    target = adapter.target("p", leaf, in_place=True)
    assert adapter.place(target, target.buffers) is leaf


@pytest.mark.parametrize(
    ("leaf", "found", "cast"),
    [
        (np.ma.masked_array([1, 2], [0, 1]), "masked arrays", "x.mask"),
        (np.array([None]), "object", "astype"),
        (np.array(["2020"], "datetime64[D]"), r"datetime64\[D\]", "astype('int64')"),
        (np.array([1], "timedelta64[s]"), "timedelta64", "astype('int64')"),
        (np.array(["ab"]), "str64", "x.tolist()"),
        (np.array([b"ab"]), "bytes16", "x.tolist()"),
        (np.str_("ab"), "str64", "x.tolist()"),
        (np.zeros(1, [("a", "f4")]), "void32", "one array per field"),
        (np.zeros(3, [("float0", "V")]), "numpy dtype float0 ", "holds no data, so leave it out"),
        (np.zeros(1, "V3"), "void24", "x.view('uint8')"),
        (np.zeros(1, np.longdouble), "(float128|longdouble)", "cast it to float64"),
        (np.zeros(1, np.clongdouble), "(complex256|clongdouble)", "cast it to complex128"),
        (np.zeros(1, ml_dtypes.uint4), "uint4", "cast it to uint8"),
        (np.zeros(1, ml_dtypes.uint2), "uint2", "cast it to uint8"),
        (np.zeros(1, ml_dtypes.float8_e4m3), "float8_e4m3", "cast it to bfloat16"),
        (np.zeros(1, ml_dtypes.float6_e2m3fn), "float6_e2m3fn", "cast it to float8_e4m3fn"),
        (np.zeros(1, ml_dtypes.float6_e3m2fn), "float6_e3m2fn", "cast it to float8_e4m3fn"),
    ],
)
def test_what_zarr3_cannot_store_is_refused_with_a_cast(leaf: Any, found: str, cast: str) -> None:
    for call in (
        lambda: adapter.source("a/b", leaf),
        lambda: adapter.target("a/b", leaf, in_place=False),
    ):
        with pytest.raises(errors.UnsupportedLeafError, match=f"^a/b: .*{found}") as e:
            call()
        assert cast in str(e.value)
        assert e.value.path == "a/b"


@pytest.mark.parametrize(
    ("source", "cast"),
    [
        ("float6_e2m3fn", "float8_e4m3fn"),
        ("float6_e3m2fn", "float8_e4m3fn"),
        ("float8_e4m3", "bfloat16"),
    ],
)
def test_the_suggested_casts_keep_every_value(source: str, cast: str) -> None:
    bits = np.arange(256, dtype=np.uint8)
    if source.startswith("float6"):
        bits = bits[: 2 ** int(source[5])]
    before = bits.view(getattr(ml_dtypes, source)).astype(np.float64)
    after = before.astype(DTYPES[cast]).astype(np.float64)
    np.testing.assert_array_equal(before, after)


def test_read_only_and_overlapping_arrays_cannot_be_filled() -> None:
    leaf = np.zeros(3)
    leaf.flags.writeable = False
    with pytest.raises(errors.UnsupportedLeafError, match="p: this array is read-only"):
        adapter.target("p", leaf, in_place=True)
    adapter.target("p", leaf, in_place=False)
    for view in (
        np.lib.stride_tricks.as_strided(np.zeros(3), (4, 3), (0, 8)),
        np.lib.stride_tricks.as_strided(np.zeros(5), (3, 3), (8, 8)),
    ):
        with pytest.raises(errors.UnsupportedLeafError, match="share memory"):
            adapter.target("p", view, in_place=True)
    assert not may_overlap_itself((3, 4, 2), (8, -24, 96), 8)


def test_leaves_are_tied_only_when_they_are_one_box_of_one_memory() -> None:
    base = np.zeros((4, 4))
    same = [base, base[:], base[0:4], base.reshape(16).reshape(4, 4)]
    assert len({adapter.source("p", leaf).identity for leaf in same}) == 1
    other = [
        base[:2],
        base[2:],
        base.T,
        base.reshape(16),
        base.view(np.int64),
        base[::-1],
        base.copy(),
    ]
    identities = [adapter.source("p", leaf).identity for leaf in [base, *other]]
    assert len(set(identities)) == len(identities)
    assert adapter.source("p", np.zeros((0, 3))).identity is None
    borrowed = np.frombuffer(bytearray(32))
    same = [borrowed, borrowed[:], borrowed[:][:]]
    assert len({adapter.source("p", leaf).identity for leaf in same}) == 1


def test_the_place_of_an_array_says_which_bytes_it_covers() -> None:
    base = np.zeros(10, np.float32)
    start = base.ctypes.data
    assert host_span(base[2:4]) == (start + 8, start + 16)
    assert host_span(base[::-3]) == (start, start + 40)
    assert host_span(base[4:4])[0] == host_span(base[4:4])[1]
