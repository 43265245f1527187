"""The commit by itself: what it writes, in which order, and what its record says."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import numpy as np

from asyncckpt.flow.threads import Workers
from asyncckpt.format.chunks import ChunkIndex
from asyncckpt.format.crc import crc32c
from asyncckpt.format.record import decode_record
from asyncckpt.format.zarr3 import CRC_NBYTES
from asyncckpt.options import SaveOptions
from asyncckpt.reports import FileInfo
from asyncckpt.save.commit import Commit
from asyncckpt.save.index import Payload
from asyncckpt.save.snapshot import SaveRequest
from tests.save.staging import Staged, noise

SAVE_ID = "ab" * 16


class Files:
    """An attempt that keeps what it is given."""

    def __init__(self) -> None:
        self.content: dict[str, bytearray] = {}
        self.log: list[tuple[str, str]] = []

    async def put(self, path: str, *blocks: Any, **_: Any) -> None:
        self.log.append(("put", path))
        self.content[path] = bytearray(b"".join(blocks))

    def source(self, path: str) -> str | None:
        return None


def commit_of(staged: Staged, workers: Workers) -> tuple[Commit, Files]:
    attempt: Any = Files()
    request = SaveRequest(
        name="7",
        step=7,
        snapshot=staged.snapshot,
        metadata={"tokens": 5},
        metrics={"loss": 0.5},
        overwrite=False,
        options=SaveOptions(),
        progress=None,
        stall_first=False,
    )

    async def opened() -> Any:
        return attempt

    return Commit(opened, staged.layout, request, save_id=SAVE_ID, compute=workers), attempt


def payload_of(staged: Staged, names: tuple[str, ...]) -> Payload:
    plan = staged.plan
    extents = ChunkIndex(
        file=plan.row_file.copy(),
        offset=plan.row_offset.copy(),
        nbytes=plan.row_payload + CRC_NBYTES,
        crc32c=np.arange(len(plan.row_payload), dtype=np.uint32),
    )
    files = list(map(FileInfo, names, plan.file_nbytes, range(len(names))))
    payloads = [bytes(int(plan.row_payload[row])) for row in plan.inline]
    inline = [payload + crc32c(payload).to_bytes(CRC_NBYTES, "little") for payload in payloads]
    return Payload(extents, b"".join(inline), files)


async def test_the_record_lists_every_file_with_size_and_checksum(workers: Workers) -> None:
    staged = Staged({"a": noise(100_000), "n": np.arange(3), "s": "text", "step": 7}, workers)
    commit, attempt = commit_of(staged, workers)
    await commit.put_orbax()
    made = await commit.put_index(payload_of(staged, (f"d/{SAVE_ID}-0",)))
    record = decode_record(made.record, location="here")
    assert (record.save_id, record.step, record.metadata) == (SAVE_ID, 7, {"tokens": 5})
    assert dict(record.metrics) == {"loss": 0.5}
    data, *others = record.files
    assert (data.path, data.nbytes) == (f"default/d/{SAVE_ID}-0", staged.plan.file_nbytes[0])
    assert {entry.path for entry in others} == set(attempt.content)
    for entry in others:
        content = attempt.content[entry.path]
        assert (entry.nbytes, entry.crc32c) == (len(content), crc32c(content)), entry.path
    assert made.stored_nbytes == sum(entry.nbytes for entry in record.files) + len(made.record)
    assert made.file_count == len(record.files) + 1
    assert json.loads(made.record)["plan_digest"] == staged.layout.digest


async def test_an_index_that_is_made_again_has_a_name_and_a_record_of_its_own(
    workers: Workers,
) -> None:
    staged = Staged({"a": noise(100_000)}, workers)
    commit, attempt = commit_of(staged, workers)
    first = await commit.put_index(payload_of(staged, ("d/x-0",)))
    second = await commit.put_index(payload_of(staged, ("d/x-0.r1",)))
    paths = [
        [entry.path for entry in decode_record(made.record, location="here").files]
        for made in (first, second)
    ]
    assert paths[0][:2] == ["default/d/x-0", f"default/d/{SAVE_ID}-index"]
    assert paths[1][:2] == ["default/d/x-0.r1", f"default/d/{SAVE_ID}-index1"]
    assert [path for _, path in attempt.log if "-index" in path] == [paths[0][1], paths[1][1]]


async def test_orbax_files_are_written_at_the_same_time(workers: Workers) -> None:
    staged = Staged({"a": noise(100), "step": 1}, workers)
    commit, attempt = commit_of(staged, workers)
    begun: list[str] = []
    everybody = asyncio.Event()

    async def put(path: str, data: Any, **_: Any) -> None:
        begun.append(path)
        if len(begun) == len(staged.layout.orbax or {}):
            everybody.set()
        await everybody.wait()

    attempt.put = put  # type: ignore[method-assign]
    async with asyncio.timeout(30):
        await commit.put_orbax()
    assert sorted(begun) == sorted(f"default/{path}" for path in staged.layout.orbax or {})


async def test_a_process_without_orbax_files_opens_no_attempt_for_them(workers: Workers) -> None:
    staged = Staged({"a": noise(1000)}, workers)
    staged.layout = dataclasses.replace(staged.layout, orbax=None)
    commit, attempt = commit_of(staged, workers)

    async def opened() -> Any:
        raise AssertionError

    commit.opened = opened
    await commit.put_orbax()
    assert attempt.log == []
