"""One restore: match, plan, then fetch, decode and place, overlapping."""

# Rule 1: nothing of the payload is read, and no target touched, before everything has been matched.
# Rule 2: values are handed over only after every checksum has passed.

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncckpt.adapters import AdapterSet
from asyncckpt.adapters.scalars import unsupported
from asyncckpt.checkpointer.filling import Filling, changed_error
from asyncckpt.checkpointer.match import (
    Assignment,
    Matching,
    Wanted,
    check_framework,
    match,
    match_saved,
)
from asyncckpt.checkpointer.memory import wanted_nbytes
from asyncckpt.checkpointer.runtime import Runtime
from asyncckpt.checkpointer.stateful import below, lacking, refuse_parts
from asyncckpt.checkpointer.values import Leaves
from asyncckpt.errors import AsyncCheckpointError, UsageError
from asyncckpt.flow.shield import leading_error
from asyncckpt.options import RestoreOptions
from asyncckpt.ports import ArrayAdapter, CheckpointFiles
from asyncckpt.reports import Progress, RestoreReport
from asyncckpt.stages.elsewhere import open_any
from asyncckpt.stages.opened import OpenCheckpoint
from asyncckpt.tree import Structure, match_glob

Mode = Literal["saved", "like", "into"]


@dataclass(slots=True, eq=False)
class RestoreRequest:
    """What a caller wants restored, as taken in the caller's thread.

    Attributes:
        mode: what was saved, things like a target, or into a target.
        wanted: the target's leaves.
        framework: adapter for leaves without a target.
        include: globs on paths, or None for all.
        stateful: path of every object whose `load_state_dict` will get what is below it, and the
            adapter of the arrays that it takes, if its class says.
        loaded: adapters of the frameworks that are imported, by name.
    """

    mode: Mode
    wanted: Sequence[Wanted]
    framework: ArrayAdapter
    include: Sequence[str] | None
    strict: bool
    cast: bool
    options: RestoreOptions
    progress: Callable[[Progress], None] | None
    stateful: Mapping[str, ArrayAdapter | None] = field(default_factory=dict)
    loaded: Mapping[str, ArrayAdapter] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class RestoreOutcome:
    """Restored leaves.

    Attributes:
        request: what was asked for.
        structure: containers of the checkpoint.
        form: its format, as `OpenCheckpoint.format`.
        values: by ordinal of the target's leaf, or of the saved leaf where there is no target.
        additions: by ordinal of the saved leaf, what state dicts get beyond their present leaves.
        selected: ordinals of the saved leaves that were asked for.
        saved: ordinal of the saved leaf by path.
        written: paths of the targets whose own memory was written.
        report: what happened.
    """

    request: RestoreRequest
    structure: Structure
    form: str
    values: dict[int, Any]
    additions: dict[int, Any]
    selected: set[int] | None
    saved: dict[str, int]
    written: Sequence[str]
    report: RestoreReport


async def run_restore(
    runtime: Runtime, files: CheckpointFiles, step: int | None, request: RestoreRequest
) -> RestoreOutcome:
    """Every wanted leaf is restored, checked, and in the memory or of the type asked for.

    Cancellation: waits until nobody writes to the targets any more; their contents are undefined.

    Raises:
        CheckpointNotFoundError: there is no valid checkpoint.
        UsageError: `include` matches nothing, or a part of an object's state; nothing was read.
        MismatchError: checkpoint and target do not fit; nothing was read.
        CorruptCheckpointError: names leaf, file and offset.
    """
    begun = time.perf_counter()
    opened = await open_any(files)
    structure = opened.structure()
    paths = structure.paths()
    selected = select(opened.location, paths, request.include)
    if selected is not None and request.include is not None:
        refuse_parts(request.stateful, paths, selected, request.include, opened.location)
    matching = _match(opened, structure, paths, request, selected)
    changed = _immutable_scalars(matching, request)
    into = request.mode == "into"
    leaves = Leaves(
        opened.leaves.extra,
        _frameworks(opened, request),
        into=into,
        stateful=tuple(request.stateful),
    )
    filling = Filling(
        runtime,
        opened,
        matching,
        leaves,
        into=into,
        strict=request.strict,
        options=request.options,
        progress=request.progress,
    )
    arrays = [a for a in (*matching.assignments, *matching.additions) if a.spec is not None]
    nbytes = sum(wanted_nbytes(a) for a in arrays)
    try:
        read_nbytes = await filling.run()
    except BaseExceptionGroup as group:
        raise filling.failed(leading_error(group)) from None
    except AsyncCheckpointError as error:
        raise filling.failed(error) from None
    report = RestoreReport(
        location=opened.location,
        step=step,
        leaf_count=len(matching.assignments) + len(matching.additions),
        nbytes=nbytes,
        read_nbytes=read_nbytes,
        total_s=time.perf_counter() - begun,
        changed=tuple(changed + leaves.changed),
        missing=tuple(matching.missing),
        unexpected=tuple(matching.unexpected),
        unverified=tuple(filling.unverified),
        metadata=opened.metadata,
        notes=tuple(filling.notes),
    )
    additions = {a.saved: a.result for a in matching.additions}
    values = {a.number: a.result for a in matching.assignments}
    saved = {path: leaf for leaf, path in enumerate(paths)}
    written = [a.path for a in matching.assignments if leaves.writes(a)] if request.stateful else []
    return RestoreOutcome(
        request, structure, opened.format, values, additions, selected, saved, written, report
    )


