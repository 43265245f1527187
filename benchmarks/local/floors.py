"""Floors: what plain system calls and memory copies reach with as many bytes, on this disk, now.

The best combination of threads and block size is found once per run by a quick probe; that
combination then is the paired probe of every sample. Source and destination are one pair of
buffers on huge pages, larger than the caches of common machines, gone through as often as the
size asks for.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.files import chill, opened, settle
from benchmarks.workloads import random_floats

MIB = 1 << 20
PAGE_NBYTES = 4096
THREADS = (1, 2, 4)
BLOCKS_NBYTES = (4 * MIB, 16 * MIB, 64 * MIB)
PROBE_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Way:
    """One way to move bytes.

    Attributes:
        threads: system calls or copies at a time.
        block_nbytes: bytes per call.
        direct: past the page cache.
        preallocated: the file is allocated before it is written, within the timed part.
    """

    threads: int
    block_nbytes: int
    direct: bool = False
    preallocated: bool = False

    def __str__(self) -> str:
        how = "O_DIRECT" if self.direct else "buffered"
        extra = ", preallocated" if self.preallocated else ""
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{threads} × {self.block_nbytes // MIB or 1} MiB, {how}{extra}"


class Floors:
    """Probes on one directory. `choose()` first; `close()` at the end."""

    def __init__(self, directory: Path, *, buffer_nbytes: int = 256 * MIB) -> None:
        self._directory = directory
        self._pool = ThreadPoolExecutor(max(THREADS), thread_name_prefix="floor")
        self._source = _huge_buffer(buffer_nbytes)
        self._target = _huge_buffer(buffer_nbytes)
        words = random_floats(np.random.default_rng(0), (buffer_nbytes // 4,), "f4")
        np.copyto(self._source, words.view(np.uint8))
        self.direct = _direct_works(directory, self._source)
        self.write_way = Way(1, 16 * MIB, direct=self.direct)
        self.cold_way = Way(1, 16 * MIB, direct=self.direct)
        self.copy_way = Way(1, buffer_nbytes)
        self._file = directory / "floor.bin"
        self._file_nbytes = 0

    def choose(self) -> dict[str, Any]:
        """Choose the fastest ways; return every rate found, in GB/s, for the report."""
        nbytes = self._source.nbytes
        ways = [Way(threads, block) for threads in THREADS for block in BLOCKS_NBYTES]
        direct = self._direct_ways()
        found: dict[str, Any] = {"write": self.choose_write()}
        self._fill(nbytes)
        cold = [*direct, *(way for way in ways if self.direct and way.threads == 1)]
        self.cold_way, found["cold read"] = _fastest(
            cold, lambda way: self._read_cold(way, nbytes), nbytes
        )
        copies = [Way(threads, nbytes) for threads in (1, 2)]
        self.copy_way, found["memcpy"] = _fastest(
            copies, lambda way: self._copy(way, nbytes), nbytes
        )
        return found

    def choose_write(self) -> Any:
        """Choose the fastest way to write alone; return the rates, as `choose` does."""
        nbytes, direct = self._source.nbytes, self._direct_ways()
        allocated = [Way(w.threads, w.block_nbytes, self.direct, True) for w in direct]
        self.write_way, found = _fastest(
            [*direct, *allocated], lambda way: self._write(way, nbytes), nbytes
        )
        return found

    def write_s(self, nbytes: int) -> float:
        """Seconds to write a new file of `nbytes` and fdatasync it. The file is gone afterwards."""
        return self._write(self.write_way, nbytes)

    def cold_read_s(self, nbytes: int) -> float:
        """Seconds to read `nbytes` that are not in the page cache into touched memory."""
        self._fill(nbytes)
        return self._read_cold(self.cold_way, nbytes)

    def memcpy_s(self, nbytes: int) -> float:
        """Seconds to copy `nbytes` from touched memory to touched memory."""
        return self._copy(self.copy_way, nbytes)

    def close(self) -> None:
        """Threads and files are gone."""
        self._pool.shutdown()
        self._file.unlink(missing_ok=True)

    # ---------------------------------------------------------------------------------- ways

    def _direct_ways(self) -> list[Way]:
        return [Way(n, block, self.direct) for n in THREADS for block in BLOCKS_NBYTES]

    def _write(self, way: Way, nbytes: int) -> float:
        path = self._directory / "floor-write.bin"
        # A direct write has whole pages; what is beyond the end is cut off afterwards.
        written = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES if way.direct else nbytes
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | (os.O_DIRECT if way.direct else 0)
        source = memoryview(self._source)
        try:
            with opened(path, flags) as fd:
                start = time.perf_counter()
                if way.preallocated and hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(fd, 0, written)
                self._spread(
                    way, written, lambda at, part: _write_all(fd, source[part], at), source.nbytes
                )
                if written != nbytes:
                    os.ftruncate(fd, nbytes)
                _flush(fd)
                return time.perf_counter() - start
        finally:
            path.unlink(missing_ok=True)
            settle(self._directory)

    def _read(self, way: Way, nbytes: int) -> float:
        flags = os.O_RDONLY | (os.O_DIRECT if way.direct else 0)
        target = memoryview(self._target)
        with opened(self._file, flags) as fd:
            start = time.perf_counter()
            size = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES if way.direct else nbytes
            self._spread(way, size, lambda at, part: _read_all(fd, target[part], at), target.nbytes)
            return time.perf_counter() - start

    def _copy(self, way: Way, nbytes: int) -> float:
        def copy(_: int, part: slice) -> None:
            np.copyto(self._target[part], self._source[part])

        start = time.perf_counter()
        share = min(way.block_nbytes, self._source.nbytes) // way.threads
        self._spread(Way(way.threads, max(share, 1)), nbytes, copy, self._source.nbytes)
        return time.perf_counter() - start

    def _spread(self, way: Way, nbytes: int, work: Callable[[int, slice], None], span: int) -> None:
        # Blocks in turn to every thread; block `at` uses the part of the buffer that it falls on.
        block = min(way.block_nbytes, span)
        per_span = span // block

        def run(first: int) -> None:
            for index in range(first, -(-nbytes // block), way.threads):
                at = index * block
                begin = index % per_span * block
                work(at, slice(begin, begin + min(block, nbytes - at)))

        if way.threads == 1:
            run(0)
            return
        for future in [self._pool.submit(run, first) for first in range(way.threads)]:
            future.result()

    def _fill(self, nbytes: int) -> None:
        # The file that is read has whole pages, so that direct reads find no short tail.
        size = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
        if self._file_nbytes == size:
            return
        self._file.unlink(missing_ok=True)
        way = Way(1, 16 * MIB)
        source = memoryview(self._source)
        with opened(self._file, os.O_CREAT | os.O_EXCL | os.O_WRONLY) as fd:
            self._spread(
                way, size, lambda at, part: _write_all(fd, source[part], at), source.nbytes
            )
            os.fsync(fd)
        self._file_nbytes = size

    def _read_cold(self, way: Way, nbytes: int) -> float:
        chill(self._file)
        return self._read(way, nbytes)


def _fastest(
    ways: list[Way], probe: Callable[[Way], float], nbytes: int
) -> tuple[Way, dict[str, float]]:
    best = {way: min(probe(way) for _ in range(PROBE_ROUNDS)) for way in ways}
    rates = {str(way): round(nbytes / seconds / 1e9, 2) for way, seconds in best.items()}
    return min(best, key=best.__getitem__), rates


def _huge_buffer(nbytes: int) -> np.ndarray:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(memory, dtype=np.uint8)
    buffer.fill(1)
    return buffer


def _direct_works(directory: Path, source: np.ndarray) -> bool:
    if not hasattr(os, "O_DIRECT"):
        return False
    path = directory / "floor-direct.bin"
    try:
        with opened(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT) as fd:
            os.pwrite(fd, memoryview(source)[:PAGE_NBYTES], 0)
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def _read_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.preadv(fd, [data], offset)
        if not count:
            raise EOFError(f"the probe's file ends at byte {offset}")
        data, offset = data[count:], offset + count


def _flush(fd: int) -> None:
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        os.fsync(fd)
