"""Checksums and compression by themselves, on buffers that no stage has made."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard

from asyncckpt.flow.threads import Workers
from asyncckpt.format.codecs import ZSTD, ChunkError
from asyncckpt.format.crc import crc32c
from asyncckpt.format.zarr3 import CRC_NBYTES
from asyncckpt.save import serialize, stage
from asyncckpt.save.serialize import Compressor, WindowChecksums, seal_small
from asyncckpt.save.stage import StagedWindow
from tests.save.staging import SLOT, Staged, noise

TREES = {
    # Chunks of 48 KiB in slots of 64: most of them begin in one window and end in the next.
    "chunks": {"a": noise(5 * SLOT), "b": noise(SLOT + 77, 1)},
    "many short ones": {str(i): noise(2000 + i, i) for i in range(80)},
    "both": {"a": noise(3 * SLOT), **{str(i): noise(3000 + i, i) for i in range(30)}},
    # Copied by element: no part of it is one run of bytes.
    "transposed": {"a": noise(4 * SLOT).reshape(512, 512).T},
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("at_once", [True, False], ids=["copied and sealed", "sealed later"])
async def test_checksums_of_chunks_and_files_are_those_of_their_bytes(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, tree: str, at_once: bool
) -> None:
    monkeypatch.setattr(stage, "CACHED_NBYTES", 10_000)
    monkeypatch.setattr(serialize, "SHORT_NBYTES", 2050)
    staged = Staged(TREES[tree], workers, slots=32)
    plan = staged.plan
    assert any(piece.start for window in plan.windows for piece in window.pieces) or tree[0] == "m"
    for slot in await staged.pool.take(32):
        slot.buffer.fill(0xFF)  # as of an earlier save
        staged.pool.release([slot])
    crcs = np.zeros(len(plan.row_payload), np.uint32)
    file_crcs = [0] * len(plan.file_nbytes)
    checksums = WindowChecksums(crcs, file_crcs)
    items: list[StagedWindow] = []
    seal = checksums.seal if at_once else None
    await staged.staging.windows(items.append, seal)
    # Sealed in any order, and folded in that of the plan.
    sums = [item.sums or checksums.seal(item.window, item.slot.buffer) for item in reversed(items)]
    files = [bytearray(nbytes) for nbytes in plan.file_nbytes]
    for item in items:
        window, slot = item.window, item.slot
        assert (item.sums is not None) == at_once
        checksums.fold(window, slot.buffer, sums.pop())
        end = window.offset + window.nbytes
        files[window.file][window.offset : end] = slot.buffer[: window.nbytes].tobytes()
        # What is written is whole pages.
        assert not slot.buffer[window.nbytes : -(-window.nbytes // 4096) * 4096].any()
        staged.staging.release([slot])
    assert file_crcs == [crc32c(file) for file in files]
    for row, crc in enumerate(crcs.tolist()):
        start = int(plan.row_offset[row])
        end = start + int(plan.row_payload[row])
        file = files[int(plan.row_file[row])]
        assert crc == crc32c(file[start:end])
        assert file[end : end + CRC_NBYTES] == crc.to_bytes(CRC_NBYTES, "little")
        file[start : end + CRC_NBYTES] = bytes(end + CRC_NBYTES - start)
    # Nothing of what the slots held before is between the chunks.
    assert not any(map(any, files))


async def test_compressed_chunks_state_their_size_and_carry_their_checksum(
    workers: Workers,
) -> None:
    pool = Staged({"a": noise(10)}, workers).pool
    slots = await pool.take(2)
    data = np.tile(np.arange(256, dtype=np.uint8), 2 * SLOT // 256)
    slots[0].buffer[:], slots[1].buffer[:] = data[:SLOT], data[SLOT:]
    made = Compressor().compress(slots, [0, 100], [2 * SLOT, 1000], [3, 19])
    for found, start, nbytes in zip(made, (0, 100), (2 * SLOT, 1000), strict=True):
        stored = b"".join(found.blocks)
        assert len(stored) == found.nbytes
        body, trailer = stored[:-CRC_NBYTES], stored[-CRC_NBYTES:]
        assert trailer == found.crc.to_bytes(CRC_NBYTES, "little") and found.crc == crc32c(body)
        assert zstandard.frame_content_size(body) == nbytes
        assert zstandard.decompress(body) == data[start : start + nbytes].tobytes()
    pool.release(slots)


def test_small_chunks_end_with_the_checksum_of_their_payload() -> None:
    payloads = [b"", b"a", noise(900).tobytes(), b"\0" * 7]
    gap = bytes(CRC_NBYTES)
    ends = [0, *itertools.accumulate(len(payload) + CRC_NBYTES for payload in payloads)]
    data = bytearray(b"".join(payload + gap for payload in payloads))
    crcs = seal_small(data, ends)
    assert crcs.tolist() == [crc32c(payload) for payload in payloads]
    assert [bytes(data[a:b]) for a, b in itertools.pairwise(ends)] == [
        payload + crc32c(payload).to_bytes(CRC_NBYTES, "little") for payload in payloads
    ]


@pytest.mark.parametrize("levels", [[3, 3, 3], [1, 3, 1]])
async def test_chunks_of_one_slot_are_compressed_one_by_one_or_by_one_call(
    workers: Workers, levels: list[int]
) -> None:
    staged = Staged({"a": noise(100)}, workers)
    (slot,) = await staged.pool.take(1)
    payloads = [bytes(4000), noise(333).tobytes(), bytes(range(250)) * 9]
    starts = [0, 8000, 16_000]
    for start, payload in zip(starts, payloads, strict=True):
        slot.buffer[start : start + len(payload)] = np.frombuffer(payload, np.uint8)
    made = Compressor().compress([slot], starts, list(map(len, payloads)), levels)
    for payload, stored in zip(payloads, made, strict=True):
        data = b"".join(stored.blocks)
        assert stored.nbytes == len(data) and stored.crc == crc32c(data[:-CRC_NBYTES])
        assert data[-CRC_NBYTES:] == stored.crc.to_bytes(CRC_NBYTES, "little")
        assert zstandard.frame_content_size(data) == len(payload)
        assert ZSTD.decode is not None
        frame = np.frombuffer(data[:-CRC_NBYTES], np.uint8)
        assert ZSTD.decode([frame], len(payload)).tobytes() == payload
    staged.pool.release([slot])


FRAME = zstandard.ZstdCompressor().compress(bytes(1000))
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))


@pytest.mark.parametrize("frame", [FRAME, UNSIZED], ids=["sized", "unsized"])
@pytest.mark.parametrize("cuts", [(), (3,), (1, 9)])
def test_a_frame_decodes_to_the_size_that_is_wanted_or_not_at_all(
    frame: bytes, cuts: tuple[int, ...]
) -> None:
    def parts(data: bytes) -> list[np.ndarray]:
        edges = [0, *cuts, len(data)]
        return [np.frombuffer(data[a:b], np.uint8) for a, b in itertools.pairwise(edges)]

    assert ZSTD.decode is not None
    assert ZSTD.decode(parts(frame), 1000).tobytes() == bytes(1000)
    for nbytes in (0, 1, 999, 1001, 5000):
        with pytest.raises(ChunkError):
            ZSTD.decode(parts(frame), nbytes)
    for bad in (frame[:-1], frame + b"x", frame + frame, b"x" + frame[1:], frame[:5]):
        with pytest.raises(ChunkError):
            ZSTD.decode(parts(bad), 1000)
    # A context that has failed is used again.
    assert ZSTD.decode(parts(frame), 1000).tobytes() == bytes(1000)


def test_frames_are_decoded_by_many_threads_at_the_same_time() -> None:
    frames = [zstandard.ZstdCompressor().compress(bytes([n]) * 50_000) for n in range(40)]

    def decoded(n: int) -> bool:
        assert ZSTD.decode is not None
        found = ZSTD.decode([np.frombuffer(frames[n], np.uint8)], 50_000)
        return found.tobytes() == bytes([n]) * 50_000

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(decoded, list(range(40)) * 5))