def select(location: str, paths: Sequence[str], include: Sequence[str] | None) -> set[int] | None:
    """Saved leaves chosen by globs, or None for all.

    Raises:
        UsageError: a glob matches no leaf.
    """
    if include is None:
        return None
    selected, unmatched = match_glob(paths, include)
    if unmatched:
        some = ", ".join(paths[:5]) + (", …" if len(paths) > 5 else "")
        raise UsageError(
            f"include={unmatched[0]!r} matches no leaf of {location}; it has {some}",
            location=location,
            found=unmatched,
        )
    return selected


def _frameworks(
    opened: OpenCheckpoint, request: RestoreRequest
) -> Callable[[Assignment], ArrayAdapter]:
    """Which adapter makes the leaves that have no target.

    What a state dict did not have yet comes as its object takes it, or else as it was saved: a
    PyTorch optimizer wants tensors, a data loader the NumPy array that it gave.
    """
    expected = [(below([root]), adapter) for root, adapter in request.stateful.items() if adapter]

    def addition(assignment: Assignment) -> ArrayAdapter:
        for inside, adapter in expected:
            if inside(assignment.path):
                return adapter
        return request.loaded.get(opened.leaves.kind[assignment.saved], request.framework)

    return addition if request.stateful else lambda _: request.framework


def _match(
    opened: OpenCheckpoint,
    structure: Structure,
    paths: Sequence[str],
    request: RestoreRequest,
    selected: set[int] | None,
) -> Matching:
    if request.mode == "saved":
        saved = match_saved(opened, paths, selected)
        check_framework(opened, saved, request.framework)
        return Matching(saved)
    absent = lacking(
        request.stateful,
        structure,
        paths,
        [want.path for want in request.wanted],
        keeps_empty=opened.record is not None,
    )
    return match(
        opened,
        paths,
        request.wanted,
        absent=absent,
        selected=selected,
        strict=request.strict,
        cast=request.cast,
        free=below(request.stateful),
        loose=below(root for root, adapter in request.stateful.items() if adapter is None),
    )


def _immutable_scalars(matching: Matching, request: RestoreRequest) -> list[str]:
    """Scalars of a plain target that differ and cannot be filled.

    Raises:
        MismatchError: there are some, and `strict`.
    """
    if request.mode != "into":
        return []
    roots = tuple(request.stateful)
    changed = []
    for assignment in matching.assignments:
        want = assignment.wanted
        if assignment.spec is not None or want is None or want.target is not None:
            continue
        inside = any(
            not root or want.path == root or want.path.startswith(f"{root}/") for root in roots
        )
        same = want.leaf == assignment.scalar or (
            want.leaf != want.leaf and assignment.scalar != assignment.scalar
        )
        if not inside and not same:
            changed.append(want.path)
    if changed and request.strict:
        raise changed_error("the checkpoint", changed)
    return changed


def wanted_leaves(
    paths: Sequence[str],
    leaves: Sequence[Any],
    adapters: AdapterSet,
    *,
    in_place: bool,
) -> list[Wanted]:
    """The target's leaves, opened in the caller's thread.

    Raises:
        UnsupportedLeafError: names the path of a leaf that nothing can be restored to.
    """
    wanted: list[Wanted] = []
    for path, leaf in zip(paths, leaves, strict=True):
        adapter = adapters.resolve(type(leaf))
        if adapter is None:
            raise unsupported(path, leaf)
        if isinstance(adapter, str):
            wanted.append(Wanted(path, leaf))
            continue
        wanted.append(Wanted(path, leaf, adapter, adapter.target(path, leaf, in_place=in_place)))
    return wanted
