"""`DTensor` at every coordinate of a mesh, one after the other in one process.

The process group is PyTorch's own fake: each process shards what it has, and communicates nothing.
"""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from asyncckpt import blocking, errors
from asyncckpt.adapters import adapters_for_loaded_frameworks, dtensor
from asyncckpt.adapters.dtensor import DTensorAdapter
from asyncckpt.planning.tiling import tiling_fault
from asyncckpt.ports import Run
from asyncckpt.spec import Box, Partition
from tests.adapters.cuda import Cuda
from tests.adapters.fetching import fetch_box

adapter = DTensorAdapter()


@contextlib.contextmanager
def rank_of(rank: int, count: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Whole:
    """What all ranks have opened of one tensor."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data.numpy().copy()
        self.held: dict[Box, list[int]] = {}
        self.stated: dict[Box, tuple[int, ...]] = {}
        self.partitions: set[Partition] = set()

    def add(self, rank: int, leaf: DTensor) -> None:
        """The rank's shards have the right values."""
        source = adapter.source("p", leaf)
        assert source.shards is not None
        assert source.partition is not None
        self.partitions.add(source.partition)
        for shard, view in zip(source.shards, source.views, strict=True):
            np.testing.assert_array_equal(view, self.data[(*shard.box.slices(), ...)])
            self.held.setdefault(shard.box, []).append(rank)
            assert self.stated.setdefault(shard.box, shard.holders) is shard.holders

    def check(self) -> None:
        """The shards tile the tensor, and each names all ranks that hold it."""
        assert len(self.partitions) == 1
        assert tiling_fault(Box.whole(self.data.shape), list(self.held)) is None
        assert {box: tuple(ranks) for box, ranks in self.held.items()} == self.stated


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


@pytest.mark.parametrize(
    ("mesh_shape", "names"),
    [
        ((3, 2), ("dp", "tp")),
        ((2, 3), ("dp", "tp")),
        ((4, 2), ("dp", "tp")),
        ((2, 2, 2), ("replicate", "dp", "tp")),
    ],
)
def test_fully_shard_over_tensor_parallelism(
    mesh_shape: tuple[int, ...], names: tuple[str, ...]
) -> None:
    """Shards are where PyTorch really cut them; among them 13 and 7 rows on 3 x 2."""
    count = math.prod(mesh_shape)
    lengths = (1, 4, 5, 7, 8, 10, 13)
    wholes: dict[tuple[int, str], Whole] = {}
    for rank in range(count):
        with rank_of(rank, count):
            mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
            for rows in lengths:
                net = torch.nn.Sequential(torch.nn.Linear(3, rows), torch.nn.Linear(rows, 3))
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter.copy_(numbered(*parameter.shape))
                for name, value in net.state_dict().items():
                    wholes.setdefault((rows, name), Whole(value))
                plan: Any = {"0": ColwiseParallel(), "1": RowwiseParallel()}
                parallelize_module(net, mesh["tp"], plan, src_data_rank=None)
                fully_shard(net, mesh=mesh[names[:-1]])
                for name, parameter in net.named_parameters():
                    wholes[rows, name].add(rank, parameter)
    for whole in wholes.values():
        whole.check()


@pytest.mark.parametrize("mesh_shape", [(3, 2), (2, 2), (2, 2, 2)])
def test_strided_shards_are_those_of_the_tensor_or_refused(mesh_shape: tuple[int, ...]) -> None:
    """`distribute_tensor` reads placements from left to right, and uneven shards may then differ.

    Where they do, some process finds that its local tensor has another shape.
    """
    refused, wrong = strided_shards(mesh_shape)
    assert wrong <= refused
    assert not refused & set(range(0, 20, math.prod(mesh_shape[-2:])))
    if mesh_shape == (3, 2):
        assert {7, 13} <= refused


def test_control_without_the_comparison_of_local_shapes_rows_are_taken_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dtensor, "_check_local", lambda *_: None)
    refused, wrong = strided_shards((3, 2))
    assert not refused
    assert {7, 13} <= wrong, "wrong rows, and nobody noticed"


