"""C-FAACL: remembered samples, both searches, new concepts; by hand and in runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clustered import check_it_can_be_restored, homes
from supported import SPREAD, SupportBench

from raceme.core.clients import Client
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.requests import Update
from raceme.runs.experiment import simulate
from raceme.strategies import CFAACL, CFAACLParameters
from raceme.strategies.faacl import LEND, MATCH
from raceme.strategies.faacl.continual import ConceptRequest, matches

HOME, NEAR, FAR = 1.0, 1.25, 9.0


def losses(value: float) -> np.ndarray:
    return value + SPREAD


@pytest.mark.parametrize(
    ("cluster_on_new", "local_on_old", "fits"),
    [(1.4, 1.4, True), (1.6, 1.4, False), (1.4, 1.6, False), (0.2, 0.2, True)],
)
def test_each_model_may_be_worse_away_from_home_by_less_than_epsilon(
    cluster_on_new: float, local_on_old: float, fits: bool
) -> None:
    new, old = (losses(cluster_on_new), losses(HOME)), (losses(HOME), losses(local_on_old))
    assert matches(new, old, epsilon=0.5, alpha=0.05) == fits
    assert not matches(new, old, epsilon=0.5, alpha=0.001)


def test_a_sample_is_evaluated_with_its_cluster_and_every_searching_client() -> None:
    request = ConceptRequest(steps=[0])
    request.measure("validation", 2, "c0")
    for client in ("c1", "c2"):
        request.measure("memory-0", 1, client)
    # The request has the models of clusters 2 and 1, then those of c0, c1 and c2.
    assert request.models() == ([2, 1], ["c0", "c1", "c2"])
    assert (request.rows("validation"), request.rows("memory-0")) == ([0, 2], [1, 3, 4])


def bench(clients: int = 2, **options: object) -> SupportBench:
    """Clients with a cluster each, which find all other models far worse."""
    given: dict[str, Any] = {"epsilon": 0.5, "hierarchical": False, **options}
    made = SupportBench(CFAACL(CFAACLParameters(**given)), clients)
    values = {f"c{index}": float(index + 1) for index in range(clients)}
    for _ in range(3):
        made.train(values, elsewhere=FAR)
    assert made.method.state.supported.is_settled
    return made


def next_task(made: SupportBench, values: dict[str, float]) -> list[Any]:
    """Give all clients new data, and let them train their own models on them."""
    made.step += 1
    return made.train(values)


def test_new_data_are_learned_from_the_first_model_and_a_sample_is_remembered() -> None:
    made = bench()
    made.step = 1
    work = {one.client: one for one in made.hand_out()}
    assert set(work) == {"c0", "c1"}
    one = work["c0"]
    assert (one.kind, one.models, one.settings["remembered"]) == ("learn", (), 50)
    assert one.settings["local-epochs"] == 20
    assert one.arrays["arrays"]["weights"].numpy().tolist() == [0.0, 0.0]


def test_learned_models_change_no_cluster() -> None:
    made = bench()
    made.step = 1
    released: list[Update] = []
    for task in [made.open_task(work) for work in made.hand_out()]:
        released += made.method.scheduling.accept(Update(task, np.full(2, 9.0), 10, 0.0), 0.0)
    outcomes = made.method.applied(released)
    assert [(one.cluster, one.weight) for one in outcomes] == [(1, 0.0), (2, 0.0)]
    assert [float(made.method.models[k].vector[0]) for k in (1, 2)] == [1.0, 2.0]


def test_all_clients_with_new_data_work_in_the_next_round() -> None:
    # With clusters settled, a quarter of the clients would.
    made = bench(4, fraction=0.25)
    assert len(made.hand_out()) == 1
    made = bench(4, fraction=0.25)
    made.step = 1
    assert {(one.client, one.kind) for one in made.hand_out()} == {
        (f"c{index}", "learn") for index in range(4)
    }


def test_a_client_whose_data_change_between_two_models_of_a_round_learns_them_in_it() -> None:
    made = bench()
    made.method.state.supported.support(2, [1])
    tasks = {one.client: made.open_task(one) for one in made.hand_out()}
    made.step = 1
    assert made.hand_out() == []
    made.finish([tasks["c0"]], {"c0": 1.0})
    # On the former data it would train cluster 2's model, which its cluster supports.
    assert [(one.client, one.kind) for one in made.hand_out()] == [("c0", "learn")]


def test_a_newcomer_finds_its_cluster_by_the_samples_of_others() -> None:
    made = bench()
    client = made.method.progress.fleet.clients["c2"] = Client("c2", 10, node_id=2)
    made.method.on_join(client)
    made.idle.add("c2")
    assert made.method.serving("c2", 0) == made.method.placement("c2")
    made.train({"c0": 1.0, "c1": 2.0, "c2": 2.5})
    made.search(lambda model, client, where: NEAR if model in ("2", "c2") else FAR)
    assert homes(made.method) == {"c0": 1, "c1": 2, "c2": 2}
    assert made.method.state.memory["c2"] == {0: 2}


def test_a_client_comes_back_to_the_cluster_of_a_task_that_it_remembers() -> None:
    made = bench()
    next_task(made, {"c0": 8.0, "c1": 9.0})
    # No cluster matches: two new concepts are founded, with the learned models.
    made.search(lambda model, client, where: HOME if model in _home(client, where) else FAR)
    assert homes(made.method) == {"c0": 3, "c1": 4}
    assert [float(made.method.models[k].vector[0]) for k in (1, 2, 3, 4)] == [1.0, 2.0, 8.0, 9.0]
    for _ in range(2):
        made.train({"c0": 8.0, "c1": 9.0}, elsewhere=FAR)
    assert made.method.state.memory == {"c0": {0: 1, 1: 3}, "c1": {0: 2, 1: 4}}
    # The first concepts return: each client finds it in its own memory, without asking others.
    next_task(made, {"c0": 1.5, "c1": 2.5})
    asked = made.search(
        lambda model, client, where: HOME if model in _home(client, where) else _back(model, where)
    )
    assert [(work.client, work.kind, work.models) for work in asked] == [
        ("c0", MATCH, (1, 3)),
        ("c1", MATCH, (2, 4)),
    ]
    assert homes(made.method) == {"c0": 1, "c1": 2}
    assert made.method.state.memory == {"c0": {0: 1, 1: 3, 2: 1}, "c1": {0: 2, 1: 4, 2: 2}}
    # A former task is served by the cluster that it belonged to.
    assert [made.method.serving("c0", step) for step in range(3)] == [{1: 1.0}, {3: 1.0}, {1: 1.0}]


def test_a_cluster_is_remembered_under_the_step_whose_data_were_learned() -> None:
    made = bench()
    next_task(made, {"c0": 8.0, "c1": 9.0})
    # The data change again during the search for those of step 1.
    made.step = 2
    made.search(lambda model, client, where: HOME if model in _home(client, where) else FAR)
    assert made.method.state.memory == {"c0": {0: 1, 1: 3}, "c1": {0: 2, 1: 4}}


def _home(client: str, where: str) -> set[str]:
    """Return the models that fit a set: the client's own for new data, else the remembered one."""
    own = {"c0": ("1", "3"), "c1": ("2", "4")}[client]
    return {client} if where == "validation" else {own[int(where[-1])]}


