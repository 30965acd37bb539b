"""Clients as streams between clusters: nothing is lost on the way, and little crosses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raceme.core.events import Placement
from raceme.reporting.plots import AlluvialDiagram, Bands, Flow, extent, flows

PLACE = {1: 0, 2: 1, 3: 2}


def placed(time: float, **clusters: int) -> list[Placement]:
    return [Placement(time, client, {cluster: 1.0}) for client, cluster in clusters.items()]


def heights(streams: AlluvialDiagram, *times: float) -> list[dict[str, Bands]]:
    return [bands for _, bands in streams.bands([(time, time) for time in times])]


def test_a_client_that_goes_over_takes_all_of_its_band_along() -> None:
    assert flows({1: (0.0, 1.0)}, {2: (5.0, 1.0)}, PLACE) == [Flow(1, 2, 0.0, 1.0, 5.0, 1.0)]


def test_what_can_stay_stays_and_the_rest_goes_over() -> None:
    # 0.7 and 0.3 become 0.4 and 0.6: of the first 0.4 stay and 0.3 go over, and arrive above
    # the 0.3 that the second one had.
    found = flows({1: (0.0, 0.7), 2: (4.0, 0.3)}, {1: (0.0, 0.4), 2: (4.0, 0.6)}, PLACE)
    expected = [(1, 1, 0.0, 0.4, 0.0, 0.4), (2, 2, 4.0, 0.3, 4.3, 0.3), (1, 2, 0.4, 0.3, 4.0, 0.3)]
    assert len(found) == 3
    for flow, numbers in zip(found, expected, strict=True):
        assert tuple(flow) == pytest.approx(numbers)


def test_who_comes_grows_out_of_nothing_and_who_goes_ends() -> None:
    assert flows({}, {1: (2.0, 1.0)}, PLACE) == [Flow(1, 1, 2.5, 0.0, 2.0, 1.0)]
    assert flows({1: (2.0, 1.0)}, {}, PLACE) == [Flow(1, 1, 2.0, 1.0, 2.5, 0.0)]


_PARTS = st.dictionaries(st.sampled_from([1, 2, 3]), st.floats(0.01, 1.0), min_size=1)


@given(before=_PARTS, after=_PARTS)
def test_what_leaves_each_cluster_and_comes_to_each_is_its_weight(
    before: dict[int, float], after: dict[int, float]
) -> None:
    def bands(parts: dict[int, float]) -> Bands:
        return {k: (10.0 * k, weight / sum(parts.values())) for k, weight in parts.items()}

    old, new = bands(before), bands(after)
    found = flows(old, new, PLACE)
    for k, (y, weight) in old.items():
        own = sorted((f for f in found if f.source == k), key=lambda f: f.begins)
        assert sum(f.height for f in own) == pytest.approx(weight)
        # Side by side from the top of the band.
        assert [f.begins for f in own] == pytest.approx(
            [y, *(y + np.cumsum([f.height for f in own[:-1]]))]
        )
    for k, (_, weight) in new.items():
        assert sum(f.height for f in found if f.cluster == k) == pytest.approx(weight)


def test_the_clients_of_a_cluster_lie_side_by_side_and_clusters_apart() -> None:
    streams = AlluvialDiagram(placed(0.0, a=1, b=2, c=1), {}, 10.0)
    (bands,) = heights(streams, 0.0)
    # Three clients and a gap of one client's height, centred where three would be.
    assert bands == {
        "a": {1: (-0.5, 1.0)},
        "c": {1: (0.5, 1.0)},
        "b": {2: (2.5, 1.0)},
    }
    assert extent([(0.0, bands)]) == (-0.5, 3.5)


def test_a_client_is_not_there_before_its_first_cluster() -> None:
    streams = AlluvialDiagram([*placed(0.0, a=1), *placed(4.0, b=1)], {}, 10.0)
    early, late = heights(streams, 0.0, 4.0)
    # One of two: half a client's height below where two begin.
    assert early == {"a": {1: (0.5, 1.0)}}
    assert late == {"a": {1: (0.0, 1.0)}, "b": {1: (1.0, 1.0)}}


def test_bands_are_as_high_as_weights() -> None:
    streams = AlluvialDiagram([Placement(0.0, "a", {1: 0.25, 2: 0.75})], {}, 10.0)
    ((bands),) = heights(streams, 0.0)
    assert {cluster: height for cluster, (_, height) in bands["a"].items()} == {1: 0.25, 2: 0.75}


def test_who_comes_from_below_comes_in_below_wherever_it_began() -> None:
    moves = [*placed(0.0, a=1, b=1, c=2, d=2, e=3), *placed(2.0, a=3), *placed(5.0, a=2, b=2)]
    *_, late = heights(AlluvialDiagram(moves, {}, 10.0), 0.0, 2.0, 5.0)
    order = sorted((own[2][0], client) for client, own in late.items() if 2 in own)
    assert [client for _, client in order] == ["b", "c", "d", "a"]


def test_clusters_do_not_change_places_when_clients_move() -> None:
    # The client that goes from the first cluster to the second was at the top of all.
    moves = [*placed(0.0, a=1, b=1, c=2, d=2), *placed(5.0, a=2), *placed(9.0, b=3)]
    streams = AlluvialDiagram(moves, {}, 10.0)
    assert streams.order[0] == "a"
    for bands in heights(streams, 0.0, 5.0):
        tops = {k: y for own in bands.values() for k, (y, _) in own.items()}
        assert tops[1] < tops[2]


def test_only_who_moves_is_drawn_in_front_and_lasts_to_the_end() -> None:
    streams = AlluvialDiagram([*placed(0.0, a=1, b=1, c=2), *placed(5.0, b=2)], {}, 10.0)
    drawn = streams.bands([(0.0, 0.0), (5.0, 5.0)])
    staying, moving = streams.pieces(drawn, 2.0, 10.0)
    assert moving.clusters == [2]
    times, height = moving.corners[0, :, 0], moving.corners[0, :, 1]
    assert (times.min(), times.max()) == (5.0, 10.0)
    assert height[0] == drawn[0][1]["b"][1][0]
    # It has arrived two seconds later, with both edges.
    arrived = moving.corners[0][times >= 7.0]
    assert {round(float(y), 6) for y in arrived[:, 1]} == {
        round(drawn[1][1]["b"][2][0], 6),
        round(drawn[1][1]["b"][2][0] + 1.0, 6),
    }
    assert sorted(staying.clusters) == [1, 1, 2]


def test_bodies_fill_clusters_where_others_leave() -> None:
    streams = AlluvialDiagram([*placed(0.0, a=1, b=1, c=1, d=2), *placed(5.0, b=2)], {}, 10.0)
    drawn = streams.bands([(0.0, 0.0), (5.0, 5.0)])
    bodies = streams.bodies(drawn, 2.0, 10.0)
    bending = [
        corners
        for cluster, corners in zip(bodies.clusters, bodies.corners, strict=True)
        if cluster == 1 and corners[:, 0].min() == 5.0 and corners[:, 0].max() == 7.0
    ]
    ((top, *_, bottom),) = [
        sorted({float(corners[0, 1]), float(corners[-1, 1])}) for corners in bending
    ]
    # From the first to the last of the three, with the one between them that leaves.
    first, last = drawn[0][1]["a"][1][0], drawn[0][1]["c"][1][0]
    assert {top, bottom} == {min(first, last), max(first, last) + 1.0}
