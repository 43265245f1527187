"""The callbacks for other training loops save in the background and resume, bit by bit."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from asyncckpt import blocking
from tests import children

SAVED, STOPPED, STEPS = 8, 10, 14
"""The runs save every four steps of six-step epochs, and are stopped while they have not."""

LIMIT_S = 230.0
"""Time limit of a child, which imports a whole training framework."""

# What both children do: a run that is never stopped, one that is, and the latter again.
RUNS = """
import functools, json, os, sys
from pathlib import Path
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, "examples")
root, stopped, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

class Stopped(Exception):
    pass

def compare(example, Stop, losses, module, owner, name, option):
    make, outcomes = getattr(owner, name), {}
    for count in (1, 2):  # batches a step; in one process, because imports take most of the time
        setattr(owner, name, functools.partial(make, **{option: count}))
        runs = root / str(count)
        whole = example.train(runs / "whole", steps)
        try:
            example.train(runs / "stopped", steps, [Stop(stopped)])
        except Stopped:
            pass
        else:
            raise AssertionError("the run was not stopped")
        again = Stop(None)
        resumed = example.train(runs / "stopped", steps, [again])
        outcomes[count] = {
            "steps": again.steps,
            "whole": losses(whole),
            "resumed": losses(resumed),
            "equal": [
                bool((a == b).all())
                for a, b in zip(
                    module(whole).parameters(), module(resumed).parameters(), strict=True
                )
            ],
        }
    print("\\n" + json.dumps(outcomes))
"""

TRANSFORMERS = """
import hf_trainer_callback as example

class Stop(example.TrainerCallback):
    def __init__(self, at):
        self.at, self.steps = at, []

    def on_step_begin(self, args, state, control, **objects):
        self.steps.append(state.global_step)
        if state.global_step == self.at:
            raise Stopped

def losses(trainer):
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {entry["step"] - 1: [entry["loss"].hex(), entry["grad_norm"].hex()] for entry in log}

option = example, "TrainingArguments", "gradient_accumulation_steps"
compare(example, Stop, losses, lambda trainer: trainer.model, *option)
"""

LIGHTNING = """
import lightning_callback as example

class Stop(example.Callback):
    def __init__(self, at):
        self.at, self.steps = at, []

    def on_train_batch_start(self, trainer, *_):
        self.steps.append(trainer.global_step)
        if trainer.global_step == self.at:
            raise Stopped

def losses(model):
    return {step: loss.hex() for step, loss in model.losses.items()}

option = example.pl, "Trainer", "accumulate_grad_batches"
compare(example, Stop, losses, lambda model: model, *option)
"""


def compared(code: str, root: Path, warnings: str) -> dict[str, dict[str, Any]]:
    program = textwrap.dedent(RUNS + code)
    child = children.start(program, root, STOPPED, STEPS, warnings=warnings)
    status, out, err = children.finish(child, LIMIT_S)
    assert status == 0, f"exit status {status}\n{out}\n{err}"
    outcomes: dict[str, dict[str, Any]] = json.loads(out.splitlines()[-1])
    return outcomes


# Lightning and torchdata warn of what they do themselves.
@pytest.mark.parametrize(
    ("code", "warnings", "checkpoints"),
    [(TRANSFORMERS, "error", "stopped/checkpoints"), (LIGHTNING, "ignore", "stopped")],
    ids=["transformers", "lightning"],
)
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(
    tmp_path: Path, code: str, warnings: str, checkpoints: str
) -> None:
    for count, outcome in compared(code, tmp_path, warnings).items():
        assert list(outcome["whole"]) == [str(step) for step in range(STEPS)]
        assert list(dict.fromkeys(outcome["steps"])) == list(range(SAVED, STEPS))
        for step in map(str, outcome["steps"]):
            assert outcome["resumed"][step] == outcome["whole"][step]
        assert outcome["equal"] and all(outcome["equal"])
        with blocking.Checkpointer(tmp_path / count / checkpoints) as ckpt:
            assert 12 in ckpt.steps()
            assert ckpt.verify(12).ok
    theirs = [
        path
        for path in tmp_path.rglob("*")
        if path.suffix in {".pt", ".pth", ".ckpt", ".safetensors"}
    ]
    assert theirs == []
