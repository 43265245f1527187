"""Running commands in the process of the tests."""

from __future__ import annotations

import io
import sys

import pytest

from asyncckpt.cli import main
from tests.cli.ran import Ran, Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(*arguments: object, answer: str = "") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        status = main([str(argument) for argument in arguments])
        return Ran(status, *capsys.readouterr())

    return run
