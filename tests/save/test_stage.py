"""The stage stage by itself: what its consumer gets, in which order, and what is given back."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch

from asyncckpt.adapters.numpy import NumpyAdapter
from asyncckpt.errors import StagingError
from asyncckpt.flow.shield import leading_error
from asyncckpt.flow.threads import Workers
from asyncckpt.format.zarr3 import CRC_NBYTES
from asyncckpt.options import KIB, LeafOptions
from asyncckpt.save import stage
from asyncckpt.save.stage import StagedChunks, StagedWindow, Staging
from asyncckpt.spec import DTYPES, ArraySpec
from tests.save.staging import SLOT, Staged, noise

# Whole chunks: the last one of an array would be padded.
TREE = {"a": noise(6 * 48 * KIB), "b": noise(4 * 48 * KIB, 1), "c": noise(9000, 2)}


def payload(staged: Staged, item: StagedWindow) -> list[bytes]:
    return [
        item.slot.buffer[piece.position : piece.position + piece.stop - piece.start].tobytes()
        for piece in item.window.pieces
    ]


async def test_windows_leave_in_plan_order_and_hold_every_byte_once(workers: Workers) -> None:
    staged = Staged(TREE, workers, slots=4)
    queue: asyncio.Queue[StagedWindow] = asyncio.Queue()
    found: list[bytes] = []

    async def consume() -> None:
        for window in staged.plan.windows:
            item = await queue.get()
            assert item.window is window
            found.extend(payload(staged, item))
            staged.staging.release([item.slot])

    async with asyncio.TaskGroup() as group:
        group.create_task(consume())
        await staged.staging.windows(queue.put_nowait)
    assert b"".join(found) == b"".join(leaf.tobytes() for leaf in TREE.values())
    assert staged.budget.in_use == 0 and not staged.staging.held


@pytest.mark.parametrize("equal", [False, True], ids=["same specs", "equal specs"])
async def test_only_leaves_that_are_not_stored_as_they_are_need_a_reader(
    equal: bool, workers: Workers
) -> None:
    """Equal specs are nearly always one object; if they are two, a reader finds the same bytes."""
    tensor, floats = torch.from_numpy(noise(5000, 3)), np.arange(2000.0)
    tree = {**TREE, "cast": floats, "rows": noise(6000, 4).reshape(60, 100).T, "tensor": tensor}
    staged = Staged(
        tree,
        workers,
        leaf_options=lambda path, _: LeafOptions(dtype="float32") if path == "cast" else None,
    )
    if equal:
        specs = staged.staging.sources.specs
        specs[:] = [ArraySpec(spec.shape, spec.dtype) for spec in specs]
    found: list[bytes] = []
    await staged.staging.windows(lambda item: found.extend(payload(staged, item)))
    expected = {**tree, "cast": floats.astype(np.float32), "tensor": tensor.numpy()}
    assert b"".join(found) == b"".join(leaf.tobytes() for leaf in expected.values())
    assert len(staged.staging._readers) == (len(tree) if equal else 2)


async def test_windows_that_hold_the_whole_budget_are_not_kept_back(workers: Workers) -> None:
    """Windows that are kept back hold the whole budget: a wait for more would never end."""
    staged = Staged(TREE, workers, slots=2)
    found: list[StagedWindow] = []

    def emit(item: StagedWindow) -> None:
        found.append(item)
        staged.staging.release([item.slot])

    async with asyncio.timeout(30):
        await staged.staging.windows(emit)
    assert [item.window for item in found] == list(staged.plan.windows)
    assert staged.budget.in_use == 0 and not staged.staging.held


async def test_only_leaves_that_this_process_writes_are_copied_beside_references(
    workers: Workers,
) -> None:
    tree = {name: noise(48 * KIB, seed) for seed, name in enumerate("abcd")}
    staged = Staged(tree, workers, process_count=4)
    assert await staged.staging.hold_immutable()
    assert staged.budget.in_use == 48 * KIB
    staged.staging.release_all()
    assert staged.budget.in_use == 0


def offloadable(staged: Staged, *numbers: int) -> list[list[Any]]:
    """Let these arrays be offloaded; return the list that the calls are appended to."""
    calls: list[list[Any]] = []

    def offload(sources: Any) -> None:
        calls.append(list(sources))
        for source in sources:
            source.view, source.leaf = source.leaf.copy(), None

    for number in numbers:
        source = staged.snapshot.sources[number]
        source.view, source.offload = None, offload
    return calls


async def test_leaves_are_offloaded_and_others_copied_before_anything_else(
    workers: Workers,
) -> None:
    tree = {name: noise(48 * KIB, seed) for seed, name in enumerate("abcdef")}
    expected = b"".join(leaf.tobytes() for leaf in tree.values())
    staged = Staged(tree, workers, slots=32)
    calls = offloadable(staged, 0, 1, 2, 4, 5)
    assert await staged.staging.offload()
    assert len(calls) == 4 and len({id(source) for call in calls for source in call}) == 5
    assert staged.budget.in_use == 6 * 48 * KIB
    for leaf in tree.values():
        leaf[...] = 0  # the caller may mutate them
    found: list[bytes] = []

    def emit(item: StagedWindow) -> None:
        found.extend(payload(staged, item))
        staged.staging.release([item.slot])

    await staged.staging.windows(emit)
    assert b"".join(found) == expected
    assert staged.budget.in_use == 6 * 48 * KIB  # until the copies are forgotten
    staged.staging.forget()
    assert staged.budget.in_use == 0


@pytest.mark.parametrize("why", ["no leaf", "no room", "other memory", "other writers"])
async def test_nothing_is_offloaded_if_that_does_not_pay(
    workers: Workers, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "GROUP_NBYTES", 100 * KIB)
    tree = {name: noise(48 * KIB, seed) for seed, name in enumerate("abcdef")}
    few = why == "no room"
    staged = Staged(
        tree,
        workers,
        slots=8 if few else 32,
        process_count=2 if why == "other writers" else 1,
    )
    far = {"no leaf": range(0), "other memory": range(3)}.get(why, range(6))
    calls = offloadable(staged, *far)
    assert not await staged.staging.offload()
    assert calls == [] and staged.budget.in_use == 0
    assert all(source.leaf is not None for source in staged.snapshot.sources)


async def test_a_failed_offload_names_a_leaf_and_gives_everything_back(workers: Workers) -> None:
    staged = Staged({"a": noise(48 * KIB)}, workers, slots=32)

    def failing(sources: Any) -> None:
        raise MemoryError("no pinned memory")

    source = staged.snapshot.sources[0]
    source.view, source.offload = None, failing
    with pytest.raises(StagingError, match=r"a: copying uint8\[49152\] .* no pinned memory"):
        await staged.staging.offload()
    staged.staging.release_all()
    assert staged.budget.in_use == 0


def staging_of(staged: Staged, workers: Workers, *, grow: bool) -> Staging:
    """The stage anew, after changes of the sources."""
    pool, recorder = staged.pool, staged.staging.recorder
    return Staging(staged.plan, staged.snapshot, pool, pool, workers, grow=grow, recorder=recorder)


@pytest.mark.parametrize("late", [False, True])
async def test_a_failed_copy_of_device_memory_names_a_leaf(workers: Workers, late: bool) -> None:
    staged = Staged({"a": noise(48 * KIB), "b": noise(48 * KIB)}, workers)

    def lost(runs: Any = None) -> Any:
        raise RuntimeError("device lost")

    waited: list[int] = []
    others, source = staged.snapshot.sources[0], staged.snapshot.sources[1]
    others.view, others.begin_runs = None, lambda runs: lambda: waited.append(len(runs))
    source.view, source.begin_runs = None, (lambda runs: lost) if late else lost
    staging = staging_of(staged, workers, grow=False)
    with pytest.raises(BaseExceptionGroup) as caught:
        await staging.windows(lambda item: None)
    error = leading_error(caught.value)
    assert isinstance(error, StagingError) and error.path == "b" and "device lost" in str(error)
    assert isinstance(error.__cause__, RuntimeError)
    assert waited  # also for the copies that had begun
    staging.release_all()
    assert staged.budget.in_use == 0


@pytest.mark.parametrize("sealed", [False, True])
async def test_windows_are_handed_on_only_once_device_memory_has_arrived(
    workers: Workers, sealed: bool
) -> None:
    """Bytes arrive late; those of the host are copied, and trailers written, meanwhile or after."""
    tree = {name: noise(40 * KIB, seed) for seed, name in enumerate("abcd")}
    expected = b"".join(leaf.tobytes() for leaf in tree.values())
    staged = Staged(tree, workers)

    def begin(runs: Any) -> Any:
        def wait() -> None:
            for run in runs:
                leaf = run.source.leaf.view(np.uint8)
                run.out[...] = leaf[run.start : run.start + run.out.size]

        for run in runs:
            run.out[...] = 0xEE
        return wait

    for number in (1, 2):
        source = staged.snapshot.sources[number]
        source.view, source.begin_runs = None, begin
    staging = staging_of(staged, workers, grow=True)
    seen: list[bytes] = []

    def seal(window: Any, buffer: Any, filling: Any) -> Any:
        for _ in filling:
            pass
        seen.append(bytes(buffer[: window.nbytes]))

    found: list[bytes] = []

    def emit(item: StagedWindow) -> None:
        found.extend(payload(staged, item))
        staging.release([item.slot])

    await staging.windows(emit, seal if sealed else None)
    assert b"".join(found) == expected
    assert not sealed or not any(b"\xee" * 64 in window for window in seen)


class Computed(NumpyAdapter):
    """Computes a leaf until its save has looked for it three times, or `ends`.

    Attributes:
        read: set once any leaf was read.
    """

    def __init__(self, staged: Staged, number: int, ends: threading.Event | None = None) -> None:
        self.read = threading.Event()
        self._ends = ends
        self._looks = 0
        self._source = staged.snapshot.sources[number]
        for source in staged.snapshot.sources:
            source.view, source.adapter = None, self
        self._source.pending = self._pending

    def fetch(self, source: Any, shard: int, box: Any, out: Any) -> None:
        if source is self._source:
            assert not self._pending(source), "read while it is being computed"
        self.read.set()
        np.copyto(out, source.leaf[box.slices()])

    def _pending(self, source: Any) -> bool:
        assert source is self._source
        self._looks += 1
        return self._looks < 3 if self._ends is None else not self._ends.is_set()


@pytest.mark.parametrize("of", ["windows", "chunks", "checksums"])
async def test_no_leaf_is_read_before_it_is_computed(of: str, workers: Workers) -> None:
    compression = "zstd" if of == "chunks" else None
    staged = Staged(
        {"a": noise(48 * KIB), "b": noise(4 * 48 * KIB, 1)},
        workers,
        leaf_options=lambda path, spec: LeafOptions(compression=compression),
    )
    computed = Computed(staged, 1)
    staging = staging_of(staged, workers, grow=False)
    if of == "windows":
        await staging.windows(lambda item: staging.release([item.slot]))
    elif of == "chunks":
        await staging.chunks(lambda item: staging.release(item.slots, item.extra_nbytes))
    else:
        await staging.checksums(range(len(staged.plan.row_array)))
    assert computed.read.is_set()
    assert staged.budget.in_use == 0


async def test_leaves_that_are_ready_are_copied_while_others_are_computed(workers: Workers) -> None:
    staged = Staged({"a": noise(48 * KIB), "b": noise(4 * 48 * KIB, 1)}, workers)
    ends = threading.Event()
    computed = Computed(staged, 0, ends)
    computed.read = ends  # the first leaf is computed once the second is being copied
    staging = staging_of(staged, workers, grow=False)
    await staged.pool.prepare(len(staged.plan.windows))
    async with asyncio.timeout(30):
        await staging.windows(lambda item: staging.release([item.slot]))
    assert ends.is_set()


async def test_chunks_take_their_slots_and_room_for_the_compressor_at_once(
    workers: Workers,
) -> None:
    staged = Staged(
        {"a": noise(4 * SLOT), "b": noise(300, 1)},
        workers,
        slots=8,
        leaf_options=lambda path, spec: LeafOptions(compression="zstd"),
    )
    groups: list[StagedChunks] = []

    def emit(chunks: StagedChunks) -> None:
        groups.append(chunks)
        held = len(chunks.slots) * SLOT
        assert staged.budget.in_use == 2 * held == held + chunks.extra_nbytes
        staged.staging.release(chunks.slots, chunks.extra_nbytes)

    await staged.staging.chunks(emit)
    assert [row for chunks in groups for row in chunks.rows] == sorted(
        row for chunks in groups for row in chunks.rows
    )
    assert staged.budget.in_use == 0


async def test_a_leaf_that_cannot_be_copied_is_named_and_release_returns_everything(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    strided = noise(12 * 48 * KIB)[::2]  # such values are gathered leaf by leaf
    staged = Staged({**TREE, "a": strided}, workers)

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("device lost")

    monkeypatch.setattr(np, "copyto", broken)
    with pytest.raises(BaseExceptionGroup) as caught:
        await staged.staging.windows(lambda item: None)
    (error,) = [e for e in caught.value.exceptions if isinstance(e, StagingError)][:1]
    assert (error.path, error.stage) == ("a", "stage")
    monkeypatch.undo()
    assert staged.staging.held
    staged.staging.release_all()
    assert staged.budget.in_use == 0


async def test_a_cancelled_stage_waits_for_its_copies(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = Staged(TREE, workers)
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()
    copy = Staging._copy_windows

    def slowly(self: Staging, *args: Any) -> Any:
        begun.set()
        assert go.wait(30)
        staged = copy(self, *args)
        ended.set()
        return staged

    monkeypatch.setattr(Staging, "_copy_windows", slowly)
    task = asyncio.create_task(staged.staging.windows(lambda item: None))
    await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    staged.staging.release_all()
    assert staged.budget.in_use == 0


async def test_what_is_forgotten_is_referred_to_no_more(workers: Workers) -> None:
    staged = Staged(TREE, workers)
    await staged.staging.windows(lambda item: staged.staging.release([item.slot]))
    staged.staging.forget()
    assert all(source.leaf is source.view is None for source in staged.snapshot.sources)


async def test_small_arrays_are_copied_one_after_the_other_with_room_for_trailers(
    workers: Workers,
) -> None:
    """Strided ones, extension dtypes, casts and padded chunks too."""
    strided = np.arange(24, dtype=np.int16).reshape(4, 6)[::2, ::3]
    tree = {
        "plain": np.arange(5.0),
        "alike": np.arange(5.0) + 1,
        "brain": np.arange(3).astype(DTYPES["bfloat16"]),
        "strided": strided,
        "tensor": torch.arange(4),
        "cast": np.arange(4.0),
        "padded": np.arange(5, dtype=np.int32),
        "rank 0": np.array(7),
    }

    def leaf_options(path: str, _: ArraySpec) -> LeafOptions | None:
        if path == "cast":
            return LeafOptions(dtype="float32")
        return LeafOptions(chunk_shape=(8,)) if path == "padded" else None

    for leaves in (tree, {key: tree[key] for key in ("plain", "alike", "rank 0")}):
        staged = Staged(leaves, workers, leaf_options=leaf_options)
        expected = {key: np.asarray(leaf).tobytes() for key, leaf in leaves.items()}
        if "cast" in leaves:
            expected["cast"] = np.arange(4, dtype=np.float32).tobytes()
            expected["padded"] += bytes(12)
        gap = bytes(CRC_NBYTES)
        data = await workers.run(staged.staging.inline)
        assert data == b"".join(value + gap for value in expected.values())
        for leaf in leaves.values():
            leaf[...] = 0  # it was copied
        assert data == b"".join(value + gap for value in expected.values())


async def test_a_small_array_that_cannot_be_copied_is_named(workers: Workers) -> None:
    staged = Staged({"good": np.arange(3), "bad": np.arange(3.0), "x": np.arange(3)}, workers)

    class Failing(NumpyAdapter):
        def fetch(self, *_: Any) -> None:
            raise RuntimeError("gone")

    source = staged.snapshot.sources[1]
    source.view, source.adapter = None, Failing()
    with pytest.raises(StagingError, match=r"bad: copying float64\[3\] to host memory"):
        await workers.run(staged.staging.inline)
