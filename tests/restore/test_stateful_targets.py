"""Objects with a state dict as targets of `restore_into`: what they lack, refuse and are given."""

from __future__ import annotations

import functools
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import asyncckpt
from asyncckpt.errors import (
    RestoreError,
    RestoreWarning,
    ShapeMismatchError,
    TreeMismatchError,
    UnsupportedLeafError,
    UsageError,
)
from tests.restore.loader import Loader
from tests.script import Script

pytestmark = pytest.mark.usefixtures("no_blocking")


class Net(torch.nn.Module):
    """A body, and a head if it is asked for; all weights are `fill`."""

    def __init__(self, fill: float, *, head: bool = True) -> None:
        super().__init__()
        self.body = torch.nn.Linear(3, 3)
        if head:
            self.head = torch.nn.Linear(3, 2)
        with torch.no_grad():
            for weights in self.parameters():
                weights.fill_(fill)

    def fills(self) -> set[float]:
        return {value for weights in self.parameters() for value in weights.unique().tolist()}


async def saved(tmp_path: Path, tree: Any) -> Path:
    await asyncckpt.save(tmp_path / "x", tree)
    return tmp_path / "x"


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.5)


# ------------------------------------------------------------------- what the checkpoint lacks


@pytest.mark.parametrize(
    "other",
    [lambda: adamw(Net(0)), lambda: torch.optim.SGD(Net(0).parameters(), lr=1.0), Loader],
    ids=["adamw", "sgd", "without leaves"],
)
async def test_an_object_that_the_checkpoint_lacks_is_an_error_before_anything_is_read(
    tmp_path: Path, other: Any
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, {"model": Net(1)})
        script = Script(ckpt)
        net = Net(7)
        with pytest.raises(
            TreeMismatchError, match="opt: the target has an object with a state dict here, the c"
        ) as caught:
            await ckpt.restore_into({"model": net, "opt": other()})
        assert (caught.value.path, caught.value.stage) == ("opt", "plan")
        assert (caught.value.expected, caught.value.found) == ("a state dict", "nothing")
        assert "nothing was read" in str(caught.value) and "strict=False" in str(caught.value)
        assert net.fills() == {7} and script.count("read_into") == 0


async def test_not_strict_lists_an_object_that_the_checkpoint_lacks(tmp_path: Path) -> None:
    place = await saved(tmp_path, {"model": Net(1, head=False), "n": np.ones(2)})
    net, loader = Net(7, head=False), Loader(position=3)
    target = {"model": net, "loader": loader, "extra": np.zeros(1), "n": np.zeros(2)}
    report = await asyncckpt.restore_into(place, target, strict=False)
    assert (report.missing, report.unexpected) == (("extra", "loader"), ())
    assert net.fills() == {1} and (loader.state, loader.loads) == ({"position": 3}, 0)
    renamed = Net(7, head=False)
    target = {"net": renamed, "n": np.zeros(2)}
    with pytest.warns(RestoreWarning, match="only 1 of the 3 leaves that the target wants"):
        report = await asyncckpt.restore_into(place, target, strict=False)
    assert report.missing == ("net",)
    assert report.unexpected == ("model/body.weight", "model/body.bias")
    assert renamed.fills() == {7}


async def test_include_leaves_out_objects_that_the_checkpoint_lacks(tmp_path: Path) -> None:
    place = await saved(tmp_path, {"model": Net(1)})
    net, loader = Net(7), Loader()
    await asyncckpt.restore_into(place, {"model": net, "loader": loader}, include="model")
    assert net.fills() == {1} and loader.loads == 0


async def test_an_object_without_leaves_is_not_missing_where_the_format_drops_it(
    tmp_path: Path,
) -> None:
    tensors = {"w": torch.ones(3)}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    target = {"w": torch.zeros(3), "loss": torch.nn.MSELoss()}
    with pytest.warns(RestoreWarning, match="no checksum"):
        await asyncckpt.restore_into(tmp_path / "x.safetensors", target)
    assert target["w"].tolist() == [1, 1, 1]
    with pytest.raises(TreeMismatchError, match="model: the target has an object"):
        await asyncckpt.restore_into(tmp_path / "x.safetensors", {**target, "model": Net(0)})


# ------------------------------------------------------------------------ what they are given


