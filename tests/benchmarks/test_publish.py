"""Figures in README and docs are those of the results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import publish
from benchmarks.results import NO_SAVES, OURS, TRAINING

REPOSITORY = publish.REPOSITORY


def test_pages_say_what_the_results_say() -> None:
    assert publish.main(["--check"]) == 0


def test_readme_has_a_few_rows_each_with_a_ratio_and_its_command() -> None:
    rows = publish.readme(publish.RESULTS).splitlines()[2:]
    assert 1 <= len(rows) <= 8
    for row in rows:
        assert re.search(r"\| \d+\.\d+ (×|of) ", row)
        assert re.search(r"`make bench[a-z-]*` \|$", row)
    targets = (REPOSITORY / "Makefile").read_text()
    assert all(f"\n{command.split()[1]}:" in targets for command in publish.COMMANDS.values())


def test_picture_of_trainings_is_small() -> None:
    assert 10_000 < (REPOSITORY / publish.PICTURE).stat().st_size < 150_000


def test_rows_are_made_of_verdicts_and_trainings(tmp_path: Path) -> None:
    row = publish.ROWS[1]
    verdict = {
        "workload": row.workload,
        "metric": row.metric,
        "target": "≥ 1.5 × safetensors",
        "measured": "1.62 × safetensors",
        "status": "PASS",
    }
    trained = [
        {
            "scenario": TRAINING,
            "column": "JAX loop",
            "subject": subject,
            "samples": [{"wall_s": wall_s} for wall_s in walls],
        }
        for subject, walls in (
            (NO_SAVES, (1.0, 2.0, 4.0)),
            (OURS, (1.05, 3.0, 4.0)),  # the ratio of medians would be 1.50
            ("Orbax async", (1.5, 3.0)),  # fewer rounds
        )
    ]
    data = {"verdicts": [verdict], "measurements": trained}
    (tmp_path / "short.json").write_text(json.dumps(data))
    assert publish.readme(tmp_path).splitlines()[2:] == [
        f"| {row.text} | 1.62 × safetensors | ≥ 1.5: met | `make bench` |",
        "| duration of a training with two saves, to one without saves (lower is better) "
        "| 1.05 × with ours, 1.50 × with Orbax async | | `make bench` |",
    ]
    assert publish.readme(tmp_path / "nothing") == ""


def test_sections_keep_tables_and_leave_pictures_out(tmp_path: Path) -> None:
    text = "# Benchmarks, short form\n\n- cores: 2\n\n## Targets\n\n| a |\n\n![x](short.png)\n"
    (tmp_path / "short.md").write_text(text)
    assert publish.sections(tmp_path) == (
        "## Local disk, short form\n\n- cores: 2\n\n### Targets\n\n| a |\n"
    )


def test_pages_on_one_comparison_have_its_table(tmp_path: Path) -> None:
    (tmp_path / "dcp.md").write_text(
        "# Title\n\n- cores: 2\n\n## Two ranks\n\n| a |\n|---|\n| 1 |\n"
    )
    assert publish.table(tmp_path / "dcp.md") == "| a |\n|---|\n| 1 |\n"
    assert publish.table(tmp_path / "nothing.md") == ""


def test_page_without_marks_is_an_error() -> None:
    marked = "a\n<!-- x -->\nold\n<!-- end of x -->\nb\n"
    new = publish.filled(marked, "x", "new\n")
    assert new == "a\n<!-- x -->\n\nnew\n\n<!-- end of x -->\nb\n"
    assert publish.filled(new, "x", "new\n") == new
    with pytest.raises(ValueError, match="no <!-- y -->"):
        publish.filled(marked, "y", "new\n")
