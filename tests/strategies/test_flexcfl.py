"""FlexCFL: cold starts, migration, averaging across groups, and groups on a grid."""

from typing import Any

import numpy as np
import pytest
from clustered import (
    check_it_can_be_restored,
    found,
    homes,
    last_accuracy,
    placed,
    plain,
    round_of,
    run_on,
    three_groups,
    update,
    with_clients,
)

from raceme.core import events
from raceme.core.clients import Client
from raceme.core.clusters import Model
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.events import ClusterChange
from raceme.core.messages import LABEL_COUNTS, ModelSpec
from raceme.core.requests import Answer, InFlight, InvalidReplyError
from raceme.runs.experiment import simulate
from raceme.strategies import FedGroup, FedGroupParameters, FlexCFL, FlexCFLAsync, FlexCFLParameters
from raceme.strategies.flexcfl import mix_groups


def test_a_share_of_the_other_groups_by_hand() -> None:
    models = [Model(np.array(values, np.float32)) for values in ((3, 4), (0, 2), (0, 0))]
    mix_groups(models, eta_g=0.5)
    # Lengths 5, 2 and, for a model of zeros, 1; unit vectors (0.6, 0.8), (0, 1) and (0, 0).
    # (3, 4) + 0.5 · (0, 1) over 1 + 0.5 (1/2 + 1) = 1.75; (0, 2) + 0.5 · (0.6, 0.8) over
    # 1 + 0.5 (1/5 + 1) = 1.6; 0.5 · (0.6, 1.8) over 1 + 0.5 (1/5 + 1/2) = 1.35.
    assert models[0].vector.tolist() == pytest.approx([3.0 / 1.75, 4.5 / 1.75])
    assert models[1].vector.tolist() == pytest.approx([0.3 / 1.6, 2.4 / 1.6])
    assert models[2].vector.tolist() == pytest.approx([0.3 / 1.35, 0.9 / 1.35])


def test_a_share_of_the_other_groups_without_the_division() -> None:
    models = [Model(np.array(values, np.float32)) for values in ((3, 4), (0, 2))]
    mix_groups(models, eta_g=0.5, divided=False)
    # (3, 4) + 0.5 · (0, 1); (0, 2) + 0.5 · (0.6, 0.8).
    assert models[0].vector.tolist() == pytest.approx([3.0, 4.5])
    assert models[1].vector.tolist() == pytest.approx([0.3, 2.4])


@pytest.mark.parametrize(
    ("inter_group", "mixed", "idle"),
    [("mean", [5 / 1.25, 0.5 / 1.25], [0.5 / 1.1, 2 / 1.1]), ("sum", [5, 0.5], [0.5, 2])],
)
def test_groups_that_are_idle_in_a_round_are_mixed_too(
    inter_group: str, mixed: list[float], idle: list[float]
) -> None:
    parameters = FlexCFLParameters(groups=3, detect="none", eta_g=0.5, inter_group=inter_group)
    strategy = with_clients(FlexCFL(parameters), 3)
    round_of(strategy, (2, 0), (0, 2), (-3, 0))
    # The group of c2 loses its only client: it neither gives nor takes. c1 is offline.
    strategy.clusters.assign("c2", 1)
    strategy.on_leave("c1")
    round_of(strategy, (5, 0))
    # (5, 0) + 0.5 · (0, 1) over 1 + 0.5 / 2; (0, 2) + 0.5 · (1, 0) over 1 + 0.5 / 5.
    assert strategy.models[1].vector.tolist() == pytest.approx(mixed)
    assert strategy.models[2].vector.tolist() == pytest.approx(idle)
    assert strategy.models[3].vector.tolist() == [-3.0, 0.0]


