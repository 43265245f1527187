"""Restoring in place: the target's own memory is filled, and nothing else is touched."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MismatchError,
    RestoreError,
    StoreError,
    TreeMismatchError,
    UnsupportedLeafError,
    UsageError,
)
from asyncckpt.ports import ORDINARY, Reading
from asyncckpt.restore.pipeline import RestorePipeline
from asyncckpt.stores.local.files import LocalFiles
from asyncckpt.tree import flatten
from tests.restore.loader import Loader
from tests.script import Script

pytestmark = pytest.mark.usefixtures("no_blocking")

NAN = complex("nan")


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
    assert report.replaced == report.missing == report.unexpected == ()


@pytest.mark.parametrize(
    ("into", "compression", "fresh"),
    [(False, None, True), (True, None, False), (True, "zstd", True)],
)
async def test_the_store_knows_which_memory_may_be_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, into: bool, compression: Any, fresh: bool
) -> None:
    """New arrays and staging memory, but not the arrays of the caller."""
    tree = {"x": np.random.default_rng(0).standard_normal(600_000)}
    options = asyncckpt.SaveOptions(compression=compression)
    place = await saved(tmp_path, tree, options=options)
    seen, read = set(), LocalFiles.read_into

    async def noted(files: LocalFiles, *read_arguments: Any, how: Reading = ORDINARY) -> None:
        seen.add(how.fresh)
        await read(files, *read_arguments, how=how)

    monkeypatch.setattr(LocalFiles, "read_into", noted)
    if into:
        await asyncckpt.restore_into(place, tree)
    else:
        await asyncckpt.restore(place)
    assert seen == {fresh}


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
    assert report.replaced == ()


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


@dataclasses.dataclass
class Progress:
    epoch: int
    best: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    epoch: int


@dataclasses.dataclass(init=False)
class Module:
    """Refuses assignment by itself, as the modules of Equinox do."""

    epoch: Any

    def __init__(self, epoch: Any) -> None:
        object.__setattr__(self, "epoch", epoch)

    def __setattr__(self, name: str, value: Any) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


class Pair(NamedTuple):
    first: Any
    second: Any


async def test_immutable_leaves_are_replaced_in_what_holds_them(tmp_path: Path) -> None:
    saved_progress = Progress(3, jnp.arange(4.0))
    tree = {
        "w": np.ones(3),
        "j": jnp.arange(3.0),
        "n": 5,
        "s": "new",
        "r": np.int32(3),
        "list": [1.5, {"deep": True}],
        "progress": saved_progress,
        "long": b"x" * 5000,
    }
    place = await saved(tmp_path, tree)
    target: dict[str, Any] = {
        "w": np.zeros(3),
        "j": jnp.zeros(3),
        "n": 4,
        "s": "old",
        "r": np.int32(2),
        "list": [0.5, {"deep": False}],
        "progress": Progress(0, jnp.zeros(4)),
        "long": b"",
    }
    inner, progress, w = target["list"], target["progress"], target["w"]
    report = await asyncckpt.restore_into(place, target)
    assert (target["n"], target["s"], target["long"]) == (5, "new", b"x" * 5000)
    assert target["j"].tolist() == [0, 1, 2] and isinstance(target["j"], jax.Array)
    assert target["r"] == 3 and type(target["r"]) is np.int32
    assert target["list"] is inner and inner == [1.5, {"deep": True}]
    assert target["progress"] is progress and progress.epoch == 3
    assert progress.best.tolist() == [0, 1, 2, 3]
    assert target["w"] is w and (w == 1).all()
    assert sorted(report.replaced) == [
        "j", "list/0", "list/1/deep", "long", "n", "progress/best", "progress/epoch", "r", "s",
    ]  # fmt: skip
    assert report.missing == report.unexpected == ()


@pytest.mark.parametrize(
    ("tree", "target", "path"),
    [
        ({"w": np.ones(3), "t": (5, 6)}, {"w": np.zeros(3), "t": (5, 7)}, "t/1"),
        ({"w": np.ones(3), "t": (-0.0,)}, {"w": np.zeros(3), "t": (0.0,)}, "t/0"),
        ({"w": np.ones(3), "t": (NAN + 1j,)}, {"w": np.zeros(3), "t": (NAN + 2j,)}, "t/0"),
        ({"w": np.ones(3), "p": Pair(1, 2)}, {"w": np.zeros(3), "p": Pair(0, 2)}, "p/first"),
        ({"w": np.ones(3), "f": Frozen(1)}, {"w": np.zeros(3), "f": Frozen(0)}, "f/epoch"),
        ({"w": np.ones(3), "m": Module(1)}, {"w": np.zeros(3), "m": Module(0)}, "m/epoch"),
        ({"w": np.ones(3), "j": (jnp.ones(2),)}, {"w": np.zeros(3), "j": (jnp.ones(2),)}, "j/0"),
        (5, 4, "the tree itself"),
    ],
    ids=[
        "tuple",
        "zero",
        "NaN",
        "namedtuple",
        "frozen dataclass",
        "module",
        "array in a tuple",
        "root",
    ],
)
@pytest.mark.parametrize("strict", [True, False])
async def test_what_can_be_neither_filled_nor_replaced_is_an_error_before_anything_is_read(
    tmp_path: Path, tree: Any, target: Any, path: str, strict: bool
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, tree)
        script = Script(ckpt)
        with pytest.raises(
            MismatchError, match=f"{path}: this .* is immutable, and what holds it"
        ) as e:
            await ckpt.restore_into(target, strict=strict)
        assert "restore(like=...)" in str(e.value) and "nothing was read" in str(e.value)
        assert script.count("read_into") == 0 and e.value.written == ()
        assert not isinstance(target, dict) or not target["w"].any()


async def test_scalars_in_tuples_that_agree_are_no_error(tmp_path: Path) -> None:
    place = await saved(tmp_path, {"w": np.ones(3), "t": (5, "relu", float("nan"))})
    target = {"w": np.zeros(3), "t": (5, "relu", float("nan"))}
    report = await asyncckpt.restore_into(place, target)
    assert report.replaced == () and target["w"].all()


async def test_a_model_its_fresh_optimizer_and_an_epoch_are_restored_as_they_are(
    tmp_path: Path,
) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    place = await saved(tmp_path, {"model": model, "opt": optimizer, "epoch": 7})
    fresh = torch.nn.Linear(3, 2)
    fresh_optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    target: dict[str, Any] = {"model": fresh, "opt": fresh_optimizer, "epoch": 0}
    report = await asyncckpt.restore_into(place, target)
    assert target["epoch"] == 7 and report.replaced == ("epoch",)
    assert target["model"] is fresh and torch.equal(fresh.weight, model.weight)
    for own, other in zip(optimizer.state.values(), fresh_optimizer.state.values(), strict=True):
        assert all(torch.equal(own[key], other[key]) for key in own)
    # What `like` cannot do for an optimizer without moments names what can.
    again = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    with pytest.raises(TreeMismatchError, match=r"use restore_into\(\), which gives objects"):
        await asyncckpt.restore(place, like={"model": fresh, "opt": again, "epoch": 0})


async def test_a_dict_that_refuses_a_leaf_is_named(tmp_path: Path) -> None:
    class Refusing(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            raise TypeError("read only")

    place = await saved(tmp_path, {"d": {"n": 1, "w": np.ones(2)}})
    with pytest.raises(RestoreError, match=r"d/n: this Refusing refused .*read only") as caught:
        await asyncckpt.restore_into(place, {"d": Refusing(n=0, w=np.zeros(2))})
    assert caught.value.written == ("d/w",)


async def test_targets_that_overlap_are_an_error_unless_they_are_one_array(
    tmp_path: Path,
) -> None:
    place = await saved(tmp_path, {key: np.full(10, i, np.float64) for i, key in enumerate("abc")})
    base = np.full(100, -1.0)
    for a, b, c in (
        (base[:10], base[5:15], base[50:60]),
        (base[0:20:2], base[1:21:2], base[8:28:2]),  # only the third touches the first
        (base[50:60], base[:10], base[55:65]),
    ):
        with pytest.raises(UsageError, match=r"[abc] and [abc]: these targets overlap in memory"):
            await asyncckpt.restore_into(place, {"a": a, "b": b, "c": c})
        assert (base == -1).all()
    # Interleaved targets do not overlap.
    await asyncckpt.restore_into(place, {"a": base[0:30:3], "b": base[1:31:3], "c": base[2:32:3]})
    assert base[:30].reshape(10, 3).tolist() == [[0, 1, 2]] * 10


async def test_views_of_one_memory_in_two_byte_orders_are_not_one_array(tmp_path: Path) -> None:
    place = await saved(tmp_path, {"a": np.arange(4.0), "b": np.arange(4.0)})
    memory = np.full(4, 7.0)
    for a, b in ((memory, memory.view(">f8")), (memory.view(">f8"), memory)):
        with pytest.raises(UsageError, match="a and b: these targets overlap in memory"):
            await asyncckpt.restore_into(place, {"a": a, "b": b})
        assert (memory == 7).all()
    big = memory.view(">f8")
    await asyncckpt.restore_into(place, {"a": big, "b": big[:]})
    assert big.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("dtype", ["f8", "f4"])
@pytest.mark.parametrize("count", [10, 600_000])
async def test_one_target_of_two_saved_arrays_takes_their_value_if_they_are_equal(
    tmp_path: Path, atomic: bool, dtype: str, count: int
) -> None:
    values = np.random.default_rng(0).standard_normal(count)
    values[3] = np.nan
    place = await saved(tmp_path, {"a": values, "b": values.copy(), "c": values.copy(), "n": 1})
    memory = np.zeros(2 * count, dtype)[::2]
    target = {"a": memory, "b": memory, "c": memory, "n": 0}
    options = asyncckpt.RestoreOptions(atomic=atomic)
    report = await asyncckpt.restore_into(place, target, cast=True, options=options)
    assert memory.tobytes() == values.astype(dtype).tobytes()
    assert (target["n"], report.leaf_count) == (1, 4)


@pytest.mark.parametrize("atomic", [False, True])
async def test_one_target_of_two_saved_arrays_that_differ_is_an_error(
    tmp_path: Path, atomic: bool
) -> None:
    place = await saved(tmp_path, {"a": np.zeros(10), "b": np.full(10, -0.0)})
    memory = np.full(10, 7.0)
    options = asyncckpt.RestoreOptions(atomic=atomic)
    with pytest.raises(MismatchError, match="a and b: the checkpoint holds different values for"):
        await asyncckpt.restore_into(place, {"a": memory, "b": memory}, options=options)
    assert not atomic or (memory == 7).all()


@dataclasses.dataclass
class Counted:
    count: Any


SHARED: dict[str, Callable[[int], Any]] = {
    "dict": lambda n: {"n": n},
    "list": lambda n: [np.float32(n)],
    "dataclass": Counted,
    "array": lambda n: {"w": jnp.full(3, n)},
    "nested": lambda n: ({"x": [Counted(n)]}, np.ones(2)),
    "stateful": lambda n: Loader(n=n, w=np.full(3, n), inner={"n": n}),
    "optimizer": lambda n: stepped(float(n)),
}


def stepped(rate: float) -> torch.optim.Optimizer:
    """An optimizer; at first, the state of one at 7 has no arrays."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], lr=0.5)
    if rate != 7:
        parameter.grad = torch.full((2,), rate)
        optimizer.step()
    return optimizer


