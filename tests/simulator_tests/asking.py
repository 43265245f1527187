"""Plain HTTP requests to the simulator, without a client library in between."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code in an error document of S3."""
        return self.body.decode().partition("<Code>")[2].partition("</Code>")[0]


def ask(
    endpoint: str,
    method: str,
    target: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    """The answer to one request on a connection of its own."""
    connection = http.client.HTTPConnection(urlsplit(endpoint).netloc, timeout=30)
    try:
        connection.request(method, target, body, headers or {})
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, found, answer.read())
    finally:
        connection.close()
