"""Panicle: placement by probes, clusters by silhouette scores, reassignment, failures."""

import dataclasses

import numpy as np
import pytest
from clustered import (
    CENTRES,
    GROUPS,
    at_version,
    check_it_can_be_restored,
    found,
    homes,
    last_accuracy,
    placed,
    run_on,
    step,
    three_groups,
    update,
)
from fleets import grid_of, pulled_app, read, write
from flwr.app import Message
from hypothesis import given
from hypothesis import strategies as st
from probing import EAST, NORTH, WEST, fleet, partition_of, probe, probed, two_groups

from raceme.core import events
from raceme.core.clients import Client
from raceme.core.events import ClusterChange
from raceme.core.messages import ModelSpec
from raceme.simulation import Device
from raceme.strategies import Panicle, PanicleParameters
from raceme.strategies.panicle.probes import ScoredGroups


def test_clusters_form_when_all_have_answered_two_probes() -> None:
    strategy = two_groups()
    assert partition_of(strategy) == [["c0", "c1", "c2"], ["c3", "c4", "c5"]]
    # Each begins as the mean of its members' models.
    assert strategy.models[strategy.clusters.main("c0")].vector.tolist() == pytest.approx(EAST)
    assert strategy.models[strategy.clusters.main("c3")].vector.tolist() == pytest.approx(NORTH)


def test_a_new_cluster_begins_as_the_mean_of_its_members_by_their_examples() -> None:
    strategy = fleet(4)
    # Two move east, one of them three times as far and with three times as many examples.
    ways = {"c0": (EAST, 10), "c1": ((12.0, 0.6), 30), "c2": (NORTH, 10), "c3": (NORTH, 10)}
    for _ in range(2):
        for client, (way, examples) in ways.items():
            probe(strategy, client, *way, examples=examples)
    assert partition_of(strategy) == [["c0", "c1"], ["c2", "c3"]]
    assert strategy.models[strategy.clusters.main("c0")].vector.tolist() == pytest.approx((10, 0.5))


def test_clients_that_are_alike_stay_together() -> None:
    assert len(probed({f"c{i}": EAST for i in range(6)}).models) == 1


@pytest.mark.parametrize(("shape", "clusters"), [((1, 2), 2), ((2,), 1)])
def test_groups_of_a_quantity_may_be_near_each_other(shape: tuple[int, ...], clusters: int) -> None:
    # The directions have a cosine of 0.8: a model with
    # two outputs fits both, one with one does not.
    strategy = fleet(6)
    strategy._spec = ModelSpec(("w",), (shape,), ("float32",))
    for _ in range(2):
        for i in range(6):
            probe(strategy, f"c{i}", *((4.0, 0.0) if i < 3 else (3.2, 2.4)))
    assert len(strategy.models) == clusters


def test_four_clients_of_four_kinds_are_four_clusters() -> None:
    kinds = {"c0": EAST, "c1": NORTH, "c2": WEST, "c3": (0.1, -4.0)}
    assert len(probed(kinds).models) == 4


def test_without_clustering_no_client_is_probed() -> None:
    strategy = fleet(2, clustering=False)
    assert strategy.request_for("c0").arrays == {}


def test_a_client_is_probed_twice_and_then_trains() -> None:
    strategy = fleet(1)
    for _ in range(2):
        assert strategy.request_for("c0").phase == "probe"
        applied = probe(strategy, "c0", *EAST)
        assert (applied.cluster, applied.staleness, applied.weight) == (0, 0, 0.0)
    assert strategy.request_for("c0").phase == ""


def test_all_clients_are_probed_from_one_record_of_the_initial_model() -> None:
    # In a large fleet a copy per client would take most of the memory.
    strategy = fleet(2)
    first, second = (strategy.request_for(client).arrays for client in ("c0", "c1"))
    assert first["arrays"] is second["arrays"]
    assert read(first["arrays"]).tolist() == [0.0, 0.0]


def test_a_newcomer_joins_by_its_first_probe() -> None:
    strategy = two_groups()
    strategy.on_join(Client("c6", 10))
    assert homes(strategy)["c6"] is None
    probe(strategy, "c6", *NORTH)
    assert homes(strategy)["c6"] == homes(strategy)["c3"]


