"""Checkpoints in a local directory: attempts, publishing by rename, locks and sweeping.

Object stores are in `stores.objects`.
"""
