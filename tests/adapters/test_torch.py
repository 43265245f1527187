from __future__ import annotations

import asyncio
import gc
import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncckpt import LeafOptions, SaveOptions, blocking, errors
from asyncckpt.adapters.torch import TorchAdapter, numpy_view, tensor_view
from asyncckpt.flow.arena import Arena
from asyncckpt.flow.budget import ByteBudget
from asyncckpt.flow.buffers import SlotPool
from asyncckpt.flow.threads import Workers
from asyncckpt.ports import Run
from asyncckpt.runtime import StagingMemory
from asyncckpt.spec import DTYPES, ArraySpec, Box
from asyncckpt.tree import flatten, unflatten_like
from tests.adapters.cuda import Cuda, Cudart
from tests.script import Script

adapter = TorchAdapter()
MISSING = ("int2", "int4", "float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz")
NAMES = [name for name in DTYPES if name not in MISSING]


@pytest.fixture
def worker() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def values(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    count = int(np.prod(shape))
    numbers = np.arange(count) % 7 + (name == "float8_e8m0fnu")  # which has no zero
    return np.array(numbers.reshape(shape).astype(DTYPES[name]))


def tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return tensor_view(values(name, shape))


LAYOUTS = {
    "rank 0": lambda n: tensor(n, ()),
    "empty": lambda n: tensor(n, (0, 3)),
    "plain": lambda n: tensor(n, (3, 4)),
    "transposed": lambda n: tensor(n, (2, 3, 4)).permute(2, 0, 1),
    "sliced": lambda n: tensor(n, (6, 8))[1::2, ::3],
    "expanded": lambda n: tensor(n, (4,)).expand(3, 4),
    "channels last": lambda n: tensor(n, (2, 3, 4, 5)).contiguous(
        memory_format=torch.channels_last
    ),
}


def read(source: Any, box: Box) -> np.ndarray[Any, Any]:
    out = np.empty(box.shape, DTYPES[source.spec.dtype])
    adapter.fetch(source, 0, box, out)
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_and_layout_round_trips(name: str, layout: str) -> None:
    leaf = LAYOUTS[layout](name)
    shape = tuple(leaf.shape)
    expected = numpy_view(leaf.contiguous())
    source = adapter.source("p", leaf)
    assert source.spec == ArraySpec(shape, name)
    assert source.view is not None
    assert source.view.dtype == DTYPES[name]
    assert not leaf.numel() or source.view.ctypes.data == leaf.data_ptr()
    np.testing.assert_array_equal(source.view, expected)
    for box in (
        Box.whole(shape),
        Box(tuple(n // 3 for n in shape), tuple(n - n // 3 for n in shape)),
    ):
        np.testing.assert_array_equal(read(source, box), expected[box.slices()])

    target = adapter.target("p", leaf, in_place=False)
    memory = np.empty(target.spec.shape, DTYPES[target.spec.dtype])
    memory[...] = expected
    placed = adapter.place(target, [memory])
    assert (placed.dtype, tuple(placed.shape)) == (leaf.dtype, shape)
    assert not leaf.numel() or placed.data_ptr() == memory.ctypes.data
    np.testing.assert_array_equal(numpy_view(placed), expected)
    assert adapter.leaf("p", memory, {}).dtype == leaf.dtype

    if layout != "expanded":
        strides = leaf.stride()
        filled = torch.zeros(leaf.untyped_storage().nbytes(), dtype=torch.uint8)
        filled = filled.view(leaf.dtype).as_strided(shape, strides)
        target = adapter.target("p", filled, in_place=True)
        (memory,) = target.buffers
        memory[...] = expected
        assert adapter.place(target, target.buffers) is filled
        np.testing.assert_array_equal(numpy_view(filled), expected)


def test_conjugate_and_negative_views_are_resolved_box_by_box(worker: ThreadPoolExecutor) -> None:
    base = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1).reshape(2, 3)
    for leaf in (base.conj(), base.conj().imag):
        source = adapter.source("p", leaf)
        assert source.view is None
        out = worker.submit(read, source, Box((0, 1), (2, 2))).result()
        np.testing.assert_array_equal(out, leaf.resolve_conj().resolve_neg().numpy()[:, 1:])
        filled = torch.zeros_like(base).conj()
        if leaf.is_complex():
            target = adapter.target("p", filled, in_place=True)
            assert target.buffers == ()
            assert adapter.place(target, [leaf.resolve_conj().numpy().copy()]) is filled
            assert torch.equal(filled, leaf)


def test_tensors_of_any_mode_are_read_and_filled_in_a_worker(worker: ThreadPoolExecutor) -> None:
    with torch.inference_mode():
        inference = torch.ones(3)
    parameter = torch.nn.Parameter(torch.ones(3))
    result = parameter * 2
    for leaf in (inference, parameter, result):
        source = adapter.source("p", leaf)
        assert source.view is not None
        expected = leaf.detach().numpy().copy()
        np.testing.assert_array_equal(
            worker.submit(read, source, Box((0,), (3,))).result(), expected
        )
    for leaf in (inference, parameter):
        target = adapter.target("p", leaf, in_place=True)
        (memory,) = target.buffers
        memory[:] = 5
        assert worker.submit(adapter.place, target, target.buffers).result() is leaf
        assert leaf.tolist() == [5, 5, 5]


def test_filling_a_tensor_is_seen_by_autograd() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    loss = (parameter * parameter).sum()
    target = adapter.target("p", parameter, in_place=True)
    (memory,) = target.buffers
    memory[:] = 2
    adapter.place(target, target.buffers)
    assert parameter.requires_grad
    assert parameter.is_leaf
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_like_gives_the_same_kind_of_tensor() -> None:
    for like in (
        torch.nn.Parameter(torch.zeros(3)),
        torch.nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False),
        torch.nn.Buffer(torch.zeros(3), persistent=False),
        torch.zeros(3, requires_grad=True),
        torch.zeros(3),
    ):
        target = adapter.target("p", like, in_place=False)
        placed = adapter.place(target, [np.ones(3, DTYPES[target.spec.dtype])])
        assert type(placed) is type(like)
        assert placed.requires_grad == like.requires_grad
        assert placed.tolist() == [1, 1, 1]
        assert getattr(placed, "persistent", None) == getattr(like, "persistent", None)


def test_meta_tensors_are_restored_on_cpu_and_nothing_else() -> None:
    with torch.device("meta"):
        module = torch.nn.Linear(3, 2)
    target = adapter.target("p", module.weight, in_place=False)
    placed = adapter.place(target, [np.ones((2, 3), np.float32)])
    assert isinstance(placed, torch.nn.Parameter)
    assert placed.device.type == "cpu"
    with pytest.raises(errors.UnsupportedLeafError, match=r"^a/b: .*to_empty"):
        adapter.target("a/b", module.weight, in_place=True)
    with pytest.raises(errors.UnsupportedLeafError, match=r"^a/b: .*no values to save"):
        adapter.source("a/b", module.weight)


def test_leaves_are_tied_only_when_they_are_one_box_of_one_storage() -> None:
    base = torch.zeros(4, 4)
    same = [base, base[:], base.detach(), torch.nn.Parameter(base), base.view(16).view(4, 4)]
    assert len({adapter.source("p", leaf).identity for leaf in same}) == 1
    other = [base, base[:2], base[2:], base.T, base.view(16), base.view(torch.int32), base.clone()]
    assert len({adapter.source("p", leaf).identity for leaf in other}) == len(other)
    assert adapter.source("p", torch.zeros(0, 3)).identity is None
    pair = torch.zeros(2, dtype=torch.complex64)
    assert adapter.source("p", pair).identity != adapter.source("p", pair.conj()).identity


def test_expanded_tensors_cannot_be_filled() -> None:
    with pytest.raises(errors.UnsupportedLeafError, match=r"^a/b: .*share memory.*clone"):
        adapter.target("a/b", torch.zeros(3).expand(2, 3), in_place=True)


@pytest.mark.filterwarnings("ignore:.*torch.quantize.*|.*quantized:UserWarning")
@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse .* support is in beta:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("make", "found", "advice"),
    [
        (lambda: torch.eye(3).to_sparse(), "torch.sparse_coo", "to_dense"),
        (lambda: torch.eye(3).to_sparse_csr(), "torch.sparse_csr", "to_dense"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            "quantized (torch.qint8)",
            "int_repr",
        ),
        (
            lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
            "is nested",
            "unbind",
        ),
        (lambda: torch.zeros(3, dtype=torch.complex32), "complex32", "cast it to complex64"),
        (
            lambda: torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
            "float4_e2m1fn_x2",
            "view(torch.uint8)",
        ),
        (lambda: torch.nn.LazyLinear(3).weight, "not initialised", "forward pass"),
    ],
)
def test_what_cannot_be_stored_is_named_with_a_way_out(make: Any, found: str, advice: str) -> None:
    leaf = make()
    for call in (
        lambda: adapter.source("a/b", leaf),
        lambda: adapter.target("a/b", leaf, in_place=False),
    ):
        with pytest.raises(errors.UnsupportedLeafError, match=r"^a/b: ") as e:
            call()
        assert found in str(e.value)
        assert advice in str(e.value)


