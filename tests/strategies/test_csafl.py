"""CSAFL: affinity by hand, the threshold on both sides, variants, windows on virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from clustered import (
    MODEL,
    at_version,
    check_it_can_be_restored,
    found,
    homes,
    last_accuracy,
    placed,
    round_of,
    run_on,
    three_groups,
    update,
    with_clients,
)
from fleets import grid_of, pulled_app

from raceme.core import events
from raceme.core.clients import Client
from raceme.core.errors import UserError
from raceme.core.events import ClusterChange, Ending
from raceme.core.messages import ModelSpec
from raceme.core.progress import Plan
from raceme.core.requests import Outcome, Update
from raceme.simulation import Device
from raceme.strategies import (
    CSAFL,
    CSAFLParameters,
    GAFedAvg,
    GFedAvg,
    NoGFedAvg,
    RFedAvg,
    TAFedAvg,
    TFedAvg,
)
from raceme.strategies.csafl import affinity_of, latency_of


def test_affinity_by_hand() -> None:
    deltas = np.array([[1, 0], [0.6, 0.8], [0, 1]], np.float32)
    seconds = np.array([1.0, 1.0, 4.0])
    # z = (−1, −1, 2) / √2; rows [ρ z, cosines], ρ = √2:
    # (−1, 1, 0.6, 0), (−1, 0.6, 1, 0.8), (2, 0, 0.8, 1).
    weights = affinity_of(deltas, seconds, rho=math.sqrt(2), width=2.0)
    # (0, 1): 0.16 + 0.16 + 0.64 = 0.96; (0, 2): 9 + 1 + 0.04 + 1 = 11.04;
    # (1, 2): 9 + 0.36 + 0.04 + 0.04 = 9.44; over 2 σ² = 8.
    wanted = np.exp(-np.array([0.96, 11.04, 9.44]) / 8)
    assert weights[np.triu_indices(3, 1)] == pytest.approx(wanted, rel=1e-6)
    assert weights.diagonal().tolist() == [1.0] * 3
    # Without a width it is the median distance, √9.44.
    weights = affinity_of(deltas, seconds, rho=math.sqrt(2))
    assert weights[1, 2] == pytest.approx(math.exp(-0.5), rel=1e-6)
    # Equal latencies have no influence.
    alike = affinity_of(deltas, np.ones(3), rho=5.0, width=1.0)
    assert alike[0, 1] == pytest.approx(math.exp(-0.96 / 2), rel=1e-6)


def test_the_width_is_one_if_the_median_distance_is_zero() -> None:
    # Of ten distances six are 0; rows (1, 1, 1, 1, 0) and (0, 0, 0, 0, 1): 5 / (2 · 1²).
    weights = affinity_of(np.eye(2, dtype=np.float32)[[0, 0, 0, 0, 1]], np.ones(5), rho=1.0)
    assert weights[0].tolist() == pytest.approx([1.0] * 4 + [math.exp(-2.5)])
    # A single client has no distances.
    assert affinity_of(np.ones((1, 2), np.float32), np.ones(1), rho=1.0).tolist() == [[1.0]]


def in_a_window(**options: object) -> CSAFL:
    """Three clients of one group that are all selected, with 10, 10 and 20 examples."""
    strategy = with_clients(CSAFL(CSAFLParameters(grouping="none", threshold=2, **options)), 3)
    sizes = {"c0": 10, "c1": 10, "c2": 20}
    strategy.progress.fleet.clients = {name: Client(name, n) for name, n in sizes.items()}
    strategy.windows.state.members = dict.fromkeys(sizes, True)
    return strategy


def test_an_update_counts_with_the_share_of_its_clients_samples() -> None:
    strategy = in_a_window()
    (applied,) = strategy.applied([update(strategy, "c0", 4, 8)])
    assert (applied.cluster, applied.staleness, applied.weight) == (0, 0, 0.25)
    assert strategy.models[0].vector.tolist() == [1.0, 2.0]
    (applied,) = strategy.applied([update(strategy, "c2", 3, 0, examples=20)])
    assert applied.weight == 0.5
    assert strategy.models[0].vector.tolist() == [2.0, 1.0]


def test_the_share_is_of_the_clients_group_alone() -> None:
    strategy = in_a_window()
    strategy.clusters.split(0, [["c0", "c1"], ["c2"]])
    (applied,) = strategy.applied([update(strategy, "c0", 4, 8)])
    # 10 of 20 samples in its group; among all three selected clients it would be 10 of 40.
    assert applied.weight == 0.5
    # c1 is in the same group, but not selected for this window.
    del strategy.windows.state.members["c1"]
    (applied,) = strategy.applied([update(strategy, "c0", 4, 8)])
    assert applied.weight == 1.0


def test_the_other_reading_adds_the_share_of_the_change() -> None:
    strategy = in_a_window(mixing="change")
    one, two = update(strategy, "c0", 4, 8), update(strategy, "c1", 8, 0)
    strategy.applied([one])
    strategy.applied([two])
    # (0, 0) + (4, 8) / 4 + (8, 0) / 4.
    assert strategy.models[0].vector.tolist() == [3.0, 2.0]


def test_statistics_of_a_batch_are_mixed_in_whatever_is_done_with_weights() -> None:
    strategy = in_a_window(mixing="change")
    strategy._spec = ModelSpec(("weight", "running_var"), ((1,), (1,)), ("float32", "float32"))
    one, two = update(strategy, "c0", 4, 8), update(strategy, "c1", 8, 0)
    strategy.applied([one])
    strategy.applied([two])
    # A quarter of 8, and three quarters of the previous value; a plain sum would be 2 + 0 / 4.
    assert strategy.models[0].vector.tolist() == [3.0, 1.5]


@pytest.mark.parametrize(
    ("options", "weight", "model"),
    [({}, 0.25, [1.75, 3.5]), ({"stale": "dropped"}, 0.0, [1.0, 2.0])],
    ids=["mixed", "dropped"],
)
def test_the_threshold_on_both_sides(
    options: dict[str, str], weight: float, model: list[float]
) -> None:
    strategy = in_a_window(**options)
    one, two = update(strategy, "c0", 4, 8), update(strategy, "c1", 4, 8)
    at_version(strategy, 2)
    (applied,) = strategy.applied([one])
    assert (applied.staleness, applied.weight) == (2, 0.25)
    assert strategy.models[0].vector.tolist() == [1.0, 2.0]
    assert strategy.windows.state.gathering == {}
    # Three changes since: beyond δ = 2 the group updates jointly next. By default, as in the paper,
    # the update is mixed in nevertheless: (1, 2) + ((4, 8) − (1, 2)) / 4.
    (applied,) = strategy.applied([two])
    assert (applied.staleness, applied.weight) == (3, weight)
    assert strategy.models[0].vector.tolist() == model
    assert strategy.windows.state.gathering == {0: True}


def test_a_stale_update_makes_its_own_group_gather() -> None:
    strategy = with_clients(CSAFL(CSAFLParameters(grouping="random", threshold=2)), 4)
    first, second = strategy.clusters.split(0, [["c0", "c1"], ["c2", "c3"]])
    stale = update(strategy, "c2", 4, 8)
    at_version(strategy, 3, cluster=second)
    strategy.applied([stale])
    assert strategy.windows.state.gathering == {second: True}
    assert strategy.models[first].version == 0


def test_the_direction_of_a_group_is_the_mean_of_unit_updates() -> None:
    strategy = with_clients(CSAFL(CSAFLParameters(groups=1)), 2)
    round_of(strategy, (10, 0), (0, 1))
    # Not (5, 0.5), because updates are normalised.
    assert strategy.state.directions[1].tolist() == [0.5, 0.5]


def test_clients_are_grouped_and_placed_by_their_change_of_w0() -> None:
    strategy = CSAFL(CSAFLParameters(groups=2, rho=0.0))
    strategy._spec = ModelSpec(("weights",), ((2,),), ("float32",))
    strategy.initialize(np.array([0, 9], np.float32))
    for index in range(3):
        strategy.on_join(Client(f"c{index}", num_examples=10))
    # Changes (1, 0) and (0, 1); pre-trained models are not mixed in.
    outcomes = round_of(strategy, (1, 9), (0, 10))
    assert [(one.staleness, one.weight) for one in outcomes] == [(0, 0.0), (0, 0.0)]
    assert [own.tolist() for own in strategy.state.directions.values()] == [[1, 0], [0, 1]]
    # The change (2, 1) is nearer to the first group, the model (2, 10) to the second.
    (applied,) = strategy.applied([update(strategy, "c2", 2, 10)])
    assert (applied.cluster, applied.staleness) == (strategy.clusters.main("c0"), 0)
    assert applied.weight == 0.0


def test_a_late_client_joins_a_random_group_and_the_others_stay() -> None:
    strategy = with_clients(RFedAvg(RFedAvg.parameters_type(groups=4)), 4)
    clients = [Client(f"c{index}", num_examples=10) for index in range(4)]
    strategy._pick(clients, strategy.rng)
    before = homes(strategy)
    assert sorted(before.values()) == sorted(strategy.models)
    late = Client("late", num_examples=10)
    strategy.on_join(late)
    strategy._pick([*clients, late], strategy.rng)
    assert homes(strategy) == before | {"late": strategy.clusters.main("late")}
    assert strategy.clusters.is_placed("late")


def test_asynchronous_updates_have_no_threshold() -> None:
    strategy = in_a_window(update="asynchronous")
    late = update(strategy, "c0", 4, 8)
    at_version(strategy, 9)
    (applied,) = strategy.applied([late])
    assert (applied.staleness, applied.weight) == (9, 0.25)


def test_updates_that_were_made_together_are_averaged_by_examples() -> None:
    strategy = in_a_window(update="synchronous")
    updates = [update(strategy, "c0", 4, 8), update(strategy, "c2", 1, 2, examples=20)]
    strategy.windows.state.joint = {one.number: 0 for one in updates}
    applied = strategy.applied(updates)
    assert [one.weight for one in applied] == pytest.approx([1 / 3, 2 / 3])
    assert strategy.models[0].vector.tolist() == pytest.approx([2.0, 4.0])


def test_pretraining_takes_two_epochs() -> None:
    strategy = with_clients(CSAFL(CSAFLParameters(groups=2)), 4)
    assert strategy.request_for("c0").settings == {"local-epochs": 2, "local-steps": 0}


OPTIONS = {"groups": 3, "budget": 20.0, "picked": 12}


@pytest.mark.parametrize(
    ("method", "groups"),
    [
        (CSAFL, [4, 4, 4]),
        (GFedAvg, [4, 4, 4]),
        (GAFedAvg, [4, 4, 4]),
        (TFedAvg, [4, 4, 4]),
        (TAFedAvg, [4, 4, 4]),
        (NoGFedAvg, [4, 4, 4]),
    ],
)
def test_variants_on_virtual_time(method: Callable[..., CSAFL], groups: list[int]) -> None:
    strategy = method(method.parameters_type(rho=0.0, **OPTIONS))  # type: ignore[attr-defined]
    seen = run_on(strategy, three_groups())
    assert found(strategy) == groups
    has_groups = method in (CSAFL, GFedAvg, GAFedAvg)
    assert len(strategy.models) == (3 if has_groups else 1)
    assert (last_accuracy(seen) > 0.9) == has_groups
    waited = sum(event.value for event in seen if isinstance(event, events.Measured))
    # Slow clients take five times as long: only clients that update jointly wait for them.
    assert (waited == 0.0) == (method in (GAFedAvg, TAFedAvg))


def test_synchronous_windows_traced_by_hand() -> None:
    parameters = TFedAvg.parameters_type(**{**OPTIONS, "budget": 12.0})
    seen = run_on(TFedAvg(parameters), three_groups(), 24)
    applied = [event for event in seen if isinstance(event, events.UpdateApplied)]
    # c0, c4 and c8 take 5 s, the others 1 s: joint updates are at 5 and at 10 s; the window that
    # begins then ends at 12 s with nine clients, without the slow ones.
    assert [event.time for event in applied[:24]] == [1.0] * 9 + [5.0] * 3 + [6.0] * 9 + [10.0] * 3
    seen = run_on(
        TFedAvg(TFedAvg.parameters_type(**{**OPTIONS, "budget": 12.0})), three_groups(), 33
    )
    idle = {e.values["client"]: e.value for e in seen if isinstance(e, events.Measured)}
    assert idle == {f"c{i}": 0.0 if i % 4 == 0 else 9.0 for i in range(12)}
    lost = [e.reason for e in seen if isinstance(e, events.UpdateRejected)]
    assert lost == ["its window ended first"] * 3


@pytest.mark.parametrize(("unfinished", "share"), [("averaged", 1.0), ("dropped", 0.0)])
def test_a_synchronous_update_that_the_end_of_its_window_cuts(
    unfinished: str, share: float
) -> None:
    options = {**OPTIONS, "budget": 12.0, "unfinished": unfinished}
    strategy = TFedAvg(TFedAvg.parameters_type(**options))
    seen = run_on(strategy, three_groups(), 33)
    applied = [event for event in seen if isinstance(event, events.UpdateApplied)]
    weights = {event.client: event.weight for event in applied[24:]}
    # Twelve are averaged at 5 and at 10 s; nine of them, with 11 + 12 + 13 + 15 + 16 + 17 + 19 + 20
    # + 21 = 144 samples, answer a third time when the window ends at 12 s.
    assert len(weights) == 9
    assert sum(weights.values()) == pytest.approx(share)
    assert weights["c1"] == pytest.approx(share * 11 / 144)


def test_the_latency_of_the_grouping_is_the_mean_one() -> None:
    class Records(CSAFL):
        latencies: dict[str, tuple[float, float]]

        def _form_groups(self, updates: Sequence[Update]) -> list[Outcome]:
            self.latencies = {u.task.client: (latency_of(u), u.arrived_at) for u in updates}
            return super()._form_groups(updates)

    device = Device(seconds_per_round=1.0, seconds_per_sample=0.01, exponential_rate=50.0)
    strategy = Records(CSAFLParameters(groups=2, picked=3))
    run_on(strategy, grid_of(pulled_app(), [device] * 3), 3)
    # D = 2 epochs of 10, 11 and 12 samples: 1 + D (0.01
    # + 1 / 50). A single random duration differs.
    assert sorted(strategy.latencies) == ["c0", "c1", "c2"]
    for index in range(3):
        latency, arrived = strategy.latencies[f"c{index}"]
        assert latency == pytest.approx(1.6 + 0.06 * index)
        assert abs(arrived - latency) > 0.01
    # A server that does not know its devices measures.
    answer = update(strategy, "c0", 1, 1)
    answer = replace(answer, task=replace(answer.task, sent_at=1.5), arrived_at=4.0)
    assert latency_of(answer) == 2.5


def test_random_groups() -> None:
    strategy = RFedAvg(RFedAvg.parameters_type(**OPTIONS))
    seen = run_on(strategy, three_groups(), 60)
    assert sorted(map(len, map(strategy.clusters.clients, strategy.models))) == [4, 4, 4]
    assert len(placed(seen, ClusterChange.SPLIT)) == 1


def test_a_client_that_comes_later_joins_the_group_of_the_nearest_direction() -> None:
    strategy = CSAFL(CSAFLParameters(rho=0.0, **OPTIONS))
    run_on(strategy, three_groups(), 60)
    strategy.clusters.unassign(["c5"])
    of_its_group = homes(strategy)["c8"]
    assert strategy.request_for("c5").arrays
    run_on(strategy, three_groups(), 90)
    assert homes(strategy)["c5"] == of_its_group


def test_a_budget_shorter_than_any_update_ends_the_run_and_reports_it() -> None:
    strategy = CSAFL(CSAFLParameters(**{**OPTIONS, "budget": 0.5}))
    seen = run_on(strategy, three_groups())
    (ended,) = [event for event in seen if isinstance(event, events.RunEnded)]
    assert ended.ending is Ending.USELESS_REPLIES
    assert "no update fits into the budget of 0.5 s" in ended.reason
    # The groups from pre-training are kept.
    assert len(strategy.models) == 3


def test_a_limit_at_the_same_moment_does_not_hide_that_no_update_fits() -> None:
    strategy = CSAFL(CSAFLParameters(**{**OPTIONS, "budget": 0.5}))
    seen: list[events.Event] = []
    strategy.run(three_groups(), MODEL, 360, plan=Plan(max_rounds=3), observe=seen.append)
    (ended,) = [event for event in seen if isinstance(event, events.RunEnded)]
    assert ended.ending is Ending.USELESS_REPLIES


def test_more_groups_than_clients_is_an_error_before_the_run() -> None:
    with pytest.raises(UserError, match="5 groups cannot be made of 4 clients"):
        CSAFL(CSAFLParameters(groups=5)).check(4)
    TFedAvg().check(1)


@pytest.mark.parametrize("update", ["semi-asynchronous", "synchronous"])
def test_it_can_be_restored(update: str) -> None:
    # A budget longer than the continued run, since the end of a window would cancel work.
    options = {**OPTIONS, "budget": 40.0}
    check_it_can_be_restored(CSAFL, CSAFLParameters(**options, update=update))