@pytest.mark.parametrize("measure", ["edc", "madc"])
def test_cold_starts_by_hand(measure: str) -> None:
    parameters = FlexCFLParameters(groups=2, measure=measure, detect="none")
    strategy = with_clients(FlexCFL(parameters), 6)
    # Group cold start with c0 … c3; c4 and c5 have no group.
    round_of(strategy, (2, 0), (0, 1), (4, 0.1), (0.1, 3))
    assert homes(strategy) == {"c0": 1, "c1": 2, "c2": 1, "c3": 2, "c4": None, "c5": None}
    assert strategy.models[1].vector.tolist() == pytest.approx([3.0, 0.05])
    # Client cold start: c4's update has a cosine of 0.995 with the first direction. It does not
    # count in the mean: (5 + 7) / 2.
    applied = round_of(strategy, (5, 0), (0, 5), (7, 0), (0, 5), (1, 0.1))
    assert strategy.clusters.main("c4") == 1
    assert [a.weight for a in applied] == [0.5, 0.5, 0.5, 0.5, 0.0]
    assert strategy.models[1].vector.tolist() == [6.0, 0.0]
    # From then on c4 trains with its group; newcomer c5 starts cold.
    applied = round_of(strategy, (5, 0), (0, 5), (7, 0), (0, 5), (6, 0), (-1, 2))
    assert [a.weight for a in applied] == pytest.approx([1 / 3, 0.5, 1 / 3, 0.5, 1 / 3, 0.0])
    assert strategy.clusters.main("c5") == 2
    strategy.on_join(Client("c6", num_examples=10))
    assert strategy.state.cold == {"c6": True}


def test_clients_are_grouped_and_placed_by_their_change_of_w0() -> None:
    strategy = FlexCFL(FlexCFLParameters(groups=2, detect="none"))
    strategy._spec = ModelSpec(("weights",), ((2,),), ("float32",))
    strategy.initialize(np.array([0, 9], np.float32))
    for index in range(5):
        strategy.on_join(Client(f"c{index}", num_examples=10))
    # Changes (3, 0), (0, 1), (1, 0) and (0, 3); the models have nearly the same direction.
    round_of(strategy, (3, 9), (0, 10), (1, 9), (0, 12))
    assert homes(strategy) == {"c0": 1, "c1": 2, "c2": 1, "c3": 2, "c4": None}
    assert [own.tolist() for own in strategy.state.directions.values()] == [[2, 0], [0, 2]]
    # The change (2, 1) is nearer to the first group, the model (2, 10) to the second.
    (applied,) = strategy.applied([update(strategy, "c4", 2, 10)])
    assert (applied.cluster, applied.staleness, applied.weight) == (1, 0, 0.0)
    assert homes(strategy)["c4"] == 1


def test_directions_of_groups_stay_those_of_the_group_cold_start() -> None:
    strategy = with_clients(FlexCFL(FlexCFLParameters(groups=2, detect="none")), 5)
    round_of(strategy, (2, 0), (0, 1), (4, 0.1), (0.1, 3))
    # The groups exchange their starting points.
    round_of(strategy, (0, 9), (9, 0), (0, 9), (9, 0))
    assert [strategy.models[k].vector.tolist() for k in (1, 2)] == [[0.0, 9.0], [9.0, 0.0]]
    # Eq (8) compares (5, 0) with (3, 0.05) and (0.05, 2), the mean changes of w0.
    strategy.applied([update(strategy, "c4", 5, 0)])
    assert strategy.clusters.main("c4") == 1
    directions = {k: one.tolist() for k, one in strategy.state.directions.items()}
    assert directions == {1: pytest.approx([3.0, 0.05]), 2: pytest.approx([0.05, 2.0])}


def test_groups_that_start_from_the_initial_model_keep_their_directions() -> None:
    strategy = with_clients(FlexCFL(FlexCFLParameters(groups=2, start="common")), 4)
    applied = round_of(strategy, (2, 0), (0, 1), (4, 0.1), (0.1, 3))
    assert [strategy.models[k].vector.tolist() for k in (1, 2)] == [[0.0, 0.0], [0.0, 0.0]]
    directions = {k: one.tolist() for k, one in strategy.state.directions.items()}
    assert directions == {1: pytest.approx([3.0, 0.05]), 2: pytest.approx([0.05, 2.0])}
    assert [outcome.cluster for outcome in applied] == [1, 2, 1, 2]


