"""The staleness of an update, also if its cluster was split or merged meanwhile."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from clustered import NUMBERS, at_version, run_on, three_groups

from raceme.core import events
from raceme.core.clients import Client
from raceme.core.clusters import Clusters, Model
from raceme.core.errors import UserError
from raceme.core.messages import Vector
from raceme.core.requests import InFlight, Outcome, Outcomes, Update
from raceme.core.strategy import Method


class Mixing(Method):
    """Mixes every update into its client's cluster, with a weight that decreases with staleness."""

    def initialize(self, vector: Vector) -> None:
        self.clusters = Clusters({k: Model(vector.copy()) for k in range(3)})
        self.state = self.state_type()

    def on_update(self, update: Update) -> Outcome:
        home = self.clusters.main(update.task.client)
        weight = 0.5 * (update.staleness + 1) ** -0.5
        self.models[home].mix(update.vector, weight)
        return Outcome(home, update.staleness, weight)


class Moving(Mixing):
    """Moves a client to the next cluster, whose model has another age, after every third update."""

    def aggregate(self, updates: Sequence[Update]) -> Outcomes:
        outcomes = super().aggregate(updates)
        if self.progress.updates % 3 == 0:
            client = list(self.clusters.members)[self.progress.updates // 3 % 12]
            cluster = self.clusters.main(client) + 1
            self.clusters.assign(client, 0 if cluster not in self.models else cluster)
        return outcomes


def method(*versions: int, updates: int = 40) -> Mixing:
    """Three clusters with models of these versions, and two clients in the first."""
    made = Mixing()
    made.initialize(np.zeros(2, np.float32))
    for cluster, version in enumerate(versions):
        at_version(made, version, cluster)
    for client in ("c0", "c1"):
        made.on_join(Client(client, num_examples=10))
        made.clusters.assign(client, 0)
    made.progress.updates = updates
    return made


def sent(version: int, cluster: int = 0, updates: int = 0, named: bool = False) -> Update:
    candidates = {cluster: version} if named else {}
    task = InFlight(next(NUMBERS), "c0", cluster, version, updates, 0.0, 0, candidates)
    return Update(task, np.ones(2, np.float32), 10, 0.0)


def staleness(made: Mixing, update: Update) -> int:
    return made.received(update).staleness


def test_staleness_counts_the_changes_of_the_clients_cluster() -> None:
    made = method(7)
    assert staleness(made, sent(version=4)) == 3
    assert made.received(sent(version=4, updates=9)).age == 31


def test_all_updates_count_for_a_moved_client() -> None:
    made = method(60, 4)
    update = sent(version=60, updates=30)
    made.clusters.assign("c0", 1)
    # The difference of the clusters' versions would be 4 − 60 = −56.
    assert staleness(made, update) == 10


def test_parts_of_a_cluster_continue_its_model() -> None:
    made = method(7)
    update = sent(version=5)
    children = made.clusters.split(0, [["c0"], ["c1"]])
    made.models[children[0]].mix(update.vector, 0.5)
    assert staleness(made, update) == 3


def test_a_mean_of_models_continues_none_and_one_that_is_kept_does() -> None:
    made = method(7, 9)
    update = sent(version=5, updates=38)
    made.clusters.merge([0, 1])
    assert staleness(made, update) == 2
    made = method(7, 9)
    made.clusters.merge([0, 1], keep=0)
    assert staleness(made, sent(version=4, updates=38)) == 3
    assert staleness(made, sent(version=4, cluster=1, updates=38)) == 2


def test_a_model_that_the_request_named_counts_wherever_the_client_is() -> None:
    made = method(7, 9)
    assert staleness(made, sent(version=3, cluster=1, named=True)) == 6


def test_all_updates_count_for_a_model_that_was_given_up() -> None:
    made = method(7, 9)
    update = sent(version=3, cluster=1, updates=35, named=True)
    made.clusters.retire(1)
    assert staleness(made, update) == 5


def test_a_client_without_a_cluster_has_trained_the_largest() -> None:
    made = method(7, 9)
    made.clusters.unassign(["c0"])
    assert staleness(made, sent(version=5)) == 2


def test_updates_processed_together_count_each_other() -> None:
    made = method(7)
    outcomes = made.applied([sent(version=7), sent(version=7)])
    assert [outcome.staleness for outcome in outcomes] == [0, 1]


def test_a_negative_staleness_is_refused_where_it_enters() -> None:
    made = method(2)
    with pytest.raises(UserError, match=r"Mixing: .* cluster 0 has a staleness of -3: .* c0"):
        made.received(sent(version=5))


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (
            Outcome(1, -56, 0.5),
            r"Stating returned Outcome\(cluster=1, staleness=-56, .*its staleness",
        ),
        (Outcome(0, math.inf, 0.5), "its staleness must be"),  # type: ignore[arg-type]
        (Outcome(0, 0, -0.1), "its weight must be a finite number that is not negative"),
        (Outcome(2, 0, math.nan), r"cluster=2, staleness=0, weight=nan\): its weight must"),
        (Outcome(0, 0, math.inf), "its weight must"),
        (Outcome(0, 0, None), "its weight must"),  # type: ignore[arg-type]
        (Outcome(3, 0, 0.5), r"there is no such cluster, only \[0, 1, 2\]"),
        (Outcome(-1, 0, 0.5), "there is no such cluster"),
    ],
)
def test_an_impossible_outcome_is_refused(outcome: Outcome, message: str) -> None:
    class Stating(Mixing):
        def on_update(self, update: Update) -> Outcome:
            return outcome

    made = Stating()
    made.initialize(np.zeros(2, np.float32))
    with pytest.raises(UserError, match=message):
        made.applied([sent(version=0)])


def test_each_update_needs_an_outcome() -> None:
    class Dropping(Mixing):
        def aggregate(self, updates: Sequence[Update]) -> Outcomes:
            return super().aggregate(updates[1:])

    made = Dropping()
    made.initialize(np.zeros(2, np.float32))
    with pytest.raises(
        UserError,
        match=r"Dropping\.aggregate\(\) must return .* an Outcome for each update\.number",
    ):
        made.applied([sent(version=0), sent(version=0)])


def test_a_method_that_moves_clients_never_sees_a_staleness_below_zero() -> None:
    seen = run_on(Moving(), three_groups(), 240)
    applied = [event for event in seen if isinstance(event, events.UpdateApplied)]
    assert len(applied) == 240
    assert len({event.cluster for event in applied}) == 3
    assert all(0 <= event.staleness < 240 and 0 < event.weight <= 0.5 for event in applied)
