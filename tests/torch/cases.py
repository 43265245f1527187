"""Actions of one process, or of each rank of a torch job, with DCP."""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import asyncckpt
from asyncckpt import SaveOptions
from asyncckpt.save import shared_plan
from asyncckpt.torch import StorageReader, StorageWriter, saving
from tests.processes import torch_cases
from tests.processes.values import array, same
from tests.processes.worker import Worker

State = dict[str, Any]

ROWS = (10, 6)

# ------------------------------------------------------------------------------------ planners


class SavePlanner(DefaultSavePlanner):
    """A planner of a user: other names, halved precision, and a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def set_up_planner(self, state_dict: State, *args: Any, **keywords: Any) -> None:
        renamed = {f"mine.{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, *args, **keywords)

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.calls[f"{write_item.index}"] += 1
        return super().resolve_data(write_item)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.items = [f"{item.index}" for item in new_plan.items]
        return super().finish_plan(new_plan)


class LoadPlanner(DefaultLoadPlanner):
    """Reads items renamed by `SavePlanner`, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, str]] = Counter()

    def set_up_planner(self, state_dict: State, *args: Any, **keywords: Any) -> None:
        self.given = state_dict
        renamed = {f"mine.{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, *args, **keywords)

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        self.items = [_name(item) for item in central_plan.items]
        return super().finish_plan(central_plan)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.calls["load", _name(read_item)] += 1
        super().load_bytes(read_item, value)
        for key, loaded in self.original_state_dict.items():
            self.given[key.removeprefix("mine.")] = loaded

    def resolve_tensor(self, read_item: ReadItem) -> Any:
        self.calls["resolve", _name(read_item)] += 1
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.calls["commit", _name(read_item)] += 1
        super().commit_tensor(read_item, tensor)


def _name(item: ReadItem) -> str:
    return f"{item.dest_index} {tuple(item.dest_offsets)} {item.storage_index}"


PLANNERS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    # By default, planners drop a `ShardedTensor` on ranks without a shard, and then miss its key.
    "shards as they are": (
        lambda: DefaultSavePlanner(flatten_sharded_tensors=False),
        lambda: DefaultLoadPlanner(flatten_sharded_tensors=False),
    ),
    "default": (DefaultSavePlanner, DefaultLoadPlanner),
    "cached": (lambda: DefaultSavePlanner(enable_plan_caching=True), DefaultLoadPlanner),
    "custom": (SavePlanner, LoadPlanner),
}

# -------------------------------------------------------------------------------------- states


def sharded(seed: int, share: float) -> Any:
    """A matrix whose first rows rank 0 has, and rank 1 the rest; plain without processes."""
    values = torch.from_numpy(array("sharded", ROWS, seed=seed))
    if not dist.is_initialized():
        return values
    edge = round(share * ROWS[0])
    start, stop = ((0, edge), (edge, ROWS[0]))[dist.get_rank()] if dist.get_rank() < 2 else (0, 0)
    shards = []
    if start < stop:
        part = values[start:stop].clone()
        shards = [Shard.from_tensor_and_offsets(part, [start, 0], dist.get_rank())]
    return init_from_local_shards(shards, *ROWS)


def state(seed: int, share: float | None = None) -> State:
    """Tensors of every kind and values of every kind; `seed` is another one of all of them.

    With a `share`, a `ShardedTensor` too, which DCP cannot copy for an asynchronous save.
    """
    placed = torch_cases.placed("rows", seed) if dist.is_initialized() else {}
    return {
        "model": {
            "weight": torch.from_numpy(array("weight", (127, 63), seed=seed)),
            "half": torch.from_numpy(array("half", (33,), seed=seed)).to(torch.bfloat16),
            "strided": torch.from_numpy(array("strided", (8, 6), seed=seed)).T,
            "scalar": torch.tensor(float(seed)),
            "nothing": torch.zeros(0, 5),
            "negated": torch.full((3,), 1j * seed).conj().imag,  # both lazily
            "conjugate": torch.full((3,), 1j * seed).conj(),
            **placed,
        },
        **({} if share is None else {"sharded": sharded(seed, share)}),
        "groups": [{"lr": 0.1 * seed, "betas": (0.9, seed), "params": [0, 1]}, {"lr": 1e-3}],
        "text": f"seed {seed} é",
        "bytes": bytes([seed]) * 5000,
        "flag": seed % 2 == 0,
        "none": None,
        "z": complex(seed, 1),
    }