def _back(model: str, where: str) -> float:
    """Losses of other models after the concepts of step 0 have returned."""
    fits = model in ("1", "2") if where == "validation" else where == "memory-0"
    return NEAR if fits else FAR


@pytest.mark.parametrize("borrow", ["samples", "losses"])
def test_a_concept_of_another_client_is_found_by_what_that_one_remembers(borrow: str) -> None:
    made = bench(borrow=borrow)
    next_task(made, {"c0": 2.5, "c1": 1.5})

    def loss(model: str, client: str, where: str) -> float:
        """Losses after the two clients have exchanged their concepts."""
        concept = {("c0", "validation"): 2, ("c1", "validation"): 1}
        of_set = concept.get((client, where), int(client[-1]) + 1)
        of_model = {"1": 1, "2": 2, "c0": 2, "c1": 1}[model]
        return NEAR if of_model == of_set else FAR

    asked = made.search(loss)
    assert homes(made.method) == {"c0": 2, "c1": 1}
    kinds = [work.kind for work in asked]
    if borrow == "samples":
        # Own memory; then each lends samples to the other; then each measures on borrowed samples.
        assert kinds == [MATCH, MATCH, LEND, LEND, MATCH, MATCH]
        assert all("borrowed-0" in work.arrays for work in asked[4:])
        # The sample of step 0, which takes no computation.
        assert [work.settings for work in asked[2:4]] == [
            {"memory-steps": [0], "compute-scale": 0.0}
        ] * 2
    else:
        assert kinds == [MATCH] * 4
        assert not any("borrowed-0" in work.arrays for work in asked)
        # Instead, the other client's new model is sent to the owner of the sample.
        assert all("local-1" in work.arrays for work in asked[2:])
    assert [work.phase for work in asked[-2:]] == ["search-others", "search-others"]


