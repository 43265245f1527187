"""The last step of a restore, in the caller's thread: leaves become a tree, objects their state."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from asyncckpt.adapters import AdapterSet
from asyncckpt.checkpointer.restores import RestoreOutcome
from asyncckpt.checkpointer.state_dicts import as_it_was, in_kind
from asyncckpt.errors import RestoreError, RestoreWarning
from asyncckpt.reports import RestoreReport
from asyncckpt.tree import Flat, escape, match_glob, unflatten, unflatten_like, where


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

    With `strict=False` a `load_state_dict` that takes `strict` is called with False, and the keys
    that it answers with stand in the report.

    Raises:
        RestoreError: an object refused its state dict; `written` lists what had been written.
    """
    request = outcome.request
    report = outcome.report
    missing, unexpected = list(report.missing), list(report.unexpected)
    loaded: list[str] = []
    for path, target, state in _states(outcome, flat):
        loaded.append(path)
        loose = not request.strict and _takes_strict(target.load_state_dict)
        try:
            answer = target.load_state_dict(state, **({"strict": False} if loose else {}))
        except Exception as error:
            raise _refused(outcome, target, loaded, error) from error
        if loose:
            missing += _keys(path, answer, "missing_keys")
            unexpected += _keys(path, answer, "unexpected_keys")
    report = dataclasses.replace(report, missing=tuple(missing), unexpected=tuple(unexpected))
    _warn(report)
    return report


def _states(outcome: RestoreOutcome, flat: Flat) -> Iterator[tuple[str, Any, Any]]:
    """Path, object and restored state dict of every object that is to have one."""
    if not flat.stateful:
        return
    by_path = {path: outcome.values.get(n, _ABSENT) for n, path in enumerate(flat.paths)}
    saved_paths = outcome.structure.paths()
    include = outcome.request.include
    for path, target in flat.stateful:
        try:
            structure, ordinals = outcome.structure.subtree(path)
        except KeyError:
            continue  # strict=False or include=: the checkpoint has nothing for it
        leaves = [
            outcome.additions[ordinal]
            if ordinal in outcome.additions
            else by_path.get(saved_paths[ordinal], _ABSENT)
            for ordinal in ordinals
        ]
        if include is not None:
            # Left out as a whole, if at all: a part was refused before the read.
            held = [leaf for leaf in leaves if leaf is not _ABSENT]
            if not (held or (not leaves and match_glob([path], include)[0])):
                continue
        state = unflatten(structure, leaves)
        present = _present_state(flat, target)
        if outcome.form == "dcp":
            state = as_it_was(state, present)
        state = in_kind(state, present)
        if outcome.form == "safetensors":
            # Such files have no versions, and who loads them elsewhere relies on migrations.
            getattr(state, "__dict__", {}).pop("_metadata", None)
        yield path, target, state


def _present_state(flat: Flat, target: Any) -> Any:
    """The state dict that the object gave when the target was taken apart."""
    number = next(n for n, held in enumerate(flat.objects) if held is target)
    (child,) = flat.structure.nodes[number].children
    return flat.objects[-child] if child < 0 else None


def _takes_strict(load_state_dict: Callable[..., Any]) -> bool:
    """Whether the method has a parameter `strict`, as that of modules has."""
    try:
        parameter = inspect.signature(load_state_dict).parameters.get("strict")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind in (
        parameter.POSITIONAL_OR_KEYWORD,
        parameter.KEYWORD_ONLY,
    )


def _keys(path: str, answer: Any, name: str) -> list[str]:
    """Paths of the keys that `load_state_dict` answers with under this name, as modules do."""
    keys = getattr(answer, name, ())
    if not isinstance(keys, (list, tuple, set, frozenset)):
        return []
    parts = [escape(key) for key in keys if isinstance(key, str)]
    return [f"{path}/{part}" if path else part for part in parts]


def _refused(
    outcome: RestoreOutcome, target: Any, loaded: Sequence[str], error: Exception
) -> RestoreError:
    path = loaded[-1]
    refusal = RestoreError(
        f"{where(path)}: {type(target).__name__}.load_state_dict refused the restored "
        f"state: {type(error).__name__}: {error}",
        path=path,
        stage="place",
        location=outcome.report.location,
    )
    # atomic=True has nothing to say here: arrays had to be filled for the object to be asked.
    refusal.written = tuple(dict.fromkeys([*outcome.written, *loaded]))
    refusal.add_note(
        f"{len(refusal.written)} targets have been written (error.written lists them): arrays and "
        "tensors are filled before objects are given their state, with atomic=True too"
    )
    return refusal
