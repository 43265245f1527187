"""Fixtures for the tests of sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.session.together.job import Job


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Job:
    return Job(tmp_path, getattr(request, "param", 2))
