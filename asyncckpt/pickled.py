"""Pickles of reports and options that other releases can load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")


class PickledByName:
    """Base of dataclasses whose pickles hold the fields by name.

    Pickles of frozen dataclasses with slots hold them by position, so a release with other fields
    would load values into the wrong ones.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return of_fields, (type(self), {name: getattr(self, name) for name in _given(type(self))})


def _given(kind: Any) -> list[str]:
    return [field.name for field in fields(kind) if field.init]


def of_fields(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return a dataclass with the fields that this release has.

    Pickles contain the name of this function.
    """
    return kind(**{name: values[name] for name in _given(kind) if name in values})
