"""How two checkpoints differ apart from the values of their arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncckpt.checkpointer.origin import Origin
from asyncckpt.checkpointer.reader import LeafReader
from asyncckpt.format.record import decode_scalar
from asyncckpt.reports import LeafDifference

NOTED = 5
"""Containers that a note lists."""


def _kind(reader: LeafReader, leaf: int) -> str:
    """What a leaf is, apart from shape and dtype."""
    kind = reader.opened.leaves.kind[leaf]
    if reader.spec(leaf) is None:
        return kind
    facts = reader.opened.leaves.extra.get(leaf, {})
    if "python" in facts:
        return str(facts["python"])
    return f"PRNG keys of {facts['prng_impl']}" if "prng_impl" in facts else "array"


def described(
    a: LeafReader, leaf: int, b: LeafReader, other: int, *, bitwise: bool
) -> LeafDifference | None:
    """How two leaves of one path differ before their arrays are looked at, or None."""
    path = a.paths[leaf]
    kinds = _kind(a, leaf), _kind(b, other)
    if kinds[0] != kinds[1]:
        return LeafDifference(path, "kind", _text(a, leaf), _text(b, other))
    first, second = a.spec(leaf), b.spec(other)
    if first is None or second is None:
        # Of two `bytes` only the longer may be stored as an array.
        values = a.opened.leaves.value[leaf], b.opened.leaves.value[other]
        if first is second and _same_scalar(kinds[0], *values, bitwise=bitwise):
            return None
        return LeafDifference(path, "value", _text(a, leaf), _text(b, other))
    if first.shape != second.shape:
        return LeafDifference(path, "shape", str(first), str(second))
    if first.dtype != second.dtype:
        return LeafDifference(path, "dtype", first.dtype, second.dtype)
    return None


def _same_scalar(kind: str, first: Any, second: Any, *, bitwise: bool) -> bool:
    if first == second or bitwise:
        return bool(first == second)
    a, b = decode_scalar(kind, first), decode_scalar(kind, second)
    return a == b or (a != a and b != b)


def _text(reader: LeafReader, leaf: int) -> str:
    kind, spec = _kind(reader, leaf), reader.spec(leaf)
    if spec is not None:
        return f"{kind} {spec}"
    return f"{kind} {decode_scalar(kind, reader.opened.leaves.value[leaf])!r:.80}"


def notes(first: Origin, second: Origin) -> Iterator[str]:
    """What differs without being a leaf."""
    formats = first.opened.format, second.opened.format
    if formats[0] != formats[1]:
        yield f"the first is a checkpoint of format {formats[0]}, the second of {formats[1]}"
    containers = [_containers(origin) for origin in (first, second)]
    differing = [
        path
        for path in {**containers[0], **containers[1]}
        if containers[0].get(path) != containers[1].get(path)
    ]
    if differing:
        shown = ", ".join(
            f"{path or 'the tree itself'} ({containers[0].get(path, 'nothing')} and "
            f"{containers[1].get(path, 'nothing')})"
            for path in differing[:NOTED]
        )
        more = f", and {len(differing) - NOTED} more" if len(differing) > NOTED else ""
        yield f"containers differ: {shown}{more}"


def _containers(origin: Origin) -> dict[str, str]:
    structure = origin.opened.structure()
    kinds: dict[str, str] = {}
    for path, node in zip(structure.node_paths(), structure.nodes, strict=True):
        # A stateful object and its state dict have one path: the outer one is what it is.
        kinds.setdefault(path, node.kind)
    return kinds
