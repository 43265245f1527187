"""Cached layouts: everything about a save that depends only on the tree's schema.

The next save of the same paths, shapes, dtypes and options reuses the plan, sorted keys, templates
and Orbax's files.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from asyncckpt.errors import UsageError
from asyncckpt.flow.threads import Workers
from asyncckpt.format.record import EncodedTables, encode_tables
from asyncckpt.format.record_values import ArrayTable, LeafTable, Piece, StoredSpec
from asyncckpt.format.zarr import MAX_CHUNK_NBYTES
from asyncckpt.options import (
    ALIGNED_CHUNK_NBYTES,
    INLINE_NBYTES,
    PAGE_NBYTES,
    LeafOptions,
    SaveOptions,
)
from asyncckpt.planning.leaves import LeafLayout
from asyncckpt.planning.merge import Merged, OwnPart
from asyncckpt.planning.save import SavePlan, plan_save
from asyncckpt.ports import Sizes, Source, Store
from asyncckpt.runtime import Runtime
from asyncckpt.save.index import Catalog, make_catalog
from asyncckpt.save.orbax_files import key_devices, orbax_files
from asyncckpt.save.snapshot import Snapshot
from asyncckpt.spec import DTYPES, ArraySpec, Shard, array_spec
from asyncckpt.tree import array_names, names_of_paths, where

CACHED_LAYOUTS = 2
"""Layouts in the cache: a training loop saves one tree, sometimes a second one for evaluation."""

UNEVEN = (
    "the processes have different trees, which Orbax's metadata is not written for; "
    "'asyncckpt export --orbax' converts the checkpoint"
)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Plan and encoded metadata that all saves of one schema share.

    Attributes:
        plan: places of all chunks; arrays of leaves first, then scalars as arrays for Orbax.
        catalog: sorted keys and templates; None if another process commits.
        specs: distinct ways in which arrays are stored.
        arrays: the arrays of the plan, as in the record.
        pieces: offset and array of each piece, by leaf index.
        mirrors: leaf indices of scalars that are also stored as arrays.
        orbax: Orbax's files, by path in the database's directory; None if Orbax cannot restore it.
        digest: SHA-256 (hex) of `specs` and `arrays`.
        tables: the tables of the record; None if another process commits or trees differ.
        schema_digest: digest of the schema on which the processes agreed.
        fresh: the processes agreed on it for this save.
        compared: the processes compared their schemas before this save.
    """

    plan: SavePlan
    catalog: Catalog | None
    specs: tuple[StoredSpec, ...]
    arrays: ArrayTable
    pieces: Mapping[int, tuple[Piece, ...]]
    mirrors: tuple[int, ...]
    orbax: Mapping[str, bytes] | None
    notes: tuple[str, ...]
    digest: str
    tables: EncodedTables | None = None
    schema_digest: str = ""
    fresh: bool = False
    compared: bool = False


class Limits(NamedTuple):
    """Limits of a process's memory and store for chunks, in bytes.

    Attributes:
        budget_nbytes: memory for a chunk that is held whole, as much again for its compressed form.
        chunk_nbytes: upper limit of the target size, None for no limit.
        chunk_limit_nbytes: largest chunk that can be stored, None for no limit.
    """

    budget_nbytes: int
    chunk_nbytes: int | None
    chunk_limit_nbytes: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Agreement:
    """Agreement of all processes on one schema.

    Attributes:
        run_id: run id of the group that agreed.
        own: digest of this process's schema.
        partial: this process holds only a part of some leaf.
        limits: the lowest limits of all processes.
        merged: the tree of all processes; None if their schemas are equal.
    """

    run_id: str
    own: str
    partial: bool
    limits: Limits
    merged: Merged | None = None

    @property
    def digest(self) -> str:
        """Digest of the schema, or of all merged schemas and their processes."""
        return self.own if self.merged is None else self.merged.digest


