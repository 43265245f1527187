"""I3: extra host memory stays within the budget, however large the state is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from asyncckpt.options import KIB, MIB
from tests import children

BUDGET_NBYTES = 128 * MIB

MEASURE = """
import gc, json, resource, sys
from pathlib import Path
import numpy as np
from asyncckpt import blocking, SaveOptions, RestoreOptions
from asyncckpt.format.crc import crc32c

MIB = 1 << 20

LINUX = sys.platform == "linux"

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
    result = call()
    return rss("VmHWM") - before, result

root, budget = sys.argv[1], int(sys.argv[2])
options = SaveOptions(host_memory_nbytes=budget)
"""

LARGE = (
    MEASURE
    + """
GIB = 1 << 30
def make(nbytes, seed):
    array = np.empty(nbytes // 8, np.int64)
    array.reshape(-1, MIB)[:] = np.arange(MIB) * 7 + seed
    array[:: MIB // 2] += np.arange(len(array[:: MIB // 2]))
    return array

tree = {"one": make(GIB, 1)}
tree |= {f"part{i}": make(GIB // 8, i) for i in range(7)}
tree |= {f"small{i}": np.full(1024, i) for i in range(1024)}
tree |= {"turned": make(GIB // 8 - 8 * MIB, 9).reshape(8, -1).T}
nbytes = sum(a.nbytes for a in tree.values())
crcs = {key: crc32c(np.ascontiguousarray(a[:1024] if key == "turned" else a).view(np.uint8))
        for key, a in tree.items()}

# What is loaded and started once per process does not count.
with blocking.Checkpointer(root + "/warm", save_options=options) as ckpt:
    ckpt.save(0, {"a": np.zeros(100), "b": np.zeros(4 * MIB)})
    ckpt.restore()

found = {"leaves": len(tree), "nbytes": nbytes}
with blocking.Checkpointer(root + "/run", save_options=options) as ckpt:
    found["save"], _ = peak_of(lambda: ckpt.save(1, tree))
with blocking.Checkpointer(root + "/run", save_options=options) as ckpt:
    found["start_save"], _ = peak_of(lambda: ckpt.start_save(2, tree).result())
    ckpt.delete(2)
with blocking.Checkpointer(root + "/run", save_options=options) as ckpt:
    for array in tree.values():
        array[...] = 0
    found["restore_into"], _ = peak_of(lambda: ckpt.restore_into(tree))
def check(tree):
    for key, a in tree.items():
        part = np.ascontiguousarray(a[:1024] if key == "turned" else a)
        assert crc32c(part.view(np.uint8).reshape(-1)) == crcs[key], key
check(tree)
tree.clear()
del array
with blocking.Checkpointer(root + "/run", save_options=options) as ckpt:
    extra, tree = peak_of(lambda: ckpt.restore())
found["restore"] = extra - nbytes
check(tree)
print(json.dumps(found))
"""
)

GROWING = (
    MEASURE
    + """
import os, threading
tree = {f"l{i}": np.zeros(MIB // 4) for i in range(8)} | {f"s{i}": np.ones(9) for i in range(500)}
found = []
with blocking.Checkpointer(root + "/run", save_options=options) as ckpt:
    for step in range(60):
        ckpt.start_save(0, tree, overwrite=True)
        if step % 3 == 2:
            ckpt.restore_into(tree)
        if step in (19, 39, 59):
            ckpt.wait()
            gc.collect()
            pooled = ckpt._session.runtime.pool.allocated_nbytes  # kept on purpose, and bounded
            found.append([rss() - pooled, len(gc.get_objects()), len(os.listdir("/dev/fd")),
                          threading.active_count()])
print(json.dumps(found))
"""
)


def limit(leaves: int) -> float:
    return 1.05 * BUDGET_NBYTES + 2 * KIB * leaves + 16 * MIB


def test_two_gib_are_saved_and_restored_within_the_budget(tmp_path: Path) -> None:
    try:
        out = children.output(LARGE, tmp_path, BUDGET_NBYTES, timeout_s=280)
    finally:
        shutil.rmtree(tmp_path)
    found: dict[str, Any] = json.loads(out)
    leaves = found.pop("leaves")
    assert found.pop("nbytes") >= 2 << 30
    shown = {key: f"{value / MIB:.1f} MiB" for key, value in found.items()}
    print(f"\nextra memory, of {limit(leaves) / MIB:.1f} MiB allowed: {shown}")
    assert max(found.values()) <= limit(leaves), shown


def test_memory_does_not_grow_with_every_save(tmp_path: Path) -> None:
    first, second, third = json.loads(children.output(GROWING, tmp_path, BUDGET_NBYTES))
    for early, late in ((first, third), (second, third)):
        assert late[0] - early[0] < 8 * MIB
        assert late[1] - early[1] < 200  # objects
        assert late[2:] == early[2:]  # descriptors, threads
