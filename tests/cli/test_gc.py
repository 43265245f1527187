"""`asyncckpt gc` and `collect_garbage`: what is removed, what stays, and the question before."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest

import asyncckpt
from asyncckpt import blocking
from asyncckpt.arguments import COLLECT_MIN_S
from asyncckpt.errors import UsageError
from asyncckpt.runtime import Runtime
from asyncckpt.stores.local.locks import Machine, Terms, this_machine, write_owner
from tests.cli.ran import Ran, Run
from tests.simulator import Simulator, simulator
from tests.stores.children import answer, end, start

DAY_S = 24 * 3600.0
ELSEWHERE = Machine("another host", "another boot")
TREE = {"w": np.arange(1000.0)}


# ----------------------------------------------------------------------------------- local disk


def age(path: Path, days: float) -> None:
    """Everything in the directory, and its owner file, was last written so long ago."""
    then = time.time() - days * DAY_S
    for inner in [path, *path.rglob("*"), path.with_name(f"{path.name}.owner")]:
        if inner.exists():
            os.utime(inner, (then, then))


def attempt(root: Path, name: str, *, days: float, machine: Machine = ELSEWHERE) -> Path:
    """Leftovers of a save on a machine that went down in the middle."""
    path = root / ".asyncckpt" / "epoch-0" / f"{name}-{uuid.uuid4().hex}"
    (path / "default" / "d").mkdir(parents=True)
    (path / "default" / "d" / "data").write_bytes(b"x" * 1000)
    write_owner(str(path), machine, Terms(name, path.name[-32:], private=True))
    age(path, days)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with the step 1."""
    with blocking.Checkpointer(tmp_path / "run") as steps:
        steps.save(1, TREE)
    return tmp_path / "run"


def left(root: Path) -> list[str]:
    control = root / ".asyncckpt"
    return sorted(str(path.relative_to(control)) for path in control.glob("epoch-*/*")) + sorted(
        path.name for path in control.glob("*-*") if not path.name.startswith("epoch-")
    )


async def test_what_another_host_has_left_goes_when_it_is_old_enough(root: Path) -> None:
    old, young = attempt(root, "2", days=8), attempt(root, "3", days=6)
    with blocking.Checkpointer(root):
        assert old.exists()  # nothing proves that its process is dead
    assert await asyncckpt.collect_garbage(root) == [f"epoch-0/{old.name}"]
    assert not old.exists() and young.exists()
    assert left(root) == [f"epoch-0/{young.name}", f"epoch-0/{young.name}.owner"]
    assert blocking.verify(root / "1").ok


async def test_the_newest_file_in_a_leftover_says_how_old_it_is(root: Path) -> None:
    path = attempt(root, "2", days=30)
    (path / "default" / "d" / "data").write_bytes(b"y")
    assert await asyncckpt.collect_garbage(root) == []
    assert path.exists()


async def test_a_dry_run_removes_nothing_and_names_what_would_go(root: Path) -> None:
    path = attempt(root, "2", days=8)
    assert await asyncckpt.collect_garbage(root, dry_run=True) == [f"epoch-0/{path.name}"]
    assert (path / "default" / "d" / "data").exists()