def test_the_choices_of_the_papers_text() -> None:
    text = FlexCFLParameters(paper=True)
    assert (text.pretrain_steps, text.start, text.inter_group) == (0, "common", "sum")
    assert text.placing == "client"
    config = RunConfig.from_mapping({"strategy": "flexcfl", "flexcfl.paper": True})
    assert config.parameters() == text
    assert RunConfig.from_mapping(config.to_mapping()) == config


@pytest.mark.parametrize(("measure", "count"), [("edc", 6), ("random-clients", 2)])
def test_the_number_of_clients_that_make_the_groups(measure: str, count: int) -> None:
    parameters = FlexCFLParameters(groups=2, pretrain=3, measure=measure)
    strategy = with_clients(FlexCFL(parameters), 8)
    clients = [Client(f"c{index}", 10) for index in range(8)]
    # α m clients; of RCC, each of which is a group, m.
    assert len(strategy._participants(clients, strategy.rng)) == count


def test_clients_whose_data_have_changed_take_part_besides_the_selected_ones() -> None:
    strategy = with_groups(fraction=0.5)
    clients = [Client(f"c{index}", 10) for index in range(4)]

    def participants() -> list[str]:
        return sorted(c.client_id for c in strategy._participants(clients, strategy.rng))

    assert participants() == sorted(strategy.state.picked)
    assert len(strategy.state.picked) == 2
    strategy.state.cold = {client.client_id: True for client in clients}
    assert participants() == ["c0", "c1", "c2", "c3"]
    assert len(strategy.state.picked) == 2


@pytest.mark.parametrize(("distance", "is_cold"), [("counts", True), ("wasserstein", False)])
def test_an_exchange_of_labels_with_equal_counts_by_distance(distance: str, is_cold: bool) -> None:
    strategy = with_clients(FlexCFL(FlexCFLParameters(groups=2, distance=distance)), 4)
    strategy.progress.fleet.clients = {f"c{i}": Client(f"c{i}", 10) for i in range(4)}
    for index in range(4):
        strategy.on_answer(counts_of(strategy, f"c{index}", [9, 1]))
    round_of(strategy, (2, 0), (0, 1), (4, 0.1), (0.1, 3))
    strategy.on_answer(counts_of(strategy, "c0", [1, 9]))
    assert ("c0" in strategy.state.cold) == is_cold


def counts_of(
    strategy: FlexCFL, client: str, counts: list[int], examples: int = 10, whole: int = 0
) -> Answer:
    number = strategy.progress.tasks
    task = InFlight(number, client, 1, 0, 0, sent_at=0.0, bytes_down=0, kind=LABEL_COUNTS)
    metrics = {"all-examples": float(whole)} if whole else {}
    numbers = {LABEL_COUNTS: np.array(counts, np.int64)}
    return Answer(task, examples, metrics, numbers)


def with_groups(**options: float) -> FlexCFL:
    strategy = with_clients(FlexCFL(FlexCFLParameters(groups=2, **options)), 4)
    strategy.progress.fleet.clients = {f"c{i}": Client(f"c{i}", 10) for i in range(4)}
    for index in range(4):
        strategy.on_answer(counts_of(strategy, f"c{index}", [10, 0] if index % 2 else [0, 10]))
    round_of(strategy, (2, 0), (0, 1), (4, 0.1), (0.1, 3))
    return strategy


