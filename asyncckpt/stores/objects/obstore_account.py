"""Region, endpoint and keys of an account of AWS, as s3fs would find them.

botocore says which count where it is installed, as it does for s3fs: it knows the environment,
`~/.aws` with its profiles, and roles. obstore alone knows the environment and roles, and takes an
instance's role where a profile names somebody else.
"""

# Rule 1: keys reach obstore through a provider, never as its options: it would add a session token
#   of the environment to them, and show them as `store.config`.
# Rule 2: a refusal names the option, never its value, and nothing here shows one.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

KEYS_LIFETIME = timedelta(minutes=10)
"""How long obstore keeps keys that expire: botocore hands out none that live shorter."""

_DEFAULT_REGION = "us-east-1"
"""What botocore signs for where a server of one's own has no region."""

_SECTION = frozenset(("addressing_style", "max_concurrent_requests", "payload_signing_enabled"))


class Untranslatable(Exception):
    """obstore would not do the same.

    Attributes:
        option: which option or setting has no exact translation.
    """

    def __init__(self, option: str) -> None:
        super().__init__(f"{option} has no exact translation to obstore")
        self.option = option


@dataclass(frozen=True, slots=True, repr=False)
class Given:
    """What the options say about the account.

    Attributes:
        anon: requests are not signed.
        profile: a section of `~/.aws`, or None for the usual one.
        keys: key id, secret and session token, or None to find them.
        region: None to find it.
        endpoint: URL, or a host alone; None for the one of the region.
        use_ssl: whether an endpoint that does not say it is encrypted.
    """

    anon: bool
    profile: str | None
    keys: tuple[str, str, str | None] | None
    region: str | None
    endpoint: str | None
    use_ssl: bool


@dataclass(frozen=True, slots=True, repr=False)
class Account:
    """What counts.

    Attributes:
        region: None where obstore finds it.
        endpoint: URL; None where obstore finds it.
        credentials: called for keys; None where obstore finds them, or needs none.
    """

    region: str | None
    endpoint: str | None
    credentials: Callable[[], Any] | None


class StaticKeys:
    """Keys that were given, for good."""

    def __init__(self, key: str, secret: str, token: str | None) -> None:
        self._keys = {
            "access_key_id": key,
            "secret_access_key": secret,
            "token": token,
            "expires_at": None,
        }

    def __call__(self) -> dict[str, Any]:
        return dict(self._keys)


class BotocoreKeys:
    """Keys as botocore found them, and renews them where they expire. Called in any thread."""

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials

    def __call__(self) -> dict[str, Any]:
        frozen = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + KEYS_LIFETIME,
        }


def account_of(given: Given) -> Account:
    """The account that s3fs would use with these options. Blocks on files, or a role's server.

    Raises:
        Untranslatable: obstore cannot use it; names the option or setting.
    """
    try:
        import botocore.session
    except ImportError:
        return _alone(given)
    try:
        return _as_botocore(botocore.session.Session(profile=given.profile), given)
    except Untranslatable:
        raise
    except Exception as error:  # a broken file, an unknown profile, …: s3fs will say so
        refusal = Untranslatable(f"the configuration of AWS ({type(error).__name__})")
    raise refusal


def is_plain_section(section: Mapping[str, Any]) -> bool:
    """Whether options of botocore under ``s3`` leave everything as obstore does it."""
    signed = str(section.get("payload_signing_enabled")).lower()
    style = section.get("addressing_style")
    return set(section) <= _SECTION and style in (None, "auto", "path") and signed != "true"


def _as_botocore(session: Any, given: Given) -> Account:
    """Region, endpoint and keys that the client of s3fs would have."""
    section = session.get_scoped_config().get("s3") or {}
    if not isinstance(section, Mapping) or not is_plain_section(section):
        raise Untranslatable("the s3 section of the profile")
    for setting in ("use_dualstack_endpoint", "use_fips_endpoint"):
        if session.get_config_variable(setting):
            raise Untranslatable(f"{setting} of the profile")
    region = given.region or session.get_config_variable("region")
    endpoint = given.endpoint
    if endpoint is None or "://" not in endpoint:
        endpoint = _endpoint_of_client(session, given, region)
    if "@" in urlsplit(endpoint).netloc:
        raise Untranslatable("a user in endpoint_url")
    if endpoint.startswith("https://") and session.get_config_variable("ca_bundle"):
        # obstore would trust the system's certificates beside these.
        raise Untranslatable("ca_bundle of the profile")
    if region is None and urlsplit(endpoint).hostname == "s3.amazonaws.com":
        # s3fs follows to the region that the bucket is in, obstore does not.
        raise Untranslatable("a region that is not given")
    return Account(region or _DEFAULT_REGION, endpoint, _credentials(session, given))


def _endpoint_of_client(session: Any, given: Given, region: str | None) -> str:
    """What botocore makes of environment, profile and region; it only tells through a client."""
    from botocore import UNSIGNED
    from botocore.config import Config

    client = session.create_client(
        "s3",
        region_name=region,
        endpoint_url=given.endpoint,
        use_ssl=given.use_ssl,
        config=Config(signature_version=UNSIGNED),
    )
    return str(client.meta.endpoint_url)


def _credentials(session: Any, given: Given) -> Callable[[], Any] | None:
    if given.anon:
        return None
    if given.keys is not None:
        return StaticKeys(*given.keys)
    found = session.get_credentials()
    if found is None:
        raise Untranslatable("credentials that are not found")
    return BotocoreKeys(found)


def _alone(given: Given) -> Account:
    """What was given; the rest obstore finds, in the environment or from a role's server."""
    if given.profile is not None:
        raise Untranslatable("profile without botocore")
    if given.endpoint is None and not given.use_ssl:
        raise Untranslatable("use_ssl without botocore")
    endpoint = given.endpoint
    if endpoint is not None and "://" not in endpoint:
        raise Untranslatable("endpoint_url without https://")
    credentials = StaticKeys(*given.keys) if given.keys and not given.anon else None
    return Account(given.region, endpoint, credentials)


def is_protected(endpoint: str) -> bool:
    """Whether nobody on the way can change a body: by TLS, or because there is no way."""
    parts = urlsplit(endpoint)
    if parts.scheme == "https" or parts.hostname == "localhost":
        return True
    try:
        return ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False
