"""`python -m benchmarks.scale`: what planning, committing and agreeing cost up to 10,000 processes.

A Llama-like state of 10 TB (W1: bf16 parameters, fp32 master copy, m and v) is cut over the shards
of an HSDP job with ten replicas. No array exists. Everything else is the library's own: the plans
of sampled processes, the entries of all, and what process 0 makes of them; the messages of a round
by all processes; and what each says about the chunks that it wants in a restore. Each measurement
runs in a process of its own, whose peak memory is read at its end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from asyncckpt import options
from asyncckpt.coordinators.beats import Beats
from asyncckpt.coordinators.group import Group
from asyncckpt.coordinators.pulse import Pulse
from asyncckpt.coordinators.rounds import Round
from asyncckpt.flow.engine import Engine
from asyncckpt.flow.threads import Workers
from asyncckpt.format.chunks import index_nbytes
from asyncckpt.format.entries import Entries, Part, WrittenFile, decode_entries, encode_entries
from asyncckpt.format.record import StoredSpec
from asyncckpt.planning.exchange import Sharing, encoded_rows, share, streams
from asyncckpt.planning.leaves import LeafLayout
from asyncckpt.planning.replicas import checked_rows
from asyncckpt.planning.save import SavePlan, plan_save
from asyncckpt.restore.exchange import BATCH_NBYTES
from asyncckpt.save.commit import Commit
from asyncckpt.save.index import make_catalog
from asyncckpt.save.merge import compare, merge
from asyncckpt.save.plan_cache import Layout
from asyncckpt.save.snapshot import SaveRequest, take_snapshot
from asyncckpt.spec import Box, Partition, Shard, array_spec
from benchmarks.machine import facts
from tests.coordinators.members import Member

COUNTS = (100, 1_000, 10_000)
REPLICAS = 10
STATE_NBYTES = 10 * 10**12
LAYERS = 64
SAVE_ID = "5ca1e" + 27 * "0"
DIGEST = 64 * "0"
CHUNKS = (125_000, 250_000, 500_000, 1_000_000)
"""Chunks of the job of 1,000 processes of which process 0's time is looked at."""

SAMPLES = 5

SILENCE_S = 600.0
"""All processes of a simulated round share one core: none is called silent."""

REQUESTS = 3
"""Store requests of each process beside data, at most: it looks for the attempt and passes its
entries on, and process 0 reads them (tests/planning/test_scale.py)."""

Figures = dict[str, float]


