"""Snapshot of a tree: its structure and scalars at the time of the call, and its arrays opened.

Made in the caller's thread, before the first await of a save, so that later changes of containers
and scalars do not affect it; many arrays are opened by a worker thread while the caller waits.
"""

from __future__ import annotations

import bisect
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.adapters import AdapterSet, adapters_for_loaded_frameworks
from asyncckpt.adapters.numpy import memory_identity
from asyncckpt.adapters.python import fails_again, unreadable, unsupported
from asyncckpt.errors import AsyncCheckpointError, UnsupportedLeafError, UsageError
from asyncckpt.flow.collector import without_collections
from asyncckpt.format.fields import MAX_RANK
from asyncckpt.format.scalars import encode_scalar
from asyncckpt.options import INLINE_NBYTES, SaveOptions
from asyncckpt.planning.merge import Merged, OwnPart, own_part
from asyncckpt.planning.tiling import tiling_fault
from asyncckpt.ports import Source
from asyncckpt.reports import Progress
from asyncckpt.reports.texts import few
from asyncckpt.spec import DTYPE_NAMES, ArraySpec, Box, array_spec
from asyncckpt.tree import Structure, flatten, where

NAMED_LEAVES = 20
"""Unsupported leaves that one error describes; the rest are counted."""

AT_ONCE = 1000
"""Most leaves that are opened in the caller's thread, at up to 6 µs each. Of more, it opens those
that depend on its state, and a worker thread the rest."""


class Sources(Sequence[Source]):
    """The arrays of a tree, in leaf order.

    Making a `Source` takes longer than copying a small array, mostly because of the garbage
    collector. So NumPy arrays described by shape and dtype alone are kept as they are, and
    `sources[number]` makes a `Source` on demand and keeps it.

    Attributes:
        specs: shape and dtype of each array.
        plain: the array if it has no `Source` yet, else None.
        opened: sources by index.
    """

    def __init__(self) -> None:
        self.specs: list[ArraySpec] = []
        self.plain: list[npt.NDArray[Any] | None] = []
        self.opened: dict[int, Source] = {}

    def __len__(self) -> int:
        return len(self.specs)

    def __getitem__(self, number: Any) -> Any:
        # Called from several threads. Read the array first: it is dropped once its source exists.
        array = self.plain[number]
        found = self.opened.get(number)
        if found is None:
            found = self.opened.setdefault(number, Source(self.specs[number], array, array))
            self.plain[number] = None
        return found

    def view(self, number: int) -> npt.NDArray[Any] | None:
        """Return the values of an array in host memory, without making a source.

        None if they must be fetched or cast, or are in shards.
        """
        array = self.plain[number]  # first: see `__getitem__`
        return self.opened[number].view if array is None else array

    def append(self, source: Source) -> None:
        """Add an array with its source."""
        self.opened[len(self.specs)] = source
        self.specs.append(source.spec)
        self.plain.append(None)

    def append_plain(self, spec: ArraySpec, array: npt.NDArray[Any]) -> None:
        """Add a NumPy array of this shape and dtype."""
        self.specs.append(spec)
        self.plain.append(array)

    def forget(self) -> None:
        """Drop all references to leaves."""
        self.plain = [None] * len(self.plain)
        for source in self.opened.values():
            source.leaf = source.view = source.captured = None
            source.views = ()
            source.identity = None


