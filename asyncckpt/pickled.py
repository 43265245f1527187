"""Pickles of reports and options that another release loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")


class PickledByName:
    """Base of dataclasses whose pickles hold the fields by name.

    Those of frozen dataclasses with slots hold them by position, so that a release with other
    fields loads values into the wrong ones.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return of_fields, (type(self), values)


def of_fields(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return a dataclass with these fields, without those that this release does not have.

    Its name is in the pickles.
    """
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in names})
