"""`python -m tests.fuzz.make_seeds`: the seeds that torch writes, made by the torch there is."""

from __future__ import annotations

import io
import tempfile
import warnings
import zipfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

SEEDS = Path(__file__).parent / "seeds"


def main() -> None:
    state = {
        "model": {"w": torch.arange(6.0).reshape(2, 3).to(torch.bfloat16), "b": torch.zeros(3)},
        "opt": {"state": [{"step": torch.tensor(3.0), "m": torch.ones(2, 3)}], "lr": 0.1},
        "step": 7,
        "name": "x",
    }
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process is meant
        dcp.save(state, checkpoint_id=directory)
        (SEEDS / "dcp-metadata.bin").write_bytes((Path(directory) / ".metadata").read_bytes())
    archive = io.BytesIO()
    torch.save(torch.arange(6, dtype=torch.int16).reshape(2, 3), archive)
    (SEEDS / "torch-archive.bin").write_bytes(archive.getvalue())
    value = {"lr": 0.1, "betas": (0.9, 0.999), "name": "adam", "none": None, "n": [1, 2**40, True]}
    archive = io.BytesIO()
    torch.save({**value, "bytes": b"xx"}, archive)
    with zipfile.ZipFile(archive) as members:
        (SEEDS / "torch-value.bin").write_bytes(members.read("archive/data.pkl"))


if __name__ == "__main__":
    main()