class LayoutCache:
    """The latest layouts, and agreements of processes, by schema; used on one engine's loop.

    Attributes:
        hits: searches that found a layout.
        misses: searches that found none.
        may_differ: in some save, dicts had different keys on different processes, or a leaf changed
            only on some of them; equal on all processes that know an agreement of their group.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Sequence[object], Layout]] = []
        self._agreements: list[tuple[Sequence[object], Agreement]] = []
        self.hits = 0
        self.misses = 0
        self.may_differ = False

    def find(self, key: Sequence[object]) -> Layout | None:
        """Return the layout for an equal key; keys are compared part by part, never by hash."""
        for number, (known, layout) in enumerate(self._entries):
            if known == key:
                self._entries.insert(0, self._entries.pop(number))
                self.hits += 1
                return layout
        self.misses += 1
        return None

    def forget(self) -> None:
        """Drop all layouts and agreements."""
        self._entries.clear()
        self._agreements.clear()

    def agreement(self, key: Sequence[object]) -> Agreement | None:
        """Return the agreement on an equal schema, or None."""
        return next((agreed for known, agreed in self._agreements if known == key), None)

    def latest_agreed(self) -> Sequence[object] | None:
        """Return the schema of the latest agreement, or None."""
        return self._agreements[0][0] if self._agreements else None

    def agree(self, key: Sequence[object], agreed: Agreement) -> None:
        """Cache an agreement until others replace it."""
        others = [known for known in self._agreements if known[0] != key]
        self._agreements = [(key, agreed), *others[: CACHED_LAYOUTS - 1]]

    def keep(self, key: Sequence[object], layout: Layout) -> None:
        """Cache a layout until others replace it."""
        self._entries.insert(0, (key, layout))
        del self._entries[CACHED_LAYOUTS:]


class Terms(NamedTuple):
    """Inputs of a layout besides the tree.

    Attributes:
        options: the caller's options.
        limits: limits for chunks; they apply instead of those in `sizes`.
        sizes: sizes of files and windows.
        process: number of this process.
        process_count: number of processes that save together.
    """

    options: SaveOptions
    limits: Limits
    sizes: Sizes
    process: int = 0
    process_count: int = 1


def terms_for(runtime: Runtime, store: Store, nbytes: int, options: SaveOptions) -> Terms:
    """Return the terms on which one process saves `nbytes` to this store."""
    size, streams = options.target_data_file_nbytes, options.concurrency
    budget_nbytes = runtime.budget.capacity
    sizes = store.sizes(
        nbytes,
        budget_nbytes=budget_nbytes,
        chunk_nbytes=options.chunk_nbytes,
        data_file_nbytes=None if size == "auto" else size,
        concurrency=None if streams == "auto" else streams,
    )
    # The rest of the budget holds the windows into which compressed chunks are packed.
    if store.capabilities.positional_writes:
        budget_nbytes -= sizes.window_nbytes
    else:
        budget_nbytes //= 2
    # Half of it is for the compressor's output. Chunks are copied to whole slots.
    slot_nbytes = runtime.pool.slot_nbytes
    held_nbytes = budget_nbytes // 2 // slot_nbytes * slot_nbytes
    return Terms(options, Limits(held_nbytes, sizes.chunk_nbytes, sizes.chunk_limit_nbytes), sizes)


async def layout_of(
    snapshot: Snapshot, terms: Terms, *, cache: LayoutCache, compute: Workers
) -> Layout:
    """Return the layout of a snapshot: cached, or made with the errors of `make_layout`."""
    key = layout_key(snapshot, terms)
    layout = cache.find(key)
    if layout is None:
        layout = await compute.run(make_layout, snapshot, terms)
        cache.keep(key, layout)
    return layout


def layout_key(snapshot: Snapshot, terms: Terms) -> list[object]:
    """Return the key of a layout; equal keys give equal layouts."""
    options, limits, sizes, process, process_count = terms
    # Orbax's files contain the text of strings; of other scalars only whether a dtype holds them.
    scalars = [
        value if isinstance(value, str) else scalar_as_array_fits(value)
        for value in snapshot.scalars.values()
    ]
    return [
        *tree_key(snapshot),
        snapshot.held,
        snapshot.uneven,
        scalars,
        key_devices(snapshot),
        (process, process_count),
        replace(sizes, concurrency=0, notes=(), chunk_nbytes=None, chunk_limit_nbytes=None),
        limits,
        (options.chunk_nbytes, options.compression, options.compression_level),
        (options.layout, options.leaf_options),
    ]


def tree_key(snapshot: Snapshot) -> list[object]:
    """Return the parts of a key that describe the tree without the values of scalars."""
    divisions: dict[int, object] = {}
    for number, source in snapshot.sources.opened.items():
        if source.shards is not None or source.partition is not None:
            divisions[number] = source.shards, source.partition
    return [
        snapshot.paths,
        snapshot.kinds,
        [*snapshot.array_leaf],  # copied, because `add_mirrors` extends it
        [*snapshot.sources.specs],  # likewise
        divisions,
        snapshot.tied,
        snapshot.extra,
        snapshot.structure,
    ]


def add_mirrors(snapshot: Snapshot, mirrors: Sequence[int]) -> None:
    """Add scalars to the snapshot's sources, for staging with the arrays."""
    for leaf in mirrors:
        spec = _MIRROR_SPECS[snapshot.kinds[leaf]]
        values = np.asarray(snapshot.scalars[leaf], DTYPES[spec.dtype])
        snapshot.sources.append_plain(spec, values)
        snapshot.array_leaf.append(leaf)


