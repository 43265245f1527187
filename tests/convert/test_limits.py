"""Conversions and comparisons within the byte budget, and leftovers of killed ones."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncckpt import LeafOptions, SaveOptions, UsageError, blocking
from asyncckpt.flow.buffers import Slot, SlotPool
from asyncckpt.options import KIB, MIB
from tests import children
from tests.convert.trees import numbers, saved

BUDGET_NBYTES = 64 * MIB

# As of I3: besides the budget, what the leaves' names take and what a process needs once.
EXTRA_NBYTES = 16 * MIB

MEASURE = """
import dataclasses, gc, json, resource, shutil, sys
from pathlib import Path
import numpy as np
from asyncckpt import LeafOptions, RestoreOptions, SaveOptions, blocking

MIB = 1 << 20
LINUX = sys.platform == "linux"
root, budget, nbytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
small = SaveOptions(host_memory_nbytes=budget)
reading = RestoreOptions(host_memory_nbytes=budget)

def rss(name="VmRSS"):
    if not LINUX:  # the peak since the start: what it grows by is a lower bound
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for row in Path("/proc/self/status").read_text().splitlines():
        if row.startswith(name + ":"):
            return int(row.split()[1]) * 1024

def peak_of(call):
    gc.collect()
    before = rss()
    if LINUX:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    call()
    return rss("VmHWM") - before

def round_trip(place, options):
    a, b, c, d = (place / name for name in ("a", "b", "c.safetensors", "d"))
    yield "ours", lambda: blocking.convert(a, b, options=options)
    yield "safetensors", lambda: blocking.convert(a, c, options=options)
    yield "back", lambda: blocking.convert(c, d, options=options)
    yield "diff", lambda: blocking.diff(a, d, options=reading).equal or sys.exit("they differ")
    # Leaves of which every element is cast, and differs.
    wide, cast, other = (place / name for name in ("wide", "cast", "other"))
    to_int8 = dataclasses.replace(options, leaf_options=lambda *_: LeafOptions(dtype="int8"))
    yield "cast", lambda: blocking.convert(wide, cast, options=to_int8)
    yield "different", lambda: blocking.diff(cast, other, options=reading)

def options_of(path, spec):
    return LeafOptions(chunk_shape=(rows, 256)) if path.startswith("columns") else None

rows = nbytes // 4 // 8 // 4096
tree = {f"rows{i}": np.arange(rows * 4096, dtype=np.float32).reshape(rows, 4096) for i in range(4)}
tree |= {f"columns{i}": tree["rows0"] + i for i in range(4)}
tree |= {f"small{i}": np.full(1024, i) for i in range(500)}
layout = SaveOptions(leaf_options=options_of)
for place, part in (("warm", {"a": np.zeros(100), "b": np.zeros(3 * MIB)}), ("run", tree)):
    blocking.save(root / place / "a", part, options=layout if place == "run" else None)
    size = sum(values.size for values in part.values()) // 2
    blocking.save(root / place / "wide", {"w": np.zeros(size, np.complex128)})
    blocking.save(root / place / "other", {"w": np.ones(size, np.int8)})
tree.clear()
del part

found = {"leaves": 508, "nbytes": sum(f.nbytes for f in blocking.inspect(root / "run/a").files)}
for _, call in round_trip(root / "warm", small):
    call()
for name, call in round_trip(root / "run", small):
    found[name] = peak_of(call)
