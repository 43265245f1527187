"""Sizes of data files and requests, and number of requests in flight, from the measured link.

The model: `streams` requests are in flight; each takes the latency plus its bytes at one stream's
bandwidth; together they do not exceed the link. Of all sizes that fit the budget, the smallest
within a factor `NEAR` of the fastest is chosen, since larger ones only cost memory. Sizes at which
each stream sends a single file are preferred.
"""

# Rule 1: the budget wins over every other rule: (streams + 1) data files with the client's copies
#   fit.
# Rule 2: a data file is one window and one request, so it waits for no other request.
# Rule 3: sizes come from a short list, and the last choice is kept unless another is much faster,
#   so that saves reuse the plan of a state and the pool of its windows.

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from asyncckpt.options import DEFAULT_CHUNK_NBYTES, MIB, PAGE_NBYTES
from asyncckpt.planning.pack import SPARE, WAVES, even_count

WINDOWS_MIB = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Window sizes below one chunk."""

WINDOW_CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Chunks per larger window: room for part of a chunk would be padding."""

LEAST_WINDOW_NBYTES = 1 * MIB
"""Smallest window."""

LEAST_NBYTES = 8 * MIB
"""Smallest data-file size to choose from, unless the caller asks for less or the budget would leave
half of the streams idle; small states are divided further. Smaller requests are mostly latency, and
every file costs a request in listings and deletions."""

PUT_THRESHOLD_NBYTES = 128 * MIB
"""Largest file sent by one request: it takes 1.5 s at 85 MB/s, which is the cost of a retry."""

FEW_FILES = 8192
"""Data files that a state may have without a penalty for slower listings and deletions."""

NEAR = 1.07
"""A size counts as fast if it takes up to this much longer than the fastest: saves half of the
memory for 7 % of the time, and leaves a margin below the 10 % that may be lost."""

AT_ONCE_NBYTES = 34 * MIB
"""Largest file (two chunks) for which one request per stream is preferred, if that suffices for the
state and is about as fast: every further request may be a slow one. A slow request with a larger
file would delay a save by more than that gains."""

GAIN = 1.10
"""How much longer than the fastest choice the last one may take before it is dropped."""

ASSUMED_LATENCY_S = 0.05
"""Time to the first byte of object stores, until it is measured."""

ASSUMED_STREAM_NBYTES_PER_S = 85e6
"""Bandwidth of one connection to S3 (AWS's own figure for ranged reads), until it is measured."""

STAGING_NBYTES_PER_S = 5e9
"""Copy and checksum rate of two cores: the last stream begins only when the first file of every
stream is staged, so large files keep streams waiting."""

STRETCH = 1.125
"""How much larger than requested files may be, if every stream then sends one file less."""