@pytest.mark.parametrize("leftovers", [0, 1])
async def test_a_dry_run_makes_and_removes_no_file_or_directory(root: Path, leftovers: int) -> None:
    for directory in ("epoch-0", "fenced-1-x"):
        (root / ".asyncckpt" / directory).mkdir(parents=True)
    for _ in range(leftovers):
        attempt(root, "2", days=8)
    before = sorted(root.rglob("*"))
    assert len(await asyncckpt.collect_garbage(root, dry_run=True)) == leftovers
    assert sorted(root.rglob("*")) == before


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds an attempt at the name 2."""
    child = start("hold_attempt", str(tmp_path / "run"), "2", "x")
    assert answer(child) == "begun"
    yield child
    end(child, kill=True)


async def test_an_attempt_that_is_alive_stays_however_old(
    root: Path, child: subprocess.Popen[str]
) -> None:
    path = root / ".asyncckpt" / "epoch-0" / "2-x"
    age(path, 100)
    assert await asyncckpt.collect_garbage(root, dry_run=True) == []
    assert await asyncckpt.collect_garbage(root) == []
    assert path.exists()


async def test_every_kind_of_leftover_goes_and_nothing_else(root: Path) -> None:
    control = root / ".asyncckpt"
    old = attempt(root, "2", days=8)
    orphan = control / "epoch-0" / "3-x"
    write_owner(str(orphan), ELSEWHERE, Terms("3", "x", private=True))
    age(orphan, 8)
    blocking.save(root / "aside", TREE)
    for name in ("trash-4-x", "old-1-x", "aside-5-x"):
        blocking.save(root / "tmp", TREE)
        (root / "tmp").rename(control / name)
        write_owner(str(control / name), ELSEWHERE, Terms(name.split("-")[1], "x", private=True))
        age(control / name, 8)
    stranger = control / "epoch-0" / "notes.txt"
    stranger.write_text("mine")
    found = await asyncckpt.collect_garbage(root)
    assert found == [f"epoch-0/{old.name}", "epoch-0/3-x", "old-1-x", "trash-4-x"]
    assert left(root) == ["epoch-0/notes.txt", "aside-5-x", "aside-5-x.owner"]
    assert sorted(path.name for path in root.glob("[!.]*")) == ["1", "aside"]


@pytest.mark.parametrize("dry_run", [True, False])
async def test_a_checkpoint_whose_successor_never_came_is_put_back(
    root: Path, dry_run: bool
) -> None:
    old = root / ".asyncckpt" / "old-1-x"
    old.parent.mkdir(exist_ok=True)
    write_owner(str(old), ELSEWHERE, Terms("1", "x", private=True))
    (root / "1").rename(old)
    age(old, 30)
    assert await asyncckpt.collect_garbage(root, dry_run=dry_run) == []
    assert old.exists() == dry_run and (root / "1").exists() != dry_run
    assert blocking.verify(old if dry_run else root / "1").ok


async def test_an_old_checkpoint_that_nobody_knows_the_name_of_stays(root: Path) -> None:
    for name, owner in (("old-9-x", None), ("old-8-x", "../escaped")):
        blocking.save(root / "tmp", TREE)
        path = root / ".asyncckpt" / name
        path.parent.mkdir(exist_ok=True)
        (root / "tmp").rename(path)
        if owner is not None:
            write_owner(str(path), this_machine(), Terms(owner, "x", private=True))
        age(path, 30)
    assert await asyncckpt.collect_garbage(root) == []
    assert left(root) == ["old-8-x", "old-8-x.owner", "old-9-x"]
    assert not (root.parent / "escaped").exists()


async def test_where_nothing_is_nothing_is_made(tmp_path: Path, leak_check: None) -> None:
    assert await asyncckpt.collect_garbage(tmp_path / "gone") == []
    assert blocking.collect_garbage(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seconds", [0, -1, 604_799.9, float("nan"), True, "7d", None])
async def test_less_than_a_week_is_refused(tmp_path: Path, seconds: Any) -> None:
    with pytest.raises(asyncckpt.UsageError, match="older_than_s"):
        await asyncckpt.collect_garbage(tmp_path, older_than_s=seconds)


# --------------------------------------------------------------------------------- object stores


@pytest.fixture(scope="module")
def sim() -> Iterator[Simulator]:
    with simulator() as sim:
        yield sim


def age_object(sim: Simulator, key: str, days: float) -> None:
    bucket = sim.buckets["bucket"]
    item = bucket.objects[key]
    bucket.objects[key] = dataclasses.replace(item, modified_s=time.time() - days * DAY_S)


def leftovers(sim: Simulator, root: str, step: int, *, days: float, count: int = 3) -> list[str]:
    """Keys below the root, left by a save at an object store that ended before its record."""
    save_id = uuid.uuid4().hex
    keys = [f"{step}/.asyncckpt-{save_id}-fixed-0", f"{step}/default/d/{save_id}-index"]
    keys += [f"{step}/default/d/{save_id}-{number}" for number in range(count - 2)]
    for key in keys:
        sim.put("bucket", f"{root}/{key}", b"x" * 100)
        age_object(sim, f"{root}/{key}", days)
    return sorted(keys)


def place(sim: Simulator, scheme: str) -> tuple[str, str, dict[str, Any]]:
    """A new root with the step 1, its URL, and options."""
    root = f"run-{uuid.uuid4().hex}"
    options = sim.gcs_options() if scheme == "gs" else sim.s3_options()
    url = f"{scheme}://bucket/{root}"
    with blocking.Checkpointer(url, storage_options=options) as steps:
        steps.save(1, TREE)
    for key in sim.objects():
        if key.startswith(f"{root}/"):
            age_object(sim, key, 100)
    return root, url, options


@pytest.mark.parametrize("scheme", ["s3", "gs"])
async def test_leftovers_on_an_object_store_go_by_age_and_owner(
    sim: Simulator, scheme: str
) -> None:
    root, url, options = place(sim, scheme)
    dead, replaced = leftovers(sim, root, 2, days=8), leftovers(sim, root, 1, days=8)
    leftovers(sim, root, 3, days=6)
    for key in ("2/mine.txt", "4/default/_METADATA", "other/deep/default/d/file"):
        sim.put("bucket", f"{root}/{key}", b"foreign")
        age_object(sim, f"{root}/{key}", 100)
    kept = sim.objects()
    expected = sorted([*dead, *replaced])
    found = await asyncckpt.collect_garbage(url, dry_run=True, storage_options=options)
    assert found == expected and sim.objects() == kept
    assert await asyncckpt.collect_garbage(url, storage_options=options) == expected
    assert sorted(kept.keys() - sim.objects()) == [f"{root}/{key}" for key in expected]
    assert (await asyncckpt.verify(f"{url}/1", storage_options=options)).ok
    assert await asyncckpt.collect_garbage(url, storage_options=options) == []


def test_clients_that_delete_conditionally_are_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them, records of writers that were taken over could not be removed."""
    given: list[Any] = []

    def store(self: Runtime, root: Any, *, direct_io: Any, storage_options: Any) -> Any:
        given.append(storage_options)
        raise UsageError("enough")

    monkeypatch.setattr(Runtime, "store", store)
    for options in (None, {"key": "k"}, {"client": "obstore"}):
        with pytest.raises(UsageError, match="enough"):
            blocking.collect_garbage("s3://bucket/run", storage_options=options)
    assert given == [{"client": "fsspec"}, {"key": "k", "client": "fsspec"}, {"client": "obstore"}]