@dataclass(slots=True, eq=False)
class Snapshot:
    """Columns of a flattened tree.

    Attributes:
        structure: its containers.
        paths: path of every leaf.
        kinds: per leaf, the scalar kind, or the framework of an array.
        values: per leaf, the JSON of a scalar, None for arrays.
        scalars: the scalar values themselves, by leaf index.
        sources: the arrays, in leaf order, followed, once staging begins, by scalars that are also
            stored as arrays (`add_mirrors`).
        array_leaf: leaf index of each array.
        tied: arrays that share all bytes with an earlier one, by array index (`tie`).
        extra: facts saved with the bytes, by leaf index.
        nbytes: bytes of all arrays; tied ones count once (`tie`).
        held: this process's part of each array, by array index, if the trees of processes differ.
        only_here: leaf indices of scalars that process 0 lacks and this process sends to it.
        uneven: some leaves exist only on some processes.
        rest: opens the leaves that `take_snapshot` has left to `tie`, and completes the columns;
            None if there are none.
    """

    structure: Structure
    paths: list[str]
    kinds: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    scalars: dict[int, Any] = field(default_factory=dict)
    sources: Sources = field(default_factory=Sources)
    array_leaf: list[int] = field(default_factory=list)
    tied: dict[int, int] = field(default_factory=dict)
    extra: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    nbytes: int = 0
    held: dict[int, OwnPart] = field(default_factory=dict)
    only_here: list[int] = field(default_factory=list)
    uneven: bool = False
    rest: Callable[[], None] | None = None

    def tie(self) -> None:
        """Open the rest, find the arrays that share the bytes of earlier ones, count the bytes.

        Not part of `take_snapshot`, which holds the caller's event loop. Errors: as that.
        """
        if self.rest is not None:
            self.rest()
        sources = self.sources
        self.tied |= _tied(sources)
        nbytes = [a.nbytes for a in sources.plain if a is not None]
        nbytes += [source.spec.nbytes for source in sources.opened.values()]
        self.nbytes = sum(nbytes) - sum([sources.specs[number].nbytes for number in self.tied])

    def add(self, leaf: int, source: Source, first: int) -> None:
        """Add the array of a leaf; `first` is the first array with its bytes, or its own number."""
        number = len(self.array_leaf)
        if first != number:
            self.tied[number] = first
        else:
            self.nbytes += source.spec.nbytes
        self.sources.append(source)
        self.array_leaf.append(leaf)


