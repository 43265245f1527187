"""Checkpoints on object stores: S3, Google Cloud Storage and fsspec filesystems.

Attempts, publishing by conditional creation, repair and garbage collection are here. Requests and
their limits are in `requests`, client libraries in `clients`.
"""
