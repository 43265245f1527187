"""Options with which client libraries use the simulator."""

from __future__ import annotations

from typing import Any

REGION = "us-east-1"
KEY = "key"
SECRET = "secret"


class Endpoints:
    """Two URLs, and the options of client libraries that lead there.

    Attributes:
        s3_endpoint: URL of the S3 API.
        gcs_endpoint: URL of the JSON and XML APIs of GCS.
        region: that S3 clients sign for.
    """

    s3_endpoint: str = ""
    gcs_endpoint: str = ""
    region: str = REGION

    def s3_options(self, **more: Any) -> dict[str, Any]:
        """`storage_options` for s3fs."""
        return {
            "key": KEY,
            "secret": SECRET,
            "endpoint_url": self.s3_endpoint,
            "client_kwargs": {"region_name": self.region},
        } | more

    def gcs_options(self, **more: Any) -> dict[str, Any]:
        """`storage_options` for gcsfs."""
        return {"token": "anon", "project": "project", "endpoint_url": self.gcs_endpoint} | more

    def obstore_s3_config(self) -> dict[str, Any]:
        """Keyword arguments of `obstore.store.S3Store` beside bucket and prefix."""
        return {
            "endpoint": self.s3_endpoint,
            "access_key_id": KEY,
            "secret_access_key": SECRET,
            "region": self.region,
            "virtual_hosted_style_request": False,
            "client_options": {"allow_http": True},
        }

    def obstore_s3(self, bucket: str, prefix: str | None = None, **more: Any) -> Any:
        """An `obstore.store.S3Store` of the bucket, with further options of its own."""
        from obstore.store import S3Store

        return S3Store(bucket, prefix=prefix, **(self.obstore_s3_config() | more))

    def obstore_gcs(self, bucket: str, prefix: str | None = None, **more: Any) -> Any:
        """An `obstore.store.GCSStore` of the bucket, which uses the XML API."""
        import json

        from obstore.store import GCSStore

        account = {
            "gcs_base_url": self.gcs_endpoint,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        options = {
            "service_account_key": json.dumps(account),
            "client_options": {"allow_http": True},
        }
        return GCSStore(bucket, prefix=prefix, **(options | more))

    def tensorstore_s3(self, bucket: str, path: str = "") -> dict[str, Any]:
        """A kvstore spec for TensorStore.

        Its credentials come from the environment or a file: it needs AWS_ACCESS_KEY_ID and
        AWS_SECRET_ACCESS_KEY, or `"aws_credentials": {"type": "anonymous"}`, as here.
        """
        return {
            "driver": "s3",
            "bucket": bucket,
            "endpoint": self.s3_endpoint,
            "aws_region": self.region,
            "aws_credentials": {"type": "anonymous"},
            "path": path,
        }

    def boto3_options(self) -> dict[str, Any]:
        """Keyword arguments of `boto3.client` behind ``"s3"``."""
        return {
            "endpoint_url": self.s3_endpoint,
            "aws_access_key_id": KEY,
            "aws_secret_access_key": SECRET,
            "region_name": self.region,
        }
