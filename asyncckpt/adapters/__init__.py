"""Adapters that own array leaves: NumPy's, and those of the loaded frameworks.

Importing this package imports no framework. A leaf of a JAX or PyTorch type can exist only after
its framework was imported, so an adapter is made only for frameworks in `sys.modules`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from asyncckpt.adapters.numpy import NumpyAdapter
from asyncckpt.adapters.python import KINDS
from asyncckpt.errors import UsageError
from asyncckpt.ports import ArrayAdapter, FrameworkAdapter, NodeAdapter
from asyncckpt.spec import ArraySpec
from asyncckpt.tree import PerProcessNodes

_ADAPTERS = {
    "sharded_array": ("asyncckpt.adapters.sharded_array", "ShardedArray", "ShardedAdapter"),
    "tensor_boxes": ("asyncckpt.adapters.tensor_boxes", "TensorBoxes", "BoxesAdapter"),
    "dtensor": ("torch.distributed.tensor", "DTensor", "DTensorAdapter"),
    "jax": ("jax", "Array", "JaxAdapter"),
    "torch": ("torch", "Tensor", "TorchAdapter"),
}
"""Module of an adapter -> the module and name of its array type, and the adapter's class.

The type exists once its module is fully imported. The first adapter that owns a type takes it: a
`DTensor` is also a `torch.Tensor`."""

NewState = Callable[[str, str, ArraySpec], Any]

_TORCH_OWNERS = ("torch.nn.", "torch.optim.")
"""Modules of classes whose state dicts contain only PyTorch arrays."""


class AdapterSet:
    """The adapters of one save or restore. May be used from several threads.

    Attributes:
        adapters: in order of precedence.
        nodes: adapters of containers registered by frameworks; for `tree.flatten`.
    """

    def __init__(self, adapters: Sequence[ArrayAdapter], nodes: Sequence[NodeAdapter] = ()) -> None:
        self.adapters = tuple(adapters)
        self.nodes = tuple(nodes)
        self._resolved: dict[type, ArrayAdapter | str | None] = {}
        self._opens_anywhere: dict[type, Callable[[Any], bool]] = {}

    @cached_property
    def frameworks(self) -> dict[str, FrameworkAdapter]:
        """The adapters that can make leaves without a target, by name."""
        return {one.name: one for one in self.adapters if isinstance(one, FrameworkAdapter)}

    def resolve(self, kind: type) -> ArrayAdapter | str | None:
        """Return the adapter or the kind of Python scalar of leaves of this type, or None."""
        try:
            return self._resolved[kind]
        except KeyError:
            owner = next((adapter for adapter in self.adapters if adapter.owns(kind)), None)
            found = self._resolved[kind] = KINDS.get(kind) or owner
            return found

    def opens_anywhere(self, leaf: Any) -> bool:
        """Return whether another thread than the caller's can open the leaf."""
        kind = type(leaf)
        check = self._opens_anywhere.get(kind)
        if check is None:
            found = self.resolve(kind)
            check = getattr(found, "opens_anywhere", lambda _: isinstance(found, str))
            self._opens_anywhere[kind] = check
        return check(leaf)

    def expected_by(self, owner: type) -> FrameworkAdapter | None:
        """Return the adapter of the arrays that a class expects in its state dict, if known."""
        if any(base.__module__.startswith(_TORCH_OWNERS) for base in owner.__mro__):
            return self.frameworks.get("torch")
        return None

    def rules_of(self, owner: object) -> tuple[Callable[[str], str | None] | None, NewState | None]:
        """Return `required_keys` and `state_like_parameters` of `adapters.torch` for an object."""
        if "torch" not in self.frameworks:
            return None, None
        from asyncckpt.adapters.torch import required_keys, state_like_parameters

        return required_keys(owner), state_like_parameters(owner)


def adapters_for_loaded_frameworks(process: int = 0) -> AdapterSet:
    """Return the adapters of NumPy and of all imported array types.

    `process` is the index of this process, which selects its own `PerProcess` values.
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
    """Return the adapter selected by `leaves=name`; import its framework.

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
    adapter: FrameworkAdapter = getattr(module, _ADAPTERS[name][-1])()
    return adapter


def _module(name: str) -> Any:
    return importlib.import_module(f"asyncckpt.adapters.{name}")
