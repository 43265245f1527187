"""The command line: output, questions and exit status."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncckpt import __version__, blocking
from asyncckpt.format.record import seal
from asyncckpt.options import LeafOptions, SaveOptions
from asyncckpt.reports.progress import INSTALL_LINE
from asyncckpt.save import commit as save_commit
from tests.checkpoint.foreign import orbax_writers
from tests.cli.ran import Ran, Run

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with the steps 1 and 20."""
    weights = np.arange(300_000, dtype=np.float32)
    with blocking.Checkpointer(tmp_path / "run") as run:
        for step in (1, 20):
            tree = {"params": {"w": weights * step, "b": np.zeros(3)}, "epoch": step}
            run.save(step, tree, metrics={"loss": 1 / step}, metadata={"seed": 7})
    return tmp_path / "run"


@pytest.fixture
def final(tmp_path: Path) -> Path:
    """A one-shot checkpoint with leaves of every kind."""
    weights = np.ones((200, 300), np.float32)
    tree = {
        "w": weights,
        "tied": weights,
        "empty": [{}, None, ()],
        "scalars": [3, math.nan, 1 + 2j, True, "text [red]", b"\0\1"],
        "a/b": np.float16(1),
        "scalars only": {},
    }
    options = SaveOptions(
        leaf_options=lambda path, spec: (
            LeafOptions(compression="zstd", chunk_shape=(100, 300))
            if path in ("w", "tied")
            else None
        )
    )
    blocking.save(tmp_path / "final", tree, metadata={"note": "hello"}, options=options)
    return tmp_path / "final"


def flip(directory: Path, offset: int) -> Path:
    """One bit of the first data file is flipped."""
    file = next((directory / "default" / "d").glob("*-0"))
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)
    return file


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


# ------------------------------------------------------------------------------------------- ls


def test_ls_lists_every_step_with_its_facts(run: Run, root: Path) -> None:
    done = run("ls", root)
    head, first, second = rows(done.out)
    assert (done.status, done.err) == (0, "")
    assert head == ["step", "time", "leaves", "size", "files", "metrics", "metadata"]
    assert first[0] == "1" and second[0] == "20"
    assert first[3] == "3" and first[4:6] == ["1.1", "MiB"] and first[6] == "4"
    assert second[7:] == ["loss=0.05", '{"seed":7}']


def test_ls_json_parses(run: Run, root: Path) -> None:
    listed = json.loads(run("ls", f"{root}/", "--json").out)
    assert [entry["step"] for entry in listed] == [1, 20]
    assert listed[1]["metrics"] == {"loss": 0.05}
    assert listed[1]["metadata"] == {"seed": 7}
    assert listed[1]["leaf_count"] == 3
    assert listed[1]["location"] == str(root / "20")


def test_ls_of_a_directory_without_checkpoints_says_so(run: Run, tmp_path: Path) -> None:
    assert run("ls", tmp_path) == Ran(0, f"no steps in {tmp_path}\n", "")
    assert run("ls", tmp_path, "--json") == Ran(0, "[]\n", "")


def test_ls_of_a_missing_directory_is_an_error(run: Run, tmp_path: Path) -> None:
    done = run("ls", tmp_path / "gone")
    assert done == Ran(1, "", f"asyncckpt: {tmp_path}/gone: there is no such directory\n")


def test_ls_of_one_checkpoint_points_to_show(run: Run, final: Path) -> None:
    done = run("ls", final)
    assert done.status == 1
    assert f"asyncckpt show {final}" in done.err


def test_ls_lists_the_others_when_one_cannot_be_read(
    run: Run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_commit, "INDEX_IN_RECORD_NBYTES", 0)
    with blocking.Checkpointer(root) as again:
        again.save(1, {"b": np.zeros(3)}, overwrite=True)
    index = next((root / "1" / "default" / "d").glob("*-index"))
    index.write_bytes(index.read_bytes()[:-1])
    done = run("ls", root)
    assert done.status == 1
    assert [row[0] for row in rows(done.out)] == ["step", "20"]
    assert done.err.startswith(f"asyncckpt: {root}/1") and done.err.count("\n") == 1


