"""Restore requests, made in the caller's thread."""

# Rule 1: everything that depends on the caller's thread (state dicts, thread-local state of the
#   frameworks) is looked up here; the engine sees only values.

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from asyncckpt.adapters import AdapterSet, adapter_named, adapters_for_loaded_frameworks
from asyncckpt.adapters.numpy import NumpyAdapter
from asyncckpt.adapters.python import unreadable, unsupported
from asyncckpt.errors import AsyncCheckpointError, UnsupportedLeafError
from asyncckpt.options import RestoreOptions
from asyncckpt.ports import ArrayAdapter, FrameworkAdapter, Target
from asyncckpt.reports import Progress
from asyncckpt.spec import DTYPES, ArraySpec
from asyncckpt.tree import (
    Flat,
    Key,
    PerProcess,
    flatten,
    is_frozen,
    per_process_paths,
    shared_leaves,
    where,
)

Mode = Literal["saved", "like", "into"]

_NUMPY = NumpyAdapter()


class Holder(NamedTuple):
    """A mutable container and the key of one leaf in it."""

    container: Any
    key: Key
    is_attribute: bool

    def put(self, value: Any) -> None:
        """Replace the leaf."""
        if self.is_attribute:
            setattr(self.container, str(self.key), value)
        else:
            self.container[self.key] = value


class Wanted(NamedTuple):
    """One leaf of a target.

    Attributes:
        path: its path.
        leaf: the caller's array or Python scalar.
        adapter: the adapter of an array, None for scalars.
        target: the adapter's description of the array.
        holder: the container of an immutable leaf that a restore in place replaces.
        fixed: whether both the leaf and its container are immutable.
        given: whether an object with a state dict gets a new array like it.
    """

    path: str
    leaf: Any
    adapter: ArrayAdapter | None = None
    target: Target | None = None
    holder: Holder | None = None
    fixed: bool = False
    given: bool = False


class TargetLeaves(Sequence[Wanted]):
    """The leaves of a target, by column: small NumPy arrays need no object each.

    Descriptions of 100,000 arrays cost more time than their bytes, most of it in the garbage
    collector. `leaves[number]` makes that of an ordinary array on demand.

    Attributes:
        paths: path of each.
        leaves: the caller's arrays and Python scalars.
        in_place: whether the arrays are to be filled.
        specs: shape and dtype of every ordinary array: a NumPy array of such a dtype which, if it
            is to be filled, is C-contiguous and owns its memory. None for other leaves.
        described: the other leaves, by number.
    """

    def __init__(
        self, paths: Sequence[str] = (), leaves: Sequence[Any] = (), *, in_place: bool = True
    ) -> None:
        self.paths = paths
        self.leaves = leaves
        self.in_place = in_place
        self.specs: list[ArraySpec | None] = [None] * len(leaves)
        self.described: dict[int, Wanted] = {}

    @classmethod
    def of(cls, wanted: Sequence[Wanted]) -> TargetLeaves:
        """Return leaves that are described already."""
        made = cls([want.path for want in wanted], [want.leaf for want in wanted])
        made.described = dict(enumerate(wanted))
        return made

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: Any) -> Any:
        spec = self.specs[number]
        if spec is None:
            return self.described[number]
        path, leaf = self.paths[number], self.leaves[number]
        target = Target(spec, leaf, leaf if self.in_place else None, path=path)
        return Wanted(path, leaf, _NUMPY, target)


Fresh = Callable[[str, str, ArraySpec], Wanted | None]


class StatefulTarget(NamedTuple):
    """An object of the target whose `load_state_dict` gets the state saved at its path.

    Attributes:
        adapter: the adapter of the arrays that it takes, None if its class does not tell.
        required: maps a path in its state dict to a key that the present and the saved state must
            both have, or to None where they may differ; None where nothing is known.
        takes_strict: whether its `load_state_dict` has a parameter `strict`.
        fresh: called with a path, its part in the state dict, and the saved spec; returns a leaf to
            restore into where the state dict has none yet, or None. None where nothing is known.
    """

    adapter: FrameworkAdapter | None
    required: Callable[[str], str | None] | None
    takes_strict: bool
    fresh: Fresh | None = None

    def is_filled(self, key: str) -> bool:
        """Return whether arrays at this path in the state dict may be filled in place.

        Only modules and optimizers do nothing but copy or keep what they are given. Other objects,
        and `set_extra_state` of a module, may compare or combine it with their present state,
        which therefore must not change before.
        """
        return self.required is not None and not key.partition("/")[0].endswith("_extra_state")


