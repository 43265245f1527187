"""Which ranges one call reads: every batch once, and never two where one slot is."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import asyncckpt
from asyncckpt import LeafOptions, RestoreOptions, SaveOptions
from asyncckpt.options import KIB, MIB
from asyncckpt.planning.restore import Part, ReadBatch
from asyncckpt.planning.table import Table
from asyncckpt.ports import StoreCapabilities
from asyncckpt.restore import ranges as runs
from asyncckpt.restore.ranges import Read, reads_of, span
from asyncckpt.save import plan_cache as layout
from asyncckpt.stores.objects.files import ObjectFiles
from tests.simulator import simulator

GAP = 64 * KIB
LARGE = 256 * KIB
"""Batches of this size and more need no slot here."""

sizes = st.one_of(st.integers(1, 64 * KIB), st.integers(LARGE, 24 * MIB))
gaps = st.sampled_from((0, 0, 0, 4096, GAP, GAP + 1))


def batches(lengths: Sequence[tuple[int, int]], per_file: int) -> list[ReadBatch]:
    """A batch for every (length, gap behind it), so many of them in every file."""
    made: list[ReadBatch] = []
    offset = 0
    for number, (nbytes, gap) in enumerate(lengths):
        if number % per_file == 0:
            offset = 0
        columns = [np.array([value], np.int64) for value in (number, number, 0, nbytes)]
        parts = Table(Part, columns, 0, 1)
        made.append(ReadBatch(number // per_file, offset, nbytes, parts, False))
        offset += nbytes + gap
    return made


def needs_no_slot(batch: ReadBatch) -> bool:
    return batch.nbytes >= LARGE


def check(reads: Sequence[Read], all_batches: Sequence[ReadBatch], most: int) -> None:
    found = sorted((b.file, b.offset) for read in reads for b in read.batches)
    assert found == [(b.file, b.offset) for b in all_batches]
    for read in reads:
        assert read.together or len(read.batches) == 1
        assert read.together or not needs_no_slot(read.batches[0])
        assert len({b.file for b in read.batches}) == 1
        assert list(read.batches) == sorted(read.batches, key=lambda b: b.offset)
        assert span(read.batches) <= most or len(read.batches) == 1


FAR = StoreCapabilities(read_copies=1, read_gap_nbytes=GAP)


@given(
    st.lists(st.tuples(sizes, gaps), max_size=60), st.integers(1, 30), st.sampled_from((1, 4, 64))
)
def test_every_batch_is_in_one_read_and_only_those_without_slots_go_together(
    lengths: list[tuple[int, int]], per_file: int, streams: int
) -> None:
    made = batches(lengths, per_file)
    reads = reads_of(made, needs_no_slot, StoreCapabilities(read_gap_nbytes=GAP), streams)
    check(reads, made, 36 * MIB)
    assert [b for read in reads for b in read.batches] == made


@given(
    st.lists(st.tuples(sizes, gaps), max_size=60), st.integers(1, 30), st.sampled_from((1, 4, 64))
)
def test_far_away_the_longest_is_read_first(
    lengths: list[tuple[int, int]], per_file: int, streams: int
) -> None:
    made = batches(lengths, per_file)
    reads = reads_of(made, needs_no_slot, FAR, streams)
    check(reads, made, 18 * MIB)
    spans = [span(read.batches) for read in reads]
    assert spans == sorted(spans, reverse=True)


@pytest.mark.parametrize("streams", (1, 8, 12, 32))
@pytest.mark.parametrize("per_file", (16, 32, 64))
@pytest.mark.parametrize("count", (64, 256, 530, 1060))
def test_all_streams_have_something_to_read_to_the_end(
    count: int, per_file: int, streams: int
) -> None:
    """66 files of 16 MiB are no two turns of 32 streams and a third for two of them alone."""
    reads = reads_of(batches([(MIB, 0)] * count, per_file), needs_no_slot, FAR, streams)
    free = [0] * streams
    for read in reads:
        heapq.heapreplace(free, free[0] + span(read.batches))
    assert max(free) - min(free) <= 9 * MIB
    assert len(reads) <= count // 8
    spans = [span(read.batches) for read in reads]
    assert spans[0] >= min(15 * MIB, count * MIB // streams)
    assert min(spans) >= min(5, count % per_file or 5) * MIB


@pytest.mark.parametrize("threads", (4, 6))
def test_the_last_reads_of_a_disk_are_short(threads: int) -> None:
    reads = reads_of(batches([(MIB, 0)] * 1024, 512), needs_no_slot, StoreCapabilities(), threads)
    free = [0] * threads
    for read in reads:
        heapq.heapreplace(free, free[0] + span(read.batches))
    assert max(free) - min(free) <= 9 * MIB
    assert [span(read.batches) for read in reads[:8]] == [32 * MIB] * 8


def mixed(rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    """Leaves of all sizes around those at which something is read in another way."""
    large = [int(rng.integers(16 * KIB, 400 * KIB)) for _ in range(rng.integers(1, 8))]
    small = [int(2 ** rng.uniform(4, 14)) for _ in range(rng.integers(0, 40))]
    lengths = np.array(large + small)
    rng.shuffle(lengths)
    return {f"{n:02d}": rng.integers(0, 9, length, np.uint8) for n, length in enumerate(lengths)}


@pytest.mark.parametrize("where", ("disk", "objects"))
@pytest.mark.parametrize("level", (None, 1))
async def test_leaves_of_any_mixture_of_sizes_are_restored(
    where: str, level: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes at which runs begin, end and are cut are small here, so that few bytes do."""
    monkeypatch.setattr(layout, "ALIGNED_CHUNK_NBYTES", 16 * KIB)
    monkeypatch.setattr(runs, "RUN_NBYTES", 256 * KIB)
    monkeypatch.setattr(runs, "LOCAL_RUN_NBYTES", 256 * KIB)
    monkeypatch.setattr(runs, "RUN_MIN_NBYTES", 64 * KIB)
    monkeypatch.setattr(runs, "ASIDE_NBYTES", 16 * KIB)
    monkeypatch.setattr(runs, "SPAN_NBYTES", 1 * MIB)
    save = SaveOptions(compression="zstd" if level else None)
    restore = RestoreOptions(concurrency=3)
    with simulator() as sim:
        url = tmp_path / "run" if where == "disk" else "s3://bucket/run"
        async with asyncckpt.Checkpointer(
            url,
            save_options=save,
            restore_options=restore,
            storage_options=None if where == "disk" else sim.s3_options(),
        ) as ckpt:
            for seed in range(40):
                tree = mixed(np.random.default_rng(seed))
                await ckpt.save(seed, tree)
                found = await ckpt.restore(seed)
                into = {name: np.full_like(values, 255) for name, values in tree.items()}
                await ckpt.restore_into(into, step=seed)
                for name, values in tree.items():
                    assert np.array_equal(found[name], values), (seed, name)
                    assert np.array_equal(into[name], values), (seed, name)
                await ckpt.delete(seed)


