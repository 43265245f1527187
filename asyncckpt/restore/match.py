"""Matching of saved leaves with the leaves of a target, before any payload is read.

Pure: it sees only metadata and targets. One error lists all mismatches.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from asyncckpt.adapters.python import NUMBERS, same_number
from asyncckpt.checkpoint.metadata import OpenCheckpoint
from asyncckpt.errors import (
    DtypeMismatchError,
    MismatchError,
    ShapeMismatchError,
    TreeMismatchError,
    UsageError,
)
from asyncckpt.format.scalars import decode_scalar
from asyncckpt.ports import FrameworkAdapter
from asyncckpt.reports.texts import counted, few
from asyncckpt.restore.matched import NO_FACTS, LeafRestore, MatchedArrays, Matching
from asyncckpt.restore.mismatch import (
    NOT_REPLACEABLE,
    OTHER_SHAPE,
    OTHER_STATE,
    UNWRAP,
    USE_RESTORE_INTO,
    Mismatches,
    check_array,
)
from asyncckpt.restore.place import array_from_scalar
from asyncckpt.restore.request import RestoreRequest, Wanted, below, enclosing
from asyncckpt.spec import ArraySpec, numeric_class
from asyncckpt.tree import PerProcess, Structure, match_glob, process_values, where

_WRAPPER = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|module)\.")
"""Part of a state dict's keys that torch.compile or a data-parallel class adds to a module."""


def match(opened: OpenCheckpoint, request: RestoreRequest) -> Matching:
    """Decide which leaves are restored, and where. Blocking: a few microseconds per leaf.

    Raises:
        UsageError: `include` matches nothing, or only a part of an object's state.
        TreeMismatchError: leaves are missing or unexpected, or none matches.
        ShapeMismatchError: shapes differ.
        DtypeMismatchError: dtypes differ.
        MismatchError: several of these, or a leaf can be neither filled nor replaced.
    """
    structure = opened.structure()
    paths = structure.paths()
    include = request.include
    selected = None if include is None else select(opened.location, paths, include)
    if request.mode != "saved":
        return _Matcher(opened, structure, paths, selected, request).run()
    array_of = opened.leaf_arrays()
    arrays = MatchedArrays(opened, paths, array_of)
    scalars: list[LeafRestore] = []
    for leaf, spec in enumerate(_ordinary(opened, array_of)):
        if selected is not None and leaf not in selected:
            continue
        if spec is None:
            found = saved_leaf(opened, paths[leaf], leaf, array_of[leaf])
            (scalars if found.spec is None else arrays).append(found)
        else:
            arrays.number.append(leaf)
            arrays.saved.append(leaf)
    _refuse_dtypes(opened, arrays, request.framework)
    count = len(arrays) + len(scalars)
    return Matching(structure, arrays, scalars, wanted=count, matched=count)


def _ordinary(opened: OpenCheckpoint, array_of: Sequence[int]) -> list[ArraySpec | None]:
    """Return shape and dtype of each ordinary saved leaf, None for the others.

    Scalars, tied arrays, and arrays in pieces or with extra facts are not ordinary.
    """
    specs = [storage.spec for storage in opened.storages]
    storage_of, tied = opened.arrays.spec, opened.arrays.tied
    found = [specs[storage_of[array]] if array >= 0 else None for array in array_of]
    others = [*opened.leaves.pieces, *opened.leaves.extra]
    if tied:
        shared = {*tied, *tied.values()}
        others += [leaf for leaf, array in enumerate(array_of) if array in shared]
    for leaf in others:
        found[leaf] = None
    return found


def select(location: str, paths: Sequence[str], include: Sequence[str]) -> set[int]:
    """Return the ordinals of the saved leaves that the globs select.

    Raises:
        UsageError: a glob matches no leaf.
    """
    selected, unmatched = match_glob(paths, include)
    if unmatched:
        some = ", ".join(paths[:5]) + (", …" if len(paths) > 5 else "")
        raise UsageError(
            f"include={unmatched[0]!r} matches no leaf of {location}; it has {some}",
            location=location,
            found=unmatched,
        )
    return selected


def saved_leaf(opened: OpenCheckpoint, path: str, leaf: int, array: int) -> LeafRestore:
    """Describe a leaf as it was saved, without a target."""
    if array < 0:
        value = decode_scalar(opened.leaves.kind[leaf], opened.leaves.value[leaf])
        return LeafRestore(leaf, path, leaf, scalar=value)
    pieces = opened.leaves.pieces.get(leaf, ())
    spec = opened.leaf_spec(pieces) if pieces else opened.storages[opened.arrays.spec[array]].spec
    return LeafRestore(leaf, path, leaf, array, pieces, spec)


