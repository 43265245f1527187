"""Packing compressed chunks into slots that are sent: memory comes back, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from asyncckpt.flow.budget import ByteBudget
from asyncckpt.flow.buffers import ByteArrayMemory, SlotPool
from asyncckpt.flow.threads import Workers
from asyncckpt.stages.serialize import Compressed
from asyncckpt.stages.upload import ChunkPacker, Filled, Placed

SLOT = 64 << 10


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers(2, "asyncckpt-test")
    yield made
    made.shutdown()


class Packed:
    """A packer, and what it has sent on its way."""

    def __init__(self, workers: Workers) -> None:
        self.pool = SlotPool(ByteBudget(16), workers, ByteArrayMemory(), slot_nbytes=SLOT)
        self.sent: list[Filled] = []
        self.files: dict[int, tuple[str, int, int]] = {}
        self.packer = ChunkPacker(
            lambda file: f"d/{file}",
            3,
            SLOT,
            self.pool,
            workers,
            emit=self.sent.append,
            announce=lambda file, path, nbytes, count: self.files.update(
                {file: (path, nbytes, count)}
            ),
            written=lambda _: None,
        )

    async def add(self, nbytes: int) -> None:
        blocks = [b"x" * (nbytes - 4), b"crc!"]
        file, offset = self.packer.place(nbytes)
        await self.packer.write([Placed(file, offset, Compressed(blocks, nbytes, 0), nbytes)])

    async def send_for_good(self, count: int) -> None:
        """So many full slots were sent, none of which can be used again."""
        for _ in range(count):
            await self.add(SLOT)
            await self.packer.finish()
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
    assert await packed.packer.reserve(9) == 8  # half of the budget
    for nbytes in (SLOT // 2, SLOT // 2, SLOT // 4, 2 * SLOT + 10, 100):
        await packed.add(nbytes)
    await packed.packer.finish()
    assert packed.packer.file_nbytes == [SLOT, SLOT // 4, 2 * SLOT + 10, 100]
    assert [packed.files[file][1:] for file in sorted(packed.files)] == [
        (SLOT, 1),
        (SLOT // 4, 1),
        (2 * SLOT + 10, 3),
        (100, 1),
    ]


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
    await packed.packer.finish()
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
    await packed.pool.acquire(kept)
    budget.stand(kept)
    assert await packed.packer.reserve(9, beside=beside) == count
    assert (budget.in_use, budget.standing) == (kept + count, kept + count)
    packed.packer.release()
    assert (budget.in_use, budget.standing) == (kept, kept)


async def test_slots_of_a_failed_write_stand_once_until_their_memory_is_gone(
    workers: Workers,
) -> None:
    packed = Packed(workers)
    budget = packed.pool.budget
    await packed.packer.reserve(2)
    await packed.add(SLOT)
    await packed.packer.finish()
    slot = packed.sent.pop().slot
    body = slot.body(SLOT)  # which a client goes on sending
    packed.packer.done(slot, OSError("lost"), False)
    assert (budget.in_use, budget.standing) == (2, 2)
    packed.packer.release()
    assert (budget.in_use, budget.standing) == (1, 1)
    del body, slot
    assert await packed.at_rest()
    assert budget.standing == 0


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
    assert not packed.pool.budget.try_acquire()
    packed.pool.give(slots)
    assert packed.pool.allocated_nbytes == 16 * SLOT
    share = packed.pool._share
    assert (share.in_use, share.standing) == (0, 0)
