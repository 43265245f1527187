"""Checkpoints in object stores: S3, Google Cloud Storage, and every file system of fsspec."""
