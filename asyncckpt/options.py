"""Options, and the numbers of the library with unit and reason.

Options are immutable and checked when they are created, so that a bad value fails where it was
written and not in the middle of a save.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Literal

from asyncckpt.errors import UsageError
from asyncckpt.pickled import PickledByName
from asyncckpt.spec import DTYPES, ArraySpec

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

SLOT_NBYTES = 8 * MIB
"""Unit of the byte budget and of local writes. Large enough for O_DIRECT to reach its top speed
(4 MiB is within noise of it), small enough that a 64 MiB budget still pipelines."""

PAGE_NBYTES = 4096
"""Alignment of large chunks in data files: the strictest logical block size in common use."""

CACHED_NBYTES = 2 * MIB
"""Bytes that a thread copies or reads before it computes their checksum, while a cache has them.
Shorter steps cost more in calls and in waits for the interpreter than a nearer cache saves."""

GIL_NBYTES = 256 * KIB
"""Copies and checksums below this size, which take up to 25 µs, hold the GIL: getting it back from
other busy threads takes longer."""

ALIGNED_CHUNK_NBYTES = 1 * MIB
"""Chunks from this size on start in the middle of a page of the data file; below, packing matters
more."""

INLINE_NBYTES = 1 * KIB
"""Stored values up to this size live in the B+tree itself: one read serves thousands of them."""

DEFAULT_CHUNK_NBYTES = 16 * MIB
"""The unit of reading, checking and decoding. 16 MiB reaches 80 % of a stream on object stores
and 16 in flight stay within a small budget."""

DEFAULT_DATA_FILE_NBYTES = 1 * GIB
"""The size of data files does not matter on local disk; one flush per GiB is cheap, and a file that
stays open longer lets writeback overlap."""

LOCAL_CONCURRENCY = 6
"""Reads or writes in flight on local disk under `concurrency="auto"`: four threads execute them and
two wait in line, so that no thread idles until the engine notices a completion."""

NODE_NBYTES = 1 * MIB
"""Largest decoded B+tree node we write: one ranged read, decoded in a millisecond."""

MAX_RECORD_NBYTES = 1 * GIB
"""Larger commit records are refused before they are read (100,000 leaves take about 10 MiB)."""

MAX_ENTRIES = 1 << 20
"""Most files and directories of a checkpoint, and most names in one directory, that are listed.
Orbax without OCDBT has one per parameter."""

MAX_DEPTH = 256
"""Deepest nesting of containers, in trees and stored documents. Real states have about 20; JSON and
C parsers stop at 1,000."""

MAX_PIECES = 4096
"""Most arrays that store one leaf; a reader compares every pair of them."""

MIN_BUDGET_NBYTES = 64 * MIB
"""Eight slots: with fewer, copying, checksumming and writing could not overlap."""

MAX_DEFAULT_BUDGET_NBYTES = 8 * GIB
"""More staging memory than this gained nothing on the machines measured."""

ABANDON_S = 30.0
"""How long a cancelled await, or a clean-up, waits for a thread that is stuck in a system call (a
mount that does not answer). A thread that is merely slow finishes by itself: removing 100 GB takes
this long on ext4."""

CLEANUP_S = 60.0
"""How long work that must not be cut short, such as a publication, continues after its caller was
cancelled: two waits for threads. Then it is cancelled, too, and ends within `ABANDON_S`."""

SILENCE_S = 60.0
"""Below the 100 s after which jaxlib ends all processes of a job that has lost one, so that our
error, which names the lost process, comes first."""

ARRIVAL_S = 300.0
"""Processes usually make the same call within seconds; if some of them compile a step, they may be
minutes late."""

STEP_MAX = 10**19 - 1
"""Steps are names of at most 19 digits."""

CGROUP = "/proc/self/cgroup"
"""File with the cgroups of the process."""

CGROUP_LIMITS = (
    ("", "/sys/fs/cgroup", "memory.max"),  # cgroups of version 2
    ("memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes"),  # of version 1
)
"""Controller, its directory, and the file with the memory limit of each cgroup below it."""


@dataclass(frozen=True, slots=True)
class LeafOptions(PickledByName):
    """How one leaf is stored; None means the value of the `SaveOptions`.

    A leaf of at most 64 KiB whose shards are on several processes is always one uncompressed chunk.

    Attributes:
        chunk_nbytes: target size of a chunk in bytes.
        chunk_shape: exact chunk shape in elements; wins over `chunk_nbytes`.
        dtype: zarr v3 dtype name to cast to before storing, for example ``"bfloat16"``. A value
            that does not fit, such as 0.5 into ``"int8"``, fails the save; floats may become
            infinities of a narrower float. `bytes` and PRNG keys are not cast.
        compression: ``"zstd"``, ``"none"``, or None for that of the save.
        compression_level: zstd level, 1 to 22.
        replicas: ``"checked"`` compares the copies that several processes hold of this leaf;
            ``"first"`` stores the copy of the lowest process and allows the others to differ, as
            statistics of BatchNorm do.
    """

    chunk_nbytes: int | None = None
    chunk_shape: tuple[int, ...] | None = None
    dtype: str | None = None
    compression: Literal["zstd", "none"] | None = None
    compression_level: int | None = None
    replicas: Literal["checked", "first"] = "checked"

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if self.chunk_nbytes is not None:
            _integer("chunk_nbytes", self.chunk_nbytes, 1, 16 * GIB, "bytes")
        if self.chunk_shape is not None and not (
            isinstance(self.chunk_shape, tuple)
            and all(type(n) is int and n > 0 for n in self.chunk_shape)
        ):
            raise UsageError(f"chunk_shape={self.chunk_shape!r}: pass a tuple of positive ints")
        if self.dtype is not None:
            _choice("dtype", self.dtype, tuple(DTYPES))
        _choice("compression", self.compression, (None, "zstd", "none"))
        if self.compression_level is not None:
            _integer("compression_level", self.compression_level, 1, 22, "a zstd level")
        _choice("replicas", self.replicas, ("checked", "first"))


@dataclass(frozen=True, slots=True)
class SaveOptions(PickledByName):
    """How a checkpoint is saved.

    `host_memory_nbytes`, `direct_io`, `exit_deadline_s`, `silence_s` and `arrival_s` belong to a
    `Checkpointer`, which takes them from its `save_options=`; other values in the `options=` of a
    save, except the defaults, raise a `UsageError`.

    Attributes:
        host_memory_nbytes: budget of staging memory in bytes, shared by all saves and restores of
            one `Checkpointer`; None: a quarter of the memory the process may use, at most 8 GiB.
        chunk_nbytes: target size of a chunk in bytes: the unit of reading, checking and decoding.
        target_data_file_nbytes: size at which a data file is sealed, in bytes, or ``"auto"``.
        concurrency: writes in flight, or ``"auto"``.
        compression: ``None`` or ``"zstd"``.
        compression_level: zstd level, 1 to 22.
        direct_io: ``"auto"`` bypasses the page cache on writing if the file system can, ``True``
            requires it, ``False`` never bypasses it.
        deadline_s: seconds after which a save is aborted; None for no limit.
        exit_deadline_s: seconds that a process waits for its saves if it ends without `close()`.
        snapshot: ``"copy"`` copies every leaf before `start_save` returns; ``"reference"`` holds
            immutable `jax.Array`s instead (for trainers that do not donate them).
        on_overlap: what `start_save` does while another save is in flight: ``"wait"`` for it,
            ``"skip"`` this one, or raise an ``"error"``.
        on_failed_save: whether the next save raises the unseen failure of an earlier one
            (``"raise"``) or only logs it (``"log"``).
        private: create checkpoints that only their owner can read, instead of following the umask;
            claims and the lock of the root always follow the umask.
        layout: ``"auto"``: a leaf whose shards lie on no common chunk grid is stored in pieces,
            several arrays that TensorStore can stack and Orbax cannot read; ``"regular"``: every
            leaf is one array, or the save fails and reports how many chunks it would take.
        leaf_options: called with path and `ArraySpec` of each array leaf; returns `LeafOptions`
            or None. Its results are cached with the plan of the save and reused for trees of the
            same schema, so it must be deterministic.
        tree: ``"same"``: all processes have the same leaves; ``"union"``: each process may have its
            own, and the processes compare their trees before each save; ``"auto"``: ``"same"`` with
            JAX, otherwise ``"union"``, comparing only after the trees have differed.
        silence_s: seconds without a sign of life after which a process is considered dead.
        arrival_s: seconds that a process may be later than the first at a call.
    """

    host_memory_nbytes: int | None = None
    chunk_nbytes: int = DEFAULT_CHUNK_NBYTES
    target_data_file_nbytes: int | Literal["auto"] = "auto"
    concurrency: int | Literal["auto"] = "auto"
    compression: Literal["zstd"] | None = None
    compression_level: int = 3
    direct_io: bool | Literal["auto"] = "auto"
    deadline_s: float | None = None
    exit_deadline_s: float = 60.0
    snapshot: Literal["copy", "reference"] = "copy"
    on_overlap: Literal["wait", "skip", "error"] = "wait"
    on_failed_save: Literal["raise", "log"] = "raise"
    private: bool = False
    layout: Literal["auto", "regular"] = "auto"
    tree: Literal["auto", "same", "union"] = "auto"
    leaf_options: Callable[[str, ArraySpec], LeafOptions | None] | None = None
    silence_s: float = SILENCE_S
    arrival_s: float = ARRIVAL_S

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        _check_common(self)
        _integer("chunk_nbytes", self.chunk_nbytes, 4 * KIB, 16 * GIB, "bytes")
        if self.target_data_file_nbytes != "auto":
            _integer(
                "target_data_file_nbytes",
                self.target_data_file_nbytes,
                SLOT_NBYTES,
                1 << 42,
                "bytes",
            )
        _choice("compression", self.compression, (None, "zstd"))
        _integer("compression_level", self.compression_level, 1, 22, "a zstd level")
        _choice("direct_io", self.direct_io, ("auto", True, False))
        _duration("exit_deadline_s", self.exit_deadline_s)
        _choice("snapshot", self.snapshot, ("copy", "reference"))
        _choice("on_overlap", self.on_overlap, ("wait", "skip", "error"))
        _choice("on_failed_save", self.on_failed_save, ("raise", "log"))
        _choice("private", self.private, (True, False))
        _choice("layout", self.layout, ("auto", "regular"))
        _choice("tree", self.tree, ("auto", "same", "union"))
        check_function(
            "leaf_options", self.leaf_options, "path and ArraySpec that returns LeafOptions or None"
        )


@dataclass(frozen=True, slots=True)
class RestoreOptions(PickledByName):
    """How a checkpoint is restored.

    Attributes:
        concurrency: reads in flight, or ``"auto"``.
        atomic: stage everything before the first target is touched, so that a `restore_into` that
            fails before it calls the first `load_state_dict` leaves its targets unchanged (costs
            memory for the whole state).
        broadcast: read once and exchange between processes (``"auto"``, True, False).
        explain: list every range read, with the reason, in `RestoreReport.reads`.
        deadline_s: seconds after which a restore is aborted; None for no limit.
        host_memory_nbytes: budget in bytes, for the one-shot functions only.
        silence_s: seconds without a sign of life after which a process is considered dead.
        arrival_s: seconds that a process may be later than the first at a call.
    """

    concurrency: int | Literal["auto"] = "auto"
    atomic: bool = False
    broadcast: bool | Literal["auto"] = "auto"
    explain: bool = False
    deadline_s: float | None = None
    host_memory_nbytes: int | None = None
    silence_s: float = SILENCE_S
    arrival_s: float = ARRIVAL_S

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        _check_common(self)
        _choice("atomic", self.atomic, (True, False))
        _choice("broadcast", self.broadcast, ("auto", True, False))
        _choice("explain", self.explain, (True, False))


def _check_common(options: SaveOptions | RestoreOptions) -> None:
    """Check the fields that both kinds of options have."""
    concurrency = options.concurrency
    check_budget(options.host_memory_nbytes)
    if concurrency != "auto":
        _integer("concurrency", concurrency, 1, 1024, "operations")
    check_seconds("deadline_s", options.deadline_s)
    _duration("silence_s", options.silence_s)
    _duration("arrival_s", options.arrival_s)


def default_budget_nbytes() -> int:
    """Return a quarter of the memory that the process may use, at most 8 GiB."""
    return max(MIN_BUDGET_NBYTES, min(MAX_DEFAULT_BUDGET_NBYTES, memory_limit_nbytes() // 4))


def memory_limit_nbytes() -> int:
    """Return the bytes of memory this process may use: the least limit of cgroups and machine.

    In a container, the cgroups of the process are at the top. A batch system's are below it.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in (_text(CGROUP) or "0::/\n0:memory:/").splitlines():
        _, controllers, name = line.split(":", 2)
        for controller, top, file in CGROUP_LIMITS:
            if controller in controllers.split(","):
                cgroups = Path(name), *Path(name).parents
                texts = [_text(f"{top}{cgroup}/{file}").strip() for cgroup in cgroups]
                limits += map(int, filter(str.isdigit, texts))
    return min(limits)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="surrogateescape")
    except OSError:
        return ""


