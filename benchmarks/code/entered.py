"""Child process of `hops`: prints the functions of the package that one call enters.

Run as a script with the root of the checkout, the case, and a path or URL below which to write.
"""

# Rule 1: the profile function is installed before anything of the package is imported, so that
#   every thread that runs package code has it; `recording` alone says what counts.
# Rule 2: a rehearsal of all cases, with a leaf of another shape, does every lazy import before.

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from types import CodeType, FrameType
from typing import Any

LEAF_SHAPE = (512, 1024)
REHEARSED_SHAPE = (1024, 512)
"""Of float32, both are 2 MiB; caches keyed by shape still miss."""

SETTLE_S = 0.2
"""Callbacks of the call may run just after it returns; without a pause the count varies by one."""


class Recorder:
    """Profile function that remembers the package's code objects that are entered."""

    def __init__(self, root: str) -> None:
        self.recording = False
        self.functions: set[tuple[str, int, str]] = set()
        self._root = root
        self._folder = os.path.join(root, "asyncckpt", "")
        self._generated: dict[int, CodeType] = {}  # keeps them alive: an id names one of them

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not self.recording:
            return
        code = frame.f_code
        if code.co_filename.startswith(self._folder):
            self._add(code.co_filename, code.co_firstlineno, code.co_qualname)
        elif code.co_filename == "<string>":
            module = frame.f_globals.get("__name__", "")
            if module.partition(".")[0] == "asyncckpt" and id(code) not in self._generated:
                self._generated[id(code)] = code
                owner = type(frame.f_locals.get("self")).__qualname__
                # Methods that dataclasses generates all have the same line and qualified name.
                name = f"{owner}.{code.co_name} (generated {len(self._generated)})"
                self._add(frame.f_globals["__file__"], 0, name)

    def forget(self) -> None:
        """Forget everything recorded so far."""
        self.functions.clear()
        self._generated.clear()

    def _add(self, path: str, line: int, name: str) -> None:
        self.functions.add((os.path.relpath(path, self._root), line, name))


async def run(case: str, place: str, shape: tuple[int, ...], recorder: Recorder) -> None:
    """Do what the case needs, then make its call and record that."""
    asyncckpt: Any = importlib.import_module("asyncckpt")
    numpy: Any = importlib.import_module("numpy")
    tree = {"w": numpy.arange(numpy.prod(shape), dtype=numpy.float32).reshape(shape)}

    async def recorded(call: Callable[[], Awaitable[object]]) -> None:
        gc.collect()
        gc.disable()  # finalizers of older objects would run at any time
        recorder.recording = True
        await call()
        await asyncio.sleep(SETTLE_S)
        recorder.recording = False
        gc.enable()

    if case == "save":
        await recorded(lambda: asyncckpt.save(f"{place}/saved", tree))
    elif case == "restore":
        await asyncckpt.save(f"{place}/restored", tree)
        await recorded(lambda: asyncckpt.restore(f"{place}/restored"))
    else:
        async with asyncckpt.Checkpointer(f"{place}/run") as checkpointer:
            await checkpointer.save(1, tree)
            await recorded(lambda: checkpointer.save(2, tree))


def main(root: str, case: str, place: str) -> None:
    """Print the functions entered as JSON: path, first line and qualified name of each."""
    recorder = Recorder(root)
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    sys.path.insert(0, root)
    for each in ("save", "second save", "restore"):
        asyncio.run(run(each, f"{place}/rehearsal", REHEARSED_SHAPE, recorder))
    recorder.forget()
    asyncio.run(run(case, f"{place}/recorded", LEAF_SHAPE, recorder))
    sys.setprofile(None)
    imported = [path for path, _, name in recorder.functions if name == "<module>"]
    if imported:
        raise RuntimeError(f"imported while recording: {', '.join(imported)}")
    if not recorder.functions:
        raise RuntimeError(f"no function below {root} was entered: another asyncckpt was imported")
    json.dump(sorted(recorder.functions), sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
