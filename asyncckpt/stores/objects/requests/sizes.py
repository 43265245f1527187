"""How large data files and requests are, and how many are in flight, from what a link is like.

The model: `streams` requests are in flight, each takes the latency and its bytes at the bandwidth
of one stream, and together they carry no more than the link. Of all sizes that fit the budget, the
smallest one that comes within `NEAR` of the fastest is taken: what is larger only costs memory.
"""

# Rule 1: the budget wins over every other rule: (streams + 1) windows with the client's copies fit,
#   counted in slots, as the pool of the windows counts them.
# Rule 2: a file of one window is one request, which has no other to wait for. Parts are for files
#   that somebody wants larger than a window may be, and for states of very many files.
# Rule 3: sizes come from a short list, and the last choice stands while nothing is much faster, so
#   that neither the plan of a state nor the pool of its windows is made anew at every save.

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from asyncckpt.options import DEFAULT_CHUNK_NBYTES, MIB, PAGE_NBYTES
from asyncckpt.planning.waves import WAVES

WINDOWS_MIB = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Sizes of windows that are smaller than a chunk."""

WINDOW_CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Chunks in larger ones: a window that holds a part of one is padding."""

LEAST_WINDOW_NBYTES = 1 * MIB
"""Nothing smaller is ever staged at once."""

LEAST_NBYTES = 8 * MIB
"""Smaller requests spend most of their time on latency, and small files cost a request each in
every listing and deletion; only a budget that leaves half of the streams idle makes them."""

PUT_THRESHOLD_NBYTES = 128 * MIB
"""Largest file sent by one request: at 85 MB/s it takes one and a half seconds, which is what a
retry costs."""

FEW_FILES = 8192
"""From here on files of several windows are made: ten requests delete so many objects."""

NEAR = 1.08
"""A size counts as fast if it takes this much longer than the fastest one: half of the memory for
the last 8 % of what latency costs, and a margin below the tenth that may be lost."""

GAIN = 1.10
"""How much longer the last choice may take than the best before it is given up."""

ASSUMED_LATENCY_S = 0.05
"""Time to the first byte of object stores, until it was measured."""

ASSUMED_STREAM_NBYTES_PER_S = 85e6
"""What one connection to S3 carries (AWS's own figure for ranged reads), until it was measured."""

REQUEST_S = 0.001
"""What every request costs a client in processor time, which no concurrency hides (s3fs: 0.8 to
1.1 ms; others less)."""


@dataclass(frozen=True, slots=True)
class PartRules:
    """Which multipart uploads a store takes.

    Attributes:
        parallel: parts may be sent in any order and at the same time; without it there are none.
        min_nbytes: least size of a part that is not the last.
        multiple_nbytes: of which parts are multiples.
        max_nbytes: largest part.
        max_count: most parts of an object.
    """

    parallel: bool = False
    min_nbytes: int = 5 * MIB
    multiple_nbytes: int = 1
    max_nbytes: int = 5 << 30
    max_count: int = 9_000


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is known of the link, and how many streams are worth while on it.

    Attributes:
        latency_s: seconds of a request beside its transfer.
        stream_nbytes_per_s: bandwidth of one stream.
        link_nbytes_per_s: what all streams carry together at most; None while that is unknown.
        streams: requests in flight, at most.
    """

    latency_s: float
    stream_nbytes_per_s: float
    link_nbytes_per_s: float | None
    streams: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Sizes of a save.

    Attributes:
        data_file_nbytes: size at which a data file is sealed.
        window_nbytes: size of a request; a file is one window, or its parts are windows.
        concurrency: requests in flight.
        expected_s: seconds that the model expects the upload to take.
        asked_nbytes: the size of data files that was asked for, or None.
        even_streams: as `ports.Sizes.even_streams`.
    """

    data_file_nbytes: int
    window_nbytes: int
    concurrency: int
    expected_s: float
    asked_nbytes: int | None = None
    even_streams: int | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """Of files and windows: what the plan of a save depends on."""
        return self.data_file_nbytes, self.window_nbytes

    @property
    def of_parts(self) -> bool:
        """Whether files are sent as several windows."""
        return self.data_file_nbytes > self.window_nbytes


