"""`snapshot="reference"`: immutable leaves are held, everything else is copied at the call."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.adapters.numpy import NumpyAdapter
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.options import SLOT_NBYTES
from asyncckpt.ports import Source
from asyncckpt.save.snapshot import Sources, check_alone, take_snapshot, tree_nbytes
from asyncckpt.spec import DTYPES, ArraySpec, Partition, array_spec

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
        ("disk", 8, True),
        # Four slots for the copies, four for the chunk and its compressed form, one to pack into.
        ("disk", 16, False),
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


async def test_where_nothing_is_copied_a_chunk_and_its_compressed_form_may_take_all_but_one_window(
    tmp_path: Path,
) -> None:
    held = jnp.zeros((BUDGET - 2 * SLOT_NBYTES) // 2 // 4, jnp.float32)
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
    with pytest.raises(
        UnsupportedLeafError,
        match=r"^b: .* other processes too \(processes 0, 1, .* 7 and 12 more\)",
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


# ------------------------------------------------------------------- small arrays without objects


def plain_and_others() -> dict[str, object]:
    base = np.arange(12.0)
    swapped = np.arange(3, dtype=">i4")
    return {
        "first": np.ones(3, np.float32),
        "like the first": np.zeros(3, np.float32),
        "another shape": np.zeros((3, 1), np.float32),
        "another dtype": np.zeros(3, np.float64),
        "rows": base.reshape(3, 4),
        "columns": base.reshape(3, 4).T,
        "part": base[2:5],
        "part of no memory": base[2:2],
        "empty": np.zeros((0, 2)),
        "swapped": swapped,
        "swapped again": swapped.copy(),
        "scalar": np.float32(3.0),
        "rank 0": np.array(5),
        "brain floats": np.ones(3, DTYPES["bfloat16"]),
        "more brain floats": np.full(3, 2, DTYPES["bfloat16"]),
        "count": 3,
    }


def test_arrays_like_earlier_ones_are_opened_as_by_their_adapter() -> None:
    tree = plain_and_others()
    found = take_snapshot({**tree, "once more": dict(tree)})
    found.tie()
    adapter = NumpyAdapter()
    arrays = [leaf for leaf in tree.values() if isinstance(leaf, (np.ndarray, np.generic))]
    assert sum(values is not None for values in found.sources.plain) >= 5
    for leaf, source in zip(arrays * 2, found.sources, strict=True):
        expected = adapter.source("x", leaf)
        assert source.spec == expected.spec and source.framework == "numpy"
        for one, other in ((source.leaf, expected.leaf), (source.view, expected.view)):
            assert one is other or np.array_equal(one, other)
    count = len(arrays)
    for number, leaf in enumerate(arrays):
        may_be_tied = isinstance(leaf, np.ndarray) and leaf.size > 0
        assert found.tied.get(count + number) == (number if may_be_tied else None)
    assert found.nbytes == sum(leaf.nbytes for leaf in arrays) + arrays[11].nbytes
    assert found.kinds == [*["numpy"] * count, "int"] * 2
    assert found.array_leaf == [*range(count), *range(count + 1, 2 * count + 1)]


def test_an_array_is_tied_to_a_view_of_all_of_it_and_to_no_other() -> None:
    one, other = np.arange(6), np.arange(6)
    views = {"a": one, "b": one[:], "c": one[:3], "d": one.reshape(2, 3), "e": other, "f": one}
    found = take_snapshot({"first": np.zeros(6, np.int64), **views})
    found.tie()
    assert found.tied == {2: 1, 6: 1}


def test_ties_are_those_of_the_addresses_in_any_mixture_of_views() -> None:
    """Addresses are read only where memory may be shared; the result does not show that."""
    owner, other, raw = np.arange(24.0), np.arange(24.0), bytes(96)
    foreign = memoryview(np.arange(24.0))
    known = [owner, owner[:], owner[:12], owner[:12], owner[12:], owner.view(np.int64)]
    known += [owner.reshape(4, 6), owner.reshape(4, 6), other.view(np.int64), other]
    unknown = [np.frombuffer(foreign), np.frombuffer(foreign), np.frombuffer(memoryview(owner))]
    unknown += [np.frombuffer(raw, np.int32), np.frombuffer(raw, np.int32)[:]]
    opened = [owner.view(np.recarray), owner[:12].view(np.recarray), np.float32(1.0)]
    random = np.random.default_rng(0)
    for number in range(300):
        some = [known, known + unknown, known + opened, known + unknown + opened][number % 4]
        leaves = [some[i] for i in random.permutation(len(some))[: random.integers(1, len(some))]]
        identities = [NumpyAdapter().source("x", leaf).identity for leaf in leaves]
        expected = {
            place: identities.index(identity)
            for place, identity in enumerate(identities)
            if identity is not None and identities.index(identity) != place
        }
        found = take_snapshot(leaves)
        found.tie()
        assert found.tied == expected


def test_no_address_is_looked_up_where_no_two_arrays_have_one_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(_: object) -> None:
        raise AssertionError("looked up")

    monkeypatch.setitem(take_snapshot.__globals__, "memory_identity", never)
    views = [np.zeros(4).view(np.int64) for _ in range(9)]
    found = take_snapshot({"views": views, "whole": np.zeros(4), "torch": torch.zeros(4), "n": 1})
    found.tie()
    assert not found.tied


def test_tensors_that_differ_only_in_the_strides_of_axes_of_one_element_are_tied() -> None:
    tensor = torch.arange(6.0).reshape(1, 6)
    other = tensor.as_strided((1, 6), (99, 1))
    turned = torch.arange(6.0).reshape(2, 3).t()
    found = take_snapshot([tensor, other, turned, turned.contiguous(), turned[:]])
    found.tie()
    assert found.tied == {1: 0, 4: 2}


def test_the_view_of_an_array_needs_no_source_and_is_that_of_its_source() -> None:
    array, swapped = np.arange(6), np.arange(3, dtype=">i4")
    sources = take_snapshot([array, swapped, torch.arange(3)]).sources
    assert sources.view(0) is array and 0 not in sources.opened
    assert sources[0].view is array and sources.view(0) is array
    assert sources.view(1) is None
    assert sources.view(2) is sources[2].view


def test_long_bytes_are_an_array_that_shares_their_memory() -> None:
    value = b"x" * 1025
    found = take_snapshot({"short": b"x" * 1024, "long": value})
    assert found.array_leaf == [1] and found.extra == {1: {"python": "bytes"}}
    (source,) = found.sources
    assert source.spec.dtype == "uint8" and source.spec.shape == (1025,)
    assert source.leaf.base is value


def test_an_array_that_cannot_be_stored_is_named_among_ones_that_can() -> None:
    good = {f"a{n}": np.zeros(3) for n in range(5)}
    with pytest.raises(UnsupportedLeafError, match="2 leaves cannot be saved") as caught:
        take_snapshot({**good, "bad": np.zeros(3, object), "x": np.zeros(3), "worse": {1, 2}})
    assert "bad" in str(caught.value) and "worse" in str(caught.value)


async def test_what_is_rebound_after_the_call_is_not_saved(tmp_path: Path) -> None:
    tree = {"a": np.arange(3), "b": {"c": np.arange(3), "n": 1}}
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        pending = await ckpt.start_save(1, tree)
        tree["b"]["c"] = np.zeros(3)
        tree["b"]["n"] = 2
        tree["a"] += 1
        await pending
        restored = await ckpt.restore(1)
    assert restored["b"]["n"] == 1
    np.testing.assert_array_equal(restored["a"], np.arange(3))
    np.testing.assert_array_equal(restored["b"]["c"], np.arange(3))


def test_small_arrays_leave_no_object_that_the_collector_tracks() -> None:
    tree = {f"a{n}": np.zeros(10 + n % 3) for n in range(3000)}
    gc.collect()
    before = len(gc.get_objects())
    found = take_snapshot(tree)
    found.tie()
    gc.collect()
    assert len(gc.get_objects()) - before < 100
    assert len(found.sources) == 3000


async def test_small_arrays_of_every_kind_come_back_as_they_were(tmp_path: Path) -> None:
    tree = plain_and_others()
    tree["once more"] = {key: np.copy(leaf) for key, leaf in tree.items()}
    await asyncckpt.save(tmp_path / "one", tree)
    restored = await asyncckpt.restore(tmp_path / "one")
    target = await asyncckpt.restore(tmp_path / "one")
    for name in ("rows", "columns"):
        target[name] = np.asfortranarray(target[name])  # not one run of bytes
    for leaf in (*target.values(), *target["once more"].values()):
        if isinstance(leaf, np.ndarray):
            leaf.fill(9)
    await asyncckpt.restore_into(tmp_path / "one", target)
    for found in (restored, target):
        for one, other in ((tree, found), (tree["once more"], found["once more"])):
            for key, leaf in one.items():
                if key != "once more":
                    np.testing.assert_array_equal(leaf, other[key], err_msg=key)


def test_staging_memory_is_prepared_only_for_what_this_process_holds() -> None:
    whole = np.zeros((8, 1000))
    parts = [((0, 0), whole[:2]), ((4, 0), whole[4:5])]
    tree = {"part": asyncckpt.ShardedArray((8, 1000), "float64", parts), "own": np.zeros(1000)}
    assert tree_nbytes(tree) == 3 * 8000 + 8000


# ------------------------------------------------------------------------------- opened arrays


def test_threads_that_ask_for_an_array_at_the_same_time_get_one_source() -> None:
    sources = Sources()
    array = np.arange(3.0)
    sources.append_plain(ArraySpec((3,), "float64"), array)
    others: list[Source] = []

    class Interrupted(dict[int, Source]):
        def get(self, number: Any, default: Any = None) -> Any:
            found = super().get(number)
            if not others:
                others.append(found)
                others[0] = sources[number]  # another thread, between two steps of this one
            return found

    sources.opened = Interrupted()
    assert sources[0].view is array
    assert sources[0] is others[0]
    assert sources.plain == [None]


def test_a_source_is_made_once_and_forgotten_with_all_others() -> None:
    one, other = np.arange(3), np.arange(4.0)
    sources = Sources()
    sources.append_plain(array_spec((3,), "int64"), one)
    sources.append(NumpyAdapter().source("x", other))
    assert len(sources) == 2 and sources.plain == [one, None]
    made = sources[0]
    assert made.leaf is made.view is one and sources[0] is made
    assert sources.plain == [None, None]
    with pytest.raises(IndexError):
        sources[2]
    sources.append_plain(array_spec((3,), "int64"), one)
    sources.forget()
    assert sources.plain == [None, None, None]
    assert all(source.leaf is source.view is None for source in sources)
