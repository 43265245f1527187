"""The client of obstore for a URL, as `open_client` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncckpt.flow.threads import Workers
from asyncckpt.stores.objects.clients.obstore_client import ObstoreClient
from asyncckpt.stores.objects.clients.opening import open_client


def obstore_from(
    url: str, options: Mapping[str, Any], workers: Workers | None = None
) -> ObstoreClient:
    """Return the client; its workers begin no thread unless a region is looked for."""
    workers = workers or Workers(1, "asyncckpt-test")
    client = open_client(url, storage_options={**options, "client": "obstore"}, workers=workers)
    assert isinstance(client, ObstoreClient)
    return client
