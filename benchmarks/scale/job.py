"""Jobs on paper: the leaves of a state over many processes, and what each has written."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import numpy as np

from asyncckpt import options
from asyncckpt.format.entries import Entries, Parts, encode_entries
from asyncckpt.planning.leaves import LeafLayout
from asyncckpt.planning.replicas import checked_rows
from asyncckpt.planning.save import SavePlan
from asyncckpt.planning.streams import encoded_rows
from asyncckpt.reports import FileInfo
from asyncckpt.spec import Box, Partition, Shard, array_spec
from benchmarks.local.planning import save

REPLICAS = 10
STATE_NBYTES = 10 * 10**12
LAYERS = 64
SAVE_ID = "5ca1e" + 27 * "0"
DIGEST = 64 * "0"

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
        return save(self.leaves(process), process=process, process_count=self.process_count)


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
        parts.append((held.array, held.box, data if held.writer == process else b"", 0))
    return Entries(
        save_id=SAVE_ID,
        process=process,
        digest=DIGEST,
        files=[FileInfo(path, int(nbytes.sum()), process)],
        chunk=plan.row_chunk[kept],
        file=np.zeros(len(kept), np.int64),
        offset=offset[~small],
        nbytes=nbytes[~small],
        crc=plan.row_chunk[kept].astype(np.uint32),
        values=values,
        parts=Parts.of(parts),
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
