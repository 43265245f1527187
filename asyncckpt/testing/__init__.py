"""What tests need: the conformance suite for stores, and a store that fails by script."""