def strided_shards(mesh_shape: tuple[int, ...]) -> tuple[set[int], set[int]]:
    """Return the lengths of tensors that some process refuses, and of those with wrong rows."""
    count = math.prod(mesh_shape)
    placements: list[Placement] = [_StridedShard(0, split_factor=2), Shard(0)]
    placements = [Replicate()] * (len(mesh_shape) - 2) + placements
    refused: set[int] = set()
    wrong: set[int] = set()
    for rank in range(count):
        with rank_of(rank, count):
            mesh = init_device_mesh("cpu", mesh_shape)
            for length in range(20):
                leaf = distribute_tensor(numbered(length), mesh, placements, src_data_rank=None)
                try:
                    source = adapter.source("p", leaf)
                except errors.UnsupportedLeafError:
                    refused.add(length)
                    continue
                for shard, view in zip(source.shards or (), source.views, strict=True):
                    if not np.array_equal(view, numbered(length)[shard.box.slices()]):
                        wrong.add(length)
    return refused, wrong


def test_a_process_that_gets_another_rank_opens_its_new_shards() -> None:
    """Meshes of the same ranks are equal, whichever of them this process is."""
    whole = Whole(numbered(7))
    for rank in (2, 0, 1, 3):
        with rank_of(rank, 4):
            mesh = init_device_mesh("cpu", (4,))
            data = numbered(7)
            whole.add(rank, distribute_tensor(data, mesh, [Shard(0)], src_data_rank=None))
    whole.check()


def test_an_opened_tensor_is_read_without_torch_distributed() -> None:
    """A save goes on in the background when the job has shut it down."""
    with rank_of(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        source = adapter.source(
            "p", distribute_tensor(numbered(8), mesh, [Shard(0)], src_data_rank=None)
        )
    out = np.full(4, -1, np.float32)
    fetch_box(adapter, source, Box((2,), (4,)), out)
    assert out.tolist() == [-1, -1, 4, 5]


def test_a_mesh_of_one_process_is_local() -> None:
    with rank_of(0, 1):
        data = numbered(4, 3)
        leaf = distribute_tensor(data, init_device_mesh("cpu", (1,)), [Shard(0)])
        source = adapter.source("p", leaf)
        assert (source.partition, source.shards) == (None, None)
        np.testing.assert_array_equal(source.view, numbered(4, 3))
        target = adapter.target("p", leaf, in_place=False)
        assert target.boxes == (Box((0, 0), (4, 3)),)
        made = adapter.place(target, [numbered(4, 3).numpy() + 1])
        assert torch.equal(made.to_local(), numbered(4, 3) + 1)


def test_restored_memory_is_adopted_where_it_is_one_box() -> None:
    with rank_of(1, 4):
        mesh = init_device_mesh("cpu", (4,))
        like = distribute_tensor(numbered(8, 2), mesh, [Shard(0)], src_data_rank=None)
        target = adapter.target("p", like, in_place=False)
        part = np.arange(4, dtype=np.float32).reshape(2, 2)
        made = adapter.place(target, [part])
        assert made.to_local().data_ptr() == part.ctypes.data


def test_parts_are_filled_where_memory_cannot_be_shown_to_numpy() -> None:
    values = (np.arange(4) + 1j).astype(np.complex64)
    with rank_of(1, 2), ThreadPoolExecutor(1) as worker:
        mesh = init_device_mesh("cpu", (2,))
        local = torch.zeros(2, dtype=torch.complex64).conj()
        shape, stride = torch.Size((4,)), (1,)
        leaf = DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=stride)
        target = adapter.target("p", leaf, in_place=True)
        assert target.fill
        assert target.buffers == ()
        assert worker.submit(adapter.place, target, [values[2:]]).result() is leaf
        assert leaf.to_local().tolist() == values[2:].tolist()
        source = adapter.source("p", leaf)
        assert source.views == (None,)
        out = np.empty(3, np.complex64)
        worker.submit(fetch_box, adapter, source, Box((1,), (3,)), out).result()
        np.testing.assert_array_equal(out[1:], values[2:])