class Scaled(torch.nn.Module):
    """Kept twice the weight in its version 1, and says so to `load_state_dict`."""

    _version = 2

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((3,), fill))

    def _load_from_state_dict(self, state: Any, prefix: str, local: Any, *rest: Any) -> None:
        if (local.get("version") or 1) < 2:
            state[f"{prefix}w"] = state[f"{prefix}w"] * 0.5
        super()._load_from_state_dict(state, prefix, local, *rest)


async def test_a_modules_state_counts_as_of_its_present_version(tmp_path: Path) -> None:
    place = await saved(tmp_path, {"m": torch.nn.Sequential(Scaled(1.0), Scaled(2.0))})
    fresh = torch.nn.Sequential(Scaled(5.0), Scaled(5.0))
    await asyncckpt.restore_into(place, {"m": fresh})
    assert [weights.tolist() for weights in fresh.parameters()] == [[1, 1, 1], [2, 2, 2]]


async def test_a_modules_state_from_safetensors_counts_as_of_no_version_as_it_does_there(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(Scaled(1.0).state_dict(), path)
    fresh, theirs = Scaled(5.0), Scaled(5.0)
    with pytest.warns(RestoreWarning, match="no checksum"):
        await asyncckpt.restore_into(path, fresh)
    safetensors.torch.load_model(theirs, path)
    assert fresh.w.tolist() == theirs.w.tolist() == [0.5, 0.5, 0.5]


def schedule() -> tuple[Any, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    rates = torch.optim.lr_scheduler
    warm, then = rates.LinearLR(optimizer, total_iters=3), rates.MultiStepLR(optimizer, [4, 8])
    return optimizer, rates.SequentialLR(optimizer, [warm, then], [3])


def next_rates(optimizer: Any, scheduler: Any, count: int) -> list[float]:
    rates = []
    for _ in range(count):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


async def test_a_scheduler_that_counts_goes_on_where_the_saved_one_was(tmp_path: Path) -> None:
    optimizer, scheduler = schedule()
    next_rates(optimizer, scheduler, 1)
    place = await saved(tmp_path, {"opt": optimizer, "rate": scheduler})
    fresh_optimizer, fresh = schedule()
    await asyncckpt.restore_into(place, {"opt": fresh_optimizer, "rate": fresh})
    assert type(fresh._schedulers[1].milestones) is Counter
    assert next_rates(fresh_optimizer, fresh, 12) == next_rates(optimizer, scheduler, 12)


class Counted(Loader):
    """Adds what it is given to what it has, if both are of the same samples."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not np.array_equal(state["ids"], self.state["ids"]):
            raise ValueError("other samples")
        self.state = {**self.state, "n": self.state["n"] + state["n"]}


@pytest.mark.parametrize("made", [np.array, torch.tensor])
async def test_an_object_sees_its_present_state_when_it_is_given_the_restored_one(
    tmp_path: Path, made: Any
) -> None:
    place = await saved(tmp_path, {"l": Counted(ids=made([1, 2]), n=made([5.0, 6.0]))})
    same, other = made([1.0, 1.0]), made([1, 4])
    loader = Counted(ids=made([1, 2]), n=same)
    await asyncckpt.restore_into(place, {"l": loader})
    assert loader.state["n"].tolist() == [6, 7] and same.tolist() == [1, 1]
    with pytest.raises(RestoreError, match="other samples"):
        await asyncckpt.restore_into(place, {"l": Counted(ids=other, n=same)})
    assert other.tolist() == [1, 4]


async def test_an_object_may_replace_arrays_that_could_not_be_filled(tmp_path: Path) -> None:
    values, memory, constant = torch.arange(4.0), torch.zeros(6), np.zeros(4, np.float32)
    constant.flags.writeable = False
    names = ("low", "high", "expanded", "meta", "constant")
    place = await saved(tmp_path, {"l": Loader(**dict.fromkeys(names, values + 1), twin=values)})
    loader = Loader(
        low=memory[:4],
        high=memory[2:],
        expanded=torch.zeros(1).expand(4),
        meta=torch.zeros(4, device="meta"),
        constant=constant,
        twin=torch.zeros(4),
    )
    await asyncckpt.restore_into(place, {"l": loader})
    assert all(loader.state[name].tolist() == [1, 2, 3, 4] for name in names)
    assert loader.state["twin"].tolist() == [0, 1, 2, 3] and not memory.any()
    # As on saving, what is one tensor comes back as one.
    assert loader.state["low"] is loader.state["expanded"]
    assert type(loader.state["constant"]) is np.ndarray


async def test_a_hook_of_a_module_sees_the_present_weights(tmp_path: Path) -> None:
    place = await saved(tmp_path, Net(4.0))
    net = Net(2.0)

    def average(state: Any, prefix: str, *rest: Any) -> None:
        for name, weights in net.named_parameters():
            state[prefix + name] = (state[prefix + name] + weights.detach()) / 2

    net._register_load_state_dict_pre_hook(average)
    await asyncckpt.restore_into(place, net)
    assert net.fills() == {3}


class Growing(torch.nn.Module):
    """A buffer and an extra state that have as many elements as they need."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.full((size,), 2.0))
        self.extra = torch.full((size,), 3, dtype=torch.uint8)

    def get_extra_state(self) -> torch.Tensor:
        return self.extra

    def set_extra_state(self, state: torch.Tensor) -> None:
        assert state.data_ptr() != self.extra.data_ptr()
        self.extra = state

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.seen = torch.empty_like(state[f"{prefix}seen"])
        super()._load_from_state_dict(state, prefix, *rest)


class Extra(torch.nn.Linear):
    """A plain module with an extra state that has as many bytes as it needs."""

    def __init__(self, size: int) -> None:
        super().__init__(2, 2)
        self.extra = torch.full((size,), 3, dtype=torch.uint8)

    get_extra_state = Growing.get_extra_state
    set_extra_state = Growing.set_extra_state


async def test_modules_take_buffers_and_extra_state_that_have_grown(tmp_path: Path) -> None:
    place = await saved(tmp_path, {"m": torch.nn.Sequential(Growing(7), Extra(9))})
    for size in (5, 7, 9):
        growing, extra = Growing(size), Extra(size)
        await asyncckpt.restore_into(place, {"m": torch.nn.Sequential(growing, extra)})
        assert growing.seen.tolist() == [2] * 7 and growing.extra.tolist() == [3] * 7
        assert extra.extra.tolist() == [3] * 9


class History(torch.optim.SGD):
    """Keeps every sum of a gradient."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["sums"] = torch.cat([state.get("sums", torch.zeros(0)), torch.ones(1)])


async def test_an_optimizer_takes_state_that_has_grown(tmp_path: Path) -> None:
    weights = [torch.nn.Parameter(torch.zeros(3))]
    optimizer, used = History(weights), History(weights)
    for steps, one in ((3, optimizer), (1, used)):
        for _ in range(steps):
            one.step()
    place = await saved(tmp_path, {"opt": optimizer})
    await asyncckpt.restore_into(place, {"opt": used})
    assert used.state[weights[0]]["sums"].tolist() == [1, 1, 1]


# ------------------------------------------------------------------------------ strict=False


async def test_not_strict_is_passed_on_to_modules_and_their_answer_is_reported(
    tmp_path: Path,
) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    await asyncckpt.save(small, {"model": Net(1, head=False), "n": 1})
    await asyncckpt.save(large, {"model": Net(1)})
    net = Net(7)
    report = await asyncckpt.restore_into(small, {"model": net}, strict=False)
    assert report.missing == ("model/head.weight", "model/head.bias")
    assert report.unexpected == ("n",)
    assert net.fills() == {1, 7} and net.body.weight.unique().tolist() == [1]
    net = Net(7, head=False)
    report = await asyncckpt.restore_into(large, {"model": net}, strict=False)
    assert (report.missing, report.unexpected) == ((), ("model/head.weight", "model/head.bias"))
    assert net.fills() == {1}
    with pytest.raises(TreeMismatchError, match=r"model/head\.weight: the target has this key"):
        await asyncckpt.restore_into(small, {"model": Net(7), "n": 1})


class Asked(Loader):
    """As modules have it: says what it was asked, and answers with keys."""

    def load_state_dict(self, state: Any, strict: bool = True) -> Any:  # type: ignore[override]
        self.asked = strict
        return torch.nn.modules.module._IncompatibleKeys(["a/b"], ["", "c"])


class Anything(Loader):
    """Takes whatever it is given, and would be surprised by `strict`."""

    def load_state_dict(self, state: Any, **rest: Any) -> Any:
        self.asked = rest
        return {"missing_keys": 1}


async def test_strict_is_passed_only_where_it_is_taken_and_meant(tmp_path: Path) -> None:
    place = await saved(tmp_path, {"l": Loader(a=1), "m": Loader(a=1), "n": Loader(a=1)})
    target = {"l": Asked(a=2), "m": Anything(a=2), "n": Loader(a=2)}
    report = await asyncckpt.restore_into(place, target, strict=False)
    assert (target["l"].asked, target["m"].asked, target["n"].loads) == (False, {}, 1)  # type: ignore[attr-defined]
    assert (report.missing, report.unexpected) == (("l/a%2Fb",), ("l/%", "l/c"))
    report = await asyncckpt.restore_into(place, target)
    assert target["l"].asked is True  # type: ignore[attr-defined]
    assert report.missing == report.unexpected == ()
    await asyncckpt.save(tmp_path / "root", Loader(a=1))
    report = await asyncckpt.restore_into(tmp_path / "root", Asked(a=2), strict=False)
    assert report.missing == ("a%2Fb",)


async def test_the_duration_of_a_restore_includes_the_calls_of_objects(tmp_path: Path) -> None:
    times: list[float] = []

    class Timed(Loader):
        def state_dict(self) -> dict[str, Any]:
            times.append(time.perf_counter())
            return super().state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            times.append(time.perf_counter())

    place = await saved(tmp_path, {"o": Loader(x=1)})
    report = await asyncckpt.restore_into(place, {"o": Timed(x=0)})
    assert report.total_s > times[-1] - times[0]


# ----------------------------------------------------------------------------------- include=


async def test_a_part_of_an_object_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, {"x": {"model": Net(1)}, "w": np.ones(2)})
        script = Script(ckpt)
        net, w = Net(7), np.zeros(2)
        for strict in (True, False):
            with pytest.raises(
                UsageError,
                match=r"x/model: include='x/\*/body\.\*' selects 2 of the 4 leaves that .*/1 holds",
            ) as caught:
                await ckpt.restore_into(
                    {"x": {"model": net}, "w": w}, include=["w", "x/*/body.*"], strict=strict
                )
            assert caught.value.path == "x/model" and caught.value.written == ()
            assert caught.value.found == ["x/*/body.*"]
        assert net.fills() == {7} and not w.any() and script.count("read_into") == 0
        # As the message says: its state dict in its place is a plain dict of arrays.
        await ckpt.restore_into({"x": {"model": net.state_dict()}}, include="x/model/body.*")
        assert net.body.weight.unique().tolist() == [1]
        assert net.head.weight.unique().tolist() == [7]
        # Several patterns that select all of it together are fine.
        await ckpt.restore_into(
            {"x": {"model": net}, "w": w}, include=["x/*/body.*", "x/model/head.*"]
        )
        assert net.fills() == {1} and not w.any()


async def test_a_part_of_the_tree_itself_is_refused(tmp_path: Path) -> None:
    place = await saved(tmp_path, Net(1))
    with pytest.raises(UsageError, match=r"the tree itself: include='body\.\*' selects 2 of the 4"):
        await asyncckpt.restore_into(place, Net(7), include="body.*")


async def test_what_include_leaves_out_is_not_called(tmp_path: Path) -> None:
    place = await saved(tmp_path, {"a": Loader(x=1), "b": Loader(x=1), "c": Loader()})
    target = {"a": Loader(x=2), "b": Loader(x=2), "c": Loader()}
    await asyncckpt.restore_into(place, target, include="a")
    assert [loader.loads for loader in target.values()] == [1, 0, 0]
    # An object without leaves is included by its own path.
    await asyncckpt.restore_into(place, target, include="*")
    assert [loader.loads for loader in target.values()] == [2, 1, 1]


# ------------------------------------------------------------------------- what they refuse


@pytest.mark.parametrize("atomic", [False, True])
async def test_an_object_that_refuses_its_state_leaves_written_what_is_listed(
    tmp_path: Path, atomic: bool
) -> None:
    place = await saved(
        tmp_path,
        {"a": Loader(w=np.ones(2)), "b": Loader(n=1), "c": Loader(w=np.ones(2), n=1), "w": [1.5]},
    )
    first, refusing, last = Loader(w=np.zeros(2)), Loader(n=0), Loader(w=np.zeros(2), n=0)
    refusing.refuse = True
    w = np.zeros(())
    arrays = first.state["w"], last.state["w"]
    with pytest.raises(RestoreError, match=r"b: Loader\.load_state_dict refused") as caught:
        await asyncckpt.restore_into(
            place,
            {"a": first, "b": refusing, "c": last, "w": [w]},
            options=asyncckpt.RestoreOptions(atomic=atomic),
        )
    # Arrays in place, and the objects up to the one that refused; the last has its state still.
    assert set(caught.value.written) == {"w/0", "a", "b"}
    assert all(array.tolist() == [0, 0] for array in arrays) and w == 1.5
    assert (first.loads, last.loads, last.state["n"]) == (1, 0, 0)
    assert "3 targets have been written" in caught.value.__notes__[-1]


# ------------------------------------------------------------- what is known before the read


async def test_a_module_whose_keys_differ_is_an_error_before_anything_is_read(
    tmp_path: Path,
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, {"first": Loader(n=1), "model": Net(1), "w": np.ones(2)})
        script = Script(ckpt)
        first, w = Loader(n=0), np.zeros(2)
        renamed = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
        with pytest.raises(TreeMismatchError) as caught:
            await ckpt.restore_into({"first": first, "model": renamed, "w": w})
        assert "model/0.weight: the target has this key in the state" in str(caught.value)
        assert "model/head.bias: the checkpoint has this key in the state" in str(caught.value)
        assert "nothing was read" in str(caught.value) and "strict=False" in str(caught.value)
        assert script.count("read_into") == 0 and first.loads == 0 and not w.any()


async def test_a_module_saved_without_any_key_is_an_error_before_anything_is_read(
    tmp_path: Path,
) -> None:
    place = await saved(tmp_path, {"model": torch.nn.Identity(), "w": np.ones(2)})
    model, w = Net(7), np.zeros(2)
    with pytest.raises(TreeMismatchError, match=r"model/body\.weight: the target has this key"):
        await asyncckpt.restore_into(place, {"model": model, "w": w})
    assert not w.any()
    await asyncckpt.restore_into(place, {"model": model, "w": w}, include="w")
    assert w.all() and model.fills() == {7}


async def test_a_module_saved_without_any_key_is_selected_by_its_wanted_keys(
    tmp_path: Path,
) -> None:
    place = await saved(tmp_path, {"a": Net(1), "b": torch.nn.Identity()})
    target = {"a": Net(7), "b": Net(7)}
    with pytest.raises(TreeMismatchError, match=r"b/body\.weight: the target has this key"):
        await asyncckpt.restore_into(place, target, include="*/*")
    assert target["a"].fills() == {7}


class Wrapper(torch.nn.Module):
    """Has the names of a compiled module, or of one in DistributedDataParallel."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        super().__init__()
        setattr(self, name, module)


@pytest.mark.parametrize("name", ["_orig_mod", "module"])
async def test_keys_that_differ_by_a_wrapper_say_so(tmp_path: Path, name: str) -> None:
    wrapped = functools.partial(Wrapper, name)
    inside, outside = await saved(tmp_path / "in", Net(1)), tmp_path / "out"
    await asyncckpt.save(outside, wrapped(Net(1)))
    for place, target in ((inside, wrapped(Net(7))), (outside, Net(7))):
        with pytest.raises(TreeMismatchError, match=r"only by the name of a wrapper, _orig_mod of"):
            await asyncckpt.restore_into(place, target)
    with pytest.raises(TreeMismatchError, match="Pass strict=False"):
        await asyncckpt.restore_into(outside, wrapped(Net(7, head=False)))


@pytest.mark.parametrize("strict", [True, False])
async def test_an_optimizer_of_other_parameters_is_an_error_before_anything_is_read(
    tmp_path: Path, strict: bool
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, {"w": np.ones(2), "opt": adamw(Net(1, head=False))})
        script = Script(ckpt)
        w = np.zeros(2)
        with pytest.raises(
            TreeMismatchError, match=r"opt/param_groups/0/params/2: the target has this key"
        ) as caught:
            await ckpt.restore_into({"w": w, "opt": adamw(Net(1))}, strict=strict)
        assert "Pass an object built as the saved one was" in str(caught.value)
        assert script.count("read_into") == 0 and not w.any()


def stepped(kind: Any, rows: int) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    """Return a layer of so many rows and its optimizer after a step."""
    layer = torch.nn.Linear(4, rows)
    optimizer = kind(layer.parameters())
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return layer, optimizer


@pytest.mark.parametrize("started", [False, True])
async def test_moments_of_other_shapes_than_their_parameters_are_refused(
    tmp_path: Path, started: bool
) -> None:
    # PyTorch takes them, and a fused optimizer then writes behind their memory.
    place = await saved(tmp_path, {"opt": stepped(torch.optim.AdamW, 10)[1]})
    larger = torch.nn.Linear(4, 12)
    target = stepped(torch.optim.AdamW, 12)[1] if started else adamw(larger)
    with pytest.raises(ShapeMismatchError, match="built as the saved one was") as caught:
        await asyncckpt.restore_into(place, {"opt": target}, strict=False)
    text = (
        "opt/state/0/exp_avg: the checkpoint holds shape (10, 4), its parameter has shape (12, 4)"
    )
    assert text in str(caught.value)
    assert caught.value.expected == [(12, 4), (12, 4), (12,), (12,)]
    same = stepped(torch.optim.AdamW, 10)[1] if started else adamw(torch.nn.Linear(4, 10))
    await asyncckpt.restore_into(place, {"opt": same})


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, History])
async def test_optimizers_may_keep_arrays_of_other_shapes(tmp_path: Path, kind: Any) -> None:
    layer, optimizer = stepped(kind, 10)
    place = await saved(tmp_path, {"opt": optimizer})
    fresh = kind(layer.parameters())
    await asyncckpt.restore_into(place, {"opt": fresh})
    for parameter in layer.parameters():
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(fresh.state[parameter][key], value)


