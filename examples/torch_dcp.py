"""A program with torch.distributed.checkpoint that moves to asyncckpt by changing one line.

    python examples/torch_dcp.py [--root DIR] [--quick]

Two ranks train a model that is sharded with `fully_shard`, and save it with DCP's own classes. The
same program then continues with `asyncckpt.torch.StorageWriter` instead of `FileSystemWriter`, and
after that on three ranks. At the end, one process reads the checkpoints without DCP.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import digits
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import asyncckpt.torch
from asyncckpt import blocking

STORAGE = {
    "DCP": (dcp.FileSystemWriter, dcp.FileSystemReader),
    # The line that changes:
    "asyncckpt": (asyncckpt.torch.StorageWriter, asyncckpt.torch.StorageReader),
}


# Ranks are forked from a process that has imported these once.
multiprocessing.set_forkserver_preload(
    ["sklearn.datasets", "torch.distributed.fsdp", "asyncckpt.torch"]
)


def network(hidden: int) -> nn.Sequential:
    """Return a fresh network whose layers are sharded over all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


def digest(state: Any) -> str:
    """Return the SHA-256 of all values in a state dict, which all ranks gather."""
    if isinstance(state, dict):
        lines = [f"{key}: {digest(value)}" for key, value in sorted(state.items())]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if isinstance(state, DTensor):
        state = state.full_tensor()
    if isinstance(state, torch.Tensor):
        return hashlib.sha256(state.detach().numpy().tobytes()).hexdigest()
    return repr(state)


def train(
    rank: int, ranks: int, port: int, root: Path, hidden: int, first: int, storage: str, source: str
) -> None:
    """Train three steps from `first` on and save the last; resume from what `source` saved."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://localhost:{port}", world_size=ranks, rank=rank
    )
    writer, _ = STORAGE[storage]
    _, reader = STORAGE[source]
    data, _ = digits.load()
    model = network(hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if first:
        state = states(model, optimizer)
        dcp.load(state, storage_reader=reader(root / str(first - 1)))
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        found = digest(states(model, optimizer))
        if found != (root / f"{first - 1}.sha256").read_text():
            raise RuntimeError(f"step {first - 1} was not restored as it was saved")
    for step in range(first, first + 3):
        images, labels = (torch.from_numpy(rows) for rows in data.batch(0, step))
        loss = nn.functional.cross_entropy(model(images), labels.long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state = states(model, optimizer)
    dcp.save(state, storage_writer=writer(root / str(step)))
    found = digest(state)
    if rank == 0:
        (root / f"{step}.sha256").write_text(found)
        how = f"from step {first - 1} of {source}, restored bit by bit" if first else "from scratch"
        print(f"{ranks} ranks trained {how}; {storage} saved step {step}", flush=True)
    dist.destroy_process_group()


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dicts of both, in the form that DCP expects."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optimizer_state}


def job(ranks: int, *arguments: Any) -> None:
    """Run `train` on this number of ranks."""
    port = random.randrange(20_000, 32_000)  # below those that connections take by themselves
    torch.multiprocessing.start_processes(
        train, (ranks, port, *arguments), nprocs=ranks, start_method="forkserver"
    )


def demonstrate(root: Path, hidden: int) -> None:
    """Train with DCP's own classes, with asyncckpt's, and on three ranks; then read the results."""
    job(2, root, hidden, 0, "DCP", "DCP")
    job(2, root, hidden, 3, "asyncckpt", "DCP")
    job(3, root, hidden, 6, "asyncckpt", "asyncckpt")
    report = blocking.verify(root / "8")
    print(report)
    if not report.ok:
        raise RuntimeError("the checkpoint is damaged")
    tree = blocking.restore(root / "8")
    print(f"One process reads {len(tree)} keys without DCP, such as {min(tree)}")
    blocking.convert(root / "2", root / "converted")
    print(f"DCP's own step 2 was converted: {blocking.inspect(root / 'converted')}")


def main() -> int:
    """Run the example in a directory of its own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, help="where the checkpoints go; is not removed")
    parser.add_argument("--quick", action="store_true", help="a smaller model")
    given = parser.parse_args()
    root = given.root or Path(tempfile.mkdtemp(prefix="asyncckpt-dcp-"))
    root.mkdir(parents=True, exist_ok=True)
    if any(root.iterdir()):
        print(f"{root} is not empty", file=sys.stderr)
        return 2
    try:
        demonstrate(root, 32 if given.quick else 512)
    finally:
        if given.root is None:
            shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
