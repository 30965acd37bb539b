"""FLUX: end of the warm-up, scaling, elbow and density groups by hand, newcomers."""

from typing import Any

import numpy as np
import pytest
from clustered import check_it_can_be_restored, found, homes, run_on, three_groups, with_clients

from raceme.core.clients import Client
from raceme.core.messages import ACCURACIES, SCORES
from raceme.core.requests import Answer, InFlight, InvalidReplyError
from raceme.strategies import FLUX, FLUXParameters
from raceme.strategies.profiles import DESCRIPTORS, LATENT_MOST
from raceme.strategies.profiles.flux import density_groups, elbow, gains_little, scaled


def answer(client: str, kind: str, numbers: Any = None, **metrics: float) -> Answer:
    task = InFlight(0, client, 0, 0, 0, sent_at=0.0, bytes_down=0, kind=kind)
    stated = {name.replace("_", "-"): value for name, value in metrics.items()}
    return Answer(task, 10, stated, {} if numbers is None else numbers)


def described(client: str, *means: float) -> Answer:
    """Descriptors of one dimension and one class: overall and class means, deviation 0."""
    values = np.zeros((2, 2, 1), np.float32)
    values[:, 0, 0] = means
    return answer(client, DESCRIPTORS, {DESCRIPTORS: values})


def test_a_model_that_gains_little_is_ripe_on_both_sides() -> None:
    assert not gains_little([0.5], 0.0625)
    assert not gains_little([0.5, 0.5625], 0.0625)
    assert gains_little([0.5, 0.5624], 0.0625)
    assert gains_little([0.5, 0.4], 0.0625)


@pytest.mark.parametrize(
    ("number", "gain", "ripe"), [(2, 0.0, False), (3, 0.0, True), (3, 0.1, False)]
)
def test_the_first_round_after_which_it_may_be_ripe(number: int, gain: float, ripe: bool) -> None:
    made = with_clients(FLUX(), 1)
    made.state.accuracies = [0.5]
    made.scheduling.state.number = number
    made.on_answer(answer("c0", SCORES, {ACCURACIES: np.array([[0.5 + gain]], np.float32)}))
    assert made._is_warm_up_over() == ripe
    assert made.state.accuracies == pytest.approx([0.5, 0.5 + gain])


@pytest.mark.parametrize(("number", "ripe"), [(7, False), (8, True)])
def test_after_a_share_of_the_rounds_it_is_taken_for_ripe(number: int, ripe: bool) -> None:
    made = with_clients(FLUX(), 2)
    # Twenty updates of two clients are ten rounds, of which 80 % are eight.
    made.planned_updates = 20
    made.scheduling.state.number = number
    made.state.accuracies = [0.1, 0.9]
    made.state.scored = number
    made.state.accuracies = [0.1]
    assert made._is_warm_up_over() == ripe


def test_a_fixed_warm_up_asks_for_no_scores() -> None:
    made = with_clients(FLUX(FLUXParameters(warmup=2)), 1)
    assert SCORES not in made.needs.kinds
    made.scheduling.state.number = 1
    assert not made._queries_before_round()
    assert not made._is_warm_up_over()
    made.scheduling.state.number = 2
    assert made._is_warm_up_over()


def test_blocks_are_scaled_one_by_one() -> None:
    two = np.array([[[[0.0, 4.0], [1.0, 1.0]]], [[[8.0, 2.0], [1.0, 1.0]]]])
    low, high = two.min(axis=(0, 3)), two.max(axis=(0, 3))
    # Means from 0 to 8; equal deviations become 0.
    assert scaled(two, low, high).tolist() == [
        [[[0.0, 0.5], [0.0, 0.0]]],
        [[[1.0, 0.25], [0.0, 0.0]]],
    ]


def test_the_elbow_by_hand() -> None:
    # The line from 1 to 10 passes 1, 4, 7, 10: the curve is 0, 3, 5 and 0 below it.
    assert elbow(np.array([1.0, 1.0, 2.0, 10.0])) == 2.0
    assert elbow(np.array([3.0, 3.0])) == 3.0


