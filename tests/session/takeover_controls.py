"""Breaking one rule of takeovers at a time, to see that the rounds notice."""

from __future__ import annotations

from typing import Any

import pytest

from asyncckpt.stores.local import epochs
from asyncckpt.stores.objects.attempt import ObjectAttempt
from asyncckpt.stores.objects.counting import Claims
from asyncckpt.stores.paths import Layout


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """A takeover does not move the directories of lower claims."""

    def take_nothing(layout: Layout, epoch: int) -> None:
        pass

    patch.setattr(epochs, "_take_over", take_nothing)


def deletions_are_not_fenced(patch: pytest.MonkeyPatch) -> None:
    """Deleted checkpoints go to a directory that no takeover moves."""
    leftover = Layout.leftover

    def beside(self: Layout, kind: str, name: str, token: str, epoch: int = 0) -> str:
        return leftover(self, kind, name, token)

    patch.setattr(Layout, "leftover", beside)


def every_record_counts(patch: pytest.MonkeyPatch) -> None:
    """The inherited list of a claim is ignored."""

    async def counts(self: Claims, save_id: str, epoch: int) -> bool:
        return True

    patch.setattr(Claims, "counts", counts)


def no_look_after_the_record(patch: pytest.MonkeyPatch) -> None:
    """A save is acknowledged without a look for higher claims."""

    async def check(self: ObjectAttempt) -> None:
        pass

    patch.setattr(ObjectAttempt, "_check_claim", check)


def no_look_before_a_deletion(patch: pytest.MonkeyPatch) -> None:
    """A writer looks for higher claims after its records only."""
    check = Claims.check

    async def check_records(self: Claims, epoch: int, location: str = "", **options: Any) -> None:
        if options.get("visible", False) is None:
            await check(self, epoch, location, **options)

    patch.setattr(Claims, "check", check_records)


def replacements_leave_no_note(patch: pytest.MonkeyPatch) -> None:
    """A record that replaced an inherited one has no special status."""

    async def begin(self: Claims, old: str, new: str, epoch: int, location: str) -> None:
        pass

    patch.setattr(Claims, "begin_replacing", begin)


LOCAL = (no_fence, deletions_are_not_fenced)
REMOTE = (
    (every_record_counts, "create"),
    (no_look_after_the_record, "create"),
    (no_look_before_a_deletion, "create"),
    (replacements_leave_no_note, "replace"),
)
