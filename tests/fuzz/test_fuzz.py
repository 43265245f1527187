"""RELIABILITY row 9: decoders return, or say that their input is damaged or not supported."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from asyncckpt import blocking
from asyncckpt.errors import CorruptCheckpointError, UsageError
from asyncckpt.format.ocdbt.manifest import decode_manifest
from asyncckpt.format.record import decode_record
from tests.fuzz.engine import Target, fuzz
from tests.fuzz.surround import recorded
from tests.fuzz.targets import targets

REPOSITORY = Path(__file__).parents[2]
TARGETS = sorted(targets())
LINE = re.compile(r"(\S+) +(\d+) inputs +(\d+) accepted +(\d+) corrupt +(\d+) unsupported")


def run(tmp_path: Path, inputs: int, *names: str) -> dict[str, tuple[int, ...]]:
    """Inputs, accepted, corrupt and unsupported ones by target, of a process of its own."""
    arguments = ["--inputs", str(inputs), "--failures", str(tmp_path / "failures"), *names]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    print(f"\n{done.stdout}")
    assert done.returncode == 0, done.stderr
    found = [LINE.match(line) for line in done.stdout.splitlines()]
    return {match[1]: tuple(map(int, match.groups()[1:])) for match in found if match}


def test_mutated_and_hostile_inputs_are_decoded_or_refused(tmp_path: Path) -> None:
    counts = run(tmp_path, 400)
    assert sorted(counts) == TARGETS
    for name, (inputs, accepted, corrupt, _) in counts.items():
        assert inputs >= 400, name
        # Mutations that are all refused at the door would test the door only.
        assert accepted >= 5 and corrupt >= 100, name


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_a_million_inputs_are_decoded_or_refused(name: str, tmp_path: Path) -> None:
    (counts,) = run(tmp_path, 1_000_000, name).values()
    assert counts[0] == 1_000_000


# ---------------------------------------------------------------- what the fuzzer must notice


def test_an_error_that_is_not_ours_is_noticed() -> None:
    def decode(data: bytes) -> object:
        return {b"seed": 1}[data]

    outcome = fuzz(Target("broken", (b"seed",), decode), 500)
    assert outcome.accepted and not outcome.corrupt
    assert outcome.failures and "KeyError" in outcome.failures[0][1]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("sum(0 for _ in iter(int, 1))", "TooLongError"),
        ("held = [bytes(1 << 20) for _ in range(100)]", "MemoryError"),
    ],
    ids=["time", "memory"],
)
def test_too_much_time_or_memory_is_noticed(body: str, error: str) -> None:
    code = (
        "from tests.fuzz.engine import Target, fuzz\n"
        "def decode(data):\n"
        f"    if data != b'seed': {body}\n"
        "outcome = fuzz(Target('hungry', (b'seed',), decode, hostile=lambda: [b'bad']), 2)\n"
        "((data, text),) = outcome.failures\n"
        "print(data, text)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("b'bad' Traceback") and error in done.stdout


def test_a_target_that_refuses_its_seed_is_noticed() -> None:
    target = Target("closed", (b"seed",), lambda data: decode_manifest(data, file="m"))
    with pytest.raises(CorruptCheckpointError):
        fuzz(target, 10)


def test_the_same_seed_gives_the_same_inputs() -> None:
    def inputs(seed: int) -> list[bytes]:
        seen: list[bytes] = []
        fuzz(Target("recorder", (b"a seed", b"another"), seen.append), 300, seed=seed)
        return seen

    assert inputs(0) == inputs(0) != inputs(1)


# ------------------------------------------------------------------------------- what was found


def test_a_metric_beyond_all_floats_is_refused() -> None:
    seed = targets()["record"].seeds[0]
    assert seed.count(b'"loss":0.25') == 1
    data = recorded(seed.replace(b'"loss":0.25', b'"loss":1' + b"0" * 400))
    with pytest.raises(CorruptCheckpointError, match=r"metrics\['loss'\] is 10+, not a number"):
        decode_record(data, location="run/12")


def test_a_metric_beyond_all_floats_is_not_saved(tmp_path: Path) -> None:
    with (
        blocking.Checkpointer(tmp_path) as ckpt,
        pytest.raises(UsageError, match=r"metrics\['loss'\]=10+: .*too large.*; pass numbers"),
    ):
        ckpt.save(1, {}, metrics={"loss": 10**400})