@dataclass(frozen=True, slots=True, eq=False)
class RestoreRequest:
    """What a caller wants restored.

    Attributes:
        mode: `saved` restores what was saved, `like` things like a target, `into` fills a target.
        wanted: the target's leaves.
        framework: adapter for leaves without a target.
        include: globs on paths, or None for all.
        strict: missing and unexpected leaves are errors.
        cast: other dtypes are converted.
        options: how to restore.
        progress: called as the restore proceeds.
        stateful: by path, the target's objects with a state dict.
        loaded: adapters of the frameworks that are imported, by name.
        per_process: paths of the target at which every process has its own values.
        process_count: number of processes that restore.
        save_id: identity of the save that is wanted; empty for any.
        shared: with mode `like`, the leaves of the target in further occurrences of an object, by
            ordinal, and the same leaf in the first (`shared_leaves`).
    """

    mode: Mode
    wanted: TargetLeaves
    framework: FrameworkAdapter
    include: Sequence[str] | None
    strict: bool
    cast: bool
    options: RestoreOptions
    progress: Callable[[Progress], None] | None
    stateful: Mapping[str, StatefulTarget] = field(default_factory=dict)
    loaded: Mapping[str, FrameworkAdapter] = field(default_factory=dict)
    per_process: Sequence[str] = ()
    process_count: int = 1
    save_id: str = ""
    shared: Mapping[int, int] = field(default_factory=dict)


def restore_request(
    mode: Mode,
    like: Any,
    *,
    leaves: str,
    include: Sequence[str] | None,
    strict: bool,
    cast: bool,
    options: RestoreOptions,
    progress: Callable[[Progress], None] | None,
    process: int = 0,
    process_count: int = 1,
) -> tuple[RestoreRequest, Flat | None, AdapterSet]:
    """Return the request, the target taken apart (if there is one), and the adapters.

    Raises:
        UnsupportedLeafError: nothing can be restored to a leaf of the target; names its path.
        UsageError: `leaves` is no framework, or the target is no tree.
    """
    adapters = adapters_for_loaded_frameworks(process)
    flat = None if mode == "saved" else flatten(like, adapters.nodes)
    stateful = (
        {} if flat is None else {path: _stateful(owner, adapters) for path, owner in flat.stateful}
    )
    request = RestoreRequest(
        mode=mode,
        wanted=TargetLeaves()
        if flat is None
        else target_leaves(flat, adapters, stateful, in_place=mode == "into"),
        framework=adapter_named(leaves),
        include=include,
        strict=strict,
        cast=cast,
        options=options,
        progress=progress,
        stateful=stateful,
        loaded=adapters.frameworks,
        per_process=() if flat is None else per_process_paths(flat.structure),
        process_count=process_count,
        shared=shared_leaves(flat) if flat is not None and mode == "like" else {},
    )
    return request, flat, adapters


def _stateful(owner: Any, adapters: AdapterSet) -> StatefulTarget:
    return StatefulTarget(
        adapters.expected_by(type(owner)),
        adapters.required_by(owner),
        takes_strict(owner.load_state_dict),
        _fresh(owner, adapters),
    )


def _fresh(owner: Any, adapters: AdapterSet) -> Fresh | None:
    make = adapters.fresh_state_of(owner)
    if make is None:
        return None

    def wanted(path: str, key: str, spec: ArraySpec) -> Wanted | None:
        leaf = make(key, spec)
        adapter = None if leaf is None else adapters.resolve(type(leaf))
        if adapter is None or isinstance(adapter, str):
            return None
        return Wanted(path, leaf, adapter, adapter.target(path, leaf, in_place=True))

    return wanted


def takes_strict(load_state_dict: Callable[..., Any]) -> bool:
    """Return whether the method has a parameter `strict`, as that of modules has."""
    try:
        parameter = inspect.signature(load_state_dict).parameters.get("strict")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind in (
        parameter.POSITIONAL_OR_KEYWORD,
        parameter.KEYWORD_ONLY,
    )


