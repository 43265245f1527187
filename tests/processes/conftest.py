"""Real processes: one launch for each runtime and count serves all tests of a file."""

from tests.processes.fixtures import pools as pools
