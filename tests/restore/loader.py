"""An object with a state dict, as data loaders are."""

from __future__ import annotations

from typing import Any


class Loader:
    """An object with a state dict, whose `load_state_dict` takes nothing else."""

    def __init__(self, **state: Any) -> None:
        self.state: dict[str, Any] = state
        self.loads = 0
        self.refuse = False

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuse:
            raise ValueError("not mine")
        self.state = state
        self.loads += 1
