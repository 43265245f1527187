"""What a restore says it has read, and what for."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

import asyncckpt
from asyncckpt import LeafOptions, RestoreOptions, RestoreReport, SaveOptions, ShardedArray
from asyncckpt.flow.buffers import SlotPool
from asyncckpt.options import KIB, MIB
from asyncckpt.restore.fetch import Fetch

EXPLAIN = RestoreOptions(explain=True)


def columns(array: np.ndarray, first: int, stop: int) -> ShardedArray:
    """A target for some columns of an array, of which this process wants no others."""
    part = np.zeros((array.shape[0], stop - first), array.dtype)
    return ShardedArray(array.shape, array.dtype, [((0, first), part)])


async def test_a_part_of_a_large_array_is_explained(tmp_path: Path) -> None:
    table = np.arange(2048 * 1024, dtype=np.float32).reshape(2048, 1024)
    rows = SaveOptions(leaf_options=lambda *_: LeafOptions(chunk_shape=(1024, 1024)))
    await asyncckpt.save(tmp_path / "x", {"table": table, "step": 3}, options=rows)
    target = {"table": columns(table, 256, 512), "step": 0}
    report = await asyncckpt.restore_into(tmp_path / "x", target, options=EXPLAIN)
    assert [str(i) for one in report.reads for i in one.items] == [
        "table[0:1024, 256:512] 1.0 MiB",
        "table[1024:2048, 256:512] 1.0 MiB",
    ]
    wanted_nbytes = sum(one.wanted_nbytes for one in report.reads)
    assert wanted_nbytes == 2 * MIB
    assert 8 * MIB <= sum(one.nbytes for one in report.reads) == report.read_nbytes < 8.1 * MIB
    for one in report.reads:
        data = (tmp_path / "x" / one.file).read_bytes()
        assert 0 <= one.offset < one.offset + one.nbytes <= len(data)
        for item in one.items:
            chunk = data[item.chunk_offset : item.chunk_offset + item.chunk_nbytes - 4]
            assert chunk == table[item.offset[0] : item.offset[0] + 1024].tobytes()
        assert str(one).startswith(f"{one.file} {one.offset}:{one.offset + one.nbytes}, ")
    assert "reads" not in repr(report)


async def test_pieces_are_explained_in_coordinates_of_their_leaf(tmp_path: Path) -> None:
    table = np.arange(130 * 1000, dtype=np.float64).reshape(130, 1000)
    cuts = [(0, 100), (100, 117), (117, 130)]
    source = ShardedArray(table.shape, "float64", [((a, 0), table[a:b].copy()) for a, b in cuts])
    await asyncckpt.save(tmp_path / "x", {"w": source})
    reports: list[RestoreReport] = []
    await asyncckpt.restore(
        tmp_path / "x",
        like={"w": ShardedArray(table.shape, "float64", [((90, 0), np.zeros((30, 1000)))])},
        options=EXPLAIN,
        on_report=reports.append,
    )
    read = [item for one in reports[0].reads for item in one.items]
    rows = sorted((item.offset[0], item.offset[0] + item.shape[0]) for item in read)
    assert rows[0][0] == 90 and rows[-1][1] == 120
    assert all(a[1] == b[0] for a, b in itertools.pairwise(rows))
    assert {item.path for item in read} == {"w"}


async def test_a_small_leaf_is_read_from_the_index_and_an_empty_one_not(
    tmp_path: Path,
) -> None:
    await asyncckpt.save(tmp_path / "x", {"bias": np.ones(3), "none": np.ones((0, 3))})
    reports: list[RestoreReport] = []
    await asyncckpt.restore(tmp_path / "x", options=EXPLAIN, on_report=reports.append)
    ((index,),) = [one.items for one in reports[0].reads]
    assert (index.path, index.wanted_nbytes, index.chunk_nbytes) == ("bias", 24, 28)
    assert reports[0].reads[0].file.endswith("-index")


async def test_nothing_is_computed_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("explained")

    monkeypatch.setattr(Fetch, "explained", never)
    await asyncckpt.save(tmp_path / "x", {"w": np.ones(1 << 18)})
    reports: list[RestoreReport] = []
    await asyncckpt.restore(tmp_path / "x", on_report=reports.append)
    assert reports[0].reads == ()


@pytest.fixture
def acquired(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the budget that are acquired outside of slots."""
    found: list[int] = []
    acquire = SlotPool.acquire

    async def noted(self: SlotPool, nbytes: int) -> None:
        found.append(nbytes)
        await acquire(self, nbytes)

    monkeypatch.setattr(SlotPool, "acquire", noted)
    return found


@pytest.mark.parametrize("layers", (1, 12))
async def test_small_arrays_between_large_ones_are_read_with_them(
    layers: int, tmp_path: Path, acquired: list[int]
) -> None:
    """As in layers of a model; what they need beside their destinations counts in the budget."""
    rng = np.random.default_rng(0)
    sizes = {"a": 1408 * KIB, "b": 1408 * KIB, "c": 12 * KIB, "d": 12 * KIB}
    tree = {
        f"{layer:02}{name}": rng.integers(0, 256, nbytes, np.uint8)
        for layer in range(layers)
        for name, nbytes in sizes.items()
    }
    await asyncckpt.save(tmp_path / "x", tree)
    into = {key: np.empty_like(value) for key, value in tree.items()}
    report = await asyncckpt.restore_into(tmp_path / "x", into, options=EXPLAIN)
    assert all(np.array_equal(into[key], value) for key, value in tree.items())
    assert report.reads is not None
    assert len(report.reads) == (1 if layers == 1 else 4)
    large = [sum(i.wanted_nbytes for i in r.items if i.wanted_nbytes > MIB) for r in report.reads]
    together = [(read.nbytes, into) for read, into in zip(report.reads, large, strict=True) if into]
    assert sum(acquired) == sum(nbytes - into for nbytes, into in together)


async def test_what_is_not_wanted_between_arrays_counts_in_the_budget(
    tmp_path: Path, acquired: list[int]
) -> None:
    tree = {
        f"{n:02}{k}": np.full(s * KIB, n, np.uint8)
        for n in range(20)
        for k, s in (("a", 64), ("b", 48))
    }
    await asyncckpt.save(tmp_path / "x", tree)
    reports: list[RestoreReport] = []
    found = await asyncckpt.restore(
        tmp_path / "x", include="*a", options=EXPLAIN, on_report=reports.append
    )
    assert [int(values[0]) for values in found.values()] == list(range(20))
    (read,) = reports[0].reads
    assert read.nbytes > 20 * 64 * KIB + 19 * 48 * KIB
    assert acquired == [read.nbytes - 20 * 64 * KIB]
