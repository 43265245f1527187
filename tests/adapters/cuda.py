"""A CUDA device that runs on the CPU and records the order of kernels and streams.

And a runtime that records which memory is locked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Cudart:
    """A CUDA runtime: `locked` has the length of what is locked, by address."""

    def __init__(self, code: int = 0) -> None:
        self.locked: dict[int, int] = {}
        self.code = code

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        if self.code == 0:
            assert not any(
                pointer < start + length and start < pointer + nbytes
                for start, length in self.locked.items()
            )
            self.locked[pointer] = nbytes
        return self.code

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.locked[pointer]
        return 0


class Cuda(TorchDispatchMode):
    """While entered, CPU tensors are CUDA tensors: `calls` are made on their device, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.runtime = Cudart()
        self.locked: list[dict[int, int]] = []
        """What was locked at each copy."""
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self.runtime)
        self.stream = "default stream"
        self.current = "caller's stream"
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream(self, self.current))
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream(self, "own stream"))
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        monkeypatch.setattr(torch.Tensor, "is_cpu", False, raising=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        if name == "copy_":
            self.locked.append(dict(self.runtime.locked))
        if name in ("clone", "copy_"):
            self.calls.append(f"{name} on {self.stream}")
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.stream = self.stream, stream.name
        yield
        self.stream = before


class Stream:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda = cuda
        self.name = name

    def record_event(self) -> str:
        return f"event on {self.name}"

    def wait_event(self, event: str) -> None:
        self.cuda.calls.append(f"{self.name} waits for {event}")

    def synchronize(self) -> None:
        self.cuda.calls.append(f"wait for {self.name}")
