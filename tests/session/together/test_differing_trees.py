"""Trees and values that differ by process."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt import Checkpointer, SaveOptions, ShardedArray
from asyncckpt.adapters.sharded_array import ShardedAdapter
from asyncckpt.errors import (
    MismatchError,
    ShapeMismatchError,
    TreeMismatchError,
    UnsupportedLeafError,
)
from asyncckpt.ports import Source
from asyncckpt.save import shared_plan
from asyncckpt.save.stage import Staging
from tests.session.together.job import Job, equal, state

two_and_four = pytest.mark.parametrize("job", [2, 4], indirect=True)


@two_and_four
def test_each_process_may_have_leaves_of_its_own(job: Job) -> None:
    """Pipeline stages: every process has another part of the model, and some leaves in common."""

    def tree(process: int, seed: int = 0) -> dict[str, Any]:
        random = np.random.default_rng([seed, process])
        stage = {"w": random.random((100, 1 + process)), "name": f"stage {process}", "n": process}
        return {"step": 7, "stages": {f"{process}": stage}, "shared": np.arange(5)}

    async def part(ckpt: Checkpointer, process: int) -> Any:
        for seed in (0, 1):
            options = SaveOptions(tree="union")
            report = await ckpt.save(seed, tree(process, seed), options=options)
            info = await ckpt.inspect(seed)
            assert (report.leaf_count, report.nbytes) == (len(info.leaves), info.nbytes)
        with pytest.raises(TreeMismatchError, match="stages"):
            await ckpt.save(3, tree(process), options=SaveOptions(tree="same"))
        back = await ckpt.restore(1, like=tree(process, 5))
        return equal(back, tree(process, 1))

    assert job.play(part) == [True] * job.count, "each gets its own stage back"
    whole = asyncio.run(asyncckpt.restore(job.root / "1", coordinator="single"))
    assert list(whole) == ["step", "stages", "shared"]
    for process in range(job.count):
        assert equal(whole["stages"][str(process)], tree(process, 1)["stages"][str(process)])
    assert asyncio.run(asyncckpt.verify(job.root / "1")).ok


@pytest.mark.parametrize("job", [2], indirect=True)
def test_schemas_of_all_processes_do_not_block_the_engine(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be one per process, and each takes milliseconds."""
    threads: set[str] = set()
    decode = shared_plan.decode_schema

    def decoding(*args: Any, **options: Any) -> Any:
        threads.add(threading.current_thread().name)
        return decode(*args, **options)

    async def part(ckpt: Checkpointer, this: int) -> Any:
        return (await ckpt.save(1, {f"w{this}": np.ones(3)})).step

    monkeypatch.setattr(shared_plan, "decode_schema", decoding)
    assert job.play(part) == [1] * job.count
    assert threads and "asyncckpt" not in threads, "an engine's own thread"


def test_scalars_may_disappear_from_one_process(job: Job) -> None:
    """Arrays and their parts stay as they were, but the scalars are no longer stored as arrays."""

    async def part(ckpt: Checkpointer, process: int) -> Any:
        half = np.full((32, 1024), process, np.float32)
        w = ShardedArray((64, 1024), "float32", [((32 * process, 0), half)])
        tree = {"w": w, "lr": 0.1, "step": 3}
        options = SaveOptions(tree="union")
        reports = [await ckpt.save(1, tree, options=options)]
        reports.append(await ckpt.save(2, tree if process == 0 else {"w": w}, options=options))
        return [report.orbax for report in reports if process == 0]

    assert job.play(part) == [[True, False], []]
    assert asyncio.run(asyncckpt.verify(job.root / "2")).ok


def test_two_stages_that_number_their_state_alike_are_noticed(job: Job) -> None:
    async def part(ckpt: Checkpointer, process: int) -> Any:
        tree = {f"stage{process}": np.ones(3), "state": {"0": np.full(40_000, float(process))}}
        await ckpt.save(1, tree)

    for error in job.play(part):
        assert isinstance(error, MismatchError)
        assert "state/0" in str(error) and "PerProcess" in str(error)
    assert job.left() == []


