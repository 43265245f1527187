"""Requests to an object store: deadlines, retries, hedges, limits and sizes.

Not here: what a request does for a checkpoint (`stores.objects`) and how a client library sends it
(`stores.objects.clients`).
"""
