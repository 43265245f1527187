"""What the steps of a save and a restore cost: own plans, process 0's work, messages."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from asyncckpt import options
from asyncckpt.coordinators.beats import Beats
from asyncckpt.coordinators.group import Group
from asyncckpt.coordinators.rounds import Round
from asyncckpt.flow.threads import Workers
from asyncckpt.format.chunks import index_nbytes
from asyncckpt.format.entries import decode_entries
from asyncckpt.format.record_values import ArrayTable, StoredSpec
from asyncckpt.planning.save import SavePlan
from asyncckpt.planning.streams import Sharing, share, streams
from asyncckpt.ports import Buffer
from asyncckpt.restore.exchange.exchanger import BATCH_NBYTES
from asyncckpt.save.commit import Commit
from asyncckpt.save.index import make_catalog
from asyncckpt.save.merge import merge
from asyncckpt.save.plan_cache import Layout
from asyncckpt.save.snapshot import SaveRequest, take_snapshot
from benchmarks.local.planning import save
from benchmarks.measure import peak_nbytes
from benchmarks.scale.job import DIGEST, SAVE_ID, STATE_NBYTES, Figures, Job, even
from tests.coordinators.members import Member

SAMPLES = 5

SILENCE_S = 600.0
"""All processes of a simulated round share one core: none is called silent."""


class _File:
    """A data file that keeps nothing."""

    async def write(self, offset: int, data: object) -> None:
        """Take a part of the file."""

    async def seal(self, nbytes: int) -> None:
        """End the file."""


class _Attempt:
    """An attempt that keeps nothing but the number of its files."""

    location = "nowhere"

    def __init__(self) -> None:
        self.writes = 0

    def source(self, path: str) -> None:
        """Files have their names at once."""

    async def create(self, path: str, *, nbytes: int, window_nbytes: int) -> _File:
        """Open a file."""
        self.writes += 1
        return _File()

    async def put(self, path: str, *blocks: Buffer, in_record: bool = False) -> None:
        """Take a whole file."""
        self.writes += 1


class Laps:
    """Seconds of wall and processor time of stages, and how far memory has grown."""

    def __init__(self) -> None:
        self.figures: Figures = {}
        self._base_nbytes = peak_nbytes()

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        """Time a stage."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.figures[f"{name}_s"] = time.perf_counter() - wall
        self.figures[f"{name}_cpu_s"] = time.process_time() - cpu
        self.figures["peak_nbytes"] = peak_nbytes() - self._base_nbytes


def commit(job: Job, place: Path) -> Figures:
    """Do everything that process 0 does once per schema and once per save."""
    laps = Laps()
    with laps.lap("plan"):
        plan = job.plan(0)
    with laps.lap("names"):
        layout = _layout(plan)
    with laps.lap("entries"):
        entries = [
            decode_entries((place / f"entries-{process}").read_bytes(), file="entries")
            for process in range(job.process_count)
        ]
    snapshot = take_snapshot({name: np.zeros(()) for name in job.names})
    request = SaveRequest("1", 1, snapshot, {}, {}, False, options.SaveOptions(), None, True)
    with laps.lap("merge"):
        merged, late = merge(layout, snapshot, entries, str)
    for chunk in late:
        merged.chunks.file[chunk] = 0
    attempt: Any = _Attempt()

    async def opened() -> Any:
        return attempt

    compute = Workers(1, "scale")
    committing = Commit(opened, layout, request, save_id=SAVE_ID, compute=compute)
    with laps.lap("index"):
        made = asyncio.run(committing.put_index(merged))
    compute.shutdown()
    chunks = plan.arrays.chunk_count
    return {
        **laps.figures,
        "chunks": chunks,
        "record_nbytes": len(made.record),
        "index_nbytes": index_nbytes(chunks),
        "writes": attempt.writes + 1,
    }