def test_one_path_with_two_shapes(job: Job) -> None:
    async def part(ckpt: Checkpointer, process: int) -> Any:
        await ckpt.save(1, {"w": np.ones(3 + (process == 1))})

    for error in job.play(part):
        assert isinstance(error, MismatchError)
        assert "w" in str(error) and "process 1" in str(error)


@two_and_four
def test_values_per_process_come_back_to_each(job: Job) -> None:
    def tree(process: int) -> dict[str, Any]:
        rng = {"state": np.full(4 + process, process), "count": 10 * process}
        return {"step": 3, "rng": asyncckpt.PerProcess(rng)}

    async def part(ckpt: Checkpointer, process: int) -> Any:
        for step in range(2):
            await ckpt.save(step, tree(process))
        back = await ckpt.restore(like=tree(process))
        assert equal(back["rng"].value, tree(process)["rng"].value)
        everything = await ckpt.restore(like={"step": 0, "rng": asyncckpt.PerProcess.all})
        return [value["count"] for value in everything["rng"]]

    counts = [10 * process for process in range(job.count)]
    assert job.play(part) == [counts] * job.count
    # On another number of processes, the values of all are to be had.
    like = {"step": 0, "rng": asyncckpt.PerProcess.all}
    back = asyncio.run(asyncckpt.restore(job.root / "1", like=like, coordinator="single"))
    for process, value in enumerate(back["rng"]):
        assert equal(value, tree(process)["rng"].value)
    with pytest.raises(
        MismatchError, match=r"PerProcess.*restore\(include='rng', leaves=\"torch\""
    ):
        asyncio.run(asyncckpt.restore(job.root / "1", like=tree(0), coordinator="single"))
    plain = asyncio.run(asyncckpt.restore(job.root / "1", coordinator="single"))
    assert list(plain["rng"]) == list(range(job.count))


@pytest.mark.parametrize("savers", [{0}, {1}, {1, 2}])
def test_values_per_process_of_some_processes_come_back_to_them(
    tmp_path: Path, savers: set[int]
) -> None:
    job = Job(tmp_path, 3)

    def tree(process: int) -> dict[str, Any]:
        own = {"loader": asyncckpt.PerProcess({"at": process})} if process in savers else {}
        return {"step": 3, **own}

    async def part(ckpt: Checkpointer, process: int) -> Any:
        await ckpt.save(0, tree(process))
        back = await ckpt.restore(like=tree(process))
        assert ("loader" in back) == (process in savers)
        assert "loader" not in back or back["loader"].value == {"at": process}
        every = await ckpt.restore(like={"step": 0, "loader": asyncckpt.PerProcess.all})
        return every["loader"]

    values = [{"at": process} if process in savers else None for process in range(3)]
    assert job.play(part) == [values] * 3

    async def asking(ckpt: Checkpointer, process: int) -> Any:
        await ckpt.restore(like={"step": 3, "loader": asyncckpt.PerProcess({"at": 0})})

    lacking = "".join(map(str, {0, 1, 2} - savers))
    for error in job.play(asking):
        assert isinstance(error, MismatchError)
        found = re.search(rf"loader: process ([{lacking}]) has saved no value", str(error))
        assert found is not None
        assert [str(error.expected), str(error.found)] == [found[1], str(sorted(savers))]
    job.count = 2
    for error in job.play(asking):
        assert isinstance(error, MismatchError)
        assert "3 processes have saved this checkpoint, and 2 restore it" in str(error)
        assert [str(error.expected), str(error.found)] == ["2", "3"]


def test_a_value_per_process_of_a_single_process(tmp_path: Path) -> None:
    tree = {"rng": asyncckpt.PerProcess(np.arange(3)), "w": np.ones(2)}
    asyncio.run(asyncckpt.save(tmp_path / "x", tree))
    back = asyncio.run(asyncckpt.restore(tmp_path / "x", like=tree))
    assert np.array_equal(back["rng"].value, np.arange(3))
    everything = asyncio.run(
        asyncckpt.restore(tmp_path / "x", like={**tree, "rng": asyncckpt.PerProcess.all})
    )
    assert len(everything["rng"]) == 1
    with pytest.raises(UnsupportedLeafError, match=r"^rng: PerProcess\.all .*use restore\(like="):
        asyncio.run(asyncckpt.restore_into(tmp_path / "x", {"rng": asyncckpt.PerProcess.all}))


