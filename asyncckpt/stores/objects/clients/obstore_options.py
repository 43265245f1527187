"""Options, environment and configuration for which obstore opens the same store as fsspec.

Covers a few simple cases; fsspec handles the rest.
"""

# Rule 1: a URL with these options leads to the same objects, as the same user, as with s3fs or
#   gcsfs. An unknown option, variable or setting may mean anything, so it is not simple.
# Rule 2: keys reach obstore through a provider, never as options: obstore would combine them with a
#   session token of the environment, and show them as `store.config`.
# Rule 3: a refusal names the option, never its value, and nothing here shows a value.

from __future__ import annotations

import configparser
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

from asyncckpt.stores.objects.clients.fsspec_apis import is_protected
from asyncckpt.stores.objects.clients.urls import Url, check_credential

INERT = frozenset(
    (
        "asynchronous",
        "cache_regions",
        "default_block_size",
        "default_cache_type",
        "default_fill_cache",
        "listings_expiry_time",
        "loop",
        "max_concurrency",
        "max_paths",
        "skip_instance_cache",
        "use_listings_cache",
    )
)
"""Options of fsspec for caching, splitting and waiting, which have no effect here."""

VARIABLES = frozenset(
    (
        "AWS_ACCESS_KEY_ID",
        "AWS_CONFIG_FILE",
        "AWS_DEFAULT_REGION",
        "AWS_EC2_METADATA_DISABLED",
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3",
        "AWS_EXECUTION_ENV",
        "AWS_PAGER",
        "AWS_REGION",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_SHARED_CREDENTIALS_FILE",
    )
)
"""Variables of AWS that are supported here; with any other, botocore opens the URL."""

SETTINGS = frozenset(
    ("aws_access_key_id", "aws_secret_access_key", "aws_session_token", "output", "region")
)
"""Settings of the default profile that are irrelevant if keys are given."""

DEFAULT_CREDENTIALS = "~/.config/gcloud/application_default_credentials.json"
"""Where obstore, like Google's libraries, looks for credentials."""

DEFAULT_REGION = "us-east-1"
"""Region for which s3fs signs by default; the client finds out the bucket's."""

_DEFAULT = re.compile(r"""(profile\s+)?["']?default["']?""")

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


class NotSimple(Exception):
    """obstore might behave differently from fsspec; `str` names the option or setting."""


@dataclass(frozen=True, slots=True, repr=False)
class StoreOptions:
    """Arguments of a store class of obstore.

    Attributes:
        kind: name of the class.
        config: options of the store, without keys except those of a service account.
        client_options: options of its connections.
        credentials: returns keys; None if the store needs none or finds them itself.
        endpoint: URL of the server.
    """

    kind: str
    bucket: str
    config: dict[str, Any]
    client_options: dict[str, Any]
    credentials: Callable[[], Any] | None
    endpoint: str


def store_options(
    url: Url, options: Mapping[str, Any], environ: Mapping[str, str], *, alone: bool = False
) -> StoreOptions:
    """Return the options of an obstore store for `url` with these options of s3fs or gcsfs.

    Reads at most two small files. The options include those of fsspec's configuration. If obstore
    is the only choice (`alone`), it may look for keys itself.

    Raises:
        NotSimple: names the option, variable or setting.
        UsageError: keys in the environment contain a control character.
    """
    left = {
        name: value
        for name, value in options.items()
        if name not in INERT and value is not None and value is not False
    }
    if url.scheme not in ("s3", "gs"):
        raise NotSimple(f"{url.scheme}://")
    found = _gcs(url, left, environ) if url.scheme == "gs" else _s3(url, left, environ, alone)
    if left:
        raise NotSimple(next(iter(left)))
    return found


def _s3(url: Url, left: dict[str, Any], environ: Mapping[str, str], alone: bool) -> StoreOptions:
    # Access points and zonal buckets have endpoints of their own.
    if not _BUCKET.fullmatch(url.host) or url.host.endswith("--x-s3"):
        raise NotSimple("the bucket of the URL")
    inner = left.pop("client_kwargs", None) or {}
    if not isinstance(inner, Mapping):
        raise NotSimple("client_kwargs")
    client = dict(inner)
    anon = left.pop("anon", False)
    keys = None if anon else _keys(left, environ)
    if keys is None and not anon and not alone:
        raise NotSimple("credentials that are neither in the options nor in the environment")
    region = (
        client.pop("region_name", None)
        or environ.get("AWS_DEFAULT_REGION")
        or environ.get("AWS_REGION")
        or _profile_region(environ)
        or DEFAULT_REGION
    )
    endpoint = (
        left.pop("endpoint_url", None)
        or client.pop("endpoint_url", None)
        or environ.get("AWS_ENDPOINT_URL_S3")
        or environ.get("AWS_ENDPOINT_URL")
    )
    # Certificates are irrelevant without TLS.
    known = VARIABLES | ({"AWS_CA_BUNDLE"} if str(endpoint).startswith("http://") else set())
    if unknown := {name for name in environ if name.startswith("AWS_")} - known:
        raise NotSimple(f"the variable {min(unknown)}")
    if client:
        raise NotSimple(f"client_kwargs {next(iter(client))}")
    if not isinstance(region, str) or not re.fullmatch(r"[\w-]+", region):
        raise NotSimple("region_name")
    if endpoint is None and region.startswith(("cn-", "us-iso", "eu-isoe")):
        raise NotSimple("a region outside amazonaws.com")
    config: dict[str, Any] = {"region": region, "virtual_hosted_style_request": False}
    if anon:
        config["skip_signature"] = True
    connections: dict[str, Any] = {}
    if endpoint is not None:
        endpoint = _checked_endpoint(endpoint)
        # The second takes precedence over the first, even if the environment sets it.
        config["endpoint"] = config["aws_endpoint_url_s3"] = endpoint
        connections["allow_http"] = endpoint.startswith("http://")
    config["unsigned_payload"] = endpoint is None or is_protected(endpoint)
    shown = endpoint or f"https://s3.{region}.amazonaws.com"
    provider = None if keys is None else keys.copy
    return StoreOptions("S3Store", url.host, config, connections, provider, shown)