async def test_a_part_of_a_larger_weight_is_filled_as_the_error_says(tmp_path: Path) -> None:
    old, new = torch.nn.Linear(4, 10), torch.nn.Linear(4, 12)
    place = await saved(tmp_path, {"model": old})
    with pytest.raises(ShapeMismatchError, match=r'model\.state_dict\(\) \| {"weight"'):
        await asyncckpt.restore_into(place, {"model": new})
    views = {"weight": new.weight.data[:10], "bias": new.bias.data[:10]}
    rest = new.weight.data[10:].clone()
    await asyncckpt.restore_into(place, {"model": new.state_dict() | views})
    assert torch.equal(new.weight[:10], old.weight) and torch.equal(new.weight[10:], rest)


async def test_mismatches_are_listed_in_the_order_of_the_states(tmp_path: Path) -> None:
    names = [f"layer{number}" for number in range(30)]
    place = await saved(tmp_path, Loader(**{name: torch.ones(1) for name in names}))
    target = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1) for name in names})
    with pytest.raises(TreeMismatchError) as caught:
        await asyncckpt.restore_into(place, target)
    listed = re.findall(r"^  (layer\S+):", str(caught.value), re.MULTILINE)
    assert listed == [f"{name}.{key}" for name in names for key in ("weight", "bias")][:20]