def leaves_of(target: Any) -> list[Any]:
    leaves = flatten(target).leaves
    return [leaf.tolist() if hasattr(leaf, "tolist") else leaf for leaf in leaves]


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("kind", SHARED)
async def test_an_object_at_two_paths_is_not_given_two_saved_values(
    tmp_path: Path, kind: str, atomic: bool
) -> None:
    make = SHARED[kind]
    alike = await saved(tmp_path / "1", {"model": make(1), "opt": [make(1), 0]})
    unlike = await saved(tmp_path / "2", {"model": make(1), "opt": [make(2), 0]})
    shared = make(7)
    target = {"model": shared, "opt": [shared, 5]}
    options = asyncckpt.RestoreOptions(atomic=atomic)
    with pytest.raises(MismatchError, match="the checkpoint holds different values for") as caught:
        await asyncckpt.restore_into(unlike, target, options=options)
    assert caught.value.path.startswith("opt/0/")
    assert leaves_of(shared) == leaves_of(make(7))
    assert target["opt"][1] == 5
    await asyncckpt.restore_into(unlike, target, options=options, include=["opt"])
    assert leaves_of(shared) == leaves_of(make(2))
    await asyncckpt.restore_into(alike, target, options=options)
    assert leaves_of(shared) == leaves_of(make(1))
    assert target["opt"] == [shared, 0]


