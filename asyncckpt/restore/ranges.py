"""Ranges of data files that are read by one call each."""

# Rule: every batch is in exactly one read, and a read that is not `together` has exactly one batch.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from asyncckpt.planning.restore import ReadBatch
from asyncckpt.ports import StoreCapabilities

SPAN_NBYTES = 64 << 20
"""Longest run, before it is cut."""

ASIDE_NBYTES = 4 << 20
"""Most bytes of small chunks that are read with the large ones around them."""

RUN_NBYTES = 16 << 20
"""Approximate size of one request that reads adjacent chunks straight into destinations: it costs
as much as reading three megabytes."""

LOCAL_RUN_NBYTES = 32 << 20
"""The same for one call that reads a local file: a thread that ends one and begins another takes as
long as reading two megabytes from the page cache. Cancelling a restore waits for these calls."""

RUN_MIN_NBYTES = 8 << 20
"""Shortest call towards the end of a restore: a stream of an object store still reaches two thirds
of its throughput."""

SLACK = 8
"""Calls exceed these sizes by at most an eighth, to end where a chunk ends and to leave no small
remainder for another call, unless that follows a chunk as large."""


class Read(NamedTuple):
    """One call that reads.

    Attributes:
        batches: adjacent batches of one file, by offset.
        together: each batch goes straight into its destination or into memory of its own; if not,
            there is one batch, which goes through slots.
    """

    batches: Sequence[ReadBatch]
    together: bool


Begins = Callable[[ReadBatch], bool]
"""Whether a run may begin with a batch, because it needs no slot."""


def reads_of(
    batches: Sequence[ReadBatch], begins: Begins, capabilities: StoreCapabilities, streams: int
) -> Sequence[Read]:
    """Return the reads of these batches: in file order, or from an object store the longest first.

    A read is no longer than the share of one of `streams` in the remaining bytes: when the last
    ones begin, no long one is still running (guided self-scheduling, Polychronopoulos and Kuck
    1987).
    """
    far = capabilities.read_copies > 0
    most = RUN_NBYTES if far else LOCAL_RUN_NBYTES
    runs = list(_runs(batches, begins, capabilities.read_gap_nbytes))
    left = sum(span(run.batches) for run in runs)
    reads: list[Read] = []
    for run in runs:
        reads += _evenly(run, min(max(left // streams, RUN_MIN_NBYTES), most))
        left -= span(run.batches)
    return sorted(reads, key=lambda read: span(read.batches), reverse=True) if far else reads


def span(batches: Sequence[ReadBatch]) -> int:
    """Return the bytes from the start of the first batch to the end of the last."""
    return batches[-1].offset + batches[-1].nbytes - batches[0].offset


def _runs(batches: Sequence[ReadBatch], begins: Begins, gap_nbytes: int) -> Iterator[Read]:
    """Yield runs of adjacent batches, small ones between them included; others one by one."""
    run: list[ReadBatch] = []
    aside = 0
    for batch in batches:
        slotless = begins(batch)
        small = aside + batch.nbytes <= ASIDE_NBYTES
        if run and (slotless or small) and _continues(run, batch, gap_nbytes):
            aside += 0 if slotless else batch.nbytes
            run.append(batch)
            continue
        if run:
            yield Read(run, True)
        run, aside = [], 0
        if slotless:
            run.append(batch)
        else:
            yield Read([batch], False)
    if run:
        yield Read(run, True)


def _continues(run: Sequence[ReadBatch], batch: ReadBatch, gap_nbytes: int) -> bool:
    first, last = run[0], run[-1]
    return (
        batch.file == last.file
        and 0 <= batch.offset - last.offset - last.nbytes <= gap_nbytes
        and batch.offset + batch.nbytes - first.offset <= SPAN_NBYTES
    )


def _evenly(run: Read, nbytes: int) -> Iterator[Read]:
    """Yield a run as reads of about equal size, near `nbytes` but not far above it."""
    most = nbytes + nbytes // SLACK
    ends = [batch.offset + batch.nbytes for batch in run.batches]
    first = 0
    while first < len(ends):
        start = run.batches[first].offset
        left = ends[-1] - start
        share = left / max(1, -(-left // most))
        # Cut where a chunk ends, as close to an even share of the run as possible.
        last = first
        while last + 1 < len(ends):
            before, after = ends[last] - start, ends[last + 1] - start
            if after > most or after - share > share - before:
                break
            last += 1
        if ends[-1] - ends[last] <= nbytes // SLACK and left <= RUN_NBYTES + RUN_NBYTES // SLACK:
            last = len(ends) - 1
        yield Read(run.batches[first : last + 1], run.together)
        first = last + 1
