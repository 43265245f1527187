"""The simulator in a process of its own, and from the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from urllib.error import HTTPError, URLError

import pytest

from asyncckpt.testing.objectstore import S3, SimulatorProcess, simulator_process
from asyncckpt.testing.objectstore.__main__ import parser
from asyncckpt.testing.objectstore.process import arguments
from asyncckpt.testing.objectstore.profiles import with_overrides
from tests.testing.objectstore.asking import ask

COMMAND = [sys.executable, "-m", "asyncckpt.testing.objectstore"]


@pytest.fixture(scope="module")
def sim() -> Iterator[SimulatorProcess]:
    with simulator_process(bucket=["one", "two"], part_min_nbytes=0) as running:
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
    assert sim.uploads() == ["two/b"]
    sim.reset()
    assert (sim.stats()["requests"], sim.objects("one")) == (0, {"a": 4})
    sim.clear()
    assert (sim.objects("one"), sim.uploads()) == ({}, [])
    sim.create_bucket("three")
    assert sim.objects("three") == {}


def test_faults_are_set_from_outside(sim: SimulatorProcess) -> None:
    sim.set_faults([{"kind": ["put_object"], "status": 503, "number": 2}])
    statuses = [ask(sim.s3_endpoint, "PUT", "/one/a", b"x").status for _ in range(3)]
    assert statuses == [200, 503, 200]
    sim.set_faults([])
    with pytest.raises(HTTPError, match="400"):
        sim.set_faults([{"hook": "os.abort"}])


def test_it_ends_with_its_block() -> None:
    with simulator_process(replace(S3, seed=4), region="eu-west-1") as sim:
        assert sim.region == "eu-west-1"
        assert sim.stats()["requests"] == 0
    with pytest.raises(URLError):
        sim.stats()
    with pytest.raises(ProcessLookupError):
        os.kill(sim.pid, 0)


def test_it_ends_with_a_failure_where_it_cannot_begin() -> None:
    with pytest.raises(RuntimeError, match="ended at once with 2"), simulator_process("azure"):
        raise AssertionError("it must not begin")


def test_arguments_make_the_same_profile() -> None:
    profile = replace(S3, name="mine", seed=9, get_bandwidth=None)
    options = parser().parse_args(arguments(profile, {"keep_log": False, "bucket": ["a", "b"]}))
    overrides = dict(text.partition("=")[::2] for text in options.set)
    assert with_overrides(S3, overrides) == profile
    assert (options.keep_log, options.bucket, options.verify_checksums) == (False, ["a", "b"], True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_interrupted(number: signal.Signals) -> None:
    with subprocess.Popen([*COMMAND, "--set", "put_latency_s=0.01"], stdout=-1) as process:
        assert process.stdout is not None
        endpoints = json.loads(process.stdout.readline())
        assert ask(endpoints["s3"], "PUT", "/bucket/a", b"x").status == 200
        process.send_signal(number)
        assert process.wait(30) == 0
