"""Test modules as pytest rewrites them, compiled once: `python -m tests.rewritten`.

Each process of pytest-xdist imports all test modules, at the same time and in the same order, so
that in a fresh clone each would rewrite the assertions of all of them.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

TESTS = Path(__file__).parent


def rewrite(path: Path) -> None:
    """Write what pytest looks for beside a test module, unless it is there and up to date."""
    # No public function does this; without these names, pytest itself does it, in each process.
    try:
        from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc, _rewrite_test, _write_pyc
    except ImportError:
        return
    cached = path.parent / "__pycache__" / (path.name.removesuffix(".py") + PYC_TAIL)
    if _read_pyc(path, cached) is None:
        cached.parent.mkdir(exist_ok=True)
        source_hash, code = _rewrite_test(path, None)  # type: ignore[arg-type]
        _write_pyc(None, code, source_hash, cached)  # type: ignore[arg-type]


def main() -> None:
    """Rewrite all test modules, in as many processes as there are cores."""
    paths = [*TESTS.rglob("test_*.py"), *TESTS.rglob("conftest.py")]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(rewrite, paths, chunksize=8))


if __name__ == "__main__":
    main()