def test_a_tensor_whose_storage_was_freed_is_named_and_can_be_a_like_leaf() -> None:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    for described in (
        lambda: adapter.source("a/w", tensor),
        lambda: adapter.target("a/w", tensor, in_place=True),
    ):
        with pytest.raises(errors.UnsupportedLeafError, match=r"a/w: .* was freed") as refused:
            described()
        assert refused.value.path == "a/w" and "state_dict()" in str(refused.value)
    target = adapter.target("a/w", tensor, in_place=False)
    assert torch.equal(adapter.place(target, [values("float32", (3,))]), torch.arange(3.0))


def test_wrapper_tensors_are_refused_and_plain_subclasses_are_not() -> None:
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("never called")

    class Plain(torch.Tensor):
        pass

    wrapper = torch.Tensor._make_subclass(Wrapper, torch.zeros(2))
    with pytest.raises(errors.UnsupportedLeafError, match=r"a/b: this tensor is a .*Wrapper"):
        adapter.source("a/b", wrapper)
    assert adapter.source("a/b", torch.ones(2).as_subclass(Plain)).spec.shape == (2,)


class Raising(torch.Tensor):
    """A subclass that lets nothing be asked of it."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("not supported")


class RaisingWrapper(Raising):
    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("never called")


@pytest.mark.parametrize("kind", [Raising, RaisingWrapper])
def test_a_tensor_that_raises_when_it_is_looked_at_is_named(
    tmp_path: Path, kind: type[torch.Tensor]
) -> None:
    leaf = torch.zeros(2).as_subclass(kind)
    blocking.save(tmp_path / "x", {"a": {"b": torch.zeros(2)}})
    for call in (
        lambda: blocking.save(tmp_path / "y", {"a": {"b": leaf}}),
        lambda: blocking.restore(tmp_path / "x", like={"a": {"b": leaf}}),
        lambda: blocking.restore_into(tmp_path / "x", {"a": {"b": leaf}}),
    ):
        with pytest.raises(errors.UnsupportedLeafError, match=rf"^a/b: this .*\.{kind.__name__} "):
            call()


def test_a_tensor_inside_a_function_transform_is_named(tmp_path: Path) -> None:
    blocking.save(tmp_path / "x", {"a": torch.zeros(3)})

    def total(x: torch.Tensor) -> torch.Tensor:
        for call in (
            lambda: blocking.save(tmp_path / "y", {"a": x}),
            lambda: blocking.restore_into(tmp_path / "x", {"a": x}),
        ):
            with pytest.raises(errors.UnsupportedLeafError, match=r"^a: .*outside of function tra"):
                call()
        return x.sum()

    torch.func.grad(total)(torch.ones(3))
    torch.func.vmap(total)(torch.ones(2, 3))


def test_the_result_of_a_collective_is_saved_and_filled(tmp_path: Path) -> None:
    functional = pytest.importorskip("torch.distributed._functional_collectives")
    made, into = torch.arange(4.0), torch.zeros(4)
    blocking.save(tmp_path / "x", {"a": functional.AsyncCollectiveTensor(made)})
    blocking.restore_into(tmp_path / "x", {"a": functional.AsyncCollectiveTensor(into)})
    assert torch.equal(into, made)


@pytest.mark.parametrize("name", MISSING)
def test_dtypes_that_torch_lacks_are_named(name: str) -> None:
    with pytest.raises(errors.DtypeMismatchError, match=f'^a/b: .*{name}.*leaves="numpy"'):
        adapter.leaf("a/b", values(name, (3,)), {})


def test_a_state_dict_keeps_its_versions() -> None:
    norm = torch.nn.BatchNorm1d(2)
    flat = flatten({"norm": norm})
    state = unflatten_like(flat, [leaf + 1 for leaf in flat.leaves])["norm"]
    assert state._metadata == norm.state_dict()._metadata
    norm.load_state_dict(state)
    assert norm.weight.tolist() == [2, 2]


def test_staging_memory_is_page_locked_once_cuda_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = StagingMemory()
    plain = memory.allocate(1 << 20)
    assert runtime.locked == {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    buffer = memory.allocate(1 << 20)
    assert buffer.nbytes == 1 << 20
    assert buffer.ctypes.data % mmap.PAGESIZE == 0
    assert runtime.locked == {buffer.ctypes.data: 1 << 20}
    view = memoryview(buffer[:1])
    del plain, buffer
    assert len(runtime.locked) == 1
    del view
    assert runtime.locked == {}
    runtime.code = 2
    with pytest.raises(errors.StagingError, match=r"page-locking 4096 bytes .* error 2"):
        memory.allocate(4096)


def test_staging_memory_is_unlocked_before_it_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    mapped: list[bool] = []
    unlock = runtime.cudaHostUnregister

    def unregister(pointer: int) -> int:
        maps = Path("/proc/self/maps").read_text().splitlines()
        spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
        mapped.append(any(start <= pointer < stop for start, stop in spans))
        return unlock(pointer)

    monkeypatch.setattr(runtime, "cudaHostUnregister", unregister)
    buffer = StagingMemory().allocate(8 << 20)
    del buffer
    assert mapped == [True]


async def test_staging_memory_of_a_cancelled_allocation_is_unlocked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    lock, locked, go_on = runtime.cudaHostRegister, threading.Event(), threading.Event()

    def register(*arguments: int) -> int:
        code = lock(*arguments)
        locked.set()
        assert go_on.wait(30)
        return code

    monkeypatch.setattr(runtime, "cudaHostRegister", register)
    workers = Workers(1, "test-staging")
    pool = SlotPool(ByteBudget(64 << 20), workers, StagingMemory())
    taking = asyncio.create_task(pool.take(1))
    assert await asyncio.to_thread(locked.wait, 30)
    taking.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await taking
    pool.close()
    workers.shutdown()
    del taking
    await asyncio.sleep(0)  # the loop's handle holds the task, whose traceback holds the result
    gc.collect()
    assert runtime.locked == {}


def test_a_forked_child_that_drops_staging_memory_leaves_cuda_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    buffer = StagingMemory().allocate(1 << 20)
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    del buffer
    assert len(runtime.locked) == 1


def test_cuda_tensors_are_read_after_the_work_queued_by_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leaf = torch.tensor([1j, 2j]).conj()
    adapter = TorchAdapter()
    with Cuda(monkeypatch) as cuda:
        source = adapter.source("p", leaf)
        adapter.fetch(source, 0, Box((0,), (2,)), out := np.zeros(2, np.complex64))
    assert source.begin_runs is None
    assert out.tolist() == [-1j, -2j]
    assert cuda.calls == [
        "own stream waits for event on caller's stream",
        "clone on own stream",  # resolves the conjugation
        "copy_ on own stream",
        "wait for own stream",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_runs_of_contiguous_cuda_tensors_are_copied_with_one_wait(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = [tensor(name, (3, 4)), tensor(name, ())]
    adapter = TorchAdapter()
    with Cuda(monkeypatch) as cuda:
        sources = [adapter.source("p", leaf) for leaf in leaves]
        assert [source.view for source in sources] == [None, None]
        assert adapter.source("p", leaves[0].T).begin_runs is None
        nbytes = leaves[0].nbytes
        parts = [np.zeros(nbytes // 4, np.uint8), np.zeros(nbytes // 2 + 1, np.uint8)]
        whole = np.zeros(leaves[1].nbytes, np.uint8)
        runs = [
            Run(sources[0], 0, 0, parts[0]),
            Run(sources[0], 0, nbytes // 4, parts[1]),
            Run(sources[1], 0, 0, whole),
        ]
        (begin_runs,) = {source.begin_runs for source in sources}
        assert begin_runs is not None
        begin_runs(runs)()
    copied = np.concatenate(parts)
    assert bytes(copied) == values(name, (3, 4)).tobytes()[: copied.size]
    assert bytes(whole) == values(name, ()).tobytes()
    assert cuda.calls == [
        "own stream waits for event on caller's stream",
        *["copy_ on own stream"] * 3,
        "wait for own stream",
    ]


def test_a_failed_copy_from_a_cuda_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies queued before it may still write to memory that the pool would hand out again."""
    adapter = TorchAdapter()
    with Cuda(monkeypatch) as cuda:
        source = adapter.source("p", torch.zeros(8))
        good = Run(source, 0, 0, np.zeros(8, np.uint8))
        with pytest.raises(RuntimeError, match="size"):
            adapter.begin_runs([good, Run(source, 0, 24, np.zeros(16, np.uint8))])
    assert cuda.calls[-2:] == ["copy_ on own stream", "wait for own stream"]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_state_on_a_cuda_device_is_saved_from_its_memory_and_restored_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: Any
) -> None:
    rng = np.random.default_rng(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))

    state = {
        "long": noise(3, 1_500_001),  # spans windows, and is cut inside elements
        "odd": (noise(777, 333) > 0),
        "turned": noise(300, 200).T,
        "every other": noise(600, 100)[::2],
        "cast": noise(500, 400),
        "padded": noise(5, 700),
        "small": noise(3, 5),
        "scalar": noise().abs(),
        "empty": noise(0, 3),
        "host": rng.standard_normal(50_000),
        "step": 7,
    }
    state["tied"] = state["long"]

    def leaf_options(path: str, _: ArraySpec) -> LeafOptions | None:
        if path == "cast":
            return LeafOptions(dtype="bfloat16")
        return LeafOptions(chunk_shape=(2, 300)) if path == "padded" else None

    options = SaveOptions(compression=compression, leaf_options=leaf_options)
    fetched: list[int] = []
    begin_runs = TorchAdapter.begin_runs

    def counted(adapter: TorchAdapter, runs: Any) -> Any:
        fetched.append(sum(run.out.size for run in runs))
        return begin_runs(adapter, runs)

    monkeypatch.setattr(TorchAdapter, "begin_runs", counted)
    with monkeypatch.context() as patch:
        Cuda(patch)
        blocking.save(tmp_path / "saved", state, options=options)
        with blocking.Checkpointer(tmp_path / "run", save_options=options) as checkpointer:
            checkpointer.start_save(1, state).result()
            kept = {key: state[key] for key in ("long", "odd", "turned", "small", "empty")}
            filled = {key: torch.zeros_like(leaf) for key, leaf in kept.items()}
            checkpointer.restore_into(filled, include=list(kept))
            like = checkpointer.restore(like=filled, include=list(kept))
    for key, leaf in kept.items():
        assert torch.equal(filled[key], leaf) and torch.equal(like[key], leaf), key
    assert sum(fetched) > 2 * state["long"].nbytes  # nearly all, twice
    for path in (tmp_path / "saved", tmp_path / "run" / "1"):
        restored = blocking.restore(path, leaves="torch")
        for key, leaf in state.items():
            wanted = torch.as_tensor(leaf)
            wanted = wanted.bfloat16() if key == "cast" else wanted
            assert torch.equal(torch.as_tensor(restored[key]), wanted), key
    assert blocking.verify(tmp_path / "saved").ok


