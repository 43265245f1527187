"""Checkpoints in a local directory: attempts, publishing by rename, locks and sweeping."""
