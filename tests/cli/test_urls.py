"""The command line on URLs: `--storage-option`, and every command on an object store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from asyncckpt import UsageError, blocking
from asyncckpt.cli.opening import full_name, step_of, storage_options
from asyncckpt.stores.objects.clients.opening import open_client
from tests.cli.ran import Ran, Run
from tests.simulator import Simulator, simulator

SECRET = "hunter2/of+the=test"
TREE = {"params": {"w": np.arange(300_000, dtype=np.float32), "b": np.zeros(3)}, "epoch": 1}


@pytest.fixture(scope="module")
def sim() -> Iterator[Simulator]:
    with simulator() as sim:
        yield sim


def words(options: dict[str, Any]) -> list[str]:
    """The options as a person writes them: JSON only where text is not enough."""
    return [
        word
        for key, value in options.items()
        for word in (
            "--storage-option",
            f"{key}={value if isinstance(value, str) else json.dumps(value)}",
        )
    ]


class Place(NamedTuple):
    """A run with the steps 1 and 20, and how the command line reaches it."""

    root: str
    words: list[str]
    options: dict[str, Any]


@pytest.fixture(scope="module", params=["s3", "gs", "bucket"])
def place(request: pytest.FixtureRequest, sim: Simulator) -> Place:
    kind = request.param
    options: dict[str, Any] = sim.gcs_options() if kind == "gs" else sim.s3_options()
    root = f"{kind}://bucket/{kind}/run"  # the bucket has both endpoints
    if kind == "bucket":  # as a whole
        sim.create_bucket("of-one-run")
        root = "s3://of-one-run"
    with blocking.Checkpointer(root, storage_options=options) as steps:
        for step in (1, 20):
            steps.save(step, {**TREE, "epoch": step}, metrics={"loss": 1 / step})
    return Place(root, words(options), options)


# ------------------------------------------------------------------------------ every command


def test_ls_lists_the_steps(run: Run, place: Place) -> None:
    done = run("ls", f"{place.root}/", *place.words)
    assert (done.status, done.err) == (0, "")
    assert [row.split()[0] for row in done.out.splitlines()] == ["step", "1", "20"]
    listed = json.loads(run("ls", place.root, "--json", *place.words).out)
    assert [entry["location"] for entry in listed] == [f"{place.root}/{n}" for n in (1, 20)]


def test_show_takes_a_step_and_a_root(run: Run, place: Place) -> None:
    for path, step in ((f"{place.root}/1", 1), (f"{place.root}/1/", 1), (place.root, 20)):
        shown = json.loads(run("show", path, "--json", *place.words).out)
        assert (shown["step"], shown["location"]) == (step, f"{place.root}/{step}")
    assert "params/" in run("show", place.root, *place.words).out


def test_verify_takes_a_step_and_a_root(run: Run, place: Place) -> None:
    one = run("verify", f"{place.root}/20", *place.words)
    assert one.status == 0 and one.out.startswith(f"{place.root}/20: 3 leaves, ")
    every = json.loads(run("verify", place.root, "--json", *place.words).out)
    assert every["ok"] and [entry["step"] for entry in every["checkpoints"]] == [1, 20]


def test_a_command_opens_one_client_for_each_root(
    run: Run, sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, options = "s3://bucket/once/run", sim.s3_options()
    with blocking.Checkpointer(root, storage_options=options) as steps:
        for step in range(4):
            steps.save(step, TREE)
    opened: list[str] = []

    def counted(url: str, **arguments: Any) -> Any:
        opened.append(url)
        return open_client(url, **arguments)

    monkeypatch.setattr("asyncckpt.stores.objects.clients.opening.open_client", counted)
    for command, *paths, roots in (
        ("ls", root, [root]),
        ("show", f"{root}/3", [root]),
        ("show", root, ["s3://bucket/once", root]),
        ("verify", root, ["s3://bucket/once", root]),
        ("rm", f"{root}/1", f"{root}/2", [root]),
    ):
        opened.clear()
        assert run(command, *paths, *words(options), answer="y\n").status == 0
        assert opened == roots


def test_diff_compares_two_steps(run: Run, place: Place) -> None:
    done = run("diff", f"{place.root}/1", place.root, *place.words)
    assert done.status == 1 and done.err == ""
    assert done.out.splitlines()[-1] == "3 leaves in both, 1 differ"


def test_convert_goes_there_and_back(run: Run, place: Place, tmp_path: Path) -> None:
    assert run("convert", place.root, tmp_path / "local", *place.words).status == 0
    there = run("convert", tmp_path / "local", f"{place.root}-copy/7", "--json", *place.words)
    if place.root == "s3://of-one-run":
        assert there.status == 1 and "no such bucket" in there.err
        return
    assert json.loads(there.out)["step"] == 7
    assert run("diff", place.root, f"{place.root}-copy/7", *place.words).status == 0
    exported = run("export", "--orbax", place.root, f"{place.root}-orbax", *place.words)
    assert exported.status == 0 and exported.err == ""
    if place.root.startswith("gs"):
        return
    again = run("convert", place.root, f"{place.root}-copy/7", *place.words)
    assert again.status == 1 and "--overwrite" in again.err
    assert (
        run("convert", place.root, f"{place.root}-copy/7", "--overwrite", *place.words).status == 0
    )


def test_rm_asks_and_removes(run: Run, place: Place) -> None:
    steps = blocking.Checkpointer(place.root, storage_options=place.options)
    steps.save(3, TREE)
    refused = run("rm", f"{place.root}/3", *place.words, answer="n\n")
    assert refused.status == 1 and "3 leaves" in refused.out
    assert run("rm", f"{place.root}/3", *place.words, answer="y\n").status == 0
    missing = run("rm", "--yes", f"{place.root}/3", *place.words)
    assert missing.status == 1 and "there is no checkpoint to remove" in missing.err
    assert steps.steps() == [1, 20]
    steps.close()
    refused = run("rm", "--yes", f"{place.root}/final", *place.words)
    assert refused.status == 2 and "the tools of its store, checkpoint.json first" in refused.err


def test_what_is_no_run_says_so(run: Run, place: Place) -> None:
    one = run("ls", f"{place.root}/20", *place.words)
    assert one.status == 1 and f"asyncckpt show {place.root}/20" in one.err
    none = run("ls", f"{place.root}/none", *place.words)
    assert none == Ran(0, f"no steps in {place.root}/none\n", "")
    for command in ("show", "verify"):
        gone = run(command, f"{place.root}/none", *place.words)
        assert gone.status == 1 and gone.out == ""
        assert gone.err.startswith(f"asyncckpt: {place.root}/none: ")
        assert gone.err.count("\n") == 1


def test_a_damaged_record_is_told_by_verify(run: Run, sim: Simulator) -> None:
    options = sim.s3_options()
    blocking.save("s3://bucket/damaged/5", TREE, storage_options=options)
    record = sim.get("bucket", "damaged/5/checkpoint.json")
    sim.put("bucket", "damaged/5/checkpoint.json", record.replace(b'"step":null', b'"step":5555'))
    for path in ("s3://bucket/damaged/5", "s3://bucket/damaged"):
        done = run("verify", path, *words(options))
        assert done.status == 1 and "(metadata)" in done.out and "CRC-32C" in done.out
        assert done.out.startswith("s3://bucket/damaged/5: damaged")


def test_an_empty_bucket_is_no_checkpoint(run: Run, sim: Simulator, tmp_path: Path) -> None:
    sim.create_bucket("empty")
    options = words(sim.s3_options())
    for arguments in (("show", "s3://empty"), ("convert", "s3://empty", tmp_path / "x")):
        done = run(*arguments, *options)
        assert done.status == 1 and "there is no checkpoint" in done.err
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------- options


def test_values_are_json_or_text() -> None:
    given = ["key=a=b", 'client_kwargs={"region_name": "x"}', "anon=true", "profile=", 'id="12"']
    assert storage_options(given) == {
        "key": "a=b",
        "client_kwargs": {"region_name": "x"},
        "anon": True,
        "profile": "",
        "id": "12",
    }
    assert storage_options([]) is None


@pytest.mark.parametrize("text", ["1e5", "20240101", "007", "-1", "1.5", "NaN", "-Infinity"])
def test_a_number_is_text_as_a_credential_may_be_one(text: str) -> None:
    assert storage_options([f"key={text}"]) == {"key": text}


def test_a_number_of_another_option_is_one() -> None:
    assert storage_options(["retries=3", "timeout=2.5"]) == {"retries": 3, "timeout": 2.5}


def test_credentials_that_are_numbers_reach_the_store(run: Run, sim: Simulator) -> None:
    sim.create_bucket("numbers")
    done = run("ls", "s3://numbers/run", *words(sim.s3_options(key="20240101", secret="1e5")))
    assert done == Ran(0, "no steps in s3://numbers/run\n", "")


@pytest.mark.parametrize("word", [SECRET.partition("=")[0], f"={SECRET}", f"a b={SECRET}", ""])
def test_a_word_that_is_no_option_is_not_shown(run: Run, word: str) -> None:
    done = run("ls", "s3://bucket/run", "--storage-option", word)
    assert done == Ran(
        2, "", "asyncckpt: --storage-option: pass KEY=VALUE, for example profile=training\n"
    )


@pytest.mark.parametrize("text", ["True", "False", "None"])
def test_a_constant_of_python_is_not_taken_for_a_true_text(text: str) -> None:
    with pytest.raises(UsageError, match="anon: write true, false or null"):
        storage_options([f"anon={text}"])
    assert storage_options([f"secret={text}"]) == {"secret": text}


def test_an_option_that_is_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="key is given twice") as caught:
        storage_options(["key=1", f"key={SECRET}"])
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls", "s3://missing/run"),
        ("show", "s3://missing/run/1"),
        ("verify", "s3://missing/run"),
        ("rm", "--yes", "s3://missing/run/1"),
        ("gc", "s3://missing/run"),
        ("diff", "s3://missing/a", "s3://missing/b"),
        ("convert", "s3://missing/a", "s3://missing/b"),
        ("export", "--orbax", "s3://missing/a", "s3://missing/b"),
        ("show", "s3://missing"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_no_command_shows_what_an_option_said(
    run: Run, sim: Simulator, arguments: tuple[str, ...]
) -> None:
    done = run(*arguments, *words(sim.s3_options(secret=SECRET, key="AKIAHUNTER2")))
    assert done.status in (1, 2) and done.err.count("\n") == 1 and "no such bucket" in done.err
    for text in (SECRET, "AKIAHUNTER2", "hunter2", sim.s3_endpoint):
        assert text not in done.out + done.err


def test_options_for_local_paths_are_refused(run: Run, tmp_path: Path) -> None:
    for arguments in (("ls", tmp_path), ("diff", tmp_path, tmp_path)):
        done = run(*arguments, "--storage-option", f"key={SECRET}")
        assert done.status == 2 and "leave them out for local paths" in done.err
        assert SECRET not in done.err


@pytest.mark.parametrize(
    ("location", "place"),
    [
        ("s3://bucket/run/20", ("s3://bucket/run", 20)),
        ("S3A://bucket//run/20/", ("s3://bucket/run", 20)),
        ("gs://bucket/7", ("gs://bucket", 7)),
        ("gs://bucket", None),
        ("s3://20", None),
        ("s3://bucket/run/020", None),
        ("s3://bucket/run/20x", None),
        ("memory://run/5", ("memory://run", 5)),
        ("memory://5", ("memory://", 5)),
        ("/5", ("/", 5)),
        ("file:///data/run/5", ("/data/run", 5)),
    ],
)
def test_a_step_is_told_by_the_last_part(location: str, place: tuple[str, int] | None) -> None:
    assert step_of(location) == place


def test_names_of_locations_are_their_normal_form() -> None:
    assert full_name("gcs://bucket/run//x/") == "gs://bucket/run/x"
    assert full_name("file:///a/../b") == "/b"
    with pytest.raises(UsageError, match="seems to hold credentials") as caught:
        full_name(f"s3://key:{SECRET}@bucket/run")
    assert SECRET not in str(caught.value)