class Renaming(Net):
    """Loads what an older version saved under other names."""

    def __init__(self, fill: float) -> None:
        super().__init__(fill, head=False)
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(_: Any, state: Any, prefix: str, *rest: Any) -> None:
        for key in [key for key in state if key.startswith("trunk.")]:
            state[key.replace("trunk.", "body.")] = state.pop(key)


async def test_a_module_that_renames_keys_is_asked(tmp_path: Path) -> None:
    older = Loader(**{"trunk.weight": torch.ones(3, 3), "trunk.bias": torch.ones(3)})
    place = await saved(tmp_path, {"model": older})
    model = Renaming(7)
    await asyncckpt.restore_into(place, {"model": model})
    assert model.fills() == {1}


async def test_batch_norm_may_lack_its_count_and_keeps_its_own(tmp_path: Path) -> None:
    state = torch.nn.BatchNorm1d(3).state_dict()
    del state["num_batches_tracked"]
    safetensors.torch.save_file(state, tmp_path / "x.safetensors")
    with pytest.warns(RestoreWarning, match="no checksum"):
        await asyncckpt.restore_into(tmp_path / "x.safetensors", torch.nn.BatchNorm1d(3))


# --------------------------------------------------------------------- what matches at all


@pytest.mark.parametrize("root", [True, False], ids=["the tree itself", "below a key"])
async def test_nothing_matched_is_an_error_with_strict_false_too(
    tmp_path: Path, root: bool
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, Net(1) if root else {"net": Net(1)})
        script = Script(ckpt)
        other = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
        for target in (other if root else {"net": other}, {"model": {"w": np.zeros(3)}}):
            with pytest.raises(
                TreeMismatchError, match="no leaf of the checkpoint matches the target"
            ) as caught:
                await ckpt.restore_into(target, strict=False)
            assert "body.weight" in str(caught.value) and "nothing was read" in str(caught.value)
        with pytest.raises(TreeMismatchError, match="no leaf of the checkpoint matches"):
            await ckpt.restore(like={"w": np.zeros(3)}, strict=False)
        assert script.count("read_into") == 0


