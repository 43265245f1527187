"""Checkpoints on object stores: S3, Google Cloud Storage and fsspec filesystems.

Attempts, publication by conditional creation, repair and garbage collection are here, requests and
their limits in `requests`, client libraries in `clients`.
"""
