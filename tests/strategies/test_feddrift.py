"""FedDrift in rounds: detection, isolation and merging on clients by hand, and runs with drift."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clustered import check_it_can_be_restored, homes, with_clients

from raceme.core.clients import Client, Idle
from raceme.core.config import RunConfig
from raceme.core.messages import ACCURACIES, LOSSES, SCORES
from raceme.core.requests import Answer, InFlight, InvalidReplyError, Update
from raceme.core.scheduling import SelectionContext
from raceme.datasets import true_groups
from raceme.runs.experiment import simulate
from raceme.strategies import (
    FedDrift,
    FedDriftEager,
    FedDriftEagerParameters,
    FedDriftParameters,
    Method,
)
from raceme.strategies.feddrift import ConceptAssignments

Losses = dict[str, dict[int, float]]


class Bench:
    """A method whose clients report given losses, with data that change when a test says so."""

    def __init__(self, method: Any, clients: int) -> None:
        self.method, self.step, self.number = method, 0, 0
        method.step_of = lambda client: self.step
        fleet = method.progress.fleet
        fleet.clients = {f"c{i}": Client(f"c{i}", 10, node_id=i) for i in range(clients)}
        with_clients(method, clients)
        self.idle = Idle({}, fleet.clients)
        for client in fleet.clients:
            self.idle.add(client)

    @property
    def concepts(self) -> ConceptAssignments:
        concepts: ConceptAssignments = self.method.state.concepts
        return concepts

    def hand_out(self) -> list[Any]:
        """Return the work that the method requests."""
        context = SelectionContext(0.0, self.method.progress.fleet, self.idle, self.method.rng)
        return list(self.method.requests(context))

    def open_task(self, work: Any) -> InFlight:
        """Open the task of a request, like the loop."""
        models = self.method.models
        asked = work.models or (self.method.clusters.main(work.client),)
        task = InFlight(
            number=self.number,
            client=work.client,
            cluster=asked[0] if len(asked) == 1 else self.method.clusters.main(work.client),
            version=models[asked[0]].version,
            updates=self.method.progress.updates,
            sent_at=0.0,
            bytes_down=0,
            candidates={model: models[model].version for model in asked},
            kind=work.kind,
            step=self.step,
        )
        self.number += 1
        self.method.open_task(task)
        self.method.scheduling.sent(task, 0.0)
        self.idle.remove(work.client)
        return task

    def score(self, task: InFlight, losses: dict[int, float]) -> None:
        """Answer with the same losses of the models for all requested steps."""
        steps = len(self.concepts.asked[task.client])
        rows = np.array([[losses[model]] * steps for model in task.candidates], np.float32)
        numbers = {ACCURACIES: 1 - rows, LOSSES: 2 * rows}
        self.method.on_answer(Answer(task, 10, numbers=numbers))
        self.method.close_task(task)
        self.method.scheduling.lost(task, 0.0)
        self.idle.add(task.client)

    def ask(self, losses: Losses) -> None:
        """Answer all loss requests; clients without losses fail to measure."""
        for work in self.hand_out():
            assert work.kind == SCORES
            task = self.open_task(work)
            if task.client in losses:
                self.score(task, losses[task.client])
            else:
                self.method.close_task(task)
                self.method.scheduling.lost(task, 0.0)
                self.idle.add(task.client)

    def round(self, value: float = 0.0) -> list[tuple[str, int, list[int]]]:
        """Play a round; return client, model and steps of each training, in order of sending."""
        done: list[tuple[str, int, list[int]]] = []
        number = self.method.scheduling.state.number
        while work := self.hand_out():
            if self.method.scheduling.state.number > number + 1:
                break
            for one in work:
                task = self.open_task(one)
                steps = one.settings.get("steps", [self.step])
                done.append((task.client, task.cluster, steps))
                vector = np.full(2, value, np.float32)
                released = self.method.scheduling.accept(Update(task, vector, 10, 0.0), 0.0)
                self.idle.add(task.client)
                if released:
                    self.method.applied(released)
                    self.method.progress.updates += len(released)
                self.method.close_task(task)
                if released:
                    return done
        return done


def bench(clients: int = 4, method: Any = FedDrift, **options: object) -> Bench:
    # Clients of the bench have the same loss on all steps, so models are compared on new data only.
    options = {"compare_on": "new", **options}
    kind = FedDriftEagerParameters if method is FedDriftEager else FedDriftParameters
    made = Bench(method(kind(delta=0.25, **options)), clients)
    made.round()
    return made


def move_on(made: Bench, losses: Losses) -> None:
    """Give all clients new data, on which they measure and then train a round."""
    made.step += 1
    made.ask(losses)
    made.round()


GOOD, POOR = {0: 0.125}, {0: 0.5}
CALM: Losses = {f"c{i}": GOOD for i in range(4)}


def test_four_clients_of_whom_two_drift_by_hand() -> None:
    made = bench()
    assert homes(made.method) == dict.fromkeys(["c0", "c1", "c2", "c3"], 0)
    # At step 1 there is no earlier loss, so no client counts as drifted.
    move_on(made, {**CALM, "c0": POOR})
    assert set(homes(made.method).values()) == {0}
    assert made.concepts.least == {"c0": 0.5, "c1": 0.125, "c2": 0.125, "c3": 0.125}
    # c0 improves; c1's loss grows by exactly δ = 0.25; those of c2 and c3 by more.
    move_on(made, {"c0": GOOD, "c1": {0: 0.375}, "c2": {0: 0.5}, "c3": {0: 0.5}})
    assert homes(made.method) == {"c0": 0, "c1": 0, "c2": 1, "c3": 2}
    # c1 is better off with c2's model, which was isolated for one step and is now available. The
    # models of c2 and c3 are alike: L(1, 1) = 0.1, L(1, 2) = 0.2, L(2, 1) = 0.2.
    old = {0: 0.5, 1: 0.1, 2: 0.2}
    losses = {"c0": {0: 0.1, 1: 0.5, 2: 0.5}, "c1": old, "c2": old, "c3": {0: 0.5, 1: 0.2, 2: 0.1}}
    move_on(made, losses)
    assert homes(made.method) == {"c0": 0, "c1": 3, "c2": 3, "c3": 3}
    assert list(made.method.models) == [0, 3]
    # The merged model has the data of all steps that were assigned to either model.
    assert made.concepts.assigned == {
        "c0": {0: 0, 1: 0, 2: 0, 3: 0},
        "c1": {0: 0, 1: 0, 2: 0, 3: 3},
        "c2": {0: 0, 1: 0, 2: 3, 3: 3},
        "c3": {0: 0, 1: 0, 2: 3, 3: 3},
    }


def test_a_new_model_is_a_copy_of_the_best_one_and_a_merged_one_a_mean_of_pairs() -> None:
    made = bench()
    move_on(made, CALM)
    made.step = 2
    made.ask({**CALM, "c3": POOR})
    made.hand_out()
    before = made.method.models[0].vector.tolist()
    assert made.method.models[1].vector.tolist() == before
    made.round(value=4.0)
    assert made.method.models[1].vector.tolist() == [4.0, 4.0]
    made.method.models[0].replace(np.zeros(2, np.float32))
    made.step = 3
    near = {0: 0.125, 1: 0.25}
    made.ask({"c0": near, "c1": near, "c2": near, "c3": {0: 0.25, 1: 0.125}})
    made.hand_out()
    # Model 0 has all four clients' steps 0 to 2 except
    # c3's, and three of step 3: 14; model 1 has 2.
    (merged,) = made.method.models.values()
    assert merged.vector.tolist() == pytest.approx([4.0 * 2 / 16] * 2)


@pytest.mark.parametrize(("isolation", "joined_at"), [(1, 1), (2, 2), (3, 3)])
def test_isolation_lasts_for_w_steps(isolation: int, joined_at: int) -> None:
    made = bench(isolation=isolation)
    move_on(made, CALM)
    move_on(made, {**CALM, "c3": POOR})
    assert homes(made.method)["c3"] == 1
    tempted = {0: 0.125, 1: 0.0625}
    for later in range(1, 4):
        move_on(made, {**dict.fromkeys(CALM, tempted), "c3": {0: 0.9, 1: 0.1}})
        joined = homes(made.method)["c0"] != 0
        assert joined == (later >= joined_at)
        assert len(made.method.models) == 2


def test_a_client_that_measures_late_does_not_end_a_step_of_isolation() -> None:
    made = bench()
    move_on(made, CALM)
    move_on(made, {"c0": GOOD, "c1": GOOD, "c3": POOR})
    made.ask({"c2": {0: 0.125, 1: 0.0625}})
    made.round()
    assert made.concepts.assigned["c2"][2] == 0
    assert made.concepts.isolated == {1: 1}


def test_a_client_trains_every_model_that_has_data_of_it() -> None:
    made = bench(2)
    move_on(made, {"c0": GOOD, "c1": GOOD})
    made.step = 2
    made.ask({"c0": GOOD, "c1": POOR})
    assert made.round() == [
        ("c0", 0, [0, 1, 2]),
        ("c1", 1, [2]),
        ("c1", 0, [0, 1]),
    ]
    # The next round repeats this; each model is the mean over the clients that trained it.
    assert len(made.round()) == 3


def test_memory_limits_what_is_trained_and_measured() -> None:
    made = bench(2, memory=2, compare_on="all")
    move_on(made, {"c0": GOOD, "c1": GOOD})
    move_on(made, {"c0": GOOD, "c1": GOOD})
    made.step = 3
    work = made.hand_out()
    assert [one.settings["steps"] for one in work] == [[2, 3], [2, 3]]
    for one in work:
        made.score(made.open_task(one), GOOD)
    assert made.round() == [("c0", 0, [2, 3]), ("c1", 0, [2, 3])]


def test_eager_founds_one_model_for_all_that_drift_together() -> None:
    made = bench(method=FedDriftEager)
    move_on(made, CALM)
    move_on(made, {**CALM, "c2": POOR, "c3": POOR})
    assert homes(made.method) == {"c0": 0, "c1": 0, "c2": 1, "c3": 1}
    # No models are merged, even if they are alike, and none is isolated.
    same = {0: 0.1, 1: 0.1}
    move_on(made, {**dict.fromkeys(CALM, same), "c0": {0: 0.2, 1: 0.1}})
    assert homes(made.method) == {"c0": 1, "c1": 0, "c2": 0, "c3": 0}
    assert list(made.method.models) == [0, 1]


def test_with_as_many_models_as_may_be_the_least_recently_used_gives_way() -> None:
    made = bench(method=FedDriftEager, max_models=2)
    move_on(made, CALM)
    move_on(made, {**CALM, "c3": POOR})
    # c3 returns to model 0 and c2 drifts: model 1 is unused, and deleted.
    back = {0: 0.1, 1: 0.9}
    move_on(made, {**dict.fromkeys(CALM, back), "c2": {0: 0.6, 1: 0.6}})
    assert list(made.method.models) == [0, 2]
    assert made.concepts.by_model("c3", now=3) == {0: [0, 1, 3]}
    # Both models are in use: c0, which drifts, keeps its best one.
    used = {0: 0.1, 2: 0.2}
    move_on(made, {**dict.fromkeys(CALM, used), "c2": {0: 0.9, 2: 0.1}, "c0": {0: 0.8, 2: 0.9}})
    assert homes(made.method) == {"c0": 0, "c1": 0, "c2": 2, "c3": 0}


def test_each_client_may_begin_with_a_model_of_its_own() -> None:
    made = bench(start="per-client")
    assert homes(made.method) == {"c0": 0, "c1": 1, "c2": 2, "c3": 3}
    # One concept, which c3 does not share: the models of c0, c1 and c2 merge at the next step.
    alike = {0: 0.2, 1: 0.2, 2: 0.2, 3: 0.9}
    losses = {f"c{own}": {**alike, own: 0.1} for own in range(3)}
    move_on(made, {**losses, "c3": {0: 0.9, 1: 0.9, 2: 0.9, 3: 0.1}})
    assert homes(made.method) == {"c0": 4, "c1": 4, "c2": 4, "c3": 3}
    few = bench(start="per-client", max_models=2)
    assert homes(few.method) == {"c0": 0, "c1": 1, "c2": 0, "c3": 1}


def test_models_of_data_that_stay_are_compared_after_some_rounds() -> None:
    made = bench(start="per-client", ask_every=2)
    # After two rounds all clients measure before the third one, and three models are alike.
    made.round()
    alike = {0: 0.2, 1: 0.2, 2: 0.2, 3: 0.9}
    losses = {f"c{own}": {**alike, own: 0.1} for own in range(3)}
    made.ask({**losses, "c3": {0: 0.9, 1: 0.9, 2: 0.9, 3: 0.1}})
    assert len(made.round()) == 4
    assert homes(made.method) == {"c0": 4, "c1": 4, "c2": 4, "c3": 3}
    assert {one.kind for one in made.hand_out()} != {SCORES}
    # Without the option no client is queried again.
    still = bench(start="per-client")
    still.round()
    assert {one.kind for one in still.hand_out()} != {SCORES}


def test_loss_may_be_measured_instead_of_accuracy() -> None:
    made = bench(measure="loss")
    move_on(made, CALM)
    # The losses are twice 1 − accuracy: 0.25, which grows by 0.5 > δ.
    move_on(made, {**CALM, "c0": {0: 0.375}})
    assert made.concepts.least == {"c0": 0.75, "c1": 0.25, "c2": 0.25, "c3": 0.25}
    assert homes(made.method)["c0"] == 1


def test_a_round_does_not_wait_for_scores_that_were_lost() -> None:
    made = bench()
    move_on(made, {"c0": GOOD, "c1": GOOD, "c2": GOOD})
    assert 1 not in made.concepts.assigned["c3"]
    # c3 is still missing: it is queried before the next round.
    (work,) = made.hand_out()
    assert (work.client, work.kind) == ("c3", SCORES)
    task, scheduling = made.open_task(work), made.method.scheduling
    assert made.hand_out() == []
    assert scheduling.wake_at() == 120.0
    scheduling.wake(120.0)
    assert scheduling.wake_at() == np.inf
    assert {one.client for one in made.hand_out()} == {"c0", "c1", "c2"}
    with pytest.raises(InvalidReplyError, match="came after the round had begun"):
        made.score(task, GOOD)


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({}, "no accuracy of every model and step"),
        ({ACCURACIES: np.ones((2, 2), np.float32)}, "no accuracy of every model and step"),
        ({ACCURACIES: np.ones((1, 2), np.int64)}, "no accuracy of every model and step"),
        ({ACCURACIES: np.full((1, 1), 1.5, np.float32)}, "not between 0 and 1"),
    ],
)
def test_scores_that_are_none_are_refused(numbers: dict[str, Any], reason: str) -> None:
    made = bench()
    made.step = 1
    task = made.open_task(made.hand_out()[0])
    with pytest.raises(InvalidReplyError, match=reason):
        made.method.on_answer(Answer(task, 10, numbers=numbers))


@pytest.mark.parametrize("method", [FedDrift, FedDriftEager])
def test_it_can_be_restored(method: type[Method]) -> None:
    check_it_can_be_restored(method)


DIGITS = {
    **{"dataset": "digits", "clients": 6, "partition": "iid", "model": "mclr", "workers": "0"},
    **{"drift": "concepts", "concept-steps": 6, "concept-samples": "same", "drift-seed": 7},
    **{"devices": "uniform", "eval-every": 1000, "lr": 0.1, "local-steps": 8},
}
"""The same samples at every step, with two labels exchanged from some step on."""


def test_two_concepts_on_digits_end_with_two_models_of_the_right_clients(tmp_path: Path) -> None:
    keys = {"strategy": "feddrift", "drift-at": "every 6 rounds", "max-rounds": 24}
    config = RunConfig.from_mapping({**DIGITS, **keys, "out": str(tmp_path / "out")})
    truth = true_groups(config, step=3)
    assert truth == (0, 1, 1, 1, 1, 0)
    summary = simulate(config).summary
    assert (summary["clusters"], summary["purity"]) == (2, 1.0)
    assert summary["accuracy"] > 0.9
