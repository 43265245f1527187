"""The cases of `dtensor_cases.py` that take six processes."""

from tests.adapters.dtensor_cases import SIX as CASES
from tests.adapters.dtensor_cases import join as join

__all__ = ["CASES", "join"]
