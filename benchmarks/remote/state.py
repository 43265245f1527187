"""A workload in a file, from which every process that is measured reads the same bytes."""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.workloads import Tree, Workload, leaves

ALIGNMENT = 64
HEAD_NBYTES = 8
"""Length of the description, in front of it."""


@dataclass(frozen=True, slots=True)
class Described:
    """A workload without its arrays; attributes as those of `Workload`."""

    id: str
    title: str
    leaf_count: int
    nbytes: int
    is_large: bool


def write(workload: Workload, path: Path) -> Described:
    """Write the workload to the file: a description in JSON, then the bytes of all arrays."""
    entries: list[list[Any]] = []
    offset = 0
    arrays = []
    for name, leaf in leaves(workload.tree):
        if isinstance(leaf, np.ndarray):
            offset = -(-offset // ALIGNMENT) * ALIGNMENT
            entries.append([name, leaf.dtype.name, list(leaf.shape), offset])
            arrays.append((offset, leaf))
            offset += leaf.nbytes
        else:
            entries.append([name, leaf])
    head = json.dumps([workload.id, workload.title, entries]).encode()
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(HEAD_NBYTES, "little") + head)
        start = file.tell()
        for at, array in arrays:
            file.seek(start + at)
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        file.truncate(start + offset)
    return Described(
        workload.id, workload.title, workload.leaf_count, workload.nbytes, workload.is_large
    )


def read(path: Path) -> Workload:
    """Load the workload, in memory that all processes share until one of them writes."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(HEAD_NBYTES), "little")
        name, title, entries = json.loads(file.read(size))
        start = file.tell()
    data = shared(path)[start:]
    tree: Tree = {}
    for entry in entries:
        parts = entry[0].split("/")
        node = tree
        for part in parts[:-1]:
            node = node.setdefault(part, {})
        node[parts[-1]] = entry[1] if len(entry) == 2 else _array(data, *entry[1:])
    return Workload(name, title, tree)


def shared(path: Path) -> np.ndarray:
    """Map and touch the bytes of a file. A dozen processes with a copy each would not fit."""
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    data = np.frombuffer(memory, dtype=np.uint8)
    data[:: mmap.PAGESIZE].max()  # by reading, and not by MAP_POPULATE, which makes copies
    return data


def _array(data: np.ndarray, dtype: str, shape: list[int], offset: int) -> np.ndarray:
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    nbytes = kind.itemsize * math.prod(shape)
    return data[offset : offset + nbytes].view(kind).reshape(shape)
