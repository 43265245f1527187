"""The commands convert, diff and export: effects, output and exit status."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from asyncckpt import ShardedArray, blocking
from asyncckpt.cli import main
from tests.cli.ran import Ran, Run
from tests.convert.trees import numbers, saved

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> Ran:
        return Ran(main([str(argument) for argument in arguments]), *capsys.readouterr())

    return run


@pytest.fixture
def a(tmp_path: Path) -> Path:
    tree = {"params": {"w": numbers(200, 300), "b": np.zeros(3)}, "step": 7, "name": "x"}
    return saved(tmp_path / "a", tree, metadata={"seed": 1})


# --------------------------------------------------------------------------------------- convert


def test_convert_goes_by_the_suffix(run: Run, a: Path, tmp_path: Path) -> None:
    there = run("convert", a, tmp_path / "x.safetensors")
    assert (there.status, there.err) == (0, "")
    assert there.out.startswith(f"converted {a} (asyncckpt) to {tmp_path}/x.safetensors")
    assert there.out.count("\n") == 1
    assert np.array_equal(load_file(tmp_path / "x.safetensors")["params.w"], numbers(200, 300))
    back = run("convert", tmp_path / "x.safetensors", tmp_path / "run" / "4", "--zstd", "--json")
    report = json.loads(back.out)
    assert (report["source_format"], report["format"], report["step"]) == (
        "safetensors",
        "asyncckpt",
        4,
    )
    assert any("no checksum" in note for note in report["notes"])
    with blocking.Checkpointer(tmp_path / "run") as steps:
        assert steps.steps() == [4]
        assert steps.inspect(4)["params/w"].compression == "zstd"
        assert steps.inspect(4).metadata == {"seed": 1}


def test_convert_makes_a_set_of_files(run: Run, a: Path, tmp_path: Path) -> None:
    done = run("convert", a, tmp_path / "set", "--to", "safetensors", "--max-file-size", "100kB")
    assert done.status == 0
    assert (tmp_path / "set" / "model-00001-of-00002.safetensors").is_file()
    assert (tmp_path / "set" / "model.safetensors.index.json").is_file()


def test_convert_casts_and_overwrites_when_asked(run: Run, a: Path, tmp_path: Path) -> None:
    casts = ("--cast", "float32=bfloat16", "--cast", "float64=float32", "--memory", "64MiB")
    assert run("convert", a, tmp_path / "b", *casts).status == 0
    info = blocking.inspect(tmp_path / "b")
    assert (info["params/w"].dtype, info["params/b"].dtype) == ("bfloat16", "float32")
    refused = run("convert", a, tmp_path / "b")
    assert refused.status == 1 and "--overwrite" in refused.err and refused.err.count("\n") == 1
    assert run("convert", a, tmp_path / "b", "--overwrite").status == 0
    assert blocking.diff(a, tmp_path / "b").equal


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--cast", "float32"), "FROM=TO"),
        (("--cast", "float33=int8"), "FROM=TO"),
        (("--memory", "much"), "pass a size"),
        (("--memory", "9" * 400), "pass a size"),
        (("--memory", "1MiB"), "host_memory_nbytes=1048576"),
        (("--max-file-size", "5GB"), "is for safetensors"),
        (("--to", "safetensors", "--zstd"), "not compressed"),
        (("--to", "pickle"), "pickle"),
    ],
)
def test_wrong_words_are_usage_errors(
    run: Run, a: Path, tmp_path: Path, words: tuple[str, ...], text: str
) -> None:
    done = run("convert", a, tmp_path / "b", *words)
    assert done.status == 2 and text in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_convert_of_nothing_is_an_error(run: Run, tmp_path: Path) -> None:
    done = run("convert", tmp_path / "gone", tmp_path / "b")
    assert done.status == 1 and done.out == "" and str(tmp_path / "gone") in done.err


def test_sizes_are_decimal_or_binary(run: Run, a: Path, tmp_path: Path) -> None:
    for size in ("0.25MB", "250000", "250 kB", "250KB"):
        done = run(
            "convert", a, tmp_path / "s", "--to", "safetensors",
            "--max-file-size", size, "--overwrite", "--json",
        )  # fmt: skip
        assert json.loads(done.out)["file_count"] == 1
    done = run("convert", a, tmp_path / "s2", "--to", "safetensors", "--max-file-size", "0.2MiB")
    assert done.status == 0 and len(list((tmp_path / "s2").iterdir())) == 3


# ---------------------------------------------------------------------------------------- export


def test_export_makes_one_array_of_the_pieces(run: Run, tmp_path: Path) -> None:
    values = numbers(9000, 40)
    parts = [((start, 0), values[start:stop]) for start, stop in ((0, 2500), (2500, 4001))]
    rows = ShardedArray(values.shape, values.dtype, [*parts, ((4001, 0), values[4001:])])
    saved(tmp_path / "a", {"w": rows})
    done = run("export", "--orbax", tmp_path / "a", tmp_path / "b")
    assert (done.status, done.err) == (0, "")
    assert (tmp_path / "b" / "default" / "_METADATA").is_file()
    assert blocking.diff(tmp_path / "a", tmp_path / "b").equal


def test_export_says_for_whom_and_what_cannot_be(run: Run, a: Path, tmp_path: Path) -> None:
    done = run("export", a, tmp_path / "b")
    assert done == Ran(2, "", "asyncckpt: export: pass --orbax, the only format so far\n")
    saved(tmp_path / "raw", {"deep": {"raw": b"\0"}})
    done = run("export", "--orbax", tmp_path / "raw", tmp_path / "b")
    assert done.status == 2 and "deep/raw: Orbax cannot hold this bytes" in done.err
    assert not (tmp_path / "b").exists()


# ------------------------------------------------------------------------------------------ diff


def changed(tmp_path: Path) -> Path:
    w = numbers(200, 300)
    w[3, 4] += 0.5
    w[5, 5] = math.nan
    return saved(
        tmp_path / "b", {"params": {"w": w, "b": np.zeros(4)}, "step": 8, "other": [1], "more": 2}
    )


def test_diff_of_equal_checkpoints_ends_with_0(run: Run, a: Path, tmp_path: Path) -> None:
    run("convert", a, tmp_path / "x.safetensors")
    done = run("diff", a, tmp_path / "x.safetensors")
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines() == [
        "the first is a checkpoint of format asyncckpt, the second of safetensors",
        "4 leaves in both, equal",
    ]
    report = json.loads(run("diff", a, a, "--json", "--bitwise").out)
    assert report["equal"] is True and report["changed"] == []


def test_diff_lists_what_differs_and_ends_with_1(run: Run, a: Path, tmp_path: Path) -> None:
    done = run("diff", a, changed(tmp_path))
    assert (done.status, done.err) == (1, "")
    lines = done.out.splitlines()
    assert lines[0].split() == "leaf differs in first second elements largest relative at".split()
    assert lines[1].split()[0] == "params/w" and "2 of 60000 (1 NaN)" in lines[1]
    assert "0.5" in lines[1] and "[3, 4]" in lines[1]
    assert lines[2].split() == ["params/b", "shape", "float64[3]", "float64[4]"]
    assert lines[3].split() == ["step", "value", "int", "7", "int", "8"]
    assert lines[4:7] == [
        "only in the first: name",
        "only in the second: other/0",
        "only in the second: more",
    ]
    assert lines[-1] == "3 leaves in both, 3 differ"


def test_diff_lists_as_much_as_asked(run: Run, a: Path, tmp_path: Path) -> None:
    done = run("diff", a, changed(tmp_path), "--limit", "1")
    assert "… and 2 more" in done.out and "only in the second: 1 more" in done.out
    assert "params/b" not in done.out
    everything = run("diff", a, tmp_path / "b", "--limit", "0")
    assert "params/b" in everything.out and "more" in everything.out


def test_diff_json_has_every_number(run: Run, a: Path, tmp_path: Path) -> None:
    done = run("diff", a, changed(tmp_path), "--json")
    assert done.status == 1
    report: dict[str, Any] = json.loads(done.out)
    assert report["only_first"] == ["name"] and report["only_second"] == ["other/0", "more"]
    first = report["changed"][0]
    assert (first["path"], first["count"], first["nan_count"]) == ("params/w", 2, 1)
    assert (first["largest"], first["index"]) == (0.5, [3, 4])


def test_diff_json_has_infinities_as_text(run: Run, tmp_path: Path) -> None:
    for name, value in (("a", math.inf), ("b", 1.0)):
        saved(tmp_path / name, np.array([value]))
    report = json.loads(run("diff", tmp_path / "a", tmp_path / "b", "--json").out)
    assert report["changed"][0]["largest"] == "inf"


def test_diff_that_cannot_be_made_ends_with_2(run: Run, a: Path, tmp_path: Path) -> None:
    for second, words in ((tmp_path / "gone", ()), (a, ("--memory", "x"))):
        done = run("diff", a, second, *words)
        assert done.status == 2 and done.out == "" and done.err.startswith("asyncckpt: ")
    file = next((a / "default" / "d").glob("*-0"))
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    done = run("diff", a, a)
    assert done.status == 2 and "params/w" in done.err


def test_names_that_steer_a_terminal_are_printed_escaped(run: Run, tmp_path: Path) -> None:
    saved(tmp_path / "a", {"x\u202ey": 1})
    saved(tmp_path / "b", {"x\u202ey": "\x1b[31m"})
    done = run("diff", tmp_path / "a", tmp_path / "b")
    assert "\x1b" not in done.out and "\u202e" not in done.out and "x\\u202ey" in done.out


def test_the_commands_are_there_for_the_shell(a: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "asyncckpt", "diff", str(a), str(a)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
