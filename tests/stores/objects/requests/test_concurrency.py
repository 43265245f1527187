"""The concurrency controller of one direction: streams, hedges and what counts as slow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.stores.objects.requests.concurrency import ConcurrencyController
from asyncckpt.stores.objects.requests.policy import RequestPolicy


@given(
    st.floats(0.01, 0.2),
    st.floats(1.0, 5.0),
    st.lists(st.sampled_from(["request", "take", "end"]), max_size=300),
)
def test_hedges_stay_a_share_of_all_requests(share: float, burst: float, events: list[str]) -> None:
    policy = RequestPolicy(hedge_share=share, hedge_burst=burst, hedges_at_once=2)
    controller = ConcurrencyController(policy)
    requests = hedges = 0
    for event in events:
        if event == "request":
            controller.earn_hedge()
            requests += 1
        elif event == "take":
            hedges += controller.take_hedge()
        elif controller.hedges_in_flight:
            controller.end_hedge()
        assert 0 <= controller.hedges_in_flight <= 2
        assert hedges <= 1 + share * requests + 1e-6


def test_the_gate_follows_the_tuner_unless_streams_are_fixed() -> None:
    controller = ConcurrencyController(RequestPolicy(streams=1, ceiling=4))
    assert controller.gate.ceiling == 1
    for turn in range(4):
        controller.tuner.began(float(turn))
        controller.ended(turn + 1.0, 100)
    assert controller.gate.ceiling == controller.tuner.streams > 1
    controller.fix(3)
    controller.tuner.began(9.0)
    controller.ended(19.0, 100)
    assert controller.gate.ceiling == controller.traffic.streams == 3
    controller.fix(None)
    assert controller.gate.ceiling == controller.tuner.streams


def test_a_transfer_is_slow_by_assumption_until_enough_were_measured() -> None:
    policy = RequestPolicy()
    controller = ConcurrencyController(policy)
    assert controller.slow_s(0) == policy.hedge_cold_s
    for number in range(100):
        controller.estimate.observe(8 << 20, 0.1 + 0.001 * number)
    small_s, usual_s = controller.slow_s(1 << 20), controller.slow_s(8 << 20)
    for _ in range(policy.hedges_at_once + 1):
        controller.tuner.began(0.0)
    assert 0.17 < usual_s < 0.23 and 0.25 < controller.slow_s(8 << 20) < 0.35
    assert small_s == controller.slow_s(1 << 20) < 0.35