def test_the_similarity_of_clients_is_the_cosine_of_their_directions() -> None:
    strategy = two_groups()
    strategy.on_join(Client("c6", 10))
    probe(strategy, "c6", *EAST)
    clients, similarity = strategy.state.likeness()
    assert clients == [f"c{i}" for i in range(7)]
    # (4 · 0.2 + 0.2 · 4) / 16.04.
    assert similarity[0, :6] == pytest.approx([1.0] * 3 + [1.6 / 16.04] * 3, abs=1e-6)
    # c6 has one half only.
    assert np.isnan(similarity[6]).all()
    assert np.isnan(similarity[:, 6]).all()


def test_landmarks_are_online_clear_and_other_clients() -> None:
    strategy = two_groups()
    strategy.on_join(Client("c6", 10))
    strategy.state.landmarks = [f"c{i}" for i in range(7)]
    # c1 is to be probed again, c4 is offline, and c6 has not been probed.
    strategy._watch("c1").is_called = True
    strategy.on_leave("c4")
    east, north = (strategy.clusters.main(client) for client in ("c0", "c3"))
    assert strategy._landmarks_beside("c0") == {east: ["c2"], north: ["c3", "c5"]}


def test_landmarks_are_drawn_again_if_a_cluster_has_none_online() -> None:
    strategy = two_groups()
    strategy.on_join(Client("c6", 10))
    for _ in range(2):
        probe(strategy, "c6", *EAST)
    strategy.state.landmarks = [f"c{i}" for i in range(6)]
    east, north = (strategy.clusters.main(client) for client in ("c0", "c3"))
    for client in ("c0", "c1", "c2"):
        strategy.on_leave(client)
    assert strategy._landmarks_beside("c3") == {east: ["c6"], north: ["c4", "c5"]}
    assert strategy.state.landmarks == ["c3", "c4", "c5", "c6"]


def test_newcomers_of_an_unknown_group_found_a_cluster() -> None:
    strategy = two_groups()
    for client in ("c6", "c7"):
        strategy.on_join(Client(client, 10))
        probe(strategy, client, *WEST)
        probe(strategy, client, *WEST)
    assert partition_of(strategy)[-1] == ["c6", "c7"]
    assert len(strategy.models) == 3


def test_a_client_whose_updates_suddenly_grow_is_probed_and_moved() -> None:
    strategy = two_groups()
    for _ in range(2):
        for client in ("c0", "c1", "c2"):
            step(strategy, client, *(0.1 + strategy.models[strategy.clusters.main(client)].vector))
    before = strategy.models[strategy.clusters.main("c0")].vector
    applied = step(strategy, "c0", *(before + 3.0))
    # Update lengths jump from 0.1·√2 to 3·√2, so that a probe has to find the cause.
    assert applied.weight > 0.0
    assert strategy.request_for("c0").phase == "probe"
    probe(strategy, "c0", *NORTH)
    assert homes(strategy)["c0"] == homes(strategy)["c3"]


def test_a_false_alarm_leaves_a_client_where_it_is() -> None:
    strategy = two_groups()
    for client in ("c0", "c1", "c2"):
        step(strategy, client, *(0.1 + strategy.models[strategy.clusters.main(client)].vector))
    step(strategy, "c0", 40.0, 40.0)
    probe(strategy, "c0", *EAST)
    assert homes(strategy)["c0"] == homes(strategy)["c1"]
    assert strategy.request_for("c0").phase == ""


def test_an_update_is_sudden_if_it_is_the_longest_yet() -> None:
    strategy = fleet(2)
    # The fourth has several times the usual length, but not more than the first; the fifth has.
    for length, is_sudden in ((1.0, False), (0.2, False), (0.1, False), (0.99, False), (1.9, True)):
        assert strategy._is_sudden("c0", length) == is_sudden


def grow(strategy: Panicle, client: str) -> None:
    """Let a client's updates suddenly become longer."""
    watch = strategy._watch(client)
    watch.length = 0.1
    vector = strategy.models[strategy.clusters.main(client)].vector
    step(strategy, client, *(vector + 3.0))