_MIRROR_SPECS = {
    "bool": array_spec((), "bool"),
    "int": array_spec((), "int64"),
    "float": array_spec((), "float64"),
    "complex": array_spec((), "complex128"),
}


def make_layout(snapshot: Snapshot, terms: Terms) -> Layout:
    """Plan this process's part in the saves of one schema. Blocking.

    Raises:
        UsageError: the result of `leaf_options` does not fit its leaf, or the shards of a leaf do
            not fit `layout`; names the path.
        …: from `leaf_options`; a note names the path.
    """
    options, limits, sizes, process, process_count = terms
    names = names_of_paths(snapshot.paths) or array_names(snapshot.structure.parts())
    leaves = _leaf_layouts(snapshot, names, terms)
    mirrors: list[int] = []
    # If trees differ, each process knows only its own scalars.
    for leaf, value in ({} if snapshot.uneven else snapshot.scalars).items():
        if scalar_as_array_fits(value):
            mirrors.append(leaf)
            spec = _MIRROR_SPECS[snapshot.kinds[leaf]]
            leaves.append(LeafLayout(names[leaf], spec, options.chunk_nbytes))
    try:
        plan = plan_save(
            leaves,
            list(map(names.__getitem__, [*snapshot.array_leaf, *mirrors])),
            data_file_nbytes=sizes.data_file_nbytes,
            slot_nbytes=sizes.window_nbytes,
            page_nbytes=PAGE_NBYTES,
            aligned_chunk_nbytes=ALIGNED_CHUNK_NBYTES,
            inline_nbytes=INLINE_NBYTES,
            regular=options.layout == "regular",
            even_streams=sizes.even_streams,
            process=process,
            process_count=process_count,
        )
    except UsageError as error:
        if error.path in names:  # the name of an array
            error.path = snapshot.paths[names.index(error.path)]
            error.args = (f"{where(error.path)}: {error}",)
        raise
    if plan.compressed:
        _check_packed(plan, snapshot, limits.budget_nbytes)
    arrays = plan.arrays
    specs: dict[StoredSpec, int] = {}
    spec_of: list[int] = []
    for part in arrays.parts:
        stored = StoredSpec(part.spec, part.grid.chunk_shape, part.layout.zstd_level)
        spec_of.append(specs.setdefault(stored, len(specs)))
    spec_of = list(map(spec_of.__getitem__, arrays.part.tolist()))
    table = ArrayTable(list(arrays.names), spec_of, arrays.tied)
    pieces = {
        snapshot.array_leaf[number]: tuple([Piece(arrays.of(array).offset, array) for array in own])
        for number, own in arrays.pieces.items()
    }
    commits = process == 0
    orbax: Mapping[str, bytes] | None = None
    notes: tuple[str, ...] = (UNEVEN,) if snapshot.uneven else ()
    tables = None
    if commits and not snapshot.uneven:
        orbax, notes = orbax_files(snapshot, plan, mirrors)
        leaf_table = LeafTable(snapshot.kinds, snapshot.values, snapshot.extra, pieces)
        tables = encode_tables(snapshot.structure.to_json(), leaf_table, tuple(specs), table)
    return Layout(
        plan=plan,
        catalog=make_catalog(arrays) if commits else None,
        specs=tuple(specs),
        arrays=table,
        tables=tables,
        pieces=pieces,
        mirrors=tuple(mirrors),
        orbax=orbax,
        notes=notes,
        digest=_digest(specs, table) if commits else "",
    )


