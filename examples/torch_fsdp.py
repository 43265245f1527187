"""Training with FSDP2 by four processes, one of which is killed during a save, and then by two.

    python examples/torch_fsdp.py [--root DIR] [--quick]

`fully_shard` shards parameters and moments over all processes as DTensors, on CPU with gloo. All
processes make the same calls of a `Checkpointer`, which coordinates them through torch.distributed.
`job.py` starts the processes.
"""

from __future__ import annotations

import sys
from typing import Any

import digits
import job
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from asyncckpt import blocking


def network(hidden: int) -> nn.Sequential:
    """Return a fresh network whose layers are sharded over all processes."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, hidden),
        nn.LayerNorm(hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole(node: Any) -> Any:
    """Return a state dict with whole arrays; all processes take part in gathering them."""
    if isinstance(node, dict):
        return {key: whole(child) for key, child in node.items()}
    if isinstance(node, list):
        return [whole(child) for child in node]
    if isinstance(node, DTensor):
        node = node.full_tensor()
    return node.detach().numpy() if isinstance(node, torch.Tensor) else node


def sha256(state: dict[str, Any]) -> str:
    """Return the digest of the whole state."""
    return digits.sha256({name: whole(part.state_dict()) for name, part in state.items()})


def own_rows(part: job.Part, batch: digits.Digits) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images and labels of a batch that this process computes."""
    images, labels = (torch.from_numpy(rows).chunk(part.count)[part.process] for rows in batch)
    return images, labels.long()


def train(part: job.Part) -> None:
    """Train to the last step; on return, all checkpoints are durable."""
    torch.set_num_threads(1)
    data, held_out = digits.load()
    model = network(part.hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.7)
    state = {"model": model, "opt": optimizer, "sched": scheduler}
    start = 0
    with blocking.Checkpointer(part.root) as ckpt:
        latest = ckpt.latest_step()
        if latest is not None:
            ckpt.restore_into(state)
            start = latest + 1
            part.write(restored=latest, sha256=sha256(state))
        for step in range(start, part.steps):
            images, labels = own_rows(part, data.batch(0, step))
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()  # averages the gradients of all processes
            optimizer.step()
            scheduler.step()
            dist.all_reduce(loss.detach_(), dist.ReduceOp.AVG)
            part.write(step=step, loss=loss.item())
            if part.saves(step):
                # The next steps may overwrite these tensors, because they have been copied.
                ckpt.start_save(step, state)
                part.write(saved=step, sha256=sha256(state))
    with torch.no_grad():
        found = model(torch.from_numpy(held_out.images)).argmax(1)
    part.write(accuracy=float((found == torch.from_numpy(held_out.labels)).float().mean()))


def run(part: job.Part) -> None:
    """Join the job of this part, and train."""
    address = f"tcp://localhost:{part.port}"
    dist.init_process_group("gloo", init_method=address, world_size=part.count, rank=part.process)
    try:
        train(part)
        # Gloo's threads outlive their group. One that still frees the tensors of the last call
        # when the interpreter ends would abort the process.
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(job.main(__file__, run, "Train with FSDP2 on four processes, then on two."))
