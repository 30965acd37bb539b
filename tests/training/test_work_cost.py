"""The cost of work for a device: valid and rejected CPU seconds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nodes import context, message

from raceme.client_app import app
from raceme.core.messages import MOST_SECONDS, InvalidReplyError, cpu_seconds_of
from raceme.flower.messages import identify_process


def test_a_client_states_its_seconds_where_times_are_asked_for_and_nowhere_else() -> None:
    identify_process()
    told = app(message("train", {"report-timing": True}), context(0)).content
    seconds = cpu_seconds_of(dict(told.metric_records["metrics"]))
    assert seconds is not None
    assert 0 < seconds < 600
    untold = app(message("train", {}), context(0)).content
    assert cpu_seconds_of(dict(untold.metric_records["metrics"])) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e-9, 1e12, 1e308, 10**400])
def test_an_impossible_cost_is_refused(value: float) -> None:
    with pytest.raises(InvalidReplyError):
        cpu_seconds_of({"cpu-seconds": value})


@given(st.floats(0, MOST_SECONDS))
def test_a_possible_cost_is_accepted(seconds: float) -> None:
    assert cpu_seconds_of({"cpu-seconds": seconds, "train-loss": 1.0}) == seconds
