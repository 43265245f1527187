"""A simulator for the tests of a module, empty before each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulator import Simulator, simulator


@pytest.fixture(scope="module")
def simulators() -> Iterator[Simulator]:
    with simulator() as sim:
        yield sim


@pytest.fixture
def sim(simulators: Simulator) -> Iterator[Simulator]:
    """A simulator without objects and faults, in which no upload may be left."""
    simulators.faults.clear()
    simulators.clear()
    yield simulators
    simulators.faults.clear()
    assert not simulators.uploads
    simulators.clear()
