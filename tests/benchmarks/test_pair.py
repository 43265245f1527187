"""Paired timings: a worker times any checkout, on disk and on an object store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.pair.__main__ import REPOSITORY, Side, places
from benchmarks.pair.worker import Cases
from tests.simulator import simulator_process


@pytest.fixture(scope="module")
def side() -> Iterator[Side]:
    side = Side(REPOSITORY, 1)
    yield side
    side.close()


@pytest.mark.parametrize("case", ["save", "save_and_wait", "stall", "restore", "restore_into"])
def test_a_case_is_timed_on_disk(side: Side, case: str, tmp_path: Path) -> None:
    place, options = places("", tmp_path / "run", None)
    assert side.seconds(case, place, options) > 0


@pytest.mark.parametrize("client", ["obstore", "s3fs", "gcsfs"])
def test_a_case_is_timed_on_object_stores(side: Side, client: str, tmp_path: Path) -> None:
    with simulator_process("loopback") as sim:
        place, options = places(client, tmp_path, sim)
        assert side.seconds("restore_into", place, options) > 0


@pytest.mark.parametrize("case", ["restore", "restore_into", "restore_small", "restore_small_own"])
def test_warm_files_are_in_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Direct writes leave nothing there."""
    warmed: list[Path] = []
    monkeypatch.setattr("benchmarks.files.warm", warmed.append)
    assert Cases(1).run(case, str(tmp_path), {}) > 0
    assert warmed == [tmp_path]
