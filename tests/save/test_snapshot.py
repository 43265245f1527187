"""`snapshot="reference"`: immutable leaves are held, everything else is copied at the call."""

from __future__ import annotations

import asyncio
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import asyncckpt
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.save.snapshot import check_alone, take_snapshot
from asyncckpt.spec import Partition

BUDGET = 64 << 20


async def test_reference_holds_jax_arrays_and_copies_mutable_leaves(tmp_path: Path) -> None:
    held = jnp.arange(1 << 20, dtype=jnp.float32)
    mutable = np.arange(1 << 18, dtype=np.int64)
    tree = {"held": held, "mutable": mutable, "small": np.arange(3), "n": 5}
    options = asyncckpt.SaveOptions(snapshot="reference", host_memory_nbytes=BUDGET)
    async with asyncckpt.Checkpointer(tmp_path, save_options=options) as ckpt:
        pending = await ckpt.start_save(1, tree)
        mutable[:] = -1
        tree["small"][:] = -1
        report = await pending
        assert report.referenced_nbytes == held.nbytes
        restored = await ckpt.restore(1)
    np.testing.assert_array_equal(restored["held"], np.arange(1 << 20, dtype=np.float32))
    np.testing.assert_array_equal(restored["mutable"], np.arange(1 << 18))
    np.testing.assert_array_equal(restored["small"], np.arange(3))


async def test_reference_copies_as_usual_where_mutable_leaves_are_many(tmp_path: Path) -> None:
    mutable = np.arange(BUDGET // 8, dtype=np.int64)
    options = asyncckpt.SaveOptions(snapshot="reference", host_memory_nbytes=BUDGET)
    async with asyncckpt.Checkpointer(tmp_path, save_options=options) as ckpt:
        pending = await ckpt.start_save(1, {"mutable": mutable, "held": jnp.zeros(1000)})
        mutable[:] = -1
        report = await pending
        assert report.referenced_nbytes == 0
        restored = await ckpt.restore(1)
    np.testing.assert_array_equal(restored["mutable"], np.arange(BUDGET // 8))


async def test_copies_of_mutable_leaves_may_outnumber_the_slots_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay until the end of staging, which must not wait for them."""
    mutable = np.arange(3 << 20, dtype=np.int64)
    options = asyncckpt.SaveOptions(snapshot="reference", host_memory_nbytes=128 << 20)
    async with asyncio.timeout(60), asyncckpt.Checkpointer(tmp_path, save_options=options) as ckpt:
        monkeypatch.setattr(ckpt._session.runtime.pool, "_pipeline_slots", 1)
        pending = await ckpt.start_save(1, {"mutable": mutable, "held": jnp.zeros(1000)})
        mutable[:] = -1
        report = await pending
        assert report.referenced_nbytes == 4000
        restored = await ckpt.restore(1)
        assert ckpt._session.runtime.budget.kept == 0
    np.testing.assert_array_equal(restored["mutable"], np.arange(3 << 20))


@pytest.mark.parametrize(
    ("place", "chunk_mib", "held"),
    [
        ("memory", None, True),
        ("disk", 24, True),
        ("disk", 30, False),  # four slots for the copies, four for the chunk, one to pack it into
    ],
)
async def test_copies_leave_room_for_what_is_compressed(
    tmp_path: Path, place: str, chunk_mib: int | None, held: bool
) -> None:
    """Copies, files that are packed and the next chunk are all kept at once, or nothing is held."""
    root = f"memory://{tmp_path}" if place == "memory" else tmp_path
    mutable = np.tile(np.arange(15 << 10, dtype=np.uint16), 1 << 10)
    own = None if chunk_mib is None else asyncckpt.LeafOptions(chunk_shape=(chunk_mib << 19,))
    options = asyncckpt.SaveOptions(
        snapshot="reference",
        host_memory_nbytes=BUDGET,
        compression="zstd",
        compression_level=1,
        leaf_options=lambda path, _: own if path == "mutable" else None,
    )
    async with asyncio.timeout(30), asyncckpt.Checkpointer(root, save_options=options) as ckpt:
        pending = await ckpt.start_save(1, {"mutable": mutable, "held": jnp.zeros(1000)})
        mutable[:] = 7
        report = await pending
        assert report.referenced_nbytes == (4000 if held else 0)
        restored = await ckpt.restore(1)
        budget = ckpt._session.runtime.budget
        assert (budget.in_use, budget.kept) == (0, 0)
    np.testing.assert_array_equal(
        restored["mutable"].reshape(1 << 10, -1), [np.arange(15 << 10)] * (1 << 10)
    )
    np.testing.assert_array_equal(restored["held"], np.zeros(1000))


async def test_where_nothing_is_copied_a_chunk_may_take_the_whole_budget(tmp_path: Path) -> None:
    held = jnp.zeros(BUDGET // 4, jnp.float32)
    options = asyncckpt.SaveOptions(
        snapshot="reference",
        host_memory_nbytes=BUDGET,
        compression="zstd",
        compression_level=1,
        leaf_options=lambda _, spec: asyncckpt.LeafOptions(chunk_shape=spec.shape),
    )
    async with asyncio.timeout(30), asyncckpt.Checkpointer(tmp_path, save_options=options) as ckpt:
        report = await (await ckpt.start_save(1, {"held": held}))
        assert report.referenced_nbytes == held.nbytes
        assert (await ckpt.inspect(1))["held"].chunk_count == 1
        assert (await ckpt.verify(1)).ok


async def test_copy_is_the_default_and_refers_to_nothing(tmp_path: Path) -> None:
    report = await asyncckpt.save(tmp_path / "x", {"a": jnp.zeros(1 << 16)})
    assert report.referenced_nbytes == 0


async def test_one_process_cannot_save_an_array_with_gaps(tmp_path: Path) -> None:
    part = asyncckpt.ShardedArray((4, 3), "float32", [((2, 0), np.zeros((2, 3), np.float32))])
    with pytest.raises(
        asyncckpt.UsageError, match=r"^a/b: .* float32\[4,3\], do not tile it: nothing holds \[0:2,"
    ) as caught:
        await asyncckpt.save(tmp_path / "x", {"a": {"b": part}})
    assert caught.value.path == "a/b"
    assert list(tmp_path.iterdir()) == []


def test_one_process_cannot_save_an_array_of_several() -> None:
    snapshot = take_snapshot({"a": np.zeros(3), "b": np.zeros(4)})
    check_alone(snapshot)
    snapshot.sources[1].partition = Partition((2,), "2[0+2] 0", tuple(range(20)))
    snapshot.shared.append(1)
    with pytest.raises(
        UnsupportedLeafError, match=r"^b: .* other processes too \(processes 0, 1, .* 7, …\)"
    ):
        check_alone(snapshot)


async def test_delete_leaves_directories_without_a_record_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "2024"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        try:
            await ckpt.delete(2024)
        except asyncckpt.CheckpointNotFoundError as error:
            assert "there is no checkpoint to delete" in str(error)
        else:
            raise AssertionError("a directory that is no checkpoint was deleted")
    assert (foreign / "notes.txt").read_text() == "mine"


async def test_delete_removes_a_checkpoint_with_a_damaged_record(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(3, {"a": np.zeros(4)})
        record = tmp_path / "3" / "checkpoint.json"
        record.write_bytes(record.read_bytes()[:-40])
        assert await ckpt.steps() == []
        await ckpt.delete(3)
    assert not (tmp_path / "3").exists()