async def test_not_strict_tells_first_how_much_matched_and_warns_of_less_than_half(
    tmp_path: Path,
) -> None:
    place = await saved(tmp_path, {key: np.ones(2) for key in "abcxyz"})
    with pytest.warns(RestoreWarning, match="only 1 of the 3 leaves that the target wants are in"):
        report = await asyncckpt.restore_into(
            place, {key: np.zeros(2) for key in "ade"}, strict=False
        )
    assert str(report).startswith("1 of 3 leaves matched, 2 missing, 5 unexpected: restored ")
    assert (report.matched, report.wanted, report.strict) == (1, 3, False)
    report = await asyncckpt.restore_into(place, {k: np.zeros(2) for k in "abde"}, strict=False)
    assert str(report).startswith("2 of 4 leaves matched, 2 missing, 4 unexpected: restored ")
    whole = await asyncckpt.restore_into(place, {key: np.zeros(2) for key in "abcxyz"})
    assert str(whole).startswith("restored ") and whole.matched == whole.wanted == 6
    with pytest.warns(RestoreWarning, match="only 4 of the 9 leaves"):
        half = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(4)])
        await asyncckpt.save(tmp_path / "half", {"m": half[:2]})
        target = {"m": half, "w": np.zeros(1)}
        report = await asyncckpt.restore_into(tmp_path / "half", target, strict=False)
    assert report.missing == ("w", "m/2.weight", "m/2.bias", "m/3.weight", "m/3.bias")


