"""Adapters: the owners of array leaves, for NumPy and for the frameworks that are loaded.

Importing this package imports no framework. An adapter for JAX or PyTorch is made only where that
framework is in `sys.modules` already, and a leaf of its types cannot exist before.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from asyncckpt.adapters.numpy import NumpyAdapter
from asyncckpt.adapters.python import ScalarKind, scalar_kind
from asyncckpt.errors import UsageError
from asyncckpt.ports import ArrayAdapter, NodeAdapter
from asyncckpt.spec import ArraySpec
from asyncckpt.tree import PerProcessNodes

_FRAMEWORKS = {"jax": ("Array", "JaxAdapter"), "torch": ("Tensor", "TorchAdapter")}
"""Framework -> an attribute that exists once its import is complete, and the adapter's class."""

_SHARDED = "asyncckpt.adapters.sharded_array"
"""Imported when a `ShardedArray` is made."""

_BOXES = "asyncckpt.adapters.tensor_boxes"
"""Imported when `TensorBoxes` are made."""

_DTENSOR = "torch.distributed.tensor"
"""Imported by the code that makes a `DTensor`."""

_WANTING = {"torch": ("torch.nn.", "torch.optim.")}
"""Framework -> modules of the classes whose state dicts hold only its arrays."""


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

    def expected_by(self, owner: type) -> ArrayAdapter | None:
        """Return the adapter of the arrays that a class takes in its state dict, if known."""
        modules = [base.__module__ for base in owner.__mro__]
        for adapter in self.adapters:
            wanting = _WANTING.get(adapter.name, ())
            if any(module.startswith(wanting) for module in modules):
                return adapter
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
        wanting = self.expected_by(type(owner))
        if (
            wanting is None
            or wanting.name != "torch"
            or not any(adapter.name == "dtensor" for adapter in self.adapters)
        ):
            return None
        made: Callable[[str, ArraySpec], Any] = _module("dtensor").state_like_parameters(owner)
        return made


def adapters_for_loaded_frameworks(process: int = 0) -> AdapterSet:
    """Return the adapters of NumPy and of all imported array types.

    `process` is the number of this process, for values that differ by process. Each type belongs
    to the first that owns it: a `DTensor` is a `torch.Tensor`, too.
    """
    adapters: list[ArrayAdapter] = [NumpyAdapter()]
    nodes: list[NodeAdapter] = [PerProcessNodes(process)]
    if hasattr(sys.modules.get(_SHARDED), "ShardedArray"):
        adapters.append(_module("sharded").ShardedAdapter())
    if hasattr(sys.modules.get(_BOXES), "TensorBoxes"):
        adapters.append(_module("tensor_boxes").BoxesAdapter())
    if hasattr(sys.modules.get(_DTENSOR), "DTensor"):
        adapters.append(_module("dtensor").DTensorAdapter())
    for name, (attribute, _) in _FRAMEWORKS.items():
        if getattr(sys.modules.get(name), attribute, None) is not None:
            adapters.append(adapter_named(name))
            if name == "jax":
                nodes.append(_module("jax").JaxNodes())
    return AdapterSet(adapters, nodes)


def adapter_named(name: str) -> ArrayAdapter:
    """Return the adapter that `leaves=name` asks for; import its framework.

    Raises:
        UsageError: there is no such adapter, or its framework is not installed.
    """
    if name == "numpy":
        return NumpyAdapter()
    if not isinstance(name, str) or name not in _FRAMEWORKS:
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
    adapter: ArrayAdapter = getattr(module, _FRAMEWORKS[name][1])()
    return adapter


def _module(name: str) -> Any:
    return importlib.import_module(f"asyncckpt.adapters.{name}")
