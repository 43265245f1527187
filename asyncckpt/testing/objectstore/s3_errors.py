"""What S3 calls its errors, and what it says about them."""

from __future__ import annotations

ERRORS: dict[str, tuple[int, str]] = {
    "AccessDenied": (403, "Access Denied"),
    "AuthorizationHeaderMalformed": (400, "The authorization header is malformed."),
    "BadDigest": (400, "The Content-MD5 you specified did not match what we received."),
    "BucketAlreadyOwnedByYou": (
        409,
        "Your previous request to create the named bucket succeeded and you already own it.",
    ),
    "BucketNotEmpty": (409, "The bucket you tried to delete is not empty"),
    "ConditionalRequestConflict": (
        409,
        "A conflicting conditional operation occurred during your request. Try again.",
    ),
    "EntityTooSmall": (
        400,
        "Your proposed upload is smaller than the minimum allowed object size.",
    ),
    "ExpiredToken": (400, "The provided token has expired."),
    "InternalError": (500, "We encountered an internal error. Please try again."),
    "Anonymous": (401, "Anonymous caller does not have storage access."),
    "InvalidCredentials": (401, "Invalid Credentials"),
    "InvalidAccessKeyId": (
        403,
        "The AWS Access Key Id you provided does not exist in our records.",
    ),
    "InvalidArgument": (400, "Invalid Argument"),
    "InvalidDigest": (400, "The Content-MD5 you specified was invalid."),
    "InvalidPart": (
        400,
        "One or more of the specified parts could not be found. The part might not have been "
        "uploaded, or the specified entity tag might not have matched the part's entity tag.",
    ),
    "InvalidPartOrder": (400, "The list of parts was not in ascending order."),
    "InvalidRange": (416, "The requested range is not satisfiable"),
    "InvalidRequest": (400, "Invalid Request"),
    "InvalidToken": (400, "The provided token is malformed or otherwise invalid."),
    "MalformedXML": (
        400,
        "The XML you provided was not well-formed or did not validate against our published schema",
    ),
    "MethodNotAllowed": (405, "The specified method is not allowed against this resource."),
    "NoSuchBucket": (404, "The specified bucket does not exist"),
    "NoSuchKey": (404, "The specified key does not exist."),
    "NoSuchUpload": (404, "The specified multipart upload does not exist."),
    "NotImplemented": (
        501,
        "A header you provided implies functionality that is not implemented.",
    ),
    "NotModified": (304, "Not Modified"),
    "ObjectWriteRate": (
        429,
        "The object exceeded the rate limit for object mutation operations (create, update, "
        "and delete). Please reduce your request rate.",
    ),
    "PermanentRedirect": (
        301,
        "The bucket you are attempting to access must be addressed using the specified endpoint.",
    ),
    "PreconditionFailed": (412, "At least one of the pre-conditions you specified did not hold"),
    "RequestTimeout": (400, "Your socket connection to the server was not read from in time."),
    "ServiceUnavailable": (503, "Please reduce your request rate."),
    "SignatureDoesNotMatch": (
        403,
        "The request signature we calculated does not match the signature you provided. "
        "Check your key and signing method.",
    ),
    "SlowDown": (503, "Please reduce your request rate."),
    "TooManyRequests": (429, "Please reduce your request rate."),
}
"""Status and message of each code."""

USUAL: dict[int, str] = {
    400: "InvalidRequest",
    401: "AccessDenied",
    403: "AccessDenied",
    404: "NoSuchKey",
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    416: "InvalidRange",
    429: "TooManyRequests",
    500: "InternalError",
    501: "NotImplemented",
    503: "SlowDown",
}
"""The code that a fault with a status has unless it names one."""