@pytest.mark.parametrize(("budget", "least", "most"), [(64 * MIB, 24, 64), (512 * MIB, 80, 128)])
async def test_a_large_chunk_has_no_more_in_flight_than_the_budget_counts(
    budget: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    read_into = ObjectFiles.read_into

    async def seen(self: Any, path: str, offset: int, buffers: Any, **how: Any) -> None:
        if sum(buffer.size for buffer in buffers) > 70 * MIB:
            asked.append(how["how"].ahead_nbytes)
        await read_into(self, path, offset, buffers, **how)

    monkeypatch.setattr(ObjectFiles, "read_into", seen)
    values = np.arange(80 * MIB // 8)
    with simulator() as sim:
        where, options = "s3://bucket/run", sim.s3_options(client="obstore")
        whole = SaveOptions(
            leaf_options=lambda *_: LeafOptions(chunk_shape=values.shape),
            target_data_file_nbytes=96 * MIB,
            host_memory_nbytes=2048 * MIB,
        )
        async with asyncckpt.Checkpointer(
            where, save_options=whole, storage_options=options
        ) as ckpt:
            await ckpt.save(1, {"values": values})
        small = SaveOptions(host_memory_nbytes=budget)
        async with asyncckpt.Checkpointer(
            where, save_options=small, storage_options=options
        ) as ckpt:
            found = await ckpt.restore(1)
    assert np.array_equal(found["values"], values)
    (ahead,) = asked
    assert least * MIB <= ahead <= most * MIB