@dataclass(frozen=True, slots=True, eq=False)
class Consent:
    """Permission that a save needs before it writes its record.

    Attributes:
        asked: called on the engine, possibly more than once, when this process has written its
            part.
        given: awaited by the process that commits, possibly more than once; returns additional
            metadata. Its errors end the save.
    """

    asked: Callable[[], None]
    given: Callable[[], Awaitable[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True, eq=False)
class SaveRequest:
    """Arguments of a save call, with a snapshot of the tree.

    Attributes:
        name: name of the checkpoint in its store.
        step: its step, None for one-shot saves.
        snapshot: the tree.
        metadata: the user's JSON object.
        metrics: the user's numbers.
        overwrite: replace a checkpoint of this name.
        options: options of this save.
        progress: called as the save proceeds.
        stall_first: copying has priority, because the caller waits for it.
        consent: permission that the commit waits for, if any.
        begun: `perf_counter` at the call.
        snapshot_done: `perf_counter` when the snapshot was complete.
    """

    name: str
    step: int | None
    snapshot: Snapshot
    metadata: Mapping[str, Any]
    metrics: Mapping[str, float]
    overwrite: bool
    options: SaveOptions
    progress: Callable[[Progress], None] | None
    stall_first: bool
    consent: Consent | None = None
    begun: float = field(default_factory=time.perf_counter)
    snapshot_done: float = field(default_factory=time.perf_counter)


def take_snapshot(tree: Any, adapters: AdapterSet | None = None) -> Snapshot:
    """Copy the tree's structure and scalars, and open its arrays for staging, or most of them.

    `adapters` defaults to those of the imported frameworks. Of more than `AT_ONCE` leaves, those
    that another thread can open are left to `Snapshot.rest`.

    Raises:
        UnsupportedLeafError: names the path of every leaf that cannot be saved, and what can.
        UsageError: the tree contains itself or is too deep.
    """
    adapters = adapters_for_loaded_frameworks() if adapters is None else adapters
    flat = flatten(tree, adapters.nodes)
    leaves, count = flat.leaves, len(flat.leaves)
    snapshot = Snapshot(flat.structure, flat.paths, ["numpy"] * count, [None] * count)
    opening = _Opening(snapshot, adapters, leaves)
    if count > AT_ONCE:
        opening.open(
            leaf
            for leaf, value in enumerate(leaves)
            if type(value) is not np.ndarray and not adapters.opens_anywhere(value)
        )
        if not opening.refused:
            snapshot.rest = opening.finish
            return snapshot
    opening.finish()
    return snapshot


@dataclass(slots=True, eq=False)
class _Opening:
    """A snapshot while its leaves are opened.

    Attributes:
        opened: sources of arrays, by leaf index.
        refused: errors of leaves that cannot be saved, by leaf index.
    """

    snapshot: Snapshot
    adapters: AdapterSet
    leaves: list[Any]
    opened: dict[int, Source] = field(default_factory=dict)
    refused: dict[int, UnsupportedLeafError] = field(default_factory=dict)

    @without_collections()
    def open(self, numbers: Iterable[int]) -> None:
        """Open some of the leaves."""
        snapshot, leaves = self.snapshot, self.leaves
        for leaf in numbers:
            path, value = snapshot.paths[leaf], leaves[leaf]
            try:
                found = _open(path, value, self.adapters)
                if found is None:
                    snapshot.kinds[leaf], snapshot.values[leaf] = encode_scalar(value)
                    snapshot.scalars[leaf] = value
                else:
                    self.opened[leaf] = found
            except UnsupportedLeafError as error:
                if error.path is None:  # `encode_scalar` does not know it
                    error = UnsupportedLeafError(f"{where(path)}: {error}", path=path)
                self.refused[leaf] = error

    def finish(self) -> None:
        """Open the other leaves, and set the snapshot's columns of arrays.

        Raises:
            UnsupportedLeafError: as `take_snapshot`.
        """
        # Columns keep small leaves cheap: an ordinary array needs no object and no call.
        snapshot, leaves, known = self.snapshot, self.leaves, _PlainSpecs()
        specs = [known[a.dtype, a.shape] if type(a) is np.ndarray else None for a in leaves]
        done = {*self.opened, *self.refused, *snapshot.scalars}
        self.open([n for n, spec in enumerate(specs) if spec is None and n not in done])
        if self.refused:
            raise _of_all([self.refused[leaf] for leaf in sorted(self.refused)])
        for leaf, source in self.opened.items():
            specs[leaf], snapshot.kinds[leaf] = source.spec, source.framework
            if source.extra:
                snapshot.extra[leaf] = source.extra
        array_leaf, sources = snapshot.array_leaf, snapshot.sources
        array_leaf += compress(range(len(specs)), specs)
        sources.specs += filter(None, specs)
        sources.plain += compress(leaves, specs)
        for leaf, source in self.opened.items():
            number = bisect.bisect_left(array_leaf, leaf)
            sources.plain[number] = None
            sources.opened[number] = source
        snapshot.rest = None


class _PlainSpecs(dict[tuple[np.dtype[Any], tuple[int, ...]], ArraySpec | None]):
    """Specs of NumPy arrays by dtype and shape; None if an adapter has to open such arrays."""

    def __missing__(self, facts: tuple[np.dtype[Any], tuple[int, ...]]) -> ArraySpec | None:
        dtype, shape = facts
        name = DTYPE_NAMES.get(dtype)
        is_plain = name is not None and len(shape) <= MAX_RANK and 0 not in shape
        spec = self[facts] = array_spec(shape, name) if is_plain else None
        return spec


def _tied(sources: Sources) -> dict[int, int]:
    """Return, for each array that shares the bytes of earlier ones, the first of them."""
    plain, opened = sources.plain, sources.opened
    owners = [0 if a is None else id(a) if a.base is None else _owner(a.base) for a in plain]
    identities: list[Any] = [*owners]
    unknown = None in owners or any(
        [s.framework == "numpy" and s.identity is not None for s in opened.values()]
    )
    # The address of a view takes 2 µs: it is needed only if the owner of its memory occurs again,
    # or if an owner is unknown, because any two views may share memory then.
    if unknown or len(set(owners)) < len(owners):
        count = Counter(owners)
        for number, (array, owner) in enumerate(zip(plain, owners, strict=True)):
            if array is not None and (unknown or count[owner] > 1):
                identities[number] = memory_identity(array)
    for number, source in opened.items():
        identities[number] = source.identity
    tied: dict[int, int] = {}
    if len(set(identities)) < len(identities):
        seen: dict[Any, int] = {}
        for number, identity in enumerate(identities):
            first = number if identity is None else seen.setdefault(identity, number)
            if first != number:
                tied[number] = first
    return tied


def _owner(base: Any) -> int | None:
    """Return the identity of the array that owns the memory of its views; None if none does."""
    return id(base) if type(base) is np.ndarray and base.base is None else None


def completed(snapshot: Snapshot, merged: Merged, process: int, process_count: int) -> Snapshot:
    """Return the tree of all processes, with this process's values.

    Arrays that only other processes have get sources without shards; such scalars have no value.
    """
    own = {ordinal: leaf for leaf, ordinal in enumerate(merged.ordinals[process])}
    number_of = {leaf: number for number, leaf in enumerate(snapshot.array_leaf)}
    whole = Snapshot(merged.structure, [leaf.path for leaf in merged.leaves])
    numbers: dict[int, int] = {}
    for ordinal, leaf in enumerate(merged.leaves):
        mine = own.get(ordinal)
        whole.kinds.append(leaf.kind)
        if leaf.spec is None:
            whole.values.append(None if mine is None else snapshot.values[mine])
            if mine is not None:
                whole.scalars[ordinal] = snapshot.scalars[mine]
                if process == leaf.processes[0] > 0:
                    whole.only_here.append(ordinal)
            continue
        whole.values.append(None)
        number = numbers[ordinal] = len(whole.sources)
        if mine is None:
            source = Source(leaf.spec, None, None, shards=())
        else:
            source = snapshot.sources[number_of[mine]]
        whole.held[number] = own_part(
            leaf, process, process_count, shards=source.shards, partition=source.partition
        )
        first = number if leaf.tied_to is None else numbers[leaf.tied_to]
        whole.add(ordinal, source, first)
        if leaf.extra:
            whole.extra[ordinal] = json.loads(leaf.extra)
    whole.uneven = any(len(leaf.processes) < process_count for leaf in merged.leaves)
    return whole


def check_alone(snapshot: Snapshot) -> None:
    """Check that one process can save the tree without others.

    Raises:
        UnsupportedLeafError: an array is divided among processes; names the path.
        UsageError: a `ShardedArray` leaves gaps; names the path and the first gap.
    """
    for number, source in snapshot.sources.opened.items():
        if source.partition is None and not source.partial:
            continue
        path = snapshot.paths[snapshot.array_leaf[number]]
        if source.partition is not None:
            others = few([*map(str, source.partition.processes)])
            raise UnsupportedLeafError(
                f"{path}: this array is on devices of other processes too (processes "
                f"{others}); all of them must save it together: "
                'initialise jax.distributed or torch.distributed, and do not pass "single" as '
                "coordinator",
                path=path,
                expected="devices of this process",
                found=source.partition.processes,
            )
        held = [shard.box for shard in source.shards or ()]
        gap = tiling_fault(Box.whole(source.spec.shape), held)
        raise UsageError(
            f"{path}: the shards of this ShardedArray, {source.spec}, do not tile it: {gap}; "
            "to be saved, every element must be in a shard",
            path=path,
            expected=source.spec.shape,
            found=gap,
        )


def tree_nbytes(tree: Any) -> int:
    """Return the bytes that this process stages of the tree's arrays; tied ones count once.

    Raises:
        UnsupportedLeafError: names the path of every leaf that cannot be saved.
    """
    snapshot = take_snapshot(tree)
    snapshot.tie()
    return sum(
        held_nbytes(snapshot.sources[number])
        for number, spec in enumerate(snapshot.sources.specs)
        if number not in snapshot.tied and spec.nbytes > INLINE_NBYTES
    )


def held_nbytes(source: Source) -> int:
    """Return the bytes of a leaf that this process can read."""
    if source.shards is None:
        return source.spec.nbytes
    return sum(shard.box.size for shard in source.shards) * source.spec.itemsize


def _open(path: str, value: Any, adapters: AdapterSet) -> Source | None:
    """Open a leaf for staging; return None for a scalar."""
    found = adapters.resolve(type(value))
    if found is None:
        raise unsupported(path, value)
    if isinstance(found, str):
        if found != "bytes" or len(value) <= INLINE_NBYTES:
            return None
        source = adapters.adapters[0].source(path, np.frombuffer(value, np.uint8))
        source.extra = {"python": "bytes"}
        return source
    try:
        source = found.source(path, value)
    except AsyncCheckpointError:
        raise
    except Exception as error:  # raised by a subclass or a traced value
        if not fails_again(lambda: found.source(path, value)):
            raise
        raise unreadable(path, value, error) from error
    rank = len(source.spec.shape)
    if rank > MAX_RANK:
        raise UnsupportedLeafError(
            f"{where(path)}: this array has {rank} dimensions, checkpoints store at most "
            f"{MAX_RANK}; reshape it before saving",
            path=path,
            expected=MAX_RANK,
            found=rank,
        )
    source.adapter = found
    return source


def _of_all(refused: list[UnsupportedLeafError]) -> UnsupportedLeafError:
    """Return one error that names all refused leaves, so that a user can fix them together."""
    first = refused[0]
    if len(refused) == 1:
        return first
    shown = [str(error) for error in refused[:NAMED_LEAVES]]
    if len(refused) > NAMED_LEAVES:
        shown.append(f"and {len(refused) - NAMED_LEAVES} more")
    text = f"{len(refused)} leaves cannot be saved:\n  " + "\n  ".join(shown)
    return UnsupportedLeafError(text, path=first.path, expected=first.expected, found=first.found)
