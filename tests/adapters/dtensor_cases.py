"""What `test_dtensor_processes.py` runs in four and in six processes with gloo."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from asyncckpt.adapters.dtensor import DTensorAdapter
from asyncckpt.adapters.torch import numpy_view
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.spec import DTYPES, Box
from tests.adapters.fetching import fetch_box

adapter = DTensorAdapter()
Array = np.ndarray[Any, Any]

SHAPES = [(8, 6), (5, 3), (1, 4), (30, 2), (0, 3), ()]


def join(index: int, count: int, address: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=index, world_size=count)


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)


def opened(leaf: DTensor, data: Array) -> dict[str, Any]:
    """The tensor as a source, with right values in all of its shards, which are its memory."""
    source = adapter.source("p", leaf)
    assert source.framework == "torch"
    assert source.partition is not None
    assert source.shards is not None
    assert source.view is None
    with torch.no_grad():
        local = leaf.to_local()
    for shard, view in zip(source.shards, source.views, strict=True):
        expected = data[(*shard.box.slices(), ...)]
        assert view is not None
        np.testing.assert_array_equal(view, expected)
        assert np.shares_memory(view, numpy_view(local.detach()))
        out = np.empty(shard.box.shape, DTYPES[source.spec.dtype])
        fetch_box(adapter, source, shard.box, out)
        np.testing.assert_array_equal(out, expected)
    return {
        "shape": source.spec.shape,
        "partition": [source.partition.cuts, source.partition.holders, source.partition.processes],
        "shards": [[s.box.offset, s.box.shape, s.holders] for s in source.shards],
    }


def restored(like: DTensor, data: Array) -> DTensor:
    """A new tensor as `like`, made from the boxes that the target wants."""
    target = adapter.target("p", like, in_place=False)
    assert target.buffers == ()
    made: DTensor = adapter.place(
        target, [data[(*box.slices(), ...)].copy() for box in target.boxes or ()]
    )
    assert type(made) is type(like)
    assert made.device_mesh == like.device_mesh
    assert made.placements == like.placements
    assert (made.shape, made.dtype) == (like.shape, like.dtype)
    assert made.requires_grad == like.requires_grad
    assert isinstance(made, torch.nn.Parameter) == isinstance(like, torch.nn.Parameter)
    assert made.stride() == torch.empty(like.shape, device="meta").stride()
    with torch.no_grad():
        assert made.to_local().shape == like.to_local().shape
    return made


def filled(like: DTensor, data: Array) -> None:
    """The tensor itself, its local memory filled box by box."""
    target = adapter.target("p", like, in_place=True)
    version = like._version
    for box, buffer in zip(target.boxes or (), target.buffers, strict=True):
        buffer[...] = data[(*box.slices(), ...)]
    assert adapter.place(target, target.buffers) is like
    assert like._version > version


def both_ways(leaf: DTensor, data: torch.Tensor) -> dict[str, Any]:
    """Open the tensor, restore one like it with other values, and fill it with these."""
    values = data.numpy().copy()  # the tensor may be over this very memory
    found = opened(leaf, values)
    opened(restored(leaf, values + 1), values + 1)
    filled(leaf, values + 2)
    opened(leaf, values + 2)
    return found


def names_of(placements: Sequence[Placement]) -> str:
    return ", ".join(map(str, placements))


# ----------------------------------------------------------------------------------- four ranks


def distributed(mesh: DeviceMesh) -> dict[str, Any]:
    """Every combination of `Shard` and `Replicate`, as `distribute_tensor` makes it."""
    found = {}
    for shape in SHAPES:
        data = numbered(*shape)
        kinds: list[Placement] = [Replicate(), *map(Shard, range(len(shape)))]
        for placements in itertools.product(kinds, repeat=mesh.ndim):
            leaf = distribute_tensor(data.clone(), mesh, placements)
            name = f"{shape} {names_of(placements)}"
            found[name] = both_ways(leaf, data)
            if data.numel():
                assert torch.equal(leaf.full_tensor(), data + 2), name
    return found


def strided() -> dict[str, Any]:
    """A `_StridedShard` without the shards that it counts: two boxes per process."""
    mesh = init_device_mesh("cpu", (2, 2))
    found = {}
    for length in (8, 9, 3):
        data = numbered(length)
        parts, _ = _StridedShard(0, split_factor=2)._split_tensor(data, 2, with_padding=False)
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        leaf = DTensor.from_local(
            parts[coordinate[0]],
            mesh,
            [_StridedShard(0, split_factor=2), Replicate()],
            run_check=False,
            shape=data.shape,
            stride=data.stride(),
        )
        found[f"({length},)"] = both_ways(leaf, data)
    return found


def counted() -> dict[str, Any]:
    """`_StridedShard` with the shards that it counts, as `distribute_tensor` makes it."""
    mesh = init_device_mesh("cpu", (2, 2))
    data = numbered(8, 3)
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    return {"(8, 3)": both_ways(distribute_tensor(data, mesh, placements), data)}


def on_two_ranks() -> dict[str, Any]:
    """A mesh that leaves out ranks 0 and 2."""
    mesh = DeviceMesh("cpu", [1, 3])
    data = numbered(5, 3)
    leaf = distribute_tensor(data, mesh, [Shard(0)])
    found = both_ways(leaf, data)
    target = adapter.target("p", leaf, in_place=True)
    return {"(5, 3)": found, "wanted": len(target.boxes or ())}


def on_one_rank() -> Any:
    """A mesh of rank 2 alone: local there."""
    mesh = DeviceMesh("cpu", [2])
    data = numbered(5, 3)
    leaf = distribute_tensor(data, mesh, [Shard(0)])
    source = adapter.source("p", leaf)
    if source.partition is not None:
        return [list(source.partition.processes), len(source.shards or ())]
    values = data.numpy().copy()
    np.testing.assert_array_equal(source.view, values)
    np.testing.assert_array_equal(restored(leaf, values + 1).to_local().numpy(), values + 1)
    filled(leaf, values + 2)
    np.testing.assert_array_equal(source.view, values + 2)
    return source.shards


class Net(torch.nn.Module):
    """Layers whose sizes no mesh divides evenly, and two that share their weight."""

    def __init__(self, rows: int = 13) -> None:
        super().__init__()
        self.up = torch.nn.Linear(3, rows)
        self.down = torch.nn.Linear(rows, 3)
        self.again = torch.nn.Linear(rows, 3)
        self.again.weight = self.down.weight
        self.norm = torch.nn.LayerNorm(3)
        self.scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(numbered(*parameter.shape) + 1)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.up(x)
        return self.norm(self.down(hidden) + self.again(hidden)) * self.scale


def of_module(module: torch.nn.Module, rows: int) -> dict[str, Any]:
    """All parameters of a sharded module; their values are those of the module before."""
    expected = Net(rows).state_dict()
    found = {}
    for name, leaf in module.state_dict().items():
        assert isinstance(leaf, DTensor), name
        found[name] = opened(leaf, expected[name].numpy())
    by_identity: dict[Any, list[str]] = {}
    for name, leaf in module.state_dict().items():
        by_identity.setdefault(adapter.source(name, leaf).identity, []).append(name)
    tied = [names for names in by_identity.values() if len(names) > 1]
    assert tied == [["down.weight", "again.weight"]], tied
    for name, parameter in module.named_parameters():
        found[name] = both_ways(parameter, expected[name])
    return found


def fsdp(mesh_shape: tuple[int, ...], rows: int) -> dict[str, Any]:
    """`fully_shard` over one or (HSDP) two mesh axes."""
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    net = Net(rows)
    fully_shard(net, mesh=mesh)
    return of_module(net, rows)


def parallel(dp: int, tp: int, rows: int) -> dict[str, Any]:
    """`fully_shard` over `parallelize_module`: what the placements do not always say."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    net = torch.nn.Sequential(torch.nn.Linear(3, rows), torch.nn.Linear(rows, 3))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(numbered(*parameter.shape))
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    return {name: both_ways(leaf, expected[name]) for name, leaf in net.named_parameters()}


