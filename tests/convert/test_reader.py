"""Any box of any leaf of an open checkpoint, read by many threads, each chunk about once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncckpt import CorruptCheckpointError, LeafOptions, SaveOptions, ShardedArray
from asyncckpt.convert.reader import AHEAD_NBYTES, LeafReader
from asyncckpt.convert.source import Runtimes, shares
from asyncckpt.flow.driver import run_blocking
from asyncckpt.options import KIB, MIB
from asyncckpt.spec import DTYPES, Box
from tests.convert.trees import everything, numbers, saved

Open = Callable[..., LeafReader]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens checkpoints for reading; everything is closed at the end."""
    used: list[Runtimes] = []

    def opened(path: Path, cache_nbytes: int = 64 * MIB) -> LeafReader:
        runtimes = Runtimes("compare", reading_nbytes=32 * MIB, working_nbytes=0)
        used.append(runtimes)
        return run_blocking(runtimes.open(path, None, cache_nbytes))

    yield opened
    for runtimes in used:
        run_blocking(runtimes.aclose())


def whole(reader: LeafReader, leaf: int) -> np.ndarray[Any, Any]:
    spec = reader.specs[leaf]
    assert spec is not None
    out = np.empty(spec.shape, DTYPES[spec.dtype])
    reader.read(leaf, Box.whole(spec.shape), out)
    return out


def test_every_leaf_is_read_whole(opened: Open, tmp_path: Path) -> None:
    tree = everything()
    reader = opened(saved(tmp_path / "a", tree))
    leaf_of = {path: leaf for leaf, path in enumerate(reader.paths)}
    for path, value in (
        ("large", tree["large"]),
        ("params/tied", tree["params"]["w"]),
        ("empty", tree["empty"]),
        ("one", np.asarray(tree["one"])),
        ("opt/nu/0", tree["opt"].nu[0]),
    ):
        assert np.array_equal(whole(reader, leaf_of[path]), value)
    assert reader.specs[leaf_of["counters/step"]] is None


@pytest.fixture(scope="module")
def grids(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray[Any, Any]]:
    """One array on many grids, and in pieces."""
    values = numbers(40, 30, 20, dtype="float64")
    chunks = {"rows": (7, 30, 20), "tiles": (9, 8, 7), "deep": (40, 30, 3), "one": (40, 30, 20)}

    def options(path: str, _: object) -> LeafOptions | None:
        name, _, packed = path.partition("-")
        if name not in chunks:
            return None
        return LeafOptions(chunk_shape=chunks[name], compression="zstd" if packed else None)

    tree: dict[str, Any] = {name: values for name in chunks}
    tree |= {f"{name}-packed": values.copy() for name in chunks}
    # Each a tree leaf of its own: equal arrays would be stored once.
    tree = {name: value.copy() for name, value in tree.items()}
    cuts = ((0, 11), (11, 12), (12, 31), (31, 40))
    large = numbers(400, 30, 20, dtype="float64")
    tree["pieces"] = ShardedArray(
        large.shape,
        large.dtype,
        [((a * 10, 0, 0), large[a * 10 : b * 10]) for a, b in cuts],
    )
    path = tmp_path_factory.mktemp("grids") / "a"
    saved(path, tree, options=SaveOptions(leaf_options=options, chunk_nbytes=64 * KIB))
    return path, values


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_box_is_read(
    opened: Open, grids: tuple[Path, np.ndarray[Any, Any]], data: st.DataObject
) -> None:
    path, values = grids
    # Smaller than some chunks: these are held alone.
    reader = opened(path, cache_nbytes=100 * KIB)
    for leaf, name in enumerate(reader.paths):
        expected = numbers(400, 30, 20, dtype="float64") if name == "pieces" else values
        offset = tuple(data.draw(st.integers(0, n - 1)) for n in expected.shape)
        shape = tuple(
            data.draw(st.integers(1, n - o)) for n, o in zip(expected.shape, offset, strict=True)
        )
        box = Box(offset, shape)
        out = np.full((*shape[:-1], shape[-1] * 2), -1.0)[..., ::2]  # strided memory
        reader.read(leaf, box, out)
        assert np.array_equal(out, expected[box.slices()]), name


def test_threads_share_what_they_read(opened: Open, tmp_path: Path) -> None:
    values = numbers(4000, 500)
    options = SaveOptions(chunk_nbytes=512 * KIB, compression="zstd")
    path = saved(tmp_path / "a", {"w": values}, options=options)
    reader = opened(path, cache_nbytes=2 * MIB)
    boxes = [Box((start, 0), (50, 500)) for start in range(0, 4000, 50)]
    outs = [np.empty((50, 500), np.float32) for _ in boxes]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda pair: reader.read(0, *pair), zip(boxes, outs, strict=True)))
    assert np.array_equal(np.concatenate(outs), values)
    stored = int(reader.extents.nbytes.sum())
    assert reader.read_nbytes <= 1.1 * stored


def test_small_leaves_are_read_many_at_a_time(opened: Open, tmp_path: Path) -> None:
    tree = {f"w{i}": np.full(10 + i % 7, i) for i in range(3000)}
    reader = opened(saved(tmp_path / "a", tree))
    trips = 0
    submit = reader._runtime.engine.submit

    def counted(function: Any) -> Any:
        nonlocal trips
        trips += 1
        return submit(function)

    reader._runtime.engine.submit = counted  # type: ignore[method-assign]
    for leaf, value in enumerate(tree.values()):
        assert np.array_equal(whole(reader, leaf), value)
    assert trips == 1


def test_what_is_read_ahead_follows_the_order_that_was_given(opened: Open, tmp_path: Path) -> None:
    tree = {f"w{i}": numbers(300_000) + i for i in range(40)}
    reader = opened(saved(tmp_path / "a", tree))
    order = [*range(1, 40, 2), *range(0, 40, 2)]
    reader.in_order(order)
    for leaf in order:
        assert np.array_equal(whole(reader, leaf), tree[f"w{leaf}"])
    nbytes = int(reader.extents.nbytes.sum())
    assert reader.read_nbytes <= 1.1 * nbytes
    assert reader._blocks.peak_nbytes <= 2 * AHEAD_NBYTES


def test_damage_is_told_to_every_thread_that_asks(opened: Open, tmp_path: Path) -> None:
    path = saved(tmp_path / "a", {"bad": numbers(1_000_000), "good": numbers(1_500_000)})
    file = next((path / "default" / "d").glob("*-0"))
    data = bytearray(file.read_bytes())
    data[4999] ^= 1
    file.write_bytes(data)
    reader = opened(path)

    def failed(_: int) -> bool:
        with pytest.raises(CorruptCheckpointError, match=r"^bad: "):
            whole(reader, 0)
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(failed, range(4)))
    assert np.array_equal(whole(reader, 1), numbers(1_500_000))


def test_shares_stay_within_the_budget() -> None:
    for packing in (False, True):
        for nbytes in (64 * MIB, 100 * MIB + 3, 1 << 33):
            parts = shares(nbytes, packing=packing)
            assert sum(parts) <= nbytes and min(parts) >= 8 * MIB
    assert sum(shares(None)) > 0