def test_the_first_of_three_remembered_samples_that_matches_decides() -> None:
    made = bench(1)
    for value in (7.0, 8.0):
        next_task(made, {"c0": value})
        made.search(lambda model, client, where: HOME if _is_own(model, where) else FAR)
        made.train({"c0": value}, elsewhere=FAR)
        made.train({"c0": value}, elsewhere=FAR)
    assert made.method.state.memory == {"c0": {0: 1, 1: 2, 2: 3}}
    next_task(made, {"c0": 7.5})
    # The second and the third cluster would match.
    (asked,) = made.search(
        lambda model, client, where: FAR if model == "1" or where == "memory-0" else NEAR
    )
    assert (asked.models, asked.settings["memory-steps"]) == ((1, 2, 3), [0, 1, 2])
    assert homes(made.method) == {"c0": 2}


def _is_own(model: str, where: str) -> bool:
    return model == "c0" if where == "validation" else model == str(int(where[-1]) + 1)


def test_a_device_that_has_lost_its_memory_starts_a_new_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = bench(1)
    next_task(made, {"c0": 1.0})
    made.search(lambda model, client, where: NEAR, forgotten=("c0",))
    assert "c0 has lost its memory of step 0" in caplog.text
    # Without samples to compare on, the data count as a new concept.
    assert homes(made.method) == {"c0": 2}
    assert made.method.state.memory == {"c0": {1: 2}}


def test_a_search_without_answers_founds_nothing_and_is_repeated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Algorithm 10 founds a cluster only when an answer says that none matches."""
    made = bench()
    next_task(made, {"c0": 5.0, "c1": 6.0})
    while work := [one for one in made.hand_out() if one.kind in (MATCH, LEND)]:
        for one in work:
            made.end(made.open_task(one))
    assert "c0 lacks an answer of its search: it will search again" in caplog.text
    assert homes(made.method) == {"c0": 1, "c1": 2}
    assert made.method.state.memory == {"c0": {0: 1}, "c1": {0: 2}}
    # The round continues with a new model; this time the search gets answers.
    done = made.train({"c0": 8.0, "c1": 9.0})
    assert [kind for *_, kind in done] == ["learn", "learn"]
    made.search(lambda model, client, where: HOME if model in _home(client, where) else FAR)
    assert homes(made.method) == {"c0": 3, "c1": 4}
    assert made.method.state.memory == {"c0": {0: 1, 1: 3}, "c1": {0: 2, 1: 4}}


def test_one_missing_answer_leaves_open_whether_a_concept_is_new() -> None:
    """Cluster 1 does not match, and the holder of a sample of cluster 2 does not answer."""
    made = bench(borrow="losses")
    made.method.step_of = lambda client: 1 if client == "c0" else 0
    made.train({"c0": 5.0, "c1": 2.0})
    while work := [one for one in made.hand_out() if one.kind == MATCH]:
        for one in work:
            if one.client == "c1":
                made.end(made.open_task(one))
            else:
                home = {"validation": ("c0",), "memory-0": ("1",)}
                made._found(one, lambda m, c, where: HOME if m in home[where] else FAR, ())  # noqa: B023
    assert homes(made.method) == {"c0": 1, "c1": 2}
    assert "c0" in made.method.state.cold


def test_a_sample_lent_without_labels_leaves_open_whether_a_concept_is_new() -> None:
    made = bench()
    made.method.step_of = lambda client: 1 if client == "c0" else 0
    made.train({"c0": 5.0, "c1": 2.0})
    while work := [one for one in made.hand_out() if one.kind in (MATCH, LEND)]:
        for one in work:
            if one.kind == LEND:
                made.answer(made.open_task(one), {"memory-0-x": np.ones(8, np.float32)})
            else:
                made._found(one, lambda m, c, where: HOME if m == "c0" else FAR, ())
    assert homes(made.method) == {"c0": 1, "c1": 2}
    assert "c0" in made.method.state.cold


def test_new_data_are_evaluated_only_on_the_client_that_has_them() -> None:
    made = bench(borrow="losses")
    made.method.step_of = lambda client: 1 if client == "c0" else 0
    made.train({"c0": 5.0, "c1": 2.0})
    asked = made.search(lambda model, client, where: HOME if model == client else FAR)
    # c0 evaluates its own sample, then cluster 2; c1 evaluates its sample with c0's model.
    assert [(one.client, one.settings.get("on")) for one in asked] == [
        ("c0", "validation"),
        ("c1", None),
        ("c0", "validation"),
    ]


def test_each_searching_client_is_compared_by_its_own_model_on_the_same_sample() -> None:
    made = bench(3, borrow="losses")
    made.method.step_of = lambda client: 0 if client == "c2" else 1
    made.train({"c0": 5.0, "c1": 6.0, "c2": 3.0})

    def loss(model: str, client: str, where: str) -> float:
        """Cluster 3 fits the new data of both; only c0's model fits the sample of c2."""
        if where == "validation":
            return HOME if model in ("3", client) else FAR
        return HOME if client == "c2" and model in ("3", "c0") else FAR

    made.search(loss)
    assert homes(made.method) == {"c0": 3, "c1": 4, "c2": 3}