def _integer(name: str, value: object, low: int, high: int, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(
            f"{name}={value!r}: pass an int from {low} to {high} ({unit})",
            expected=(low, high),
            found=value,
        )


def check_budget(nbytes: object) -> None:
    """Check that this is a budget of host memory, or None."""
    if nbytes is not None:
        _integer("host_memory_nbytes", nbytes, MIN_BUDGET_NBYTES, 1 << 50, "bytes")


def check_function(name: str, value: object, of: str) -> None:
    """Check that this is an ordinary function, or None."""
    if value is None:
        return
    if not callable(value):
        raise UsageError(f"{name}={value!r:.80}: pass a function of {of}", found=value)
    if iscoroutinefunction(value) or iscoroutinefunction(value.__call__):
        raise UsageError(
            f"{name}={value!r:.80}: nothing awaits it; pass an ordinary function of {of}, without "
            "async",
            found=value,
        )


def check_seconds(name: str, value: object) -> None:
    """Check that this is a positive number of seconds, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise UsageError(f"{name}={value!r}: pass a positive number of seconds", found=value)


def _duration(name: str, value: object) -> None:
    if value is None:
        raise UsageError(f"{name}=None: pass a positive number of seconds; every wait must end")
    check_seconds(name, value)


def _choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if not any(value is a or (type(value) is type(a) and value == a) for a in allowed):
        raise UsageError(
            f"{name}={value!r}: pass one of {', '.join(map(repr, allowed))}",
            expected=allowed,
            found=value,
        )
