"""What processes exchange: who shares what, and how streams are cut into pieces."""

from __future__ import annotations

import time
from collections import defaultdict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.planning.streams import Sharing, encoded_rows, piece_nbytes, share, streams

ROWS = 40


@st.composite
def jobs(draw: st.DrawFn) -> tuple[dict[int, list[int]], list[int], list[int], list[int]]:
    """What each process wants, and where every chunk is; some chunks are in the index."""
    count = draw(st.integers(1, 6))
    kinds = draw(st.lists(st.sets(st.integers(0, ROWS - 1)), min_size=1, max_size=count))
    wants = {p: sorted(draw(st.sampled_from(kinds))) for p in range(count)}
    nbytes = draw(st.lists(st.integers(4, 70_000), min_size=ROWS, max_size=ROWS))
    files = draw(st.lists(st.integers(-1, 2), min_size=ROWS, max_size=ROWS))
    offsets, ends = [], defaultdict(int)
    for file, size in zip(files, nbytes, strict=True):
        offsets.append(ends[file])
        ends[file] += size + draw(st.sampled_from([0, 0, 7, 5000]))
    return wants, files, offsets, nbytes


@given(jobs(), st.sampled_from([1, 1 << 17, 1 << 30]), st.integers(0, 9))
def test_pieces_cover_what_several_want_once_and_nobody_waits_in_a_circle(
    job: tuple[dict[int, list[int]], list[int], list[int], list[int]], batch: int, first: int
) -> None:
    wants, files, offsets, nbytes = job
    sharing = share({p: encoded_rows(np.array(w, int)) for p, w in wants.items()}, ROWS)
    sharing = Sharing.decoded(sharing.encoded())
    for row in range(ROWS):
        who = tuple(p for p, wanted in wants.items() if row in wanted)
        number = sharing.stream[row]
        assert (sharing.members[number] == who) if len(who) > 1 else (number == -1)
    found = streams(
        sharing,
        file=np.array(files),
        offset=np.array(offsets),
        nbytes=np.array(nbytes),
        first_batch=first,
        batch_nbytes=batch,
    )
    taken: dict[int, set[int]] = defaultdict(set)
    for number, stream in enumerate(found):
        rows = [r for r in range(ROWS) if sharing.stream[r] == number and files[r] >= 0]
        assert sorted(stream.rows.tolist()) == rows
        assert stream.nbytes == sum(nbytes[r] for r in rows)
        for member in stream.members:
            assert taken[member].isdisjoint(stream.batches)
            taken[member].update(stream.batches)
        at = 0
        for each in stream.batches:
            assert each >= first
            for member in stream.members:
                begin, end = stream.piece(member, each)
                assert begin == at and end - begin <= stream.piece_nbytes
                at = end
            parts = stream.parts(each)
            assert (
                sum(part.stop - part.start for part in parts)
                == at - stream.piece(stream.members[0], each)[0]
            )
        assert at == stream.nbytes


def places(runs: list[tuple[int, int, int]]) -> np.ndarray:
    """File and position of every byte of runs, each of which has a file, an offset and a length."""
    rows = [np.stack([np.full(n, file), np.arange(at, at + n)]) for file, at, n in runs]
    return np.concatenate([np.empty((2, 0), int), *rows], axis=1)


@given(jobs(), st.data(), st.sampled_from([0, 4096]))
def test_ranges_hold_the_bytes_of_the_stream(
    job: tuple[dict[int, list[int]], list[int], list[int], list[int]], data: st.DataObject, gap: int
) -> None:
    _, files, offsets, nbytes = job
    everything = encoded_rows(np.arange(ROWS))
    (stream,) = streams(
        share({0: everything, 1: everything}, ROWS),
        file=np.array(files),
        offset=np.array(offsets),
        nbytes=np.array(nbytes),
        first_batch=0,
        batch_nbytes=1 << 20,
    )
    begin = data.draw(st.integers(0, stream.nbytes))
    end = data.draw(st.integers(begin, min(stream.nbytes, begin + 200_000)))
    own = [(files[row], offsets[row], nbytes[row]) for row in stream.rows]
    found: list[tuple[int, int, int]] = []
    for each in stream.ranges(begin, end, gap):
        at = each.offset
        for run, skipped in zip(each.runs, [*each.gaps, 0], strict=True):
            assert run > 0 and 0 <= skipped <= gap
            found.append((each.file, at, run))
            at += run + skipped
    assert np.array_equal(places(found), places(own)[:, begin:end])


def test_the_cost_of_a_range_is_that_of_its_runs() -> None:
    """Adding up the runs so far for each of these would take 20 s."""
    count = 50_000
    (stream,) = streams(
        Sharing([(0, 1)], np.zeros(count, int)),
        file=np.zeros(count, int),
        offset=np.arange(count) * 4096,
        nbytes=np.full(count, 2048),
        first_batch=0,
        batch_nbytes=64 << 20,
    )
    begun = time.process_time()
    (found,) = stream.ranges(0, stream.nbytes, 4096)
    assert time.process_time() - begun < 4
    assert (len(found.runs), len(found.gaps)) == (count, count - 1)


@settings(max_examples=20)
@given(st.integers(2, 10_000))
def test_pieces_of_one_number_of_members_have_one_size(count: int) -> None:
    size = piece_nbytes(count, 64 << 20)
    assert 16 << 10 <= size <= 32 << 20
    assert size * count <= 160 << 20


def test_the_cost_is_that_of_distinct_wants() -> None:
    """Ten thousand replicas of one state are as one."""
    everything = encoded_rows(np.arange(100_000))
    sharing = share(dict.fromkeys(range(10_000), everything), 100_000)
    assert sharing.members == [tuple(range(10_000))]
    assert len(everything) < 200
    assert len(sharing.encoded()) < 64 << 10
