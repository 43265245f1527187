"""One restore: match, plan, then fetch, decode and place, overlapping."""

# Rule 1: nothing of the payload is read, and no target touched, before everything has been matched.
# Rule 2: values are handed over only after every checksum has passed.

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from asyncckpt.adapters import AdapterSet
from asyncckpt.adapters.scalars import scalar_from_array, scalar_kind, unsupported
from asyncckpt.checkpointer.match import (
    Assignment,
    Matching,
    Wanted,
    check_framework,
    match,
    match_saved,
)
from asyncckpt.checkpointer.runtime import Runtime
from asyncckpt.errors import (
    AsyncCheckpointError,
    CorruptCheckpointError,
    MismatchError,
    UsageError,
)
from asyncckpt.flow.arena import Arena
from asyncckpt.flow.shield import leading_error
from asyncckpt.options import ALIGNED_CHUNK_NBYTES, RestoreOptions
from asyncckpt.planning.restore import WholeArrays, plan_restore
from asyncckpt.ports import ArrayAdapter, CheckpointFiles, Target
from asyncckpt.reports import Progress, RestoreReport
from asyncckpt.spec import DTYPES, ArraySpec, Box
from asyncckpt.stages.decode import flat_target
from asyncckpt.stages.fetch import GAP_NBYTES, Destination, Fetch
from asyncckpt.stages.opened import RECORD, OpenCheckpoint, open_checkpoint, read_index
from asyncckpt.stages.place import cast_values, python_value, same_bits
from asyncckpt.tree import Structure, match_glob

PLACE_LEAVES = 512
"""Leaves finished by one call of a worker."""

OVERLAP_WORK = 10_000
"""Candidates that NumPy may try to settle whether two strided targets share memory."""

Mode = Literal["saved", "like", "into"]


@dataclass(slots=True, eq=False)
class RestoreRequest:
    """What a caller wants restored, as taken in the caller's thread.

    Attributes:
        mode: what was saved, things like a target, or into a target.
        wanted: the target's leaves.
        framework: adapter for leaves without a target.
        include: globs on paths, or None for all.
        stateful: paths of the objects whose `load_state_dict` will get what is below them.
    """

    mode: Mode
    wanted: Sequence[Wanted]
    framework: ArrayAdapter
    include: Sequence[str] | None
    strict: bool
    cast: bool
    options: RestoreOptions
    progress: Callable[[Progress], None] | None
    stateful: Sequence[str] = ()


@dataclass(slots=True, eq=False)
class RestoreOutcome:
    """Restored leaves.

    Attributes:
        structure: containers of the checkpoint.
        values: by ordinal of the target's leaf, or of the saved leaf where there is no target.
        additions: by ordinal of the saved leaf, what state dicts get beyond their present leaves.
        selected: ordinals of the saved leaves that were asked for.
        saved: ordinal of the saved leaf by path.
        report: what happened.
    """

    structure: Structure
    values: dict[int, Any]
    additions: dict[int, Any]
    selected: set[int] | None
    saved: dict[str, int]
    report: RestoreReport


