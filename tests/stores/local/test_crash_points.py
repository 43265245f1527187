"""A kill, an error or a lost answer at every mutating system call of the local store.

Whatever happens: a checkpoint that is listed is whole, the one before is never lost, and after a
sweep nothing is left. Each test counts the points it visited.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncckpt.stores.local import publish
from asyncckpt.stores.local.store import LocalStore
from asyncckpt.testing.checkpoints import delete
from tests.crash.faults import ForkServer
from tests.stores.checkpoints import expect, save
from tests.stores.children import attempted, fresh, unsupported, with_store

SCENARIOS = ("new", "overwrite", "overwrite_in_two_steps", "move_aside", "delete")


def prepare(root: Path, scenario: str) -> None:
    """Save `0`, and `1` (seed 1) if the scenario replaces or deletes it."""

    async def use(store: LocalStore) -> None:
        await save(store, "0", "other", 0)
        if scenario in ("overwrite", "overwrite_in_two_steps", "delete"):
            await save(store, "1", "old", 1)
        if scenario == "move_aside":
            (root / "1").mkdir()
            (root / "1" / "notes").write_text("mine")

    with_store(root, use)


def change(root: str, scenario: str) -> dict[str, bool]:
    """Run the operation under test; return whether the result was visible if it raised."""
    if scenario == "overwrite_in_two_steps":
        publish.rename_noreplace = publish.rename_exchange = unsupported

    async def work(store: LocalStore) -> None:
        if scenario == "delete":
            await delete(store, "1")
            return
        attempt = await store.begin("1", "new", overwrite=scenario.startswith("over"))
        try:
            await save_into(attempt)
        finally:
            await attempt.abort()

    return attempted(root, work)


async def save_into(attempt: Any) -> None:
    class Once:
        async def begin(self, name: str, save_id: str) -> Any:
            return attempt

    await save(Once(), "1", "new", 2)  # type: ignore[arg-type]


def look(root: Path, scenario: str, *, swept: bool) -> set[int]:
    """Read the listed checkpoints completely; return the seeds (none or one) of `1`."""
    found: set[int] = set()

    async def use(store: LocalStore) -> None:
        if swept:
            await store.sweep()
        names = await store.names()
        await expect(store, "0", 0)
        if "1" in names and (root / "1" / "checkpoint.json").exists():
            seed = int((root / "1" / "checkpoint.json").read_bytes().split()[1])
            await expect(store, "1", seed)
            found.add(seed)

    with_store(root, use)
    return found


def left(root: Path) -> list[str]:
    """Entries below `.asyncckpt`, except those that were in the way."""
    paths = (p.relative_to(root / ".asyncckpt") for p in (root / ".asyncckpt").rglob("*"))
    return [str(p) for p in paths if not str(p).startswith("aside-") and str(p) != "lock"]


def allowed(scenario: str) -> list[set[int]]:
    """The two permitted listings: the old set and the new one."""
    if scenario == "delete":
        return [{1}, set()]
    return [{1} if scenario.startswith("over") else set(), {2}]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(
        imports=("numpy", "asyncckpt.stores.local.store", "tests.stores.children")
    ) as running:
        yield running


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_kill_leaves_the_old_or_the_new_and_nothing_after_a_sweep(
    server: ForkServer, scratch: Path, scenario: str
) -> None:
    visited = 0
    states = []
    target = "tests.stores.local.test_crash_points:change"
    for number, args, outcome in server.each_call(target, fresh(prepare, scratch, scenario)):
        assert outcome.killed, outcome.describe()
        root = Path(args["root"])
        before = look(root, scenario, swept=False)
        after = look(root, scenario, swept=True)
        gap = scenario == "overwrite_in_two_steps" and before == set()
        assert before in allowed(scenario) or gap, (number, outcome.describe())
        assert after == before or (gap and after == {1}), (number, outcome.describe())
        assert left(root) == [], (number, outcome.describe())
        if scenario == "move_aside":
            notes = [*root.glob("1/notes"), *root.glob(".asyncckpt/aside-*/notes")]
            assert len(notes) == 1, (number, outcome.describe())
        states.append(after)
        visited += 1
    assert visited > 10
    # The first call comes before the change, and the last one after it.
    assert states[0] == allowed(scenario)[0]
    assert states[-1] == allowed(scenario)[-1]
    print(f"{scenario}: {visited} points")


@pytest.mark.parametrize("mode", ["error", "error_after"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_error_leaves_what_it_says(
    server: ForkServer, scratch: Path, scenario: str, mode: Any
) -> None:
    visited = 0
    target = "tests.stores.local.test_crash_points:change"
    for number, args, outcome in server.each_call(
        target, fresh(prepare, scratch, scenario), mode=mode, errno=errno.EIO
    ):
        what = (number, outcome.describe())
        assert outcome.exit_status == 0, what
        root = Path(args["root"])
        found = look(root, scenario, swept=False)
        old, new = allowed(scenario)
        expected = new if outcome.result["done"] or outcome.result["visible"] else old
        assert found == expected or (scenario == "delete" and found in (old, new)), what
        assert look(root, scenario, swept=True) == found, what
        visited += 1
    assert visited > 10
    print(f"{scenario} {mode}: {visited} points")