async def test_uploads_that_were_not_completed_stay(sim: Simulator) -> None:
    """No save makes one, so all belong to exports, or to other programs."""
    root, url, options = place(sim, "s3")
    client = boto3.client("s3", **sim.boto3_options())
    keys = [f"{root}/2/model.safetensors", f"{root}/2/theirs"]
    for key in keys:
        client.create_multipart_upload(Bucket="bucket", Key=key)
    for upload in sim.uploads:
        upload.begun_s -= 8 * DAY_S
    assert await asyncckpt.collect_garbage(url, storage_options=options) == []
    assert [upload.key for upload in sim.uploads] == keys


def test_the_least_age_is_a_week() -> None:
    assert COLLECT_MIN_S == 7 * DAY_S


# ---------------------------------------------------------------------------------- the command


def test_gc_lists_asks_and_removes(run: Run, root: Path) -> None:
    path = attempt(root, "2", days=8)
    refused = run("gc", root, answer="n\n")
    assert refused.status == 1 and path.exists()
    assert refused.out.splitlines()[0] == f"epoch-0/{path.name}"
    assert "Remove 1 leftover?" in refused.out and "nothing was removed" in refused.out
    assert run("gc", root, answer="").status == 1  # the end of the input is no yes
    done = run("gc", root, answer="y\n")
    assert done.status == 0 and done.out.endswith("removed 1 leftover\n")
    assert not path.exists()
    assert run("gc", root) == Ran(0, f"no leftovers older than 7d in {root}\n", "")


def test_gc_takes_an_age_in_hours_days_or_weeks(run: Run, root: Path) -> None:
    path = attempt(root, "2", days=20)
    for age_text in ("21d", "3w", "504h", "20.5 d"):
        assert "no leftovers" in run("gc", root, "--older-than", age_text, "--dry-run").out
    for age_text in ("19d", "2W", "169h"):
        done = run("gc", root, "--older-than", age_text, "--dry-run")
        assert done == Ran(0, f"epoch-0/{path.name}\n", "")
    assert path.exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--older-than", "6d"), "--older-than 6d: pass at least a week"),
        (("--older-than", "24h"), "--older-than 24h: pass at least a week"),
        (("--older-than", "7"), "pass hours, days or weeks"),
        (("--older-than", "soon"), "pass hours, days or weeks"),
        (("--json",), "gc --json does not ask"),
        (("--storage-option", "key=hunter2"), "apply to object stores"),
    ],
)
def test_wrong_words_are_usage_errors(
    run: Run, root: Path, words: tuple[str, ...], text: str
) -> None:
    path = attempt(root, "2", days=8)
    done = run("gc", root, *words)
    assert done.status == 2 and done.out == "" and text in done.err and "hunter2" not in done.err
    assert path.exists()


def test_gc_of_a_missing_directory_is_an_error(run: Run, tmp_path: Path) -> None:
    done = run("gc", tmp_path / "gone")
    assert done == Ran(1, "", f"asyncckpt: {tmp_path}/gone: there is no such directory\n")


def test_gc_json_has_every_name(run: Run, root: Path) -> None:
    names = sorted(f"epoch-0/{attempt(root, str(step), days=8).name}" for step in range(60))
    shown = json.loads(run("gc", root, "--json", "--dry-run").out)
    assert shown == {
        "root": str(root),
        "older_than_s": 7 * DAY_S,
        "dry_run": True,
        "leftovers": names,
    }
    listed = run("gc", root, "--dry-run").out.splitlines()
    assert listed == [*names[:50], "… and 10 more"]
    removed = json.loads(run("gc", root, "--json", "--yes").out)
    assert removed["leftovers"] == names and removed["dry_run"] is False
    assert left(root) == []


def test_gc_of_a_url_takes_storage_options(run: Run, sim: Simulator) -> None:
    root, url, options = place(sim, "s3")
    keys = leftovers(sim, root, 2, days=8)
    words = [f"--storage-option={key}={json.dumps(value)}" for key, value in options.items()]
    done = run("gc", url, "--yes", *words)
    assert done == Ran(0, "removed 3 leftovers\n", "")
    assert not {f"{root}/{key}" for key in keys} & sim.objects().keys()
