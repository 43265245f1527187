"""The laws of stores, one file per subject, combined by `asyncckpt.testing.conformance`.

Only tests that run on any store belong here.
"""
