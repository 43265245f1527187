"""Names of leaves: escaped path parts, globs on paths, names of stored arrays."""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import cast

Key = str | int

MAX_ARRAY_NAME_NBYTES = 1024
"""Longer array names are cut and hashed. OCDBT allows 64 KiB, other tools less."""

_SHOWN_CHARS = 400

_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f/%\ud800-\udfff]")
_DOTS = frozenset(("", ".", ".."))
_PART_END = r"(?:/|\Z)"
_INT = re.compile(r"-?(?:0|[1-9][0-9]*)", re.ASCII)


def where(path: str) -> str:
    """Return the path as error messages show it, without the middle of a very long one."""
    if len(path) > _SHOWN_CHARS:
        return f"{path[: _SHOWN_CHARS // 2]}…{path[-_SHOWN_CHARS // 2 :]}"
    return path or "the tree itself"


def escape(part: Key) -> str:
    """Escape a part of a path, as the docstring of the package says."""
    if isinstance(part, int):
        return str(part)
    if part in _DOTS:
        return part.replace(".", "%2E") or "%"
    if _UNSAFE.search(part) is None:
        return part
    return _UNSAFE.sub(lambda match: _percent(match[0]), part)


def match_glob(paths: Sequence[str], patterns: Iterable[str]) -> tuple[set[int], list[str]]:
    """Return the indices of the selected paths, and the patterns that select none.

    In a pattern, ``*`` matches any characters within a part, ``**`` any across parts (``a/**/b``
    includes ``a/b``), and ``%2A`` a ``*`` in a key. A pattern selects what it matches and
    everything below.
    """
    selected: set[int] = set()
    unmatched = []
    order: list[int] = []  # indices sorted by path, for bisection
    for pattern in patterns:
        found: Sequence[int] = range(len(paths))
        start, asterisk, _ = pattern.removesuffix("/").partition("*")
        start = start.replace("%2A", "*")
        if start or not asterisk:
            order = order or sorted(found, key=paths.__getitem__)
            found = _beginning_with(start, paths, order)
        if asterisk:
            matches = re.compile(_glob(pattern.removesuffix("/")), re.DOTALL).match
            found = [index for index in found if matches(paths[index])]
        else:
            end = len(start)
            found = [index for index in found if paths[index][end : end + 1] in ("", "/")]
        selected.update(found)
        if not found:
            unmatched.append(pattern)
    return selected, unmatched


def _beginning_with(start: str, paths: Sequence[str], order: Sequence[int]) -> Sequence[int]:
    """Return the indices of the paths that begin with `start`; `order` has indices by path."""
    low = bisect_left(order, start, key=paths.__getitem__)
    high = bisect_right(order, start, key=lambda index: paths[index][: len(start)])
    return order[low:high]


def _glob(pattern: str) -> str:
    """Return a regular expression that matches the beginning of a path, up to the end of a part.

    As in `fnmatch.translate`, the text after an asterisk matches at its first occurrence only,
    which leaves most of the path to the rest of the pattern. Each piece is an atomic group, so that
    time does not grow exponentially with the number of asterisks.
    """
    first, *others = re.split(r"((?:^|(?<=/))\*\*/|\*\*+)", pattern)
    regex = [_in_parts(first, "" if others else _PART_END)]
    for row in range(0, len(others), 2):
        skip = "(?:[^/]*+/)*?" if others[row] == "**/" else ".*?"
        is_last = row == len(others) - 2
        regex.append(f"(?>{skip}{_in_parts(others[row + 1], _PART_END if is_last else '')})")
    return "".join(regex)


def _in_parts(pattern: str, end: str) -> str:
    """Return the regular expression of a pattern without ``**``, followed by `end`."""
    first, *others = [re.escape(text.replace("%2A", "*")) for text in pattern.split("*")]
    if not others:
        return first + end
    others[-1] += end
    return first + "".join(f"(?>[^/]*?{text})" for text in others)


def names_of_paths(paths: Sequence[str]) -> list[str] | None:
    """Return the result of `array_names` for the leaves at these paths.

    None if a path has an escaped part, or `array_names` would change a name for another reason.
    """
    text = "\n".join(["", *paths])
    names = text.replace("/", ".").split("\n")[1:]
    if "%" in text or "\n\n" in f"{text}\n" or "\n." in text or len(set(names)) < len(names):
        return None
    return names if max(map(len, names), default=0) <= MAX_ARRAY_NAME_NBYTES // 4 else None


def array_names(parts: Sequence[tuple[Key, ...]]) -> list[str]:
    """Return one array name per leaf, all different, depending only on the set of parts.

    Names are those of Orbax, the parts joined by ``.``. If a name is empty, starts with ``.``, has
    characters that paths escape, or occurs twice, its parts are escaped first (``.`` as ``%2E``,
    and the first character of a str that looks like an int). Names beyond 1,024 bytes are cut and
    end in a hash. A tree that is a single leaf has the array ``root``.
    """
    names = [".".join(map(str, leaf)) for leaf in parts]
    repeated: set[str] = set()
    if len(set(names)) < len(names):
        repeated = {name for name, count in Counter(names).items() if count > 1}
    for index, name in enumerate(names):
        if not name or name[0] == "." or name in repeated or _UNSAFE.search(name):
            name = names[index] = ".".join(map(_array_part, parts[index])) or "root"
        if len(name) > MAX_ARRAY_NAME_NBYTES // 4 and len(name.encode()) > MAX_ARRAY_NAME_NBYTES:
            whole = ".".join(map(_array_part, parts[index])).encode()
            digest = hashlib.sha256(whole).hexdigest()[:32]
            start = name.encode()[: MAX_ARRAY_NAME_NBYTES - 64].decode("utf-8", "ignore")
            names[index] = f"{start.rstrip('%')}%~{digest}"
    return names


def _array_part(part: Key) -> str:
    if isinstance(part, str) and _INT.fullmatch(part):
        return _percent(part[0]) + part[1:]
    return escape(part).replace(".", "%2E")


def _percent(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode("utf-8", "surrogatepass"))


def escape_keys(keys: Sequence[Key], kinds: set[type]) -> list[str]:
    """Return the path parts of the keys of one node, all different; `kinds` are their types."""
    if kinds == {str}:
        texts = cast(Sequence[str], keys)
        if _UNSAFE.search("".join(texts)) is None and _DOTS.isdisjoint(texts):
            return list(texts)
        return list(map(escape, texts))
    if len(kinds) < 2:
        return list(map(str, keys))
    taken = {str(key) for key in keys if type(key) is int}
    return [
        _percent(key[0]) + key[1:] if isinstance(key, str) and key in taken else escape(key)
        for key in keys
    ]
