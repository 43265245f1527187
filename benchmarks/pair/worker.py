"""Child process of the paired timings: times one case of one checkout per line of input.

Run as a script with the root of the checkout and the MiB of the large state. Reads JSON lines
`{"case", "place", "options"}` and answers with `{"seconds"}`.
"""

# Rule: only public names of asyncckpt that both checkouts have, so that one worker measures both.

from __future__ import annotations

import functools
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
        size_mib: MiB of the large state and of the experts.
    """

    def __init__(self, size_mib: int) -> None:
        self._ckpt: Any = importlib.import_module("asyncckpt")
        self._blocking: Any = importlib.import_module("asyncckpt.blocking")
        states: Any = importlib.import_module("benchmarks.workloads")
        makers: dict[str, Callable[[], Any]] = {
            "large": lambda: states.llama(size_mib << 20).tree,
            "small": lambda: states.small(10_000).tree,
            "experts": lambda: states.experts(size_mib << 20).tree,
        }
        # One at a time: there are two workers, and all states would fill the memory.
        self._state = functools.lru_cache(maxsize=1)(lambda state: makers[state]())
        self._like = functools.lru_cache(maxsize=1)(lambda it: states.targets_like(self._state(it)))
        files: Any = importlib.import_module("benchmarks.files")
        self._chill, self._warm = files.chill, files.warm

    def run(self, case: str, place: str, options: dict[str, Any]) -> float:
        """Time a case of `CASES`."""
        work, state, more = CASES[case]
        return work(self, state, place, options, **more)

    def save(
        self,
        state: str,
        place: str,
        options: dict[str, Any],
        *,
        keep_last: bool = False,
        waited: bool = False,
    ) -> float:
        """Save durably, as a step of a run with a warm pool and a cached plan.

        If `waited`, until `wait()` and `close()` have returned.
        """
        keep = self._ckpt.KeepLast(1) if keep_last else None
        run = self._blocking.Checkpointer(place, keep=keep, **options)
        try:
            for step in range(STEPS - 1):
                run.save(step, self._state(state))
            if waited:
                run.wait()  # so that one removal counts, that of the step saved last
            begun = time.perf_counter()
            run.save(STEPS - 1, self._state(state))
            if waited:
                run.wait()
                run.close()
            return time.perf_counter() - begun
        finally:
            run.close()

    def save_once(self, state: str, place: str, options: dict[str, Any]) -> float:
        """Save with the one-shot function."""
        tree = self._state(state)
        return _timed(lambda: self._blocking.save(f"{place}/one", tree, **options))

    def stall(self, state: str, place: str, options: dict[str, Any]) -> float:
        """Time `start_save` with a warm pool and a cached plan."""
        with self._blocking.Checkpointer(place, **options) as run:
            # Not `save`, which takes less memory than the next call, because it writes meanwhile.
            run.start_save(0, self._state(state)).result()
            begun = time.perf_counter()
            pending = run.start_save(1, self._state(state))
            seconds = time.perf_counter() - begun
            pending.result()
            return seconds

    def restore(self, state: str, place: str, options: dict[str, Any], *, into: bool) -> float:
        """Restore in place, or into memory of its own.

        On local disk, the second restore is timed, from files in the page cache.
        """
        one, target = f"{place}/one", self._like(state) if into else None
        more = {"strict": False, **options}  # Python scalars of the target may differ
        self._blocking.save(one, self._state(state), **options)

        def restore() -> None:
            if into:
                self._blocking.restore_into(one, target, **more)
            else:
                self._blocking.restore(one, **options)

        if Path(place).is_dir():  # direct writes have left nothing there
            self._warm(Path(place))
            restore()
        return _timed(restore)

    def restore_cold(self, state: str, place: str, options: dict[str, Any], *, into: bool) -> float:
        """Restore a second time, from the device."""
        target = self._like(state) if into else None
        with self._blocking.Checkpointer(place, **options) as run:

            def restore() -> None:
                if into:
                    run.restore_into(target, step=0)
                else:
                    run.restore(0)

            run.save(0, self._state(state))
            restore()
            self._chill(Path(place))
            return _timed(restore)


CASES: dict[str, tuple[Callable[..., float], str, dict[str, bool]]] = {
    "save": (Cases.save, "large", {}),
    "save_keep_last": (Cases.save, "large", {"keep_last": True}),
    "save_and_wait": (Cases.save, "large", {"keep_last": True, "waited": True}),
    "stall": (Cases.stall, "large", {}),
    "restore": (Cases.restore, "large", {"into": False}),
    "restore_into": (Cases.restore, "large", {"into": True}),
    "restore_cold": (Cases.restore_cold, "large", {"into": False}),
    "restore_into_cold": (Cases.restore_cold, "large", {"into": True}),
    "save_small": (Cases.save, "small", {}),
    "save_small_once": (Cases.save_once, "small", {}),
    "restore_small": (Cases.restore, "small", {"into": True}),
    "restore_small_own": (Cases.restore, "small", {"into": False}),
    "stall_small": (Cases.stall, "small", {}),
    "save_experts": (Cases.save, "experts", {}),
    "stall_experts": (Cases.stall, "experts", {}),
    "restore_experts": (Cases.restore, "experts", {"into": True}),
}
"""By name: what is timed, of which state, and how."""


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
        seconds = cases.run(**asked)
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
