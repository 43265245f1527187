"""Checkpoints in a local directory, durable and atomic.

Attempts, publishing by rename, locks and sweeping are here. Not here: object stores
(`stores.objects`).
"""
