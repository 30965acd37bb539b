"""FedGroup: both measures, both cold starts, averaging across groups, groups on a grid."""

import numpy as np
import pytest
from clustered import (
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
from raceme.strategies.fedgroup import group_by_edc, madc, mix_groups

from raceme.clustering.model import Model
from raceme.protocol import events
from raceme.protocol.events import ClusterChange
from raceme.server.fleet import Client
from raceme.strategies import FedGroup, FedGroupParameters


def test_madc_by_hand() -> None:
    similarity = np.array(
        [[1.0, 0.9, 0.2, 0.1], [0.9, 1.0, 0.3, 0.1], [0.2, 0.3, 1.0, 0.8], [0.1, 0.1, 0.8, 1.0]]
    )
    distances = madc(similarity)
    # (0, 1): z = 2 and 3, (|0.2 − 0.3| + |0.1 − 0.1|) / 2; (0, 2): z = 1 and 3,
    # (|0.9 − 0.3| + |0.1 − 0.8|) / 2; (2, 3): z = 0 and 1, (|0.2 − 0.1| + |0.3 − 0.1|) / 2.
    assert distances[0, 1] == pytest.approx(0.05)
    assert distances[0, 2] == pytest.approx(0.65)
    assert distances[2, 3] == pytest.approx(0.15)
    assert np.array_equal(distances, distances.T)
    assert distances.diagonal().tolist() == [0.0] * 4
    assert madc(np.ones((2, 2))).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_edc_groups_by_direction_whatever_the_length() -> None:
    rng = np.random.default_rng(0)
    directions = np.eye(3, 50)
    lengths = rng.uniform(0.1, 10.0, size=12)
    deltas = np.stack(
        [lengths[i] * (directions[i % 3] + 0.05 * rng.normal(size=50)) for i in range(12)]
    )
    assert group_by_edc(deltas.astype(np.float32), 3, seed=0).tolist() == [0, 1, 2] * 4


def test_a_share_of_the_other_groups_by_hand() -> None:
    models = [Model(np.array(values, np.float32)) for values in ((3, 4), (0, 2), (0, 0))]
    mix_groups(models, eta_g=0.5)
    # Lengths 5, 2 and, of a model of zeros, as if 1; unit vectors (0.6, 0.8), (0, 1) and (0, 0).
    # (3, 4) + 0.5 · (0, 1) over 1 + 0.5 (1/2 + 1) = 1.75; (0, 2) + 0.5 · (0.6, 0.8) over
    # 1 + 0.5 (1/5 + 1) = 1.6; 0.5 · (0.6, 1.8) over 1 + 0.5 (1/5 + 1/2) = 1.35.
    assert models[0].vector.tolist() == pytest.approx([3.0 / 1.75, 4.5 / 1.75])
    assert models[1].vector.tolist() == pytest.approx([0.3 / 1.6, 2.4 / 1.6])
    assert models[2].vector.tolist() == pytest.approx([0.3 / 1.35, 0.9 / 1.35])


@pytest.mark.parametrize("measure", ["edc", "madc"])
def test_cold_starts_by_hand(measure: str) -> None:
    strategy = with_clients(FedGroup(FedGroupParameters(groups=2, measure=measure)), 6)
    # Group cold start with c0 … c3; c4 and c5 stay cold, and are sent w0 again.
    round_of(strategy, (2, 0), (0, 1), (4, 0.1), (0.1, 3))
    assert homes(strategy) == {"c0": 1, "c1": 2, "c2": 1, "c3": 2, "c4": 3, "c5": 3}
    assert strategy.models[1].vector.tolist() == pytest.approx([3.0, 0.05])
    assert strategy.models[3].vector.tolist() == [0.0, 0.0]
    # Client cold start: c4's update has a cosine of 0.995 with the first direction. What it
    # trained is no part of the mean: (5 + 7) / 2.
    applied = round_of(strategy, (5, 0), (0, 5), (7, 0), (0, 5), (1, 0.1))
    assert strategy.clusters.main("c4") == 1
    assert [a.weight for a in applied] == [0.5, 0.5, 0.5, 0.5, 0.0]
    assert strategy.models[1].vector.tolist() == [6.0, 0.0]
    # When nobody is cold w0 is put away, until a newcomer needs it.
    round_of(strategy, (5, 0), (0, 5), (7, 0), (0, 5), (6, 0), (-1, 2))
    assert strategy.clusters.main("c5") == 2
    assert set(strategy.models) == {1, 2}
    strategy.add_client(Client("c6", num_examples=10))
    assert strategy.clusters.main("c6") == 4
    assert strategy.models[4].vector.tolist() == [0.0, 0.0]


def test_a_group_starts_from_the_plain_mean_and_continues_with_a_weighted_one() -> None:
    strategy = with_clients(FedGroup(FedGroupParameters(groups=2)), 4)

    def round_with_many_examples_at_c0(*models: tuple[float, float]) -> None:
        examples = [30, 10, 10, 10]
        strategy.aggregate(
            [
                update(strategy, f"c{i}", *model, examples=count)
                for i, (model, count) in enumerate(zip(models, examples, strict=True))
            ]
        )

    # Algorithm 3: (2 + 4) / 2, however many examples c0 has.
    round_with_many_examples_at_c0((2, 0), (0, 1), (4, 0), (0, 3))
    assert [strategy.models[k].vector.tolist() for k in (1, 2)] == [[3.0, 0.0], [0.0, 2.0]]
    # Algorithm 2: (30 · 2 + 10 · 4) / 40.
    round_with_many_examples_at_c0((2, 0), (0, 1), (4, 0), (0, 3))
    assert [strategy.models[k].vector.tolist() for k in (1, 2)] == [[2.5, 0.0], [0.0, 2.0]]


def test_pretraining_takes_some_clients_per_group() -> None:
    strategy = FedGroup(FedGroupParameters(groups=2, pretrain=3))
    seen = run_on(strategy, three_groups(), 1)
    assert len([event for event in seen if isinstance(event, events.UpdateApplied)]) == 6
    assert list(homes(strategy).values()).count(3) == 6


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
    moved = [client for one in placed(seen, ClusterChange.MOVE) for client in one.memberships]
    assert sorted(grouped + moved) == sorted(f"c{index}" for index in range(12))
    # w0 is a cluster for as long as somebody is cold.
    assert [len(placed(seen, kind)) for kind in (ClusterChange.FOUND, ClusterChange.RETIRE)] == (
        [1, 1] if pretrain == 2 else [0, 0]
    )


def test_it_can_be_restored() -> None:
    check_it_can_be_restored(FedGroup)