def _digest(specs: Iterable[StoredSpec], arrays: ArrayTable) -> str:
    stored = [(s.spec.shape, s.spec.dtype, s.chunk_shape, s.zstd_level) for s in specs]
    digest = hashlib.sha256(json.dumps([stored, [*arrays.tied.items()], len(arrays.name)]).encode())
    digest.update(np.array(arrays.spec, "<i8"))
    digest.update("\n".join(arrays.name).encode())  # names have no line breaks
    return digest.hexdigest()


def _check_packed(plan: SavePlan, snapshot: Snapshot, budget_nbytes: int) -> None:
    """Refuse compressed chunks that are too large for their part of the budget."""
    for array in np.unique(plan.row_array[list(plan.compressed)]).tolist():
        part = plan.arrays.of(array)
        nbytes = part.grid.chunk_size * part.spec.itemsize
        if nbytes > budget_nbytes:
            path = snapshot.paths[snapshot.array_leaf[int(plan.arrays.leaf[array])]]
            raise UsageError(
                f"{path}: its chunk_shape or its shards make chunks of {nbytes} bytes; chunks to "
                f"compress are held whole, and the budget has {budget_nbytes} for one: pass a "
                'smaller chunk_shape, store it with LeafOptions(compression="none"), shard it '
                "evenly, or raise host_memory_nbytes",
                path=path,
                expected=budget_nbytes,
                found=nbytes,
            )


def _leaf_layouts(snapshot: Snapshot, names: Sequence[str], terms: Terms) -> list[LeafLayout]:
    """Return the layout of every array; one object for all that differ only in their names."""
    options = terms.options
    level = options.compression_level if options.compression == "zstd" else None
    chunk_nbytes = _bounded(options.chunk_nbytes, level, terms)
    leaves: list[LeafLayout] = []
    sources, opened = snapshot.sources, snapshot.sources.opened
    whole = OwnPart(None, None, None)
    alike: dict[int, LeafLayout] = {}
    everyone = tuple(range(terms.process_count))
    replicated: dict[int, tuple[Shard, ...]] = {}  # by `id`, as `Holders` and `plan_arrays` do
    for number, (leaf, spec) in enumerate(zip(snapshot.array_leaf, sources.specs, strict=True)):
        name = names[leaf]
        first = snapshot.tied.get(number)
        if first is not None:
            # This path's own options are ignored: the bytes are stored once, in one dtype.
            leaves.append(leaves[first]._replace(name=name, tied_to=first))
            continue
        own = None
        if options.leaf_options is not None:
            own = options_of_leaf(options, snapshot.paths[leaf], spec)
        held = snapshot.held.get(number)
        if held is None:
            source = opened.get(number)
            held = whole
            if source is not None and (source.shards is not None or source.partition is not None):
                shards = source.shards
                if shards and source.partition is None:  # every process holds the whole array
                    if id(shards) not in replicated:
                        replicated[id(shards)] = tuple([Shard(s.box, everyone) for s in shards])
                    shards = replicated[id(shards)]
                held = OwnPart(shards, source.partition, None)
        if own is None and held is whole:
            known = alike.get(id(spec))
            if known is None:
                known = alike[id(spec)] = LeafLayout(name, spec, chunk_nbytes, None, level)
            leaves.append(known)
        elif own is None:
            leaves.append(LeafLayout(name, spec, chunk_nbytes, None, level, None, *held))
        else:
            path, source = snapshot.paths[leaf], sources[number]
            layout = _with_options(path, source, held, name, own, terms)
            first_only = own.replicas == "first"
            leaves.append(_first_only(layout, terms.process) if first_only else layout)
    return leaves


def untie(snapshot: Snapshot, options: SaveOptions) -> None:
    """Separate arrays that share all bytes, but are stored in different dtypes. Blocking.

    Raises:
        …: as `options_of_leaf` and `stored_spec`.
    """

    def stored(number: int) -> ArraySpec:
        path, source = snapshot.paths[snapshot.array_leaf[number]], snapshot.sources[number]
        own = options_of_leaf(options, path, source.spec)
        return source.spec if own is None else stored_spec(path, source, own)

    stored_as: dict[int, dict[ArraySpec, int]] = {}
    for number, first in [*snapshot.tied.items()]:
        known = stored_as.get(first)
        if known is None:
            known = stored_as[first] = {stored(first): first}
        same = known.setdefault(stored(number), number)
        if same == number:
            del snapshot.tied[number]
            snapshot.nbytes += snapshot.sources[number].spec.nbytes
        else:
            snapshot.tied[number] = same


