"""Bad zarr documents, OCDBT databases and Orbax checkpoints: each gives the error that is due.

The files are in `corpus/`, made by `make_corpus_b.py`; `expected-b.toml` says what each must give.
"""

from __future__ import annotations

import filecmp
import gc
import tomllib
import tracemalloc
from pathlib import Path

import pytest

import asyncckpt
from tests.checkpoint.foreign.databases import write_database
from tests.checkpoint.foreign.make_corpus_b import write_corpus

CORPUS = Path(__file__).parent / "corpus"
EXPECTED = tomllib.loads((CORPUS / "expected-b.toml").read_text())

MEMORY_NBYTES = 64 << 20
"""What reading bad input may take beyond four times the input."""


def materialized(name: str, directory: Path) -> Path:
    """The checkpoint of a case: documents stand as `w` in a database of their own."""
    source = CORPUS / name
    if source.is_dir():
        return source
    document = source.name.partition(".")[2].replace("zarray", ".zarray")
    write_database(directory, {f"w/{document}".encode(): source.read_bytes()}, max_inline=1 << 20)
    return directory


def nbytes_below(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


async def look_at(path: Path) -> None:
    """What a user does first, and then."""
    await asyncckpt.inspect(path)
    await asyncckpt.restore(path)


@pytest.mark.parametrize("name", EXPECTED)
async def test_bad_input_gives_the_error_that_is_due(name: str, tmp_path: Path) -> None:
    path = materialized(name, tmp_path / "checkpoint")
    expected = EXPECTED[name]
    # Garbage of other tests, were it collected where the deepest input has used up the stack, could
    # not run what is to be run at its end.
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        with pytest.raises(asyncckpt.AsyncCheckpointError) as caught:
            await look_at(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.enable()
    assert type(caught.value).__name__ == expected["error"]
    assert expected["match"] in str(caught.value)
    assert str(path) in str(caught.value)
    assert caught.value.location == str(path)
    assert peak < 4 * nbytes_below(path) + MEMORY_NBYTES


def test_the_corpus_is_what_its_script_makes(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    made = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file())
    kinds = ("zarr", "ocdbt", "orbax", "expected-b.toml")
    kept = sorted(
        p.relative_to(CORPUS)
        for kind in kinds
        for p in [CORPUS / kind, *(CORPUS / kind).rglob("*")]
        if p.is_file()
    )
    assert made == kept
    assert filecmp.cmpfiles(tmp_path, CORPUS, made, shallow=False)[0] == made
