"""Fixtures for every test: nothing blocks a loop, nothing is left behind, nothing is skipped."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from asyncckpt.stores.objects.requests.concurrency import ConcurrencyController
from tests.watch import no_blocking_calls, nothing_left_behind

# Before gcsfs is imported, or every call of it looks for the real service for up to a minute.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
# Whoever runs the tests may have an account: it is none of theirs.
os.environ["AWS_CONFIG_FILE"] = os.environ["AWS_SHARED_CREDENTIALS_FILE"] = os.devnull
os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
for name in [name for name in os.environ if name.startswith(("AWS_ACCESS", "AWS_SECRET", "AWS_S"))]:
    if name != "AWS_SHARED_CREDENTIALS_FILE":
        del os.environ[name]

# Several processes share the cores; threads of torch would spin while they wait for one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine is no failure: examples have no deadline, the whole run has one.
# The same examples everywhere, so that who breaks something is who sees it; `make test-long` and
# `make fuzz` look for new ones.
hypothesis.settings.register_profile("asyncckpt", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True)
hypothesis.settings.load_profile("asyncckpt")

# The crash tests are built on Linux's LD_PRELOAD and /proc.
collect_ignore = [] if sys.platform == "linux" else ["crash"]


# Tests that start several processes each come after all others, whose timing they would disturb.
# The longest are the first of them. Most fork from servers that import JAX or torch, which are then
# started once for each process of pytest.
TOGETHER = (
    "tests/crash/test_runtime_kills.py",
    "tests/examples/test_jobs.py",
    "tests/crash/test_kills.py",
    "tests/processes/",
    "tests/torch/",
    "tests/adapters/test_dtensor_processes.py",
    "tests/adapters/test_jax_processes.py",
    "tests/coordinators/",
)

SHARED_MEMORY = Path("/dev/shm")
ENOUGH_NBYTES = 256 << 20


@pytest.fixture
def no_blocking() -> Iterator[list[str]]:
    """Code of asyncckpt makes no blocking call on an event loop during the test."""
    with no_blocking_calls() as seen:
        yield seen


@pytest.fixture
def unraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is raced by a second one, which a busy machine may cause: for tests that count."""
    monkeypatch.setattr(ConcurrencyController, "take_hedge", lambda controller: False)


@pytest.fixture
def leak_check() -> Iterator[None]:
    """The test leaves no engine thread, file descriptor or unfinished asyncio task behind."""
    with nothing_left_behind():
        yield


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory if there is one: thousands of flushes would wait for the disk.

    What a killed process leaves is the same on every file system. What power loss leaves is not,
    and is not tested by killing.
    """
    if (
        not os.access(SHARED_MEMORY, os.W_OK)
        or shutil.disk_usage(SHARED_MEMORY).free < ENOUGH_NBYTES
    ):
        yield tmp_path
        return
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-tests-", dir=SHARED_MEMORY))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module", autouse=True)
def what_was_there_before_is_not_looked_at() -> None:
    """What earlier modules imported, compiled and kept is left out of collections.

    Looking for leaks collects thousands of times, and jax, torch and TensorStore alone are a
    million objects.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of many processes come last; those marked gpu are skipped without an NVIDIA device."""
    items.sort(key=_place)
    if Path("/dev/nvidia0").exists():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _place(item: pytest.Item) -> int:
    """Where among the tests a test comes: 0, or the number of its prefix in `TOGETHER` from 1."""
    places = [n for n, prefix in enumerate(TOGETHER, 1) if item.nodeid.startswith(prefix)]
    return places[0] if places else 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """On Linux a skipped test is a failed one, unless it is marked gpu."""
    report = yield
    if report.skipped and sys.platform == "linux" and not item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"skipped or expected to fail, which only gpu tests may be: {item.nodeid}"
    return report
