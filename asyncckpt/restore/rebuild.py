"""The last step of a restore, in the caller's thread: make the tree, or load objects' state."""

from __future__ import annotations

import dataclasses
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Final

from asyncckpt.adapters import AdapterSet
from asyncckpt.errors import RestoreError, RestoreWarning
from asyncckpt.reports import RestoreReport
from asyncckpt.restore.restore import RestoreOutcome
from asyncckpt.restore.state_dicts import with_present_classes, with_present_keys
from asyncckpt.tree import Flat, PerProcess, escape, match_glob, unflatten, unflatten_like, where
from asyncckpt.tree.per_process import MOST_PROCESSES, process_values

ABSENT: Final = object()
"""Placeholder of a leaf that was not restored."""


def finish_tree(
    flat: Flat | None, adapters: AdapterSet, outcome: RestoreOutcome
) -> tuple[Any, RestoreReport]:
    """Return the restored tree, in the containers of the target if a target was given."""
    if flat is not None:
        pairs = [*zip(flat.paths, flat.leaves, strict=True)]
        values = _of_all(outcome, [path for path, leaf in pairs if leaf is PerProcess.all])
        leaves = [
            # With strict=False, the checkpoint may lack it.
            values.get(path, leaf) if leaf is PerProcess.all else outcome.wanted.get(number, leaf)
            for number, (path, leaf) in enumerate(pairs)
        ]
        _share(leaves, outcome)
        return unflatten_like(flat, leaves, adapters.nodes), outcome.report
    restored = [outcome.saved.get(n, ABSENT) for n in range(outcome.structure.leaf_count)]
    tree = unflatten(outcome.structure, restored)
    return tree if outcome.request.include is None else _prune(tree)[0], outcome.report


def _share(leaves: list[Any], outcome: RestoreOutcome) -> None:
    """Use the restored leaves in all occurrences of an object."""
    shared, wanted = outcome.request.shared, outcome.wanted
    for number, first in shared.items():
        if number in wanted:
            leaves[first] = wanted[number]
    for number, first in shared.items():
        leaves[number] = leaves[first]


def _of_all(outcome: RestoreOutcome, paths: Sequence[str]) -> dict[str, list[Any]]:
    """Return the list of the values that all processes saved at each path; None for no value."""
    found: dict[str, list[Any]] = {}
    # With strict=False, something else may be there.
    saved = process_values(outcome.structure).keys() & set(paths) if paths else ()
    for path, (structure, ordinals) in outcome.structure.subtrees(saved).items() if saved else ():
        values = unflatten(structure, [outcome.saved[ordinal] for ordinal in ordinals])
        count = max(min(outcome.savers, MOST_PROCESSES), 1 + max(values))
        found[path] = [values.get(process) for process in range(count)]
    return found


def _prune(node: Any) -> tuple[Any, bool]:
    """Return the tree without absent leaves, and whether it still has a leaf.

    Absent entries of dicts are removed, absent items of sequences become None. Containers that
    lose all their leaves are absent, too; those without leaves (None, `{}`) stay with their parent.
    """
    if isinstance(node, dict):
        pruned = [_prune(child) for child in node.values()]
        kept = {k: child for k, (child, _) in zip(node, pruned, strict=True) if child is not ABSENT}
    elif type(node) in (list, tuple):
        pruned = [_prune(child) for child in node]
        kept = type(node)(None if child is ABSENT else child for child, _ in pruned)
    else:
        return node, node is not None and node is not ABSENT
    if any(has_leaf for _, has_leaf in pruned):
        return kept, True
    return (ABSENT if any(child is ABSENT for child, _ in pruned) else node), False


