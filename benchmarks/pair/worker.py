"""Child process of the paired timings: times one case of one checkout per line of input.

Run as a script with the root of the checkout and the MiB of the large state. Reads JSON lines
`{"case", "place", "options"}` and answers with `{"seconds"}`.
"""

# Rule: only public names of asyncckpt that both checkouts have, so that one worker measures both.

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 3
"""Saves of one `Checkpointer` in the cases that time the last of them."""


class Cases:
    """The timed cases of one checkout; every method returns seconds.

    Args:
        size_mib: MiB of the large state.
    """

    def __init__(self, size_mib: int) -> None:
        self._ckpt: Any = importlib.import_module("asyncckpt")
        self._blocking: Any = importlib.import_module("asyncckpt.blocking")
        states: Any = importlib.import_module("benchmarks.workloads")
        self._large = states.llama(size_mib << 20).tree
        self._small = states.small(10_000).tree
        self._like = states.targets_like
        files: Any = importlib.import_module("benchmarks.files")
        self._chill, self._warm = files.chill, files.warm
        self._targets: dict[int, Any] = {}

    def save(self, place: str, options: dict[str, Any]) -> float:
        """Save the large state durably, as a step of a run with a warm pool."""
        return self._steps(place, options, self._large)

    def save_keep_last(self, place: str, options: dict[str, Any]) -> float:
        """Do the same with `KeepLast(1)`."""
        return self._steps(place, options, self._large, keep=self._ckpt.KeepLast(1))

    def save_and_wait(self, place: str, options: dict[str, Any]) -> float:
        """Do the same with `KeepLast(1)`, until `wait()` and `close()` have returned."""
        return self._steps(place, options, self._large, keep=self._ckpt.KeepLast(1), waited=True)

    def stall(self, place: str, options: dict[str, Any]) -> float:
        """Time `start_save` of the large state with a warm pool."""
        return self._stall(place, options, self._large)

    def _stall(self, place: str, options: dict[str, Any], tree: Any) -> float:
        with self._run(place, options) as run:
            run.save(0, tree)
            begun = time.perf_counter()
            pending = run.start_save(1, tree)
            seconds = time.perf_counter() - begun
            pending.result()
            return seconds

    def save_small(self, place: str, options: dict[str, Any]) -> float:
        """Save 10,000 small leaves, with the plan cached."""
        return self._steps(place, options, self._small)

    def save_small_once(self, place: str, options: dict[str, Any]) -> float:
        """Save 10,000 small leaves with the one-shot function."""
        return _timed(lambda: self._blocking.save(f"{place}/one", self._small, **options))

    def restore(self, place: str, options: dict[str, Any]) -> float:
        """Restore the large state into memory of its own, from warm files."""
        return self._own(place, options, self._large)

    def restore_into(self, place: str, options: dict[str, Any]) -> float:
        """Restore the large state in place, from warm files."""
        return self._into(place, options, self._large)

    def restore_cold(self, place: str, options: dict[str, Any]) -> float:
        """Restore the large state once more into memory of its own, from the device."""
        return self._cold(place, options, lambda run: run.restore(0))

    def restore_into_cold(self, place: str, options: dict[str, Any]) -> float:
        """Restore the large state once more in place, from the device."""
        target = self._target(self._large)
        return self._cold(place, options, lambda run: run.restore_into(target, step=0))

    def _cold(self, place: str, options: dict[str, Any], restore: Callable[[Any], object]) -> float:
        with self._run(place, options) as run:
            run.save(0, self._large)
            restore(run)
            self._chill(Path(place))
            return _timed(lambda: restore(run))

    def restore_small(self, place: str, options: dict[str, Any]) -> float:
        """Restore 10,000 small leaves in place."""
        return self._into(place, options, self._small)

    def restore_small_own(self, place: str, options: dict[str, Any]) -> float:
        """Restore 10,000 small leaves into memory of their own."""
        return self._own(place, options, self._small)

    def stall_small(self, place: str, options: dict[str, Any]) -> float:
        """Time `start_save` of 10,000 small leaves, with the plan cached."""
        return self._stall(place, options, self._small)

    def _into(self, place: str, options: dict[str, Any], tree: Any) -> float:
        target = self._target(tree)
        more = {"strict": False, **options}  # Python scalars of the target may differ
        self._blocking.save(f"{place}/one", tree, **options)
        return self._again(
            place, lambda: self._blocking.restore_into(f"{place}/one", target, **more)
        )

    def _own(self, place: str, options: dict[str, Any], tree: Any) -> float:
        self._blocking.save(f"{place}/one", tree, **options)
        return self._again(place, lambda: self._blocking.restore(f"{place}/one", **options))

    def _again(self, place: str, restore: Callable[[], object]) -> float:
        """Time a restore, from local disk the second one, of files that are in the page cache."""
        if Path(place).is_dir():  # direct writes have left nothing there
            self._warm(Path(place))
            restore()
        return _timed(restore)

    def _target(self, tree: Any) -> Any:
        target = self._targets.get(id(tree))
        if target is None:
            target = self._targets[id(tree)] = self._like(tree)
        return target

    def _run(self, place: str, options: dict[str, Any], keep: Any = None) -> Any:
        return self._blocking.Checkpointer(place, keep=keep, **options)

    def _steps(
        self,
        place: str,
        options: dict[str, Any],
        tree: Any,
        *,
        keep: Any = None,
        waited: bool = False,
    ) -> float:
        run = self._run(place, options, keep)
        try:
            for step in range(STEPS - 1):
                run.save(step, tree)
            if waited:
                run.wait()  # so that one removal counts, that of the step saved last
            begun = time.perf_counter()
            run.save(STEPS - 1, tree)
            if waited:
                run.wait()
                run.close()
            return time.perf_counter() - begun
        finally:
            run.close()


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> None:
    """Answer lines of input until they end."""
    root, size_mib = sys.argv[1:]
    sys.path[0] = root
    cases = Cases(int(size_mib))
    for line in sys.stdin:
        asked = json.loads(line)
        options = asked["options"]
        seconds = getattr(cases, asked["case"])(asked["place"], options)
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
