"""Laws of writing: by any method, of any length, in any order, until cancelled."""

from __future__ import annotations

import numpy as np
import pytest

from asyncckpt.errors import UsageError
from asyncckpt.flow.shield import together
from asyncckpt.ports import Bytes, Store
from asyncckpt.testing.checkpoints import (
    KIB,
    PAGE,
    PIECE_NBYTES,
    RECORD,
    SAVE_ID,
    cancelled_after,
    content,
    data_path,
    named,
    pattern,
    put,
    record_of,
    save_file,
    write_file,
)
from asyncckpt.testing.store_laws import StoreLaws

LENGTHS = (0, 1, PAGE - 1, PAGE, PAGE + 1, 64 * KIB, 256 * KIB + 1, 1024 * KIB - 1)
"""File lengths around the boundaries of pages and of direct writes."""


class Writing(StoreLaws):
    """Files contain exactly what was written."""

    @pytest.mark.parametrize("nbytes", LENGTHS)
    async def test_a_file_of_any_length_comes_back(self, store: Store, nbytes: int) -> None:
        """With positional writes, the announced length may even be wrong."""
        data = pattern(nbytes)
        attempt = await store.begin("1", SAVE_ID)
        whole = data_path(SAVE_ID, "whole")
        paths = ["small", "view", "blocks", whole]
        paths.append(await write_file(attempt, data_path(SAVE_ID, "exact"), data))
        announced = {"less": 1, "more": nbytes + 3 * PAGE}
        for path, size in announced.items() if store.capabilities.positional_writes else ():
            file = await attempt.create(
                data_path(SAVE_ID, path), nbytes=size, window_nbytes=self.window_nbytes
            )
            for start in range(0, nbytes, PIECE_NBYTES):
                await file.write(start, data[start : start + PIECE_NBYTES])
            await file.seal(nbytes)
            paths.append(file.path)
        raw = data.tobytes()
        blocks = b"", bytearray(raw[: nbytes // 3]), memoryview(raw)[nbytes // 3 :]
        await attempt.put("view", memoryview(raw))
        await attempt.put("small", raw)
        await attempt.put("blocks", *blocks)
        await attempt.put(whole, *blocks)
        small = named(attempt, {"view": raw, "small": raw, "blocks": raw})
        await attempt.publish(record_of(SAVE_ID, fixed=small))
        for path in paths:
            assert await content(store, "1", path, nbytes) == data.tobytes(), path

    async def test_parts_are_written_in_any_order_and_at_once(self, store: Store) -> None:
        """Parts have any length and alignment; each is written once."""
        if not store.capabilities.positional_writes:
            return
        data = pattern(2 << 20)
        random = np.random.default_rng(0)
        cuts = np.unique(random.integers(1, data.size, 30))
        cuts = np.unique(np.concatenate([[0], cuts, cuts[:10] // PAGE * PAGE, [data.size]]))
        spans = list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True))
        random.shuffle(spans)
        attempt = await store.begin("1", SAVE_ID)
        file = await attempt.create(
            data_path(SAVE_ID), nbytes=data.size, window_nbytes=self.window_nbytes
        )
        await together(file.write(start, data[start:stop]) for start, stop in spans)
        await file.seal(data.size)
        await attempt.publish(record_of(SAVE_ID))
        assert await content(store, "1", file.path, data.size) == data.tobytes()

    async def test_windows_are_written_in_any_order_and_at_once(self, store: Store) -> None:
        """Files are shorter than a window, as long, and longer."""
        window = self.window_nbytes
        attempt = await store.begin("1", SAVE_ID)
        contents: dict[str, Bytes] = {}
        # Without positional writes, a file is at most one window.
        longest = 2 * window + 5 if store.capabilities.positional_writes else window
        for nbytes in (0, PAGE + 1, window, longest):
            data = pattern(nbytes)
            file = await attempt.create(
                data_path(SAVE_ID, str(nbytes)), nbytes=nbytes, window_nbytes=window
            )
            starts = reversed(range(0, nbytes, window))
            written = await together(file.write(at, data[at : at + window]) for at in starts)
            assert all(type(reusable) is bool for reusable in written)
            await file.seal(nbytes)
            contents[file.path] = data
        await attempt.publish(record_of(SAVE_ID))
        for path, data in contents.items():
            assert await content(store, "1", path, data.size) == data.tobytes(), path

    async def test_bytearrays_are_written_as_they_are(self, store: Store) -> None:
        """Clients that accept no other buffer get the staged memory itself."""
        data = bytearray(pattern(64 * KIB).tobytes())
        path = await save_file(store, data)
        assert await content(store, "1", path, len(data)) == data

    async def test_seal_cuts_a_file_to_its_length(self, store: Store) -> None:
        """Padding after the end, which keeps writes aligned, is cut off."""
        data = pattern(64 * PAGE)
        attempt = await store.begin("1", SAVE_ID)
        file = await attempt.create(
            data_path(SAVE_ID), nbytes=63 * PAGE + 5, window_nbytes=64 * PAGE
        )
        await file.write(0, data)
        await file.seal(63 * PAGE + 5)
        await attempt.publish(record_of(SAVE_ID))
        found = await content(store, "1", file.path, data.size)
        assert found == data[: 63 * PAGE + 5].tobytes()

    async def test_a_read_only_buffer_can_be_written(self, store: Store) -> None:
        """A codec returns immutable bytes."""
        data = bytes(range(256)) * 16
        path = await save_file(store, np.frombuffer(data, np.uint8))
        assert await content(store, "1", path, len(data)) == data

    async def test_many_small_files_are_put_at_once(self, store: Store) -> None:
        """Writers create their directories concurrently."""
        attempt = await store.begin("1", SAVE_ID)
        small = {f"a/b{i % 3}/c/{i}": b"%d" % i for i in range(20)}
        await attempt.publish(await put(attempt, SAVE_ID, small))
        for path, data in small.items():
            assert await content(store, "1", path, 10) == data

    async def test_paths_stay_inside_the_checkpoint(self, store: Store) -> None:
        """Only `publish` writes the record."""
        attempt = await store.begin("1", SAVE_ID)
        for path in ("", "/a", "../a", "a/../b", "a//b", ".", "a/", "a\0", RECORD):
            with pytest.raises(UsageError):
                await attempt.put(path, b"x")
            with pytest.raises(UsageError):
                await attempt.create(path, nbytes=1, window_nbytes=PAGE)
        await attempt.abort()

    async def test_a_cancelled_write_does_not_use_its_buffer_any_more(self, store: Store) -> None:
        """Once the call has raised, the buffer can be reused."""
        attempt = await store.begin("1", SAVE_ID)
        nbytes = 1 << 20
        file = await attempt.create(data_path(SAVE_ID), nbytes=nbytes, window_nbytes=nbytes)
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
            await attempt.publish(record_of(SAVE_ID))
            assert await content(store, "1", file.path, nbytes) == final.tobytes()
        else:
            await attempt.abort()
