"""Training runs of PyTorch whose state is what its objects give as their state dicts."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from asyncckpt import blocking
from tests.states.resuming import Run, batch


def content(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, torch.Tensor):
        array = leaf.detach().contiguous().view(torch.uint8 if leaf.ndim else leaf.dtype)
        return "torch", str(leaf.dtype), tuple(leaf.shape), array.numpy().tobytes()
    if isinstance(leaf, (np.ndarray, np.generic)):
        return type(leaf).__name__, str(leaf.dtype), leaf.shape, leaf.tobytes()
    return type(leaf).__name__, repr(leaf)


def leaves(state: Any) -> dict[str, Any]:
    def walk(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
        if hasattr(tree, "state_dict"):
            tree = tree.state_dict()
        if isinstance(tree, dict):
            items = [*tree.items()]
        elif isinstance(tree, (list, tuple)):
            items = [*enumerate(tree)]
        else:
            yield path, tree
            return
        for key, child in items:
            yield from walk(child, f"{path}/{key}")

    return dict(walk(state, ""))


def contents(state: Any) -> dict[str, tuple[Any, ...]]:
    return {path: content(leaf) for path, leaf in leaves(state).items()}


def resume(ckpt: blocking.Checkpointer, step: int, fresh: Any) -> Any:
    report = ckpt.restore_into(fresh, step=step)
    assert report.missing == report.unexpected == ()
    return fresh


def run(fresh: Callable[[int], Any], step: Callable[[Any, int], Any]) -> Run:
    return Run(fresh, lambda state, n: (state, step(state, n)), leaves, content, resume)


# ------------------------------------------------------------------------------------ everything


class Tied(nn.Module):
    """A module with statistics, dropout, a buffer that is not saved, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.square = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6, bias=False)
        self.again.weight = self.square.weight
        self.last = nn.Linear(6, 3).to(torch.bfloat16)
        self.register_buffer("scratch", torch.rand(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(torch.relu(self.norm(self.first(x))), 0.3)
        x = self.again(torch.relu(self.square(x)))
        logits: torch.Tensor = self.last(x.to(torch.bfloat16))
        return logits.float()


class RandomStates:
    """The generators of torch, NumPy and Python, as one object with a state dict."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.numpy = np.random.default_rng(seed)

    def state_dict(self) -> dict[str, Any]:
        return {
            "torch": torch.get_rng_state(),
            "numpy": self.numpy.bit_generator.state,
            "numpy global": np.random.get_state(legacy=False),
            "python": random.getstate(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        self.numpy.bit_generator.state = state["numpy"]
        np.random.set_state(state["numpy global"])
        random.setstate(state["python"])


class Examples(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """12 examples, of which an epoch makes 4 batches: the run is stopped within the first."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        rng = np.random.default_rng(index)
        return torch.from_numpy(rng.normal(size=5).astype(np.float32)), int(rng.integers(3))


class Batches:
    """A shuffled `StatefulDataLoader` that goes round and round."""

    def __init__(self, seed: int) -> None:
        examples = Examples()
        # A generator of its own for the order: torchdata restores one that the loader draws its
        # seeds from as well only until the next epoch.
        sampler = RandomSampler(examples, generator=torch.Generator().manual_seed(seed))
        with warnings.catch_warnings():
            # torchdata 0.11 calls what torch 2.13 tells nobody to call any more.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            self.loader = StatefulDataLoader(
                examples, batch_size=3, sampler=sampler, generator=torch.Generator()
            )
        self._iterator: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self.loader)
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
            return next(self._iterator)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)
        self._iterator = None


def everything(seed: int) -> dict[str, Any]:
    generators = RandomStates(seed)
    model = Tied()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-3}],
        lr=1e-2,
        amsgrad=True,
    )
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    decay = lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    return {
        "model": model,
        "average": swa_utils.AveragedModel(
            model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        ),
        "optimizer": optimizer,
        "scheduler": lr_scheduler.SequentialLR(optimizer, [warm, decay], milestones=[2]),
        "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2),
        "data": Batches(seed),
        "random": generators,
        "largest": [0.0, -1],
    }


def everything_step(state: dict[str, Any], number: int) -> torch.Tensor:
    inputs, labels = next(state["data"])
    noise = state["random"].numpy.normal(size=5) + np.random.normal() + random.gauss(0.0, 1.0)
    inputs = inputs + 0.01 * torch.from_numpy(noise.astype(np.float32))
    optimizer, scaler = state["optimizer"], state["scaler"]
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(state["model"](inputs), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    state["scheduler"].step()
    state["average"].update_parameters(state["model"])
    state["largest"] = max(state["largest"], [loss.item(), number])
    return loss.detach()


def everything_resume(ckpt: blocking.Checkpointer, step: int, fresh: dict[str, Any]) -> Any:
    """Python scalars are immutable: what stands in a list of the tree comes with `restore`."""
    state = {**fresh, **ckpt.restore(step, include="largest")}
    return resume(ckpt, step, state)


# --------------------------------------------------------------------- schedulers and optimizers

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 2),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [1, 4, 4]),
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, [Halved(), lambda n: 1 / (n + 1)]),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0, cooldown=1),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=8),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(
        opt, 1e-3, 1e-1, step_size_up=2, mode="exp_range", gamma=0.9, cycle_momentum=False
    ),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 2),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt, 0.1, 4), lr_scheduler.ExponentialLR(opt, 0.9)]
    ),
    "SWALR": lambda opt: swa_utils.SWALR(opt, 0.05, anneal_epochs=3),
}


class Halved:
    """A callable object: `LambdaLR` has its attributes in its state dict."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 0.5**self.calls


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adam tensor lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(1e-2)),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "ASGD": torch.optim.ASGD,
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "LBFGS": partial(torch.optim.LBFGS, max_iter=2, history_size=3),
}


def small(
    seed: int,
    optimizer: Callable[..., torch.optim.Optimizer],
    scheduler: Callable[[torch.optim.Optimizer], Any] = lr_scheduler.ExponentialLR,
) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(5, 3)
    opt = optimizer([model.weight, model.bias])
    return {"model": model, "opt": opt, "sched": scheduler(opt)}


def small_step(state: dict[str, Any], number: int) -> torch.Tensor:
    images, labels = map(torch.from_numpy, batch(number))

    def closure() -> torch.Tensor:
        state["opt"].zero_grad()
        loss = nn.functional.cross_entropy(state["model"](images), labels)
        loss.backward()
        return loss

    loss: torch.Tensor = state["opt"].step(closure).detach()
    if isinstance(state["sched"], lr_scheduler.ReduceLROnPlateau):
        state["sched"].step(loss.item())
    else:
        state["sched"].step()
    return loss


def two_groups(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01)


RUNS: dict[str, Run] = {
    "everything": Run(
        everything,
        lambda state, n: (state, everything_step(state, n)),
        leaves,
        content,
        everything_resume,
    ),
    **{
        name: run(partial(small, optimizer=two_groups, scheduler=scheduler), small_step)
        for name, scheduler in SCHEDULERS.items()
    },
    **{
        name: run(
            partial(
                small,
                optimizer=optimizer,
                scheduler=partial(lr_scheduler.ExponentialLR, gamma=0.9),
            ),
            small_step,
        )
        for name, optimizer in OPTIMIZERS.items()
    },
}