async def run_restore(
    runtime: Runtime, files: CheckpointFiles, step: int | None, request: RestoreRequest
) -> RestoreOutcome:
    """Every wanted leaf is restored, checked, and in the memory or of the type asked for.

    Cancellation: waits until nobody writes to the targets any more; their contents are undefined.

    Raises:
        CheckpointNotFoundError: there is no valid checkpoint.
        MismatchError: checkpoint and target do not fit; nothing was read.
        CorruptCheckpointError: names leaf, file and offset.
    """
    begun = time.perf_counter()
    opened = await open_checkpoint(files)
    structure = read_structure(opened)
    paths = structure.paths()
    selected = select(opened.location, paths, request.include)
    matching = _match(opened, paths, request, selected)
    changed = _immutable_scalars(matching, request)
    restore = _Restore(runtime, opened, request, matching)
    try:
        read_nbytes = await restore.run()
    except BaseExceptionGroup as group:
        raise restore.failed(leading_error(group)) from None
    except AsyncCheckpointError as error:
        raise restore.failed(error) from None
    changed += restore.changed
    additions = {a.saved: restore.results[id(a)] for a in matching.additions}
    values = {a.number: restore.results[id(a)] for a in matching.assignments}
    arrays = [a for a in (*matching.assignments, *matching.additions) if a.spec is not None]
    report = RestoreReport(
        location=opened.location,
        step=step,
        leaf_count=len(matching.assignments) + len(matching.additions),
        nbytes=sum(a.spec.nbytes for a in arrays if a.spec is not None),
        read_nbytes=read_nbytes,
        total_s=time.perf_counter() - begun,
        changed=tuple(changed),
        missing=tuple(matching.missing),
        unexpected=tuple(matching.unexpected),
        metadata=opened.record.metadata,
    )
    saved = {path: leaf for leaf, path in enumerate(paths)}
    return RestoreOutcome(structure, values, additions, selected, saved, report)


def read_structure(opened: OpenCheckpoint) -> Structure:
    """The containers of the checkpoint.

    Raises:
        CorruptCheckpointError: they are malformed.
    """
    try:
        structure = Structure.from_json(opened.record.tree)
        if structure.leaf_count != len(opened.record.leaves.kind):
            raise ValueError(
                f"{structure.leaf_count} leaves in the tree, "
                f"{len(opened.record.leaves.kind)} in the table"
            )
    except ValueError as error:
        raise CorruptCheckpointError(
            f"{opened.location}: the commit record's {error}; restore an older step",
            file=RECORD,
            location=opened.location,
        ) from None
    return structure


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


def _match(
    opened: OpenCheckpoint,
    paths: Sequence[str],
    request: RestoreRequest,
    selected: set[int] | None,
) -> Matching:
    if request.mode == "saved":
        saved = match_saved(opened, paths, selected)
        check_framework(opened, saved, request.framework)
        return Matching(saved)
    roots = tuple(request.stateful)
    below = tuple(f"{root}/" for root in roots if root)

    def free(path: str) -> bool:
        return "" in roots or path in roots or path.startswith(below)

    return match(
        opened,
        paths,
        request.wanted,
        selected=selected,
        strict=request.strict,
        cast=request.cast,
        free=free if roots else _never,
    )


def _never(_: str) -> bool:
    return False


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
        raise _changed_error("the checkpoint", changed)
    return changed


def _changed_error(location: str, changed: Sequence[str]) -> MismatchError:
    shown = ", ".join(changed[:10]) + (", …" if len(changed) > 10 else "")
    return MismatchError(
        f"{shown}: the target's value differs from {location}'s and cannot be filled in place, "
        "being immutable; use restore(like=...), or pass strict=False to have such leaves listed "
        "in the report",
        path=changed[0],
        location=location,
    )


