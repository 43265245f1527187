"""Laws of names: conflicts, overwriting and deletion."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncckpt.errors import CheckpointExistsError, CheckpointNotFoundError, UsageError
from asyncckpt.testing.checkpoints import RECORD, content, delete, expect, identity, save
from asyncckpt.testing.store_laws.subject import StoreLaws


class Naming(StoreLaws):
    """One checkpoint per name; it is replaced or deleted only when asked."""

    async def test_of_two_attempts_at_one_name_exactly_one_publishes(self, tmp_path: Path) -> None:
        """The others get `CheckpointExistsError`, and the winner is untouched."""
        if not self.conditional_create:
            return
        async with self.opened(tmp_path) as store:
            seeds = range(4)
            errors: list[CheckpointExistsError] = []

            async def one(seed: int) -> None:
                try:
                    await save(store, "1", f"a{seed}", seed)
                except CheckpointExistsError as error:
                    errors.append(error)

            async with asyncio.TaskGroup() as group:
                for seed in seeds:
                    group.create_task(one(seed))
            assert len(errors) == len(seeds) - 1
            winner = (await content(store, "1", RECORD, 1000)).split()[1]
            await expect(store, "1", int(winner))
            assert list(await store.sweep()) == []

    async def test_a_taken_name_is_kept_as_it_was(self, tmp_path: Path) -> None:
        """A save without `overwrite` fails when it publishes, and leaves nothing."""
        async with self.opened(tmp_path) as store:
            await save(store, "1", "a", 1)
            with pytest.raises(CheckpointExistsError):
                await save(store, "1", "b", 2)
            await expect(store, "1", 1)
            assert await store.names() == ["1"]
            assert list(await store.sweep()) == []

    async def test_overwrite_replaces(self, tmp_path: Path) -> None:
        """A reader opened later finds the new contents and nothing of the old."""
        async with self.opened(tmp_path) as store:
            await save(store, "1", "a", 1)
            await save(store, "1", "b", 2, overwrite=True)
            await expect(store, "1", 2)
            await save(store, "2", "c", 3, overwrite=True)  # nothing to replace
            await expect(store, "2", 3)
            assert sorted(await store.names()) == ["1", "2"]
            assert list(await store.sweep()) == []

    async def test_an_aborted_overwrite_keeps_the_old_one(self, tmp_path: Path) -> None:
        """The old checkpoint is complete until `publish`."""
        async with self.opened(tmp_path) as store:
            await save(store, "1", "a", 1)
            attempt = await store.begin("1", identity("b"), overwrite=True)
            await attempt.put("default/small", b"other")
            await expect(store, "1", 1)
            await attempt.abort()
            await expect(store, "1", 1)

    async def test_delete_removes_one_checkpoint(self, tmp_path: Path) -> None:
        """Its name is free again; others stay."""
        async with self.opened(tmp_path) as store:
            await save(store, "1", "a", 1)
            await save(store, "2", "b", 2)
            await delete(store, "1")
            await self.expect_nothing(store, "1")
            await expect(store, "2", 2)
            with pytest.raises(CheckpointNotFoundError):
                await delete(store, "1")
            await save(store, "1", "c", 3)
            await expect(store, "1", 3)
            assert list(await store.sweep()) == []

    async def test_unlist_hides_a_checkpoint_and_its_result_removes_the_bytes(
        self, tmp_path: Path
    ) -> None:
        """In between, the name is free, and a new checkpoint under it loses nothing."""
        async with self.opened(tmp_path) as store:
            await save(store, "1", "a", 1)
            await save(store, "2", "b", 2)
            remove = await store.unlist("1")
            await self.expect_nothing(store, "1")
            with pytest.raises(CheckpointNotFoundError):
                await store.unlist("1")
            await save(store, "1", "c", 3)
            await remove()
            await expect(store, "1", 3)
            await expect(store, "2", 2)
            assert list(await store.sweep()) == []

    async def test_unlist_leaves_a_checkpoint_that_has_replaced_the_one_decided_on(
        self, tmp_path: Path
    ) -> None:
        """`seal` identifies the checkpoint to delete by the end of its record."""
        async with self.opened(tmp_path) as store:
            await save(store, "1", "a", 1)
            seal = await content(store, "1", RECORD, 1000)
            await save(store, "1", "b", 2, overwrite=True)
            with pytest.raises(CheckpointNotFoundError):
                await store.unlist("1", seal=seal)
            await expect(store, "1", 2)
            seal = await content(store, "1", RECORD, 1000)
            await (await store.unlist("1", seal=seal[-5:]))()
            await self.expect_nothing(store, "1")

    async def test_names_that_are_no_single_path_part_are_refused(self, tmp_path: Path) -> None:
        """Before anything is created."""
        async with self.opened(tmp_path) as store:
            for name in ("", ".", "..", "a/b", "/a", "a\0b"):
                with pytest.raises(UsageError):
                    await store.begin(name, identity("a"))
            assert await store.names() == []
