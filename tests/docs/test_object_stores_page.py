"""What the page on object stores says in numbers and names is what there is."""

from __future__ import annotations

import json
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from asyncckpt import SaveOptions, blocking
from asyncckpt.arguments import COLLECT_MIN_S
from asyncckpt.stores.objects.clients.client import Kind
from asyncckpt.stores.objects.clients.opening import CLIENTS, EXTRAS
from tests.moto_s3 import moto_server, s3_of
from tests.simulator import Simulator, simulator

PAGE = (Path(__file__).parents[2] / "docs" / "object-stores.md").read_text()
STEPS = 5

# What S3 and GCS put on a bill as one of these.
BILLED = {
    "list_objects": "lists",
    "list_uploads": "lists",
    "get_object": "reads",
    "head_object": "reads",
    "put_object": "writes",
    "create_upload": "writes",
    "put_part": "writes",
    "complete_upload": "writes",
    "delete_object": "deletions",
    "delete_objects": "deletions",
}

Work = Callable[[blocking.Checkpointer], Any]


def rows() -> dict[str, dict[str, int]]:
    """The table, with its formulas evaluated for a run of `STEPS` steps."""
    section = PAGE.split("## What it costs in requests\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    names = {"steps": STEPS, "newest": min(3, STEPS)}
    return {
        call: {
            kind: int(eval(formula, {"__builtins__": {}}, names))
            for kind, formula in zip(found[0][1:], formulas, strict=True)
        }
        for call, *formulas in found[1:]
    }


@pytest.fixture(scope="module")
def sim() -> Iterator[Simulator]:
    with simulator() as sim:
        yield sim


class Bill:
    """A run of `STEPS` steps, and what calls on it cost."""

    def __init__(self, sim: Simulator, kind: str) -> None:
        self.sim = sim
        self.url = f"{'gs' if kind == 'gcsfs' else 's3'}://bucket/{uuid.uuid4().hex}"
        client = {"s3fs": "fsspec", "gcsfs": "fsspec"}.get(kind, kind)
        self.options = (
            sim.gcs_options(client=client) if kind == "gcsfs" else sim.s3_options(client=client)
        )
        with self.run() as run:
            for step in range(STEPS):
                run.save(step, {"w": np.arange(1000.0), "n": 1})

    def run(self) -> blocking.Checkpointer:
        return blocking.Checkpointer(self.url, storage_options=self.options)

    def of(self, work: Work) -> Counter[str]:
        """The requests of some work, and of what is settled after it."""
        with self.run() as run:
            self.sim.reset()
            work(run)
        return Counter({"lists": 0, "reads": 0, "writes": 0, "deletions": 0}) + self.counted()

    def counted(self) -> Counter[str]:
        return Counter(BILLED[entry.kind] for entry in self.sim.requests)

    def opened(self) -> Counter[str]:
        self.sim.reset()
        self.run().__enter__().close()
        return self.counted()


def saves(count: int, first: int) -> Work:
    def work(run: blocking.Checkpointer) -> None:
        for step in range(first, first + count):
            run.save(step, {"w": np.arange(1000.0), "n": 1})

    return work


def deletions(*steps: int) -> Work:
    def work(run: blocking.Checkpointer) -> None:
        for step in steps:
            run.delete(step)

    return work


@pytest.mark.usefixtures("unraced")
@pytest.mark.parametrize("kind", ["obstore", "s3fs", "gcsfs"])
def test_the_table_of_costs_is_that_of_the_request_log(sim: Simulator, kind: str) -> None:
    bill = Bill(sim, kind)
    table = rows()
    google = kind == "gcsfs"

    def check(call: str, found: Counter[str], *, deletes: bool = False) -> None:
        expected = dict(table.pop(call))
        if google and call.startswith("`save"):
            expected["writes"] += 2  # commit_success.txt of the step and of its item
        if deletes and kind != "obstore":  # the other libraries delete objects one by one
            expected["deletions"] = found["deletions"]
        if call == "`delete(step)`" and kind == "obstore":
            expected["reads"] -= 1  # it cannot delete on condition, and needs no version for one
        if deletes and google:  # gcsfs lists, too, when it looks for the version of an object
            found = found | Counter({"lists": 0, "reads": 0})
            expected["lists"], expected["reads"] = found["lists"], found["reads"]
        assert {name: found[name] for name in expected} == expected, call

    check("`with Checkpointer(url)`, once", bill.opened())
    for call, work in {
        "`steps()`": lambda run: run.steps(),
        "`latest_step()`": lambda run: run.latest_step(),
        "`inspect(step)`": lambda run: run.inspect(1),
        "`restore(step)`": lambda run: run.restore(1),
        "`restore()`": lambda run: run.restore(),
        "`verify(step)`": lambda run: run.verify(1),
    }.items():
        check(call, bill.of(work))
    one, two = bill.of(saves(1, STEPS)), bill.of(saves(2, STEPS + 1))
    later = Counter({name: two[name] - one[name] for name in {*one, *two}})
    check("`save(step, tree)`, `start_save(step, tree)`", later)
    first = Counter({name: one[name] - later[name] for name in {*one, *later}})
    check("first save of a `Checkpointer`, more than later ones", first)
    one, two = bill.of(deletions(1)), bill.of(deletions(2, 3))
    later = Counter({name: two[name] - one[name] for name in {*one, *two}})
    check("`delete(step)`", later, deletes=True)
    first = Counter({name: one[name] - later[name] for name in {*one, *later}})
    check(
        "first deletion or overwrite of a `Checkpointer`, more than later ones", first, deletes=True
    )
    assert table == {}


@pytest.mark.usefixtures("unraced")
@pytest.mark.parametrize("kind", ["obstore", "gcsfs"])
def test_a_further_data_file_is_a_further_write_and_a_further_range_a_read(
    sim: Simulator, kind: str
) -> None:
    bill = Bill(sim, kind)
    options = SaveOptions(target_data_file_nbytes=8 << 20, chunk_nbytes=8 << 20)
    small = {"w": np.zeros(1000, np.float32)}
    large = {"w": np.zeros(40 << 18, np.float32)}
    costs = [
        bill.of(lambda run, tree=tree: run.save(9, tree, options=options, overwrite=True))
        for tree in (small, large)
    ]
    info = blocking.inspect(f"{bill.url}/9", storage_options=bill.options)
    files = sum("/d/" in file.path and not file.path.endswith("-index") for file in info.files)
    assert files > 2
    assert costs[1]["writes"] - costs[0]["writes"] == files - 1
    read = bill.of(lambda run: run.restore(9))["reads"]
    assert read - rows()["`restore(step)`"]["reads"] <= files


def test_every_kind_of_failure_is_in_the_table() -> None:
    section = PAGE.split("## When it fails\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} - {"found"}
    # These three are answers that decide something, and have errors of their own.
    assert listed == set(get_args(Kind)) - {"missing", "exists", "conflict"}


def test_clients_extras_and_ages_are_those_of_the_code() -> None:
    assert all(f'`"{name}"`' in PAGE for name in CLIENTS)
    assert all(f"asyncckpt[{extra}]" in PAGE for extra in EXTRAS.values())
    assert COLLECT_MIN_S == 7 * 86400 and "7 days is the default and the least" in PAGE


def test_the_lifecycle_rule_for_s3_is_one_that_s3_takes() -> None:
    blocks = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]
    amazon, google = blocks
    with moto_server("bucket") as url:
        client = s3_of(url)
        client.put_bucket_lifecycle_configuration(Bucket="bucket", LifecycleConfiguration=amazon)
        (rule,) = client.get_bucket_lifecycle_configuration(Bucket="bucket")["Rules"]
    assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 7}
    (rule,) = google["rule"]
    assert rule == {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 7}}