def trained() -> dict[str, Any]:
    """Module and optimizer after a step, by `get_state_dict` and by their own state dicts."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    net = Net()
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    found = {}
    for tree in (get_state_dict(net, optimizer), (net.state_dict(), optimizer.state_dict())):
        for path, leaf in _leaves(tree):
            if isinstance(leaf, DTensor):
                data = leaf.full_tensor().detach()
                found[path] = opened(leaf, data.numpy())
                restored(leaf, data.numpy())
            else:
                assert not isinstance(leaf, torch.Tensor) or leaf.ndim == 0, path
    assert any("exp_avg_sq" in path for path in found)
    return found


def _leaves(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict):
        return [leaf for key, value in tree.items() for leaf in _leaves(value, f"{path}/{key}")]
    if isinstance(tree, list | tuple):
        return [leaf for n, value in enumerate(tree) for leaf in _leaves(value, f"{path}/{n}")]
    return [(path, tree)]


def refusals() -> list[str]:
    """Partial sums, and local tensors that contradict their placements."""
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    make = partial(DTensor.from_local, run_check=False)
    leaves = [
        make(torch.ones(3), line, [Partial()]),
        make(torch.ones(3), square, [Replicate(), Partial("max")]),
        make(torch.ones(3, 2), line, [Shard(0)], shape=torch.Size((8, 2)), stride=(2, 1)),
        make(
            torch.ones(3),
            square,
            [_StridedShard(0, split_factor=2), Shard(0)],
            shape=torch.Size((8,)),
            stride=(1,),
        ),
    ]
    found = []
    for leaf in leaves:
        for call in (
            lambda leaf=leaf: adapter.source("a/b", leaf),
            lambda leaf=leaf: adapter.target("a/b", leaf, in_place=False),
        ):
            try:
                call()
            except UnsupportedLeafError as error:
                found.append(str(error))
            else:
                raise AssertionError(f"{leaf.placements} was not refused")
    return found[::2] if found[::2] == found[1::2] else found


def on_meta() -> None:
    """A `like` without memory is restored on the devices of its mesh; it cannot be filled."""
    mesh = init_device_mesh("cpu", (4,))
    data = numbered(6, 2)
    whole = distribute_tensor(data, mesh, [Shard(0)])
    local = torch.empty_like(whole.to_local(), device="meta")
    like = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=data.shape, stride=data.stride()
    )
    target = adapter.target("p", like, in_place=False)
    made = adapter.place(target, [data.numpy()[box.slices()].copy() for box in target.boxes or ()])
    assert made.to_local().device.type == "cpu"
    assert torch.equal(made.full_tensor(), data)
    for call in (
        lambda: adapter.source("a/b", like),
        lambda: adapter.target("a/b", like, in_place=True),
    ):
        try:
            call()
        except UnsupportedLeafError as error:
            assert str(error).startswith("a/b: a tensor on device meta")
        else:
            raise AssertionError("a tensor without memory was accepted")


def still_communicating() -> dict[str, Any]:
    """The result of a redistribution that nothing has waited for yet."""
    mesh = init_device_mesh("cpu", (4,))
    data = numbered(8, 2)
    leaf = distribute_tensor(data, mesh, [Shard(0)]).redistribute(
        placements=[Replicate()], async_op=True
    )
    source = adapter.source("p", leaf)
    assert source.shards is not None
    assert source.views[0] is not None
    np.testing.assert_array_equal(source.views[0], data)
    return {"holders": source.shards[0].holders}


def of_every_dtype() -> None:
    mesh = init_device_mesh("cpu", (4,))
    for name in ("bfloat16", "float8_e4m3fn", "bool", "complex64", "int64"):
        values = (np.arange(6) % 3).astype(DTYPES[name])
        like = torch.tensor(values.astype(np.float32)).to(getattr(torch, name))
        coordinate = dist.get_rank()
        leaf = DTensor.from_local(
            torch.chunk(like, 3)[coordinate] if coordinate < 3 else like[:0],
            mesh,
            [Shard(0)],
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
        opened(leaf, values)
        opened(restored(leaf, values), values)


def boxes_in_a_window() -> None:
    """Any box is fetched as far as the process holds it, to its place."""
    mesh = init_device_mesh("cpu", (2, 2))
    data = numbered(9)
    parts, _ = _StridedShard(0, split_factor=3)._split_tensor(data, 2, with_padding=False)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    leaf = DTensor.from_local(
        parts[coordinate[1]],
        mesh,
        [Replicate(), _StridedShard(0, split_factor=3)],
        run_check=False,
        shape=data.shape,
        stride=data.stride(),
    )
    source = adapter.source("p", leaf)
    for start, length in itertools.combinations(range(10), 2):
        out = np.full(length, -1, np.float32)
        box = Box((start,), (min(length, 9 - start),))
        fetch_box(adapter, source, box, out[: box.shape[0]])
        held = {
            index
            for shard in source.shards or ()
            for index in range(shard.box.offset[0], shard.box.stop[0])
        }
        for index in range(box.shape[0]):
            assert out[index] == (start + index if start + index in held else -1)


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (4,))


def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2))


FOUR: dict[str, Callable[[], Any]] = {
    "distributed over 4": lambda: distributed(line()),
    "distributed over 2 x 2": lambda: distributed(square()),
    "strided": strided,
    "counted": counted,
    "on two ranks": on_two_ranks,
    "on one rank": on_one_rank,
    "fsdp": lambda: fsdp((4,), 13),
    "hsdp": lambda: fsdp((2, 2), 7),
    "parallel, 10": lambda: parallel(2, 2, 10),
    "parallel, 5": lambda: parallel(2, 2, 5),
    "trained": trained,
    "refusals": refusals,
    "on meta": on_meta,
    "still communicating": still_communicating,
    "of every dtype": of_every_dtype,
    "boxes in a window": boxes_in_a_window,
}

SIX: dict[str, Callable[[], Any]] = {
    "parallel, 13": lambda: parallel(3, 2, 13),
    "parallel, 7": lambda: parallel(3, 2, 7),
    "parallel, turned": lambda: parallel(2, 3, 13),
}

CASES = FOUR
