"""Laws of claims: a fenced writer changes nothing any more."""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from asyncckpt.errors import CheckpointNotFoundError, FencedError, UsageError
from asyncckpt.flow.shield import together
from asyncckpt.ports import Claim, Store
from asyncckpt.testing.checkpoints import delete, expect, fill, identity, save
from asyncckpt.testing.store_laws import StoreLaws

AT_ONCE = 8
"""Processes that take over at the same time."""


async def claimed(store: Store) -> int:
    """Make a claim; return its epoch."""
    claim = await store.claim()
    assert claim is not None
    return claim.epoch


class Claiming(StoreLaws):
    """Every claim ends all lower ones; published checkpoints stay."""

    async def test_claims_are_numbered_and_listed(self, store: Store, other: Store) -> None:
        """Each claim names its process."""
        assert list(await store.claims()) == []
        await store.check_claim(0)
        made = [await store.claim(), await other.claim(), await store.claim()]
        assert [claim.epoch for claim in made if claim is not None] == [1, 2, 3]
        assert list(await other.claims()) == made
        assert all(isinstance(claim, Claim) and claim.pid and claim.host for claim in made)
        assert await store.names() == []

    async def test_what_was_published_stays_through_takeovers(
        self, store: Store, other: Store
    ) -> None:
        """With and without a claim, however many follow."""
        await save(store, "0", "without", 9)
        for seed in (1, 2, 3):
            epoch = await claimed(store)
            await save(store, str(seed), f"a{seed}", seed, epoch=epoch)
        await claimed(other)
        await expect(store, "0", 9)
        for seed in (1, 2, 3):
            await expect(other, str(seed), seed)
        assert sorted(await other.names()) == ["0", "1", "2", "3"]

    async def test_a_writer_that_was_taken_over_publishes_nothing(
        self, store: Store, other: Store
    ) -> None:
        """Neither earlier nor new attempts; the next writer saves the same step."""
        old = await claimed(store)
        attempt = await store.begin("1", identity("stale"), epoch=old)
        record = await fill(attempt, identity("stale"), 1, old)
        new = await claimed(other)
        with pytest.raises(FencedError) as caught:
            await attempt.publish(record)
        assert caught.value.epoch == old and caught.value.claimed_by is not None
        await self.expect_nothing(other, "1")
        with pytest.raises(FencedError):
            await save(store, "2", "later", 2, epoch=old)
        await self.expect_nothing(other, "2")
        await save(other, "1", "new", 3, epoch=new)
        await expect(other, "1", 3)
        with pytest.raises(FencedError):
            await save(store, "1", "again", 4, epoch=old)
        await expect(store, "1", 3)
        with pytest.raises(FencedError):
            await store.check_claim(old)
        await store.check_claim(new)

    async def test_a_writer_that_was_taken_over_deletes_and_replaces_nothing(
        self, store: Store, other: Store
    ) -> None:
        """Its own checkpoints belong to the next writer."""
        old = await claimed(store)
        await save(store, "1", "a", 1, epoch=old)
        attempt = await store.begin("1", identity("stale"), epoch=old, overwrite=True)
        record = await fill(attempt, identity("stale"), 2, old)
        new = await claimed(other)
        with pytest.raises(FencedError):
            await attempt.publish(record)
        with pytest.raises(FencedError):
            await delete(store, "1", epoch=old)
        with pytest.raises(FencedError):
            await store.unlist("1", epoch=old)
        await expect(other, "1", 1)
        await delete(other, "1", epoch=new)
        with pytest.raises((FencedError, CheckpointNotFoundError)):
            await delete(store, "1", epoch=old)
        await self.expect_nothing(other, "1")

    async def test_without_a_claim_nothing_is_taken_over(self, store: Store, other: Store) -> None:
        """Epoch 0 is below no claim."""
        attempt = await store.begin("1", identity("a"))
        record = await fill(attempt, identity("a"), 1)
        await claimed(other)
        await attempt.publish(record)
        await save(store, "2", "b", 2)
        await delete(store, "2")
        await claimed(other)
        await expect(other, "1", 1)
        await self.expect_nothing(other, "2")

    async def test_of_processes_that_take_over_at_once_one_has_the_run(
        self, tmp_path: Path
    ) -> None:
        """All others raise an error, at the latest in their next call."""
        async with AsyncExitStack() as stack:
            opening = [self.opened(tmp_path) for _ in range(AT_ONCE)]
            opened = [await stack.enter_async_context(one) for one in opening]
            first = await claimed(opened[0])
            await save(opened[0], "0", "before", 7, epoch=first)
            epochs: dict[int, int] = {}

            async def take_over(number: int) -> None:
                with suppress(FencedError):
                    epochs[number] = await claimed(opened[number - 1])

            await together(map(take_over, range(1, AT_ONCE + 1)))
            saved = []
            for number, epoch in epochs.items():
                try:
                    await save(opened[number - 1], str(number), f"{number}", number, epoch=epoch)
                    saved.append(number)
                except FencedError:
                    await self.expect_nothing(opened[0], str(number))
            assert len(saved) == 1 and epochs[saved[0]] == max(epochs.values())
            await expect(opened[0], str(saved[0]), saved[0])
            await expect(opened[0], "0", 7)

    async def test_a_claim_checks_its_arguments(self, store: Store) -> None:
        """A negative epoch is refused."""
        for call in (store.begin("1", identity("a"), epoch=-1), delete(store, "1", epoch=-1)):
            with pytest.raises(UsageError, match="epoch=-1"):
                await call
