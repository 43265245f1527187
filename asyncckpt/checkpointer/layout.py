"""Layout: everything about a save that depends on the tree's schema alone, made once and kept.

The next save of the same paths, shapes, dtypes and options finds its plan, sorted keys, templates
and Orbax's files ready.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncckpt.adapters.scalars import scalar_as_array
from asyncckpt.checkpointer.capture import Capture
from asyncckpt.errors import UsageError
from asyncckpt.format.orbax import OrbaxLeaf, conflicts, encode_files
from asyncckpt.format.record import StoredSpec
from asyncckpt.options import (
    ALIGNED_CHUNK_NBYTES,
    DEFAULT_DATA_FILE_NBYTES,
    INLINE_NBYTES,
    PAGE_NBYTES,
    SLOT_NBYTES,
    LeafOptions,
    SaveOptions,
)
from asyncckpt.planning.save import LeafLayout, SavePlan, plan_save
from asyncckpt.ports import ArrayAdapter, Source
from asyncckpt.spec import ArraySpec
from asyncckpt.stages.commit import Catalog, make_catalog
from asyncckpt.tree import Structure, array_names

CACHED_LAYOUTS = 2
"""Layouts kept: a training loop saves one tree, sometimes a second one for evaluation."""

_EMPTY = {"none": "None", "list": "List", "tuple": "Tuple", "namedtuple": "NamedTuple"}


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What one schema's saves share.

    Attributes:
        plan: places of all chunks; arrays of leaves first, then scalars as arrays for Orbax.
        catalog: sorted keys and templates.
        names: array name by position in `plan.leaves`.
        specs: distinct ways in which arrays are stored.
        spec_of: index into `specs` by position in `plan.leaves`.
        mirrors: leaf index of every scalar that is stored as an array too.
        orbax: Orbax's files, by path in the database's directory; None if it cannot read this.
        notes: what a person should know about it.
    """

    plan: SavePlan
    catalog: Catalog
    names: tuple[str, ...]
    specs: tuple[StoredSpec, ...]
    spec_of: tuple[int, ...]
    mirrors: tuple[int, ...]
    orbax: Mapping[str, bytes] | None
    notes: tuple[str, ...]


class LayoutCache:
    """The layouts of the latest schemas; used on one thread at a time."""

    def __init__(self) -> None:
        self._entries: list[tuple[Sequence[object], Layout]] = []

    def find(self, key: Sequence[object]) -> Layout | None:
        """The layout made for an equal key, compared part by part, never by hash."""
        for number, (known, layout) in enumerate(self._entries):
            if known == key:
                self._entries.insert(0, self._entries.pop(number))
                return layout
        return None

    def keep(self, key: Sequence[object], layout: Layout) -> None:
        """The layout is found from now on, until others have pushed it out."""
        self._entries.insert(0, (key, layout))
        del self._entries[CACHED_LAYOUTS:]


def layout_key(taken: Capture, options: SaveOptions, budget_nbytes: int) -> list[object]:
    """Everything a layout depends on; equal keys give equal layouts."""
    strings = [v for v, kind in zip(taken.values, taken.kinds, strict=True) if kind == "str"]
    fits = [scalar_as_array_fits(value) for value in taken.scalars.values()]
    return [
        taken.paths,
        taken.kinds,
        [source.spec for source in taken.sources],
        taken.tied,
        taken.extra,
        taken.structure,
        strings,
        fits,
        (
            options.chunk_nbytes,
            options.target_data_file_nbytes,
            options.compression,
            options.compression_level,
            options.layout,
            options.leaf_options,
            budget_nbytes,
        ),
    ]


def mirror_sources(
    taken: Capture, mirrors: Sequence[int], adapter: ArrayAdapter
) -> tuple[list[Source], list[ArrayAdapter]]:
    """Scalars as sources, for staging beside the arrays."""
    sources = []
    for leaf in mirrors:
        values = scalar_as_array(taken.scalars[leaf])
        assert values is not None
        sources.append(Source(_MIRROR_SPECS[taken.kinds[leaf]], values, values))
    return sources, [adapter] * len(sources)


