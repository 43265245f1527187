"""Retention policies: what each keeps, what they keep together, what they refuse."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt import KeepBest, KeepEvery, KeepLast, Retention, UsageError
from asyncckpt.retention import KeepAny, concerns, decided, uses_metrics

NAN, INF = math.nan, math.inf

VALUES = st.sampled_from([0.0, -1.0, 0.5, 1e300, -0.0, NAN, INF, -INF])
RUNS = st.dictionaries(
    st.integers(0, 40), st.dictionaries(st.sampled_from(["loss", "acc"]), VALUES), max_size=12
)
POLICIES: st.SearchStrategy[Any] = st.one_of(
    st.builds(KeepLast, st.integers(1, 6)),
    st.builds(KeepEvery, st.integers(1, 9)),
    st.builds(
        KeepBest,
        st.integers(1, 4),
        st.sampled_from(["loss", "acc"]),
        st.sampled_from(["min", "max"]),
    ),
)


def losses(*values: float | None) -> dict[int, dict[str, float]]:
    """Steps 1, 2, … with these losses; None for a step without one."""
    return {
        step: {} if value is None else {"loss": value} for step, value in enumerate(values, start=1)
    }


def kept(policy: Retention, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
    return sorted(policy.keep(sorted(metrics), metrics))


def test_keep_last_keeps_the_highest_steps() -> None:
    assert kept(KeepLast(2), losses(1, 2, 3)) == [2, 3]
    assert kept(KeepLast(5), losses(1, 2, 3)) == [1, 2, 3]
    assert kept(KeepLast(1), {}) == []


def test_keep_every_keeps_multiples_and_step_zero() -> None:
    steps = [0, 1, 500, 999, 1000, 1001, 3000]
    assert sorted(KeepEvery(1000).keep(steps, {})) == [0, 1000, 3000]
    assert sorted(KeepEvery(1).keep(steps, {})) == steps
    assert KeepEvery(7).keep([1, 2, 3], {}) == set()


def test_keep_best_takes_the_smallest_or_the_largest() -> None:
    run = losses(0.5, 0.1, 0.9, 0.3)
    assert kept(KeepBest(2, "loss"), run) == [2, 4]
    assert kept(KeepBest(2, "loss", mode="max"), run) == [1, 3]
    assert kept(KeepBest(1, "loss", "max"), run) == [3]
    assert kept(KeepBest(9, "loss"), run) == [1, 2, 3, 4]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_of_equal_values_the_newer_step_wins(mode: Any) -> None:
    assert kept(KeepBest(2, "loss", mode), losses(1, 1, 1)) == [2, 3]
    assert kept(KeepBest(1, "loss", mode), losses(0.0, -0.0)) == [2]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_and_missing_metrics_are_never_best(mode: Any) -> None:
    assert kept(KeepBest(3, "loss", mode), losses(NAN, 5.0, None, NAN)) == [2]
    run: dict[int, dict[str, float]] = {1: {"acc": 1.0}, 2: {"acc": 0.5, "loss": 2.0}}
    assert kept(KeepBest(2, "loss", mode), run) == [2]


def test_infinities_are_values_like_others() -> None:
    assert kept(KeepBest(1, "loss"), losses(INF, NAN)) == [1]
    assert kept(KeepBest(1, "loss"), losses(INF, 3.0, -INF)) == [3]
    assert kept(KeepBest(1, "loss", "max"), losses(INF, 3.0, -INF)) == [1]


def test_without_any_value_everything_stays_and_is_said() -> None:
    policy = KeepBest(1, "los")
    run = losses(0.5, NAN, None)
    assert kept(policy, run) == [1, 2, 3]
    assert concerns(policy, [1, 2, 3], run) == [
        "KeepBest(n=1, metric='los', mode='min') keeps every step, because none has a number for "
        "'los': they have 'loss'; pass metrics={'los': …} to save"
    ]
    (bare,) = concerns(KeepLast(1) | policy, [1], {1: {}})
    assert "they have no metrics" in bare
    assert kept(KeepBest(1, "loss"), losses(NAN, NAN)) == [1, 2]
    assert concerns(KeepBest(1, "loss"), [1, 2, 3], run) == []
    assert concerns(KeepLast(1), [1], {}) == []


@given(POLICIES, POLICIES, RUNS)
def test_together_they_keep_what_any_of_them_keeps(
    first: Any, second: Any, run: dict[int, dict[str, float]]
) -> None:
    steps = sorted(run)
    union = (first | second).keep(steps, run)
    assert union == first.keep(steps, run) | second.keep(steps, run) <= set(steps)
    assert union == (second | first).keep(steps, run)


@given(st.lists(POLICIES, min_size=2, max_size=5), st.data())
def test_unions_are_flat_and_their_repr_is_the_expression(
    policies: list[Any], data: st.DataObject
) -> None:
    parts = list(policies)
    while len(parts) > 1:  # whatever the brackets
        at = data.draw(st.integers(0, len(parts) - 2))
        parts[at : at + 2] = [parts[at] | parts[at + 1]]
    assert parts[0] == KeepAny(tuple(policies))
    assert eval(repr(parts[0])) == parts[0]
    assert pickle.loads(pickle.dumps(parts[0])) == parts[0]


def test_repr_of_the_documented_example() -> None:
    policy = KeepLast(3) | KeepEvery(1000) | KeepBest(2, "loss")
    assert repr(policy) == (
        "KeepLast(n=3) | KeepEvery(k=1000) | KeepBest(n=2, metric='loss', mode='min')"
    )


class KeepOdd:
    """Somebody else's policy, which knows nothing of ours."""

    def keep(self, steps: Sequence[int], metrics: Any) -> set[int]:
        return {step for step in steps if step % 2}


