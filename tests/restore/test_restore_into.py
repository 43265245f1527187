"""Restoring in place: the target's own memory is filled, and nothing else is touched."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.errors import (
    CorruptCheckpointError,
    MismatchError,
    RestoreError,
    StoreError,
    UnsupportedLeafError,
    UsageError,
)
from tests.checkpointer.script import Script

pytestmark = pytest.mark.usefixtures("no_blocking")


async def saved(tmp_path: Path, tree: Any, **options: Any) -> Path:
    await asyncckpt.save(tmp_path / "x", tree, **options)
    return tmp_path / "x"


async def test_the_targets_own_memory_is_filled(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tree = {"large": rng.standard_normal(600_000), "small": rng.standard_normal((3, 4))}
    place = await saved(tmp_path, tree)
    target: dict[str, Any] = {
        "large": np.zeros(600_000),
        "small": torch.zeros(3, 4, dtype=torch.float64, requires_grad=True),
    }
    pointers = [target["large"].ctypes.data, target["small"].data_ptr()]
    version = target["small"]._version
    before = dict(target)
    report = await asyncckpt.restore_into(place, target)
    assert [target["large"].ctypes.data, target["small"].data_ptr()] == pointers
    assert all(target[key] is before[key] for key in target)
    assert target["large"].tobytes() == tree["large"].tobytes()
    assert target["small"].detach().numpy().tobytes() == tree["small"].tobytes()
    assert target["small"].requires_grad and target["small"]._version > version
    assert (report.leaf_count, report.nbytes) == (2, 600_000 * 8 + 96)
    assert report.changed == report.missing == report.unexpected == ()


@pytest.mark.parametrize("compression", [None, "zstd"])
async def test_targets_of_any_strides_are_filled_and_their_neighbours_are_not(
    tmp_path: Path, compression: Any
) -> None:
    values = np.arange(400 * 300, dtype=np.float32).reshape(400, 300)
    place = await saved(
        tmp_path,
        {key: values for key in "abcdef"} | {"s": np.float64(5)},
        options=asyncckpt.SaveOptions(compression=compression, chunk_nbytes=100_000),
    )
    wide = np.full((800, 301), -1, np.float32)
    base = np.full((400, 600), -1, np.float32)
    target = {
        "a": np.empty((300, 400), np.float32).T,
        "b": wide[::2, 1:],
        "c": base[:, ::-2],
        "d": torch.empty(300, 400).t(),
        "e": np.empty((400, 300), np.float32, order="F"),
        "f": np.empty((400, 300), ">f4"),
        "s": np.empty((3,))[1:2].reshape(()),
    }
    await asyncckpt.restore_into(place, target)
    for key in "abcdef":
        np.testing.assert_array_equal(np.asarray(target[key]), values)
    assert target["s"] == 5
    assert (wide[1::2] == -1).all() and (wide[:, 0] == -1).all()
    assert (base[:, ::2] == -1).all()


async def test_conjugate_views_and_other_byte_orders_are_filled(tmp_path: Path) -> None:
    values = np.array([1 + 2j, 3 - 4j], np.complex64)
    place = await saved(tmp_path, {"t": values, "n": np.arange(3, dtype=np.int32), "k": 7})
    base = torch.zeros(2, dtype=torch.complex64)
    target = {"t": base.conj(), "n": np.zeros(3, ">i4"), "k": np.zeros((), ">i8")}
    report = await asyncckpt.restore_into(place, target)
    assert target["t"].resolve_conj().numpy().tolist() == values.tolist()
    assert base.numpy().tolist() == values.conj().tolist()
    assert target["n"].tolist() == [0, 1, 2] and target["k"] == 7
    assert report.changed == ()


async def test_a_read_only_target_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, {"layer": {"w": np.ones(3)}})
        script = Script(ckpt)
        target = np.zeros(3)
        target.flags.writeable = False
        with pytest.raises(UnsupportedLeafError, match="layer/w: this array is read-only"):
            await ckpt.restore_into({"layer": {"w": target}})
        assert script.kinds == []


async def test_a_target_that_overlaps_itself_is_refused(tmp_path: Path) -> None:
    place = await saved(tmp_path, {"w": np.ones((4, 3))})
    windows = np.lib.stride_tricks.sliding_window_view(np.zeros(6), 3, writeable=True)
    with pytest.raises(UnsupportedLeafError, match="w: elements of this array share memory"):
        await asyncckpt.restore_into(place, {"w": windows})
    with pytest.raises(UnsupportedLeafError, match="w: elements of this tensor share memory"):
        await asyncckpt.restore_into(place, {"w": torch.zeros(3).double().expand(4, 3)})


async def test_immutable_leaves_that_differ_are_an_error_or_are_listed(tmp_path: Path) -> None:
    tree = {"w": np.ones(3), "j": jnp.arange(3.0), "n": 5, "s": "new", "same": 1, "r": np.int32(3)}
    place = await saved(tmp_path, tree)
    target = {
        "w": np.zeros(3),
        "j": jnp.zeros(3),
        "n": 4,
        "s": "old",
        "same": 1,
        "r": np.int32(2),
    }
    for key in ("j", "n", "s", "r"):
        with pytest.raises(MismatchError, match=f"{key}: the target's value differs") as caught:
            await asyncckpt.restore_into(place, {**tree, key: target[key], "w": np.zeros(3)})
        assert caught.value.path == key
        assert "restore(like=...)" in str(caught.value)
    report = await asyncckpt.restore_into(place, target, strict=False)
    assert sorted(report.changed) == ["j", "n", "r", "s"]
    assert (target["w"] == 1).all()
    # Immutable leaves that agree are fine, bit by bit.
    report = await asyncckpt.restore_into(place, {**tree, "w": np.zeros(3)})
    assert report.changed == ()


async def test_a_differing_scalar_is_an_error_before_any_array_is_touched(tmp_path: Path) -> None:
    place = await saved(tmp_path, {"w": np.ones(3), "n": 5})
    target = {"w": np.zeros(3), "n": 4}
    with pytest.raises(MismatchError):
        await asyncckpt.restore_into(place, target)
    assert (target["w"] == 0).all()


async def test_targets_that_overlap_are_an_error_unless_they_are_one_saved_array(
    tmp_path: Path,
) -> None:
    place = await saved(tmp_path, {key: np.full(10, i, np.float64) for i, key in enumerate("abc")})
    base = np.full(100, -1.0)
    for a, b, c in (
        (base[:10], base[5:15], base[50:60]),
        (base[:10], base[:10], base[50:60]),
        (base[0:20:2], base[1:21:2], base[8:28:2]),  # only the third touches the first
        (base[50:60], base[:10], base[55:65]),
    ):
        with pytest.raises(UsageError, match=r"[abc] and [abc]: these targets overlap in memory"):
            await asyncckpt.restore_into(place, {"a": a, "b": b, "c": c})
        assert (base == -1).all()
    # Interleaved targets do not overlap.
    await asyncckpt.restore_into(place, {"a": base[0:30:3], "b": base[1:31:3], "c": base[2:32:3]})
    assert base[:30].reshape(10, 3).tolist() == [[0, 1, 2]] * 10


async def test_tied_targets_of_tied_leaves_are_filled_once(tmp_path: Path) -> None:
    shared = np.arange(50_000.0)
    place = await saved(tmp_path, {"emb": shared, "head": shared, "other": np.ones(2)})
    info = await asyncckpt.inspect(place)
    assert info["head"].tied_to == "emb"
    memory = np.zeros(50_000)
    report = await asyncckpt.restore_into(
        place, {"emb": memory, "head": memory, "other": np.zeros(2)}
    )
    assert memory.tobytes() == shared.tobytes()
    assert report.read_nbytes < 1.1 * shared.nbytes
    # Tied when saved, apart now: each gets the values.
    apart = {"emb": np.zeros(50_000), "head": np.zeros(50_000), "other": np.zeros(2)}
    await asyncckpt.restore_into(place, apart)
    assert apart["emb"].tobytes() == apart["head"].tobytes() == shared.tobytes()
    restored = await asyncckpt.restore(place)
    assert np.shares_memory(restored["emb"], restored["head"])


def flip_a_byte(place: Path, fraction: float) -> None:
    """One bit in the largest data file is another one."""
    file = max((place / "default" / "d").iterdir(), key=lambda path: path.stat().st_size)
    with file.open("r+b") as stream:
        stream.seek(int(file.stat().st_size * fraction))
        byte = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([byte ^ 4]))


def damaged_tree() -> dict[str, Any]:
    return {"a": np.arange(300_000.0), "b": np.arange(300_000.0), "c": np.arange(10)}


@pytest.mark.parametrize("compression", [None, "zstd"])
async def test_damage_is_an_error_that_lists_what_was_written(
    tmp_path: Path, compression: Any
) -> None:
    place = await saved(
        tmp_path, damaged_tree(), options=asyncckpt.SaveOptions(compression=compression)
    )
    await asyncio.to_thread(flip_a_byte, place, 0.9)
    target = {key: np.zeros_like(value) for key, value in damaged_tree().items()}
    with pytest.raises(CorruptCheckpointError, match=r"b: .*chunk at byte \d+ of .*damaged") as e:
        await asyncckpt.restore_into(place, target)
    assert e.value.path == "b" and e.value.offset is not None and e.value.file is not None
    assert set(e.value.written) == {"a", "b", "c"}
    assert "3 targets are undefined" in e.value.__notes__[-1]
    with pytest.raises(CorruptCheckpointError):
        await asyncckpt.restore(place)
    # What is whole can still be had.
    restored = await asyncckpt.restore(place, include=["a", "c"])
    assert restored["a"].tobytes() == damaged_tree()["a"].tobytes()


async def test_atomic_leaves_the_targets_as_they_were(tmp_path: Path) -> None:
    atomic = asyncckpt.RestoreOptions(atomic=True)
    place = await saved(tmp_path, damaged_tree())
    whole = {key: np.zeros_like(value) for key, value in damaged_tree().items()}
    await asyncckpt.restore_into(place, whole, options=atomic)
    assert all(whole[key].tobytes() == value.tobytes() for key, value in damaged_tree().items())
    await asyncio.to_thread(flip_a_byte, place, 0.9)
    target = {key: np.full_like(value, 7) for key, value in damaged_tree().items()}
    with pytest.raises(CorruptCheckpointError) as caught:
        await asyncckpt.restore_into(place, target, options=atomic)
    assert caught.value.written == ()
    assert all((array == 7).all() for array in target.values())


async def test_atomic_leaves_the_targets_as_they_were_also_when_a_value_does_not_fit(
    tmp_path: Path,
) -> None:
    place = await saved(tmp_path, {"a": np.arange(5.0), "b": np.array([1e39])})
    target = {"a": np.full(5, 7, np.float32), "b": np.full(1, 7, np.float32)}
    with pytest.raises(MismatchError):
        await asyncckpt.restore_into(
            place, target, cast=True, options=asyncckpt.RestoreOptions(atomic=True)
        )
    assert all((array == 7).all() for array in target.values())


async def test_atomic_leaves_the_targets_as_they_were_also_when_an_immutable_leaf_differs(
    tmp_path: Path,
) -> None:
    place = await saved(tmp_path, {"a": np.arange(5.0), "j": np.ones(3, "f4"), "n": 3})
    target = {"a": np.full(5, 7.0), "j": jnp.zeros(3), "n": np.array(7)}
    atomic = asyncckpt.RestoreOptions(atomic=True)
    with pytest.raises(MismatchError, match="j: the target's value differs") as caught:
        await asyncckpt.restore_into(place, target, options=atomic)
    assert caught.value.written == ()
    assert (target["a"] == 7).all() and target["n"] == 7
    with pytest.raises(MismatchError, match="j: the target's value differs") as caught:
        await asyncckpt.restore_into(place, target)
    assert caught.value.written == ("a", "n")
    await asyncckpt.restore_into(place, target, options=atomic, strict=False)
    assert target["a"].tolist() == [0, 1, 2, 3, 4] and target["n"] == 3


async def test_targets_that_overlap_are_found_before_any_of_them_is_touched(
    tmp_path: Path,
) -> None:
    place = await saved(tmp_path, {"n": 3, "a": np.ones(3), "b": np.ones(3)})
    base = np.full(5, 7.0)
    target = {"n": np.array(7), "a": base[:3], "b": base[2:]}
    with pytest.raises(UsageError, match="overlap"):
        await asyncckpt.restore_into(place, target)
    assert target["n"] == 7 and (base == 7).all()


async def test_a_read_error_lists_what_was_written(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, damaged_tree())
        Script(ckpt).fail("read_into", StoreError("bad sector"), 2)
        target = {key: np.zeros_like(value) for key, value in damaged_tree().items()}
        with pytest.raises(StoreError, match="bad sector") as caught:
            await ckpt.restore_into(target)
        assert set(caught.value.written) == {"a", "b", "c"}
        await ckpt.restore_into(target)
        assert target["b"].tobytes() == damaged_tree()["b"].tobytes()


class Counter:
    """An object with a state dict, as data loaders have."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"position": 0, "seen": np.zeros(3)}
        self.refuse = False

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuse:
            raise ValueError("not mine")
        self.state = state