# ----------------------------------------------------------------------------------------- show


def test_show_prints_leaves_chunks_and_files(run: Run, final: Path) -> None:
    done = run("show", final)
    found = rows(done.out)
    assert done.status == 0
    assert ["checkpoint", str(final)] in found
    assert ["metadata", '{"note":"hello"}'] in found
    (w,) = [row for row in found if row[:1] == ["w"]]
    assert w[1:8] == ["float32", "200×300", "234.4", "KiB", "2", "100×300", "zstd,"]
    (tied,) = [row for row in found if row[:1] == ["tied"]]
    assert tied[7:10] == ["tied", "to", "w,"]
    assert ["a%2Fb", "float16", "()", "2", "B", "1", "()"] in found
    assert ["0", "{}"] in found and ["1", "None"] in found and ["2", "()"] in found
    assert ["2", "complex", "(1+2j)"] in found
    assert ["4", "str", '"text', '[red]"'] in found
    assert any(
        row[0].startswith("default/d/") and row[0].endswith("-index") for row in found if row
    )


def test_show_takes_a_step_and_a_root(run: Run, root: Path) -> None:
    for path, step in ((root / "1", "1"), (f"{root}/1/", "1"), (root, "20"), (f"{root}/", "20")):
        assert ["step", step] in rows(run("show", path).out)


def test_show_json_parses_with_every_kind_of_value(run: Run, final: Path) -> None:
    shown = json.loads(run("show", final, "--json").out)
    leaves = {leaf["path"]: leaf for leaf in shown["leaves"]}
    assert leaves["w"]["shape"] == [200, 300]
    assert leaves["w"]["chunk_count"] == 2
    assert leaves["tied"]["tied_to"] == "w"
    values = [leaves[f"scalars/{i}"]["value"] for i in range(6)]
    assert values == [3, "nan", [1.0, 2.0], True, "text [red]", "AAE="]
    assert {file["path"] for file in shown["files"]} >= {"default/manifest.ocdbt"}


def test_show_of_nothing_is_one_line_and_status_1(run: Run, tmp_path: Path) -> None:
    done = run("show", tmp_path / "gone")
    assert done.status == 1 and done.out == ""
    assert done.err.startswith(f"asyncckpt: {tmp_path}/gone") and done.err.count("\n") == 1


def test_a_tree_that_is_one_leaf_is_shown(run: Run, tmp_path: Path) -> None:
    blocking.save(tmp_path / "one", np.zeros(3))
    assert "(the tree itself)" in run("show", tmp_path / "one").out


def test_names_in_a_checkpoint_cannot_steer_the_terminal(run: Run, tmp_path: Path) -> None:
    tree = {"x\x1b[2J": np.zeros(1), "\x9b2J": {}}
    blocking.save(tmp_path / "odd", tree, metadata={"\x1b[31m": "\x9b"})
    out = run("show", tmp_path / "odd").out
    assert all(c.isprintable() or c == "\n" for c in out)


# --------------------------------------------------------------------------------------- verify


def test_verify_of_a_whole_checkpoint_is_status_0(run: Run, root: Path, final: Path) -> None:
    done = run("verify", final)
    assert done.status == 0 and done.err == ""
    assert done.out.startswith(f"{final}: 9 leaves, ") and done.out.endswith(" intact\n")
    assert run("verify", root / "20").out.startswith(f"{root}/20: 3 leaves, ")


def test_verify_of_a_root_checks_every_step(run: Run, root: Path) -> None:
    found = json.loads(run("verify", root, "--json").out)
    assert found["ok"] is True
    assert [entry["step"] for entry in found["checkpoints"]] == [1, 20]


def test_verify_names_the_damaged_leaves_and_exits_1(run: Run, root: Path) -> None:
    file = flip(root / "20", 2053)
    done = run("verify", root / "20")
    assert done.status == 1
    head, titles, row = done.out.splitlines()
    assert head == f"{root}/20: damaged in 1 place"
    assert titles.split() == ["damaged", "leaf", "file", "byte", "reason"]
    assert row.split()[:3] == ["params/w", str(file), "2048"]
    assert run("verify", root).status == 1
    document = json.loads(run("verify", root, "--json").out)
    assert document["ok"] is False
    assert [entry["ok"] for entry in document["checkpoints"]] == [True, False]
    assert document["checkpoints"][1]["damages"][0]["leaf"] == "params/w"


