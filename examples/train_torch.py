"""Training of a small network in PyTorch, with background saves and resumption.

    python examples/train_torch.py --root /tmp/digits

Run it again with more --steps, and it resumes, even after it was killed. Losses, parameters,
optimizer and scheduler equal those of an uninterrupted run, bit by bit.
"""

from __future__ import annotations

import argparse
import time

import digits
import torch
from torch import nn

import asyncckpt
from asyncckpt import blocking


def network(hidden: int) -> nn.Sequential:
    """Return a fresh network for images of 8 × 8 pixels, with parameters and BatchNorm buffers."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )


def accuracy(model: nn.Module, held_out: digits.Digits) -> float:
    """Return the share of held-out digits that the network recognizes."""
    model.eval()
    with torch.no_grad():
        found = model(torch.from_numpy(held_out.images)).argmax(1)
    return float((found == torch.from_numpy(held_out.labels)).float().mean())


def train(options: argparse.Namespace, log: digits.RunLog) -> None:
    """Train to the last step; on return, all checkpoints are durable."""
    # One thread computes every sum in one order, so that a run can be repeated bit by bit.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(options.seed)
    data, held_out = digits.load()
    model = network(options.hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.7)
    state = {"model": model, "opt": optimizer, "sched": scheduler}
    with blocking.Checkpointer(options.root, keep=asyncckpt.KeepLast(3)) as ckpt:
        latest = ckpt.latest_step()
        if latest is not None:
            ckpt.restore_into(state)
        start = 0 if latest is None else latest + 1
        log.start(start, options.root)
        # Weights, and two moments for each, which a fresh optimizer does not have yet.
        ckpt.prepare({str(copy): dict(model.named_parameters()) for copy in range(3)})
        pending: blocking.PendingSave | None = None
        for step in range(start, options.steps):
            began = time.perf_counter()
            saving = pending is not None and not pending.done()
            batch = data.batch(options.seed, step)
            logits = model(torch.from_numpy(batch.images))
            loss = nn.functional.cross_entropy(logits, torch.from_numpy(batch.labels).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ended = time.perf_counter()
            log.step(step, loss.item(), ended - began, saving=saving)
            if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
                began = time.perf_counter()
                # The next steps may overwrite these tensors, because they have been copied.
                pending = ckpt.start_save(step, state, metrics={"loss": loss.item()})
                log.save(step, loss.item(), time.perf_counter() - began)
    last = max(start, options.steps) - 1
    share = accuracy(model, held_out)
    kept = [optimizer.state_dict(), scheduler.state_dict()]
    log.end(last, share, model.state_dict(), kept)


if __name__ == "__main__":
    arguments = digits.arguments("Train on the digits of scikit-learn with PyTorch.", hidden=256)
    with digits.RunLog(arguments.log) as run_log:
        train(arguments, run_log)
