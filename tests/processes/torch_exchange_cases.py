"""What ranks of a torch job do in tests of restores that read once."""

from __future__ import annotations

from asyncckpt import blocking
from tests.processes import torch_cases
from tests.processes.exchange_cases import ONCE, differing, reading, target
from tests.processes.torch_cases import Trainer
from tests.processes.worker import Worker


def restore_while_training(worker: Worker, root: str) -> list[str]:
    """Restore several times while a trainer runs its collectives; what went wrong."""
    trainer = Trainer(worker.index, worker.count)
    trainer.start()
    like = target(worker, "all")
    wrong: list[str] = []
    with reading(), blocking.Checkpointer(root) as ckpt:
        for _ in range(3):
            wrong += differing(ckpt.restore(1, like=like, options=ONCE), like)
    trainer.ending.set()
    trainer.join(20)
    if trainer.is_alive():
        wrong.append("the trainer hangs")
    return wrong + trainer.wrong


def move(worker: Worker, root: str) -> bool:
    """Save a model over FSDP, restore it into HSDP; whether it has the same values."""
    before = torch_cases.save(worker, root, "fsdp", "objects")
    tree = torch_cases.tree_of(worker, "hsdp", "objects", seed=2, steps=1)
    with reading(), blocking.Checkpointer(root) as ckpt:
        report = ckpt.restore_into(tree, options=ONCE)
        assert report.received_nbytes > report.read_nbytes
    return torch_cases.prints(tree) == before
