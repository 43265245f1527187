"""The peers: safetensors, Orbax, torch DCP and TensorStore.

Every peer has two columns, taken from one run. *as shipped*: it does what its documentation says,
no more. *durable*: the same, and every file and directory it made is fsynced at the end. Only the
calls of the measured package (and that fsync) are timed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import asyncckpt
from benchmarks.peers.dcp import TorchDcp
from benchmarks.peers.orbax import Orbax, OrbaxV1
from benchmarks.peers.tensorstore import TensorStore
from benchmarks.subject import Subject

Makers = Mapping[str, Callable[[Path], Subject]]
"""Label of a subject -> what makes it, given its directory."""

ORBAX, DCP, TENSORSTORE = "Orbax", "DCP", "TensorStore"
"""Labels of the peers of a family begin with its name."""

ORBAX_FASTEST = "Orbax async, uncompressed"
DCP_FASTEST = "DCP sync, 2 threads"


def all_peers() -> Makers:
    """Return every peer beyond safetensors that is installed, in every variant."""
    made: dict[str, Callable[[Path], Subject]] = {}
    if importlib.util.find_spec("orbax"):
        for how, what, options in (
            ("async", "uncompressed", {"compression": False}),
            ("async", "zstd", {}),
            ("async", "uncompressed, no OCDBT", {"compression": False, "ocdbt": False}),
            ("sync", "uncompressed", {"compression": False, "asynchronous": False}),
            ("sync", "zstd", {"asynchronous": False}),
        ):
            made[f"{ORBAX} {how}, {what}"] = functools.partial(Orbax, **options)
        made[f"{ORBAX} v1, uncompressed"] = functools.partial(OrbaxV1, compression=False)
        made[f"{ORBAX} v1, zstd"] = OrbaxV1
    if importlib.util.find_spec("torch"):
        for how in ("sync", "async"):
            for threads, text in ((2, "2 threads"), (1, "1 thread")):
                made[f"{DCP} {how}, {text}"] = functools.partial(
                    TorchDcp, asynchronous=how == "async", threads=threads
                )
    made[f"{TENSORSTORE} OCDBT"] = TensorStore
    return made


def one_of_each() -> Makers:
    """Return the fastest variant of each family, and the asynchronous ones that users call."""
    labels = (
        ORBAX_FASTEST,
        f"{ORBAX} v1, uncompressed",
        DCP_FASTEST,
        f"{DCP} async, 2 threads",
        f"{TENSORSTORE} OCDBT",
    )
    return _chosen(labels)


def fastest() -> Makers:
    """Return the fastest variant of those that the targets name."""
    return _chosen((ORBAX_FASTEST, DCP_FASTEST))


def _chosen(labels: tuple[str, ...]) -> Makers:
    made = all_peers()
    return {label: made[label] for label in labels if label in made}


def versions() -> dict[str, str]:
    """Return the versions of every package that is measured or underneath."""
    names = (
        "numpy",
        "safetensors",
        "jax",
        "torch",
        "orbax-checkpoint",
        "tensorstore",
        "crc32c",
        "uvloop",
    )
    return {"asyncckpt": asyncckpt.__version__, **installed(names)}


def installed(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of packages by name."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
