"""Background saves and exact resumption for Lightning.

    python examples/lightning_callback.py --root /tmp/lightning --steps 40

Interrupt it and run it again: it resumes from the newest checkpoint. Copy `BackgroundCheckpointIO`,
`StepCheckpoint` and `RandomStates` into your own program. Lightning decides what a checkpoint
contains and when to save. Needs `pip install lightning torchdata`.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import CheckpointIO
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

import asyncckpt
from asyncckpt import blocking


class BackgroundCheckpointIO(CheckpointIO):
    """Copies checkpoints when Lightning saves, and writes them in the background."""

    def __init__(self, ckpt: blocking.Checkpointer) -> None:
        self._ckpt = ckpt

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        step = int(Path(path).name)
        # With gradient accumulation, the first batch after resuming ends within the resumed step.
        if step not in self._ckpt.steps():
            self._ckpt.start_save(step, checkpoint)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> Any:
        self._ckpt.wait()
        return self._ckpt.restore(int(Path(path).name), leaves="torch")

    def remove_checkpoint(self, path: Any) -> None:
        self._ckpt.wait()  # the checkpoint that replaces it must be durable first
        self._ckpt.delete(int(Path(path).name))


class StepCheckpoint(ModelCheckpoint):
    """Names each checkpoint by its step, and leaves retention to asyncckpt."""

    FILE_EXTENSION = ""

    def __init__(self, root: Path, **options: Any) -> None:
        names: dict[str, Any] = {"filename": "{step}", "auto_insert_metric_name": False}
        super().__init__(root, save_top_k=-1, **names, **options)


class RandomStates(Callback):
    """The random states of torch, NumPy and Python, which Lightning does not save."""

    _restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        numpy = np.random.get_state(legacy=False)
        return {"torch": torch.get_rng_state(), "numpy": numpy, "python": random.getstate()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict

    def on_train_batch_start(self, *_: Any) -> None:
        if self._restored is not None:  # not earlier: creating a data iterator also draws
            numpy = self._restored["numpy"]
            numpy["state"]["key"] = np.asarray(numpy["state"]["key"])
            torch.set_rng_state(self._restored["torch"])
            np.random.set_state(numpy)
            random.setstate(self._restored["python"])
            self._restored = None


class Classifier(pl.LightningModule):
    """Keeps the loss of every step in `losses`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, 2)
        )
        self.losses: dict[int, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.losses[self.global_step] = loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def train(root: Path, steps: int, callbacks: Sequence[Callback] = ()) -> Classifier:
    """Train to the last step; on return, all checkpoints are durable."""
    torch.manual_seed(0)
    model, x = Classifier(), torch.randn(24, 4)
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    # The checkpoint includes their states: a run that stopped within an epoch resumes within it.
    order = RandomSampler(data, generator=torch.Generator().manual_seed(0))
    loader = StatefulDataLoader(data, 4, sampler=order)
    with blocking.Checkpointer(root, keep=asyncckpt.KeepLast(2)) as ckpt:
        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=steps,
            plugins=[BackgroundCheckpointIO(ckpt)],
            callbacks=[StepCheckpoint(root, every_n_train_steps=4), RandomStates(), *callbacks],
            logger=False,
        )
        latest = ckpt.latest_step()
        trainer.fit(model, loader, ckpt_path=None if latest is None else root / str(latest))
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="directory of the run")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    train(arguments.root, arguments.steps)