def test_where_the_updates_of_many_suddenly_grow_all_are_probed() -> None:
    strategy = two_groups()
    clients = [f"c{i}" for i in range(6)]
    grow(strategy, "c0")
    assert [strategy.request_for(c).phase for c in clients] == ["probe", *5 * [""]]
    grow(strategy, "c3")
    # Two of six clients, within two updates per client.
    assert all(strategy.request_for(client).phase == "probe" for client in clients)
    probe(strategy, "c0", *NORTH)
    # A client whose probe is unchanged continues; nothing is known of those not probed yet.
    for client in clients[1:]:
        probe(strategy, client, *(EAST if client in ("c1", "c2", "c3") else NORTH))
    assert strategy.request_for("c1").phase == ""
    for client, direction in (("c0", NORTH), ("c3", EAST)):
        probe(strategy, client, *direction)
    strategy._search_groups()
    assert partition_of(strategy) == [["c0", "c4", "c5"], ["c1", "c2", "c3"]]


def test_without_drift_sudden_growth_calls_no_client() -> None:
    strategy = two_groups(drift=False)
    for client in ("c0", "c3"):
        grow(strategy, client)
    assert all(strategy.request_for(f"c{i}").phase == "" for i in range(6))


def wrong(strategy: Panicle, *parts: list[str]) -> None:
    """Put clients into wrong clusters."""
    source = strategy.clusters.main(parts[0][0])
    for part in parts:
        cluster = strategy.clusters.found(strategy.models[source].copy())
        for client in part:
            strategy._move(client, cluster)


def test_clusters_that_are_one_group_are_merged_and_reported() -> None:
    strategy = two_groups()
    wrong(strategy, ["c0"])
    seen: list[events.ClustersChanged] = []
    strategy.clusters.report_to(seen.append)
    strategy._search_groups()
    assert partition_of(strategy) == [["c0", "c1", "c2"], ["c3", "c4", "c5"]]
    assert [change.change for change in seen] == [ClusterChange.MERGE]
    assert seen[0].score > seen[0].threshold == strategy.parameters.level


def test_clusters_with_a_low_silhouette_score_are_given_up() -> None:
    strategy = probed({f"c{i}": EAST for i in range(6)})
    wrong(strategy, ["c0", "c1", "c2"])
    strategy._search_groups()
    assert len(strategy.models) == 1


def test_a_wrong_split_is_undone_without_new_probes() -> None:
    strategy = two_groups()
    wrong(strategy, ["c0", "c3"], ["c1", "c4"])
    for _ in range(10):
        for client in ("c0", "c1", "c2", "c3", "c4", "c5"):
            step(strategy, client, *strategy.models[strategy.clusters.main(client)].vector)
    assert partition_of(strategy) == [["c0", "c1", "c2"], ["c3", "c4", "c5"]]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=14))
def test_rearranging_gives_the_wanted_groups(pairs: list[tuple[int, int]]) -> None:
    strategy = fleet(len(pairs))
    clients = [f"c{i}" for i in range(len(pairs))]
    for client in clients:
        probe(strategy, client, *EAST)
        probe(strategy, client, *EAST)
    for _ in range(3):
        strategy.clusters.found(strategy.models[0].copy())
    for client, (now, _) in zip(clients, pairs, strict=True):
        strategy._move(client, now) if now in strategy.models else None
    now = np.array([strategy.clusters.main(client) for client in clients])
    wanted = np.unique([group for _, group in pairs], return_inverse=True)[1]
    strategy._rearrange(clients, now, ScoredGroups(wanted, 1.0))
    then = [strategy.clusters.main(client) for client in clients]
    assert len(set(zip(then, wanted.tolist(), strict=True))) == len(set(then)) == wanted.max() + 1
    # Latest models count in the present clusters of their clients, weighted by ten examples each.
    for cluster, learned in strategy.state.learned.items():
        here = [client for client, k in zip(clients, then, strict=True) if k == cluster]
        latest = strategy.state.latest
        own = [latest[client] for client in here if client in latest]
        assert learned.counted == len(own)
        assert learned.examples == 10 * len(own)
        assert np.allclose(learned.total, 10 * np.sum(own, axis=0), atol=1e-3)


def test_clusters_remember_each_origin_once_however_often_they_split_and_merge() -> None:
    strategy = fleet(4)
    clients = [f"c{i}" for i in range(4)]
    for client in clients:
        probe(strategy, client, *EAST)
        probe(strategy, client, *EAST)
    for wanted in 6 * (np.array([0, 0, 1, 1]), np.zeros(4, np.int64)):
        now = np.array([strategy.clusters.main(client) for client in clients])
        strategy._rearrange(clients, now, ScoredGroups(wanted, 1.0))
    # Six splits and six merges have created three clusters each time: 0 to 17 are gone.
    (last,) = strategy.models
    assert sorted(strategy.state.learned[last].origins) == list(range(last)) == list(range(18))


