"""Laws of cancellation: a cancelled call stops using its buffer and is all or nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from asyncckpt.testing.checkpoints import (
    cancelled_after,
    content,
    data_path,
    expect,
    fill,
    identity,
    pattern,
    reading,
    record_of,
    save_file,
)
from asyncckpt.testing.store_laws.subject import StoreLaws


class Cancelling(StoreLaws):
    """Buffers may be reused, and publishing is all or nothing."""

    async def test_a_cancelled_write_does_not_use_its_buffer_any_more(self, tmp_path: Path) -> None:
        """Once the call has raised, the buffer can be reused."""
        async with self.opened(tmp_path) as store:
            attempt = await store.begin("1", identity("a"))
            nbytes = 1 << 20
            file = await attempt.create(
                data_path(identity("a")), nbytes=nbytes, window_nbytes=nbytes
            )
            buffer, final = pattern(nbytes), pattern(nbytes, 1)
            for turns in range(20):
                buffer[:] = 1
                await cancelled_after(turns % 5, file.write(0, buffer))
                buffer[:] = 2
                if not store.capabilities.positional_writes:
                    break
                await file.write(0, final)
                await file.write(0, final)
            if store.capabilities.positional_writes:
                await file.seal(nbytes)
                await attempt.publish(record_of(identity("a")))
                assert await content(store, "1", file.path, nbytes) == final.tobytes()
            else:
                await attempt.abort()

    async def test_a_cancelled_publish_is_all_or_nothing(self, tmp_path: Path) -> None:
        """The call either raises and nothing is visible, or returns and everything is."""
        async with self.opened(tmp_path) as store:
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

    async def test_a_cancelled_read_does_not_use_its_buffer_any_more(self, tmp_path: Path) -> None:
        """Once the call has raised, the buffer does not change."""
        async with self.opened(tmp_path) as store:
            data = pattern(4 << 20)
            path = await save_file(store, data)
            buffer, other = np.empty_like(data), np.empty_like(data)
            async with reading(store, "1") as files:
                for turns in range(10):
                    await cancelled_after(turns % 5, files.read_into(path, 0, [buffer]))
                    buffer[:] = 7
                    await files.read_into(path, 0, [other])
                    assert int(buffer.min()) == int(buffer.max()) == 7
