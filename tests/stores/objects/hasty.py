"""Request policy for tests."""

from __future__ import annotations

from asyncckpt.options import MIB
from asyncckpt.stores.objects.requests.policy import RequestPolicy, RetryPolicy

HASTY = RequestPolicy(
    timeout_s=2.0,
    floor_nbytes_per_s=64.0 * MIB,
    list_timeout_s=5.0,
    retry=RetryPolicy(tries=6, total_s=20.0, backoff_s=0.01, backoff_cap_s=0.1),
    hedge_cold_s=0.2,
)
"""For servers on the same machine that fail on purpose."""