def plain(value: Any) -> Any:
    """The state with all shards in NumPy arrays. Of sharded tensors, a collective call."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in sorted(value.items())}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if hasattr(value, "local_shards"):
        return [shard.tensor.numpy() for shard in value.local_shards()]
    if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16:
        value = value.view(torch.int16)
    if type(value) is torch.Tensor:
        value = value.resolve_conj().resolve_neg()
    return torch_cases.whole(value)


def differing(one: Any, other: Any, path: str = "") -> list[str]:
    """Paths at which two plain states differ."""
    if type(one) is not type(other):
        return [path]
    if isinstance(one, dict):
        paths = [f"{path}/{key}" for key in one.keys() ^ other.keys()]
        common = one.keys() & other.keys()
        return paths + [
            p for key in common for p in differing(one[key], other[key], f"{path}/{key}")
        ]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [path]
        pairs = enumerate(zip(one, other, strict=True))
        return [p for number, (a, b) in pairs for p in differing(a, b, f"{path}/{number}")]
    return [] if same(one, other) else [path]


# --------------------------------------------------------------------------------------- calls


def write(how: str, tree: State, writer: StorageWriter, planner: Any, **keywords: Any) -> None:
    """Save by `save`, or by `async_save` in a thread or process, and wait for the end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if how == "save":
            dcp.save(tree, storage_writer=writer, planner=planner, **keywords)
            return
        saving = dcp.async_save(
            tree,
            storage_writer=writer,
            planner=planner,
            async_checkpointer_type=AsyncCheckpointerType(how),
            **keywords,
        )
        saving.result()


def read(tree: State, reader: StorageReader, planner: Any = None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tree, storage_reader=reader, planner=planner)


def round_trip(
    worker: Worker | None,
    path: str,
    planner: str,
    how: str,
    share: float | None = None,
    again: float | None = None,
) -> list[str]:
    """Save, and load into another state; return faults of it, and of calls of planners."""
    saver, loader = PLANNERS[planner][0](), PLANNERS[planner][1]()
    write(how, state(1, share), StorageWriter(path), saver)
    target = state(2, again)
    read(target, StorageReader(path), loader)
    wrong = []
    if planner == "custom":
        wrong += uncounted(loader)
        if how == "save" and saver.calls != Counter(saver.items):
            wrong.append(f"resolve_data: {saver.calls}")
    return wrong + differing(plain(target), plain(state(1, again)))


def uncounted(planner: LoadPlanner) -> list[str]:
    """Calls of a planner that were not made exactly once for each item of its kind."""
    if set(planner.calls.values()) - {1}:
        return [f"called more than once: {planner.calls}"]
    loaded, resolved, committed = (
        {name for call, name in planner.calls if call == kind}
        for kind in ("load", "resolve", "commit")
    )
    if resolved != committed or loaded & resolved or loaded | resolved != set(planner.items):
        return [f"{planner.items}, but {planner.calls}"]
    return []


def quick() -> SaveOptions:
    return SaveOptions(arrival_s=5.0, silence_s=5.0)


def keys_of(path: str) -> list[str]:
    return list(asyncckpt.blocking.restore(path, coordinator="single"))


def save_tensors(worker: Worker, path: str, kind: str) -> None:
    """Save DTensors that are placed in this way."""
    write("save", torch_cases.placed(kind, 1), StorageWriter(path), None)


def load_tensors(worker: Worker, path: str, kinds: list[str]) -> list[str]:
    """Load DTensors placed in each of these ways; the names of wrong ones."""
    wrong = []
    for kind in kinds:
        tree = torch_cases.placed(kind, 9)
        read(tree, StorageReader(path))
        wanted = {name: array(name, shape, seed=1) for name, shape in torch_cases.TENSORS.items()}
        wrong += [f"{kind}{name}" for name in differing(plain(tree), wanted)]
    return wrong


def save_with_cached_plans(
    worker: Worker, root: str, storage_options: State | None = None
) -> list[str]:
    """Save five steps with cached plans by two writers, step 3 twice; wrong ones and their keys."""
    writers = [
        StorageWriter(f"{root}/{step}", overwrite=True, storage_options=storage_options)
        for step in range(2)
    ]
    for number, step in enumerate((0, 1, 2, 3, 4, 3)):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        tree = state(10 * number + step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path, writer = f"{root}/{step}", writers[number % 2]
            dcp.save(tree, checkpoint_id=path, storage_writer=writer, planner=planner)
    return load_all(worker, root, storage_options)


def count_merges(worker: Worker, root: str) -> list[int]:
    """Save one tree three times, another one, and the first twice more, which rank 1 has forgotten.

    Returns how often schemas were merged, per save; -1 where what was saved is wrong.
    """
    counts: list[int] = []
    writer = StorageWriter(root)
    merge = shared_plan.merge_schemas
    with mock.patch.object(shared_plan, "merge_schemas", side_effect=merge) as merging:
        for number in range(6):
            writer.reset(f"{root}/{number}")
            if number == 4 and dist.get_rank() == 1:
                saving._layouts.clear()
            tree = state(number, 0.5)
            if number == 3:
                tree["more"] = 1.5
            write("save", tree, writer, None)
            target = {**state(99, 0.5), "more": 0.0} if number == 3 else state(99, 0.5)
            read(target, StorageReader(f"{root}/{number}"))
            counts.append(-1 if differing(plain(target), plain(tree)) else merging.call_count)
            merging.reset_mock()
    return counts


def load_all(worker: Worker, root: str, storage_options: State | None = None) -> list[str]:
    """Return the faults in the steps of `save_with_cached_plans`."""
    wrong = []
    for step, number in ((0, 0), (1, 1), (2, 2), (3, 5), (4, 4)):
        target = state(99)
        read(target, StorageReader(f"{root}/{step}", storage_options=storage_options))
        found = differing(plain(target), plain(state(10 * number + step)))
        wrong += [f"{step}{path}" for path in found]
    return wrong