class _Restore:
    def __init__(
        self,
        runtime: Runtime,
        opened: OpenCheckpoint,
        request: RestoreRequest,
        matching: Matching,
    ) -> None:
        self._runtime = runtime
        self._compute = runtime.engine.compute
        self._opened = opened
        self._request = request
        self._all = [*matching.assignments, *matching.additions]
        self._additions = {id(a) for a in matching.additions}
        self._destinations: list[Destination] = []
        self._owners: list[list[Assignment]] = []
        self._ready: list[Assignment] = []
        self._late: list[Assignment] = []
        self._arrived = asyncio.Event()
        self._done_nbytes = 0
        self._total_nbytes = 0
        self._started = False
        self.results: dict[int, Any] = {}
        self.changed: list[str] = []

    async def run(self) -> int:
        """All assignments have their results; returns the bytes read."""
        arrays = [a for a in self._all if a.spec is not None]
        scalars = [a for a in self._all if a.spec is None]
        self._set_scalars(a for a in scalars if not self._touches(a))
        read_nbytes = await self._read(arrays) if arrays else 0
        late = self._late
        if late:
            await self._compute.run(self._set, [a for a in late if not self._touches(a)])
        if self.changed and self._request.strict:
            raise _changed_error(self._opened.location, self.changed)
        if late:
            await self._compute.run(self._set, [a for a in late if self._touches(a)])
        self._set_scalars(a for a in scalars if self._touches(a))
        return read_nbytes

    async def _read(self, arrays: Sequence[Assignment]) -> int:
        index = await read_index(self._opened)
        await self._compute.run(self._allocate, arrays)
        destinations = self._destinations
        requests = WholeArrays(
            np.array([d.array for d in destinations], np.int64),
            np.array([d.flat is not None for d in destinations], np.bool_),
        )
        plan = await self._compute.run(
            plan_restore,
            self._opened.stored(),
            requests,
            row_file=index.file,
            row_offset=index.offset,
            row_nbytes=index.nbytes,
            slot_nbytes=self._runtime.pool.slot_nbytes,
            gap_nbytes=GAP_NBYTES,
            aligned_chunk_nbytes=ALIGNED_CHUNK_NBYTES,
        )
        self._total_nbytes = plan.read_nbytes
        fetch = Fetch(
            self._opened,
            index,
            plan,
            self._destinations,
            self._runtime.pool,
            self._compute,
            concurrency=self._runtime.concurrency(self._request.options.concurrency),
            own_memory=self._request.mode != "into" or self._request.options.atomic,
            arrived=self._has_arrived,
            progress=self._progress,
        )
        self._started = True
        async with asyncio.TaskGroup() as group:
            placing = group.create_task(self._place_all(len(arrays)))
            await fetch.run()
            self._arrived.set()
            await placing
        return fetch.read_nbytes

    def failed(self, error: BaseException) -> BaseException:
        """The error, saying which targets were written."""
        if (
            isinstance(error, AsyncCheckpointError)
            and self._request.mode == "into"
            and self._started
            and not self._request.options.atomic
        ):
            written = [a.path for a in self._all if self._touches(a)]
            error.written = tuple(written)
            error.add_note(
                f"the contents of {len(written)} targets are undefined now (error.written lists "
                "them); restore again, or use RestoreOptions(atomic=True)"
            )
        return error

    # -- plan

    def _allocate(self, arrays: Sequence[Assignment]) -> None:
        in_place = self._request.mode == "into" and not self._request.options.atomic
        own: list[Assignment] = []
        for assignment in arrays:
            want, spec = assignment.wanted, assignment.spec
            target = want.target if want is not None else None
            if in_place and target is not None and target.buffer is not None:
                assert spec is not None
                if target.spec.dtype == spec.dtype:
                    assignment.values = target.buffer
                    continue
            own.append(assignment)
        self._allocate_own(own)
        shared: dict[Any, int] = {}
        tied = self._opened.record.arrays.tied
        in_ties = set(tied) | set(tied.values())
        destinations, owners = self._destinations, self._owners
        for assignment in arrays:
            values, array = assignment.values, assignment.array
            if array in in_ties:
                # The chunks of tied arrays are read once into memory that their targets share.
                key = (self._opened.first_rows[array], values.__array_interface__["data"][0])
                number = shared.setdefault((key, values.strides), len(destinations))
                if number < len(destinations):
                    owners[number].append(assignment)
                    continue
            destinations.append(
                Destination(assignment.path, array, None, values, flat_target(values))
            )
            owners.append([assignment])
        self._check_overlaps()

    def _allocate_own(self, arrays: Sequence[Assignment]) -> None:
        """Memory of our own; leaves that were tied come back as one array where no target asks."""
        arena = Arena(sum(a.spec.nbytes for a in arrays if a.spec is not None))
        tied = self._opened.record.arrays.tied
        made: dict[int, Any] = {}
        for assignment in arrays:
            spec = assignment.spec
            assert spec is not None
            first = tied.get(assignment.array, assignment.array)
            if assignment.wanted is None and first in made:
                assignment.values = made[first]
                continue
            memory = arena.take(spec.nbytes).view(DTYPES[spec.dtype])
            assignment.values = memory.reshape(spec.shape)
            if assignment.wanted is None and tied:
                made[first] = assignment.values

    def _check_overlaps(self) -> None:
        if self._request.mode != "into":
            return
        # Most targets do not even come near each other: one vectorised look settles it.
        extents = [
            a.wanted.target.span
            for a in self._all
            if a.wanted is not None and a.wanted.target is not None
        ]
        bounds = np.array([extent for extent in extents if extent is not None], np.int64)
        if not len(bounds):
            return
        bounds = bounds[np.argsort(bounds[:, 0], kind="stable")]
        if not np.any(bounds[1:, 0] < np.maximum.accumulate(bounds[:-1, 1])):
            return
        spans = []
        for assignment in self._all:
            want = assignment.wanted
            target = want.target if want is not None else None
            if target is not None and (extent := target.span) is not None:
                spans.append((*extent, assignment.array, target, assignment.path))
        spans.sort(key=itemgetter(0, 1))
        open_spans: list[tuple[int, int, int, Target, str]] = []
        for span in spans:
            open_spans = [other for other in open_spans if other[1] > span[0]]
            for other in open_spans:
                self._check_overlap(other, span)
            open_spans.append(span)

    def _check_overlap(
        self, one: tuple[int, int, int, Target, str], other: tuple[int, int, int, Target, str]
    ) -> None:
        _, _, one_array, one_target, one_path = one
        _, _, other_array, other_target, other_path = other
        rows = self._opened.first_rows
        same = one_target.identity is not None and one_target.identity == other_target.identity
        tied = same and rows[one_array] == rows[other_array]
        if not tied and _share(one_target, other_target):
            raise UsageError(
                f"{one_path} and {other_path}: these targets overlap in memory but are different "
                "arrays in the checkpoint; restore one of them elsewhere",
                path=other_path,
            )

    # -- fetch and place

    def _has_arrived(self, number: int) -> None:
        self._ready.extend(self._owners[number])
        self._arrived.set()

    async def _place_all(self, count: int) -> None:
        done = 0
        while done < count:
            await self._arrived.wait()
            self._arrived.clear()
            while self._ready:
                batch = self._ready[:PLACE_LEAVES]
                del self._ready[: len(batch)]
                await self._compute.run(self._finish, batch)
                done += len(batch)

    def _progress(self, nbytes: int) -> None:
        self._done_nbytes += nbytes
        if self._request.progress is not None:
            self._request.progress(
                Progress("fetch", min(self._done_nbytes, self._total_nbytes), self._total_nbytes)
            )

    # -- in worker threads

    def _finish(self, batch: Sequence[Assignment]) -> None:
        made: dict[int, Any] = {}
        for assignment in batch:
            if self._request.mode == "into" and self._request.options.atomic:
                self._convert(assignment)
                self._late.append(assignment)
                continue
            shared = made.get(id(assignment.values)) if assignment.wanted is None else None
            value = shared if shared is not None else self._value(assignment)
            made[id(assignment.values)] = value
            self.results[id(assignment)] = value

    def _convert(self, assignment: Assignment) -> None:
        # What does not fit must be known before any target is touched.
        target = assignment.wanted.target if assignment.wanted is not None else None
        if target is not None and assignment.spec is not None:
            if target.spec.dtype != assignment.spec.dtype:
                assignment.values = cast_values(
                    assignment.path, assignment.values, target.spec.dtype
                )
                assignment.spec = ArraySpec(assignment.spec.shape, target.spec.dtype)

    def _set(self, assignments: Sequence[Assignment]) -> None:
        for assignment in assignments:
            self.results[id(assignment)] = self._value(assignment)

    def _set_scalars(self, assignments: Iterable[Assignment]) -> None:
        for assignment in assignments:
            self.results[id(assignment)] = self._scalar(assignment)

    def _touches(self, assignment: Assignment) -> bool:
        """Whether finishing it writes to memory of the caller."""
        target = assignment.wanted.target if assignment.wanted is not None else None
        if target is None or self._request.mode != "into":
            return False
        return target.buffer is not None or target.fill

    def _value(self, assignment: Assignment) -> Any:
        spec, values, want = assignment.spec, assignment.values, assignment.wanted
        assert spec is not None
        extra: Mapping[str, Any] = self._opened.record.leaves.extra.get(assignment.saved, {})
        if want is None or want.target is None:
            as_python = python_value(values, extra)
            if as_python is not None:
                return as_python
            if want is not None:
                kind = scalar_kind(type(want.leaf))
                assert kind is not None
                return self._immutable(assignment, scalar_from_array(want.path, values, kind))
            adapter = self._request.framework
            return adapter.leaf(assignment.path, values, extra)
        target = want.target
        assert want.adapter is not None
        if self._request.mode != "into":
            if target.spec.dtype != spec.dtype:
                values = cast_values(want.path, values, target.spec.dtype)
            return want.adapter.place(target, values)
        if target.buffer is None and not target.fill:
            return self._compare(assignment, target, values)
        if target.buffer is None:
            if target.spec.dtype != spec.dtype:
                values = cast_values(want.path, values, target.spec.dtype)
            return want.adapter.place(target, values)
        if values is not target.buffer:
            cast_values(want.path, values, target.spec.dtype, target.buffer)
        return want.adapter.place(target, target.buffer)

    def _compare(self, assignment: Assignment, target: Target, values: npt.NDArray[Any]) -> Any:
        want = assignment.wanted
        assert want is not None and want.adapter is not None and assignment.spec is not None
        if target.spec.dtype != assignment.spec.dtype:
            values = cast_values(want.path, values, target.spec.dtype)
        if self._inside_stateful(want.path):
            return want.adapter.place(target, values)
        source = want.adapter.source(want.path, want.leaf)
        present = np.empty(source.spec.shape, DTYPES[source.spec.dtype])
        if source.view is not None:
            np.copyto(present, source.view)
        else:
            want.adapter.fetch(source, Box.whole(source.spec.shape), present)
        if not same_bits(present, values):
            self.changed.append(want.path)
        return want.leaf

    def _immutable(self, assignment: Assignment, value: Any) -> Any:
        want = assignment.wanted
        assert want is not None
        if (
            self._request.mode == "into"
            and not self._inside_stateful(want.path)
            and value != want.leaf
        ):
            self.changed.append(want.path)
        return value

    def _inside_stateful(self, path: str) -> bool:
        return any(
            not root or path == root or path.startswith(f"{root}/")
            for root in self._request.stateful
        )

    def _scalar(self, assignment: Assignment) -> Any:
        want, value = assignment.wanted, assignment.scalar
        if want is None or want.target is None:
            return value
        assert want.adapter is not None
        target = want.target
        values = assignment.values
        if self._request.mode == "into" and not (target.buffer is None and target.fill):
            if target.buffer is None:
                return self._compare_scalar(assignment, target, values)
            np.copyto(target.buffer, values)
            values = target.buffer
        return want.adapter.place(target, values)

    def _compare_scalar(
        self, assignment: Assignment, target: Target, values: npt.NDArray[Any]
    ) -> Any:
        assignment.spec = ArraySpec((), target.spec.dtype)
        try:
            return self._compare(assignment, target, values)
        finally:
            assignment.spec = None


def _share(one: Target, other: Target) -> bool:
    a = one.leaf if one.buffer is None else one.buffer
    b = other.leaf if other.buffer is None else other.buffer
    try:
        # A bound on exact work, which NumPy documents and its stubs know as two constants only.
        return bool(np.shares_memory(a, b, max_work=cast(Any, OVERLAP_WORK)))
    except np.exceptions.TooHardError:
        return True


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
