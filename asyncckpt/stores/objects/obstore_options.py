"""What s3fs's options mean to obstore; what has no exact translation is refused."""

# Rule 1: a URL with these options leads to the same objects, as the same user, as with s3fs, or it
#   is not translated. An option that is not known here changes who knows what.
# Rule 2: a refusal names the option, never its value, and nothing here shows one.

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncckpt.stores.objects.obstore_account import (
    Given,
    Untranslatable,
    account_of,
    is_plain_section,
    is_protected,
)

IGNORED = frozenset(
    (
        "asynchronous",
        "cache_regions",
        "default_block_size",
        "default_cache_type",
        "default_fill_cache",
        "fixed_upload_size",
        "listings_expiry_time",
        "local_expiry_check",
        "loop",
        "max_concurrency",
        "max_paths",
        "skip_instance_cache",
        "use_listings_cache",
    )
)
"""Options of s3fs about how it caches, splits and waits, none of which happens here."""

IGNORED_CONFIG = frozenset(
    (
        "connect_timeout",
        "max_pool_connections",
        "parameter_validation",
        "read_timeout",
        "retries",
        "tcp_keepalive",
        "user_agent",
        "user_agent_appid",
        "user_agent_extra",
    )
)
"""Options of botocore about connections and tries, which `Requests` decides."""

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_ENCRYPTION = {"AES256", "aws:kms", "aws:kms:dsse"}


@dataclass(frozen=True, slots=True, repr=False)
class S3Config:
    """What an `obstore.store.S3Store` is made of.

    Attributes:
        bucket: its name.
        prefix: what the URL names in it, without `/` at its ends.
        config: options of the store; holds no keys.
        client_options: options of its connections.
        credentials: called for keys; None where obstore finds them itself, or needs none.
    """

    bucket: str
    prefix: str
    config: dict[str, Any]
    client_options: dict[str, Any]
    credentials: Callable[[], Any] | None


def s3_config(url: str, storage_options: Mapping[str, Any]) -> S3Config:
    """What `url` with these options of s3fs is to obstore. Blocks on files, or a role's server.

    Raises:
        Untranslatable: something has no exact translation; names the option.
    """
    bucket, prefix = _split(url)
    options = _Options.of(storage_options)
    account = account_of(options.given)
    # TLS protects the body under way, and nobody is on the way to this machine itself.
    unsigned = account.endpoint is None or is_protected(account.endpoint)
    config: dict[str, Any] = {
        "skip_signature": options.given.anon,
        "unsigned_payload": unsigned,
        "virtual_hosted_style_request": False,
        **_encryption(options.additional),
    }
    if options.requester_pays:
        config["request_payer"] = True
    if account.region is not None:
        config["region"] = account.region
    client_options: dict[str, Any] = {}
    if account.endpoint is not None:
        endpoint = account.endpoint.rstrip("/")
        # The second of them goes before the first one, also where the environment sets it.
        config["endpoint"] = config["aws_endpoint_url_s3"] = endpoint
        client_options["allow_http"] = endpoint.startswith("http://")
    return S3Config(bucket, prefix, config, client_options, account.credentials)


def _split(url: str) -> tuple[str, str]:
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme not in ("s3", "s3a"):
        raise Untranslatable("the scheme of the URL")
    # Access points and the buckets of zones have endpoints of their own.
    if not _BUCKET.fullmatch(bucket) or bucket.endswith("--x-s3"):
        raise Untranslatable("the bucket of the URL")
    prefix = prefix.strip("/")
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise Untranslatable("the path of the URL")
    return bucket, prefix


# ------------------------------------------------------------------------------ options as given


@dataclass(frozen=True, slots=True, repr=False)
class _Options:
    """The options that mean something here; each was checked to be one of those."""

    given: Given
    requester_pays: bool
    additional: dict[str, Any]

    @classmethod
    def of(cls, storage_options: Mapping[str, Any]) -> _Options:
        left = {name: value for name, value in storage_options.items() if name not in IGNORED}
        client = _inner(left, "client_kwargs")
        config = _inner(left, "config_kwargs")
        found = cls(
            Given(
                anon=bool(left.pop("anon", False)),
                profile=left.pop("profile", None),
                keys=_keys(left, client),
                region=client.pop("region_name", None) or config.pop("region_name", None),
                endpoint=left.pop("endpoint_url", None) or client.pop("endpoint_url", None),
                use_ssl=bool(client.pop("use_ssl", left.pop("use_ssl", True))),
            ),
            requester_pays=bool(left.pop("requester_pays", False)),
            additional=_inner(left, "s3_additional_kwargs"),
        )
        for rest, name in ((left, ""), (client, "client_kwargs "), (config, "config_kwargs ")):
            for option, value in rest.items():
                if not _means_nothing(option, value, in_config=rest is config):
                    raise Untranslatable(name + str(option))
        return found


def _inner(left: dict[str, Any], name: str) -> dict[str, Any]:
    found = left.pop(name, None) or {}
    if not isinstance(found, Mapping):
        raise Untranslatable(name)
    return dict(found)


def _keys(left: dict[str, Any], client: dict[str, Any]) -> tuple[str, str, str | None] | None:
    key = left.pop("key", None) or left.pop("username", None) or client.get("aws_access_key_id")
    secret = (
        left.pop("secret", None)
        or left.pop("password", None)
        or client.get("aws_secret_access_key")
    )
    token = left.pop("token", None) or client.get("aws_session_token")
    for name in ("aws_access_key_id", "aws_secret_access_key", "aws_session_token"):
        client.pop(name, None)
    if not key and not secret and not token:
        return None
    if not key or not secret:
        raise Untranslatable("key without secret, or secret or token without key")
    return key, secret, token


def _means_nothing(option: str, value: Any, *, in_config: bool) -> bool:
    """Whether an option that is not translated leaves everything as it is."""
    if value is None or (option == "version_aware" and not value):
        return True
    if option == "verify":
        return value is True
    if not in_config:
        return False
    if option == "s3":
        return isinstance(value, Mapping) and is_plain_section(value)
    if option == "signature_version":
        return bool(value == "s3v4")
    if option in ("request_checksum_calculation", "response_checksum_validation"):
        return bool(value == "when_required")
    return option in IGNORED_CONFIG


def _encryption(additional: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in additional.items():
        if name == "ServerSideEncryption" and value in _ENCRYPTION:
            found["server_side_encryption"] = value
        elif name == "SSEKMSKeyId" and str(additional.get("ServerSideEncryption")) in (
            "aws:kms",
            "aws:kms:dsse",
        ):
            found["sse_kms_key_id"] = value
        elif name == "BucketKeyEnabled" and "SSEKMSKeyId" in additional:
            found["sse_bucket_key_enabled"] = bool(value)
        else:
            raise Untranslatable(f"s3_additional_kwargs {name}")
    return found