REQUEST_S = 0.001
"""Processor time of a request, which concurrency does not hide (s3fs: 0.8 to 1.1 ms; others
less)."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Measurements of a link.

    Attributes:
        latency_s: seconds of a request without its transfer.
        stream_nbytes_per_s: bandwidth of one stream.
        link_nbytes_per_s: bandwidth of all streams together; None if unknown.
        streams: maximum number of requests in flight.
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
        window_nbytes: size of its buffer, a multiple of the page size.
        concurrency: requests in flight.
        expected_s: upload time according to the model, in seconds.
        asked_nbytes: data-file size requested by the caller, or None.
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
        """Sizes of files and windows, on which the plan of a save depends."""
        return self.data_file_nbytes, self.window_nbytes


def choose(
    nbytes: int,
    traffic: Traffic,
    *,
    budget_nbytes: int,
    copies: int,
    chunk_nbytes: int = DEFAULT_CHUNK_NBYTES,
    data_file_nbytes: int | None = None,
    last: Choice | None = None,
) -> Choice:
    """Return the sizes for a state of `nbytes` that are fastest within the budget.

    Args:
        nbytes: bytes to be saved.
        traffic: measurements of the link.
        budget_nbytes: staging memory, including copies by the client.
        copies: copies of a body that the client makes.
        chunk_nbytes: target size of a chunk; windows that hold whole chunks are preferred.
        data_file_nbytes: data-file size requested by the caller, clamped to the largest request.
            Files are smaller, or larger by up to `STRETCH`, if all streams then send equally many.
        last: the previous choice, kept unless another is 10 % faster.
    """

    def room(window_nbytes: int) -> int:
        """Return how many windows can be in flight while one more is being filled."""
        return budget_nbytes // (window_nbytes * (1 + copies)) - 1

    tight = room(LEAST_NBYTES) < traffic.streams // 2
    sizes = set(_options(chunk_nbytes))
    shares = set(_shares(nbytes, traffic.streams))
    if data_file_nbytes is not None:
        data_file_nbytes = min(data_file_nbytes, PUT_THRESHOLD_NBYTES)
        sizes = {size for size in sizes if size < data_file_nbytes}
        shares = {size for size in shares if 1 < size / data_file_nbytes <= STRETCH}
        asked = {data_file_nbytes, *shares}
        sizes = {size for size in asked if room(_pages(size)) >= 1} or sizes
    else:
        sizes |= shares
    options = [
        Choice(size, _pages(size), 0, 0.0, data_file_nbytes)
        for size in sorted(sizes)
        if room(_pages(size)) >= 1
        and (tight or data_file_nbytes is not None or size >= LEAST_NBYTES)
    ]
    smallest = Choice(LEAST_WINDOW_NBYTES, LEAST_WINDOW_NBYTES, 1, 0.0, data_file_nbytes)
    timed = [_timed(option, nbytes, traffic, room) for option in options or [smallest]]
    fastest = min(option.expected_s for option in timed)
    if last is not None and last.asked_nbytes == data_file_nbytes and room(last.window_nbytes) >= 1:
        again = _timed(last, nbytes, traffic, room)
        if again.sizes == last.sizes and again.expected_s <= GAIN * fastest:
            return again
    near = NEAR if data_file_nbytes is None else 1.0
    close = [option for option in timed if option.expected_s <= near * fastest]
    at_once = [
        option
        for option in close
        if nbytes <= option.data_file_nbytes * option.concurrency
        and option.data_file_nbytes <= AT_ONCE_NBYTES
    ]
    return min(at_once or close, key=lambda option: option.window_nbytes)


def _options(chunk_nbytes: int) -> Iterator[int]:
    """Yield file sizes that the store takes, regardless of the budget."""
    whole = chunk_nbytes + PAGE_NBYTES  # a chunk and its trailer, up to the next page
    whole *= max(1, DEFAULT_CHUNK_NBYTES // whole)
    sizes = {size * MIB for size in WINDOWS_MIB if size * MIB < whole}
    sizes |= {count * whole for count in WINDOW_CHUNKS}
    for size in sizes:
        yield min(_pages(size), PUT_THRESHOLD_NBYTES)


def _shares(nbytes: int, streams: int) -> Iterator[int]:
    """Yield file sizes at which every stream sends the same number of files."""
    for waves in range(1, WAVES + 1):
        size = _roomy(nbytes // (waves * streams))
        if LEAST_NBYTES <= size <= PUT_THRESHOLD_NBYTES:
            yield size


def _timed(option: Choice, nbytes: int, traffic: Traffic, room: Callable[[int], int]) -> Choice:
    """Return the option with its streams, for which there is `room`, and its expected seconds.

    Shrinks files so that all streams send equally many, and the window with them, unless chunks may
    have been cut for the requested size. The sizes of an option that was timed before stay.
    """
    size, window, streams = option.data_file_nbytes, option.window_nbytes, 0
    while streams < (most := max(1, min(traffic.streams, room(window)))):
        streams = most
        even_streams = option.even_streams or streams
        files = even_count(nbytes, size, even_streams)
        share = -(-nbytes // files)
        few = files <= WAVES * even_streams
        if few and option.even_streams is None:
            size = min(size, max(LEAST_WINDOW_NBYTES, _roomy(share)))
            if option.asked_nbytes is None:
                window = min(window, max(LEAST_NBYTES, _pages(size)))
    one_s = traffic.latency_s + share / traffic.stream_nbytes_per_s
    seconds = min(files, streams) * share / STAGING_NBYTES_PER_S + -(-files // streams) * one_s
    if traffic.link_nbytes_per_s is not None:
        seconds = max(seconds, nbytes / traffic.link_nbytes_per_s + traffic.latency_s)
    requests = files + max(0, files - FEW_FILES)
    return replace(
        option,
        data_file_nbytes=size,
        window_nbytes=window,
        concurrency=streams,
        expected_s=seconds + requests * REQUEST_S,
        even_streams=even_streams if few else None,
    )


def _roomy(nbytes: int) -> int:
    return _pages(int(nbytes * (1 + 2 * SPARE)))


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
