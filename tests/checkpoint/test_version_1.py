"""Checkpoints of version 1 of the format, as the code of that time wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncckpt import blocking
from tests.simulator import Simulator, simulator

OLD = Path(__file__).parent / "version_1"


def expected() -> dict[str, Any]:
    shared = np.arange(6, dtype=np.float32).reshape(2, 3)
    return {
        "w": np.arange(600, dtype=np.float64).reshape(20, 30) / 7,
        "tied": [shared, shared],
        "packed": np.zeros((64, 16), np.int16),
        "empty": np.zeros((0, 3), np.bool_),
        "scalars": {
            "step": 7, "lr": 0.5, "name": "ö", "flag": True, "z": 1 - 2j, "raw": b"\x00\xff",
        },
        "none": None,
    }  # fmt: skip


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            assert_same(found[key], value)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert type(found) is type(wanted)
        assert np.array_equal(found, wanted)


def stored(sim: Simulator, step: int) -> str:
    """The checkpoint of version 1 below `<bucket>/run/<step>`; returns the root's URL."""
    for path in sorted((OLD / "objects" / "3").rglob("*")):
        if path.is_file():
            key = path.relative_to(OLD / "objects" / "3").as_posix()
            sim.put("bucket", f"run/{step}/{key}", path.read_bytes())
    return "s3://bucket/run"


def test_version_1_on_local_disk_is_read() -> None:
    root = OLD / "local"
    assert b'"version":1,' in (root / "3" / "checkpoint.json").read_bytes()[:40]
    assert_same(blocking.restore(root / "3"), expected())
    assert blocking.verify(root / "3").ok
    info = blocking.inspect(root / "3")
    assert (info.metadata, info.metrics) == ({"tokens": 10**9}, {"loss": 0.25})


@pytest.mark.parametrize("client", ["obstore", "fsspec"])
def test_version_1_on_an_object_store_is_read_kept_and_deleted(client: str) -> None:
    with simulator() as sim:
        root = stored(sim, 3)
        options = sim.s3_options(client=client)
        before = sim.objects("bucket")
        with blocking.Checkpointer(root, storage_options=options) as ckpt:
            assert ckpt.steps() == [3]
            assert_same(ckpt.restore(), expected())
            assert ckpt.verify(3).ok
            assert sim.objects("bucket") == before  # opening repairs nothing of version 1
            ckpt.save(4, {"x": 1})
            ckpt.save(3, {"x": 2}, overwrite=True)
            assert ckpt.restore(3) == {"x": 2}
            assert ckpt.verify(3).ok
            assert not [key for key in sim.stored() if "3937c616f30148108f4479d26116dd74" in key]
        stored(sim, 5)
        with blocking.Checkpointer(root, storage_options=options) as ckpt:
            assert_same(ckpt.restore(5), expected())
            ckpt.delete(5)
            assert not [key for key in sim.stored() if key.startswith("run/5/")]


def test_the_manifest_of_version_1_is_read_from_the_record_if_it_is_missing() -> None:
    """The copies of version 1 that this release does not read hold only what Orbax needs."""
    with simulator() as sim:
        root = stored(sim, 3)
        sim.delete("bucket", "run/3/default/manifest.ocdbt")
        options = sim.s3_options()
        assert_same(blocking.restore(f"{root}/3", storage_options=options), expected())
        assert blocking.verify(f"{root}/3", storage_options=options).ok