def _layout(plan: SavePlan) -> Layout:
    arrays = plan.arrays
    specs: dict[StoredSpec, int] = {}
    spec_of: list[int] = []
    for part in arrays.parts:
        stored = StoredSpec(part.spec, part.grid.chunk_shape, part.layout.zstd_level)
        spec_of.append(specs.setdefault(stored, len(specs)))
    return Layout(
        plan=plan,
        catalog=make_catalog(arrays),
        specs=tuple(specs),
        arrays=ArrayTable(
            list(arrays.names), [spec_of[part] for part in arrays.part.tolist()], arrays.tied
        ),
        pieces={},
        mirrors=(),
        orbax=None,
        notes=(),
        digest="",
        schema_digest=DIGEST,
    )


def own_plan(process_count: int) -> Figures:
    """Time the own plan of three processes, for as much of its own in jobs of any size."""
    job = even(process_count, 100 * process_count)
    seconds: list[float] = []
    for process in (1, process_count // 2, process_count - 1):
        leaves = job.leaves(process)
        for _ in range(SAMPLES):
            start = time.process_time()
            save(leaves, process=process, process_count=process_count)
            seconds.append(time.process_time() - start)
    return {"own_leaves": len(job.names), "own_plan_s": min(seconds)}


def messages(process_count: int) -> Figures:
    """Count the calls of all processes in one round of a save of a known plan."""
    values: dict[str, bytes] = {}
    made = [_Counted(values, index, process_count) for index in range(process_count)]
    hosts = ("host",) * process_count

    async def part(index: int) -> None:
        group = Group(made[index], "a" * 32, index, process_count, hosts, "meeting")
        beats = Beats(group, SILENCE_S)
        round_ = Round(beats, "save", 0, arrival_s=SILENCE_S)

        async def together() -> None:
            if round_.leads:
                await round_.gathered("ready")
                await round_.commit()
                await round_.finish(b"{}")
            else:
                await round_.post("ready", f"{SAVE_ID}-entries-{index}-0".encode())
                await round_.outcome()

        await round_.run(together)

    async def everybody() -> None:
        async with asyncio.TaskGroup() as tasks:
            for index in range(process_count):
                tasks.create_task(part(index))

    asyncio.run(everybody())
    others = made[1:]
    return {
        "posts_per_process": statistics.mean(member.posts for member in others),
        "post_nbytes": statistics.mean(member.nbytes for member in others),
        "posts_of_process_0": made[0].posts,
        "lists_of_process_0": made[0].calls["list"],
    }


class _Counted(Member):
    """A process in a job of many, whose messages but its beats are counted."""

    def __init__(self, values: dict[str, bytes], index: int, count: int) -> None:
        super().__init__(values, index, count)
        self.posts = self.nbytes = 0

    async def put(self, key: str, value: bytes) -> None:
        if "/beat/" not in key:
            self.posts += 1
            self.nbytes += len(value)
        await super().put(key, value)


def sharing(job: Job, place: Path) -> Figures:
    """Agree on what is exchanged in a restore, as process 0 and as one of the others."""
    laps = Laps()
    plan = job.plan(0)
    count = plan.arrays.chunk_count
    wants = [(place / f"wanted-{shard}").read_bytes() for shard in range(job.shard_count)]
    wanted = {process: wants[process % job.shard_count] for process in range(job.process_count)}
    with laps.lap("share"):
        found = share(wanted, count)
        message = found.encoded()
    nbytes = np.full(count, STATE_NBYTES // count)
    with laps.lap("streams"):
        decoded = Sharing.decoded(message)
        streams(
            decoded,
            file=np.maximum(decoded.stream, 0),
            offset=np.arange(count) * nbytes,
            nbytes=nbytes,
            first_batch=0,
            batch_nbytes=BATCH_NBYTES,
        )
    return {
        **laps.figures,
        "wanted_nbytes": statistics.mean(map(len, wants)),
        "sharing_nbytes": len(message),
    }
