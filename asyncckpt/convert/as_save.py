"""Writing what a checkpoint of any format holds as one of ours: an ordinary save that reads it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from asyncckpt.checkpointer.capture import Capture
from asyncckpt.checkpointer.destination import Target, is_banded
from asyncckpt.checkpointer.layout import LayoutCache, layout_key, make_layout
from asyncckpt.checkpointer.origin import Origin
from asyncckpt.checkpointer.reader import LeafReader
from asyncckpt.checkpointer.saves import (
    Save,
    SaveRequest,
    SaveState,
    array_nbytes,
    packing_nbytes,
    sizes_for,
)
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.format.record import STEP_NAME
from asyncckpt.options import INLINE_NBYTES, LeafOptions, SaveOptions
from asyncckpt.planning.pack import TRAILER_NBYTES
from asyncckpt.planning.tiles import chunk_shape_for
from asyncckpt.reports import ConvertReport, SaveReport
from asyncckpt.spec import ArraySpec


async def write_checkpoint(target: Target, origin: Origin, taken: Capture) -> ConvertReport:
    """The tree is committed at the target, one array per leaf.

    Cancellation, errors: as for saving; in addition:

    Raises:
        UnsupportedLeafError: an export, and Orbax cannot hold a leaf. Nothing was written.
        CorruptCheckpointError: names leaf, file and offset; nothing is left.
    """
    reader = origin.reader
    small = [leaf for leaf in taken.array_leaf if _is_inline(reader, leaf)]
    others = [leaf for leaf in taken.array_leaf if not _is_inline(reader, leaf)]
    # Inline values are staged first.
    reader.in_order([*small, *others])
    options = dataclasses.replace(
        target.options, leaf_options=_leaf_options(target, reader, taken), deadline_s=None
    )
    layouts = LayoutCache()
    if target.destination.orbax:
        await _check_orbax(target, origin, taken, options, layouts)
    step = int(target.name) if STEP_NAME.fullmatch(target.name) else None
    save = Save(
        target.runtime,
        target.store,
        layouts,
        SaveRequest(
            name=target.name,
            step=origin.step if step is None else step,
            taken=taken,
            metadata={**origin.opened.metadata, **target.metadata},
            metrics=origin.opened.metrics,
            overwrite=target.destination.overwrite,
            options=options,
            progress=target.progress,
            stall_first=False,
        ),
        SaveState(),
        _nothing,
    )
    saved = await save.run(asyncio.Lock(), _kept)
    return target.report(
        origin,
        location=saved.location,
        step=step,
        leaf_count=saved.leaf_count,
        array_count=saved.array_count,
        nbytes=saved.nbytes,
        stored_nbytes=saved.stored_nbytes,
        file_count=saved.file_count,
        orbax=saved.orbax,
        notes=saved.notes,
    )


async def _check_orbax(
    target: Target, origin: Origin, taken: Capture, options: SaveOptions, layouts: LayoutCache
) -> None:
    budget = packing_nbytes(target.runtime, target.store)
    sizes = sizes_for(target.runtime, target.store, array_nbytes(taken), options)
    layout = await target.runtime.engine.compute.run(make_layout, taken, options, budget, sizes)
    if layout.orbax is None:
        raise UnsupportedLeafError(
            f"{origin.opened.location}: Orbax cannot restore this tree, so it was not "
            f"exported: {'; '.join(layout.notes)}. Convert it without --orbax, or save it "
            "again without that leaf",
            location=origin.opened.location,
            found=layout.notes,
        )
    layouts.keep(layout_key(taken, options, budget, sizes), layout)


def _leaf_options(
    target: Target, reader: LeafReader, taken: Capture
) -> Callable[[str, ArraySpec], LeafOptions | None] | None:
    """The user's options, and chunks like the source's where those would be read repeatedly."""
    own = target.options.leaf_options
    most = sizes_for(
        target.runtime, target.store, array_nbytes(taken), target.options
    ).chunk_limit_nbytes
    largest = target.largest_nbytes if most is None else min(target.largest_nbytes, most)
    shapes: dict[str, tuple[int, ...]] = {}
    for leaf in taken.array_leaf:
        spec = reader.spec(leaf)
        assert spec is not None
        if is_banded(reader, leaf, spec):
            shape = chunk_shape_for(
                spec.shape,
                reader.parts(leaf),
                spec.itemsize,
                target_nbytes=min(target.options.chunk_nbytes, largest),
                limit_nbytes=largest,
            )
            if shape is not None:
                shapes[taken.paths[leaf]] = shape
    if not shapes:
        return own

    def leaf_options(path: str, spec: ArraySpec) -> LeafOptions | None:
        chosen = None if own is None else own(path, spec)
        if path not in shapes:
            return chosen
        if not isinstance(chosen, LeafOptions):
            return LeafOptions(chunk_shape=shapes[path]) if chosen is None else chosen
        if chosen.chunk_shape is not None or chosen.chunk_nbytes is not None:
            return chosen
        return dataclasses.replace(chosen, chunk_shape=shapes[path])

    return leaf_options


def _is_inline(reader: LeafReader, leaf: int) -> bool:
    spec = reader.spec(leaf)
    return spec is not None and spec.nbytes + TRAILER_NBYTES <= INLINE_NBYTES


def _nothing() -> None:
    """Nobody waits for the state to be copied."""


async def _kept(report: SaveReport) -> SaveReport:
    """A conversion deletes no other step."""
    return report