def test_a_client_whose_label_counts_have_changed_is_placed_anew() -> None:
    strategy = with_groups()
    strategy.on_answer(counts_of(strategy, "c0", [1, 9]))
    assert strategy.state.cold == {}
    strategy.on_answer(counts_of(strategy, "c0", [2, 8]))
    assert strategy.state.cold == {"c0": True}
    assert strategy.request_for("c0").arrays["arrays"].count_bytes() > 0
    # It stays in its group until it has trained w0, and then moves to the other one.
    assert homes(strategy)["c0"] == 1
    round_of(strategy, (0, 9))
    assert homes(strategy)["c0"] == 2
    assert strategy.models[2].vector.tolist() == pytest.approx([0.05, 2.0])
    assert strategy.state.cold == {}


@pytest.mark.parametrize("strategy", [FlexCFL, FlexCFLAsync])
def test_a_release_of_data_is_no_shift_below_a_fifth_of_all_data(strategy: type) -> None:
    method = with_clients(strategy(strategy.parameters_type(groups=2)), 4)
    method.progress.fleet.clients = {f"c{i}": Client(f"c{i}", 10) for i in range(4)}
    # A quarter of 40 samples at first, 12.5 % more later: 5 of them. Eq (9) with two labels and
    # n_i = 40: a mean difference of 5 / 2 is not beyond 0.2 / 2 · 40 = 4; with n_i = 10, what the
    # clients have at first, it would be beyond 1.
    for index in range(4):
        method.on_answer(counts_of(method, f"c{index}", [10, 0], whole=40))
    round_of(method, (2, 0), (0, 1), (4, 0.1), (0.1, 3))
    method.on_answer(counts_of(method, "c0", [15, 0], 15, whole=40))
    assert method.state.cold == {}
    # 9 more than at first: 4.5 is beyond it. Without `whole`, n_i is that of the first report.
    method.on_answer(counts_of(method, "c0", [19, 0], 19, whole=40))
    method.on_answer(counts_of(method, "c1", [13, 0], 13))
    assert method.state.cold == {"c0": True, "c1": True}


def chosen(strategy: FlexCFL, client: str, group: int) -> Answer:
    task = InFlight(7, client, 1, 0, 0, sent_at=0.0, bytes_down=0, kind="nearest-direction")
    return Answer(task, 10, {"chosen": float(group)})


def test_a_client_that_finds_its_group_itself() -> None:
    strategy = with_clients(FlexCFL(FlexCFLParameters(groups=2, placing="client")), 5)
    round_of(strategy, (2, 0), (0, 1), (4, 0.1), (0.1, 3))
    assert strategy.request_for("c0").kind == "train"
    asked = strategy.request_for("c4")
    # It is sent w0 and the directions of both groups, (3, 0.05) and (0.05, 2), for the first time.
    assert (asked.kind, asked.is_held) == ("nearest-direction", False)
    assert asked.arrays["arrays"].count_bytes() > 0
    directions = [array.numpy().tolist() for array in asked.arrays["directions"].values()]
    assert directions == [pytest.approx([3.0, 0.05]), pytest.approx([0.05, 2.0])]
    before = plain(strategy.state_dict())
    with pytest.raises(InvalidReplyError, match="none of the 2 groups"):
        strategy.on_answer(chosen(strategy, "c4", 2))
    assert plain(strategy.state_dict()) == before
    strategy.on_answer(chosen(strategy, "c4", 1))
    assert homes(strategy)["c4"] == 2
    assert "c4" not in strategy.state.cold
    # When its data change, the client still holds the directions.
    strategy.state.cold["c4"] = True
    assert strategy.request_for("c4").is_held


