"""What ranks of a torch job do in tests: sharded modules with optimizers, DTensors, a trainer."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from asyncckpt import Checkpointer, blocking
from asyncckpt.coordinators.service import CALL_LIMIT_S
from asyncckpt.errors import SaveAbortedError, TreeMismatchError
from tests.crash.scenarios import left_in_process
from tests.processes.values import array, same, shuffled
from tests.processes.worker import Worker

Prints = dict[str, str]


class Model(nn.Module):
    """Layers of uneven sizes, one of them with fewer rows than ranks, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(63, 127)
        self.norm = nn.LayerNorm(127)
        self.second = nn.Linear(127, 13, bias=False)
        self.last = nn.Linear(13, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def mesh(kind: str) -> DeviceMesh:
    """A mesh over all ranks."""
    world = dist.get_world_size()
    if kind == "fsdp":
        return init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    if kind == "hsdp":
        names, shape = ("replicas", "shards"), (2, world // 2)
    else:
        names, shape = ("dp", "tp"), (world // 2, 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def job(kind: str, seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that is distributed in this way, trained for some steps."""
    torch.manual_seed(seed)
    model = Model()
    if kind != "plain":
        where = data_parallel = mesh(kind)
        if kind == "fsdp over tp":
            # What has no plan here is sharded by each column of the mesh, as norms usually are.
            plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
            parallelize_module(model, where["tp"], plan)
            data_parallel = where["dp"]
        for layer in (model.first, model.second, model.last):
            fully_shard(layer, mesh=data_parallel)
        fully_shard(model, mesh=data_parallel)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * seed)
    for _ in range(steps):
        # Gradients of parameters in this place, whatever the layout: no need of a forward pass.
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.5 + 0.25
        optimizer.step()
        model.count += 1
    return model, optimizer


def whole(value: Any) -> Any:
    """The value with all of its shards. Of a DTensor, a collective call."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().numpy() if isinstance(value, torch.Tensor) else value


def prints(tree: Any, path: str = "") -> Prints:
    """A fingerprint of every leaf of a tree, put together from all ranks."""
    if hasattr(tree, "state_dict"):
        tree = tree.state_dict()
    if isinstance(tree, dict) or isinstance(tree, list | tuple):
        found: Prints = {}
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in sorted(items, key=lambda item: str(item[0])):
            found |= prints(value, f"{path}/{key}")
        return found
    value = whole(tree)
    if isinstance(value, np.ndarray):
        data = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]
        return {path: f"{value.dtype}{list(value.shape)} {data}"}
    return {path: repr(value)}


def tree_of(worker: Worker, kind: str, form: str, seed: int, steps: int) -> dict[str, Any]:
    """A train state: the objects themselves, or what their state dicts are."""
    model, optimizer = job(kind, seed, steps)
    objects: dict[str, Any] = {"model": model, "opt": optimizer}
    if form == "state dicts":
        model_state, optimizer_state = get_state_dict(model, optimizer)
        objects = {"model": model_state, "opt": optimizer_state}
    tree = {
        **objects,
        "seen": torch.arange(5) + steps,
        "order": array("order", (100,), "int64", seed=steps),
        "name": "run",
        "rate": 0.5,
    }
    worker.state["objects"] = model, optimizer
    return shuffled(worker, tree)  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------------- calls


def save(worker: Worker, root: str, kind: str, form: str) -> Prints:
    """Save two steps; fingerprints of the second."""
    tree = tree_of(worker, kind, form, seed=1, steps=1)
    with blocking.Checkpointer(root) as ckpt:
        ckpt.save(1, tree)
        tree = tree_of(worker, kind, form, seed=1, steps=2)
        pending = ckpt.start_save(2, tree)
        before = prints(tree)
        for parameter in worker.state["objects"][0].parameters():
            parameter.data.zero_()
        report = pending.result()
        assert report.plan_cached
    return before


def restore(worker: Worker, root: str, kind: str, form: str, coordinator: str = "auto") -> Prints:
    """Restore into another model; its fingerprints."""
    tree = tree_of(worker, kind, form, seed=2, steps=1)
    with blocking.Checkpointer(root, coordinator=coordinator) as ckpt:
        assert ckpt.latest_step() == 2
        ckpt.restore_into(tree)
    if form == "state dicts":
        model, optimizer = worker.state["objects"]
        set_state_dict(
            model,
            optimizer,
            model_state_dict=tree["model"],
            optim_state_dict=tree["opt"],
        )
        after = prints(model.state_dict(), "/model")
        assert after.items() <= prints(tree).items()
    return prints(tree)


def restore_plain(worker: Worker, root: str) -> list[str]:
    """Restore by this process alone; the parameters that are not those of an undivided model."""
    tree = tree_of(worker, "plain", "objects", seed=2, steps=1)
    blocking.restore_into(f"{root}/2", tree, coordinator="single")
    model, optimizer = worker.state["objects"]
    wanted, trained = job("plain", 1, 2)
    pairs = zip(model.named_parameters(), wanted.parameters(), strict=True)
    return [
        name
        for (name, parameter), other in pairs
        if not torch.allclose(parameter, other)
        or not torch.allclose(
            optimizer.state[parameter]["exp_avg_sq"], trained.state[other]["exp_avg_sq"]
        )
    ]


TENSORS: dict[str, tuple[int, ...]] = {
    "thirteen": (13,),
    "seven": (7,),
    "matrix": (127, 63),
    "large": (513, 701),
    "two rows": (2, 3),
    "no rows": (0, 3),
    "one": (1, 1),
}


def placed(kind: str, seed: int) -> dict[str, DTensor]:
    """The tensors, each distributed in this way."""
    world = dist.get_world_size()
    flat = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (world // 2, 2))
    tensors = {}
    for name, shape in TENSORS.items():
        data = torch.from_numpy(array(name, shape, seed=seed))
        last = len(shape) - 1
        where: tuple[DeviceMesh, Sequence[Placement]] = {
            "rows": (flat, [Shard(0)]),
            "columns": (flat, [Shard(last)]),
            "replicated": (flat, [Replicate()]),
            "tiles": (grid, [Shard(0), Shard(last)]),
            "rows twice": (grid, [Shard(0), Shard(0)]),
            "replicas of columns": (grid, [Replicate(), Shard(last)]),
        }[kind]
        tensors[name] = distribute_tensor(data, *where)
    return tensors


def save_tensors(worker: Worker, root: str, kind: str) -> None:
    """Save DTensors beside local leaves."""
    tree = {**placed(kind, 1), "local": torch.ones(3), "host": np.arange(4), "step": 1}
    with blocking.Checkpointer(root) as ckpt:
        ckpt.save(1, shuffled(worker, tree))


def restore_tensors(worker: Worker, root: str, kinds: Sequence[str]) -> list[str]:
    """Restore DTensors placed in each of these ways; the names of wrong ones."""
    bad = []
    with blocking.Checkpointer(root) as ckpt:
        for kind in kinds:
            like: dict[str, Any] = {**placed(kind, 9), "local": torch.zeros(3)}
            like |= {"host": np.zeros(4, np.int64), "step": 0}
            tree = ckpt.restore(1, like=shuffled(worker, like))
            for name, shape in TENSORS.items():
                assert tree[name].placements == like[name].placements
                if not same(whole(tree[name]), array(name, shape, seed=1)):
                    bad.append(f"{kind}: {name}")
            if not torch.equal(tree["local"], torch.ones(3)) or tree["step"] != 1:
                bad.append(f"{kind}: local")
    return bad


# ------------------------------------------------------------------------------------- trainer


class Trainer(threading.Thread):
    """A thread that runs collectives with known results until it is told to stop."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__(daemon=True)
        self._index = index
        self._count = count
        self.rounds = 0
        self.wrong: list[str] = []
        self.ending = threading.Event()

    def run(self) -> None:
        while True:
            number = self.rounds
            # The ranks come to each collective at other times.
            threading.Event().wait(0.002 * ((self._index + number) % self._count))
            values = torch.full((1000,), float(number * self._count + self._index))
            stop = torch.tensor([int(self.ending.is_set())])
            dist.all_reduce(values)
            dist.all_reduce(stop, op=dist.ReduceOp.MIN)
            total = sum(number * self._count + index for index in range(self._count))
            if not torch.equal(values, torch.full((1000,), float(total))):
                self.wrong.append(f"round {number}: {values[0].item()} is not {total}")
            self.rounds += 1
            if stop.item():
                return

    def await_rounds(self, count: int) -> None:
        """Wait until so many more rounds are done."""
        wanted = self.rounds + count
        while self.rounds < wanted:
            assert self.is_alive()
            threading.Event().wait(0.005)


def save_while_training(worker: Worker, root: str) -> list[str]:
    """Save while a trainer runs, the last rank coming late to each save; what went wrong."""
    tree = {**placed("rows", 1), "local": torch.ones(1000), "host": np.arange(4), "step": 1}
    trainer = Trainer(worker.index, worker.count)
    trainer.start()
    late = worker.index == worker.count - 1
    with blocking.Checkpointer(root) as ckpt:
        for step in range(4):
            if late:
                trainer.await_rounds(20)
            pending = ckpt.start_save(step, tree)
            if not late:
                # These rounds end while the save waits for the last rank.
                trainer.await_rounds(10)
            pending.result()
    trainer.ending.set()
    trainer.join(20)
    if trainer.is_alive():
        trainer.wrong.append("the trainer hangs")
    return trainer.wrong


# ------------------------------------------------------- while the server of the store is stopped


def local_tree(step: int) -> dict[str, Any]:
    """A tree that both processes have, and share the writing of."""
    return {"w": torch.full((2 << 20,), float(step)), "step": step}


async def open_and_save(worker: Worker, root: str) -> None:
    """Save step 1, and keep the `Checkpointer` open."""
    worker.state["open"] = ckpt = Checkpointer(root)
    await ckpt.save(1, local_tree(1))


async def cancel_save(worker: Worker) -> tuple[float, int, list[str], int, list[str]]:
    """Begin to save step 2, and cancel that once the thread of the coordinator is held up.

    Returns:
        Seconds that this took; tasks that are left on the engine, descriptors below the root,
        leases of memory, and threads of coordinators.
    """
    ckpt = worker.state["open"]
    session = ckpt._session
    runtime, caller = session.runtime, session.processes.coordinator._caller

    async def tasks() -> int:
        return len(asyncio.all_tasks()) - 1

    pending = await ckpt.start_save(2, local_tree(2))
    while caller.time_left_s() > CALL_LIMIT_S - 0.5:  # it has been in one call for half a second
        await asyncio.sleep(0.02)
    begun = time.monotonic()
    pending.cancel()
    try:
        await pending
    except SaveAbortedError:
        taken_s = time.monotonic() - begun
    left = left_in_process(session.root.url)
    threads = [name for name in left if name.endswith("-coordinator")]
    opened = [name for name in left if not name.startswith("asyncckpt")]
    count = await runtime.engine.submit(tasks).wait()
    return taken_s, count, opened, runtime.budget.in_use, threads


async def go_on(worker: Worker) -> list[int]:
    """Make the call that the other process has cancelled if this one has not, then save step 3."""
    ckpt = worker.state.pop("open")
    if worker.index == 0:
        try:
            await ckpt.save(2, local_tree(2))
        except SaveAbortedError:
            pass
    await ckpt.save(3, local_tree(3))
    steps = await ckpt.steps()
    await ckpt.close()
    return steps  # type: ignore[no-any-return]


def save_experts(worker: Worker, root: str) -> list[list[str]]:
    """Train an expert of this rank, that of rank 1 only from the third step on, and save each step.

    Returns the paths of the leaves of each step.
    """
    torch.manual_seed(worker.index)
    expert = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(expert.parameters())
    names = f"expert{worker.index}", f"opt{worker.index}"
    wanted: list[Prints] = []
    with blocking.Checkpointer(root) as ckpt:
        for step in range(5):
            if worker.index == 0 or step >= 2:
                expert(torch.ones(3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            state = dict(zip(names, (expert, optimizer), strict=True))
            ckpt.start_save(step, state)
            wanted.append(prints({name: value.state_dict() for name, value in state.items()}))
        ckpt.wait()
    saved = [blocking.restore(f"{root}/{step}", coordinator="single") for step in range(5)]
    for step, tree in enumerate(saved):
        assert prints({name: tree[name] for name in names}) == wanted[step]
    return [sorted(prints(tree)) for tree in saved]


class Stage(nn.Module):
    """A layer of this rank, and one with the same name on all of them."""

    def __init__(self, index: int, *, more: bool = False) -> None:
        super().__init__()
        setattr(self, f"norm{index}", nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 2)
        if more:
            setattr(self, f"more{index}", nn.Linear(1, 1))

    def get_extra_state(self) -> None:
        return None

    def set_extra_state(self, state: object) -> None:
        assert state is None


def save_stages(worker: Worker, root: str) -> Prints:
    """Save the stages of a pipeline under one key; fingerprints of that of this rank."""
    torch.manual_seed(0)
    stage = Stage(worker.index)
    nn.init.constant_(getattr(stage, f"norm{worker.index}").weight, worker.index + 2.0)
    blocking.save(root, {"model": stage})
    return prints(stage)


def restore_stages(worker: Worker, root: str, change: int) -> tuple[Prints, list[str]]:
    """Restore into a fresh stage, as the other rank's with 1; fingerprints, and errors.

    The errors are those of a rank that has another layer, and of all that lack one.
    """
    stage = Stage((worker.index + change) % worker.count)
    blocking.restore_into(root, {"model": stage})
    errors = []
    for index, more in ((worker.index, worker.index == 1), (0, False)):
        try:
            blocking.restore_into(root, {"model": Stage(index, more=more)})
        except TreeMismatchError as error:
            errors.append(str(error))
    return prints(stage), errors