def choose(
    nbytes: int,
    traffic: Traffic,
    *,
    budget_nbytes: int,
    copies: int,
    slot_nbytes: int,
    chunk_nbytes: int = DEFAULT_CHUNK_NBYTES,
    data_file_nbytes: int | None = None,
    put_max_nbytes: int = PUT_THRESHOLD_NBYTES,
    parts: PartRules | None = None,
    last: Choice | None = None,
) -> Choice:
    """Sizes for a state of `nbytes`, as fast as the model knows within the budget.

    Args:
        nbytes: what is to be saved.
        traffic: what the link is like.
        budget_nbytes: staging memory, copies by the client included.
        copies: copies of a body that the client makes.
        slot_nbytes: unit of the budget.
        chunk_nbytes: target size of a chunk; windows that hold whole chunks are preferred.
        data_file_nbytes: size of data files that somebody asks for.
        put_max_nbytes: largest body of one request that is not a part.
        parts: the store's multipart uploads; None where there are none.
        last: what was chosen before, which stands unless something is a tenth faster.
    """
    memory = _Memory(budget_nbytes, copies, slot_nbytes)
    tight = memory.streams(LEAST_NBYTES) < traffic.streams // 2
    put_max_nbytes = min(put_max_nbytes, PUT_THRESHOLD_NBYTES) // PAGE_NBYTES * PAGE_NBYTES
    options = [
        option
        for option in _options(
            nbytes, chunk_nbytes, data_file_nbytes, put_max_nbytes, parts or PartRules()
        )
        if memory.streams(option.window_nbytes) >= 1
        and (tight or option.window_nbytes >= min(LEAST_NBYTES, put_max_nbytes))
    ]
    asked = [option for option in options if option.data_file_nbytes == data_file_nbytes]
    smallest = Choice(LEAST_WINDOW_NBYTES, LEAST_WINDOW_NBYTES, 1, 0.0, data_file_nbytes)
    timed = [_timed(option, nbytes, traffic, memory) for option in asked or options or [smallest]]
    fastest = min(option.expected_s for option in timed)
    if last is not None and last.asked_nbytes == data_file_nbytes:
        for option in timed:
            if option.sizes == last.sizes and option.expected_s <= GAIN * fastest:
                return _even(option, nbytes, last)
    near = [option for option in timed if option.expected_s <= NEAR * fastest]
    chosen = min(near, key=lambda option: (option.of_parts, option.window_nbytes))
    return _even(chosen, nbytes, None)


def fits_chunk_nbytes(chunk_nbytes: int, window_nbytes: int) -> int:
    """The target size of chunks with which a chunk and its trailer lie in one window."""
    return min(chunk_nbytes, window_nbytes - PAGE_NBYTES)


def _even(choice: Choice, nbytes: int, last: Choice | None) -> Choice:
    """The choice with the streams whose ends the plan evens out, those of `last` if near."""
    streams = choice.concurrency
    if choice.of_parts or nbytes > WAVES * streams * choice.data_file_nbytes:
        return choice
    before = last.even_streams if last is not None else None
    if before is not None and max(before, streams) * 2 <= min(before, streams) * 3:
        streams = before
    return replace(choice, even_streams=streams)


@dataclass(frozen=True, slots=True)
class _Memory:
    budget_nbytes: int
    copies: int
    slot_nbytes: int

    def streams(self, window_nbytes: int) -> int:
        """Windows that can be in flight while one more is being filled."""
        held = -(-window_nbytes * (1 + self.copies) // self.slot_nbytes) * self.slot_nbytes
        return self.budget_nbytes // held - 1


def _options(
    nbytes: int,
    chunk_nbytes: int,
    data_file_nbytes: int | None,
    put_max_nbytes: int,
    parts: PartRules,
) -> Iterator[Choice]:
    """Everything that the store takes, whatever the memory."""
    whole = chunk_nbytes + PAGE_NBYTES  # a chunk and its trailer, up to the next page
    whole *= max(1, DEFAULT_CHUNK_NBYTES // whole)
    sizes = {size * MIB for size in WINDOWS_MIB if size * MIB < whole}
    sizes |= {count * whole for count in WINDOW_CHUNKS}
    sizes = {min(_up(size, PAGE_NBYTES), put_max_nbytes) for size in sizes}
    if data_file_nbytes is not None:
        sizes = {size for size in sizes if size < data_file_nbytes}
        if data_file_nbytes <= put_max_nbytes:
            window = _up(data_file_nbytes, PAGE_NBYTES)
            yield Choice(data_file_nbytes, window, 0, 0.0, data_file_nbytes)
    for size in sizes:
        yield Choice(size, size, 0, 0.0, data_file_nbytes)
        window = _up(size, math.lcm(PAGE_NBYTES, parts.multiple_nbytes))
        wanted = data_file_nbytes
        if wanted is None:
            wanted = window * -(-nbytes // (window * FEW_FILES))
        if (
            parts.parallel
            and wanted > window
            and parts.min_nbytes <= window <= parts.max_nbytes
            and -(-wanted // window) <= parts.max_count
        ):
            yield Choice(wanted, window, 0, 0.0, data_file_nbytes)


def _timed(option: Choice, nbytes: int, traffic: Traffic, memory: _Memory) -> Choice:
    """The option with the streams that it leaves memory for, and what it then takes."""
    window = option.window_nbytes
    streams = max(1, min(traffic.streams, memory.streams(window)))
    windows = max(1, -(-nbytes // window))
    one_s = traffic.latency_s + min(window, nbytes) / traffic.stream_nbytes_per_s
    seconds = -(-windows // streams) * one_s
    if traffic.link_nbytes_per_s is not None:
        seconds = max(seconds, nbytes / traffic.link_nbytes_per_s + traffic.latency_s)
    files = max(1, -(-nbytes // option.data_file_nbytes))
    requests = windows
    if option.of_parts:  # a request begins the upload and another completes it
        requests += 2 * files
        seconds += 2 * traffic.latency_s
    # Very many objects are a burden for everybody who lists or deletes them later.
    requests += max(0, files - FEW_FILES)
    return replace(option, concurrency=streams, expected_s=seconds + requests * REQUEST_S)


def _up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step
