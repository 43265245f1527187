"""The benchmark of CUDA devices, as far as it runs without one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks import cuda


def test_without_a_gpu_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "gpu_name", lambda: None)
    assert cuda.main(["--out", str(tmp_path)]) == 2
    assert "no CUDA device" in capsys.readouterr().out
    assert not any(tmp_path.iterdir())


def test_a_trial_measures_every_operation_of_both_frameworks(tmp_path: Path) -> None:
    where = ["--dir", str(tmp_path), "--out", str(tmp_path / "out")]
    size = ["--size", "4", "--rounds", "2", "--saves", "3"]
    assert cuda.main(["--device", "cpu", *size, *where]) == 0
    document = json.loads((tmp_path / "out" / "cuda.json").read_text())
    for name in cuda.FRAMEWORKS:
        samples = document["samples"][name]
        assert {what: len(times) for what, times in samples.items()} == {
            cuda.OUT: 2,
            cuda.BACK: 2,
            cuda.STEPS: 1,
        }
        assert all(seconds > 0 for times in samples.values() for pair in times for seconds in pair)
        assert document["growth_nbytes"][name]["host"] <= cuda.GROWTH_NBYTES
    operations = [f"{name}: {what}" for name in PEERS for what in ("save", "restore")]
    assert [what for peers in document["peers"].values() for what in peers] == operations
    assert all(len(times) == 2 for peers in document["peers"].values() for times in peers.values())
    assert "a trial on the CPU" in (tmp_path / "out" / "cuda.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # no state is left


PEERS = ("torch DCP", "safetensors", "Orbax")


async def test_saves_that_end_at_once_do_not_keep_the_steps_waiting() -> None:
    class Ended:
        """A `Checkpointer` whose saves have ended when they begin."""

        async def start_save(self, step: int, state: cuda.Tree) -> asyncio.Future[None]:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            done.set_result(None)
            return done

    class Idle(cuda.Torch):
        """A device without a state."""

        def step(self) -> None:
            return None

    ((beside_s, alone_s),) = await cuda._steps(Ended(), Idle({}, on_gpu=False), 0)
    assert beside_s >= 0 <= alone_s


def test_a_restore_that_differs_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda.Torch, "host", lambda self, tree: {})
    where = ["--dir", str(tmp_path), "--out", str(tmp_path / "out")]
    with pytest.raises(AssertionError, match="something else was restored"):
        cuda.main(["--device", "cpu", "--size", "4", "--framework", "torch", *where])
