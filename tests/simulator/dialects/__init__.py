"""The APIs of S3 and GCS. HTTP, faults and latencies are no matter of theirs."""
