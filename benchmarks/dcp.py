"""`python -m benchmarks.dcp`: `torch.distributed.checkpoint` with our classes and with its own.

Two ranks (gloo) hold the state W1, every tensor sharded by rows. A round saves it with either
class, flushed, and loads it again into tensors that exist already, from the page cache; who comes
first changes with every round. Ratios are of medians.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.files import warm
from benchmarks.machine import facts
from benchmarks.report import write_page
from benchmarks.workers import started
from benchmarks.workloads import leaves, llama

RANKS = 2
TARGETS = {"save": 1.5, "load": 1.0}
OURS, THEIRS = "asyncckpt", "DCP"

Samples = dict[str, dict[str, list[float]]]
"""By operation and class: seconds, of the slowest rank."""


def work(store: Path, rank: int, size: int, pipe: Connection) -> None:
    """Hold the own part of the state; save and load it at every word from the parent."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from asyncckpt.adapters.torch import tensor_view
    from asyncckpt.torch import StorageReader, StorageWriter

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    state: dict[str, Any] = {}
    target: dict[str, Any] = {}
    for path, value in leaves(llama(size << 20).tree):
        if not hasattr(value, "dtype") or not value.shape:
            state[path] = target[path] = value
            continue
        whole = tensor_view(value)
        part = whole.tensor_split(RANKS)[rank].clone()
        for tree, local in ((state, part), (target, torch.zeros_like(part))):
            tree[path] = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
    classes: dict[str, tuple[Any, Any]] = {
        OURS: (StorageWriter, StorageReader),
        THEIRS: (dcp.FileSystemWriter, dcp.FileSystemReader),
    }
    pipe.send(sum(v.nbytes for v in state.values() if isinstance(v, DTensor)))
    while (word := pipe.recv()) is not None:
        operation, name, path = word
        writer, reader = classes[name]
        dist.barrier()
        begun = time.perf_counter()
        if operation == "save":
            dcp.save(state, storage_writer=writer(path))
        else:
            dcp.load(target, storage_reader=reader(path))
        dist.barrier()
        pipe.send(time.perf_counter() - begun)
        if operation == "load":
            for key, value in state.items():
                if isinstance(value, DTensor):
                    assert torch.equal(target[key].to_local(), value.to_local()), key
                    target[key].to_local().zero_()
    dist.destroy_process_group()


def measure(directory: Path, size: int, rounds: int) -> tuple[Samples, int]:
    """Return the samples of all rounds but the first, and the bytes of the state."""
    home = Path(tempfile.mkdtemp(dir=directory))
    samples: Samples = {operation: {OURS: [], THEIRS: []} for operation in TARGETS}
    try:
        with started(work, [(home / "store", rank, size) for rank in range(RANKS)]) as workers:
            nbytes = workers.answers()[0]
            for number in range(rounds + 1):
                names = [OURS, THEIRS][:: 1 if number % 2 else -1]
                for operation in TARGETS:
                    for name in names:
                        if operation == "load":
                            warm(home / name)  # direct writes have left nothing in the page cache
                        seconds = max(workers.ask((operation, name, str(home / name))))
                        if number:
                            samples[operation][name].append(seconds)
                for name in names:
                    shutil.rmtree(home / name)
        return samples, nbytes
    finally:
        shutil.rmtree(home, ignore_errors=True)


def report(samples: Samples, nbytes: int, about: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    rows = []
    for operation, found in samples.items():
        ratio = statistics.median(found[THEIRS]) / statistics.median(found[OURS])
        target = TARGETS[operation]
        verdict = tables.verdict(f"≥ {target}", ratio >= target)
        for name, times in found.items():
            median = statistics.median(times)
            rows.append(
                (
                    operation,
                    name,
                    tables.seconds(median),
                    tables.span(times),
                    f"{nbytes / median / 1e6:.0f}",
                    *((f"{ratio:.2f}", verdict) if name == OURS else ("", "")),
                )
            )
    title = "# torch.distributed.checkpoint with our classes and with its own"
    columns = "|classes|median|fastest – slowest|MB/s|ratio|target"
    return f"{title}\n\n{tables.facts(about)}\n{tables.table('two ranks', columns, rows)}"


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dcp", description=__doc__)
    parser.add_argument("--size", type=int, default=1024, help="MiB of the state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args()
    samples, nbytes = measure(given.dir, given.size, given.rounds)
    about = {**facts(given.dir), "state": f"{nbytes / 1e6:.0f} MB on each of {RANKS} ranks"}
    text = report(samples, nbytes * RANKS, about)
    write_page(given.out, "dcp", text, {"about": about, "samples": samples})


if __name__ == "__main__":
    main()