@pytest.mark.slow
def test_both_ways_to_place_clients_make_the_same_groups_and_models() -> None:
    def run(placing: str) -> dict[str, Any]:
        keys = {
            **{"strategy": "flexcfl", "clients": 12, "max-updates": "auto", "max-rounds": 4},
            **{"flexcfl.groups": 2, "flexcfl.pretrain": 2, "flexcfl.placing": placing},
            **{"workers": 0, "flexcfl.fraction": 0.5, "eval-every": 100, "model": "mclr"},
        }
        return simulate(RunConfig.from_mapping(keys)).summary

    server, client = run("server"), run("client")
    for key in ("accuracy", "cluster_sizes"):
        assert server[key] == client[key]
    # Eight clients find their group; their updates are not uploaded, and w0 and two directions are
    # sent down once to each.
    placed = client["bytes_by_phase"]["nearest-direction"]
    assert (placed["messages"], placed["up"]) == (8, 0)
    assert server["updates"] - client["updates"] == 8
    assert placed["down"] > 8 * 2 * server["bytes_by_phase"]["train"]["down"] / server["updates"]


@pytest.mark.parametrize(
    ("counts", "examples", "complaint"),
    [
        ([5, 5, 0], 10, "counts 3 labels, and others 2"),
        ([11, -1], 10, "negative or all 0"),
        ([0, 0], 10, "negative or all 0"),
        ([4, 4], 10, "counts 8 labels of 10 examples"),
    ],
)
def test_label_counts_that_cannot_be_are_refused(
    counts: list[int], examples: int, complaint: str
) -> None:
    strategy = with_groups()
    before = plain(strategy.state_dict())
    with pytest.raises(InvalidReplyError, match=complaint):
        strategy.on_answer(counts_of(strategy, "c0", counts, examples))
    assert plain(strategy.state_dict()) == before


def test_clients_without_label_counts_are_queried_three_times_and_delay_no_other() -> None:
    strategy = FlexCFL(FlexCFLParameters(groups=3))
    # The app does not support this query: it answers without counts.
    seen = run_on(strategy, three_groups(), 120)
    refused = [e for e in seen if isinstance(e, events.UpdateRejected)]
    assert len(refused) == 3 * 12
    assert found(strategy) == [4, 4, 4]


def test_a_late_update_of_a_client_that_has_moved_changes_no_group() -> None:
    strategy = with_groups()
    late = update(strategy, "c0", 100, 100)
    strategy.clusters.assign("c0", 2)
    models = {k: model.vector.tolist() for k, model in strategy.models.items()}
    (applied,) = strategy.applied([late])
    assert (applied.cluster, applied.staleness, applied.weight) == (2, 0, 0.0)
    assert {k: model.vector.tolist() for k, model in strategy.models.items()} == models


def test_a_group_that_is_left_empty_keeps_its_model() -> None:
    strategy = with_groups()
    for client in ("c1", "c3"):
        strategy.clusters.assign(client, 1)
    round_of(strategy, (5, 0), (5, 0), (5, 0), (5, 0))
    assert strategy.models[2].vector.tolist() == pytest.approx([0.05, 2.0])
    assert strategy.models[1].vector.tolist() == [5.0, 0.0]


def test_an_update_that_goes_where_another_group_goes_makes_its_client_cold() -> None:
    strategy = with_clients(FlexCFL(FlexCFLParameters(groups=2, detect="direction")), 4)
    round_of(strategy, (2, 0), (0, 1), (4, 0.1), (0.1, 3))
    # Group 1 is at (3, 0.05): c0 continues in its direction, c2 turns to the other's.
    one, two = update(strategy, "c0", 4, 0.1), update(strategy, "c2", 3, 4)
    strategy.applied([one, two])
    assert strategy.state.cold == {"c2": True}


def test_random_groups_for_rac() -> None:
    parameters = FlexCFLParameters(groups=2, newcomers="random", detect="none", pretrain=2)
    strategy = FlexCFL(parameters)
    seen = run_on(strategy, three_groups(), 60)
    # Four clients form the groups; the others are assigned at random, without training w0.
    applied = [e for e in seen if isinstance(e, events.UpdateApplied)]
    assert [e.weight for e in applied].count(0.0) == 0
    assert all(home is not None for home in homes(strategy).values())


