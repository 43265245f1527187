"""CRC-32C and its combination."""

from __future__ import annotations

import threading
import time

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.format.crc import combine, crc32c


def test_crc_of_the_check_string_is_the_published_one() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, appendix B.4


@given(st.binary(), st.binary())
def test_crc_continues_from_a_value(a: bytes, b: bytes) -> None:
    assert crc32c(b, crc32c(a)) == crc32c(a + b)


@given(st.binary(), st.binary())
def test_combined_crc_is_that_of_the_concatenation(a: bytes, b: bytes) -> None:
    assert combine(crc32c(a), crc32c(b), len(b)) == crc32c(a + b)


def test_combining_zeros_of_any_length_agrees_with_computing_them() -> None:
    for nbytes in (0, 1, 255, 256, 65_535, 65_536, 1 << 20, (1 << 24) + 3):
        zeros = bytes(nbytes)
        assert combine(0x12345678, crc32c(zeros), nbytes) == crc32c(zeros, 0x12345678)


@given(st.integers(1, (1 << 55) - 1), st.integers(0, (1 << 32) - 1))
def test_a_length_may_be_combined_in_parts(nbytes: int, crc: int) -> None:
    """For lengths beyond what a test could hold."""
    part = nbytes // 3
    assert combine(crc, 0, nbytes) == combine(combine(crc, 0, part), 0, nbytes - part)
    assert combine(0, crc, nbytes) == crc


def test_any_contiguous_buffer_has_a_crc_and_others_are_refused() -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    wanted = crc32c(values.tobytes())
    assert crc32c(values) == crc32c(memoryview(values)) == crc32c(bytearray(values.tobytes()))
    assert crc32c(values) == wanted
    half = values.astype(ml_dtypes.bfloat16)
    assert crc32c(half.view(np.uint8)) == crc32c(half.tobytes())
    for strided in (values[:, ::2], values.T):
        with pytest.raises(ValueError, match="contiguous"):
            crc32c(strided)


def test_other_threads_run_while_a_large_buffer_is_checked() -> None:
    """A thread that only looks at the clock is not held up for as long as the checksum takes."""
    data = np.zeros(1 << 28, np.uint8)
    started = threading.Event()
    took: list[float] = []

    def check() -> None:
        started.set()
        for _ in range(3):
            begin = time.perf_counter()
            crc32c(data)
            took.append(time.perf_counter() - begin)

    worker = threading.Thread(target=check)
    gaps = []
    worker.start()
    started.wait()
    last = time.perf_counter()
    while worker.is_alive():
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    worker.join()
    # Held, the clock would stand still for each of the three calls and be read a handful of times.
    assert len(gaps) > 100, (len(gaps), took)