def options_of_leaf(options: SaveOptions, path: str, spec: ArraySpec) -> LeafOptions | None:
    """Return the result of `leaf_options` for a leaf.

    Raises:
        UsageError: it returned neither `LeafOptions` nor None, or raised a `BaseException` such as
            `SystemExit`; names the path.
        …: any `Exception` that it raised; a note names the path.
    """
    if options.leaf_options is None:
        return None
    try:
        own = options.leaf_options(path, spec)
    except Exception as error:
        error.add_note(f"raised by leaf_options for {where(path)} ({spec})")
        raise
    except BaseException as error:  # would end the engine's thread, or look like a cancellation
        raise UsageError(
            f"{where(path)}: leaf_options raised {type(error).__name__}: {error}; to end a save, "
            "raise an Exception",
            path=path,
        ) from error
    if own is not None and not isinstance(own, LeafOptions):
        raise UsageError(
            f"{where(path)}: leaf_options returned {own!r}; return a LeafOptions or None", path=path
        )
    return own


def stored_spec(path: str, source: Source, own: LeafOptions) -> ArraySpec:
    """Return the array's spec in the dtype of its options.

    Raises:
        UsageError: the options ask for a cast of bytes that are not numbers; names the path.
    """
    spec = source.spec
    if own.dtype is None or own.dtype == spec.dtype:
        return spec
    facts = source.extra or {}
    kind = "a bytes object" if facts.get("python") == "bytes" else None
    if "prng_impl" in facts:
        kind = "a PRNG key"
    if kind is not None:
        raise UsageError(
            f"{where(path)}: this leaf is {kind}, which has no values to cast to {own.dtype}; "
            f"return no dtype for this path in leaf_options (or leave {spec.dtype} out of --cast)",
            path=path,
            expected=spec.dtype,
            found=own.dtype,
        )
    return ArraySpec(spec.shape, own.dtype)


def scalar_as_array_fits(value: Any) -> bool:
    """Return whether a dtype holds the scalar."""
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 63
    return not isinstance(value, (str, bytes))


def _bounded(chunk_nbytes: int, level: int | None, terms: Terms) -> int:
    if terms.limits.chunk_nbytes is not None:
        chunk_nbytes = min(chunk_nbytes, terms.limits.chunk_nbytes)
    # Stages overlap only if two chunks to compress fit.
    return chunk_nbytes if level is None else min(chunk_nbytes, terms.limits.budget_nbytes // 2)


def _with_options(
    path: str, source: Source, held: OwnPart, name: str, own: LeafOptions, terms: Terms
) -> LeafLayout:
    options = terms.options
    compression = own.compression or options.compression or "none"
    level = None
    if compression == "zstd":
        level = own.compression_level or options.compression_level
    spec = stored_spec(path, source, own)
    chunk_nbytes = math.prod(own.chunk_shape or ()) * spec.itemsize
    limit = terms.limits.chunk_limit_nbytes or MAX_CHUNK_NBYTES
    if chunk_nbytes > limit:
        why = f"restores accept at most {limit} bytes: pass smaller chunks"
        if terms.limits.chunk_limit_nbytes is not None:
            why = (
                f"this store writes each object in one request, of at most {limit} bytes within "
                "the budget: pass smaller chunks, or raise host_memory_nbytes"
            )
        raise UsageError(
            f"{path}: LeafOptions(chunk_shape={own.chunk_shape}) makes chunks of {chunk_nbytes} "
            f"bytes; {why}",
            path=path,
            expected=limit,
            found=chunk_nbytes,
        )
    chunk_nbytes = _bounded(own.chunk_nbytes or options.chunk_nbytes, level, terms)
    return LeafLayout(name, spec, chunk_nbytes, own.chunk_shape, level, None, *held)


def _first_only(leaf: LeafLayout, process: int) -> LeafLayout:
    """Make the lowest holder of every part its only holder, because replicas may differ."""
    if leaf.shards is None:
        return leaf._replace(holders=(min(leaf.holders or (0,)),))
    shards = [Shard(shard.box, (min(shard.holders),)) for shard in leaf.shards]
    if leaf.partition is not None:
        shards = [shard for shard in shards if shard.holders == (process,)]
    return leaf._replace(shards=tuple(shards))