async def test_containers_of_two_objects_state_may_be_given_two_values(tmp_path: Path) -> None:
    """Each object takes a state of its own, whatever its present one consists of."""
    place = await saved(tmp_path, {"a": Loader(d={"n": 1}), "b": Loader(d={"n": 2})})
    default = {"n": 0}
    target = {"a": Loader(d=default), "b": Loader(d=default), "c": default}
    await asyncckpt.restore_into(place, target, include=["a", "b"])
    assert [target[key].state["d"]["n"] for key in "ab"] == [1, 2] and default == {"n": 0}


async def test_tied_leaves_of_an_object_at_two_paths_inside_another_are_restored(
    tmp_path: Path,
) -> None:
    def tree(n: int) -> dict[str, Any]:
        part = {"n": n, "w": np.full(1000, n)}
        layer = {"a": part, "b": part, "w": part["w"]}
        return {"x": layer, "y": [layer, part]}

    place = await saved(tmp_path, tree(1))
    target = tree(7)
    await asyncckpt.restore_into(place, target)
    assert leaves_of(target) == leaves_of(tree(1))
    assert target["y"][1] is target["x"]["b"]
    other = tree(1)
    other["y"][1] = {"n": 2, "w": np.full(1000, 1)}
    place = await saved(tmp_path / "other", other)
    with pytest.raises(MismatchError, match="x/a/n and y/1/n: the checkpoint holds different"):
        await asyncckpt.restore_into(place, target)


