"""Plans of measurements, and recommendations from their results."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.options import GIB, MIB
from asyncckpt.tune.recommend import (
    MAX_NBYTES,
    TunePoint,
    grid,
    reason,
    recommend,
)


def points(rates: dict[tuple[int, int], float], direction: str = "put") -> list[TunePoint]:
    return [
        TunePoint(direction, size * MIB, streams, rate * MIB)  # type: ignore[arg-type]
        for (size, streams), rate in rates.items()
    ]


@given(st.integers(0, 1 << 38), st.integers(0, 1 << 36), st.integers(0, 3))
def test_a_grid_keeps_to_its_bytes_and_its_memory(
    max_nbytes: int, memory_nbytes: int, copies: int
) -> None:
    found = grid(max_nbytes, memory_nbytes, copies)
    assert sum(point.moved_nbytes for point in found) <= max_nbytes
    assert len(set(found)) == len(found)
    for point in found:
        assert point.nbytes * point.streams * (1 + copies) <= memory_nbytes
        assert point.requests >= point.streams
        assert point.requests >= 4


def test_the_default_bytes_pay_for_both_axes_of_the_grid() -> None:
    found = {(point.nbytes // MIB, point.streams) for point in grid(MAX_NBYTES, 8 * GIB, 1)}
    assert {(16, n) for n in (1, 4, 8, 16, 32)} <= found
    assert {(size, 16) for size in (4, 8, 16, 32, 64, 128)} <= found


def test_what_is_as_good_as_the_best_with_less_memory_is_recommended() -> None:
    own = points({(16, 16): 950, (64, 16): 990, (64, 32): 1000, (16, 8): 700, (8, 16): 800})
    chosen = recommend(own, "put")
    assert (chosen.nbytes, chosen.streams) == (16 * MIB, 16)
    assert reason(own, chosen) == (
        "16 streams of 16.0 MiB carry 950.0 MiB/s, within 5 % of the best measured point "
        "(32 of 64.0 MiB: 1000.0 MiB/s) with less in memory"
    )


def test_the_best_itself_needs_no_comparison() -> None:
    own = points({(16, 16): 1000})
    assert reason(own, recommend(own, "put")) == "16 streams of 16.0 MiB carry 1000.0 MiB/s"
    own = points({(16, 1): 1000})
    assert reason(own, recommend(own, "put")) == "1 stream of 16.0 MiB carries 1000.0 MiB/s"


def test_directions_are_judged_apart() -> None:
    both = points({(16, 16): 100}) + points({(16, 8): 500, (16, 16): 900}, "get")
    assert recommend(both, "put").nbytes_per_s == 100 * MIB
    assert recommend(both, "get").streams == 16
    with pytest.raises(ValueError, match="empty"):
        recommend(points({(16, 16): 100}), "get")