def test_cuda_tensors_are_filled_after_the_work_queued_by_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leaf = torch.zeros(2)
    adapter = TorchAdapter()
    with Cuda(monkeypatch) as cuda:
        target = adapter.target("p", leaf, in_place=True)
        assert adapter.place(target, [np.ones(2, np.float32)]) is leaf
    assert leaf.tolist() == [1, 1]
    assert cuda.calls == [
        "own stream waits for event on caller's stream",
        "copy_ on own stream",
        "wait for own stream",
    ]


@pytest.mark.parametrize("snapshot", ["copy", "reference"])
def test_a_state_on_a_cuda_device_may_be_changed_once_start_save_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Any
) -> None:
    state = {"w": torch.arange(3_000_000.0), "b": torch.arange(500.0)}
    wanted = {name: leaf.clone() for name, leaf in state.items()}
    with monkeypatch.context() as patch:
        Cuda(patch)
        options = SaveOptions(snapshot=snapshot)
        with blocking.Checkpointer(tmp_path, save_options=options) as checkpointer:
            write = Script(checkpointer).hold("write")
            pending = checkpointer.start_save(1, state)
            for leaf in state.values():
                leaf.zero_()
            write.go()
            pending.result()
    restored = blocking.restore(tmp_path / "1", leaves="torch")
    for name, leaf in wanted.items():
        assert torch.equal(restored[name], leaf), name


