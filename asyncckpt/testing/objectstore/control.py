"""Over HTTP: what the simulator has seen, and what it shall do, for one in another process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from asyncckpt.testing.objectstore.faults import Fault
from asyncckpt.testing.objectstore.requests import Request, Response

if TYPE_CHECKING:
    from asyncckpt.testing.objectstore.running import Simulator

FAULT_FIELDS = frozenset(
    (
        "service", "kind", "method", "bucket", "key", "number", "times", "early", "delay_s",
        "status", "code", "message", "retry_after_s", "reset", "close", "hang", "applied", "flip",
        "truncate", "stall", "name",
    )
)  # fmt: skip
"""Attributes of a fault that can be set from another process."""


class Control:
    """GET /stats, /requests, /objects/B, /uploads; POST /reset, /clear, /bucket/B and /faults."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator

    def classify(self, request: Request) -> None:
        """Every request is of kind `control`."""
        request.kind = "control"

    async def handle(self, request: Request) -> Response:
        """The request has taken effect; its answer is JSON."""
        try:
            return _json(200, self._do(request))
        except (KeyError, TypeError, ValueError) as error:
            return _json(400, {"error": f"{type(error).__name__}: {error}"})

    def error(self, request: Request, code: str) -> Response:
        """The answer that names an error."""
        return _json(400, {"error": code})

    def failure(self, request: Request, status: int, code: str | None, message: str) -> Response:
        """The answer of a fault; there are none here."""
        return _json(status, {"error": message})

    def _do(self, request: Request) -> Any:
        simulator = self._simulator
        where, _, rest = request.path.strip("/").partition("/")
        body = json.loads(bytes(request.body)) if request.body else {}
        match request.method, where:
            case "GET", "stats":
                return simulator.stats().as_dict()
            case "GET", "requests":
                return [logged.as_dict() for logged in simulator.requests]
            case "GET", "objects":
                return {key: item.nbytes for key, item in simulator.stored(rest).items()}
            case "GET", "uploads":
                return [f"{upload.bucket}/{upload.key}" for upload in simulator.uploads]
            case "POST", "reset":
                simulator.reset()
            case "POST", "clear":
                simulator.clear()
            case "POST", "bucket":
                simulator.create_bucket(rest)
            case "POST", "faults":
                simulator.faults[:] = [_fault(values) for values in body]
            case _:
                raise ValueError(f"{request.method} {request.path} is not known")
        return {}


def _fault(values: dict[str, Any]) -> Fault:
    if unknown := values.keys() - FAULT_FIELDS:
        raise ValueError(f"not to be set from another process: {', '.join(sorted(unknown))}")
    if isinstance(values.get("kind"), list):
        values["kind"] = tuple(values["kind"])
    return Fault(**values)


def _json(status: int, value: Any) -> Response:
    return Response(status, {"Content-Type": "application/json"}, (json.dumps(value).encode(),))
