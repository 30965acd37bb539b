"""PACFL: angles and linkage by hand, queried clients, and newcomers."""

from typing import Any

import numpy as np
import pytest
from clustered import check_it_can_be_restored, found, homes, run_on, three_groups, with_clients

from raceme.core.clusters import Clusters, Model
from raceme.core.requests import Answer, InFlight, InvalidReplyError
from raceme.strategies import PACFL, PACFLParameters
from raceme.strategies.profiles import PRINCIPAL_DIRECTIONS
from raceme.strategies.profiles.pacfl import agglomerated, least_angle
from raceme.strategies.shared import kept_homes, regroup


def column(degrees: float) -> np.ndarray:
    """A direction in the plane."""
    return np.array([[np.cos(np.radians(degrees))], [np.sin(np.radians(degrees))]], np.float32)


def answer(client: str, directions: Any) -> Answer:
    task = InFlight(0, client, 0, 0, 0, sent_at=0.0, bytes_down=0, kind=PRINCIPAL_DIRECTIONS)
    return Answer(task, 10, numbers={PRINCIPAL_DIRECTIONS: directions})


def test_the_least_angle_of_two_subspaces_by_hand() -> None:
    one = np.hstack([column(0), column(90)])
    # 30° from the first and 60° from the second direction: the smallest entry counts.
    assert least_angle(one, column(30)) == pytest.approx(30, abs=1e-4)
    # The opposite direction is far away, because entries are signed.
    assert least_angle(column(0), column(170)) == pytest.approx(170, abs=1e-3)


ANGLES = np.array([[0, 2, 9, 9], [2, 0, 5, 5], [9, 5, 0, 1], [9, 5, 1, 0]], float)


@pytest.mark.parametrize(("how", "joined"), [("minimum", 5.0), ("average", 7.0), ("maximum", 9.0)])
def test_both_sides_of_beta(how: str, joined: float) -> None:
    # {0, 1} and {2, 3} first; these are 5 apart at least, (9 + 5) / 2 in the mean, 9 at most.
    assert agglomerated(ANGLES, joined, how).tolist() == [0, 0, 0, 0]
    assert agglomerated(ANGLES, joined - 0.01, how).tolist() == [0, 0, 1, 1]
    assert agglomerated(ANGLES, 1.0, how).tolist() == [0, 1, 2, 2]
    assert agglomerated(ANGLES, 0.99, how).tolist() == [0, 1, 2, 3]


def test_the_average_is_that_of_two_rows_whatever_their_sizes() -> None:
    # {0, 1} joins 2 at 2: the mean of the rows of 0 and 1 for 3 is 6, and with 2's, 4, it is (6 +
    # 4) / 2 = 5, not (6 + 6 + 4) / 3.
    angles = np.array([[0, 1, 2, 6], [1, 0, 2, 6], [2, 2, 0, 4], [6, 6, 4, 0]], float)
    assert agglomerated(angles, 5.0, "average").tolist() == [0, 0, 0, 0]
    assert agglomerated(angles, 4.99, "average").tolist() == [0, 0, 0, 1]


def test_a_number_of_clusters_instead_of_beta() -> None:
    assert agglomerated(ANGLES, 0.0, "average", clusters=2).tolist() == [0, 0, 1, 1]
    assert agglomerated(ANGLES[:1, :1], 5.0, "average").tolist() == [0]


def test_clients_are_clustered_and_a_newcomer_joins_the_nearest() -> None:
    made = with_clients(PACFL(PACFLParameters(beta=5)), 3)
    for client, degrees in (("c0", 10), ("c1", 12), ("c2", 80)):
        made.on_answer(answer(client, column(degrees)))
    made._cluster()
    of = homes(made)
    assert of["c0"] == of["c1"] != of["c2"]
    made.on_join(_client("c3"))
    made.on_answer(answer("c3", column(79)))
    made._cluster()
    assert homes(made)["c3"] == of["c2"]
    assert homes(made)["c0"] == of["c0"]
    assert len(made.models) == 2


def _client(name: str) -> Any:
    from raceme.core.clients import Client

    return Client(name, num_examples=10)


@pytest.mark.parametrize(
    "stated",
    [
        None,
        np.ones((2, 1), np.float32),
        np.array([[1.5], [0]], np.float32),
        np.ones(2, np.float32),
        np.empty((2, 0), np.float32),
    ],
)
def test_what_are_no_directions_is_refused(stated: Any) -> None:
    made = with_clients(PACFL(), 1)
    with pytest.raises(InvalidReplyError):
        made.on_answer(answer("c0", stated) if stated is not None else Answer(_task(), 10))
    assert not made.state.directions


def _task() -> InFlight:
    return InFlight(0, "c0", 0, 0, 0, sent_at=0.0, bytes_down=0, kind=PRINCIPAL_DIRECTIONS)


def test_clients_that_lie_about_the_size_of_samples_are_left_out() -> None:
    made = with_clients(PACFL(), 3)
    made.on_answer(answer("c0", np.eye(5, 1, dtype=np.float32)))
    made.on_answer(answer("c1", column(0)))
    made.on_answer(answer("c2", column(1)))
    made._cluster()
    assert homes(made)["c0"] is None
    assert homes(made)["c1"] == homes(made)["c2"]


def test_the_groups_of_a_grid_are_found_before_anybody_trains() -> None:
    made = PACFL(PACFLParameters(beta=20))
    run_on(made, three_groups(), 24)
    assert found(made) == [4, 4, 4]


def test_it_can_be_restored() -> None:
    check_it_can_be_restored(PACFL)


# Clustering again.


def test_labels_are_named_so_that_most_clients_stay() -> None:
    clients = ["a", "b", "c", "d", "e"]
    homes = {"a": 7, "b": 7, "c": 7, "d": 3, "e": 3}
    # Label 0 has one client each of clusters 7 and 3, label 1 two of 7: so 1 becomes 7, and 0 is 3.
    assert kept_homes(clients, np.array([0, 1, 1, 0, 2]), homes) == {0: 3, 1: 7}


def test_regrouping_founds_copies_and_gives_empty_clusters_up() -> None:
    clusters = Clusters({0: Model(np.zeros(2, np.float32)), 1: Model(np.ones(2, np.float32))})
    for client, home in (("a", 0), ("b", 1), ("c", 1), ("d", 1)):
        clusters.assign(client, home)
    regroup(clusters, ["a", "b", "c", "d"], np.array([0, 0, 1, 0]))
    # Cluster 1's larger part keeps it; c is alone in a copy of it, and cluster 0 is empty.
    assert {client: clusters.main(client) for client in "abcd"} == {"a": 1, "b": 1, "c": 2, "d": 1}
    assert sorted(clusters.models) == [1, 2]
    assert clusters.models[2].vector.tolist() == [1, 1]