class Job:
    """The leaves of a state over the processes of a job, as each of them knows them.

    Args:
        process_count: number of processes; every tenth one holds the same shard.
        shapes: shape and dtype of every leaf, by name.
    """

    def __init__(self, process_count: int, shapes: dict[str, tuple[tuple[int, ...], str]]) -> None:
        self.process_count = process_count
        self.shard_count = process_count // REPLICAS
        self._shapes = shapes
        self._everybody = tuple(range(process_count))
        self.names = list(shapes)

    def leaves(self, process: int) -> list[LeafLayout]:
        """Return the leaves with the shards of one process: rows cut at multiples of a ceiling."""
        number = process % self.shard_count
        holders = tuple(range(number, self.process_count, self.shard_count))
        divided: dict[tuple[int, ...], tuple[Partition, tuple[Shard, ...]]] = {}
        for shape, _ in self._shapes.values():
            if shape in divided:
                continue
            rows = -(-shape[0] // self.shard_count)
            start = min(number * rows, shape[0])
            height = min(rows, shape[0] - start)
            shard = Shard(Box((start, *(0 for _ in shape[1:])), (height, *shape[1:])), holders)
            cuts = (rows, *shape[1:])
            text = f"rows over {self.shard_count}, {REPLICAS} replicas"
            divided[shape] = Partition(cuts, text, self._everybody), (shard,) if height else ()
        return [
            LeafLayout(
                name,
                array_spec(shape, dtype),
                options.DEFAULT_CHUNK_NBYTES,
                shards=divided[shape][1],
                partition=divided[shape][0],
            )
            for name, (shape, dtype) in self._shapes.items()
        ]

    def plan(self, process: int) -> SavePlan:
        """Return what one process plans."""
        return _plan(self.leaves(process), process, self.process_count)


def _plan(leaves: list[LeafLayout], process: int, process_count: int) -> SavePlan:
    return plan_save(
        leaves,
        data_file_nbytes=options.DEFAULT_DATA_FILE_NBYTES,
        slot_nbytes=options.SLOT_NBYTES,
        page_nbytes=options.PAGE_NBYTES,
        aligned_chunk_nbytes=options.ALIGNED_CHUNK_NBYTES,
        inline_nbytes=options.INLINE_NBYTES,
        process=process,
        process_count=process_count,
    )


def llama(nbytes: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shapes of a state of so many bytes: 2,316 leaves of 64 layers."""
    # Each parameter is 14 bytes; a layer has about 13 parameters per square of the width.
    width = round(math.sqrt(nbytes / (14 * 13.1 * LAYERS)) / 1024) * 1024
    ffn, small = width * 7 // 2, width // 16
    layer = {
        **{f"attention.{name}": (width, width) for name in ("wq", "wo")},
        **{f"attention.{name}": (small, width) for name in ("wk", "wv")},
        **{f"mlp.{name}": (ffn, width) for name in ("up", "gate", "down")},
        **{f"{name}_norm": (width,) for name in ("attention", "mlp")},
    }
    shapes: dict[str, tuple[int, ...]] = {"embed": (128_256, width), "norm": (width,)}
    for number in range(LAYERS):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    return {
        f"{group}.{name}": (shape, dtype)
        for group, dtype in (
            ("params", "bfloat16"),
            ("master", "float32"),
            ("m", "float32"),
            ("v", "float32"),
        )
        for name, shape in shapes.items()
    }


def even(process_count: int, chunk_count: int) -> Job:
    """Return a job of equal leaves with one chunk of 256 KiB per shard."""
    shards = process_count // REPLICAS
    count = -(-chunk_count // shards)
    return Job(
        process_count,
        {f"layers.{n}.weight": ((256 * shards, 256), "float32") for n in range(count)},
    )


# ------------------------------------------------------------------------------------- entries


def entries_by(job: Job, process: int, plan: SavePlan) -> Entries:
    """Return what a process has written, as its plan says; checksums are made up.

    Replicas of a shard plan the same rows, so that the plan of one serves for all of them.
    """
    mine = np.flatnonzero((plan.row_writer == process) & (plan.row_payload > 0))
    nbytes = plan.row_payload[mine] + 4
    offset = np.cumsum(nbytes) - nbytes
    small = nbytes <= options.INLINE_NBYTES
    small &= np.isin(plan.row_array[mine], plan.arrays.inline)
    values = {
        int(chunk): bytes(int(n))
        for chunk, n in zip(plan.row_chunk[mine[small]], nbytes[small], strict=True)
    }
    kept = mine[~small]
    checked = plan.row_chunk[checked_rows(plan, 0, whole=True)]  # as in the first save
    path = f"d/{SAVE_ID}-{process}-0"
    parts = []
    for held in plan.parts:
        data = bytes(held.box.size * _itemsize(plan, held.array))
        parts.append(Part(held.array, held.box, data if held.writer == process else b"", 0))
    return Entries(
        save_id=SAVE_ID,
        process=process,
        digest=DIGEST,
        files=[WrittenFile(path, int(nbytes.sum()), process)],
        chunk=plan.row_chunk[kept],
        file=np.zeros(len(kept), np.int64),
        offset=offset[~small],
        nbytes=nbytes[~small],
        crc=plan.row_chunk[kept].astype(np.uint32),
        values=values,
        parts=parts,
        checked=checked,
        checked_crc=checked.astype(np.uint32),
        scalar=np.zeros(0, np.int64),
        scalar_crc=np.zeros(0, np.uint32),
        facts={"times": [1.0, 2.0]},
    )


def _itemsize(plan: SavePlan, array: int) -> int:
    """Return the bytes per element of an array of a plan."""
    return plan.arrays.of(array).spec.itemsize


def write_entries(job: Job, place: Path) -> Figures:
    """Write the entries of all processes, and what each wants in a restore."""
    sizes: list[int] = []
    for shard in range(job.shard_count):
        plan = job.plan(shard)
        wanted = encoded_rows(plan.row_chunk)
        (place / f"wanted-{shard}").write_bytes(wanted)
        for process in range(shard, job.process_count, job.shard_count):
            data = encode_entries(entries_by(job, process, plan))
            (place / f"entries-{process}").write_bytes(data)
            sizes.append(len(data))
    return {"entries_nbytes": statistics.mean(sizes), "entries_most_nbytes": max(sizes)}


# ----------------------------------------------------------------------------------- process 0


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

    async def create(self, path: str, *, nbytes: int, window_nbytes: int | None = None) -> _File:
        """Open a file."""
        self.writes += 1
        return _File()

    async def put(self, path: str, data: bytes, *, in_record: bool = False) -> None:
        """Take a small file."""
        self.writes += 1


class Laps:
    """Seconds of wall and processor time of stages, and how far memory has grown."""

    def __init__(self) -> None:
        self.figures: Figures = {}
        self._base_nbytes = _peak_nbytes()

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        """Time a stage."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.figures[f"{name}_s"] = time.perf_counter() - wall
        self.figures[f"{name}_cpu_s"] = time.process_time() - cpu
        self.figures["peak_nbytes"] = _peak_nbytes() - self._base_nbytes


def _peak_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
        compare(layout, snapshot, entries, str)
        merged, late = merge(layout, entries, str)
    for chunk in late:
        merged.chunks.file[chunk] = 0
    attempt, compute = _Attempt(), Workers(1, "scale")
    committing = Commit(attempt, layout, request, save_id=SAVE_ID, compute=compute)  # type: ignore[arg-type]
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
    spec_of = [
        specs.setdefault(StoredSpec(part.spec, part.grid.chunk_shape, part.zstd_level), len(specs))
        for part in arrays.parts
    ]
    return Layout(
        plan=plan,
        catalog=make_catalog(arrays),
        specs=tuple(specs),
        spec_of=[spec_of[part] for part in arrays.part.tolist()],
        pieces={},
        mirrors=(),
        orbax=None,
        notes=(),
        schema_digest=DIGEST,
    )


# ------------------------------------------------------------------------ planning and messages


def own_plan(process_count: int) -> Figures:
    """Time the own plan of three processes, for as much of its own in jobs of any size."""
    job = even(process_count, 100 * process_count)
    seconds: list[float] = []
    for process in (1, process_count // 2, process_count - 1):
        leaves = job.leaves(process)
        for _ in range(SAMPLES):
            start = time.process_time()
            _plan(leaves, process, process_count)
            seconds.append(time.process_time() - start)
    return {"own_leaves": len(job.names), "own_plan_s": min(seconds)}


def messages(process_count: int) -> Figures:
    """Count the calls of all processes in one round of a save of a known plan."""
    values: dict[str, bytes] = {}
    made = [_Counted(values, index, process_count) for index in range(process_count)]
    hosts = ("host",) * process_count
    engine = Engine("scale")

    async def part(index: int) -> None:
        group = Group(made[index], "a" * 32, index, process_count, hosts, "meeting")
        pulse = Pulse(engine, Beats(group, SILENCE_S))
        round_ = Round(group, pulse, "save", 0, arrival_s=SILENCE_S, silence_s=SILENCE_S)

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
    engine.close()
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


# ---------------------------------------------------------------------------------------- report


def apart(work: Callable[..., Figures], *given: Any) -> Figures:
    """Return what a function returns in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(work, given)


def simulate(job: Job) -> Figures:
    """Return the figures of one job."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        found = {"processes": job.process_count, **apart(write_entries, job, place)}
        found |= apart(commit, job, place)
        found |= {f"share_{key}": value for key, value in apart(sharing, job, place).items()}
    metadata = found["record_nbytes"] + found["index_nbytes"]
    found["metadata_nbytes"] = metadata
    found["metadata_once_nbytes"] = metadata / job.process_count
    return found


def exponent(found: Sequence[Figures], what: str) -> float:
    """Return the slope of the logarithm of a figure over that of the number of chunks."""
    chunks, figures = ([math.log(one[key]) for one in found] for key in ("chunks", what))
    return float(np.polyfit(chunks, figures, 1)[0])


def report(jobs: Sequence[Figures], grown: Sequence[Figures], about: Any) -> str:
    """Return the figures as Markdown."""
    rows: list[tuple[str, Callable[[Figures], str]]] = [
        ("chunks", lambda f: f"{f['chunks']:,.0f}"),
        ("own plan, of the state", lambda f: f"{f['plan_s'] * 1e3:.0f} ms"),
        ("own plan, 1,000 own chunks", lambda f: f"{f['own_plan_s'] * 1e3:.2f} ms"),
        ("entries of a process, first save", lambda f: _size(f["entries_nbytes"])),
        ("process 0: names of all chunks, once", lambda f: f"{f['names_s']:.2f} s"),
        ("process 0: entries decoded", lambda f: f"{f['entries_s']:.2f} s"),
        ("process 0: compared and merged", lambda f: f"{f['merge_s']:.2f} s"),
        ("process 0: index and record", lambda f: f"{f['index_s']:.2f} s"),
        ("process 0: memory for all this", lambda f: _size(f["peak_nbytes"])),
        ("messages of a process for a save", lambda f: f"{f['posts_per_process']:.0f}"),
        ("store requests beside data, all", lambda f: f"{REQUESTS * f['processes']:,.0f}"),
        (
            "the same per second, if a save takes a minute",
            lambda f: f"{REQUESTS * f['processes'] / 60:,.0f}",
        ),
        ("record and index", lambda f: _size(f["metadata_nbytes"])),
        ("read of these by each restoring process", lambda f: _size(f["metadata_nbytes"])),
        ("the same, read once", lambda f: _size(f["metadata_once_nbytes"])),
        ("what a process says that it wants", lambda f: _size(f["share_wanted_nbytes"])),
        ("what process 0 answers", lambda f: _size(f["share_sharing_nbytes"])),
        ("process 0: who shares what", lambda f: f"{f['share_share_s']:.2f} s"),
        ("each process: its streams", lambda f: f"{f['share_streams_s']:.2f} s"),
    ]
    lines = ["# Scale", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    lines += _table("processes", [f"{one['processes']:,.0f}" for one in jobs], rows, jobs)
    if len(grown) > 1:
        parts = ("plan", "names", "entries", "merge", "index")
        for one in grown:
            one["all_cpu_s"] = sum(one[f"{part}_cpu_s"] for part in parts)
            one["planned_cpu_s"] = sum(one[f"{part}_cpu_s"] for part in ("plan", "names", "index"))
        cpu: list[tuple[str, Callable[[Figures], str]]] = [
            ("plans, names and indexes", lambda f: f"{f['planned_cpu_s']:.2f} s"),
            ("and entries, compared and merged", lambda f: f"{f['all_cpu_s']:.2f} s"),
            ("memory", lambda f: _size(f["peak_nbytes"])),
        ]
        lines += ["", "Processor time of process 0 of 1,000, by chunks:", ""]
        lines += _table("chunks", [f"{one['chunks']:,.0f}" for one in grown], cpu, grown)
        lines += ["", f"Exponent in chunks: {exponent(grown, 'all_cpu_s'):.2f}."]
    return "\n".join(lines) + "\n"


def _table(
    what: str,
    heads: Sequence[str],
    rows: Sequence[tuple[str, Callable[[Figures], str]]],
    found: Sequence[Figures],
) -> list[str]:
    cells = [(what, *heads), ("---",) * (len(heads) + 1)]
    cells += [(name, *map(text, found)) for name, text in rows]
    return [f"| {' | '.join(row)} |" for row in cells]


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            break
        nbytes /= 1024
    return f"{nbytes:.3g} {unit}"


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--chunks", type=int, nargs="*", default=CHUNKS)
    parser.add_argument("--state", type=int, default=STATE_NBYTES, help="bytes of the state")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args()
    jobs: list[Figures] = []
    for count in given.processes:
        own = {**apart(own_plan, count), **apart(messages, count)}
        jobs.append({**simulate(Job(count, llama(given.state))), **own})
    grown = [simulate(even(1_000, chunks)) for chunks in given.chunks]
    about = {**facts(given.out), "date": time.strftime("%Y-%m-%d", time.gmtime())}
    text = report(jobs, grown, about)
    print(text)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "scale.md").write_text(text)
    document = {"about": about, "jobs": jobs, "chunks": grown}
    (given.out / "scale.json").write_text(json.dumps(document, indent=1) + "\n")