def test_density_groups_on_both_sides_of_epsilon() -> None:
    # Nearest neighbours at 1, 1, 2, 2, 30: the line passes 1, 8.25, 15.5, 22.75, 30; ε = 2.
    points = np.array([[0.0], [1.0], [10.0], [12.0], [42.0]])
    assert density_groups(points, 1.0).tolist() == [0, 0, 1, 1, 2]
    # Just below that, the pair at 2 is noise, and each of its clients a group of its own.
    assert density_groups(points, 0.99).tolist() == [0, 0, 1, 2, 3]
    assert density_groups(points[:1], 1.0).tolist() == [0]
    assert density_groups(np.zeros((3, 2)), 1.0).tolist() == [0, 0, 0]


def ready(clients: int) -> FLUX:
    """A strategy after its warm-up, whose clients have reported their largest feature."""
    made: FLUX = with_clients(FLUX(FLUXParameters(dimensions=1)), clients)
    made.state.common = made.models[0].vector.copy()
    made._begin("range")
    for index in range(clients):
        made.on_answer(answer(f"c{index}", LATENT_MOST, latent_most=float(-index)))
    assert made.state.most == 0.0
    assert made._advance()
    return made


def test_groups_and_a_newcomer_without_labels_by_hand() -> None:
    made = ready(4)
    for client, means in (("c0", (0, 0)), ("c1", (1, 0)), ("c2", (9, 4)), ("c3", (10, 4))):
        made.on_answer(described(client, *means))
    assert made._advance()
    of = homes(made)
    assert of["c0"] == of["c1"] != of["c2"] == of["c3"]
    assert made.state.phase == "newcomers"
    # Scaled by 10: centroids at 0.05 and 0.95. A newcomer's class statistics are ignored.
    assert made.state.centroids[of["c0"]].tolist() == pytest.approx([0.05, 0])
    made.on_join(Client("c4", num_examples=10))
    assert made._should_answer("c4")
    assert not made._should_answer("c0")
    made.on_answer(described("c4", 5.1, 0.0))
    assert homes(made)["c4"] == of["c2"]
    made.on_join(Client("c5", num_examples=10))
    made.on_answer(described("c5", 4.9, 4.0))
    assert homes(made)["c5"] == of["c0"]


def test_clients_with_another_number_of_classes_are_left_out() -> None:
    made = ready(3)
    made.on_answer(answer("c0", DESCRIPTORS, {DESCRIPTORS: np.zeros((9, 2, 1), np.float32)}))
    made.on_answer(described("c1", 0, 0))
    made.on_answer(described("c2", 0, 0))
    made._cluster()
    assert homes(made)["c0"] is None
    assert homes(made)["c1"] is not None


@pytest.mark.parametrize(
    "bad",
    [
        answer("c0", SCORES),
        answer("c0", SCORES, {ACCURACIES: np.array([[1.5]], np.float32)}),
        answer("c0", LATENT_MOST),
        answer("c0", LATENT_MOST, latent_most=float("nan")),
        answer("c0", DESCRIPTORS, {DESCRIPTORS: np.zeros((3, 2, 5), np.float32)}),
        answer("c0", DESCRIPTORS, {DESCRIPTORS: np.zeros((3, 3, 1), np.float32)}),
    ],
)
def test_what_was_not_asked_for_is_refused(bad: Answer) -> None:
    made = with_clients(FLUX(FLUXParameters(dimensions=1)), 1)
    with pytest.raises(InvalidReplyError):
        made.on_answer(bad)


def test_the_groups_of_a_grid_are_found() -> None:
    # At the elbow itself, most clients of these tight groups would be noise.
    made = FLUX(FLUXParameters(reach=3.0))
    run_on(made, three_groups(), 72)
    assert found(made) == [4, 4, 4]


def test_it_can_be_restored() -> None:
    check_it_can_be_restored(FLUX)
