"""moto's server, whose conditional requests are atomic as those of S3 are."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

KEY, SECRET = "AKIAEXAMPLEEXAMPLE00", "secret/of+the/test"

Application = Callable[[dict[str, Any], Any], Iterable[bytes]]


@contextmanager
def moto_server(*buckets: str) -> Iterator[str]:
    """The URL of a server that has these buckets."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line per request otherwise
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        assert server._server is not None
        server._server.app = _one_at_a_time(server._server.app)
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        for bucket in buckets:
            s3_of(url).create_bucket(Bucket=bucket)
        yield url
    finally:
        server.stop()


def s3_of(url: str) -> Any:
    """A client of boto3 for such a server."""
    return boto3.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
    )


def _one_at_a_time(application: Application) -> Application:
    """Requests wait for each other: moto looks whether an object exists, and then puts it."""
    lock = threading.Lock()

    def serve(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        with lock:
            return list(application(environ, start_response))

    return serve
