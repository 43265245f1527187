"""Restore requests, made in the caller's thread."""

# Rule: everything that depends on the caller's thread (state dicts, thread-local state of the
#   frameworks) is read here; the engine sees only values.

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from asyncckpt.adapters import AdapterSet, NewState, adapter_named, adapters_for_loaded_frameworks
from asyncckpt.adapters.numpy import NumpyAdapter
from asyncckpt.adapters.python import fails_again, unreadable, unsupported
from asyncckpt.errors import AsyncCheckpointError, UnsupportedLeafError
from asyncckpt.flow.collector import without_collections
from asyncckpt.options import RestoreOptions
from asyncckpt.ports import ArrayAdapter, FrameworkAdapter, Target
from asyncckpt.reports import Progress
from asyncckpt.spec import DTYPES, ArraySpec
from asyncckpt.tree import (
    Flat,
    Key,
    Node,
    PerProcess,
    escape,
    flatten,
    is_frozen,
    process_values,
    shared_leaves,
    signature,
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
        leaf: the caller's array or Python scalar.
        adapter: the adapter of an array; None for scalars.
        target: the adapter's description of the array.
        holder: the container of an immutable leaf, which a restore in place replaces.
        fixed: whether both the leaf and its container are immutable.
        is_template: whether an object with a state dict gets a new array like this one.
    """

    path: str
    leaf: Any
    adapter: ArrayAdapter | None = None
    target: Target | None = None
    holder: Holder | None = None
    fixed: bool = False
    is_template: bool = False


class TargetLeaves(Sequence[Wanted]):
    """The leaves of a target, by column; `leaves[number]` makes a `Wanted` on demand.

    Making 100,000 objects takes longer than reading as many small arrays, mostly because of the
    garbage collector.

    Attributes:
        leaves: the caller's arrays and Python scalars.
        in_place: whether the arrays are filled.
        specs: shape and dtype of every ordinary leaf, a NumPy array that, if it is filled, is
            C-contiguous and owns its memory. None for other leaves.
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
        """Return the leaves with these descriptions."""
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
        target = Target(spec, leaf, buffers=(leaf,) if self.in_place else (), path=path)
        return Wanted(path, leaf, _NUMPY, target)


Fresh = Callable[[str, str, ArraySpec], Wanted | None]


class StatefulTarget(NamedTuple):
    """An object of the target whose `load_state_dict` gets the state saved at its path.

    Attributes:
        adapter: the adapter of the arrays that it takes; None if unknown.
        required: maps a path in its state dict to a key that the present and the saved state must
            both have, or to None where they may differ; None if unknown.
        takes_strict: whether its `load_state_dict` has a parameter `strict`.
        fresh: called with a path, the path within the state dict, and a spec; returns a leaf to
            restore into instead of a new array of any layout, or None. None if unknown.
        keys: the keys of its state dict, escaped, if other saved ones are those of other processes,
            as of modules of pipeline stages; None if it gets all that were saved.
    """

    adapter: FrameworkAdapter | None
    required: Callable[[str], str | None] | None
    takes_strict: bool
    fresh: Fresh | None = None
    keys: Collection[str] | None = None

    def takes(self, key: str) -> bool:
        """Return whether it gets what was saved at this path in the state dict."""
        return self.keys is None or key.partition("/")[0] in self.keys

    def is_filled(self, key: str) -> bool:
        """Return whether arrays at this path in the state dict may be filled in place.

        Modules and optimizers only copy or keep the arrays that they are given. Other objects, and
        `set_extra_state` of a module, may compare or combine them with their present state, which
        must not change before.
        """
        return self.required is not None and not key.partition("/")[0].endswith("_extra_state")


@dataclass(frozen=True, slots=True, eq=False)
class RestoreRequest:
    """The request of a caller for one restore.

    Attributes:
        mode: `saved` makes leaves as they were saved, `like` leaves like those of a target; `into`
            fills a target.
        wanted: the target's leaves.
        framework: adapter for leaves without a target.
        include: globs on paths, or None for all.
        strict: missing and unexpected leaves are errors.
        cast: convert other dtypes.
        progress: called as the restore proceeds.
        stateful: the target's objects with a state dict, by path.
        loaded: adapters of the imported frameworks, by name.
        per_process: paths of the target with a value per process, with the number of this one.
        save_id: the save to restore; empty for any.
        shared: with mode `like`, leaves in repeated occurrences of an object, by ordinal, with the
            same leaf in the first occurrence (`shared_leaves`).
        repeated: with mode `into`, paths of repeated occurrences of a container or object that
            takes leaves, with the path of the first occurrence.
        begun: `perf_counter` at the call.
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
    per_process: Mapping[str, Sequence[int]] = field(default_factory=dict)
    process_count: int = 1
    save_id: str = ""
    shared: Mapping[int, int] = field(default_factory=dict)
    repeated: Mapping[str, str] = field(default_factory=dict)
    begun: float = field(default_factory=time.perf_counter)


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
    """Return the request, the flattened target (None if there is none), and the adapters.

    Raises:
        UnsupportedLeafError: nothing can be restored to a leaf of the target; names its path.
        UsageError: `leaves` is no framework, or the target is no tree.
    """
    adapters = adapters_for_loaded_frameworks(process)
    request = RestoreRequest(
        mode=mode,
        wanted=TargetLeaves(),
        framework=adapter_named(leaves),
        include=include,
        strict=strict,
        cast=cast,
        options=options,
        progress=progress,
        loaded=adapters.frameworks,
        process_count=process_count,
    )
    if mode == "saved":
        return request, None, adapters
    flat = flatten(like, adapters.nodes)
    stateful = {
        path: _stateful(owner, adapters, state if process_count > 1 else None)
        for path, owner, state in flat.stateful
    }
    request = replace(
        request,
        wanted=_target_leaves(flat, adapters, stateful, in_place=mode == "into"),
        stateful=stateful,
        per_process=process_values(flat.structure),
        shared=shared_leaves(flat) if mode == "like" else {},
        repeated=_repeated(flat, stateful) if mode == "into" else {},
    )
    return request, flat, adapters


def _stateful(owner: Any, adapters: AdapterSet, state: Any) -> StatefulTarget:
    required, make = adapters.rules_of(owner)
    return StatefulTarget(
        adapters.expected_by(type(owner)),
        required,
        _takes_strict(owner.load_state_dict),
        None if make is None else partial(_fresh, adapters, make),
        None if required is None or not isinstance(state, dict) else {*map(escape, state)},
    )


def _fresh(
    adapters: AdapterSet, make: NewState, path: str, key: str, spec: ArraySpec
) -> Wanted | None:
    leaf = make(path, key, spec)
    adapter = None if leaf is None else adapters.resolve(type(leaf))
    if adapter is None or isinstance(adapter, str):
        return None
    return Wanted(path, leaf, adapter, adapter.target(path, leaf, in_place=True))


def _repeated(flat: Flat, stateful: Collection[str]) -> dict[str, str]:
    """Return `RestoreRequest.repeated`.

    Containers in a state dict are left out: only their object takes the leaves.
    """
    nodes, objects = flat.structure.nodes, flat.objects
    kinds = ("dict", "list", "dataclass", "stateful")
    ids = [id(value) for node, value in zip(nodes, objects, strict=True) if node.kind in kinds]
    if len(set(ids)) == len(ids):
        return {}  # nearly always, so that no path is needed
    first: dict[int, str] = {}
    repeated: dict[str, str] = {}
    for path, node, value in zip(flat.structure.node_paths(), nodes, objects, strict=True):
        root = enclosing(path, stateful)
        if _is_mutable(node, value) if root is None else (node.kind, path) == ("stateful", root):
            other = first.setdefault(id(value), path)
            if other != path:
                repeated[path] = other
    return repeated


def _takes_strict(load_state_dict: Callable[..., Any]) -> bool:
    """Return whether the method has a parameter `strict`, as for modules."""
    try:
        parameter = signature(load_state_dict).parameters.get("strict")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind in (
        parameter.POSITIONAL_OR_KEYWORD,
        parameter.KEYWORD_ONLY,
    )


@without_collections()
def _target_leaves(
    flat: Flat, adapters: AdapterSet, stateful: Mapping[str, StatefulTarget], *, in_place: bool
) -> TargetLeaves:
    """Describe the leaves of a target, with the holder of each leaf that can only be replaced.

    With `in_place`, arrays are filled, unless their object gets new ones
    (`StatefulTarget.is_filled`).

    Raises:
        UnsupportedLeafError: nothing can be restored to a leaf; names its path.
    """
    made = TargetLeaves(flat.paths, flat.leaves, in_place=in_place)
    specs, described = made.specs, made.described
    immutable: list[int] = []
    # This loop determines the cost of a small leaf in the caller's thread: an ordinary array with
    # the dtype and shape of an earlier one needs no call.
    known: dict[tuple[Any, tuple[int, ...]], ArraySpec] = {}
    roots: Iterable[str | None] = itertools.repeat(None)
    if in_place and stateful:
        roots = [enclosing(path, stateful) for path in flat.paths]
    for number, (leaf, root) in enumerate(zip(flat.leaves, roots, strict=False)):
        fill = in_place
        if root is not None:
            fill = stateful[root].is_filled(below(flat.paths[number], root))
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
            except Exception as error:  # raised by a subclass, or for a traced value
                if not fails_again(partial(adapter.target, path, leaf, in_place=fill)):
                    raise
                raise unreadable(path, leaf, error) from error
            if is_plain and leaf.dtype == DTYPES[target.spec.dtype]:
                known[leaf.dtype, leaf.shape] = specs[number] = target.spec
                continue
        if in_place and not is_filled(target) and root is None:
            immutable.append(number)
        is_template = in_place and not fill
        described[number] = Wanted(path, leaf, adapter, target, is_template=is_template)
    if immutable:
        holders = _holders(flat, set(immutable))
        for number in immutable:
            holder = holders.get(number)
            described[number] = described[number]._replace(holder=holder, fixed=holder is None)
    return made


def _no_target(path: str, leaf: Any) -> UnsupportedLeafError:
    """Return the error for a leaf that is neither an array nor a scalar."""
    if leaf is PerProcess.all:
        advice = "PerProcess.all makes a new list, which fills nothing; use restore(like=...)"
    elif leaf is ...:
        advice = (
            "`...` is no array; leave this path out of the target, and choose the others with "
            "include="
        )
    else:
        return unsupported(path, leaf, "restored")
    return UnsupportedLeafError(f"{where(path)}: {advice}", path=path, found=leaf)


def is_filled(target: Target | None) -> bool:
    """Return whether a restore in place keeps the array: fills it, or has no element to fill."""
    return target is not None and (target.fill or bool(target.buffers))


def _holders(flat: Flat, leaves: Collection[int]) -> dict[int, Holder]:
    """Return the holders of those leaves whose containers are mutable, by ordinal."""
    holders: dict[int, Holder] = {}
    for node, container in zip(flat.structure.nodes, flat.objects, strict=True):
        if not _is_mutable(node, container):
            continue
        keys: Sequence[Key] = range(len(node.children)) if node.kind == "list" else node.keys
        for key, child in zip(keys, node.children, strict=True):
            if child in leaves:
                own = "value" if isinstance(container, PerProcess) else key
                holders[child] = Holder(container, own, node.kind in ("dataclass", "registered"))
    return holders


def _is_mutable(node: Node, container: Any) -> bool:
    """Return whether the leaves of a container can be replaced."""
    if node.kind == "dataclass":
        return not is_frozen(container)
    return node.kind in ("dict", "list") or isinstance(container, PerProcess)


def enclosing(path: str, roots: Collection[str]) -> str | None:
    """Return the innermost root that is or contains the path, or None.

    The cost depends on the depth of the path, not on the number of roots.
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
    """Return the path relative to a container."""
    return path[len(root) + bool(root) :]
