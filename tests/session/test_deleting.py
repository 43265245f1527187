"""A checkpoint that is being deleted, or is not committed yet: not found, and never Orbax's."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import asyncckpt
from asyncckpt.checkpoint.foreign.ours import is_our_data, is_our_leftover
from asyncckpt.errors import CheckpointNotFoundError
from asyncckpt.stores.objects.layout import fixed_path, is_fixed, owner, retried
from tests.simulator import Fault, Gate, Simulator, simulator

Read = Callable[..., Awaitable[Any]]

READS: list[Read] = [asyncckpt.restore, asyncckpt.inspect, asyncckpt.verify]
READING = pytest.mark.parametrize("read", READS)
TREES = {
    "arrays": {"w": np.arange(20_000.0), "b": np.arange(3), "n": 1, "text": "x"},
    "strings": {"a": "x"},
    "nothing": {},
}


async def stored(tree: Any, url: str) -> dict[str, bytes]:
    """The objects of a checkpoint by their path in it, without its record."""
    await asyncckpt.save(url, tree)
    files = fsspec.filesystem("memory")
    prefix = f"/{url.removeprefix('memory://')}/"
    found = {path.removeprefix(prefix): files.cat_file(path) for path in files.find(prefix)}
    del found["checkpoint.json"]
    return found


def put(url: str, objects: dict[str, bytes]) -> None:
    """These and no other objects stand there."""
    files = fsspec.filesystem("memory")
    prefix = f"/{url.removeprefix('memory://')}"
    if files.exists(prefix):
        files.rm(prefix, recursive=True)
    for path, data in objects.items():
        files.pipe_file(f"{prefix}/{path}", data)


def subsets(paths: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return itertools.chain.from_iterable(
        itertools.combinations(paths, count) for count in range(len(paths) + 1)
    )


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
async def test_a_half_deleted_checkpoint_is_not_found_and_never_read_as_orbax(tree: Any) -> None:
    url = f"memory://deleting/{uuid.uuid4().hex}/7"
    whole = await stored(tree, url)
    # What other programs look for goes before the record, and what carries the save id after it.
    left = [path for path in whole if owner(path) is not None]
    assert left and not [path for path in whole if path not in left and "/d/" in path]
    reads = itertools.cycle(READS)
    for paths in [*filter(None, subsets(left)), tuple(whole)]:
        put(url, {path: whole[path] for path in paths})
        with pytest.raises(CheckpointNotFoundError, match="was never committed, was deleted, or"):
            await next(reads)(url)


@READING
async def test_a_step_whose_save_has_only_sent_data_is_not_found(read: Read) -> None:
    url = f"memory://deleting/{uuid.uuid4().hex}/7"
    whole = await stored(TREES["arrays"], url)
    data = {path: content for path, content in whole.items() if "/d/" in path}
    assert len(data) == 2
    for paths in subsets(list(data)):
        put(url, {path: data[path] for path in paths})
        with pytest.raises(
            CheckpointNotFoundError, match="never committed" if paths else "nothing is"
        ):
            await read(url)


async def test_a_step_asked_for_while_it_is_being_deleted_is_not_found() -> None:
    tree = TREES["arrays"]
    with simulator() as sim:
        storage = sim.s3_options()
        root = "s3://bucket/run"
        async with (
            asyncckpt.Checkpointer(root, storage_options=storage) as ckpt,
            asyncckpt.Checkpointer(root, storage_options=storage) as other,
        ):
            await ckpt.save(1, tree)
            await ckpt.save(2, tree)
            gate = held(sim, "list_objects")  # the record is gone
            deleting = asyncio.create_task(other.delete(2))
            for following in ("delete_objects", ""):
                await gate.reached.wait()
                released, gate = gate, held(sim, following) if following else gate
                for read in (ckpt.restore, ckpt.inspect, ckpt.verify):
                    with pytest.raises(CheckpointNotFoundError, match="restore another step"):
                        await read(2)
                released.release()
            await deleting
            assert not [key for key in sim.objects() if key.startswith("run/2/")]
            assert (await ckpt.restore())["n"] == 1


def held(sim: Simulator, kind: str) -> Gate:
    """The next request of this kind waits."""
    gate = Gate()
    sim.faults.append(Fault(kind=kind, gate=gate))
    return gate


@READING
async def test_on_local_disk_a_step_without_its_record_is_not_found(
    tmp_path: Path, read: Read
) -> None:
    for name, tree in TREES.items():
        await asyncckpt.save(tmp_path / name, tree)
        (tmp_path / name / "checkpoint.json").unlink()
        with pytest.raises(CheckpointNotFoundError, match="restore another step"):
            await read(tmp_path / name)
        with pytest.raises(CheckpointNotFoundError, match="name that directory"):
            await read(tmp_path / name / "default")


async def test_a_database_of_ours_that_lost_its_files_is_no_damaged_one(tmp_path: Path) -> None:
    await asyncckpt.save(tmp_path / "x", TREES["arrays"])
    await asyncio.to_thread(shutil.rmtree, tmp_path / "x" / "default" / "d")
    for read in READS:
        with pytest.raises(CheckpointNotFoundError, match="name that directory"):
            await read(tmp_path / "x" / "default")


def test_names_of_ours_are_told_from_those_of_others() -> None:
    save_id = uuid.uuid4().hex
    index = f"d/{save_id}-index"  # `save/commit.py`
    ours = [f"d/{save_id}-12", index, f"{index}1"]
    for path in [*ours, *(retried(path, 2) for path in ours)]:
        assert is_our_data(path) and owner(f"default/{path}") == save_id
    assert is_our_leftover(["default", fixed_path(save_id, 3)])
    assert is_fixed(fixed_path(save_id, 3))
    # TensorStore's, and what merely resembles ours.
    for path in (f"d/{save_id}", "d/data", f"d/{save_id[:-1]}-0", f"e/{save_id}-0", f"{save_id}-0"):
        assert not is_our_data(path)
    assert not is_our_leftover(["_METADATA", ".asyncckpt", "default", f".asyncckpt-{save_id}"])