async def test_one_target_outside_host_memory_is_not_filled_with_two_saved_arrays(
    tmp_path: Path,
) -> None:
    """As with a model with tied weights on a device; a conjugated view behaves like one here."""
    values = torch.tensor([1 + 1j, 2, 3j])
    alike = await saved(tmp_path / "1", {"a": values, "b": values.clone()})
    other = await saved(tmp_path / "2", {"a": values, "b": values + 1})
    unlike = await saved(tmp_path / "3", {"a": values, "b": values.to(torch.complex128)})
    memory = torch.zeros(3, dtype=torch.complex64)
    target = {"a": memory.conj(), "b": memory.conj()}
    await asyncckpt.restore_into(alike, target)
    assert torch.equal(memory, values.conj())
    with pytest.raises(MismatchError, match="a and b: the checkpoint holds different values for"):
        await asyncckpt.restore_into(other, target)
    memory.zero_()
    with pytest.raises(UsageError, match="a and b: these targets overlap in memory"):
        await asyncckpt.restore_into(unlike, target, cast=True)
    assert not memory.any()
    # One memory, but not one value.
    negated = await saved(tmp_path / "4", {"a": values, "b": -values})
    await asyncckpt.restore_into(negated, {"a": memory.conj(), "b": torch._neg_view(memory.conj())})
    assert torch.equal(memory, values.conj())


