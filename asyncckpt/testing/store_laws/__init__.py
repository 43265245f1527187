"""The laws of stores, one file per subject.

Only tests that run on any store belong here; `asyncckpt.testing.conformance` combines them.
"""
