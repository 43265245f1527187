"""The last step of a restore, in the caller's thread: leaves become a tree, objects their state."""

from __future__ import annotations

import warnings
from typing import Any

from asyncckpt.adapters import AdapterSet
from asyncckpt.checkpointer.restores import RestoreOutcome
from asyncckpt.checkpointer.state_dicts import as_it_was
from asyncckpt.errors import RestoreError, RestoreWarning
from asyncckpt.reports import RestoreReport
from asyncckpt.tree import Flat, unflatten, unflatten_like, where


class _Absent:
    """Stands for a leaf that was not asked for."""


_ABSENT = _Absent()


def finish_tree(outcome: RestoreOutcome, flat: Flat | None, adapters: AdapterSet) -> Any:
    """The restored tree, in the containers of `like` or in plain ones."""
    _warn(outcome.report)
    if flat is not None:
        leaves = [outcome.values.get(n, leaf) for n, leaf in enumerate(flat.leaves)]
        return unflatten_like(flat, leaves, adapters.nodes)
    count = outcome.structure.leaf_count
    if outcome.selected is None:
        return unflatten(outcome.structure, [outcome.values[n] for n in range(count)])
    tree = unflatten(outcome.structure, [outcome.values.get(n, _ABSENT) for n in range(count)])
    return _prune(tree)[0]


def _warn(report: RestoreReport) -> None:
    for note in report.notes:
        # Above this function stand `finish_…`, the facade and its caller.
        warnings.warn(f"{report.location}: {note}", RestoreWarning, stacklevel=4)


def _prune(node: Any) -> tuple[Any, bool]:
    """The tree without absent leaves, and whether a leaf is left in it.

    Entries of dicts go, items of sequences become None, and so do containers that have nothing
    left. Those that had no leaf from the beginning (None, `{}`) stay where their parents do.
    """
    if isinstance(node, dict):
        pruned = [_prune(child) for child in node.values()]
        kept = {
            k: child for k, (child, _) in zip(node, pruned, strict=True) if child is not _ABSENT
        }
    elif type(node) in (list, tuple):
        pruned = [_prune(child) for child in node]
        kept = type(node)(None if child is _ABSENT else child for child, _ in pruned)
    else:
        return node, node is not None and node is not _ABSENT
    if any(has_leaf for _, has_leaf in pruned):
        return kept, True
    return (_ABSENT if any(child is _ABSENT for child, _ in pruned) else node), False


def finish_into(outcome: RestoreOutcome, flat: Flat, adapters: AdapterSet) -> RestoreReport:
    """Every object with a state dict was given the restored one.

    Raises:
        RestoreError: an object refused its state dict.
    """
    by_path: dict[str, Any] = {}
    if flat.stateful:
        by_path = {path: outcome.values.get(n, _ABSENT) for n, path in enumerate(flat.paths)}
    for path, target in flat.stateful:
        try:
            structure, ordinals = outcome.structure.subtree(path)
        except KeyError:
            continue  # strict=False: the checkpoint has nothing for it
        leaves = []
        saved_paths = outcome.structure.paths()
        for ordinal in ordinals:
            if ordinal in outcome.additions:
                leaves.append(outcome.additions[ordinal])
            else:
                leaves.append(by_path.get(saved_paths[ordinal], _ABSENT))
        if any(leaf is _ABSENT for leaf in leaves):
            if all(leaf is _ABSENT for leaf in leaves):
                continue  # include= left the whole object out
            raise RestoreError(
                f"{where(path)}: include= selects only a part of this object's state dict; select "
                "all of it or nothing",
                path=path,
                location=outcome.report.location,
            )
        state = unflatten(structure, leaves)
        if outcome.form == "dcp":
            state = as_it_was(state, _present_state(flat, target))
        try:
            target.load_state_dict(state)
        except Exception as error:
            raise RestoreError(
                f"{where(path)}: {type(target).__name__}.load_state_dict refused the restored "
                f"state: {type(error).__name__}: {error}",
                path=path,
                stage="place",
                location=outcome.report.location,
            ) from error
    _warn(outcome.report)
    return outcome.report


def _present_state(flat: Flat, target: Any) -> Any:
    """The state dict that the object gave when the target was taken apart."""
    number = next(n for n, held in enumerate(flat.objects) if held is target)
    (child,) = flat.structure.nodes[number].children
    return flat.objects[-child] if child < 0 else None
