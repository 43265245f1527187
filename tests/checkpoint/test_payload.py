"""Reading the payload bytes of chunks from arrays in shards, wherever their values are."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.adapters.numpy import NumpyAdapter
from asyncckpt.checkpoint import payload
from asyncckpt.checkpoint.payload import ArrayReader, gather
from asyncckpt.errors import DtypeMismatchError
from asyncckpt.options import CACHED_NBYTES
from asyncckpt.ports import Source
from asyncckpt.spec import DTYPES, ArraySpec, Box, ChunkGrid, Shard

SHAPE = (7, 6)


class Device(NumpyAdapter):
    """An adapter of values that are not in host memory; notes which boxes are fetched.

    The leaf of a source is the whole array, whatever its shards.
    """

    def __init__(self) -> None:
        self.fetched: list[tuple[int, Box]] = []

    def fetch(self, source: Source, shard: int, box: Box, out: np.ndarray[Any, Any]) -> None:
        self.fetched.append((shard, box))
        if source.shards is not None:
            box = Box(
                tuple(map(operator.add, box.offset, source.shards[shard].box.offset)), box.shape
            )
        super().fetch(source, 0, box, out)


@st.composite
def sources(draw: st.DrawFn) -> Source:
    """An array in shards: in C order, turned, or on a device, with an empty one."""
    dtype = draw(st.sampled_from(["float32", "bfloat16", "complex128"]))
    values = np.arange(42).reshape(SHAPE).astype(DTYPES[dtype])
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in SHAPE]
    boxes = [
        Box((a, c), (b - a, d - c))
        for (a, b), (c, d) in itertools.product(*map(itertools.pairwise, cuts))
    ]
    boxes.append(Box((0, 0), (0, 6)))
    shards, views = [], []
    for box in draw(st.permutations(boxes)):
        held = values[box.slices()].copy()
        where = draw(st.sampled_from(["c", "fortran", "device"]))
        shards.append(Shard(box))
        views.append({"c": held, "fortran": np.asfortranarray(held), "device": None}[where])
    spec = ArraySpec(SHAPE, dtype)
    return Source(spec, values, None, shards=tuple(shards), views=tuple(views), adapter=Device())


@given(sources(), st.data())
def test_any_box_is_read_from_the_shards_that_hold_it(source: Source, data: st.DataObject) -> None:
    stored = data.draw(st.sampled_from([source.spec.dtype, "complex128"]))
    reader = ArrayReader(source, stored, path="w")
    ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in SHAPE]
    box = Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
    out = np.full(box.shape, -1, DTYPES[stored])
    reader.read(box, out)
    np.testing.assert_array_equal(out, source.leaf[box.slices()].astype(DTYPES[stored]))
    # What is fetched lies in one shard each, and nothing is fetched twice.
    assert source.shards is not None
    assert isinstance(source.adapter, Device)
    fetched = source.adapter.fetched
    for shard, part in fetched:
        assert Box.whole(source.shards[shard].box.shape).intersect(part) == part
    assert len(set(fetched)) == len(fetched)


@given(sources())
def test_shards_in_c_order_are_read_as_runs_of_bytes(source: Source) -> None:
    assert source.shards is not None
    reader = ArrayReader(source, source.spec.dtype, path="w")
    for view, flat in zip(source.views, reader.flats, strict=True):
        assert (flat is not None) == (view is not None and view.flags.c_contiguous)
        if flat is not None:
            assert view is not None
            assert flat.tobytes() == view.tobytes()
            assert not view.size or np.shares_memory(flat, view)
    other = "float32" if source.spec.dtype != "float32" else "bfloat16"
    assert set(ArrayReader(source, other, path="w").flats) == {None}


@given(sources(), st.data())
def test_the_payload_of_a_piece_is_gathered_from_where_it_lies(
    source: Source, data: st.DataObject
) -> None:
    spec = source.spec
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in SHAPE)
    shape = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(SHAPE, offset, strict=True))
    grid = ChunkGrid(shape, tuple(data.draw(st.integers(1, n + 1)) for n in shape))
    reader = ArrayReader(source, spec.dtype, path="w")
    piece = source.leaf[Box(offset, shape).slices()]
    for cell in grid.cells():
        box = grid.box(cell)
        wanted = np.zeros(grid.chunk_shape, piece.dtype)
        wanted[tuple(map(slice, box.shape))] = piece[box.slices()]
        start = data.draw(st.integers(0, wanted.nbytes - 1))
        out = np.full(wanted.nbytes - start, 7, np.uint8)
        gather(
            reader.read,
            ArraySpec(shape, spec.dtype),
            grid,
            cell,
            start,
            wanted.nbytes,
            out,
            offset=offset,
        )
        assert out.tobytes() == wanted.tobytes()[start:]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_array_of_rank_0_is_read(dtype: str) -> None:
    value = np.asarray(2.5, np.float32)
    spec, device = ArraySpec((), "float32"), Device()
    for source in (
        Source(spec, value, value),
        Source(spec, value, None, adapter=device),
        Source(spec, value, None, shards=(Shard(Box((), ())),), views=(value,)),
        Source(spec, value, None, shards=(Shard(Box((), ())),), views=(None,), adapter=device),
    ):
        out = np.zeros((), DTYPES[dtype])
        ArrayReader(source, dtype, path="w").read(Box((), ()), out)
        assert out == 2.5


def test_values_are_fetched_for_a_cast_a_few_at_a_time() -> None:
    values = np.arange(3 * 1000 * 700).reshape(3, 1000, 700)
    adapter = Device()
    source = Source(ArraySpec(values.shape, "int64"), values, None, adapter=adapter)
    box = Box((1, 7, 0), (2, 900, 699))
    out = np.zeros(box.shape, np.float32)
    ArrayReader(source, "float32", path="w").read(box, out)
    np.testing.assert_array_equal(out, values[box.slices()].astype(np.float32))
    assert max(part.size * 8 for _, part in adapter.fetched) <= CACHED_NBYTES
    assert len(adapter.fetched) <= 1 + box.size * 8 // (CACHED_NBYTES // 2)


@pytest.mark.parametrize("kind", ["view", "device", "shards"])
def test_a_value_that_a_cast_would_lose_is_refused_where_it_is_read(kind: str) -> None:
    values = np.array([1, 2**40, 3], np.int64)
    spec = ArraySpec((3,), "int64")
    sources = {
        "view": Source(spec, values, values),
        "device": Source(spec, values, None, adapter=Device()),
        "shards": Source(
            spec,
            values,
            None,
            shards=(Shard(Box((0,), (1,))), Shard(Box((1,), (2,)))),
            views=(values[:1], values[1:]),
        ),
    }
    reader = ArrayReader(sources[kind], "int32", path="net/w")
    out = np.zeros(1, np.int32)
    for offset in (0, 2):
        reader.read(Box((offset,), (1,)), out)
        assert out[0] == offset + 1
    with pytest.raises(DtypeMismatchError, match=r"net/w: 1099511627776 does not fit into int32"):
        reader.read(Box((1,), (1,)), out)


def test_casts_that_lose_nothing_but_precision_look_at_no_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def look(*_: object) -> None:
        raise AssertionError("a second pass over the data")

    monkeypatch.setattr(payload, "check_values_fit", look)
    for dtype, stored in (
        ("float64", "float32"),
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("int32", "int64"),
        ("uint8", "int32"),
        ("int64", "float32"),
        ("bool", "int8"),
        ("complex128", "complex64"),
        ("float32", "complex64"),
    ):
        values = np.ones(4, DTYPES[dtype])
        source = Source(ArraySpec((4,), dtype), values, values)
        out = np.zeros(4, DTYPES[stored])
        ArrayReader(source, stored, path="w").read(Box((0,), (4,)), out)
        assert (out == 1).all()