def _keys(left: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the result of an obstore credential provider, or None without keys."""
    key, secret = left.pop("key", None), left.pop("secret", None)
    key, secret = key or left.pop("username", None), secret or left.pop("password", None)
    token = left.pop("token", None)
    if not (key or secret or token):
        key = environ.get("AWS_ACCESS_KEY_ID")
        secret = environ.get("AWS_SECRET_ACCESS_KEY")
        token = environ.get("AWS_SESSION_TOKEN")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            check_credential(name, environ.get(name), f"the environment variable {name}")
        if not (key or secret):
            return None
    if not isinstance(key, str) or not isinstance(secret, str) or not (key and secret):
        raise NotSimple("key without secret, or secret or token without key")
    if not isinstance(token, str | None):
        raise NotSimple("token")
    found = {"access_key_id": key, "secret_access_key": secret, "token": token or None}
    return {**found, "expires_at": None}


def _checked_endpoint(endpoint: Any) -> str:
    try:
        url = urlsplit(endpoint)
    except (ValueError, AttributeError, TypeError):
        raise NotSimple("endpoint_url") from None
    if url.scheme not in ("http", "https") or "@" in url.netloc or url.query:
        raise NotSimple("endpoint_url")
    return str(endpoint).rstrip("/")


def _profile_region(environ: Mapping[str, str]) -> str | None:
    """Return the region of the default profile; refuse settings beyond `SETTINGS`."""
    region = None
    for variable, path in (
        ("AWS_CONFIG_FILE", "~/.aws/config"),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
    ):
        parser = configparser.RawConfigParser(default_section="")
        try:
            parser.read(os.path.expanduser(environ.get(variable) or path))
            sections = filter(_DEFAULT.fullmatch, parser.sections())
            profile = dict(chain.from_iterable(map(parser.items, sections)))
        except (configparser.Error, OSError, UnicodeError):
            raise NotSimple("the configuration files of AWS") from None
        if unknown := profile.keys() - SETTINGS:
            raise NotSimple(f"{min(unknown)} of the default profile")
        region = region or profile.get("region")
    return region


def _gcs(url: Url, left: dict[str, Any], environ: Mapping[str, str]) -> StoreOptions:
    for name in sorted(environ):
        if name == "STORAGE_EMULATOR_HOST" or name.startswith(
            ("GOOGLE_API_USE_", "GOOGLE_CLOUD_U", "GOOGLE_SERVICE_", "GOOGLE_SKIP_")
        ):
            raise NotSimple(f"the variable {name}")
    for name, usual in (("consistency", "none"), ("access", "full_control")):
        if left.pop(name, usual) != usual:
            raise NotSimple(name)
    left.pop("project", None)  # only used to list buckets
    token: Any = left.pop("token", "google_default")
    config: dict[str, Any]
    if token == "anon":
        # obstore would read these credentials nevertheless, and refuses most kinds of them.
        given = "GOOGLE_APPLICATION_CREDENTIALS" in environ
        # With options in `left`, gcsfs opens the URL anyway.
        if not left and (given or os.path.exists(os.path.expanduser(DEFAULT_CREDENTIALS))):
            raise NotSimple("credentials of Google beside anonymous access")
        config = {"skip_signature": True}
    else:
        if token == "google_default":
            token = environ.get("GOOGLE_APPLICATION_CREDENTIALS") or ""
        config = {"service_account_key": _service_account(token)}
    return StoreOptions("GCSStore", url.host, config, {}, None, "https://storage.googleapis.com")


def _service_account(token: Any) -> str:
    """Return the JSON of a service account, given as a mapping or a file's path."""
    if isinstance(token, str | os.PathLike):
        try:
            with open(token, encoding="utf-8") as file:
                token = json.load(file)
        except (OSError, ValueError):
            token = None
    if not isinstance(token, Mapping) or token.get("type") != "service_account":
        raise NotSimple("a token that is not of a service account")
    if token.get("universe_domain", "googleapis.com") != "googleapis.com":
        raise NotSimple("the universe of the service account")
    return json.dumps(dict(token))
