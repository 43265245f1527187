"""Objects with a state dict as targets: what is known of them before anything is read.

`restore_into` gives such an object what the checkpoint holds at its path, and the object decides
what of it fits. That there is something for it, and all of it, is decided here. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from asyncckpt.errors import UsageError
from asyncckpt.tree import Structure, match_glob, where


def below(roots: Iterable[str]) -> Callable[[str], bool]:
    """Whether a path is one of these or lies below one."""
    exactly = frozenset(roots)
    prefixes = tuple(f"{root}/" for root in exactly)
    if not exactly or "" in exactly:
        return lambda _: bool(exactly)
    return lambda path: path in exactly or path.startswith(prefixes)


def lacking(
    roots: Collection[str],
    structure: Structure,
    saved: Sequence[str],
    wanted: Sequence[str],
    *,
    keeps_empty: bool,
) -> list[str]:
    """Paths of the objects for which the checkpoint holds nothing.

    Args:
        roots: paths of the objects.
        structure: containers of the checkpoint.
        saved: paths of its leaves.
        wanted: paths of the target's leaves.
        keeps_empty: whether its format keeps containers that hold nothing. In others an object
            whose state dict has no leaves cannot be told from one that was not saved.
    """
    if not roots:
        return []
    held = {*structure.node_paths(), *saved}
    return [
        root
        for root in roots
        if root not in held and (keeps_empty or any(map(below([root]), wanted)))
    ]


def refuse_parts(
    roots: Iterable[str],
    saved: Sequence[str],
    selected: set[int],
    include: Sequence[str],
    location: str,
) -> None:
    """`include` selects all or nothing of what each object is given.

    Raises:
        UsageError: it selects a part; names the object and the patterns.
    """
    for root in roots:
        inside = below([root])
        numbers = [number for number, path in enumerate(saved) if inside(path)]
        count = len(selected.intersection(numbers))
        if count in (0, len(numbers)):
            continue
        paths = [saved[number] for number in numbers]
        patterns = [glob for glob in include if match_glob(paths, glob)[0]]
        shown = ", ".join(map(repr, patterns))
        raise UsageError(
            f"{where(root)}: include={shown} selects {count} of the {len(numbers)} leaves that "
            f"{location} holds for this object, and load_state_dict takes all of them; nothing "
            "was read. Select the whole object or nothing of it, or pass its state_dict() as the "
            "target to have only some of its arrays filled",
            path=root,
            location=location,
            expected=len(numbers),
            found=patterns,
        )
