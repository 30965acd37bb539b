"""CFL-GP: running means, projections and the number of groups by hand."""

from typing import Any

import numpy as np
import pytest
from clustered import check_it_can_be_restored, found, homes, run_on, three_groups, with_clients

from raceme.core.errors import UserError
from raceme.core.requests import Answer, InFlight, InvalidReplyError
from raceme.strategies import CFLGP, CFLGPParameters
from raceme.strategies.profiles import GRADIENT
from raceme.strategies.profiles.cfl_gp import (
    found_groups,
    grouped,
    main_points,
    profile_rows,
    running_share,
)


def answer(made: CFLGP, client: str, *gradient: float, model: int = 0, version: int = 0) -> Answer:
    task = InFlight(0, client, model, version, 0, sent_at=0.0, bytes_down=0, kind=GRADIENT)
    return Answer(task, 10, numbers={GRADIENT: np.array(gradient, np.float32)})


def test_the_share_of_a_new_gradient_by_round() -> None:
    # M = 2, P = 2: (r + 1) / 4 passes 1 at r = 3 and 2 at r = 7.
    shares = [running_share(number, 2, 2) for number in range(8)]
    assert shares == pytest.approx([1, 1, 1, 0.5, 0.5, 0.5, 0.5, 1 / 3])


def test_a_block_is_a_running_mean() -> None:
    made = with_clients(CFLGP(CFLGPParameters(k=2)), 3)
    made.on_answer(answer(made, "c0", 4, 0))
    assert made.state.profiles["c0"][0].tolist() == [4, 0]
    made.scheduling.state.number = 4
    made.on_answer(answer(made, "c0", 0, 2))
    # β = 1 / (⌊5 / 4⌋ + 1).
    assert made.state.profiles["c0"][0].tolist() == [2, 1]
    made.on_answer(answer(made, "c0", 6, 6, model=1))
    assert profile_rows([made.state.profiles["c0"]], 2).tolist() == [[2, 1, 6, 6]]
    assert profile_rows([{1: np.array([1.0, 2.0], np.float32)}], 2).tolist() == [[0, 0, 1, 2]]


def test_points_are_the_projections_on_the_left_singular_vectors() -> None:
    # Gᵀ has orthogonal rows with the lengths 5, 2 and 0: the vectors are these rows' directions.
    points, values = main_points(np.array([[3.0, 4.0, 0.0], [0.0, 0.0, 2.0], [0.0, 0.0, 0.0]]))
    assert values == pytest.approx([5, 2, 0])
    assert np.abs(points[:, :2]) == pytest.approx(np.array([[5, 0], [0, 2], [0, 0]]))


def test_three_clients_in_two_groups_move_together_and_models_stay() -> None:
    made = with_clients(CFLGP(CFLGPParameters(k=2)), 3)
    assert set(homes(made).values()) == {0}
    for client, gradient in (("c0", (1, 0.1)), ("c1", (0, 2)), ("c2", (1.1, 0))):
        made.on_answer(answer(made, client, *gradient))
    made._cluster(0)
    # The larger part, two of three clients, keeps cluster 0.
    assert homes(made) == {"c0": 0, "c1": 1, "c2": 0}
    assert (made.state.criterion, made.state.clustered) == (1, 0)
    made._cluster(2)
    assert homes(made) == {"c0": 0, "c1": 1, "c2": 0}
    assert made.state.criterion == 0


def test_the_criterion_may_stay_the_first() -> None:
    made = with_clients(CFLGP(CFLGPParameters(k=2, criterion="first")), 2)
    made.on_answer(answer(made, "c0", 1, 0))
    made.on_answer(answer(made, "c1", 0, 1))
    made._cluster(0)
    assert made.state.criterion == 0


def test_an_unknown_number_of_groups_is_found() -> None:
    rng = np.random.default_rng(0)
    centres = 5.0 * np.eye(3, 6)
    profiles = np.vstack([centre + 0.1 * rng.normal(size=(4, 6)) for centre in centres])
    assert found_groups(profiles, 0).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert grouped(profiles, 3, 0).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert grouped(profiles[:2], 3, 0).tolist() == [0, 1]


def test_with_an_unknown_number_there_is_one_model_until_the_warm_up_is_over() -> None:
    made = with_clients(CFLGP(CFLGPParameters(k=0, warmup=3)), 6)
    for index in range(6):
        gradient = (5.0, 0.1 * index) if index % 2 else (0.1 * index, 5.0)
        made.on_answer(answer(made, f"c{index}", *gradient))
    made._cluster(1)
    assert len(made.models) == 1
    made._cluster(2)
    of = homes(made)
    assert len(set(of.values())) == 2
    assert of["c0"] == of["c2"] == of["c4"]


@pytest.mark.filterwarnings("error")
def test_clients_that_are_all_alike_are_one_group() -> None:
    made = with_clients(CFLGP(CFLGPParameters(k=0, warmup=3)), 6)
    for index in range(6):
        made.on_answer(answer(made, f"c{index}", 0.0, 0.0))
    for number in (2, 3):
        made._cluster(number)
        assert list(made.models) == [0]
    assert grouped(np.zeros((4, 6)), 3, 0).tolist() == [0] * 4


@pytest.mark.parametrize("stated", [(1.0,), (1.0, 2.0, 3.0), (3e38, 3e38)])
def test_what_is_no_gradient_of_this_model_is_refused(stated: Any) -> None:
    made = with_clients(CFLGP(), 1)
    with pytest.raises(InvalidReplyError):
        made.on_answer(answer(made, "c0", *stated))
    with pytest.raises(InvalidReplyError, match="split meanwhile"):
        made.on_answer(answer(made, "c0", 1, 1, model=99))
    assert not made.state.profiles


def test_a_late_gradient_counts_and_asks_for_no_other_unless_the_model_has_moved() -> None:
    made = with_clients(CFLGP(), 2)
    made.on_answer(answer(made, "c0", 1, 0))
    made.models[0].move(np.ones(2, np.float32))
    made.on_answer(answer(made, "c1", 1, 0))
    assert not made._should_answer("c0")
    assert made._should_answer("c1")
    assert set(made.state.profiles) == {"c0", "c1"}


def test_one_percent_of_the_weights_is_kept() -> None:
    made = with_clients(CFLGP(CFLGPParameters(profile="sampled")), 1, size=300)
    made.on_answer(answer(made, "c0", *range(300)))
    assert made.state.profiles["c0"][0].tolist() == made.state.coordinates.tolist()
    assert len(made.state.coordinates) == 3


def test_more_clusters_than_clients_are_an_error() -> None:
    with pytest.raises(UserError, match="4 clusters cannot be made of 3 clients"):
        CFLGP().check(3)
    CFLGP().check(4)


def test_the_groups_of_a_grid_are_found() -> None:
    made = CFLGP(CFLGPParameters(k=3))
    run_on(made, three_groups(), 48)
    assert found(made) == [4, 4, 4]


def test_it_can_be_restored() -> None:
    check_it_can_be_restored(CFLGP)