assert blocking.inspect(root / "run/b")["columns1"].chunk_shape[0] == rows
assert blocking.diff(root / "run/cast", root / "run/other").changed[0].count == size
print(json.dumps(found))
"""


def measured(tmp_path: Path, nbytes: int) -> dict[str, int]:
    out = children.output(MEASURE, tmp_path, BUDGET_NBYTES, nbytes, timeout_s=250)
    found: dict[str, int] = json.loads(out)
    print({name: f"{value / MIB:.1f} MiB" for name, value in found.items() if name != "leaves"})
    return found


def check_budget(found: dict[str, int]) -> None:
    bound = 1.05 * BUDGET_NBYTES + 2 * KIB * found["leaves"] + EXTRA_NBYTES
    for name in ("ours", "safetensors", "back", "diff", "cast", "different"):
        assert found[name] <= bound, f"{name}: {found[name] / MIB:.1f} MiB"


def test_the_byte_budget_bounds_conversions_and_comparisons(tmp_path: Path) -> None:
    found = measured(tmp_path, 192 * MIB)
    assert found["nbytes"] > 192 * MIB > 2 * BUDGET_NBYTES
    check_budget(found)


@pytest.mark.long
def test_the_byte_budget_bounds_those_of_a_large_checkpoint(tmp_path: Path) -> None:
    found = measured(tmp_path, 1024 * MIB)
    assert found["nbytes"] > 1024 * MIB
    check_budget(found)


@pytest.mark.parametrize("budget_mib", [64, 68, 95])
def test_a_compressed_chunk_and_its_compressed_form_fit_beside_one_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget_mib: int
) -> None:
    take, extra = SlotPool.take, []

    async def counted(pool: SlotPool, count: int = 1, **options: Any) -> list[Slot]:
        extra.append(options.get("extra", 0))
        return await take(pool, count, **options)

    monkeypatch.setattr(SlotPool, "take", counted)
    options = SaveOptions(
        host_memory_nbytes=budget_mib * MIB,
        compression="zstd",
        leaf_options=lambda _, spec: LeafOptions(chunk_shape=spec.shape),
    )
    with pytest.raises(
        UsageError, match=r"^w: .* budget has \d+ for one: pass a smaller"
    ) as caught:
        blocking.save(tmp_path / "a", {"w": np.zeros(60 * MIB, np.int8)}, options=options)
    most = int(caught.value.expected)  # type: ignore[call-overload]
    values = np.zeros(most, np.int8)
    blocking.save(tmp_path / "a", {"w": values}, options=options)
    assert max(extra) >= most
    assert np.array_equal(blocking.restore(tmp_path / "a")["w"], values)


def test_a_conversion_cuts_chunks_that_do_not_fit_its_part_of_the_budget(tmp_path: Path) -> None:
    """Its writing side has half of it."""
    options = SaveOptions(
        host_memory_nbytes=BUDGET_NBYTES,
        compression="zstd",
        leaf_options=lambda _, spec: LeafOptions(chunk_shape=spec.shape),
    )
    blocking.save(tmp_path / "a", {"w": np.zeros(24 * MIB // 4, np.float32)}, options=options)
    packed = SaveOptions(host_memory_nbytes=BUDGET_NBYTES, compression="zstd")
    blocking.convert(tmp_path / "a", tmp_path / "b", options=packed)
    assert blocking.diff(tmp_path / "a", tmp_path / "b").equal


KILLED = """
import os, signal, sys
from asyncckpt import SaveOptions, blocking

def progress(state):
    if state.fraction > 0.4:
        os.kill(os.getpid(), signal.SIGKILL)

source, destination, to = sys.argv[1:4]
blocking.convert(
    source,
    destination,
    to=to,
    options=SaveOptions(host_memory_nbytes=64 << 20),
    progress=progress,
    overwrite=len(sys.argv) > 4,
)
"""


@pytest.mark.parametrize(
    ("name", "to"),
    [("b", "asyncckpt"), ("run/5", "asyncckpt"), ("x.safetensors", "safetensors"),
     ("set", "safetensors")],
)  # fmt: skip
def test_a_killed_conversion_leaves_nothing_that_looks_finished(
    tmp_path: Path, name: str, to: str
) -> None:
    tree = {f"w{i}": numbers(1500, 1000) + i for i in range(12)}
    source, destination = saved(tmp_path / "a", tree), tmp_path / name
    status, _, _ = children.finish(children.start(KILLED, source, destination, to))
    assert status == -signal.SIGKILL
    control = destination.parent / ".asyncckpt"
    assert not destination.exists() and list(control.rglob("*"))
    blocking.convert(source, destination, to=to)  # type: ignore[arg-type]
    assert blocking.diff(source, destination).equal
    assert not control.exists()


@pytest.mark.parametrize(("name", "to"), [("b", "asyncckpt"), ("x.safetensors", "safetensors")])
def test_a_killed_replacement_leaves_what_stood_there(tmp_path: Path, name: str, to: str) -> None:
    source = saved(tmp_path / "a", {f"w{i}": numbers(1500, 1000) for i in range(12)})
    before = saved(tmp_path / "before", {"w": numbers(5)})
    blocking.convert(before, tmp_path / name)
    child = children.start(KILLED, source, tmp_path / name, to, "overwrite")
    status, _, _ = children.finish(child)
    assert status == -signal.SIGKILL
    assert blocking.diff(before, tmp_path / name).equal