def test_members_count_alike_however_often_they_report() -> None:
    # Two clients: the one that reports ten times as often does not dominate the model.
    strategy = fleet(2, clustering=False, forward=0.0)
    for turn in range(41):
        step(
            strategy,
            "c1" if turn % 20 == 10 else "c0",
            *((0.0, 1.0) if turn % 20 == 10 else (1.0, 0.0)),
        )
    assert strategy.models[0].vector.tolist() == pytest.approx([0.5, 0.5], abs=0.02)


def test_members_weigh_by_their_examples() -> None:
    strategy = fleet(2, clustering=False, forward=0.0)
    for turn in range(40):
        client, examples, model = [("c0", 30, (1.0, 0.0)), ("c1", 10, (0.0, 1.0))][turn % 2]
        applied = step(strategy, client, *model, examples=examples)
        if turn == 1:
            # α = 2 / log2(5) / 1.05 for two members after
            # half a round; 10 examples are half of the mean.
            assert applied.weight == pytest.approx(0.5 * 2 / np.log2(5) / 1.05)
    assert applied.weight == pytest.approx(0.5 * 0.5)
    assert strategy.models[0].vector.tolist() == pytest.approx([0.75, 0.25], abs=0.01)


@pytest.mark.parametrize(
    ("shares", "target"),
    [
        # λ = 1 / 2 and β = 0.5: (6, 0) + 0.5 (2, 0) − 0.5 (3, −3).
        (2.0, [5.5, 1.5]),
        # λ is at most 1.
        (0.5, [4.0, 3.0]),
        # λ = 1 / 30, and β = 7.5 / 30.
        (30.0, [6.4, 0.1]),
    ],
)
def test_the_target_of_an_update_by_hand(shares: float, target: list[float]) -> None:
    strategy = fleet(2, clustering=False, forward=0.5)
    one = strategy.received(update(strategy, "c0", 6, 0))
    strategy.models[0].replace(np.array([2, 0], np.float32))
    # Without a former model of c0 only w − w₀ = (2, 0) counts.
    assert strategy._target(one, 0, shares=2.0).tolist() == [7, 0]
    for client, examples, model in (("c0", 10, (4, 0)), ("c1", 30, (0, 4))):
        strategy.state.latest[client] = np.array(model, np.float32)
        strategy.state.examples[client] = examples
        strategy._count(client, 0)
    assert strategy._learned(0).counted == 2
    # z̄ = (10 (4, 0) + 30 (0, 4)) / 40 = (1, 3), and z' − z̄ = (3, −3).
    assert strategy._target(one, 0, shares).tolist() == pytest.approx(target)


def test_a_share_is_multiplied_by_a_members_relative_examples() -> None:
    strategy = fleet(2, clustering=False)
    few, many = (update(strategy, "c0", 1, 0, examples=count) for count in (10, 30))
    # There is no mean yet.
    assert strategy._by_examples(0.8, few, 0) == 0.8
    for client, examples in (("c0", 10), ("c1", 30)):
        strategy.state.latest[client] = np.ones(2, np.float32)
        strategy.state.examples[client] = examples
        strategy._count(client, 0)
    # The mean is 20: half of the share, and 1.5 times as much, at most 1.
    assert strategy._by_examples(0.8, few, 0) == pytest.approx(0.4)
    assert strategy._by_examples(0.6, many, 0) == pytest.approx(0.9)
    assert strategy._by_examples(0.8, many, 0) == 1.0


@pytest.mark.parametrize(("staleness", "weight"), [(1, 1.0), (2, 0.5), (4, 0.25)])
def test_a_staleness_beyond_the_number_of_members_is_damped(staleness: int, weight: float) -> None:
    strategy = fleet(1, clustering=False, forward=0.0)
    late = update(strategy, "c0", 8, 0)
    at_version(strategy, staleness)
    # The share of an only member is 1; it is multiplied by 1 / τ.
    (applied,) = strategy.applied([late])
    assert (applied.staleness, applied.weight) == (staleness, weight)
    assert strategy.models[0].vector.tolist() == [8 * weight, 0]


