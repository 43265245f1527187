"""Data files on an object store, each one request."""

from __future__ import annotations

import logging

import pytest

from asyncckpt.errors import UsageError
from asyncckpt.stores.objects.layout import check_key, owner
from asyncckpt.stores.objects.requests.sizes import PUT_THRESHOLD_NBYTES
from asyncckpt.testing.checkpoints import (
    PAGE,
    content,
    data_path,
    delete,
    identity,
    pattern,
    put,
    record_of,
)
from tests.simulator import Fault, Gate, Request, Simulator
from tests.stores.objects.stores import KINDS, UNRACED, names, opened, whole, writes
from tests.watch import no_blocking_calls

# --------------------------------------------------------------------------------------- data files


@pytest.mark.parametrize("kind", KINDS)
async def test_a_file_that_is_put_keeps_its_name(sim: Simulator, kind: str) -> None:
    """Its bytes never change, so that a try that arrives late is harmless; the index is one."""
    async with opened(kind, sim) as store:
        sim.faults.append(Fault(kind="put_object", key="*-data", reset=True, applied=True))
        attempt = await store.begin("1", identity("a"))
        path = data_path(identity("a"))
        await attempt.put(path, pattern(PAGE + 1).tobytes())
        small = {"default/small": b"small 0"}
        await attempt.publish(await put(attempt, identity("a"), small, 0, path))
        await whole(sim, store, "1", 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_data_file_whose_answer_was_lost_gets_another_name(
    sim: Simulator, kind: str
) -> None:
    async with opened(kind, sim, policy=UNRACED) as store:
        sim.faults.append(Fault(kind="put_object", key="*-data", reset=True, applied=True))
        attempt = await store.begin("1", identity("a"))
        file = await attempt.create(
            data_path(identity("a")), nbytes=PAGE + 1, window_nbytes=2 * PAGE
        )
        assert await file.write(0, pattern(PAGE + 1))
        await file.seal(PAGE + 1)
        path = file.path
        assert path == data_path(identity("a")) + ".r1" and owner(path) == identity("a")
        small = {"default/small": b"small 0"}
        await attempt.publish(await put(attempt, identity("a"), small, 0, path))
        await whole(sim, store, "1", 0)
    # The orphan is gone, or was gone already when the answer was lost.
    assert [key for key in names(sim) if "/d/" in key] == [f"1/{path}"]


@pytest.mark.parametrize("kind", KINDS)
async def test_an_orphan_that_cannot_be_removed_keeps_no_fixed_name_from_being_written(
    sim: Simulator, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    gate = Gate()

    def release(_: Request) -> None:
        gate.release()

    deletion = {"kind": ("delete_object", "delete_objects"), "number": 0, "hook": release}
    sim.faults.append(Fault(kind="put_object", key="*-data", reset=True, applied=True))
    sim.faults.append(Fault(kind="put_object", key="*/default/small", gate=gate))
    sim.faults.append(Fault(**deletion, status=403))
    async with opened(kind, sim, policy=UNRACED) as store:
        attempt = await store.begin("1", identity("a"))
        path, nbytes = data_path(identity("a")), PAGE + 1
        file = await attempt.create(path, nbytes=nbytes, window_nbytes=2 * PAGE)
        await file.write(0, pattern(nbytes))
        await file.seal(nbytes)
        with caplog.at_level(logging.WARNING, "asyncckpt"):
            small = {"default/small": b"small 0"}
            await attempt.publish(await put(attempt, identity("a"), small, 0, file.path))
            await whole(sim, store, "1", 0)
    assert ("1/commit_success.txt" in names(sim)) == (kind == "gcsfs")
    assert "orphaned data objects" in caplog.text and "other programs" not in caplog.text


@pytest.mark.parametrize("kind", ("memory", "s3fs", "gcsfs"))
async def test_saving_blocks_no_loop(sim: Simulator, kind: str) -> None:
    data = pattern(10 << 20)
    blocks = [bytearray(memoryview(data)[start::2]) for start in range(2)]
    async with opened(kind, sim, "blocked") as store:
        with no_blocking_calls():
            attempt = await store.begin("1", identity("a"))
            whole = await attempt.create(
                data_path(identity("a")), nbytes=data.size, window_nbytes=data.size
            )
            await whole.write(0, data)
            await whole.seal(data.size)
            await attempt.put(data_path(identity("a"), "index"), *blocks)
            await attempt.put("default/large", memoryview(data)[: 1 << 20])
            await attempt.publish(record_of(identity("a"), 0, whole.path))
            await delete(store, "1")


@pytest.mark.parametrize("kind", ("memory", "gcsfs", "obstore"))
async def test_a_file_of_many_blocks_is_one_request_of_any_length(
    sim: Simulator, kind: str
) -> None:
    data = pattern(33 << 20).tobytes()
    step = 5 << 20
    blocks = [bytearray(data[start : start + step]) for start in range(0, len(data), step)]
    async with opened(kind, sim, "long") as store:
        attempt = await store.begin("1", identity("a"))
        sim.reset()
        path = data_path(identity("a"))
        await attempt.put(path, *blocks)
        puts = [r for r in writes(sim) if identity("a") in r.key]
        assert kind == "memory" or [r.kind for r in puts] == ["put_object"]
        await attempt.publish(record_of(identity("a"), 0, path))
        assert await content(store, "1", path, len(data)) == data
        await delete(store, "1")


async def test_an_index_beyond_what_one_request_may_send_is_refused(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncckpt.stores.objects.attempt.PUT_MAX_NBYTES", 3 << 20)
    half = bytes((3 << 19) + 1)
    async with opened("obstore", sim) as store:
        attempt = await store.begin("1", identity("a"))
        with pytest.raises(UsageError, match=r"more than the 3 MiB that one .* \(chunk_nbytes\)"):
            await attempt.put(data_path(identity("a")), half, half)
        await attempt.put(data_path(identity("a"), "fits"), half)
        await attempt.abort()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_data_file_that_does_not_fit_one_request_is_refused(
    sim: Simulator, kind: str
) -> None:
    async with opened(kind, sim) as store:
        attempt = await store.begin("1", identity("a"))
        with pytest.raises(UsageError, match="lower target_data_file_nbytes"):
            await attempt.create(data_path(identity("a")), nbytes=2 * PAGE, window_nbytes=PAGE)
        await attempt.abort()


async def test_a_data_file_size_that_one_request_cannot_hold_is_clamped_and_noted(
    sim: Simulator,
) -> None:
    async with opened("obstore", sim) as store:
        budget = 8 << 30
        large = store.sizes(4 << 30, budget_nbytes=budget, data_file_nbytes=1 << 30)
        assert PUT_THRESHOLD_NBYTES // 2 < large.data_file_nbytes <= PUT_THRESHOLD_NBYTES
        assert large.notes and "target_data_file_nbytes=1.0 GiB" in large.notes[0]
        assert "one request" in large.notes[0]
        small = store.sizes(4 << 30, budget_nbytes=128 << 20, data_file_nbytes=128 << 20)
        assert small.data_file_nbytes < 128 << 20 and "host_memory_nbytes" in small.notes[0]
        for wanted in (None, 32 << 20):
            fits = store.sizes(4 << 30, budget_nbytes=budget, data_file_nbytes=wanted)
            assert fits.notes == ()


@pytest.mark.parametrize(("scheme", "length"), [("s3", 1025), ("gs", 1025), ("s3", 1024 - 127)])
def test_names_whose_keys_would_be_too_long_are_refused(scheme: str, length: int) -> None:
    root = f"{scheme}://bucket/"
    with pytest.raises(UsageError, match="the store allows 1024; choose a shorter root") as caught:
        check_key(root + "é" * (length // 2) + "x" * (length % 2))
    assert caught.value.location is not None and caught.value.expected == 1024
    check_key(root + "x" * 896)
    check_key("memory://bucket/" + "x" * 2000)


@pytest.mark.parametrize("export", [False, True])
async def test_a_root_that_is_too_long_is_refused_before_anything_is_sent(
    sim: Simulator, export: bool
) -> None:
    async with opened("obstore", sim, root="r" * 1000) as store:
        with pytest.raises(UsageError, match="keys below it would have up to 1130 bytes"):
            if export:
                await store.begin_export("1", identity("a"))
            else:
                await store.begin("1", identity("a"))
    assert sim.requests == []
