"""Conversion to an asyncckpt checkpoint: an ordinary save whose leaves are read from another."""

from __future__ import annotations

import asyncio
import dataclasses
import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from asyncckpt.adapters.numpy import NumpyAdapter
from asyncckpt.convert.destination import Facts, Target
from asyncckpt.convert.reader import LeafReader
from asyncckpt.convert.tiles import chunk_shape_for
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.format.record import STEP_NAME
from asyncckpt.format.scalars import decode_scalar
from asyncckpt.options import INLINE_NBYTES, LeafOptions
from asyncckpt.planning.pack import TRAILER_NBYTES
from asyncckpt.ports import Source
from asyncckpt.save.plan_cache import LayoutCache, layout_of, terms_for
from asyncckpt.save.save import Save, SaveState
from asyncckpt.save.snapshot import SaveRequest, Snapshot
from asyncckpt.spec import ITEMSIZES, ArraySpec, Box

DEVICE = "TFRT_CPU_0"
"""Device on which Orbax restores typed PRNG keys without a target; if JAX's default backend is not
the CPU, Orbax needs a target for them."""


@dataclass(frozen=True, slots=True)
class StoredLeaf:
    """Ordinal of a leaf, in place of the array of a `Source`."""

    number: int

    def devices(self) -> Sequence[str]:
        """Return the devices, like `jax.Array.devices`."""
        return (DEVICE,)


class StoredAdapter(NumpyAdapter):
    """Adapter that fetches from a checkpoint; its caller's threads are not the reader's."""

    def __init__(self, reader: LeafReader) -> None:
        self._reader = reader

    def fetch(self, source: Source, shard: int, box: Box, out: npt.NDArray[Any]) -> None:
        """Read the values of `box` from the checkpoint into `out`. Blocking."""
        self._reader.read(source.leaf.number, box, out)


def snapshot_of(reader: LeafReader) -> Snapshot:
    """Return a snapshot of the checkpoint; its sources read the arrays."""
    opened = reader.opened
    kinds, values = opened.leaves.kind, opened.leaves.value
    result = Snapshot(
        opened.structure(),
        reader.paths,
        list(kinds),
        list(values),
        extra={leaf: dict(facts) for leaf, facts in opened.leaves.extra.items()},
    )
    adapter = StoredAdapter(reader)
    tied = opened.arrays.tied
    seen: dict[tuple[int, ...], int] = {}
    for leaf, kind in enumerate(kinds):
        spec = reader.specs[leaf]
        if spec is None:
            result.scalars[leaf] = decode_scalar(kind, values[leaf])
            continue
        # Leaves that share all their arrays become one array again.
        arrays = tuple([tied.get(piece.array, piece.array) for piece in reader.pieces[leaf]])
        first = seen.setdefault(arrays, len(result.sources))
        facts = result.extra.get(leaf)
        source = Source(spec, StoredLeaf(leaf), None, framework=kind, extra=facts, adapter=adapter)
        result.add(leaf, source, first)
    return result


async def write_checkpoint(target: Target, reader: LeafReader, snapshot: Snapshot) -> Facts:
    """Commit the tree at the target, one array per leaf; return fields of the report.

    Cancellation, errors: as for saving; in addition:

    Raises:
        UnsupportedLeafError: Orbax cannot hold a leaf of an export. Nothing was written.
        CorruptCheckpointError: names leaf, file and offset. Nothing was written.
    """
    opened = reader.opened
    # A save stages inline values first.
    largest = INLINE_NBYTES - TRAILER_NBYTES
    by_leaf = zip(snapshot.array_leaf, snapshot.sources, strict=True)
    ordered = sorted(by_leaf, key=lambda item: item[1].spec.nbytes > largest)
    reader.in_order([leaf for leaf, _ in ordered])
    options = dataclasses.replace(
        target.options, leaf_options=_leaf_options(target, reader, snapshot), deadline_s=None
    )
    layouts = LayoutCache()
    if target.orbax:
        terms = terms_for(target.runtime, target.store, snapshot.nbytes, options)
        compute = target.runtime.engine.compute
        layout = await layout_of(snapshot, terms, cache=layouts, compute=compute)
        if layout.orbax is None:
            raise UnsupportedLeafError(
                f"{opened.location}: Orbax cannot restore this tree, so it was not "
                f"exported: {'; '.join(layout.notes)}. Convert it without --orbax, or save it "
                "again without that leaf",
                location=opened.location,
                found=layout.notes,
            )
    step = saved_step = _step_of(target.name)
    if saved_step is None and opened.record is not None:
        saved_step = opened.record.step
    if saved_step is None:
        saved_step = _step_of(posixpath.basename(opened.location))
    save = Save(
        target.runtime,
        target.store,
        layouts,
        SaveRequest(
            name=target.name,
            step=saved_step,
            snapshot=snapshot,
            metadata={**opened.metadata, **target.metadata},
            metrics=opened.metrics,
            overwrite=target.overwrite,
            options=options,
            progress=target.progress,
            stall_first=False,
        ),
        SaveState(),
    )
    saved = await save.run(asyncio.Lock())
    same = ("location", "leaf_count", "array_count", "nbytes", "stored_nbytes", "file_count")
    facts = {name: getattr(saved, name) for name in (*same, "orbax", "notes")}
    return {**facts, "step": step}


def _step_of(name: str) -> int | None:
    """Return the step of this name, None for other names."""
    return int(name) if STEP_NAME.fullmatch(name) else None


def _leaf_options(
    target: Target, reader: LeafReader, snapshot: Snapshot
) -> Callable[[str, ArraySpec], LeafOptions | None] | None:
    """Return the user's options, with chunk shapes that read each chunk of the source once."""
    own = target.options.leaf_options
    terms = terms_for(target.runtime, target.store, snapshot.nbytes, target.options)
    most = terms.sizes.chunk_limit_nbytes
    largest = target.largest_nbytes if most is None else min(target.largest_nbytes, most)
    banded = {snapshot.paths[leaf]: leaf for leaf in snapshot.array_leaf if reader.is_banded(leaf)}
    if not banded:
        return own

    def leaf_options(path: str, spec: ArraySpec) -> LeafOptions | None:
        chosen = None if own is None else own(path, spec)
        if path not in banded:
            return chosen
        if chosen is None:
            chosen = LeafOptions()
        if not isinstance(chosen, LeafOptions):
            return chosen  # refused by the plan
        if chosen.chunk_shape is not None or chosen.chunk_nbytes is not None:
            return chosen
        shape = chunk_shape_for(
            spec.shape,
            reader.parts(banded[path]),
            max(spec.itemsize, ITEMSIZES[chosen.dtype or spec.dtype]),
            target_nbytes=min(target.options.chunk_nbytes, largest),
            limit_nbytes=largest,
        )
        return dataclasses.replace(chosen, chunk_shape=shape)

    return leaf_options
