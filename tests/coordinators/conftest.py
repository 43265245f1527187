"""Real processes for the tests of coordinators."""

from tests.processes.fixtures import pools as pools
