"""The simulator in a process of its own, and from the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest

from tests.simulator import S3, SimulatorProcess, simulator_process
from tests.simulator.__main__ import options_of
from tests.simulator_tests.asking import ask

COMMAND = [sys.executable, "-m", "tests.simulator"]


@pytest.fixture(scope="module")
def sim() -> Iterator[SimulatorProcess]:
    with simulator_process(buckets=["one", "two"], part_min_nbytes=0) as running:
        yield running


def test_it_serves_and_tells_what_it_did(sim: SimulatorProcess) -> None:
    assert ask(sim.s3_endpoint, "PUT", "/one/a", b"body").status == 200
    assert ask(sim.gcs_endpoint, "GET", "/storage/v1/b/one/o/a?alt=media").body == b"body"
    assert ask(sim.s3_endpoint, "POST", "/two/b?uploads").status == 200
    stats = sim.stats()
    assert stats["by_kind"] == {"put_object": 1, "get_object": 1, "create_upload": 1}
    assert stats["received_nbytes"] == 4
    assert 0.0 < stats["cpu_s"] < 60.0
    first = sim.requests()[0]
    assert (first["kind"], first["key"], first["status"]) == ("put_object", "a", 200)
    assert sim.objects("one") == {"a": 4}
    assert stats["uploads"] == 1
    sim.reset()
    assert (sim.stats()["requests"], sim.objects("one")) == (0, {"a": 4})
    sim.clear()
    assert (sim.objects("one"), sim.stats()["uploads"]) == ({}, 0)
    with pytest.raises(ValueError, match="NoSuchBucket"):
        sim.objects("three")


def test_it_ends_with_its_block() -> None:
    with simulator_process(replace(S3, seed=4), region="eu-west-1") as sim:
        assert sim.region == "eu-west-1"
        assert sim.stats()["requests"] == 0
    with pytest.raises(ValueError, match="closed"):
        sim.stats()
    with pytest.raises(ProcessLookupError):
        os.kill(sim.pid, 0)


def test_it_ends_with_a_failure_where_it_cannot_begin() -> None:
    with pytest.raises(RuntimeError, match="ended at once with 2"), simulator_process("azure"):
        raise AssertionError("it must not begin")


def test_arguments_make_the_same_simulator() -> None:
    profile = replace(S3, name="mine", seed=9, get_bandwidth=None)
    given = options_of(json.dumps({"profile": asdict(profile), "buckets": ["a", "b"]}))
    assert (given["profile"], given["buckets"]) == (profile, ["a", "b"])
    assert options_of('{"profile": "s3"}')["profile"] == "s3"
    with pytest.raises(TypeError, match="latency"):
        options_of('{"profile": {"latency": 1}}')


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_interrupted(number: signal.Signals) -> None:
    with subprocess.Popen([*COMMAND, '{"profile": {"put_latency_s": 0.01}}'], stdout=-1) as process:
        assert process.stdout is not None
        endpoints = json.loads(process.stdout.readline())
        assert ask(endpoints[0], "PUT", "/bucket/a", b"x").status == 200
        process.send_signal(number)
        assert process.wait(30) == 0