def target_leaves(
    flat: Flat,
    adapters: AdapterSet,
    stateful: Mapping[str, StatefulTarget],
    *,
    in_place: bool,
) -> TargetLeaves:
    """Open the leaves of a target, with the holder of each leaf that can only be replaced.

    With `in_place`, arrays are to be filled, except those that an object with a state dict gets as
    new ones (`StatefulTarget.is_filled`).

    Raises:
        UnsupportedLeafError: nothing can be restored to a leaf; names its path.
    """
    made = TargetLeaves(flat.paths, flat.leaves, in_place=in_place)
    specs, described = made.specs, made.described
    immutable: list[int] = []
    # This loop decides what a small leaf costs the caller: an ordinary array with the spec of an
    # earlier one needs no call.
    known: dict[tuple[Any, tuple[int, ...]], ArraySpec] = {}
    fills: Iterable[bool] = itertools.repeat(in_place)
    if in_place and stateful:
        fills = _fills(flat.paths, stateful)
    for number, (leaf, fill) in enumerate(zip(flat.leaves, fills, strict=False)):
        is_plain = type(leaf) is np.ndarray and (
            not in_place or (fill and leaf.base is None and leaf.flags.carray)
        )
        spec = known.get((leaf.dtype, leaf.shape)) if is_plain else None
        if spec is not None:
            specs[number] = spec
            continue
        path, adapter = flat.paths[number], adapters.resolve(type(leaf))
        if leaf is PerProcess.all and not in_place:
            described[number] = Wanted(path, leaf)
            continue
        if adapter is None:
            raise _no_target(path, leaf)
        if isinstance(adapter, str):
            adapter, target = None, None
        else:
            try:
                target = adapter.target(path, leaf, in_place=fill)
            except AsyncCheckpointError:
                raise
            except Exception as error:  # of a subclass, or of a value that is traced
                raise unreadable(path, leaf, error) from error
            if is_plain and leaf.dtype == DTYPES[target.spec.dtype]:
                known[leaf.dtype, leaf.shape] = specs[number] = target.spec
                continue
        if in_place and not is_filled(target):
            immutable.append(number)
        given = in_place and not fill
        described[number] = Wanted(path, leaf, adapter, target, given=given)
    if immutable:
        plain = [n for n in immutable if enclosing(flat.paths[n], stateful) is None]
        holders = _holders(flat, set(plain))
        for number in plain:
            holder = holders.get(number)
            described[number] = described[number]._replace(holder=holder, fixed=holder is None)
    return made


def _no_target(path: str, leaf: Any) -> UnsupportedLeafError:
    """Return the error for what is neither an array nor a scalar."""
    if leaf is PerProcess.all:
        advice = "PerProcess.all makes a new list, which fills nothing; use restore(like=...)"
    elif leaf is ...:
        advice = (
            "`...` is no array; leave this path out of the target, and choose the others with "
            "include="
        )
    else:
        return unsupported(path, leaf)
    return UnsupportedLeafError(f"{where(path)}: {advice}", path=path, found=leaf)


def _fills(paths: Sequence[str], stateful: Mapping[str, StatefulTarget]) -> Iterator[bool]:
    """Yield for each leaf whether its memory is filled: not if its object gets a new array."""
    for path in paths:
        root = enclosing(path, stateful)
        yield root is None or stateful[root].is_filled(below(path, root))


def is_filled(target: Target | None) -> bool:
    """Return whether a restore in place keeps the object and fills it, or has nothing to fill."""
    if target is None:
        return False
    return target.buffer is not None or target.fill or bool(target.buffers) or target.boxes == ()


def _holders(flat: Flat, leaves: Collection[int]) -> dict[int, Holder]:
    """Return by ordinal the holders of these leaves, of those whose containers are mutable."""
    holders: dict[int, Holder] = {}
    for node, container in zip(flat.structure.nodes, flat.objects, strict=True):
        is_dataclass = node.kind == "dataclass"
        if node.kind not in ("dict", "list") and not is_dataclass:
            continue
        if is_dataclass and is_frozen(container):
            continue
        keys: Sequence[Key] = range(len(node.children)) if node.kind == "list" else node.keys
        for key, child in zip(keys, node.children, strict=True):
            if child in leaves:
                holders[child] = Holder(container, key, is_dataclass)
    return holders


def enclosing(path: str, roots: Collection[str]) -> str | None:
    """Return which of these paths is the path or lies above it; roots do not contain each other.

    The cost is that of the depth of the path, however many roots there are.
    """
    if path in roots:
        return path
    end = path.rfind("/")
    while end >= 0:
        if path[:end] in roots:
            return path[:end]
        end = path.rfind("/", 0, end)
    return "" if "" in roots else None


def below(path: str, root: str) -> str:
    """Return the part of a path that follows the path of a container."""
    return path[len(root) + bool(root) :]
