"""The place of a checkpoint that DCP saves or loads."""

from __future__ import annotations

import os
from typing import TypeVar

from asyncckpt.arguments import Location
from asyncckpt.errors import UsageError
from asyncckpt.stores.objects.clients.urls import check_scheme, is_url, parse_url

P = TypeVar("P")


class Located:
    """What both plug-ins have in common: a place, and local plans that stay as they are."""

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
        """Return whether this is a path or a URL that the library knows."""
        if not isinstance(checkpoint_id, (str, os.PathLike)) or not os.fspath(checkpoint_id):
            return False
        if is_url(checkpoint_id):
            try:
                check_scheme(parse_url(str(checkpoint_id)))
            except UsageError:
                return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Continue at `checkpoint_id` if that is given."""
        if checkpoint_id is not None:
            self._location = checkpoint_id

    def prepare_local_plan(self, plan: P) -> P:
        """Return the plan as it is."""
        return plan
