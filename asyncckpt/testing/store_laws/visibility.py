"""Laws of visibility, before and after a checkpoint is published."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncckpt.errors import UsageError
from asyncckpt.testing.checkpoints import (
    PAGE,
    YEAR_S,
    data_path,
    expect,
    identity,
    pattern,
    put,
    record_of,
    save,
    write_file,
)
from asyncckpt.testing.store_laws.subject import StoreLaws


class Visibility(StoreLaws):
    """Nothing is visible before `publish`, everything after it."""

    async def test_an_empty_store_has_no_names(self, tmp_path: Path) -> None:
        """Opening creates nothing that looks like a checkpoint."""
        async with self.opened(tmp_path) as store:
            assert await store.names() == []
            assert list(await store.sweep()) == []

    async def test_nothing_is_visible_before_publish(self, tmp_path: Path) -> None:
        """The name is free until the last step."""
        async with self.opened(tmp_path) as store:
            await self.expect_nothing(store, "1")
            attempt = await store.begin("1", identity("a"))
            await self.expect_nothing(store, "1")
            await write_file(attempt, data_path(identity("a")), pattern(PAGE))
            await self.expect_nothing(store, "1")
            await attempt.put("small", b"x")
            await self.expect_nothing(store, "1")
            await attempt.publish(record_of(identity("a")))
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

    async def test_abort_leaves_nothing_after_any_prefix_of_a_save(self, tmp_path: Path) -> None:
        """The name can be saved afterwards."""
        async with self.opened(tmp_path) as store:
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
                    await attempt.create(
                        data_path(save_id, "other"), nbytes=PAGE, window_nbytes=PAGE
                    )
                if steps > 5:
                    with pytest.raises(UsageError):
                        await attempt.put("../escape", b"x")
                await attempt.abort()
                await attempt.abort()
                await self.expect_nothing(store, "1")
                assert list(await store.sweep()) == []
            await save(store, "1", "b")
            await expect(store, "1")

    async def test_sweep_leaves_a_live_attempt_alone(self, tmp_path: Path) -> None:
        """Its files still exist when it publishes."""
        async with self.opened(tmp_path) as store, self.opened(tmp_path) as other:
            attempt = await store.begin("1", identity("a"))
            path = await write_file(attempt, data_path(identity("a")), pattern(PAGE + 1))
            assert list(await other.sweep()) == []
            record = await put(attempt, identity("a"), {"default/small": b"small 0"}, 0, path)
            assert list(await store.sweep()) == []
            assert list(await other.collect(YEAR_S)) == []
            await attempt.publish(record)
            await expect(store, "1")
