"""Claims on an object store: which records count, and how a run is taken over.

What is the same for all stores (names, errors) is in `asyncckpt.stores.claims`; the content of a
claim is in `asyncckpt.format.claim`.
"""
