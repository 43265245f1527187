"""Leaves, files and metadata of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from asyncckpt.errors import UsageError
from asyncckpt.pickled import PickledByName
from asyncckpt.reports.texts import nbytes_text
from asyncckpt.reports.timed import Timed
from asyncckpt.reports.timeline import Timeline


@dataclass(frozen=True, slots=True)
class FileInfo(PickledByName):
    """One file of a checkpoint: relative path, size in bytes, CRC-32C if known."""

    path: str
    nbytes: int
    crc32c: int | None


@dataclass(frozen=True, slots=True)
class LeafInfo(PickledByName):
    """One leaf of a checkpoint.

    Attributes:
        path: parts joined by ``/``, percent-escaped.
        kind: ``array``, or the Python type of a scalar (``int``, ``str``, …).
        framework: framework of a saved array: ``numpy``, ``jax`` or ``torch``; empty for scalars.
        shape: shape of an array, ``()`` for scalars.
        dtype: zarr v3 dtype name, empty for scalars.
        chunk_shape: elements per chunk in each dimension.
        chunk_count: number of chunks.
        nbytes: bytes of array data.
        stored_nbytes: bytes in the files, padding and checksums included.
        compression: ``"zstd"`` or None.
        array: name of its array in the OCDBT database, None for scalars.
        value: value of a scalar, None for arrays.
        tied_to: path of the leaf whose bytes it shares, or None.
        location: path or URL of the OCDBT database that holds it; empty if there is none.
        pieces: offset, name and shape of each array of a leaf that is stored in pieces.
        driver: TensorStore driver of its arrays: ``zarr3``, or ``zarr`` for zarr version 2.
    """

    path: str
    kind: str
    framework: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    chunk_shape: tuple[int, ...] = ()
    chunk_count: int = 0
    nbytes: int = 0
    stored_nbytes: int = 0
    compression: str | None = None
    array: str | None = None
    value: Any = None
    tied_to: str | None = None
    location: str = ""
    pieces: tuple[tuple[tuple[int, ...], str, tuple[int, ...]], ...] = ()
    driver: str = "zarr3"

    def tensorstore_spec(self) -> dict[str, Any]:
        """Return a TensorStore spec that opens this leaf for slicing, with ``ts.open(spec)``.

        TensorStore stacks the pieces of a leaf, so that it opens as one array.

        Raises:
            TypeError: the leaf is not an array.
            UsageError: the checkpoint is not an OCDBT database (safetensors, DCP, one directory per
                array).
        """
        if self.array is None:
            raise TypeError(f"{self.path}: a {self.kind} has no array; its value is in .value")
        if not self.location:
            raise UsageError(
                f"{self.path}: this checkpoint is not an OCDBT database, so TensorStore has no "
                "spec for it; restore the leaf (include=), or convert the checkpoint first",
                path=self.path,
            )
        if not self.pieces:
            return self._array_spec(self.array)
        layers: list[dict[str, Any]] = []
        for offset, array, shape in self.pieces:
            transform = {
                "input_inclusive_min": list(offset),
                "input_shape": list(shape),
                "output": [{"input_dimension": i, "offset": -n} for i, n in enumerate(offset)],
            }
            layers.append({**self._array_spec(array), "transform": transform})
        return {"driver": "stack", "dtype": self.dtype, "layers": layers}

    def _array_spec(self, array: str) -> dict[str, Any]:
        place = self.location if "://" in self.location else f"file://{self.location}"
        scheme, _, name = place.partition("://")
        if scheme not in ("http", "https"):  # other locations are names without escapes
            place = f"{scheme}://{quote(name)}"
        return {
            "driver": self.driver,
            "kvstore": {"driver": "ocdbt", "base": f"{place}/", "path": f"{array}/"},
        }


@dataclass(frozen=True, slots=True)
class CheckpointInfo(Timed):
    """Contents of a checkpoint, from its metadata alone; also a mapping of leaves by path.

    Attributes:
        location: path or URL.
        step: step, None for one-shot checkpoints.
        save_id: identity of the save.
        created_ns: wall-clock time of the commit, nanoseconds since 1970.
        library: library that wrote it.
        leaves: every leaf, in tree order.
        files: every file except the commit record.
        metadata: the user's metadata.
        metrics: metrics given to `save`.
        tree: nested containers of `LeafInfo`, as saved.
        format: ``asyncckpt``, ``orbax``, ``ocdbt``, ``safetensors`` or ``dcp``.
        epoch: claim under which it was saved, 0 for none.
        timeline: timeline of the save up to the writing of its index, if requested and known.
    """

    location: str
    step: int | None
    save_id: str
    created_ns: int
    library: str
    leaves: tuple[LeafInfo, ...]
    files: tuple[FileInfo, ...]
    metadata: Mapping[str, Any] = field(hash=False)
    metrics: Mapping[str, float] = field(hash=False)
    tree: Any = field(default=None, hash=False)
    format: str = "asyncckpt"
    epoch: int = 0
    timeline: Timeline = field(default_factory=Timeline, repr=False)
    _leaf_of: dict[str, LeafInfo] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_leaf_of", {leaf.path: leaf for leaf in self.leaves})

    @property
    def nbytes(self) -> int:
        """Bytes of array data; tied leaves count once."""
        return sum(leaf.nbytes for leaf in self.leaves if leaf.tied_to is None)

    @property
    def stored_nbytes(self) -> int:
        """Bytes of `files`."""
        return sum(file.nbytes for file in self.files)

    def __iter__(self) -> Iterator[str]:
        return (leaf.path for leaf in self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    def __contains__(self, path: object) -> bool:
        return path in self._leaf_of

    def __getitem__(self, path: str) -> LeafInfo:
        if path not in self._leaf_of:
            raise KeyError(f"{self.location} has no leaf {path!r}")
        return self._leaf_of[path]

    def __repr__(self) -> str:
        return (
            f"CheckpointInfo({self.location!r}, step={self.step}, {len(self.leaves)} leaves, "
            f"{nbytes_text(self.nbytes)})"
        )
