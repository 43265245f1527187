"""Which kind of failure a status, a code, a class of error or an errno stands for."""

from __future__ import annotations

import errno

from asyncckpt.stores.objects.client import Kind

STATUSES: dict[int, Kind] = {
    301: "endpoint",
    302: "endpoint",
    307: "endpoint",
    308: "endpoint",
    401: "credentials",
    403: "forbidden",
    404: "missing",
    408: "timeout",
    409: "conflict",
    410: "missing",
    412: "exists",
    429: "throttled",
    500: "unavailable",
    502: "unavailable",
    503: "unavailable",
    504: "unavailable",
    507: "quota",
    509: "throttled",
}

# S3: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html, and what compatible
# stores have added. GCS: the `reason` of https://cloud.google.com/storage/docs/json_api/v1/status-codes.
CODES: dict[str, Kind] = {
    **dict.fromkeys(("NoSuchKey", "NoSuchUpload", "NoSuchVersion", "notFound"), "missing"),
    **dict.fromkeys(("NoSuchBucket",), "no_bucket"),
    **dict.fromkeys(("PreconditionFailed", "conditionNotMet"), "exists"),
    **dict.fromkeys(("ConditionalRequestConflict", "OperationAborted"), "conflict"),
    **dict.fromkeys(
        (
            "SlowDown",
            "SlowDownRead",
            "SlowDownWrite",
            "BandwidthLimitExceeded",
            "KMS.ThrottlingException",
            "LimitExceededException",
            "ProvisionedThroughputExceededException",
            "RequestLimitExceeded",
            "RequestThrottled",
            "RequestThrottledException",
            "Throttling",
            "ThrottlingException",
            "TooManyRequests",
            "TooManyRequestsException",
            "rateLimitExceeded",
            "userRateLimitExceeded",
        ),
        "throttled",
    ),
    **dict.fromkeys(
        ("InternalError", "ServiceUnavailable", "backendError", "internalError"), "unavailable"
    ),
    **dict.fromkeys(("RequestTimeout", "RequestTimeoutException"), "timeout"),
    **dict.fromkeys(("IncompleteBody",), "short"),
    # The bytes were damaged on their way: sent again, they may arrive.
    **dict.fromkeys(
        ("BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"), "connection"
    ),
    **dict.fromkeys(
        (
            "AuthFailure",
            "CredentialsNotSupported",
            "ExpiredToken",
            "ExpiredTokenException",
            "InvalidAccessKeyId",
            "InvalidClientTokenId",
            "InvalidSecurity",
            "InvalidToken",
            "MissingSecurityHeader",
            "RequestExpired",
            "RequestTimeTooSkewed",
            "SignatureDoesNotMatch",
            "TokenRefreshRequired",
            "UnrecognizedClientException",
            "authError",
            "invalid_grant",
        ),
        "credentials",
    ),
    **dict.fromkeys(
        ("AccessDenied", "AllAccessDisabled", "InvalidPayer", "forbidden", "KMS.AccessDenied"),
        "forbidden",
    ),
    **dict.fromkeys(
        (
            "AuthorizationHeaderMalformed",
            "IllegalLocationConstraintException",
            "PermanentRedirect",
            "Redirect",
            "TemporaryRedirect",
            "InvalidLocationConstraint",
            "InvalidRegionName",
        ),
        "endpoint",
    ),
    **dict.fromkeys(
        (
            "AccountProblem",
            "NotSignedUp",
            "QuotaExceeded",
            "StorageQuotaExceeded",
            "XMinioAdminBucketQuotaExceeded",
            "XMinioStorageFull",
            "accountDisabled",
            "billingNotEnabled",
            "dailyLimitExceeded",
            "quotaExceeded",
            "storageQuotaExceeded",
        ),
        "quota",
    ),
}

# Names of classes, most telling first within one error's ancestry.
CLASSES: dict[str, Kind] = {
    # botocore
    **dict.fromkeys(
        (
            "NoCredentialsError",
            "PartialCredentialsError",
            "CredentialRetrievalError",
            "NoAuthTokenError",
            "TokenRetrievalError",
            "UnknownTokenProviderError",
            "ProfileNotFound",
            "SSOError",
            "LoginError",
            "RefreshWithMFAUnsupportedError",
            "UnknownCredentialError",
        ),
        "credentials",
    ),
    **dict.fromkeys(
        (
            "BaseEndpointResolverError",
            "EndpointProviderError",
            "InvalidRegionError",
            "InvalidEndpointConfigurationError",
            "UnknownRegionError",
            "InvalidURL",
            "InvalidUrlClientError",
            "NonHttpUrlClientError",
        ),
        "endpoint",
    ),
    **dict.fromkeys(
        ("ReadTimeoutError", "ConnectTimeoutError", "ServerTimeoutError", "Timeout"), "timeout"
    ),
    **dict.fromkeys(
        (
            "ResponseStreamingError",
            "IncompleteReadError",
            "IncompleteRead",
            "ClientPayloadError",
            "ContentDecodingError",
            "ChunkedEncodingError",
            "FlexibleChecksumError",
            "ChecksumError",
        ),
        "short",
    ),
    **dict.fromkeys(("ResponseParserError", "ProxyError", "JSONDecodeError"), "unavailable"),
    **dict.fromkeys(
        (
            "EndpointConnectionError",
            "ConnectionClosedError",
            "HTTPClientError",
            "ProxyConnectionError",
            "ClientConnectionError",
            "ServerDisconnectedError",
            "ConnectionError",
            "ConnectionReset",
            "gaierror",
        ),
        "connection",
    ),
    **dict.fromkeys(("ParamValidationError", "UnseekableStreamError"), "invalid"),
    "TimeoutError": "timeout",
    # google.auth
    "TransportError": "connection",
    **dict.fromkeys(("DefaultCredentialsError", "RefreshError", "GoogleAuthError"), "credentials"),
    # Python and fsspec
    "FileNotFoundError": "missing",
    "FileExistsError": "exists",
    "PermissionError": "forbidden",
    "IsADirectoryError": "missing",
    "NotADirectoryError": "missing",
    "NotImplementedError": "invalid",
}

TLS_CLASSES = frozenset(("SSLError", "ClientSSLError", "ClientConnectorCertificateError"))

ERRNOS: dict[int, Kind] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "quota"),
    errno.EBUSY: "throttled",
    errno.ETIMEDOUT: "timeout",
    **dict.fromkeys(
        (
            errno.ECONNREFUSED,
            errno.ECONNRESET,
            errno.ECONNABORTED,
            errno.EPIPE,
            errno.EHOSTUNREACH,
            errno.ENETUNREACH,
            errno.ENETDOWN,
        ),
        "connection",
    ),
    **dict.fromkeys((errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.EROFS), "invalid"),
    errno.EACCES: "forbidden",
}
