"""The place of a checkpoint that DCP saves or loads."""

from __future__ import annotations

import os
from typing import TypeVar

from asyncckpt.arguments import Location
from asyncckpt.errors import UsageError
from asyncckpt.stores.objects.clients.urls import check_scheme, is_url, parse_url

P = TypeVar("P")


class Located:
    """Base of both plug-ins: the location, and local plans that are not changed."""

    def __init__(self, path: Location) -> None:
        self._location = path

    def __repr__(self) -> str:
        return f"{type(self).__name__}({os.fspath(self._location)!r})"

    @property
    def checkpoint_id(self) -> Location:
        """Path or URL of the checkpoint."""
        return self._location

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is a path or a supported URL."""
        if not isinstance(checkpoint_id, (str, os.PathLike)) or not os.fspath(checkpoint_id):
            return False
        if is_url(checkpoint_id):
            try:
                check_scheme(parse_url(str(checkpoint_id)))
            except UsageError:
                return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Continue at `checkpoint_id` if it is given."""
        if checkpoint_id is not None:
            self._location = checkpoint_id

    def prepare_local_plan(self, plan: P) -> P:
        """Return the plan unchanged."""
        return plan