def test_clusters_whose_clients_are_offline_are_compared_after_a_search() -> None:
    made = bench()
    made.method.step_of = lambda client: 1 if client == "c0" else 0
    tasks = {one.client: made.open_task(one) for one in made.hand_out()}
    made.finish(list(tasks.values()), {"c0": 5.0, "c1": 2.0})
    made.method.on_leave("c1")
    made.idle.remove("c1")
    made.search(lambda model, client, where: HOME if model == client else FAR)
    assert homes(made.method) == {"c0": 3, "c1": 2}
    assert made.method.state.supported.partitions[0].clusters == [2, 3]


@pytest.mark.parametrize("clients", [2, 4, 8])
def test_a_search_takes_time_in_proportion_to_the_clusters(clients: int) -> None:
    """Algorithm 9 measures C and d on C's own sample, not every model on every sample.

    A client has 10 training samples: 2 for validation, K − 1 clusters of others to search. On the
    2 new samples it measures K models (the clusters and its own), on each sample of 50 two:
    2 K + 100 (K − 1), and a training passes its 10 samples three times.
    """
    made = bench(clients)
    values = {f"c{index}": 10.0 + index for index in range(clients)}
    next_task(made, values)
    asked = made.search(lambda model, client, where: HOME if model == client else FAR)
    own, others = [
        next(one for one in asked if (one.client, one.phase) == ("c0", phase))
        for phase in ("search-own", "search-others")
    ]
    assert own.settings["compute-scale"] == pytest.approx((2 * 2 + 50 * 2) / (3 * 10))
    passed = 2 * clients + 100 * (clients - 1)
    assert others.settings["compute-scale"] == pytest.approx(passed / (3 * 10))
    # The first set is the new data, measured under all models; each other set under two.
    pairs = np.reshape(others.settings["pairs"], (-1, 2)).tolist()
    assert pairs == [[0, row] for row in range(clients)] + [
        [1 + sample, row] for sample in range(clients - 1) for row in (sample, clients - 1)
    ]


def test_a_cluster_without_clients_keeps_its_model_and_is_not_trained() -> None:
    made = bench()
    next_task(made, {"c0": 8.0, "c1": 9.0})
    made.search(lambda model, client, where: HOME if model in _home(client, where) else FAR)
    done = made.train({"c0": 80.0, "c1": 90.0}, elsewhere=FAR)
    assert sorted(done) == [("c0", 3, "train"), ("c1", 4, "train")]
    assert made.method.models[1].vector.tolist() == [1.0, 1.0]


