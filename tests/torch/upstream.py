"""PyTorch's own tests of `torch.distributed.checkpoint`, with our classes in place of its own.

    python -m tests.torch.upstream [--source DIR] [--ungated] [FILE ...]

The tests are no part of the wheel. They are fetched from the commit of the installed version, or
taken from `--source`, a directory like `test/distributed/checkpoint` of PyTorch; nothing of them is
committed. Each file runs in a process of its own, in which `FileSystemWriter` and
`FileSystemReader` are ours, in spawned children too. Counts per file are printed; the exit status
is 1 if a test fails that is not in `EXPECTED`. `--ungated` also runs tests that are skipped without
several GPUs: some use the default device, which is then the CPU; those of FSDP fail. The tests need
the package `expecttest`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
URL = (
    "https://raw.githubusercontent.com/pytorch/pytorch/{commit}/test/distributed/checkpoint/{file}"
)

FILES = (
    "e2e/test_e2e_save_and_load.py",
    "e2e/test_fine_tuning.py",
    "e2e/test_fsdp_ep.py",
    "test_async_process_executor.py",
    "test_checkpoint.py",
    "test_dedup_tensors.py",
    "test_dtensor_checkpoint.py",
    "test_dtensor_resharding.py",
    "test_file_system_checkpoint.py",
    "test_file_system_checkpoint_cpu.py",
    "test_fsdp_model_state.py",
    "test_fsdp_optim_state.py",
    "test_fsdp_tp_checkpoint_conversion.py",
    "test_hsdp_checkpoint.py",
    "test_nested_dict.py",
    "test_planner.py",
    "test_save_load_api.py",
    "test_tp_checkpoint.py",
    "test_traverse.py",
    "test_utils.py",
)
"""Test files that use its file system classes, or the code that calls our classes."""

EXPECTED = {
    "Rot13": "stream transforms change bytes on their way to a file of DCP's own format",
    "ZStandard": "the same",
    "safetensors": "a file format of DCP's own writer",
    "metadata_fn": "a file of DCP's own format",
    "test_overwrite": "it asks for the words of DCP's own error; ours names place and remedy",
}
"""Part of the name of a test or its class -> why it cannot pass."""

HOOK = """
import importlib.abc, importlib.machinery, sys

def ours(module):
    import tests.torch.upstream_classes as ours
    module.FileSystemWriter = ours.FileSystemWriter
    module.FileSystemReader = ours.FileSystemReader

def ungated(module):
    module.skip_if_lt_x_gpu = lambda count, **_: lambda test: test

CHANGES = {"torch.distributed.checkpoint.filesystem": ours}
if UNGATED:
    CHANGES["torch.testing._internal.common_distributed"] = ungated

class Replace(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        change = CHANGES.pop(name, None)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            change(module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Replace())
"""
"""A `sitecustomize` that changes modules when they are imported; `UNGATED` is set before it."""

LIMIT_S = 3600.0
"""For one file: each test starts up to four processes, which import PyTorch."""


def fetch(file: str, into: Path) -> Path:
    """Return a test file of the installed version."""
    import torch

    address = URL.format(commit=torch.version.git_version, file=file)
    path = into / file
    path.parent.mkdir(parents=True, exist_ok=True)
    with urllib.request.urlopen(address, timeout=30) as answer:
        path.write_bytes(answer.read())
    return path


def outcomes(path: Path, home: Path, *, ungated: bool = False) -> dict[str, str]:
    """Run a file; return the result of each test: passed, skipped, failed or the reason."""
    report = home / "report.xml"
    (home / "sitecustomize.py").write_text(f"UNGATED = {ungated}\n{HOOK}")
    inherited = os.environ.get("PYTHONPATH", "")
    search = os.pathsep.join([str(home), str(REPOSITORY), inherited])
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    command += ["-W", "default", "-c", os.devnull, f"--rootdir={path.parent}"]
    subprocess.run(
        [*command, f"--junitxml={report}", str(path)],
        cwd=path.parent,
        env={**os.environ, "PYTHONPATH": search},
        timeout=LIMIT_S,
        stdout=None if os.isatty(1) else subprocess.DEVNULL,
        check=False,
    )
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        kinds = {child.tag for child in case}
        outcome = "skipped" if "skipped" in kinds else "passed"
        if kinds & {"failure", "error"}:
            reasons = [reason for part, reason in EXPECTED.items() if part in name]
            outcome = reasons[0] if reasons else "FAILED"
        found[name] = outcome
    return found


def main() -> int:
    """Run the files and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.torch.upstream", description=__doc__)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--ungated", action="store_true")
    parser.add_argument("files", nargs="*", default=FILES)
    given = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        for file in given.files:
            path = given.source.resolve() / file if given.source else fetch(file, home)
            found = outcomes(path, home, ungated=given.ungated)
            counts = ", ".join(f"{n} {what}" for what, n in sorted(Counter(found.values()).items()))
            print(f"{file}: {counts or 'no tests'}", flush=True)
            for name, outcome in found.items():
                if outcome == "FAILED":
                    failed += 1
                    print(f"  {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
