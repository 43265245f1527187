"""Client libraries for object stores behind one port: obstore and fsspec.

Also URLs, options, and classification of each library's errors. Not here: retries, deadlines and
concurrency (`stores.objects.requests`).
"""
