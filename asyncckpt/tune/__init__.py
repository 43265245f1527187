"""Measuring an object store, and recommending sizes and concurrency for it.

Not here: the sizes that a save chooses itself (`stores.objects.requests`).
"""
