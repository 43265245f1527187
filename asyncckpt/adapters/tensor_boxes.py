"""Boxes of a global array, each in its own tensor, as DCP's planners pass them."""

# Rule 1: the array is never assembled.
# Rule 2: boxes to fill may be equal or overlap: each has its own memory and is filled.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncckpt.adapters.sharded_array import divide
from asyncckpt.adapters.torch import TorchAdapter
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.ports import Run, Source, Target
from asyncckpt.spec import Box, array_spec

Memory = npt.NDArray[Any]


class TensorBoxes:
    """Boxes of a global array, at least one, and a tensor for each, on any device."""

    # Not a dataclass: in a tree, that would be a container.
    __slots__ = ("boxes", "shape", "tensors")

    def __init__(
        self, shape: tuple[int, ...], boxes: tuple[Box, ...], tensors: tuple[torch.Tensor, ...]
    ) -> None:
        self.shape = shape
        self.boxes = boxes
        self.tensors = tensors


class BoxesAdapter:
    """`TensorBoxes`; other processes hold the boxes that are missing from one with gaps."""

    def __init__(self) -> None:
        self._tensor = TorchAdapter()

    def owns(self, kind: type) -> bool:
        return issubclass(kind, TensorBoxes)

    def source(self, path: str, leaf: TensorBoxes) -> Source:
        parts = [self._tensor.source(path, tensor) for tensor in leaf.tensors]
        dtypes = {part.spec.dtype for part in parts}
        if len(dtypes) > 1:
            raise UnsupportedLeafError(
                f"{path}: its shards have different dtypes ({', '.join(sorted(dtypes))}); cast "
                "them to one",
                path=path,
                found=dtypes,
            )
        spec = array_spec(leaf.shape, *dtypes)
        source = Source(spec, leaf, None, framework="torch", captured=parts)
        if all(part.begin_runs for part in parts):
            source.begin_runs = self.begin_runs
        if len(parts) == 1 and leaf.boxes[0].shape == leaf.shape:
            source.view = parts[0].view
            return source
        division = divide(leaf.shape, leaf.boxes)
        source.captured = held = [parts[number] for number in division.first]
        source.partial = division.gap is not None
        source.shards, source.views = division.shards, tuple([part.view for part in held])
        return source

    def fetch(self, source: Source, shard: int, box: Box, out: Memory) -> None:
        self._tensor.fetch(source.captured[shard], 0, box, out)

    def begin_runs(self, runs: Sequence[Run]) -> Callable[[], None]:
        of_shards = [run._replace(source=run.source.captured[run.shard], shard=0) for run in runs]
        return self._tensor.begin_runs(of_shards)

    def target(self, path: str, leaf: TensorBoxes, *, in_place: bool) -> Target:
        parts = [self._tensor.target(path, tensor, in_place=in_place) for tensor in leaf.tensors]
        buffers = [buffer for part in parts for buffer in part.buffers]
        host = len(buffers) == len(parts)
        return Target(
            array_spec(leaf.shape, parts[0].spec.dtype),
            leaf,
            boxes=leaf.boxes,
            buffers=tuple(buffers) if host else (),
            path=path,
            fill=not host,
            captured=parts,
        )

    def place(self, target: Target, parts: Sequence[Memory]) -> Any:
        for part, values in zip(target.captured, parts, strict=True):
            if part.buffers and not target.buffers:
                np.copyto(part.buffers[0], values, casting="no")
            self._tensor.place(part, part.buffers or [values])
        return target.leaf