async def test_a_model_with_tied_weights_takes_a_checkpoint_that_holds_them_twice(
    tmp_path: Path,
) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    saved_state = {key: value.clone() for key, value in model.state_dict().items()}
    place = await saved(tmp_path, {"model": saved_state})
    with torch.no_grad():
        model[0].weight.zero_()
    await asyncckpt.restore_into(place, {"model": model})
    assert model[1].weight is model[0].weight
    assert torch.equal(model[0].weight, saved_state["0.weight"])


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


async def test_atomic_replaces_immutable_leaves_when_everything_has_arrived(
    tmp_path: Path,
) -> None:
    atomic = asyncckpt.RestoreOptions(atomic=True)
    place = await saved(tmp_path, {**damaged_tree(), "n": 3, "j": jnp.ones(3)})
    target: dict[str, Any] = {key: np.zeros_like(value) for key, value in damaged_tree().items()}
    target |= {"n": 7, "j": jnp.zeros(3)}
    await asyncckpt.restore_into(place, target, options=atomic)
    assert target["n"] == 3 and target["j"].tolist() == [1, 1, 1]
    target |= {"n": 7, "j": jnp.zeros(3)}
    await asyncio.to_thread(flip_a_byte, place, 0.9)
    with pytest.raises(CorruptCheckpointError) as caught:
        await asyncckpt.restore_into(place, target, options=atomic)
    assert caught.value.written == ()
    assert target["n"] == 7 and target["j"].tolist() == [0, 0, 0]


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


def counter() -> Loader:
    return Loader(position=0, seen=np.zeros(3))


async def test_objects_are_given_their_state_dict(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    loader = counter()
    loader.state = {"position": 12, "seen": np.arange(3.0), "added": [1, 2]}
    place = await saved(tmp_path, {"model": model, "opt": optimizer, "loader": loader})
    fresh = torch.nn.Linear(3, 2)
    fresh_optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    fresh_loader = counter()
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
    loader = counter()
    loader.state = {"position": 12, "seen": values}
    place = await saved(tmp_path, {"w": values, "v": np.ones(3), "n": 3, "loader": loader})
    empty = asyncckpt.ShardedArray((8, 6), "float64", shards, padded=True)
    fresh = counter()
    fresh.state = {"position": 0, "seen": empty}
    target = {
        "w": empty,
        "v": np.zeros(3),
        "n": asyncckpt.ShardedArray((), "int64", []),
        "loader": fresh,
    }
    options = asyncckpt.RestoreOptions(atomic=atomic)
    report = await asyncckpt.restore_into(place, target, options=options)
    assert report.replaced == ()
    assert target["v"].tolist() == [1, 1, 1]
    assert fresh.state["position"] == 12 and fresh.state["seen"] is empty
    assert (ALL_PADDING[0][1] == 7).all()


async def test_an_object_that_refuses_its_state_is_named(tmp_path: Path) -> None:
    place = await saved(tmp_path, {"loader": counter()})
    target = counter()
    target.refuse = True
    with pytest.raises(
        RestoreError, match=r"loader: Loader\.load_state_dict refused .*ValueError: not mine"
    ):
        await asyncckpt.restore_into(place, {"loader": target})


async def test_a_failed_attempt_keeps_no_memory_while_an_older_step_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[weakref.ref[RestorePipeline]] = []
    finish = RestorePipeline.finish

    async def fails_at_first(pipeline: RestorePipeline) -> None:
        gc.collect()
        assert [attempt() for attempt in attempts] == [None] * len(attempts)
        attempts.append(weakref.ref(pipeline))
        if len(attempts) == 1:
            raise CheckpointNotFoundError("deleted meanwhile")
        await finish(pipeline)

    monkeypatch.setattr(RestorePipeline, "finish", fails_at_first)
    target = {"a": np.zeros(1000)}
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            await ckpt.save(step, {"a": np.full(1000, float(step))})
        shutil.rmtree(tmp_path / "2")
        await ckpt.restore_into(target, options=asyncckpt.RestoreOptions(atomic=True))
