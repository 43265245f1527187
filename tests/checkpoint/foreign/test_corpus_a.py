"""Bad safetensors files and DCP directories: each gives the error that is due.

The files are in `corpus/`, made by `make_corpus_a.py`; `expected-a.toml` says what each must give.
"""

from __future__ import annotations

import filecmp
import os
import tomllib
import tracemalloc
from pathlib import Path

import pytest

import asyncckpt
from tests.checkpoint.foreign.make_corpus_a import write_corpus

CORPUS = Path(__file__).parent / "corpus"
EXPECTED = tomllib.loads((CORPUS / "expected-a.toml").read_text())

MEMORY_NBYTES = 64 << 20
"""What reading bad input may take beyond four times the input."""


def nbytes_below(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(inner.stat().st_size for inner in path.rglob("*") if inner.is_file())


@pytest.mark.parametrize("name", EXPECTED)
async def test_bad_input_gives_the_error_that_is_due(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = CORPUS / name, EXPECTED[name]
    monkeypatch.chdir(tmp_path)
    tracemalloc.start()
    try:
        with pytest.raises(asyncckpt.AsyncCheckpointError) as caught:
            await asyncckpt.inspect(path)
            await asyncckpt.restore(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    error = caught.value
    assert type(error).__name__ == expected["error"]
    assert expected["match"] in str(error)
    assert str(path) in str(error)
    assert error.location == str(path)
    assert getattr(error, "file", None) == expected.get("file")
    assert peak < 4 * nbytes_below(path) + MEMORY_NBYTES
    # What the pickles would do if they were executed.
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [n for n, e in EXPECTED.items() if e["error"][0] in "CU"])
async def test_verify_and_inspect_raise_nothing_but_our_errors(name: str) -> None:
    for look in (asyncckpt.inspect, asyncckpt.verify):
        try:
            await look(CORPUS / name)
        except (
            asyncckpt.CheckpointNotFoundError,
            asyncckpt.CorruptCheckpointError,
            asyncckpt.UnsupportedFormatError,
        ) as error:
            assert error.location == str(CORPUS / name)


def test_the_corpus_is_what_its_script_makes(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    kinds = ("safetensors", "dcp", "expected-a.toml")
    made, kept = (
        sorted(
            path.relative_to(root)
            for kind in kinds
            for path in [root / kind, *(root / kind).rglob("*")]
            if path.is_file() or path.is_symlink()
        )
        for root in (tmp_path, CORPUS)
    )
    assert made == kept
    for path in made:
        if (tmp_path / path).is_symlink():
            assert os.readlink(tmp_path / path) == os.readlink(CORPUS / path)
        else:
            assert filecmp.cmp(tmp_path / path, CORPUS / path, shallow=False), path