def test_anybodys_policy_composes_on_either_side() -> None:
    steps = [1, 2, 3, 4]
    for policy in (KeepLast(1) | KeepOdd(), KeepOdd() | KeepLast(1)):
        assert sorted(policy.keep(steps, {})) == [1, 3, 4]
        assert len((policy | KeepEvery(2)).policies) == 3


def test_what_is_no_policy_does_not_compose() -> None:
    for other in (None, 3, "KeepLast(3)", {1, 2}):
        with pytest.raises(TypeError, match="unsupported operand"):
            KeepLast(3) | other  # type: ignore[operator]
        with pytest.raises(TypeError, match="unsupported operand"):
            other | KeepLast(3)  # type: ignore[operator]


def test_only_policies_that_look_at_metrics_have_them_read() -> None:
    assert not uses_metrics(KeepLast(1) | KeepEvery(2))
    assert uses_metrics(KeepLast(1) | KeepBest(2, "loss"))
    assert uses_metrics(KeepLast(1) | KeepOdd())  # who knows


@pytest.mark.parametrize("count", [0, -1, 1.5, "3", True, None])
def test_counts_that_keep_nothing_are_refused(count: Any) -> None:
    with pytest.raises(UsageError, match=r"KeepLast\(.*\): pass the number of steps to keep"):
        KeepLast(count)
    with pytest.raises(UsageError, match=r"KeepEvery\(.*\): pass the distance between steps"):
        KeepEvery(count)
    with pytest.raises(UsageError, match=r"KeepBest\(.*, 'loss'\): pass the number of steps"):
        KeepBest(count, "loss")


@pytest.mark.parametrize("metric", ["", None, 3, b"loss"])
def test_a_metric_is_a_name(metric: Any) -> None:
    with pytest.raises(UsageError, match="pass the name of a metric given to save"):
        KeepBest(1, metric)


@pytest.mark.parametrize("mode", ["", "minimum", None, min])
def test_a_mode_is_min_or_max(mode: Any) -> None:
    with pytest.raises(UsageError, match="pass mode='min' if small values are good, or mode='max'"):
        KeepBest(1, "loss", mode)


def test_only_steps_kept_by_every_alone_displace_no_others() -> None:
    class Every(KeepEvery):
        """A user's own, which may depend on the other steps."""

    losses = {step: {"loss": -float(step)} for step in range(7)}
    for policy, displacing in (
        (KeepEvery(3), set()),
        (KeepEvery(3) | KeepLast(2) | KeepBest(1, "loss"), {5, 6}),
        (KeepLast(1) | Every(3), {0, 3, 6}),
    ):
        assert decided(policy, range(7), losses) == (policy.keep(range(7), losses), displacing)