def memory(*sizes: int) -> list[np.ndarray[Any, Any]]:
    """Arrays of a restore, one behind the other."""
    arena = Arena(sum(sizes))
    return [arena.take(size) for size in sizes]


@pytest.mark.parametrize("in_place", [True, False])
def test_values_are_copied_to_a_cuda_device_at_once_from_page_locked_memory(
    in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (100_000, 1 << 16, 3, 200_000)
    leaves = [torch.zeros(size, dtype=torch.uint8, requires_grad=False) for size in sizes]
    leaves.append(torch.zeros(8, 2, dtype=torch.uint8).T)
    arrays = [*memory(*sizes), np.zeros((2, 8), np.uint8)]
    for number, array in enumerate(arrays):
        array[...] = number + 1
    adapter = TorchAdapter()
    with Cuda(monkeypatch) as cuda:
        targets = [adapter.target("p", leaf, in_place=in_place) for leaf in leaves]
        assert {target.place_all for target in targets} == {adapter.place_all}
        made = adapter.place_all(targets, arrays)
    for leaf, tensor, array in zip(leaves, made, arrays, strict=True):
        assert (leaf is tensor) == in_place
        assert np.array_equal(tensor.numpy(), array)
        assert np.shares_memory(tensor.numpy(), array) is False
    assert cuda.calls == [
        "own stream waits for event on caller's stream",
        *["copy_ on own stream"] * 5,
        "wait for own stream",
    ]
    # Pages of neighbours in one call, and whole pages.
    first, page = arrays[0].ctypes.data, mmap.PAGESIZE
    nbytes = sum(-(-size // page) * page for size in sizes if size > 3)
    assert cuda.locked == [{first: nbytes}] * 5
    assert cuda.runtime.locked == {}


@pytest.mark.parametrize("filled", [(0, 1), (1, 0), (0,), (1,)])
def test_each_copy_waits_for_the_work_before_its_tensor(
    filled: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's for tensors that are filled, that of the worker's stream for new ones."""
    adapter = TorchAdapter()
    leaves = [torch.zeros(2) for _ in filled]
    arrays = [np.full(2, 1 + number, np.float32) for number in range(len(filled))]
    with Cuda(monkeypatch) as cuda:
        targets = [
            adapter.target("p", leaf, in_place=bool(fill))
            for leaf, fill in zip(leaves, filled, strict=True)
        ]
        cuda.current = "worker's stream"
        made = adapter.place_all(targets, arrays)
    for leaf, tensor, array, fill in zip(leaves, made, arrays, filled, strict=True):
        assert (tensor is leaf) == fill and tensor.tolist() == array.tolist()
    expected: list[str] = []
    for fill in filled:
        stream = "caller's stream" if fill else "worker's stream"
        expected += [f"own stream waits for event on {stream}", "copy_ on own stream"]
        expected.append("wait for own stream")
    assert cuda.calls == expected


def test_values_are_copied_if_their_memory_cannot_be_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leaf, adapter = torch.zeros(1 << 17, dtype=torch.uint8), TorchAdapter()
    (array,) = memory(1 << 17)
    array.fill(3)
    with Cuda(monkeypatch) as cuda:
        cuda.runtime.code = 2
        adapter.place_all([adapter.target("p", leaf, in_place=True)], [array])
    assert (leaf == 3).all()


def test_memory_is_unlocked_after_a_failed_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    leaf, adapter = torch.zeros(5, dtype=torch.uint8), TorchAdapter()
    with Cuda(monkeypatch) as cuda:
        target = adapter.target("p", leaf, in_place=True)
        with pytest.raises(RuntimeError, match="size"):
            adapter.place_all([target], memory(1 << 17))
    assert cuda.locked and cuda.locked[0] and cuda.runtime.locked == {}
    assert cuda.calls[-1] == "wait for own stream"


def test_tensors_of_any_mode_on_a_cuda_device_are_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: ThreadPoolExecutor
) -> None:
    with torch.inference_mode():
        inference = torch.ones(3)
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    state = {"inference": inference, "parameter": parameter, "conjugate": torch.ones(3) * 1j}
    state["conjugate"] = state["conjugate"].conj()
    loss = (parameter * parameter).sum()
    saved = {name: torch.full_like(leaf, 5) for name, leaf in state.items()}
    blocking.save(tmp_path / "c", saved)
    with monkeypatch.context() as patch:
        Cuda(patch)
        blocking.restore_into(tmp_path / "c", state)
        restored = blocking.restore(tmp_path / "c", like=state)
    for leaves in (state, restored):
        for name, leaf in leaves.items():
            assert torch.equal(leaf.detach().resolve_conj(), saved[name].resolve_conj()), name
    assert isinstance(restored["parameter"], torch.nn.Parameter)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_kernel_queued_before_a_cuda_tensor_is_filled_does_not_overwrite_it(
    worker: ThreadPoolExecutor,
) -> None:
    adapter = TorchAdapter()
    leaf = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1 << 28)
        leaf.add_(7)
        target = adapter.target("p", leaf, in_place=True)
    worker.submit(adapter.place, target, [np.ones(1 << 20, np.float32)]).result()
    stream.synchronize()
    assert (leaf == 1).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_cuda_tensors_are_fetched_and_filled(name: str, worker: ThreadPoolExecutor) -> None:
    expected = values(name, (30, 40))
    adapter = TorchAdapter()
    leaf = tensor(name, (30, 40)).cuda()
    source = adapter.source("p", leaf)
    run = Run(source, 0, 160, np.zeros(320, np.uint8))
    worker.submit(lambda: adapter.begin_runs([run])()).result()
    assert bytes(run.out) == expected.tobytes()[160:480]
    for box in (Box.whole((30, 40)), Box((3, 4), (5, 6))):
        out = worker.submit(read, source, box).result()
        np.testing.assert_array_equal(out, expected[box.slices()])
    filled = torch.zeros_like(leaf)
    target = adapter.target("p", filled, in_place=True)
    assert worker.submit(adapter.place, target, [expected.copy()]).result() is filled
    np.testing.assert_array_equal(numpy_view(filled.cpu()), expected)
    memory = StagingMemory()
    buffer = memory.allocate(1 << 20)
    assert torch.from_numpy(buffer).is_pinned()
