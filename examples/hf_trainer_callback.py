"""Background saves and exact resumption for the Trainer of transformers.

    python examples/hf_trainer_callback.py --root /tmp/hf --steps 40

Interrupt it and run it again: it resumes from the newest checkpoint. Copy `SavesInBackground` and
`BackgroundTrainer` into your own program. The options of `TrainingArguments` that say when to save
(`save_strategy`, `save_steps`) work as usual. Needs `pip install transformers accelerate`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import asyncckpt
from asyncckpt import blocking


class SavesInBackground(TrainerCallback):
    """Copies the state of the run when the Trainer would save, and writes it in the background."""

    def __init__(self, ckpt: blocking.Checkpointer) -> None:
        self._ckpt = ckpt
        self._random: dict[str, Any] | None = None

    def folder(self, output_dir: Path) -> str | None:
        """Return the argument of `Trainer.train(resume_from_checkpoint=...)`; None in a new run.

        The Trainer reads its own state from this folder: the step, which gives its position in the
        data.
        """
        step = self._ckpt.latest_step()
        if step is None:
            return None
        folder = output_dir / f"resume-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        state = self._ckpt.restore(step, include="trainer")["trainer"]
        (folder / "trainer_state.json").write_bytes(state)
        return str(folder)

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if state.global_step > 0:
            names = ("model", "optimizer", "lr_scheduler")
            target = {name: objects[name] for name in names}
            self._ckpt.restore_into(target, step=state.global_step, include=names)
            self._random = self._ckpt.restore(state.global_step, include="random")["random"]

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self._random is not None:  # not earlier: skipping batches also draws numbers
            torch.set_rng_state(torch.from_numpy(self._random["torch"]))
            np.random.set_state(self._random["numpy"])
            random.setstate(self._random["python"])
            self._random = None

    def on_save(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        tree = {name: objects[name] for name in ("model", "optimizer", "lr_scheduler")}
        tree["random"] = {
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(legacy=False),
            "python": random.getstate(),
        }
        tree["trainer"] = json.dumps(dataclasses.asdict(state)).encode()
        self._ckpt.start_save(state.global_step, tree)


class BackgroundTrainer(Trainer):
    """A Trainer that leaves saving and restoring to its callback."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Do nothing: the callback saves in `on_save`, which is called next."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Do nothing: the callback restores in `on_train_begin`, when the optimizer exists."""


def train(root: Path, steps: int, callbacks: Sequence[TrainerCallback] = ()) -> Trainer:
    """Train to the last step; on return, all checkpoints are durable."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    sequences = [torch.arange(start, start + 8) for start in range(24)]
    data = [{"input_ids": tokens, "labels": tokens} for tokens in sequences]
    options = TrainingArguments(
        str(root / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=4,
        save_steps=4,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    with blocking.Checkpointer(root / "checkpoints", keep=asyncckpt.KeepLast(2)) as ckpt:
        saves = SavesInBackground(ckpt)
        trainer = BackgroundTrainer(
            GPT2LMHeadModel(config), options, train_dataset=data, callbacks=[saves, *callbacks]
        )
        trainer.train(resume_from_checkpoint=saves.folder(root / "trainer"))
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="directory of the run")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    train(arguments.root, arguments.steps)
