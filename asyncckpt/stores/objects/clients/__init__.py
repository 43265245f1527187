"""Client libraries for object stores behind one port: obstore and fsspec.

URLs, options, and what the errors of each library mean are here. Not here: retries, deadlines and
concurrency (`stores.objects.requests`).
"""