def test_it_can_be_restored() -> None:
    check_it_can_be_restored(CFAACL)


@pytest.mark.parametrize("borrow", ["samples", "losses"])
def test_two_concepts_of_digits_are_recognised(tmp_path: Path, borrow: str) -> None:
    keys: dict[str, object] = {
        **{"strategy": "c-faacl", "dataset": "digits", "clients": 4, "partition": "iid"},
        **{"drift": "concepts", "concept-steps": 3, "drift-at": "every 6 rounds"},
        **{"max-rounds": 18, "seed": 1, "workers": "0", "c-faacl.borrow": borrow},
        **{"out": str(tmp_path / "out")},
    }
    summary = simulate(RunConfig.from_mapping(keys)).summary
    assert (summary["clusters"], summary["purity"], summary["rejected_updates"]) == (2, 1.0, 0)


STREAM: dict[str, object] = {
    **{"strategy": "c-faacl", "dataset": "digits", "clients": 4, "partition": "iid"},
    **{"drift": "scenario-stream", "stream-steps": 4, "max-rounds": 4, "workers": "0"},
}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        # The smallest p of four samples is 2^-4 = 0.0625.
        ({"c-faacl.remembered": 4}, "remembered is 4, and a test at level 0.05 needs 5 samples"),
        # 5 % of a step's 90 samples, of which one is kept; with seed 0 not before the second step.
        ({"scenario": "a2", "scenario-little": 0.05}, "keeps 1 of its samples .* needs 5"),
    ],
)
def test_a_task_of_too_few_samples_for_a_test_is_an_error_before_a_run(
    keys: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        simulate(RunConfig.from_mapping({**STREAM, **keys, "out": str(tmp_path / "out")}))
    assert not (tmp_path / "out").exists()


def test_as_many_remembered_samples_as_a_test_needs_are_enough() -> None:
    CFAACL(CFAACLParameters(remembered=5, alpha=0.05)).check(4)


def test_what_was_trained_before_data_moved_on_is_not_what_was_learned_of_them() -> None:
    made = bench()
    training = [made.open_task(work) for work in made.hand_out()]
    assert [task.kind for task in training] == ["train", "train"]
    # The data change during the round; a client that
    # gets another task in it trains on the new data.
    made.step = 1
    assert made.hand_out() == []
    assert made.method.request_for("c0").kind == "learn"
    made.finish(training, {"c0": 5.0, "c1": 6.0})
    assert made.method.state.local == {}
    assert [float(made.method.models[k].vector[0]) for k in (1, 2)] == [5.0, 6.0]
    assert [work.kind for work in made.hand_out()] == ["learn", "learn"]


def test_after_a_search_clusters_are_trained_before_they_are_compared() -> None:
    made = bench()
    made.method.step_of = lambda client: made.step if client == "c0" else 0
    for step in (1, 2):
        # c0 meets a new concept each time; at the second one clusters are not settled yet.
        made.step = step
        done = made.train({"c0": 7.0, "c1": 8.0})
        assert sorted(kind for *_, kind in done) == ["learn", "train"]
        made.search(lambda model, client, where: HOME if model == client else FAR)
    assert not made.method.state.supported.partitions[0].settled
    assert {kind for *_, kind in made.train({"c0": 7.0, "c1": 8.0})} == {"train"}
    assert [work.kind for work in made.hand_out()] == ["losses", "losses"]


def test_a_search_among_others_leaves_out_what_the_client_remembers_itself() -> None:
    """The client's own memory was searched before (Algorithm 8)."""
    made = bench()
    next_task(made, {"c0": 8.0, "c1": 9.0})
    asked = made.search(lambda model, client, where: HOME if model == client else FAR)
    others = [work for work in asked if work.phase == "search-others"]
    assert [(work.client, work.models) for work in others] == [("c0", (2,)), ("c1", (1,))]
    assert not any("borrowed-1" in work.arrays for work in others)