def _refuse_dtypes(
    opened: OpenCheckpoint, arrays: Iterable[LeafRestore], framework: FrameworkAdapter
) -> None:
    """Refuse arrays whose dtype the framework cannot hold."""
    dtypes = {storage.spec.dtype for storage in opened.storages}
    if all(framework.refuses("", dtype) is None for dtype in dtypes):
        return
    mismatches = Mismatches()
    for leaf in arrays:
        assert leaf.spec is not None
        fault = framework.refuses(leaf.path, leaf.spec.dtype)
        if fault is not None and "python" not in opened.leaves.extra.get(leaf.saved, NO_FACTS):
            mismatches.add_error(fault)
    mismatches.raise_any(opened.location)


def refuse_unexpected(location: str, paths: Iterable[str]) -> None:
    """Raise one `TreeMismatchError` for saved leaves that no process wants, if there are any."""
    mismatches = Mismatches()
    for path in paths:
        mismatches.add(
            TreeMismatchError,
            path,
            "the checkpoint has this leaf, the target of no process does",
            expected="nothing",
            found="a leaf",
        )
    mismatches.raise_any(location)


@dataclass(eq=False, repr=False)
class _Matcher:
    """Matcher of one checkpoint with one target.

    Saved leaves below an object with a state dict are always restored: the object decides which of
    them fit, unless `StatefulTarget.required` says so.
    """

    opened: OpenCheckpoint
    structure: Structure
    paths: Sequence[str]
    selected: set[int] | None
    request: RestoreRequest

    def __post_init__(self) -> None:
        self._arrays = self.opened.leaf_arrays()
        self._stateful = self.request.stateful if self.request.mode == "into" else {}
        wanted, roots = self.request.wanted, self._stateful
        # The path of the object to whose state each leaf belongs, if any.
        self._saved_in = [enclosing(path, roots) if roots else None for path in self.paths]
        self._wanted_in = [enclosing(path, roots) if roots else None for path in wanted.paths]
        self._found = MatchedArrays(self.opened, self.paths, self._arrays, wanted)
        self._included: set[int] = set()  # the target's leaves that `include` selects
        self._scalars: list[LeafRestore] = []
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._wanted = 0
        self._matched = 0
        self._mismatches = Mismatches()

    def run(self) -> Matching:
        """Match all leaves; raise one error for all mismatches."""
        request = self.request
        if request.include is not None:
            self._refuse_parts(request.include)
            self._included = match_glob(request.wanted.paths, request.include)[0]
        selected = self._selected_objects()
        absent = self._absent(selected)
        self._check_process_counts()
        self._match_wanted(absent)
        some_wanted = bool(self._found or self._scalars)
        self._match_rest()
        self._check_required(selected.difference(absent))
        if request.strict:
            self._refuse_missing(absent)
        self._mismatches.raise_any(self.opened.location)
        self._missing += absent
        # Of several processes, some may want nothing.
        alone = request.process_count == 1
        rest = self._unexpected if alone and not self._stateful else ()
        if not some_wanted and (self._wanted or rest):
            self._refuse_without_match()
        return Matching(
            self.structure,
            self._found,
            self._scalars,
            self._missing,
            self._unexpected,
            self._wanted,
            self._matched,
        )

    # -- leaves

    def _match_wanted(self, absent: Collection[str]) -> None:
        """Match every leaf of the target."""
        selected, lacking, wanted = self.selected, frozenset(absent), self.request.wanted
        ordinary, found = _ordinary(self.opened, self._arrays), self._found
        every: list[str] = []  # paths of PerProcess.all
        ordinals: Iterable[int | None] = range(len(self.paths))
        if wanted.paths != self.paths:
            ordinals = map(dict(zip(self.paths, ordinals, strict=True)).get, wanted.paths)
        for number, (saved, spec, root) in enumerate(
            zip(ordinals, wanted.specs, self._wanted_in, strict=True)
        ):
            if spec is not None and saved is not None and root is None and selected is None:
                # Most leaves take this branch, which does as little as possible for each.
                held = ordinary[saved]
                if held is spec or held == spec:
                    found.number.append(number)
                    found.saved.append(saved)
                    continue
            want, path = wanted[number], wanted.paths[number]
            if want.leaf is PerProcess.all:
                every.append(path)
                continue
            if selected is not None and (
                number not in self._included if saved is None else saved not in selected
            ):
                continue
            if saved is None:
                if root is None:
                    self._missing.append(path)
                # The checkpoint need not have leaves of an object whose state may vary.
                optional = root is not None and self._stateful[root].required is None
                self._wanted += root in lacking or not optional
                continue
            if root is not None and self._may_differ(root, want, saved):
                self._add_as_saved(path, root, saved)
            elif root is not None and want.is_template:
                self._add(self._like_parameter(self._leaf(number, want, saved), root))
            else:
                self._add(self._leaf(number, want, saved))
        self._matched = len(found) + len(self._scalars)
        self._wanted += self._matched
        if every:
            self._match_all(every)

    def _add(self, leaf: LeafRestore) -> None:
        (self._scalars if leaf.spec is None else self._found).append(leaf)

    def _match_all(self, paths: Sequence[str]) -> None:
        """Match the paths of `PerProcess.all` with the values of all processes."""
        saved = process_values(self.structure).keys() & set(paths)
        self._wanted += len(paths)
        self._matched += len(saved)
        self._missing += [path for path in paths if path not in saved]
        for _, leaves in self.structure.subtrees(filter(saved.__contains__, paths)).values():
            for leaf in leaves:
                self._add(saved_leaf(self.opened, self.paths[leaf], leaf, self._arrays[leaf]))

    def _check_process_counts(self) -> None:
        """Check that as many processes restore as saved, and that this one saved its own value."""
        request, record = self.request, self.opened.record
        saved = process_values(self.structure) if request.per_process else {}
        for path in filter(saved.__contains__, request.per_process):
            (own,), holders = request.per_process[path], saved[path]
            # One process writes a conversion, of values of several.
            count = max(record.writers if record else 1, 1 + max(holders))
            same = count == request.process_count
            if same and (own in holders or not request.strict):
                continue
            fault = f"process {own} has saved no value of its own here"
            if not same:
                fault = f"{counted(count, 'process has', 'processes have')} saved this checkpoint, "
                fault += f"and {request.process_count} restore it"
            self._mismatches.add(
                MismatchError,
                path,
                fault,
                expected=own if same else request.process_count,
                found=holders if same else count,
                advice="Pass PerProcess.all in its place in like= for the list of all values, with "
                f'NumPy arrays; restore(include={path!r}, leaves="torch") returns them by process, '
                "with tensors.",
            )
        self._mismatches.raise_any(self.opened.location)

    def _matched_ordinals(self) -> set[int]:
        """Return the ordinals of the saved leaves matched so far."""
        return {*self._found.saved, *(leaf.saved for leaf in self._scalars)}

    def _match_rest(self) -> None:
        """Add the other saved leaves to the objects they belong to, or note them as unexpected."""
        rest = set(range(len(self.paths)) if self.selected is None else self.selected)
        for leaf in sorted(rest - self._matched_ordinals()):
            path, root = self.paths[leaf], self._saved_in[leaf]
            if root is None or not self._stateful[root].takes(below(path, root)):
                self._unexpected.append(path)
            else:
                self._add_as_saved(path, root, leaf)

    def _add_as_saved(self, path: str, root: str, saved: int) -> None:
        """Add a leaf that its object gets as it was saved, whatever its present leaf is."""
        found = saved_leaf(self.opened, path, saved, self._arrays[saved])
        self._add(self._like_parameter(found, root))

    def _like_parameter(self, leaf: LeafRestore, root: str) -> LeafRestore:
        """Give a new array of an object the layout of its parameter, if that has one (`Fresh`)."""
        fresh = self._stateful[root].fresh
        if fresh is None or leaf.spec is None:
            return leaf
        spec = leaf.spec if leaf.target is None else leaf.target.spec
        try:
            want = fresh(leaf.path, below(leaf.path, root), spec)
        except ShapeMismatchError as fault:
            self._mismatches.add_error(fault, OTHER_STATE)
            return leaf
        return leaf if want is None else leaf._replace(want=want, target=want.target)

    def _may_differ(self, root: str, want: Wanted, saved: int) -> bool:
        """Return whether a leaf of a state dict has changed its type or shape, and may have.

        A learning rate of 1 may have become 0.5 or a tensor; a replay buffer, a module's extra
        state or an optimizer's state may have grown. Parameters and buffers of a module keep shape
        and dtype, unless the module customizes its state dict.
        """
        opened, array = self.opened, self._arrays[saved]
        if want.target is None and array < 0:
            return opened.leaves.kind[saved] != type(want.leaf).__name__
        if want.target is None or array < 0:
            return True
        spec, owner = saved_leaf(opened, want.path, saved, array).spec, self._stateful[root]
        if want.target.spec == spec:
            return False
        if owner.adapter is None or spec is None:
            return True
        if want.target.spec.shape == spec.shape:
            return False  # `cast` decides
        return owner.required is None or owner.required(below(want.path, root)) is None

    def _leaf(self, number: int, want: Wanted, saved: int) -> LeafRestore:
        opened, target, path = self.opened, want.target, want.path
        leaf = saved_leaf(opened, path, saved, self._arrays[saved])
        spec, value = leaf.spec, leaf.scalar
        if want.fixed and (spec is not None or not _equal(value, want.leaf)):
            self._mismatches.add(
                MismatchError,
                path,
                f"this {type(want.leaf).__name__} is immutable, and what holds it takes no "
                "other leaf: it can be neither filled nor replaced",
                advice=NOT_REPLACEABLE,
            )
        elif spec is None:
            value = self._scalar(want, value)
        elif target is None:
            self._check_becomes_scalar(want, saved, spec)
        elif target.spec != spec or target.extra or saved in opened.leaves.extra:
            facts = opened.leaves.extra.get(saved, NO_FACTS), target.extra or NO_FACTS
            advice = "" if self._wanted_in[number] is None else OTHER_SHAPE
            check_array(self._mismatches, path, spec, target.spec, facts, self.request.cast, advice)
        return leaf._replace(number=number, scalar=value, want=want, target=target)

    def _scalar(self, want: Wanted, value: Any) -> Any:
        """Return a scalar of the record, as a rank-0 array where the target is an array."""
        target, cast = want.target, self.request.cast
        kind = type(want.leaf).__name__ if target is None else numeric_class(target.spec.dtype)
        same = same_number(value, kind) if cast else None
        if target is None:
            found = type(value).__name__
            if kind == found:
                return value
            if same is None:
                self._mismatches.add(
                    DtypeMismatchError,
                    want.path,
                    f"the checkpoint holds {value!r:.40} ({found}), the target wants {kind}"
                    + ("" if cast else "; cast=True converts equal numbers"),
                    expected=kind,
                    found=found,
                )
            return same
        value, spec = value if same is None else same, target.spec
        if spec.shape != ():
            self._mismatches.add(
                ShapeMismatchError,
                want.path,
                f"the checkpoint holds a {type(value).__name__}, the target wants shape "
                f"{spec.shape}",
                expected=spec.shape,
                found=(),
            )
            return value
        try:
            return array_from_scalar(want.path, value, spec.dtype)
        except DtypeMismatchError as fault:
            self._mismatches.add_error(fault)
            return value

    def _check_becomes_scalar(self, want: Wanted, saved: int, spec: ArraySpec) -> None:
        kind = type(want.leaf).__name__
        python = self.opened.leaves.extra.get(saved, NO_FACTS).get("python")
        if python == kind == "bytes":
            return
        found = numeric_class(spec.dtype)
        cast = self.request.cast and found in NUMBERS and kind in NUMBERS
        if spec.shape != () or (numeric_class(kind) != found and not cast):
            self._mismatches.add(
                DtypeMismatchError,
                want.path,
                f"the checkpoint holds an array {spec}, the target wants {kind}",
                expected=kind,
                found=str(spec),
            )

    # -- objects with a state dict

    def _selected_objects(self) -> set[str | None]:
        """Return the objects that `include` selects: by path, or by a saved or wanted leaf."""
        include, roots = self.request.include, list(self._stateful)
        if include is None or not roots:
            return {*roots}
        found: set[str | None] = {*map(roots.__getitem__, match_glob(roots, include)[0])}
        found |= {self._wanted_in[number] for number in self._included}
        return found | {self._saved_in[leaf] for leaf in self.selected or ()}

    def _absent(self, selected: set[str | None]) -> list[str]:
        """Return the paths of the selected objects of which the checkpoint has nothing.

        Foreign formats drop empty containers: there, objects without leaves are not missing.
        """
        if not self._stateful:
            return []
        held = {*self.structure.node_paths(), *self.paths}
        roots = selected.intersection(
            self._stateful if self.opened.record is not None else self._wanted_in
        )
        return [root for root in self._stateful if root in roots and root not in held]

    def _refuse_parts(self, include: Sequence[str]) -> None:
        """Raise if `include` selects only a part of an object's state."""
        leaves: dict[str, list[int]] = defaultdict(list)
        for leaf, root in enumerate(self._saved_in):
            if root is not None:
                leaves[root].append(leaf)
        assert self.selected is not None
        for root, numbers in leaves.items():
            count = len(self.selected.intersection(numbers))
            if count in (0, len(numbers)):
                continue
            paths = [self.paths[number] for number in numbers]
            patterns = [glob for glob in include if match_glob(paths, [glob])[0]]
            shown = ", ".join(map(repr, patterns))
            raise UsageError(
                f"{where(root)}: include={shown} selects {count} of the {len(numbers)} leaves "
                f"that {self.opened.location} holds for this object, and load_state_dict takes "
                "all of them; nothing was read. Select the whole object or nothing of it, or pass "
                "its state_dict() as the target to have only some of its arrays filled",
                path=root,
                location=self.opened.location,
                expected=len(numbers),
                found=patterns,
            )

    def _check_required(self, roots: Collection[str | None]) -> None:
        """Check that both states of each of these objects have the same required keys."""
        if not any([target.required for target in self._stateful.values()]):
            return
        wanted = self._required_keys(self._wanted_in, self.request.wanted.paths, None)
        saved = self._required_keys(self._saved_in, self.paths, self.selected)
        for root in dict.fromkeys([*saved, *wanted]):
            if root not in roots:
                continue
            lenient = self._stateful[root].takes_strict
            if lenient and not self.request.strict:
                continue  # `load_state_dict(strict=False)` returns the keys that differ
            held, need = saved.get(root, {}), wanted.get(root, {})
            advice = "" if lenient else OTHER_STATE
            if {_WRAPPER.sub("", key) for key in need} == {_WRAPPER.sub("", key) for key in held}:
                advice = UNWRAP
            more = [key for key in held if key not in need and self._stateful[root].takes(key)]
            for key in [*[key for key in need if key not in held], *more]:
                path, having = f"{root}/{key}" if root else key, key in need
                self._note(path, "a key", having, advice)

    def _required_keys(
        self, roots: Sequence[str | None], paths: Sequence[str], selected: Collection[int] | None
    ) -> dict[str, dict[str, None]]:
        """Return the required keys of each object, in order."""
        keys: dict[str, dict[str, None]] = defaultdict(dict)
        for leaf, root in enumerate(roots):
            if root is not None and (selected is None or leaf in selected):
                required = self._stateful[root].required
                key = required(below(paths[leaf], root)) if required else None
                if key is not None:
                    keys[root][key] = None
        return keys

    # -- leaves of one side only

    def _refuse_missing(self, absent: Iterable[str]) -> None:
        fresh = self.request.stateful if self.request.mode == "like" else {}
        for path in self._missing:
            self._note(path, "a leaf", True)
        for path in absent:
            self._note(path, "a state dict", True)
        if self.request.process_count > 1:
            return  # other processes may want the rest
        for path in self._unexpected:
            in_object = bool(fresh) and enclosing(path, fresh) is not None
            self._note(path, "a leaf", False, USE_RESTORE_INTO if in_object else "")

    def _note(self, path: str, what: str, in_target: bool, advice: str = "") -> None:
        """Note a path that only the target or only the checkpoint has."""
        having, lacking = ("target", "checkpoint") if in_target else ("checkpoint", "target")
        self._mismatches.add(
            TreeMismatchError,
            path,
            f"the {having} has {_ONE_SIDED[what]}, the {lacking} does not",
            expected=what if in_target else "nothing",
            found="nothing" if in_target else what,
            advice=advice,
        )

    def _refuse_without_match(self) -> None:
        """Raise unless some saved leaf goes to an object that accepts any state."""
        for saved in self._matched_ordinals():
            root = self._saved_in[saved]
            if root is not None and self._stateful[root].required is None:
                return
        location = self.opened.location
        wanted = list(self.request.wanted.paths)
        both = wanted, self.paths
        here, there = (few([*map(where, paths)], 3) or "nothing" for paths in both)
        raise TreeMismatchError(
            f"{location}: no leaf of the checkpoint matches the target; nothing was read. The "
            f"target has {here}, the checkpoint has {there}; pass a target whose paths are those "
            "of the checkpoint",
            stage="plan",
            location=location,
            expected=wanted,
            found=list(self.paths),
        )


_ONE_SIDED = {
    "a leaf": "this leaf",
    "a state dict": "an object with a state dict here",
    "a key": "this key in the state of an object",
}


def _equal(a: Any, b: Any) -> bool:
    """Return whether two Python scalars are the same value; NaN equals NaN, 0.0 not -0.0."""
    return type(a) is type(b) and repr(a) == repr(b)