_MIRROR_SPECS = {
    "bool": ArraySpec((), "bool"),
    "int": ArraySpec((), "int64"),
    "float": ArraySpec((), "float64"),
    "complex": ArraySpec((), "complex128"),
}


def make_layout(taken: Capture, options: SaveOptions, budget_nbytes: int) -> Layout:
    """The layout of a tree. Blocking.

    Raises:
        UsageError: `leaf_options` returned something that does not fit its leaf; names the path.
    """
    names = array_names(taken.structure.parts())
    mirrors = tuple(leaf for leaf, value in taken.scalars.items() if scalar_as_array_fits(value))
    leaves: list[LeafLayout] = []
    level = options.compression_level if options.compression == "zstd" else None
    chunk_nbytes = _bounded(options.chunk_nbytes, level, budget_nbytes)
    for number, (leaf, source) in enumerate(zip(taken.array_leaf, taken.sources, strict=True)):
        own = None
        if options.leaf_options is not None:
            own = options.leaf_options(taken.paths[leaf], source.spec)
        if own is None:
            leaves.append(
                LeafLayout(
                    names[leaf],
                    source.spec,
                    chunk_nbytes,
                    zstd_level=level,
                    tied_to=taken.tied.get(number),
                    shards=source.shards,
                )
            )
        else:
            leaves.append(
                _with_options(taken, leaf, number, source, names[leaf], own, options, budget_nbytes)
            )
    leaves += [
        LeafLayout(names[leaf], _MIRROR_SPECS[taken.kinds[leaf]], chunk_nbytes) for leaf in mirrors
    ]
    size = options.target_data_file_nbytes
    plan = plan_save(
        leaves,
        data_file_nbytes=DEFAULT_DATA_FILE_NBYTES if size == "auto" else size,
        slot_nbytes=SLOT_NBYTES,
        page_nbytes=PAGE_NBYTES,
        aligned_chunk_nbytes=ALIGNED_CHUNK_NBYTES,
        inline_nbytes=INLINE_NBYTES,
    )
    specs: dict[StoredSpec, int] = {}
    spec_of = tuple(
        specs.setdefault(StoredSpec(layout.spec, grid.chunk_shape, layout.zstd_level), len(specs))
        for layout, grid in zip(plan.leaves, plan.grids, strict=True)
    )
    orbax, notes = _orbax_files(taken, plan, mirrors)
    return Layout(
        plan=plan,
        catalog=make_catalog(plan),
        names=tuple(layout.name for layout in plan.leaves),
        specs=tuple(specs),
        spec_of=spec_of,
        mirrors=mirrors,
        orbax=orbax,
        notes=notes,
    )


def scalar_as_array_fits(value: Any) -> bool:
    """Whether a dtype holds the scalar."""
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 63
    return not isinstance(value, (str, bytes))


