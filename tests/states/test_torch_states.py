"""PyTorch goes on in a new process where it was, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.states import torch_runs
from tests.states.resuming import Outcome, interrupted, uninterrupted


@pytest.fixture(autouse=True, scope="module")
def _global_generators() -> Iterator[None]:
    """The runs seed and use the generators of the whole process."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return interrupted(torch_runs.__name__, torch_runs.RUNS, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", torch_runs.RUNS)
def test_a_run_resumed_in_a_new_process_is_the_one_that_never_stopped(
    name: str, outcomes: dict[str, Outcome]
) -> None:
    expected = uninterrupted(torch_runs.RUNS[name])
    assert len(set(expected.losses)) > 1
    assert outcomes[name].losses == expected.losses
    assert outcomes[name].leaves == expected.leaves
