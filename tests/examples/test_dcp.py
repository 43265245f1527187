"""The example of torch.distributed.checkpoint: a training that changes one line."""

from __future__ import annotations

from pathlib import Path

from tests.examples.test_jobs import run


def test_a_training_with_dcp_goes_on_with_our_classes(tmp_path: Path) -> None:
    done = run("torch_dcp.py", "--root", str(tmp_path / "here"))
    assert done.returncode == 0, done.stdout
    for text in (
        "2 ranks trained from scratch; DCP saved step 2",
        "2 ranks trained from step 2 of DCP, restored bit by bit; asyncckpt saved step 5",
        "3 ranks trained from step 5 of asyncckpt, restored bit by bit; asyncckpt saved step 8",
        "keys without DCP, such as model.0.bias",
        "DCP's own step 2 was converted",
    ):
        assert text in done.stdout
