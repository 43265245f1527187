"""Tracked Python files of a checkout."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGE = "asyncckpt"

Sources = Mapping[str, str]
"""Text of each file by its path from the root of the checkout, with forward slashes."""


def tracked(root: Path, *folders: str) -> Sources:
    """Read the Python files below the folders that git tracks and the working tree has."""
    patterns = [f"{folder}/*.py" for folder in folders]
    command = ["git", "-C", str(root), "ls-files", "-z", "--", *patterns]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    paths = sorted(path for path in listed.split("\0") if path and (root / path).is_file())
    return {path: (root / path).read_text(encoding="utf-8") for path in paths}
