"""What grows with the number of processes, and what does not: counted, not timed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asyncckpt.format.entries import decode_entries, encode_entries
from asyncckpt.planning.streams import Sharing, encoded_rows, share, streams
from benchmarks.scale.costs import commit, messages
from benchmarks.scale.job import REPLICAS, entries_by, even, write_entries

COUNTS = (100, 1_000, 10_000)
OWN = 50
"""Chunks that a process holds."""


@pytest.mark.parametrize("count", COUNTS)
def test_the_own_plan_is_about_own_chunks_only(count: int) -> None:
    """Rows, files and windows are as many in a job of any size."""
    job = even(count, OWN * count // REPLICAS)
    plan = job.plan(count // 2)
    assert len(plan.row_chunk) == OWN
    assert plan.arrays.chunk_count == OWN * count // REPLICAS
    assert len(plan.windows) == len(job.plan(count // 2 + 1).windows) == 1
    assert len(plan.arrays.parts) == 1


@pytest.mark.parametrize("count", COUNTS)
def test_entries_are_as_large_as_what_a_process_has_written(count: int) -> None:
    sizes = []
    for own in (OWN, 2 * OWN, 4 * OWN):
        job = even(count, own * count // REPLICAS)
        plan = job.plan(3)
        entries = decode_entries(encode_entries(entries_by(job, 3, plan)), file="entries")
        assert set(entries.chunk.tolist()) <= set(plan.row_chunk.tolist())
        assert len(entries.checked) == own  # every holder of a replica sends its checksum
        sizes.append(len(encode_entries(entries)))
    assert sizes[2] - sizes[1] <= 2 * (sizes[1] - sizes[0]) + 16
    assert sizes[0] < 1024 + 44 * OWN


def test_what_a_process_says_it_wants_is_no_longer_in_a_larger_job() -> None:
    lengths = []
    for count in COUNTS:
        job = even(count, OWN * count // REPLICAS)
        lengths.append(len(encoded_rows(job.plan(7).row_chunk)))
    assert max(lengths) < 200


def test_ten_thousand_processes_share_streams_of_ten_members_each() -> None:
    count, shards = 10_000, 10_000 // REPLICAS
    wants = [np.arange(OWN) * shards + shard for shard in range(shards)]
    messages_of = list(map(encoded_rows, wants))
    wanted = {process: messages_of[process % shards] for process in range(count)}
    sharing = share(wanted, OWN * shards)
    message = sharing.encoded()
    # A process is in one stream: 10,000 numbers, and some runs.
    assert len(message) < 8 * count
    decoded = Sharing.decoded(message)
    assert decoded.members == [tuple(range(s, count, shards)) for s in range(shards)]
    np.testing.assert_array_equal(decoded.stream, np.arange(OWN * shards) % shards)
    found = streams(
        decoded,
        file=np.zeros(OWN * shards, np.int64),
        offset=np.arange(OWN * shards) * 1000,
        nbytes=np.full(OWN * shards, 1000),
        first_batch=0,
        batch_nbytes=64 << 20,
    )
    # No two of them have a member in common, so that all are exchanged at once.
    assert {stream.batches for stream in found} == {range(1)}


def test_pieces_of_ten_thousand_members_follow_each_other() -> None:
    everybody = encoded_rows(np.arange(100))
    (stream,) = streams(
        share(dict.fromkeys(range(10_000), everybody), 100),
        file=np.zeros(100, np.int64),
        offset=np.arange(100) * (3 << 20),
        nbytes=np.full(100, 3 << 20),
        first_batch=0,
        batch_nbytes=64 << 20,
    )
    for batch in stream.batches:
        pieces = [stream.piece(member, batch) for member in stream.members]
        assert [begin for begin, _ in pieces[1:]] == [end for _, end in pieces[:-1]]
        parts = stream.parts(batch)
        sizes = [end - begin for begin, end in pieces if end > begin]
        assert sum(part.stop - part.start for part in parts) == sum(sizes)
        assert len(parts) == (1 if sizes[0] == stream.piece_nbytes else len(sizes))


def test_a_save_of_a_known_plan_costs_one_message_per_process() -> None:
    few, many = messages(10), messages(100)
    assert few["posts_per_process"] == many["posts_per_process"] == 1
    assert few["posts_of_process_0"] == many["posts_of_process_0"] == 2
    assert many["post_nbytes"] < 64


def test_process_0_commits_what_all_have_written(tmp_path: Path) -> None:
    job = even(2 * REPLICAS, 100)
    write_entries(job, tmp_path)
    found = commit(job, tmp_path)
    assert found["chunks"] == 100
    assert found["record_nbytes"] > 0 and found["index_nbytes"] > 0