def test_a_local_cuda_tensor_is_filled_after_the_work_queued_by_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rank_of(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        local = torch.zeros(2)
        leaf = DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size((4,)), stride=(1,))
        with Cuda(monkeypatch) as cuda:
            target = adapter.target("p", leaf, in_place=True)
            assert adapter.place(target, [np.ones(2, np.float32)]) is leaf
    assert local.tolist() == [1, 1]
    assert cuda.calls == [
        "own stream waits for event on caller's stream",
        "copy_ on own stream",
        "wait for own stream",
    ]


def test_local_cuda_tensors_are_read_and_filled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with rank_of(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        locals_ = [torch.arange(6.0).reshape(2, 3) + 10 * n for n in range(2)]
        shape, stride = torch.Size((4, 3)), (3, 1)
        leaves = [
            DTensor.from_local(one, mesh, [Shard(0)], shape=shape, stride=stride) for one in locals_
        ]
        adapter = DTensorAdapter()
        with Cuda(monkeypatch) as cuda:
            sources = [adapter.source("p", leaf) for leaf in leaves]
            runs = [Run(source, 0, 8, np.zeros(12, np.uint8)) for source in sources]
            adapter.begin_runs(runs)()
            read, cuda.calls = cuda.calls, []
            assert {source.begin_runs for source in sources} == {adapter.begin_runs}
            adapter = DTensorAdapter()
            targets = [adapter.target("p", leaf, in_place=True) for leaf in leaves]
            assert {target.place_all for target in targets} == {adapter.place_all}
            versions = [leaf._version for leaf in leaves]
            values = [np.full((2, 3), n, np.float32) for n in range(2)]
            assert adapter.place_all(targets, values) == leaves
    for number, run in enumerate(runs):
        assert run.out.view(np.float32).tolist() == [n + 10 * number for n in (2, 3, 4)]
        assert (locals_[number] == number).all()
        assert leaves[number]._version > versions[number]
    expected = [
        "own stream waits for event on caller's stream",
        *["copy_ on own stream"] * 2,
        "wait for own stream",
    ]
    assert read == cuda.calls == expected


def test_a_tensor_kept_off_the_devices_of_its_mesh_is_restored_where_it_is() -> None:
    """As with `CPUOffloadPolicy`: the mesh is one of CUDA devices, the local tensors are not."""
    with rank_of(1, 4):
        like = distribute_tensor(
            numbered(8, 2), init_device_mesh("cpu", (4,)), [Shard(0)], src_data_rank=None
        )
        like._spec.mesh = DeviceMesh("cuda", [0, 1, 2, 3])
        target = adapter.target("p", like, in_place=False)
        made = adapter.place(target, [np.full((2, 2), 7, np.float32)])
        assert made.device_mesh == like.device_mesh
        assert made.to_local().device.type == "cpu"
        assert made.to_local().tolist() == [[7, 7], [7, 7]]
        assert like.to_local().tolist() == [[4, 5], [6, 7]]


def test_the_kind_of_a_target_is_kept() -> None:
    with rank_of(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        plain = distribute_tensor(numbered(4), mesh, [Shard(0)], src_data_rank=None)
        frozen = torch.nn.Parameter(plain, requires_grad=False)
        buffer = torch.nn.Buffer(plain.clone(), persistent=False)
        parameter = torch.nn.Parameter(plain)
        for like in (plain, frozen, parameter, plain.clone().requires_grad_(), buffer):
            target = adapter.target("a/b", like, in_place=False)
            made = adapter.place(target, [np.zeros(2, np.float32)])
            assert isinstance(made, torch.nn.Parameter) == isinstance(like, torch.nn.Parameter)
            assert made.requires_grad == like.requires_grad
            assert isinstance(made, torch.nn.Buffer) == (like is buffer)
            assert not getattr(made, "persistent", False)


def test_filling_is_seen_by_autograd() -> None:
    with rank_of(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        leaf = distribute_tensor(numbered(4), mesh, [Replicate()], src_data_rank=None)
        leaf = leaf.requires_grad_()
        result = (leaf * leaf).to_local().sum()
        target = adapter.target("p", leaf, in_place=True)
        target.buffers[0][...] = 7
        assert adapter.place(target, target.buffers) is leaf
        assert leaf.to_local().tolist() == [7] * 4
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward()


def test_tensors_are_tied_by_memory_and_layout_also_where_they_are_empty() -> None:
    for rank in range(3):
        with rank_of(rank, 3):
            mesh = init_device_mesh("cpu", (3,))

            def make(shape: tuple[int, ...], mesh: Any = mesh) -> DTensor:
                return distribute_tensor(numbered(*shape), mesh, [Shard(0)], src_data_rank=None)

            leaf = make((1, 2))
            identity = adapter.source("p", leaf).identity
            assert identity == adapter.source("q", leaf.detach()).identity
            assert identity != adapter.source("q", make((1, 2))).identity
            if rank == 2:  # it holds nothing of a tensor of two rows, either
                larger = DTensor.from_local(
                    leaf.to_local(), mesh, [Shard(0)], shape=torch.Size((2, 2)), stride=(2, 1)
                )
                assert identity != adapter.source("q", larger).identity


def test_the_state_of_a_fresh_optimizer_is_divided_as_its_parameters(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 8)
    trained = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 3)).sum().backward()
    trained.step()
    blocking.save(tmp_path / "x", {"opt": trained}, coordinator="single")
    for rank in range(3):
        with rank_of(rank, 3):
            again = torch.nn.Linear(3, 8)
            fully_shard(again, mesh=init_device_mesh("cpu", (3,)))
            fresh = torch.optim.AdamW(again.parameters())
            blocking.restore_into(tmp_path / "x", {"opt": fresh}, coordinator="single")
            for had, has in zip(net.parameters(), again.parameters(), strict=True):
                assert isinstance(has, DTensor)
                for name in ("exp_avg", "exp_avg_sq"):
                    moment = fresh.state[has][name]
                    assert moment.placements == has.placements
                    part = trained.state[had][name].chunk(3)[rank]
                    assert torch.equal(moment.to_local(), part)
                assert not isinstance(fresh.state[has]["step"], DTensor)


def test_other_placements_are_refused_by_name() -> None:
    class Ragged(Shard):
        pass

    with rank_of(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        leaf = distribute_tensor(numbered(4), mesh, [Shard(0)], src_data_rank=None)
        leaf._spec.placements = (Ragged(0),)
        with pytest.raises(errors.UnsupportedLeafError, match=r"^a/b: .*Ragged, .*redistribute"):
            adapter.source("a/b", leaf)


def test_meshes_whose_ranks_do_not_ascend_are_refused_where_they_divide() -> None:
    """`distribute_tensor` and `full_tensor` go by rank, `fully_shard` and shapes by coordinate."""
    with rank_of(0, 4):
        rows = DeviceMesh("cpu", [[2, 0], [3, 1]], mesh_dim_names=("down", "across"))
        line = DeviceMesh("cpu", [2, 0, 3, 1])
        refused = [(line, [Shard(0)], 0), (rows, [Replicate(), Shard(1)], 1)]
        refused += [(rows, [Shard(0), _StridedShard(0, split_factor=2)], 1)]
        for mesh, placements, axis in refused:
            leaf = distribute_tensor(numbered(4, 4), mesh, placements, src_data_rank=None)
            text = rf"^a/b: .*\[2, 0.*not ascending along axis {axis}: .*ascending ranks$"
            for opening in (adapter.source, partial(adapter.target, in_place=True)):
                with pytest.raises(errors.UnsupportedLeafError, match=text):
                    opening("a/b", leaf)
        for mesh, placements in [(rows, [Shard(0), Replicate()]), (line, [Replicate()])]:
            leaf = distribute_tensor(numbered(4, 4), mesh, placements, src_data_rank=None)
            adapter.source("a/b", leaf)


def test_the_shards_of_fsdp1_are_refused_with_a_way_out() -> None:
    with rank_of(0, 2):
        with pytest.warns(FutureWarning):  # torch itself advises against them
            spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
            leaf = sharded_tensor.zeros(spec, 4, 2)
        with pytest.raises(errors.UnsupportedLeafError, match=r"device_mesh=.*StorageWriter"):
            adapters_for_loaded_frameworks().resolve(type(leaf)).source("a/b", leaf)  # type: ignore


def test_it_is_found_before_the_adapter_of_plain_tensors() -> None:
    found = adapters_for_loaded_frameworks()
    with rank_of(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        leaf = distribute_tensor(numbered(4), mesh, [Shard(0)], src_data_rank=None)
        for kind in (type(leaf), type(torch.nn.Parameter(leaf))):
            assert isinstance(found.resolve(kind), DTensorAdapter)
    taking = found.expected_by(torch.nn.Linear)
    assert taking is not None
    assert taking.name == "torch"


def test_the_weights_of_fully_shard_are_filled_also_after_the_first_pass() -> None:
    found = adapters_for_loaded_frameworks()
    with rank_of(0, 2):
        model = checkpoint_wrapper(torch.nn.Linear(4, 4))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        model._get_fsdp_state()._lazy_init()  # what a pass begins with: adds its hooks
        assert all(one._load_state_dict_pre_hooks for one in model.modules())
        required, _ = found.rules_of(model)
        assert required is not None and required("weight") == "weight"


class Wrapped:
    """Optimizers with their states under their names, or the state of the only one."""

    def __init__(self, only: Any = None, **optimizers: Any) -> None:
        self.__dict__.update(optimizers, only=only)

    def state_dict(self) -> dict[str, Any]:
        if self.only is not None:
            state: dict[str, Any] = self.only.state_dict()
            return state
        others = {name: one for name, one in self.__dict__.items() if name != "only"}
        return {name: one.state_dict() for name, one in others.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, one in self.__dict__.items():
            if one is not None:
                one.load_state_dict(state if name == "only" else state[name])


def stepped(*sizes: int, sharded: bool) -> list[torch.optim.Optimizer]:
    """Optimizers of fresh sharded modules, or of plain ones after one step."""
    made = []
    for size in sizes:
        model = torch.nn.Linear(4, size)
        if sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        made.append(torch.optim.AdamW(model.parameters()))
        if not sharded:
            model.weight.grad, model.bias.grad = numbered(size, 4), numbered(size)
            made[-1].step()
    return made


@pytest.mark.parametrize("names", [["only"], ["opt"], ["first", "second"]])
def test_moments_of_wrapped_optimizers_are_divided_like_their_parameters(
    tmp_path: Path, names: list[str]
) -> None:
    sizes = range(6, 6 + len(names))
    trained = stepped(*sizes, sharded=False)
    blocking.save(tmp_path / "x", {"opt": Wrapped(**dict(zip(names, trained, strict=True)))})
    with rank_of(1, 2):
        fresh = stepped(*sizes, sharded=True)
        target = {"opt": Wrapped(**dict(zip(names, fresh, strict=True)))}
        blocking.restore_into(tmp_path / "x", target, coordinator="single")
        for one, other in zip(trained, fresh, strict=True):
            for state, divided in zip(one.state.values(), other.state.values(), strict=True):
                moment = divided["exp_avg"]
                assert isinstance(moment, DTensor) and moment.shape == state["exp_avg"].shape
                rows = state["exp_avg"].chunk(2)[1]
                assert torch.equal(moment.to_local(), rows)


def test_without_it_nothing_of_torch_distributed_is_imported() -> None:
    code = (
        "import sys, torch, asyncckpt.adapters as a; s = a.adapters_for_loaded_frameworks();"
        "print([type(x).__name__ for x in s.adapters], 'torch.distributed.tensor' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    assert found.strip() == "['NumpyAdapter', 'TorchAdapter'] False"