def test_more_groups_than_clients_is_an_error_before_the_run() -> None:
    with pytest.raises(UserError, match="50 groups cannot be made of 40 clients"):
        FlexCFL(FlexCFLParameters(groups=50)).check(40)


def test_a_group_starts_from_the_plain_mean_and_continues_with_a_weighted_one() -> None:
    strategy = with_clients(FlexCFL(FlexCFLParameters(groups=2, detect="none")), 4)

    def round_with_many_examples_at_c0(*models: tuple[float, float]) -> None:
        examples = [30, 10, 10, 10]
        strategy.applied(
            [
                update(strategy, f"c{i}", *model, examples=count)
                for i, (model, count) in enumerate(zip(models, examples, strict=True))
            ]
        )

    # Algorithm 3: (2 + 4) / 2, regardless of the numbers of examples.
    round_with_many_examples_at_c0((2, 0), (0, 1), (4, 0), (0, 3))
    assert [strategy.models[k].vector.tolist() for k in (1, 2)] == [[3.0, 0.0], [0.0, 2.0]]
    # Algorithm 2: (30 · 2 + 10 · 4) / 40.
    round_with_many_examples_at_c0((2, 0), (0, 1), (4, 0), (0, 3))
    assert [strategy.models[k].vector.tolist() for k in (1, 2)] == [[2.5, 0.0], [0.0, 2.0]]


@pytest.mark.parametrize(
    ("steps", "settings"),
    [(50, {"local-steps": 50}), (0, {"local-steps": 0, "local-epochs": 1})],
)
def test_pretraining_takes_some_mini_batches_or_one_epoch(
    steps: int, settings: dict[str, int]
) -> None:
    parameters = FlexCFLParameters(groups=2, pretrain_steps=steps)
    assert with_clients(FlexCFL(parameters), 4).request_for("c0").settings == settings


def test_pretraining_takes_some_clients_per_group() -> None:
    strategy = FedGroup(FedGroupParameters(groups=2, pretrain=3))
    seen = run_on(strategy, three_groups(), 1)
    assert len([event for event in seen if isinstance(event, events.UpdateApplied)]) == 6
    assert list(homes(strategy).values()).count(None) == 6


def test_a_cold_client_trains_with_its_group_in_the_round_in_which_it_is_placed() -> None:
    strategy = FedGroup(FedGroupParameters(groups=3, pretrain=2))
    seen = run_on(strategy, three_groups(), 6 + 6 + 12)
    applied = [event for event in seen if isinstance(event, events.UpdateApplied)]
    # Six form the groups; in the next round the six others train w0, and then all twelve train.
    assert [event.weight > 0 for event in applied] == [True] * 6 + [False] * 6 + [True] * 12
    assert len({event.client for event in applied[12:]}) == 12


@pytest.mark.parametrize(("measure", "pretrain"), [("edc", 20), ("madc", 20), ("edc", 2)])
def test_the_groups_are_found_and_reported(measure: str, pretrain: int) -> None:
    parameters = FedGroupParameters(groups=3, measure=measure, pretrain=pretrain)
    strategy = FedGroup(parameters)
    seen = run_on(strategy, three_groups())
    assert found(strategy) == [4, 4, 4]
    assert last_accuracy(seen) > 0.9
    (split,) = placed(seen, ClusterChange.SPLIT)
    grouped = [client for client, weights in split.memberships.items() if weights]
    assert len(grouped) == min(12, 3 * pretrain)
    assigned = [c for one in placed(seen, ClusterChange.ASSIGN) for c in one.memberships]
    assert sorted({*grouped, *assigned[-(12 - len(grouped)) :]}) == sorted(
        f"c{index}" for index in range(12)
    )


@pytest.mark.parametrize("detect", ["direction", "none"])
def test_it_can_be_restored(detect: str) -> None:
    check_it_can_be_restored(FlexCFL, FlexCFLParameters(detect=detect))
