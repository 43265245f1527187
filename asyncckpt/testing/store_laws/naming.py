"""Laws of names: visibility, conflicts, overwriting and deletion."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncckpt.errors import CheckpointExistsError, CheckpointNotFoundError, UsageError
from asyncckpt.flow.shield import together
from asyncckpt.ports import Store
from asyncckpt.testing.checkpoints import (
    PAGE,
    RECORD,
    SAVE_ID,
    YEAR_S,
    cancelled_after,
    content,
    data_path,
    delete,
    expect,
    fill,
    identity,
    pattern,
    put,
    record_of,
    save,
    write_file,
)
from asyncckpt.testing.store_laws import StoreLaws


class Naming(StoreLaws):
    """One checkpoint per name: visible once published, replaced or deleted only when asked."""

    async def test_an_empty_store_has_no_names(self, store: Store) -> None:
        """Opening creates nothing that looks like a checkpoint."""
        assert await store.names() == []
        assert list(await store.sweep()) == []

    async def test_nothing_is_visible_before_publish(self, store: Store) -> None:
        """The name is free until the last step."""
        await self.expect_nothing(store, "1")
        attempt = await store.begin("1", SAVE_ID)
        await self.expect_nothing(store, "1")
        await write_file(attempt, data_path(SAVE_ID), pattern(PAGE))
        await self.expect_nothing(store, "1")
        await attempt.put("small", b"x")
        await self.expect_nothing(store, "1")
        await attempt.publish(record_of(SAVE_ID))
        assert await store.names() == ["1"]

    async def test_publish_makes_everything_visible(self, tmp_path: Path) -> None:
        """A store that is opened later sees it too."""
        async with self.opened(tmp_path) as store:
            await save(store, "1", "a")
            await save(store, "final", "b", 1)
            await expect(store, "1")
        async with self.opened(tmp_path) as again:
            assert sorted(await again.names()) == ["1", "final"]
            await expect(again, "1")
            await expect(again, "final", 1)
            assert list(await again.sweep()) == []

    async def test_abort_leaves_nothing_after_any_prefix_of_a_save(self, store: Store) -> None:
        """The name can be saved afterwards."""
        for steps in range(7):
            save_id = identity(f"a{steps}")
            attempt = await store.begin("1", save_id)
            file = None
            if steps > 0:
                file = await attempt.create(data_path(save_id), nbytes=PAGE, window_nbytes=PAGE)
            if file and steps > 1:
                await file.write(0, pattern(PAGE))
            if file and steps > 2:
                await file.seal(PAGE)
            if steps > 3:
                await attempt.put("default/small", b"x")
            if steps > 4:
                await attempt.create(data_path(save_id, "other"), nbytes=PAGE, window_nbytes=PAGE)
            if steps > 5:
                with pytest.raises(UsageError):
                    await attempt.put("../escape", b"x")
            await attempt.abort()
            await attempt.abort()
            await self.expect_nothing(store, "1")
            assert list(await store.sweep()) == []
        await save(store, "1", "b")
        await expect(store, "1")

    async def test_sweep_leaves_a_live_attempt_alone(self, store: Store, other: Store) -> None:
        """Its files still exist when it publishes."""
        attempt = await store.begin("1", SAVE_ID)
        path = await write_file(attempt, data_path(SAVE_ID), pattern(PAGE + 1))
        assert list(await other.sweep()) == []
        record = await put(attempt, SAVE_ID, {"default/small": b"small 0"}, 0, path)
        assert list(await store.sweep()) == []
        assert list(await other.collect(YEAR_S)) == []
        await attempt.publish(record)
        await expect(store, "1")

    async def test_a_cancelled_publish_is_all_or_nothing(self, store: Store) -> None:
        """The call either raises and nothing is visible, or returns and everything is."""
        for turns in range(30):
            name = str(turns)
            attempt = await store.begin(name, identity(f"a{turns}"))
            record = await fill(attempt, identity(f"a{turns}"))
            if await cancelled_after(turns, attempt.publish(record)):
                await self.expect_nothing(store, name)
            else:
                await expect(store, name)
            await attempt.abort()
        assert list(await store.sweep()) == []

    async def test_of_two_attempts_at_one_name_exactly_one_publishes(self, store: Store) -> None:
        """The others get `CheckpointExistsError`, and the winner is untouched."""
        if not self.conditional_create:
            return
        seeds = range(4)
        errors: list[CheckpointExistsError] = []

        async def one(seed: int) -> None:
            try:
                await save(store, "1", f"a{seed}", seed)
            except CheckpointExistsError as error:
                errors.append(error)

        await together(map(one, seeds))
        assert len(errors) == len(seeds) - 1
        winner = (await content(store, "1", RECORD, 1000)).split()[1]
        await expect(store, "1", int(winner))
        assert list(await store.sweep()) == []

    async def test_a_taken_name_is_kept_as_it_was(self, store: Store) -> None:
        """A save without `overwrite` fails when it publishes, and leaves nothing."""
        await save(store, "1", "a", 1)
        with pytest.raises(CheckpointExistsError):
            await save(store, "1", "b", 2)
        await expect(store, "1", 1)
        assert await store.names() == ["1"]
        assert list(await store.sweep()) == []

    async def test_overwrite_replaces(self, store: Store) -> None:
        """A reader opened later finds the new contents and nothing of the old."""
        await save(store, "1", "a", 1)
        await save(store, "1", "b", 2, overwrite=True)
        await expect(store, "1", 2)
        await save(store, "2", "c", 3, overwrite=True)  # nothing to replace
        await expect(store, "2", 3)
        assert sorted(await store.names()) == ["1", "2"]
        assert list(await store.sweep()) == []

    async def test_an_aborted_overwrite_keeps_the_old_one(self, store: Store) -> None:
        """The old checkpoint is complete until `publish`."""
        await save(store, "1", "a", 1)
        attempt = await store.begin("1", identity("b"), overwrite=True)
        await attempt.put("default/small", b"other")
        await expect(store, "1", 1)
        await attempt.abort()
        await expect(store, "1", 1)

    async def test_delete_removes_one_checkpoint(self, store: Store) -> None:
        """Its name is free again; others stay."""
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
        self, store: Store
    ) -> None:
        """In between, the name is free, and a new checkpoint under it loses nothing."""
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
        self, store: Store
    ) -> None:
        """`seal` identifies the checkpoint to delete by the end of its record."""
        await save(store, "1", "a", 1)
        seal = await content(store, "1", RECORD, 1000)
        await save(store, "1", "b", 2, overwrite=True)
        with pytest.raises(CheckpointNotFoundError):
            await store.unlist("1", seal=seal)
        await expect(store, "1", 2)
        seal = await content(store, "1", RECORD, 1000)
        await (await store.unlist("1", seal=seal[-5:]))()
        await self.expect_nothing(store, "1")

    async def test_names_that_are_no_single_path_part_are_refused(self, store: Store) -> None:
        """Before anything is created."""
        for name in ("", ".", "..", "a/b", "/a", "a\0b"):
            with pytest.raises(UsageError):
                await store.begin(name, SAVE_ID)
        assert await store.names() == []