def test_values_of_other_processes_come_as_tensors_as_the_error_says(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tree = {"rng": asyncckpt.PerProcess({"s": np.arange(3)}), "w": np.ones(2)}
    asyncio.run(asyncckpt.save(tmp_path / "x", tree))
    place, path = tmp_path / "x", "rng"
    found = asyncio.run(asyncckpt.restore(place, include=path, leaves="torch"))
    assert list(found) == ["rng"] and torch.equal(found["rng"][0]["s"], torch.arange(3))


def expert(process: int, *, states: int = 0) -> dict[str, Any]:
    """A tree with an expert of each process, the states of its optimizer, and shared leaves."""
    random = np.random.default_rng([process, states])
    moments = {str(n): {"step": 2, "m": random.random(30_000)} for n in range(states)}
    return {
        "step": 7,
        f"opt{process}": {"state": moments, "lr": 0.1},
        f"expert{process}": random.random((3, 3)),
        "shared": np.arange(100_000.0),
        "both": np.ones(3),
    }


async def save_and_mutate(ckpt: Checkpointer, step: int, tree: dict[str, Any]) -> Any:
    """Save the tree, and overwrite its arrays as soon as `start_save` returns."""
    pending = await ckpt.start_save(step, tree)

    def overwrite(value: Any) -> None:
        if isinstance(value, np.ndarray):
            value[...] = -1
        elif isinstance(value, dict):
            list(map(overwrite, value.values()))

    overwrite(tree)
    return await pending


def alike(process: int, *, states: int = 0) -> dict[str, Any]:
    """A tree that all processes have, with the states of one process."""
    more = {"more": {str(n): np.full(40_000, n) for n in range(states)}} if states else {}
    return {"step": 7, "shared": np.arange(100_000.0), **more}


@two_and_four
@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize(("make", "unchanged", "tree"), [(expert, 1, "auto"), (alike, 0, "union")])
def test_the_tree_of_one_process_grows_and_shrinks(
    job: Job, process: int, make: Any, unchanged: int, tree: Any
) -> None:
    """All processes plan again within the same save; when nothing changes, they keep the plan."""
    states = [0, 2, 2, 1, 0]

    def made(this: int, step: int) -> dict[str, Any]:
        changed: dict[str, Any] = make(this, states=states[step] if this == process else unchanged)
        return changed

    async def part(ckpt: Checkpointer, this: int) -> Any:
        reports = [await save_and_mutate(ckpt, step, made(this, step)) for step in range(5)]
        return [report.plan_cached for report in reports[:4]]

    cached = job.play(part, save_options=SaveOptions(tree=tree))
    assert cached == [[False, False, True, False]] * job.count
    for step in range(5):
        merged: dict[str, Any] = {}
        for this in range(job.count):
            merged |= made(this, step)
        back = asyncio.run(asyncckpt.restore(job.root / str(step), coordinator="single"))
        assert equal(back, merged)
        assert asyncio.run(asyncckpt.verify(job.root / str(step))).ok
    assert job.left() == []


@pytest.mark.parametrize("process", [0, 1])
def test_an_array_that_both_held_moves_to_one_process(job: Job, process: int) -> None:
    rows = np.arange(60_000.0).reshape(60, 1000)

    async def part(ckpt: Checkpointer, this: int) -> Any:
        for step, holders in enumerate(({0, 1}, {process}, {process}, {0, 1})):
            tree: dict[str, Any] = {f"own{this}": 1}
            if this in holders:
                tree["rows"] = ShardedArray(rows.shape, "float64", [((0, 0), rows.copy())])
            await ckpt.save(step, tree)

    assert job.play(part) == [None] * 2
    for step in range(4):
        back = asyncio.run(asyncckpt.restore(job.root / str(step), coordinator="single"))
        assert np.array_equal(back["rows"], rows)


def test_a_tree_grows_after_equal_trees_were_saved_in_between(job: Job) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(0, expert(this))
        await ckpt.save(1, state())
        await ckpt.save(2, expert(this, states=this))
        await ckpt.save(3, state())

    assert job.play(part) == [None] * 2


CONFLICTS: list[tuple[Any, type[MismatchError], str]] = [
    ({"both": np.ones(4)}, ShapeMismatchError, "both"),
    ({"shared": {"0": np.ones(3)}}, TreeMismatchError, "shared"),
    # A stage that numbers its state as another one does, and gets it later.
    ({"opt0": {"state": {"0": {"step": 2, "m": np.ones(30_000)}}}}, MismatchError, "opt0/state/0"),
]


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize(("change", "kind", "path"), CONFLICTS)
def test_a_conflict_that_appears_later_gives_its_own_error(
    job: Job, process: int, change: dict[str, Any], kind: type[MismatchError], path: str
) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        # The processes are numbered so that either may be the one that changes.
        tree = expert(int(this == process), states=1)
        await ckpt.save(0, tree)
        with pytest.raises(kind, match=f"{path}.*process (0|1).*process (0|1)"):
            await ckpt.save(1, tree | change if this == process else tree)
        return (await ckpt.save(2, tree)).step

    assert job.play(part) == [2] * job.count
    assert job.left() == []


@pytest.mark.parametrize("tree", ["auto", "same"])
@pytest.mark.parametrize("process", [0, 1])
def test_a_leaf_that_changes_on_one_process_is_named(job: Job, process: int, tree: Any) -> None:
    """Equal trees are not compared before each save: the processes have begun to copy."""

    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(0, state())
        changed = state()
        if this == process:
            changed["params"]["w"] = np.ones((2, 3))
        with pytest.raises(MismatchError, match=f"params/w.*process {process}") as caught:
            await ckpt.save(1, changed)
        assert 'tree="union"' in str(caught.value)
        return (await ckpt.save(2, state())).plan_cached

    assert job.play(part, save_options=SaveOptions(tree=tree)) == [False] * job.count
    assert job.left() == []


def test_processes_of_one_host_divide_memory_and_threads(job: Job) -> None:
    alone = Checkpointer(job.root / "alone")._session.runtime

    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(0, state())
        runtime = ckpt._session.runtime
        return runtime.budget.capacity, runtime.engine.compute.count

    threads = max(1, alone.engine.compute.count // job.count)
    for nbytes, count in job.play(part):
        assert nbytes <= alone.budget.capacity // job.count
        assert count == threads


def test_a_round_leaves_the_messages_of_two_at_most(job: Job) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        for step in range(6):
            await ckpt.save(step, state())
        await ckpt.latest_step()
        return len([path for path in job.keys.rglob("*") if path.is_file()])

    # Hellos and beats, and of each of two or three rounds what every process has posted.
    assert max(job.play(part)) <= 10 + 12 * job.count


def test_more_threads_than_memory_compare_replicas_within_the_budget(job: Job) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        ckpt._session.runtime.engine.compute.count = 200
        tree = {f"w{number}": np.full(1 << 17, number, np.float64) for number in range(100)}
        return (await ckpt.save(1, tree)).step

    nbytes = 64 << 20
    assert job.play(part, save_options=SaveOptions(host_memory_nbytes=nbytes)) == [1] * job.count


def test_small_shards_are_copied_only_once_they_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process sends its boxes of small divided leaves to process 0 before all other leaves."""
    own, looks, copied = ShardedAdapter.source, Counter[int](), Counter[int]()

    def source(self: ShardedAdapter, path: str, leaf: ShardedArray) -> Source:
        def pending(source: Source) -> bool:
            looks[id(source)] += 1
            return looks[id(source)] < 3

        made = own(self, path, leaf)
        made.pending = pending
        return made

    def parts(self: Staging) -> Any:
        for part in self.plan.parts:
            copied[looks[id(self.sources[self.plan.arrays.leaf.item(part.array)])]] += 1
        return copy(self)

    copy = Staging.parts
    monkeypatch.setattr(ShardedAdapter, "source", source)
    monkeypatch.setattr(Staging, "parts", parts)
    job = Job(tmp_path, 2)
    values = np.arange(8.0)

    async def part(ckpt: Checkpointer, process: int) -> Any:
        half = values[4 * process : 4 * process + 4]
        await ckpt.save(1, {"w": ShardedArray((8,), "float64", [((4 * process,), half)])})
        return (await ckpt.restore())["w"].tolist()

    assert job.play(part) == [values.tolist()] * 2
    assert set(copied) == {3}
