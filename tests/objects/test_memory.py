"""I3 on object stores: what a save and a restore need beside the state is within the budget."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncckpt.options import GIB, KIB, MIB
from tests import children
from tests.simulator import simulator_process
from tests.test_memory import MEASURE

CHILD = (
    MEASURE
    + """
import warnings
warnings.filterwarnings("ignore", "Sending a large body directly", ResourceWarning)  # as ours do
GIB = 1 << 30
url, storage_options = sys.argv[1], json.loads(sys.argv[3])
nbytes = int(sys.argv[4])

def make(nbytes, seed):
    array = np.empty(nbytes // 8, np.int64)
    array.reshape(-1, MIB // 8)[:] = np.arange(MIB // 8) * 7 + seed
    return array

tree = {"one": make(nbytes // 2, 1)} | {f"part{i}": make(nbytes // 16, i) for i in range(7)}
tree |= {f"small{i}": np.full(1024, i) for i in range(1024)}
total = sum(a.nbytes for a in tree.values())
crcs = {key: crc32c(a.view(np.uint8)) for key, a in tree.items()}

# What a library loads and keeps once per process does not count, and neither does the staging
# memory of another Checkpointer.
warm = {key: np.ones(budget // 64) for key in "abcdefgh"}  # as many bytes as the budget
with blocking.Checkpointer(url + "/warm", save_options=options,
                           storage_options=storage_options) as ckpt:
    for step in range(2):
        ckpt.save(step, warm)
        ckpt.restore_into(warm)
del warm

found = {"leaves": len(tree)}
def opened():
    return blocking.Checkpointer(url + "/run", save_options=options,
                                 storage_options=storage_options)
with opened() as ckpt:
    found["save"], _ = peak_of(lambda: ckpt.save(1, tree))
with opened() as ckpt:
    for array in tree.values():
        array[...] = 0
    found["restore_into"], _ = peak_of(lambda: ckpt.restore_into(tree))
for key, a in tree.items():
    assert crc32c(a.view(np.uint8)) == crcs[key], key
tree.clear()
del array, a
with opened() as ckpt:
    extra, tree = peak_of(lambda: ckpt.restore())
found["restore"] = extra - total
for key, a in tree.items():
    assert crc32c(a.view(np.uint8)) == crcs[key], key
print(json.dumps(found))
"""
)


def within(kind: str, nbytes: int, budget_nbytes: int) -> None:
    with simulator_process(keep_log=False) as sim:
        if kind == "gcsfs":
            url, options = "gs://bucket/m", sim.gcs_options()
        else:
            client = {"s3fs": "fsspec", "obstore": "obstore"}[kind]
            url, options = "s3://bucket/m", sim.s3_options(client=client)
        out = children.output(CHILD, url, budget_nbytes, json.dumps(options), nbytes, timeout_s=280)
    found: dict[str, Any] = json.loads(out)
    leaves = found.pop("leaves")
    allowed = 1.05 * budget_nbytes + 2 * KIB * leaves + 16 * MIB
    shown = {key: f"{value / MIB:.1f} MiB" for key, value in found.items()}
    print(f"\n{kind}: extra memory, of {allowed / MIB:.1f} MiB allowed: {shown}")
    assert max(found.values()) <= allowed, shown


@pytest.mark.parametrize("kind", ["s3fs", "obstore"])
def test_a_quarter_gib_is_saved_and_restored_within_the_budget(kind: str) -> None:
    within(kind, GIB // 4, 64 * MIB)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["s3fs", "obstore", "gcsfs"])
def test_two_gib_are_saved_and_restored_within_the_budget(kind: str) -> None:
    within(kind, 2 * GIB, 256 * MIB)
