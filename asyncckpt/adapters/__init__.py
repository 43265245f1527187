"""Adapters: the owners of array leaves, for NumPy and for the frameworks that are loaded.

Importing this package imports no framework. An adapter for JAX or PyTorch is made only where that
framework is in `sys.modules` already, and a leaf of its types cannot exist before.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from asyncckpt.adapters.numpy import NumpyAdapter
from asyncckpt.adapters.python import ScalarKind, scalar_kind
from asyncckpt.errors import UsageError
from asyncckpt.ports import ArrayAdapter, FrameworkAdapter, NodeAdapter
from asyncckpt.spec import ArraySpec
from asyncckpt.tree import PerProcessNodes

_ADAPTERS = {
    "sharded": ("asyncckpt.adapters.sharded_array", "ShardedArray", "ShardedAdapter"),
    "tensor_boxes": ("asyncckpt.adapters.tensor_boxes", "TensorBoxes", "BoxesAdapter"),
    "dtensor": ("torch.distributed.tensor", "DTensor", "DTensorAdapter"),
    "jax": ("jax", "Array", "JaxAdapter"),
    "torch": ("torch", "Tensor", "TorchAdapter"),
}
"""Module of an adapter -> the module and name of its array type, and the adapter's class.

The type exists once the import of its module is complete. A `DTensor` is a `torch.Tensor`, too, and
belongs to the adapter that comes first."""

_TORCH_OWNERS = ("torch.nn.", "torch.optim.")
"""Modules of the classes whose state dicts hold only arrays of PyTorch."""


class AdapterSet:
    """The adapters of one save or restore. May be used from several threads.

    Attributes:
        adapters: asked in this order.
        nodes: adapters of containers that frameworks have registered; for `tree.flatten`.
    """

    def __init__(self, adapters: Sequence[ArrayAdapter], nodes: Sequence[NodeAdapter] = ()) -> None:
        self.adapters = tuple(adapters)
        self.nodes = tuple(nodes)
        self._resolved: dict[type, ArrayAdapter | ScalarKind | None] = {}

    @cached_property
    def frameworks(self) -> dict[str, FrameworkAdapter]:
        """The adapters that make leaves without a target, by name."""
        return {one.name: one for one in self.adapters if isinstance(one, FrameworkAdapter)}

    def resolve(self, kind: type) -> ArrayAdapter | ScalarKind | None:
        """Return the adapter of leaves of this type, their kind of Python scalar, or None."""
        try:
            return self._resolved[kind]
        except KeyError:
            found: ArrayAdapter | ScalarKind | None = scalar_kind(kind)
            for adapter in self.adapters:
                if found is None and adapter.owns(kind):
                    found = adapter
            self._resolved[kind] = found
            return found

    def expected_by(self, owner: type) -> FrameworkAdapter | None:
        """Return the adapter of the arrays that a class takes in its state dict, if known."""
        if any(base.__module__.startswith(_TORCH_OWNERS) for base in owner.__mro__):
            return self.frameworks.get("torch")
        return None

    def required_by(self, owner: object) -> Callable[[str], str | None] | None:
        """Return a function that tells the required keys of an object's state dict, if known.

        It maps a path in a state dict to a key that the present and the saved state must both have,
        or to None where they may differ.
        """
        if self.expected_by(type(owner)) is None:
            return None
        required: Callable[[str], str | None] | None = _module("torch").required_keys(owner)
        return required

    def fresh_state_of(self, owner: object) -> Callable[[str, ArraySpec], Any] | None:
        """Return a function that makes arrays that a state dict does not have yet, if known.

        It maps a path in the state dict and the saved spec to an array to restore into, or to None.
        """
        if not any(adapter.name == "dtensor" for adapter in self.adapters):
            return None
        made: Callable[[str, ArraySpec], Any] | None
        made = _module("dtensor").state_like_parameters(owner)
        return made


def adapters_for_loaded_frameworks(process: int = 0) -> AdapterSet:
    """Return the adapters of NumPy and of all imported array types.

    `process` is the number of this process, for values that differ by process.
    """
    adapters: list[ArrayAdapter] = [NumpyAdapter()]
    nodes: list[NodeAdapter] = [PerProcessNodes(process)]
    for name, (module, kind, adapter) in _ADAPTERS.items():
        if hasattr(sys.modules.get(module), kind):
            adapters.append(getattr(_module(name), adapter)())
            if name == "jax":
                nodes.append(_module("jax").JaxNodes())
    return AdapterSet(adapters, nodes)


def adapter_named(name: str) -> FrameworkAdapter:
    """Return the adapter that `leaves=name` asks for; import its framework.

    Raises:
        UsageError: there is no such adapter, or its framework is not installed.
    """
    if name == "numpy":
        return NumpyAdapter()
    if name not in ("jax", "torch"):
        raise UsageError(
            f'leaves={name!r}: pass "numpy", "jax" or "torch"',
            expected=("numpy", "jax", "torch"),
            found=name,
        )
    try:
        module = _module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in (name, f"{name}lib"):
            raise
        raise UsageError(
            f'leaves="{name}": {name} is not installed; install asyncckpt[{name}], or restore with '
            'leaves="numpy"'
        ) from error
    *_, kind = _ADAPTERS[name]
    adapter: FrameworkAdapter = getattr(module, kind)()
    return adapter


def _module(name: str) -> Any:
    return importlib.import_module(f"asyncckpt.adapters.{name}")
