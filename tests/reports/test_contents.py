"""`CheckpointInfo` as a mapping, and reports as keys."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

from asyncckpt import LeafInfo, blocking

TREE = {"params": {"w": np.arange(5.0), "b": np.zeros(2)}, "step": 7}


def test_an_info_is_a_mapping_of_its_leaves(tmp_path: Path) -> None:
    blocking.save(tmp_path / "x", TREE)
    info = blocking.inspect(tmp_path / "x")
    assert list(info) == ["params/w", "params/b", "step"] and len(info) == 3
    assert "params/w" in info and "w" not in info and 0 not in info
    assert {path: info[path].nbytes for path in info} == {"params/w": 40, "params/b": 16, "step": 0}
    with pytest.raises(KeyError, match="has no leaf 'w'"):
        info["w"]
    copied = pickle.loads(pickle.dumps(info))
    assert copied == info and copied["params/b"].nbytes == 16


def test_looking_up_a_leaf_does_not_search_all(tmp_path: Path) -> None:
    blocking.save(tmp_path / "x", {})
    info = blocking.inspect(tmp_path / "x")
    leaf = LeafInfo("", "int")
    many = replace(info, leaves=tuple(replace(leaf, path=str(n)) for n in range(30_000)))
    started = time.process_time()
    assert all(many[path].path == path for path in many)
    assert time.process_time() - started < 5  # a search of all takes 18 s


def test_reports_and_infos_are_hashable(tmp_path: Path) -> None:
    saved = blocking.save(tmp_path / "x", TREE, metadata={"a": [1]})
    info = blocking.inspect(tmp_path / "x")
    restored = blocking.restore_into(tmp_path / "x", {**TREE})
    verified = blocking.verify(tmp_path / "x")
    assert len({saved, info, restored, verified, blocking.inspect(tmp_path / "x")}) == 4


@pytest.mark.parametrize("location", ["/a/b c%20#?/ü", "s3://bucket/a%41b/x y#1?/ü"])
def test_a_tensorstore_spec_names_the_location_whatever_its_characters(location: str) -> None:
    spec = LeafInfo("w", "array", array="w", location=location).tensorstore_spec()
    assert (
        ts.KvStore.Spec(spec["kvstore"]["base"]).path == f"{location.removeprefix('s3://bucket/')}/"
    )


def test_escapes_of_a_web_address_are_part_of_it() -> None:
    leaf = LeafInfo("w", "array", array="w", location="https://host:80/a%20b")
    assert leaf.tensorstore_spec()["kvstore"]["base"] == "https://host:80/a%20b/"