def test_running_statistics_are_mixed_and_never_extrapolated() -> None:
    strategy = Panicle(PanicleParameters(clustering=False))
    strategy._spec = ModelSpec(("weight", "running_var"), ((1,), (1,)), ("float32", "float32"))
    strategy.initialize(np.array([0, 1], np.float32))
    for index in range(2):
        strategy.on_join(Client(f"c{index}", 10))
    variance = 1.0
    for _ in range(3):
        # Both updates are in flight at the same time.
        both = [update(strategy, "c0", 1.0, 0.5), update(strategy, "c1", 1.0, 0.01)]
        for one in both:
            alpha = strategy.applied([one])[0].weight
            strategy.close_task(one.task)
            variance = (1 - alpha) * variance + alpha * float(one.vector[1])
            assert strategy.models[0].vector[1] == pytest.approx(variance)
    assert strategy.models[0].vector[0] != pytest.approx(1.0)


def test_what_clients_use_is_a_mean_of_the_last_versions() -> None:
    strategy = fleet(2, clustering=False, average=1.0)
    seen = []
    for client in ("c0", "c1", "c0"):
        step(strategy, client, *(strategy.models[0].vector + np.float32([1.0, 2.0])))
        seen.append(strategy.models[0].vector.copy())
    # With two members, the third version has the weight one half.
    assert np.allclose(strategy.served[0].vector, (seen[0] + seen[1]) / 4 + seen[2] / 2)
    # Clients train the last version, not the average.
    assert strategy.models[0].vector.tolist() == seen[-1].tolist()
    last = fleet(2, clustering=False, average=0.0)
    step(last, "c0", 1.0, 0.0)
    assert last.served[0].vector.tolist() == last.models[0].vector.tolist()


def test_tests_and_the_result_are_of_what_clients_use() -> None:
    strategy = Panicle(PanicleParameters(average=1.0))
    seen = run_on(strategy, three_groups())
    plain = run_on(Panicle(PanicleParameters(average=0.0)), three_groups())
    losses = [
        [event.loss for event in run if isinstance(event, events.Evaluated)]
        for run in (seen, plain)
    ]
    assert losses[0][-1] != losses[1][-1]
    for cluster, arrays in strategy.result.clusters.items():
        own = strategy.spec.unpack(arrays)
        assert own.tolist() == strategy.served[cluster].vector.tolist()
        assert own.tolist() != strategy.models[cluster].vector.tolist()


def test_a_client_that_left_no_longer_moves_its_cluster() -> None:
    strategy = two_groups()
    k = strategy.clusters.main("c0")
    strategy.on_leave("c0")
    assert "c0" not in strategy.state.latest
    learned = strategy._learned(k)
    assert (learned.total / learned.examples).tolist() == pytest.approx([4.0, 0.2])


# Runs on virtual time.


def test_the_groups_are_found_on_virtual_time() -> None:
    strategy = Panicle()
    seen = run_on(strategy, three_groups())
    assert found(strategy) == [4, 4, 4]
    assert last_accuracy(seen) > 0.9
    assert len(placed(seen, ClusterChange.SPLIT)) == 1


def test_it_can_be_restored() -> None:
    check_it_can_be_restored(Panicle)


def test_clients_that_go_the_other_way_are_apart() -> None:
    def change(reply: Message, index: int) -> Message:
        if index in (3, 6):
            reply.content["arrays"] = write(-read(reply.content["arrays"]))
        return reply

    strategy = Panicle()
    devices = [Device(1.0) for _ in range(12)]
    # Groups whose directions have nothing in common.
    app = pulled_app([CENTRES[group] - 0.5 for group in GROUPS], change=change)
    run_on(strategy, grid_of(app, devices, GROUPS), 120)
    honest = {strategy.clusters.main(f"c{i}") for i in range(12) if i not in (3, 6)}
    assert len(honest) == 3
    assert not honest & {strategy.clusters.main("c3"), strategy.clusters.main("c6")}


def test_every_part_can_be_switched_off() -> None:
    options = {field.name: field for field in dataclasses.fields(PanicleParameters)}
    off = {"clustering": False, "drift": False, "forward": 0.0, "average": 0.0}
    privacy = {"sketch_epsilon", "sketch_size"}  # off by default
    assert off.keys() == options.keys() - {"probe_steps", "level"} - privacy
    for name, value in off.items():
        run_on(Panicle(PanicleParameters(**{name: value})), three_groups(), 60)
