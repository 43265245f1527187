"""The simulated device takes its time for large blocks, and leaves small writes alone."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import device


def test_writers_share_the_rate_of_the_device(tmp_path: Path) -> None:
    block = bytes(1 << 20)
    with (
        open(tmp_path / "file", "wb") as file,
        device.Device(100e6).installed(),
        ThreadPoolExecutor(4) as pool,
    ):
        begun = time.perf_counter()
        calls = [pool.submit(os.pwrite, file.fileno(), block, at << 20) for at in range(8)]
        assert [call.result() for call in calls] == [len(block)] * 8
        assert time.perf_counter() - begun >= 8 * len(block) / 100e6


def test_small_writes_are_real_and_large_ones_are_not_stored(tmp_path: Path) -> None:
    path = tmp_path / "file"
    real = os.pwrite
    with open(path, "wb") as file, device.Device(1e9).installed():
        assert os.pwrite is not real
        assert os.pwrite(file.fileno(), b"small", 0) == 5
        assert os.pwrite(file.fileno(), bytes(device.LARGE_NBYTES), 5) == device.LARGE_NBYTES
    assert os.pwrite is real
    assert path.read_bytes() == b"small"


def test_results_have_a_row_for_each_state_and_rate(tmp_path: Path) -> None:
    where = ["--dir", str(tmp_path), "--out", str(tmp_path / "out")]
    device.main(["--size", "4", "--rate", "3.5", "50", "--rounds", "1", *where])
    rows = json.loads((tmp_path / "out" / "device.json").read_text())["rows"]
    assert [(row["workload"], row["rate"]) for row in rows] == [
        ("W1", 3.5),
        ("W1", 50.0),
        ("W3", 3.5),
        ("W3", 50.0),
    ]
    assert all(sample["wall_s"] > 0 for row in rows for sample in row["samples"])
    text = (tmp_path / "out" / "device.md").read_text()
    assert text.count("≥ 0.95") == 2  # a faster device has no target
