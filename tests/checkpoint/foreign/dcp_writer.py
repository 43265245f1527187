"""Writes one checkpoint by `torch.distributed.checkpoint.save` on four processes.

    python dcp_writer.py DIRECTORY

In DIRECTORY/ckpt is the checkpoint, in DIRECTORY/whole.npz every tensor of it as one array.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

RANKS = 4


def values(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape) + 0.25


def tensors() -> dict[str, object]:
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    return {
        "even": distribute_tensor(values(8, 3), line, [Shard(0)]),
        "uneven": distribute_tensor(values(10, 3), line, [Shard(0)]),
        "columns": distribute_tensor(values(3, 9), line, [Shard(1)]),
        "empty_shards": distribute_tensor(values(2, 5), line, [Shard(0)]),
        "replicated": distribute_tensor(values(4, 4), line, [Replicate()]),
        "tiles": distribute_tensor(values(5, 7), grid, [Shard(0), Shard(1)]),
        "rows_twice": distribute_tensor(values(7, 2), grid, [Shard(0), Shard(0)]),
        "hybrid": distribute_tensor(values(6, 2), grid, [Replicate(), Shard(0)]),
        "bfloat16": distribute_tensor(values(9).bfloat16(), line, [Shard(0)]),
        "turned": distribute_tensor(values(6, 4).t(), line, [Shard(1)]),
        "plain": values(3),
        "step": torch.tensor(7),
    }


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(tree: object, path: str = "") -> dict[str, torch.Tensor]:
    """Every tensor by its path."""
    if isinstance(tree, DTensor):
        return {path: tree.full_tensor().detach()}
    if isinstance(tree, torch.Tensor):
        return {path: tree.detach()}
    if isinstance(tree, dict):
        found = [whole(value, f"{path}/{key}" if path else str(key)) for key, value in tree.items()]
        return {key: value for part in found for key, value in part.items()}
    return {}


def run(rank: int, directory: Path) -> None:
    store = dist.FileStore(str(directory / "rendezvous"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    model, optimizer = trained()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {
        "tensors": tensors(),
        "model": model_state,
        "optimizer": optimizer_state,
        "run": {"epoch": 3, "name": "four ranks", "losses": [0.5, 0.25], "seed": None},
    }
    dcp.save(state, checkpoint_id=directory / "ckpt")
    found = whole(state)
    if rank == 0:
        arrays = {key: value.float().numpy() for key, value in found.items()}
        np.savez(directory / "whole.npz", **arrays)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(run, (Path(sys.argv[1]),), RANKS, start_method="fork")
