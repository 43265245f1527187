"""Restore requests, made in the caller's thread."""

# Rule 1: everything that depends on the caller's thread (state dicts, thread-local state of the
#   frameworks) is looked up here; the engine sees only values.

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from asyncckpt.adapters import AdapterSet, adapter_named, adapters_for_loaded_frameworks
from asyncckpt.adapters.python import unsupported
from asyncckpt.options import RestoreOptions
from asyncckpt.ports import ArrayAdapter, FrameworkAdapter, Target
from asyncckpt.reports import Progress
from asyncckpt.spec import ArraySpec
from asyncckpt.tree import Flat, Key, PerProcess, flatten, per_process_paths

Mode = Literal["saved", "like", "into"]


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
    """

    path: str
    leaf: Any
    adapter: ArrayAdapter | None = None
    target: Target | None = None
    holder: Holder | None = None
    fixed: bool = False


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
    """

    mode: Mode
    wanted: Sequence[Wanted]
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
    request = RestoreRequest(
        mode=mode,
        wanted=() if flat is None else wanted_leaves(flat, adapters, in_place=mode == "into"),
        framework=adapter_named(leaves),
        include=include,
        strict=strict,
        cast=cast,
        options=options,
        progress=progress,
        stateful={}
        if flat is None
        else {path: _stateful(owner, adapters) for path, owner in flat.stateful},
        loaded=adapters.frameworks,
        per_process=() if flat is None else per_process_paths(flat.structure),
        process_count=process_count,
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


def wanted_leaves(flat: Flat, adapters: AdapterSet, *, in_place: bool) -> list[Wanted]:
    """Open the leaves of a target, with the holder of each leaf that can only be replaced.

    Raises:
        UnsupportedLeafError: nothing can be restored to a leaf; names its path.
    """
    wanted: list[Wanted] = []
    immutable: list[int] = []
    all_values = PerProcess.all
    # This loop decides what a small leaf costs the caller: an array with the spec of an earlier
    # one, in memory of its own, needs no call.
    known: dict[tuple[Any, tuple[int, ...]], ArraySpec] = {}
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        target: Target | None
        is_plain = in_place and type(leaf) is np.ndarray and leaf.base is None and leaf.flags.carray
        spec = known.get((leaf.dtype, leaf.shape)) if is_plain else None
        if spec is not None:
            target = Target(spec, leaf, leaf, path=path)
            fields = (path, leaf, adapters.adapters[0], target, None, False)
            wanted.append(tuple.__new__(Wanted, fields))
            continue
        adapter = adapters.resolve(type(leaf))
        if leaf is all_values and not in_place:
            wanted.append(Wanted(path, leaf))
            continue
        if adapter is None:
            raise unsupported(path, leaf)
        if isinstance(adapter, str):
            adapter, target = None, None
        else:
            target = adapter.target(path, leaf, in_place=in_place)
            if is_plain and target.buffer is leaf and target.extra is None:
                known[target.leaf.dtype, target.leaf.shape] = target.spec
        if in_place and not is_filled(target):
            immutable.append(len(wanted))
        # Directly: a named tuple's own constructor costs four times as much.
        wanted.append(tuple.__new__(Wanted, (path, leaf, adapter, target, None, False)))
    if immutable:
        roots = dict(flat.stateful)
        plain = [n for n in immutable if enclosing(wanted[n].path, roots) is None]
        holders = _holders(flat, set(plain))
        for number in plain:
            holder = holders.get(number)
            wanted[number] = wanted[number]._replace(holder=holder, fixed=holder is None)
    return wanted


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
        if is_dataclass and type(container).__dataclass_params__.frozen:
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
