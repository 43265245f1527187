"""The laws of stores by subject; `asyncckpt.testing.conformance` has them all."""
