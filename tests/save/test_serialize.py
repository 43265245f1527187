"""Checksums and compression by themselves, on buffers that no stage has made."""

from __future__ import annotations

import numpy as np
import zstandard

from asyncckpt.flow.threads import Workers
from asyncckpt.format.crc import crc32c
from asyncckpt.format.zarr3 import CRC_NBYTES
from asyncckpt.save.serialize import Compressor, WindowChecksums, trailed
from tests.save.staging import SLOT, Staged, noise


async def test_checksums_of_chunks_and_files_are_those_of_their_bytes(workers: Workers) -> None:
    """Chunks of 48 KiB in slots of 64: most of them begin in one window and end in the next."""
    tree = {"a": noise(5 * SLOT), "b": noise(SLOT + 77, 1)}
    staged = Staged(tree, workers)
    plan = staged.plan
    crcs = np.zeros(len(plan.row_payload), np.uint32)
    checksums = WindowChecksums(crcs, len(plan.file_nbytes))
    files = [bytearray(nbytes) for nbytes in plan.file_nbytes]

    def seal(item: object) -> None:
        window, slot = item.window, item.slot  # type: ignore[attr-defined]
        checksums.seal(window, slot.buffer)
        end = window.offset + window.nbytes
        files[window.file][window.offset : end] = slot.buffer[: window.nbytes].tobytes()
        staged.staging.give([slot])

    await staged.staging.windows(seal, lambda: None)
    assert checksums.file_crcs == [crc32c(file) for file in files]
    for row, crc in enumerate(crcs.tolist()):
        start = int(plan.row_offset[row])
        end = start + int(plan.row_payload[row])
        stored = files[int(plan.row_file[row])]
        assert crc == crc32c(stored[start:end])
        assert stored[end : end + CRC_NBYTES] == crc.to_bytes(CRC_NBYTES, "little")


def test_the_stored_form_of_a_small_value_ends_with_its_checksum() -> None:
    stored, crc = trailed(b"value")
    assert stored == b"value" + crc.to_bytes(CRC_NBYTES, "little") and crc == crc32c(b"value")


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
