"""The client of obstore for a URL, as `open_client` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncckpt.flow.threads import Workers
from asyncckpt.stores.objects.clients.obstore_client import ObstoreClient
from asyncckpt.stores.objects.clients.opening import open_client

SHARED = Workers(1, "test-opened")
"""Workers of clients whose test brings none; one thread for the run, if a region is looked for."""


def obstore_from(
    url: str, options: Mapping[str, Any], workers: Workers | None = None
) -> ObstoreClient:
    """Return the client."""
    workers = workers or SHARED
    client = open_client(url, storage_options={**options, "client": "obstore"}, workers=workers)
    assert isinstance(client, ObstoreClient)
    return client
