"""Claims on an object store: which records count, and how a run is taken over.

Names and errors for all stores are in `asyncckpt.stores.claims`, the content of a claim in
`asyncckpt.format.claim`.
"""
