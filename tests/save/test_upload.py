"""Writing windows and packing chunks into them: memory comes back, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from asyncckpt.flow.budget import ByteBudget
from asyncckpt.flow.buffers import AnonymousMemory, SlotPool
from asyncckpt.flow.threads import ThreadAbandonedError, Workers
from asyncckpt.save.serialize import Compressed
from asyncckpt.save.upload import ChunkPacker, DataFiles, FileWindow

SLOT = 64 << 10


async def not_opened() -> Any:
    raise AssertionError("a packer opens no file")


class Packed:
    """A packer, and what it has sent on its way."""

    def __init__(self, workers: Workers, target: int = SLOT, *, positional: bool = False) -> None:
        self.pool = SlotPool(ByteBudget(16 * SLOT), workers, AnonymousMemory(), slot_nbytes=SLOT)
        self.sent: list[FileWindow] = []
        self.files = DataFiles(
            not_opened, "x", [1, 1, 1], SLOT, lambda _: None, positional=positional
        )
        self.packer = ChunkPacker(self.files, target, self.pool, workers, emit=self.sent.append)

    async def add(self, *lengths: int) -> list[tuple[int, int]]:
        blocks = [([b"x" * (nbytes - 4), b"crc!"], nbytes) for nbytes in lengths]
        return await self.packer.write([Compressed(parts, nbytes, 0) for parts, nbytes in blocks])

    async def send_for_good(self, count: int) -> None:
        """So many full slots were sent, none of which can be used again."""
        for _ in range(count):
            await self.add(SLOT)
            self.packer.finish()
            slot = self.sent.pop().slot
            self.packer.done(slot, None, False)
            del slot

    async def at_rest(self) -> bool:
        async with asyncio.timeout(30):
            while self.pool.discarded:
                await asyncio.sleep(0.005)
        return self.pool.budget.in_use == 0


async def test_chunks_share_a_file_and_a_large_one_has_its_own(workers: Workers) -> None:
    packed = Packed(workers)
    await packed.packer.reserve(9)
    assert packed.pool.budget.in_use == 8 * SLOT  # half of the budget
    for nbytes in (SLOT // 2, SLOT // 2, SLOT // 4, 2 * SLOT + 10, 100):
        await packed.add(nbytes)
    packed.packer.finish()
    assert packed.files.nbytes == [1, 1, 1, SLOT, SLOT // 4, 2 * SLOT + 10, 100]
    assert [(sent.file, sent.offset, sent.nbytes) for sent in packed.sent] == [
        (3, 0, SLOT),
        (4, 0, SLOT // 4),
        (5, 0, SLOT),
        (5, SLOT, SLOT),
        (5, 2 * SLOT, 10),
        (6, 0, 100),
    ]


@pytest.mark.parametrize("together", [False, True])
async def test_a_file_with_positional_writes_has_several_windows_and_zeros_at_its_end(
    workers: Workers, together: bool
) -> None:
    """Its last window is kept back until its length is final, also where it is full."""
    packed = Packed(workers, 2 * SLOT, positional=True)
    for slot in (slots := await packed.pool.take(8)):
        slot.buffer[:] = 255
    packed.pool.release(slots)
    await packed.packer.reserve(9)
    lengths = [2 * SLOT, SLOT // 2, SLOT, 100, 3 * SLOT, 3000]
    async with asyncio.timeout(30):
        places = await packed.add(*lengths) if together else []
        for nbytes in () if together else lengths:
            places += await packed.add(nbytes)
            file = places[-1][0]
            emitted = sum(window.nbytes for window in packed.sent if window.file == file)
            assert emitted < packed.files.nbytes[file]
    packed.packer.finish()
    assert places == [(3, 0), (4, 0), (4, SLOT // 2), (4, 3 * SLOT // 2), (5, 0), (6, 0)]
    assert packed.files.nbytes[3:] == [2 * SLOT, 3 * SLOT // 2 + 100, 3 * SLOT, 3000]
    assert [(sent.file, sent.offset / SLOT, sent.nbytes) for sent in packed.sent] == [
        *[(3, 0, SLOT), (3, 1, SLOT)],
        *[(4, 0, SLOT), (4, 1, SLOT // 2 + 100)],
        *[(5, 0, SLOT), (5, 1, SLOT), (5, 2, SLOT)],
        (6, 0, 3000),
    ]
    for sent in packed.sent:
        data = sent.slot.body(-(-sent.nbytes // 4096) * 4096)
        assert set(data[: sent.nbytes].tolist()) <= {*b"xcrc!"}
        assert not data[sent.nbytes :].any()


@pytest.mark.parametrize("further", [0, 3])
async def test_slots_that_are_not_used_again_give_their_part_of_the_budget_back(
    workers: Workers, further: int
) -> None:
    """Whether a later chunk has needed another slot in their place, or none has."""
    packed = Packed(workers)
    await packed.packer.reserve(1)
    await packed.send_for_good(1 + further)
    packed.packer.release()
    assert await packed.at_rest()


async def test_slots_of_a_failed_write_give_their_part_of_the_budget_back(workers: Workers) -> None:
    packed = Packed(workers)
    await packed.packer.reserve(2)
    await packed.add(SLOT)
    packed.packer.finish()
    slot = packed.sent.pop().slot
    packed.packer.done(slot, OSError("lost"), False)
    del slot
    packed.packer.release()
    assert await packed.at_rest()


@pytest.mark.parametrize(
    ("beside", "kept", "count"),
    [
        (0, 0, 8),  # half of the budget
        (10, 0, 6),  # as many as leave room for the largest chunk
        (16, 0, 1),  # which has to go without, where there is none
        (3, 8, 4),  # half of what nobody keeps
        (7, 8, 1),
    ],
)
async def test_what_is_reserved_leaves_room_for_what_is_kept_and_for_the_next_chunk(
    workers: Workers, beside: int, kept: int, count: int
) -> None:
    packed = Packed(workers)
    budget = packed.pool.budget
    await packed.pool.acquire(kept * SLOT)
    budget.keep(kept * SLOT)
    await packed.packer.reserve(9, spare_nbytes=beside * SLOT)
    assert budget.in_use == budget.kept == (kept + count) * SLOT
    packed.packer.release()
    assert budget.in_use == budget.kept == kept * SLOT


async def test_slots_of_a_failed_write_stand_once_until_their_memory_is_gone(
    workers: Workers,
) -> None:
    packed = Packed(workers)
    budget = packed.pool.budget
    await packed.packer.reserve(2)
    await packed.add(SLOT)
    packed.packer.finish()
    slot = packed.sent.pop().slot
    body = slot.body(SLOT)  # which a client goes on sending
    packed.packer.done(slot, OSError("lost"), False)
    assert budget.in_use == budget.kept == 2 * SLOT
    packed.packer.release()
    assert budget.in_use == budget.kept == SLOT
    del body, slot
    assert await packed.at_rest()
    assert budget.kept == 0


async def test_a_slot_that_a_stuck_thread_writes_to_disk_is_quarantined(workers: Workers) -> None:
    packed = Packed(workers, positional=True)
    await packed.packer.reserve(2)
    await packed.add(SLOT)
    packed.packer.finish()
    error = ThreadAbandonedError("stuck")
    error.future = stuck = Future[None]()
    packed.packer.done(packed.sent.pop().slot, error, True)
    packed.packer.release()
    assert packed.pool.budget.in_use == packed.pool.budget.kept == SLOT
    stuck.set_result(None)
    async with asyncio.timeout(30):
        while packed.pool.budget.in_use:
            await asyncio.sleep(0.005)
    assert packed.pool.budget.kept == 0


async def test_a_packer_whose_slots_were_discarded_leaves_the_pool_as_it_was(
    workers: Workers,
) -> None:
    """Slots that were replaced, and slots that nobody has asked a replacement for."""
    packed = Packed(workers)
    await packed.packer.reserve(2)
    await packed.send_for_good(3)
    packed.packer.release()
    assert await packed.at_rest()
    slots = await packed.pool.take(16)
    assert not packed.pool.budget.try_acquire(1)
    packed.pool.release(slots)
    assert packed.pool.allocated_nbytes == 16 * SLOT
    assert (packed.pool.in_use, packed.pool.kept) == (0, 0)


# -------------------------------------------------------------------------- files of windows


class ScriptedFile:
    """A data file of an attempt that only notes what it is asked for."""

    def __init__(self, attempt: ScriptedAttempt, path: str) -> None:
        self.path = path
        self._attempt = attempt

    async def write(self, offset: int, data: Any) -> bool:
        self._attempt.log.append(("write", self.path, offset, len(data)))
        await asyncio.sleep(0)
        if self._attempt.error is not None:
            raise self._attempt.error
        self.path += self._attempt.renamed
        return not self._attempt.renamed

    async def seal(self, nbytes: int) -> None:
        self._attempt.log.append(("seal", self.path, nbytes))


class ScriptedAttempt:
    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        self.renamed = ""

    async def create(self, path: str, *, nbytes: int, window_nbytes: int | None = None) -> Any:
        self.log.append(("create", path, nbytes, window_nbytes))
        await asyncio.sleep(0)
        return ScriptedFile(self, path)


class Windows:
    """Windows of files of two and a half slots, and what became of their slots."""

    def __init__(self, workers: Workers) -> None:
        self.pool = SlotPool(ByteBudget(16 * SLOT), workers, AnonymousMemory(), slot_nbytes=SLOT)
        self.attempt: Any = ScriptedAttempt()
        self.done: list[tuple[BaseException | None, bool]] = []
        self.progress: list[int] = []
        self.nbytes = [5 * SLOT // 2] * 8

    async def opened(self) -> Any:
        return self.attempt

    def files(self, stem: str, *, positional: bool) -> DataFiles:
        return DataFiles(
            self.opened, stem, self.nbytes, SLOT, self.progress.append, positional=positional
        )

    async def of(self, file: int, numbers: Sequence[int]) -> list[FileWindow]:
        slots = await self.pool.take(len(numbers))
        return [
            FileWindow(
                file,
                number * SLOT,
                min(SLOT, 5 * SLOT // 2 - number * SLOT),
                slot,
                10 + number,
                lambda slot, error, reusable: self.done.append((error, reusable)),
            )
            for number, slot in zip(numbers, slots, strict=True)
        ]


async def test_a_file_is_created_once_and_sealed_after_its_last_window(workers: Workers) -> None:
    made = Windows(workers)
    files = made.files("x", positional=True)
    async with asyncio.TaskGroup() as group:
        for window in await made.of(7, (2, 0, 1)):
            group.create_task(files.write(window))
    kinds = [entry[0] for entry in made.attempt.log]
    assert kinds == ["create", "write", "write", "write", "seal"]
    assert made.attempt.log[0] == ("create", "default/d/x-7", 5 * SLOT // 2, SLOT)
    assert ("write", "default/d/x-7", 2 * SLOT, SLOT // 2) in made.attempt.log
    assert made.attempt.log[-1] == ("seal", "default/d/x-7", 5 * SLOT // 2)
    assert made.done == [(None, True)] * 3 and sorted(made.progress) == [10, 11, 12]


async def test_positional_writes_are_whole_pages_and_requests_are_exact(workers: Workers) -> None:
    made = Windows(workers)
    (slot,) = await made.pool.take(1)
    made.nbytes = [5000]
    window = FileWindow(0, 0, 5000, slot, 0, lambda *_: None)
    await made.files("x", positional=True).write(window)
    await made.files("y", positional=False).write(window)
    assert made.attempt.log[1] == ("write", "default/d/x-0", 0, 8192)
    assert made.attempt.log[3:5] == [
        ("create", "default/d/y-0", 5000, SLOT),
        ("write", "default/d/y-0", 0, 5000),
    ]


@pytest.mark.parametrize("positional", [True, False])
async def test_a_slot_of_a_failed_write_is_used_again_only_where_nobody_sends_it(
    workers: Workers, positional: bool
) -> None:
    made = Windows(workers)
    made.attempt.error = OSError("lost")
    (window,) = await made.of(0, (0,))
    with pytest.raises(OSError, match="lost"):
        await made.files("x", positional=positional).write(window)
    assert made.done == [(made.attempt.error, positional)] and made.progress == []


async def test_a_file_that_was_sent_under_another_name_is_counted_and_has_that_path(
    workers: Workers,
) -> None:
    made = Windows(workers)
    made.nbytes = [SLOT]
    files = made.files("x", positional=False)
    made.attempt.renamed = ".r1"
    slots = await made.pool.take(1)
    assert files.path(0) == "default/d/x-0"
    await files.write(FileWindow(0, 0, SLOT, slots[0], 0, lambda *_: None))
    assert files.path(0) == "default/d/x-0.r1" and files.renames == 1
