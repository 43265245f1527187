"""Real processes: one launch for each count serves all tests of this folder."""

from tests.processes.fixtures import pools as pools
