"""Sizes of data files and requests, and requests in flight, from the measured link.

The model: `streams` requests are in flight, each takes the latency and its bytes at the bandwidth
of one stream, and together they carry no more than the link. Of all sizes that fit the budget, the
smallest one that comes within `NEAR` of the fastest is chosen: larger ones only cost memory. Among
these, sizes at which each stream sends one file come first.
"""

# Rule 1: the budget wins over every other rule: (streams + 1) data files with the client's copies
#   fit.
# Rule 2: a data file is one window and one request, which has no other to wait for.
# Rule 3: sizes come from a short list, and the last choice is kept while nothing is much faster, so
#   that neither the plan of a state nor the pool of its windows is rebuilt at every save.

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from asyncckpt.options import DEFAULT_CHUNK_NBYTES, MIB, PAGE_NBYTES
from asyncckpt.planning.pack import SPARE, WAVES, even_count

WINDOWS_MIB = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Sizes of windows smaller than a chunk."""

WINDOW_CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Chunks in larger windows: room for part of a chunk would be padding."""

LEAST_WINDOW_NBYTES = 1 * MIB
"""Smallest unit that is staged at once."""

LEAST_NBYTES = 8 * MIB
"""Smaller requests spend most of their time on latency, and small files cost a request each in
every listing and deletion; only a budget that leaves half of the streams idle makes them."""

PUT_THRESHOLD_NBYTES = 128 * MIB
"""Largest file sent by one request: at 85 MB/s it takes one and a half seconds, which is what a
retry costs."""

FEW_FILES = 8192
"""Data files that a state may have for free; more are a burden for every listing and deletion."""

NEAR = 1.07
"""A size counts as fast if it takes this much longer than the fastest one: half of the memory for
the last 7 % of what latency costs, and a margin below the tenth that may be lost."""

AT_ONCE_NBYTES = 34 * MIB
"""Files of up to two chunks are sent by one request of each stream, where that is enough for the
state and about as fast: every further request may be a slow one. Larger files, when slow, would
hold up a save for longer than others gain."""

GAIN = 1.10
"""How much longer the last choice may take than the best before it is dropped."""

ASSUMED_LATENCY_S = 0.05
"""Time to the first byte of object stores, until it was measured."""

ASSUMED_STREAM_NBYTES_PER_S = 85e6
"""What one connection to S3 carries (AWS's own figure for ranged reads), until it was measured."""

STAGING_NBYTES_PER_S = 5e9
"""What two cores copy and checksum: the last stream begins when the first of all its files is
staged, so that large files keep streams waiting."""

STRETCH = 1.125
"""How much longer files may be than what the caller asks for, where all streams then send one file
less."""

REQUEST_S = 0.001
"""What every request costs a client in processor time, which no concurrency hides (s3fs: 0.8 to
1.1 ms; others less)."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Measurements of a link, and how many streams it rewards.

    Attributes:
        latency_s: seconds of a request beside its transfer.
        stream_nbytes_per_s: bandwidth of one stream.
        link_nbytes_per_s: bandwidth of all streams together; None while it is unknown.
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
        window_nbytes: size of the buffer that holds one, a multiple of the page.
        concurrency: requests in flight.
        expected_s: seconds that the model expects the upload to take.
        asked_nbytes: data-file size that the caller asked for, or None.
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
        """Sizes of files and windows: what the plan of a save depends on."""
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
        budget_nbytes: staging memory, copies by the client included.
        copies: copies of a body that the client makes.
        chunk_nbytes: target size of a chunk; windows that hold whole chunks are preferred.
        data_file_nbytes: data-file size that the caller asks for; files are shorter, or longer by
            up to `STRETCH`, where all streams then send equally many. Larger than one request may
            be, it is clamped.
        last: the previous choice, kept unless something is a tenth faster.
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
    """Yield sizes of files that the store takes, whatever the memory."""
    whole = chunk_nbytes + PAGE_NBYTES  # a chunk and its trailer, up to the next page
    whole *= max(1, DEFAULT_CHUNK_NBYTES // whole)
    sizes = {size * MIB for size in WINDOWS_MIB if size * MIB < whole}
    sizes |= {count * whole for count in WINDOW_CHUNKS}
    for size in sizes:
        yield min(_pages(size), PUT_THRESHOLD_NBYTES)


def _shares(nbytes: int, streams: int) -> Iterator[int]:
    """Yield sizes of files with which every stream sends just so many."""
    for waves in range(1, WAVES + 1):
        size = _roomy(nbytes // (waves * streams))
        if LEAST_NBYTES <= size <= PUT_THRESHOLD_NBYTES:
            yield size


def _timed(option: Choice, nbytes: int, traffic: Traffic, room: Callable[[int], int]) -> Choice:
    """Add the streams, for which there is `room`, and the seconds that it then takes.

    Where files are shorter, so that all streams send equally many, windows are so too, unless
    chunks may have been made for the size that was asked for. An option that was timed before
    stays as it is.
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
