from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
import torch

from asyncckpt import errors
from asyncckpt.adapters import AdapterSet, adapter_named, adapters_for_loaded_frameworks
from asyncckpt.adapters.numpy import NumpyAdapter


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_importing_the_adapters_imports_no_framework() -> None:
    code = (
        "import sys, asyncckpt.adapters as a; s = a.adapters_for_loaded_frameworks();"
        "print([type(x).__name__ for x in s.adapters], len(s.nodes), 'jax' in sys.modules,"
        " 'torch' in sys.modules)"
    )
    assert run(code) == "['NumpyAdapter'] 1 False False"


def test_a_framework_that_is_half_imported_is_not_loaded() -> None:
    code = (
        "import sys, types; sys.modules['jax'] = types.ModuleType('jax');"
        "import asyncckpt.adapters as a;"
        "print([type(x).__name__ for x in a.adapters_for_loaded_frameworks().adapters])"
    )
    assert run(code) == "['NumpyAdapter']"


def test_a_missing_framework_is_a_usage_error_that_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import asyncckpt.adapters as a\n"
        "try: a.adapter_named('torch')\n"
        "except a.UsageError as e: print(e)"
    )
    assert "install asyncckpt[torch]" in run(code)
    with pytest.raises(errors.UsageError, match='"numpy", "jax" or "torch"'):
        adapter_named("tensorflow")


@pytest.mark.parametrize(
    ("leaf", "owner"),
    [
        (np.zeros(1), "numpy"),
        (np.float64(1), "numpy"),
        (np.bool_(True), "numpy"),
        (jax.ShapeDtypeStruct((1,), "float32"), "jax"),
        (torch.zeros(1), "torch"),
        (torch.nn.Parameter(torch.zeros(1)), "torch"),
    ],
)
def test_array_leaves_go_to_their_framework(leaf: Any, owner: str) -> None:
    found = adapters_for_loaded_frameworks().resolve(type(leaf))
    assert not isinstance(found, str)
    assert found is not None
    assert found.name == owner


def test_jax_arrays_and_keys_go_to_jax() -> None:
    adapters = adapters_for_loaded_frameworks()
    for leaf in (jax.numpy.zeros(1), jax.random.key(0)):
        found: Any = adapters.resolve(type(leaf))
        assert found.name == "jax"
    assert len(adapters.nodes) == 2  # and that of `PerProcess`


def test_scalars_are_known_by_their_exact_type_and_other_types_are_not() -> None:
    adapters = AdapterSet([NumpyAdapter()])
    for value in (1, 1.0, True, 1j, "a", b"a"):
        assert adapters.resolve(type(value)) == type(value).__name__
    for kind in (object, set, type(None), jax.Array):
        assert adapters.resolve(kind) is None
    assert adapter_named("numpy").name == "numpy"
    assert adapter_named("jax").name == "jax"
