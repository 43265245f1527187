"""Requests to an object store: deadlines, retries, hedges, limits and sizes.

Not here: the use of requests by checkpoints (`stores.objects`) and their transmission by client
libraries (`stores.objects.clients`).
"""
