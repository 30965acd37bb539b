"""Clusters as streams: every client is drawn, and few streams cross."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raceme.core.events import Placement
from raceme.reporting.streams import Epoch, Flow, extent, layout


def placed(time: float, **clusters: int) -> list[Placement]:
    return [Placement(time, client, {cluster: 1.0}) for client, cluster in clusters.items()]


def test_a_split_parts_a_stream_without_crossings() -> None:
    begin, split = layout([*placed(0.0, a=0, b=0, c=0), *placed(5.0, a=1, b=2, c=1)], 0.1)
    # Three clients around 0, and a gap of 0.4 in a small fleet.
    assert begin == Epoch(0.0, {0: (-1.5, 3.0)}, ())
    assert split.bands == {1: pytest.approx((-1.7, 2.0)), 2: pytest.approx((0.7, 1.0))}
    assert split.flows == (
        Flow(0, 1, -1.5, pytest.approx(-1.7), 2.0),
        Flow(0, 2, 0.5, pytest.approx(0.7), 1.0),
    )
    assert extent([begin, split]) == pytest.approx((-1.7, 1.7))


def test_streams_stay_in_place_if_possible() -> None:
    moves = [Placement(0.0, "a", {1: 0.7, 2: 0.3}), Placement(1.0, "a", {1: 0.4, 2: 0.6})]
    *_, last = layout(moves, 0.1)
    sizes = {(flow.source, flow.target): flow.size for flow in last.flows}
    assert sizes == {(1, 1): pytest.approx(0.4), (2, 2): 0.3, (1, 2): pytest.approx(0.3)}
    # A flow from above joins above the clients that were there.
    ends = {(flow.source, flow.target): flow.ends for flow in last.flows}
    assert ends[1, 2] < ends[2, 2]


def test_clients_that_come_widen_a_stream_and_those_that_go_flow_nowhere() -> None:
    moves = [*placed(0.0, a=1, b=1), *placed(4.0, c=1), Placement(8.0, "a", {})]
    _, came, gone = layout(moves, 0.1)
    assert came.flows == (Flow(1, 1, -1.0, -1.5, 2.0),)
    assert came.bands == {1: (-1.5, 3.0)}
    assert {(flow.target, flow.size) for flow in gone.flows} == {(None, 1.0), (1, 2.0)}


def test_a_new_cluster_lies_where_its_clients_come_from() -> None:
    moves = [*placed(0.0, a=1, b=2, c=3, d=3), *placed(2.0, a=4)]
    *_, last = layout(moves, 0.1)
    assert list(last.bands) == [4, 2, 3]


def test_changes_within_the_room_are_one_but_not_those_of_the_beginning() -> None:
    moves = [*placed(0.0, a=1), *placed(0.5, b=1), *placed(1.4, a=2), *placed(3.0, b=2)]
    epochs = layout(moves, 1.0)
    assert [(epoch.time, len(epoch.bands)) for epoch in epochs] == [(0.0, 1), (0.5, 2), (3.0, 1)]


_CLUSTER = st.sampled_from([1, 2, 3])


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(moves=st.lists(st.tuples(st.sampled_from("abcd"), _CLUSTER, _CLUSTER), max_size=12))
def test_flows_are_as_high_as_their_streams(
    moves: list[tuple[str, int, int]],
) -> None:
    start = placed(0.0, a=1, b=1, c=2, d=3)
    later = [
        Placement(float(time), client, {one: 1.0} if one == other else {one: 0.25, other: 0.75})
        for time, (client, one, other) in enumerate(moves, 1)
    ]
    before = None
    for epoch in layout([*start, *later], 0.5):
        if before is not None:
            for cluster, (_, height) in before.bands.items():
                own = sum(flow.size for flow in epoch.flows if flow.source == cluster)
                assert own == pytest.approx(height)
            for cluster, (top, height) in epoch.bands.items():
                flows = [flow for flow in epoch.flows if flow.target == cluster]
                assert sum(flow.size for flow in flows) == pytest.approx(height)
                assert min(flow.ends for flow in flows) == pytest.approx(top)
        before = epoch
