"""The laws of stores, one file per subject, combined by `asyncckpt.testing.conformance`."""