def finish_into(flat: Flat, outcome: RestoreOutcome) -> tuple[None, RestoreReport]:
    """Load the restored state dicts into their objects, and replace immutable leaves.

    With `strict=False`, `load_state_dict` is called with `strict=False` if it takes that, and the
    report has the keys that it returns.

    Raises:
        RestoreError: an object refused its state dict, or a container its new leaf; `written`
            lists the targets written before.
    """
    request, report = outcome.request, outcome.report
    missing, unexpected = list(report.missing), list(report.unexpected)
    done: list[str] = []
    for path, target, state in _states(outcome, flat):
        done.append(path)
        loose = not request.strict and request.stateful[path].takes_strict
        try:
            answer = target.load_state_dict(state, **({"strict": False} if loose else {}))
        except Exception as error:
            what = f"{type(target).__name__}.load_state_dict refused the restored state"
            if "to inference tensor" in str(error):  # "Inplace update to inference tensor …"
                what += (
                    " (it was made under torch.inference_mode(): restore under it too, or make it "
                    "outside)"
                )
            raise _refused(outcome, path, what, done, error) from error
        if loose:
            missing += _keys(path, answer, "missing_keys")
            unexpected += _keys(path, answer, "unexpected_keys")
    for path, holder, value in outcome.replaced:
        try:
            holder.put(value)
        except Exception as error:
            what = f"this {type(holder.container).__name__} refused the restored leaf"
            raise _refused(outcome, path, what, done, error) from error
        done.append(path)
    report = dataclasses.replace(
        report,
        replaced=tuple([path for path, _, _ in outcome.replaced]),
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        total_s=time.perf_counter() - request.begun,
    )
    return None, report


def _states(outcome: RestoreOutcome, flat: Flat) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, object and restored state dict of every object that was restored."""
    if not flat.stateful:
        return
    include = outcome.request.include
    subtrees = outcome.structure.subtrees([path for path, _, _ in flat.stateful])
    for path, target, present in flat.stateful:
        if path not in subtrees:
            continue  # strict=False or include=: the checkpoint has nothing for it
        structure, ordinals = subtrees[path]
        leaves = [outcome.saved.get(ordinal, ABSENT) for ordinal in ordinals]
        if include is not None:
            # `include` selects all of an object or nothing: `match` has refused parts.
            held = any([leaf is not ABSENT for leaf in leaves])
            if not (held or (not leaves and match_glob([path], include)[0])):
                continue
        state, takes = unflatten(structure, leaves), outcome.request.stateful[path].takes
        if isinstance(state, dict):
            state = {key: value for key, value in state.items() if takes(escape(key))}
        if outcome.form == "dcp":
            state = with_present_keys(state, present)
        state = with_present_classes(state, present)
        if outcome.form == "safetensors":
            # These files have no versions, so `load_state_dict` must apply its migrations.
            getattr(state, "__dict__", {}).pop("_metadata", None)
        yield path, target, state


def _keys(path: str, answer: Any, name: str) -> list[str]:
    """Return the paths of the keys that `load_state_dict` returned, if it did as modules do."""
    keys = getattr(answer, name, ())
    if not isinstance(keys, (list, tuple, set, frozenset)):
        return []
    parts = [escape(key) for key in keys if isinstance(key, str)]
    return [f"{path}/{part}" if path else part for part in parts]


def _refused(
    outcome: RestoreOutcome, path: str, what: str, done: Sequence[str], error: Exception
) -> RestoreError:
    refusal = RestoreError(
        f"{where(path)}: {what}: {type(error).__name__}: {error}",
        path=path,
        stage="place",
        location=outcome.report.location,
    )
    refusal.written = tuple(dict.fromkeys([*outcome.written(), *done]))
    refusal.add_note(
        f"{len(refusal.written)} targets have been written (error.written lists them): arrays, "
        "modules and optimizers are filled before objects are given their state, with atomic=True "
        "too"
    )
    return refusal


def warn_of(report: RestoreReport) -> None:
    """Warn of everything that the report notes."""
    # The warning points to the caller's line outside the package.
    frame, level = sys._getframe(1), 2
    # Code that `exec` runs may have no name.
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("asyncckpt."):
        frame, level = frame.f_back, level + 1
    for note in report.notes:
        warnings.warn(f"{report.location}: {note}", RestoreWarning, stacklevel=level)