async def test_objects_are_given_their_state_dict(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    loader = Counter()
    loader.state = {"position": 12, "seen": np.arange(3.0), "added": [1, 2]}
    place = await saved(tmp_path, {"model": model, "opt": optimizer, "loader": loader})
    fresh = torch.nn.Linear(3, 2)
    fresh_optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    fresh_loader = Counter()
    weight = fresh.weight.data_ptr()
    await asyncckpt.restore_into(
        place, {"model": fresh, "opt": fresh_optimizer, "loader": fresh_loader}
    )
    assert fresh.weight.data_ptr() == weight
    assert torch.equal(fresh.weight, model.weight) and torch.equal(fresh.bias, model.bias)
    assert fresh_optimizer.param_groups[0]["lr"] == 0.25
    for own, other in zip(optimizer.state.values(), fresh_optimizer.state.values(), strict=True):
        assert all(torch.equal(own[key], other[key]) for key in own)
    assert fresh_loader.state["position"] == 12 and fresh_loader.state["added"] == [1, 2]
    assert fresh_loader.state["seen"].tolist() == [0, 1, 2]


NO_SHARDS: list[Any] = []
ALL_PADDING = [((8, 0), np.full((4, 6), 7.0))]


@pytest.mark.parametrize("shards", [NO_SHARDS, ALL_PADDING], ids=["none", "all padding"])
@pytest.mark.parametrize("atomic", [False, True])
async def test_a_sharded_target_that_holds_no_element_is_left_alone(
    tmp_path: Path, shards: Any, atomic: bool
) -> None:
    """As on a process that has no part of an array which others hold."""
    values = np.arange(48.0).reshape(8, 6)
    loader = Counter()
    loader.state = {"position": 12, "seen": values}
    place = await saved(tmp_path, {"w": values, "v": np.ones(3), "n": 3, "loader": loader})
    empty = asyncckpt.ShardedArray((8, 6), "float64", shards, padded=True)
    fresh = Counter()
    fresh.state = {"position": 0, "seen": empty}
    target = {
        "w": empty,
        "v": np.zeros(3),
        "n": asyncckpt.ShardedArray((), "int64", []),
        "loader": fresh,
    }
    options = asyncckpt.RestoreOptions(atomic=atomic)
    report = await asyncckpt.restore_into(place, target, options=options)
    assert report.changed == ()
    assert target["v"].tolist() == [1, 1, 1]
    assert fresh.state["position"] == 12 and fresh.state["seen"] is empty
    assert (ALL_PADDING[0][1] == 7).all()


async def test_an_object_that_refuses_its_state_is_named(tmp_path: Path) -> None:
    place = await saved(tmp_path, {"loader": Counter()})
    target = Counter()
    target.refuse = True
    with pytest.raises(
        RestoreError, match=r"loader: Counter\.load_state_dict refused .*ValueError: not mine"
    ):
        await asyncckpt.restore_into(place, {"loader": target})