async def test_an_object_that_takes_other_keys_is_no_mismatch(tmp_path: Path) -> None:
    place = await saved(tmp_path, {"l": Loader(position=3)})
    loader = Loader(place=1)
    report = await asyncckpt.restore_into(place, {"l": loader}, strict=False)
    assert loader.state == {"position": 3} and report.notes == ()


async def test_an_optimizer_with_a_dtype_in_its_groups_is_saved_by_hooks(tmp_path: Path) -> None:
    def optimizer(dtype: torch.dtype) -> torch.optim.Optimizer:
        made = torch.optim.SGD(Net(1).parameters(), lr=0.5)
        made.param_groups[0]["momentum_dtype"] = dtype
        return made

    with pytest.raises(UnsupportedLeafError, match="register_state_dict_post_hook") as caught:
        await saved(tmp_path, {"opt": optimizer(torch.bfloat16)})
    assert caught.value.path == "opt/param_groups/0/momentum_dtype"

    def to_name(_: Any, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            group["momentum_dtype"] = str(group["momentum_dtype"]).removeprefix("torch.")

    def from_name(_: Any, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            group["momentum_dtype"] = getattr(torch, group["momentum_dtype"])

    made, fresh = optimizer(torch.bfloat16), optimizer(torch.float16)
    for each in (made, fresh):
        each.register_state_dict_post_hook(to_name)
        each.register_load_state_dict_pre_hook(from_name)
    place = await saved(tmp_path, {"opt": made})
    await asyncckpt.restore_into(place, {"opt": fresh})
    assert fresh.param_groups[0]["momentum_dtype"] == torch.bfloat16


async def test_a_module_made_under_inference_mode_is_named_as_such(tmp_path: Path) -> None:
    place = await saved(tmp_path, {"net": Net(2)})
    with torch.inference_mode():
        net = Net(1)
    with pytest.raises(RestoreError, match=r"^net: Net\.load_state_dict .* restore under it too"):
        await asyncckpt.restore_into(place, {"net": net})