def test_verify_of_a_damaged_record_exits_1(run: Run, root: Path) -> None:
    record = root / "20" / "checkpoint.json"
    record.write_bytes(record.read_bytes().replace(b'"step":20', b'"step":21'))
    for path in (root / "20", root):
        done = run("verify", path)
        assert done.status == 1
        assert "(metadata)" in done.out and "CRC-32C" in done.out


# ------------------------------------------------------------------------------------------- rm


def test_a_question_without_standard_input_says_to_pass_yes(root: Path) -> None:
    command = f"exec {sys.executable} -m asyncckpt rm {root}/1 <&-"
    done = subprocess.run(command, shell=True, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr == (
        "asyncckpt: standard input is closed, so no question can be asked; pass --yes\n"
    )
    assert (root / "1").exists()


def test_rm_answered_with_no_removes_nothing(run: Run, root: Path) -> None:
    done = run("rm", root / "1", answer="n\n")
    assert done.status == 1
    assert "3 leaves" in done.out and "nothing was removed" in done.out
    assert run("rm", root / "1", answer="").status == 1  # the end of the input is no yes
    assert (root / "1" / "checkpoint.json").exists()


def test_rm_answered_with_yes_removes_the_steps(run: Run, root: Path) -> None:
    done = run("rm", root / "1", f"{root}/20/", answer="y\n")
    assert done.status == 0
    assert "these 2 checkpoints" in done.out
    assert list(root.iterdir()) == []


def test_rm_yes_does_not_ask(run: Run, root: Path) -> None:
    done = run("rm", "--yes", root / "1")
    assert done == Ran(0, f"removed {root}/1\n", "")
    assert [path.name for path in root.iterdir()] == ["20"]


def test_rm_works_in_a_shell_with_the_variables_of_a_launcher(
    run: Run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert run("rm", "--yes", root / "1").status == 0
    assert [path.name for path in root.iterdir()] == ["20"]


def test_rm_removes_a_damaged_step(run: Run, root: Path) -> None:
    record = root / "1" / "checkpoint.json"
    record.write_bytes(record.read_bytes()[:-1])
    done = run("rm", root / "1", answer="y\n")
    assert done.status == 0 and "(damaged)" in done.out
    assert not (root / "1").exists()


def test_rm_removes_a_step_of_a_newer_release(run: Run, root: Path) -> None:
    record = root / "1" / "checkpoint.json"
    text, _ = record.read_text().replace('"version":2', '"version":3', 1).rsplit(',"crc32c":', 1)
    record.write_bytes(seal(text + "}"))
    done = run("rm", root / "1", answer="y\n")
    assert done.status == 0 and "(of a newer release)" in done.out
    assert not (root / "1").exists()


def test_a_run_whose_newest_record_is_damaged_is_listed_and_shown(run: Run, root: Path) -> None:
    newest = max((path for path in root.iterdir() if path.name.isdecimal()), key=lambda p: p.name)
    record = newest / "checkpoint.json"
    record.write_bytes(record.read_bytes()[:-1])
    listed = run("ls", root)
    assert listed.status == 1 and f"{newest}: the commit record is damaged" in listed.err
    shown = run("show", root)
    assert shown.status == 0 and f"{newest}: the commit record is damaged" in shown.err
    converted = run("convert", root, root.parent / "copy")
    assert converted.status == 0
    source = converted.out.split()[1]
    assert source != str(newest) and f"checkpoint  {source}\n" in shown.out


def test_rm_of_the_step_of_another_library_says_so(run: Run, tmp_path: Path) -> None:
    orbax_writers.manager(tmp_path, {"w": np.ones(2)})
    done = run("rm", "--yes", tmp_path / "12")
    assert done.status == 1 and "12 is a step of Orbax" in done.err
    assert (tmp_path / "12").exists()


def test_rm_refuses_what_is_no_step(run: Run, root: Path, final: Path, tmp_path: Path) -> None:
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024" / "notes.txt").write_text("mine")
    refused = run("rm", "--yes", root / "1", final)
    assert refused.status == 2
    assert "not a step of a run" in refused.err
    missing = run("rm", "--yes", root / "1", tmp_path / "2024")
    assert missing.status == 1
    assert "there is no checkpoint to remove" in missing.err
    # Everything is looked at before anything is removed.
    assert (root / "1").exists() and (tmp_path / "2024" / "notes.txt").exists()


# ---------------------------------------------------------------------------------- the command


def test_usage_errors_are_status_2(run: Run, tmp_path: Path) -> None:
    for arguments in ((), ("ls",), ("frobnicate",), ("show", "--colour", "x")):
        done = run(*arguments)
        assert done.status == 2
    done = run("show", "frob://bucket/run")
    assert done.status == 2
    assert done.err == (
        "asyncckpt: frob://bucket: fsspec knows no filesystem for frob://; use s3://, gs://, "
        "memory:// or another of its schemes, or the path of a directory\n"
    )


def test_version_is_printed(run: Run) -> None:
    assert run("--version") == Ran(0, f"asyncckpt {__version__}\n", "")


def test_help_names_the_commands(run: Run) -> None:
    done = run("--help")
    assert done.status == 0
    assert all(name in done.out for name in ("ls", "show", "verify", "rm"))


def process(*arguments: Any, code: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-c", code] if code else ["-m", "asyncckpt"])]
    return subprocess.run(
        [*command, *map(str, arguments)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=60,
        check=False,
    )


def test_the_command_runs_as_a_process_and_its_pipe_is_plain(root: Path) -> None:
    shown = process("show", root)
    assert shown.returncode == 0 and shown.stderr == ""
    assert "\x1b" not in shown.stdout and "params/" in shown.stdout
    assert "default/manifest.ocdbt" in shown.stdout  # not cut at 80 columns
    flip(root / "20", 2053)
    checked = process("verify", root / "20")
    assert checked.returncode == 1 and checked.stderr == ""
    assert "params/w" in checked.stdout


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_an_output_that_cannot_hold_every_character_shows_the_others(
    root: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    blocking.save(root / "3", {"größe×…": 1})
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    for words in (("show", root / "3", "--timeline"), ("verify", root / "3"), ("ls", root)):
        done = process(*words)
        assert done.returncode == 0 and done.stderr == "", words
        assert done.stdout


def test_a_closed_standard_output_is_no_traceback(root: Path) -> None:
    command = ("/bin/sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "asyncckpt")
    done = subprocess.run(
        (*command, "verify", root), cwd=REPOSITORY, stderr=subprocess.PIPE, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_closed_standard_error_sends_no_error_to_standard_output(root: Path) -> None:
    (root / "20" / "checkpoint.json").write_text("{}")

    def output(*words: object, code: int) -> str:
        command = ("/bin/sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-m", "asyncckpt")
        done = subprocess.run(
            (*command, *words),
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=60,
        )
        assert done.returncode == code
        return done.stdout

    assert [step["step"] for step in json.loads(output("ls", root, "--json", code=1))] == [1]
    assert output("show", root / "3", code=1) == ""
    assert output("ls", "--no-such-option", code=2) == ""
    assert "Aborted" not in output("rm", root / "1", code=1)


@pytest.mark.parametrize("missing", ["rich", "typer"])
def test_without_the_extra_the_install_line_is_printed(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "import asyncckpt.cli\n"
        "sys.exit(asyncckpt.cli.main(['ls', '.']))"
    )
    done = process(code=code)
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr == f"asyncckpt: the command line needs the package {missing}: {INSTALL_LINE}\n"
    )


def test_importing_the_command_line_needs_no_extra() -> None:
    code = "import sys, asyncckpt.cli; print([m for m in ('rich', 'typer') if m in sys.modules])"
    assert process(code=code).stdout == "[]\n"