def _bounded(chunk_nbytes: int, level: int | None, budget_nbytes: int) -> int:
    # A compressed chunk is held twice, whole; four of them must fit, or stages cannot overlap.
    return chunk_nbytes if level is None else min(chunk_nbytes, budget_nbytes // 4)


def _with_options(
    taken: Capture,
    leaf: int,
    number: int,
    source: Source,
    name: str,
    own: LeafOptions,
    options: SaveOptions,
    budget_nbytes: int,
) -> LeafLayout:
    path = taken.paths[leaf]
    if not isinstance(own, LeafOptions):
        raise UsageError(
            f"{path}: leaf_options returned {own!r}; return a LeafOptions or None", path=path
        )
    compression = own.compression or options.compression or "none"
    level = None
    if compression == "zstd":
        level = own.compression_level or options.compression_level
    spec = source.spec if own.dtype is None else ArraySpec(source.spec.shape, own.dtype)
    tied = taken.tied.get(number)
    if own.chunk_shape is not None and len(own.chunk_shape) != len(spec.shape):
        raise UsageError(
            f"{path}: LeafOptions(chunk_shape={own.chunk_shape}) has {len(own.chunk_shape)} "
            f"dimensions, the leaf has shape {spec.shape}",
            path=path,
            expected=len(spec.shape),
            found=own.chunk_shape,
        )
    return LeafLayout(
        name,
        spec,
        _bounded(own.chunk_nbytes or options.chunk_nbytes, level, budget_nbytes),
        chunk_shape=own.chunk_shape,
        zstd_level=level,
        tied_to=tied,
        shards=source.shards,
    )


# ---------------------------------------------------------------------------------------- Orbax


def _orbax_files(
    taken: Capture, plan: SavePlan, mirrors: Sequence[int]
) -> tuple[Mapping[str, bytes] | None, tuple[str, ...]]:
    array_of = {leaf: number for number, leaf in enumerate([*taken.array_leaf, *mirrors])}
    leaves: list[OrbaxLeaf] = []
    for path, child in orbax_paths(taken.structure):
        if isinstance(child, str):
            leaves.append(OrbaxLeaf(path, child))  # type: ignore[arg-type]
            continue
        kind = taken.kinds[child]
        array = array_of.get(child)
        if kind == "str":
            leaves.append(OrbaxLeaf(path, "string", text=taken.scalars[child]))
        elif array is None:
            return None, (
                f"{taken.paths[child]}: Orbax cannot hold this {kind}, so it cannot restore this "
                "checkpoint; asyncckpt can",
            )
        elif kind in _MIRROR_SPECS:
            leaves.append(OrbaxLeaf(path, "scalar", plan.leaves[array].name))
        else:
            leaves.append(_orbax_array(path, taken, plan, child, array))
    bad = conflicts(leaves)
    if bad:
        shown = ".".join(key for key, _ in leaves[bad[0]].path)
        return None, (
            f"Orbax would not find {shown!r} under its name (and {len(bad) - 1} more), so it "
            "cannot restore this checkpoint; asyncckpt can",
        )
    return encode_files(leaves), ()


def _orbax_array(
    path: tuple[tuple[str, bool], ...], taken: Capture, plan: SavePlan, leaf: int, array: int
) -> OrbaxLeaf:
    name = plan.leaves[array].name
    implementation = taken.extra.get(leaf, {}).get("prng_impl")
    if implementation is None:
        # Also for jax.Array: Orbax then needs no device of the machine that saved.
        return OrbaxLeaf(path, "array", name)
    devices = sorted(map(str, taken.sources[array].leaf.devices()))
    return OrbaxLeaf(
        path,
        "jax",
        name,
        shape=plan.leaves[array].spec.shape,
        chunk_shape=plan.grids[array].chunk_shape,
        device=devices[0],
        key_impl=implementation,
    )


def orbax_paths(
    structure: Structure,
) -> list[tuple[tuple[tuple[str, bool], ...], int | str]]:
    """Orbax's path of every leaf (its ordinal) and of every empty container (its kind)."""
    found: list[tuple[tuple[tuple[str, bool], ...], int | str]] = []
    if not structure.nodes:
        return [((), 0)]
    at_node: list[tuple[tuple[str, bool], ...]] = [()] * len(structure.nodes)
    for index, node in enumerate(structure.nodes):
        base = at_node[index]
        if not node.children:
            found.append((base, _EMPTY.get(node.kind, "Dict")))
            continue
        sequence = node.kind in ("list", "tuple")
        keys = node.keys if node.keys else range(len(node.children))
        for key, child in zip(keys, node.children, strict=True):
            path = base if node.kind == "stateful" else (*base, (str(key), sequence))
            if child >= 0:
                found.append((path, child))
            else:
                at_node[-child] = path
    return found
