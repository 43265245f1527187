"""`PerProcess`: a part of a tree of which every process saves its own values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

from asyncckpt.tree.structure import Structure


class AllValues:
    """The type of `PerProcess.all`."""

    def __repr__(self) -> str:
        return "PerProcess.all"

    def __reduce__(self) -> str:
        return "PerProcess.all"  # copies and pickles are the same object


class PerProcess:
    """A value, or a tree of values, that differs by process: every process saves its own.

    Examples are the states of random number generators and data loaders. A restore with a
    `PerProcess` in `like`, on the same number of processes, returns its own value to each. On any
    number of processes, `PerProcess.all` in its place restores the list of all values, by process,
    with None for processes that saved none.

    Args:
        value: a leaf, or nested containers of leaves, of any shape.

    Attributes:
        value: the same.
        all: in `like`, restores the values of all processes.
    """

    __slots__ = ("value",)

    all: ClassVar[AllValues] = AllValues()

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerProcess({self.value!r})"


TYPE_NAME: Final = f"{PerProcess.__module__}.{PerProcess.__qualname__}"
"""Type name of the node in a stored tree; its keys are the numbers of processes."""


MOST_PROCESSES = 1 << 20
"""A larger number in a stored tree is damage: `PerProcess.all` makes lists of this length."""


def process_values(structure: Structure) -> dict[str, list[int]]:
    """Return the numbers of the processes that have a value of their own at a path, by path."""
    found: dict[int, list[int]] = {}
    for index, node in enumerate(structure.nodes):
        if node.type_name == TYPE_NAME:
            numbers = [key for key in node.keys if type(key) is int and 0 <= key < MOST_PROCESSES]
            if numbers and len(numbers) == len(node.keys):
                found[index] = numbers
    paths = structure.node_paths() if found else []
    return {paths[index]: numbers for index, numbers in found.items()}


class PerProcessNodes:
    """`NodeAdapter` that makes a `PerProcess` a node with one key, the number of the process.

    The nodes of all processes are merged into one, which has the value of every process.
    """

    def __init__(self, process: int) -> None:
        self._process = process

    def flatten(self, node: Any) -> tuple[Sequence[int], Sequence[Any]] | None:
        """Return the number of the process, and the value."""
        return ((self._process,), (node.value,)) if isinstance(node, PerProcess) else None

    def unflatten(self, node: Any, children: Sequence[Any]) -> Any:
        """Return the wrapped value."""
        return PerProcess(*children)
