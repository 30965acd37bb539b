"""FAACL: support, merges and training by hand, and runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clustered import check_it_can_be_restored, found, homes, run_on, three_groups, update
from supported import SAMPLES, SupportBench

from raceme.core.clients import Client
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.events import Measured
from raceme.core.messages import LOSSES
from raceme.core.requests import InvalidReplyError
from raceme.runs.experiment import simulate
from raceme.strategies import FAACL, FAACLParameters

INIT = {"c0": 1.0, "c1": 2.0, "c2": 9.0}


def bench(clients: int = 3, **options: object) -> SupportBench:
    given: dict[str, Any] = {"epsilon": 0.5, "hierarchical": False, **options}
    return SupportBench(FAACL(FAACLParameters(**given)), clients)


def values(made: SupportBench) -> dict[int, float]:
    return {k: float(model.vector[0]) for k, model in made.method.models.items()}


def test_every_client_becomes_a_cluster_with_the_model_that_it_has_trained() -> None:
    made = bench()
    (work, *_) = made.method.requests(_moment(made))
    assert (work.models, work.settings["local-epochs"], work.phase) == ((), 5, "init")
    made = bench()
    made.train(INIT)
    assert homes(made.method) == {"c0": 1, "c1": 2, "c2": 3}
    assert values(made) == {1: 1.0, 2: 2.0, 3: 9.0}


def _moment(made: SupportBench) -> Any:
    from raceme.core.scheduling import SelectionContext

    return SelectionContext(0.0, made.method.progress.fleet, made.idle, made.method.rng)


def test_flat_faacl_by_hand() -> None:
    made = bench()
    made.train(INIT)
    assert made.train(INIT) == [("c0", 1, "train"), ("c1", 2, "train"), ("c2", 3, "train")]
    # 1 and 2 are within 0.5 of each other; 1's model also suits 3, but 3's model suits no other.
    asked = made.compare(
        {
            "c0": {1: 1.0, 2: 1.25, 3: 3.0},
            "c1": {1: 1.25, 2: 1.0, 3: 3.0},
            "c2": {1: 1.25, 2: 3.0, 3: 1.0},
        }
    )
    assert asked == {"c0": [1, 2, 3], "c1": [2, 1, 3], "c2": [3, 1, 2]}
    made.train(INIT)
    # 2 did not support 3, so the merged cluster does not either. Its model is one of the two.
    assert homes(made.method) == {"c0": 4, "c1": 4, "c2": 3}
    said = [event.value for event in made.seen if isinstance(event, Measured)]
    assert said == [{1: (2,), 2: (1,), 3: (1,)}, {}]
    # After the change, the next comparison finds one-sided support, and all pairs are settled.
    made.compare(
        {"c0": {4: 1.0, 3: 3.0}, "c1": {4: 1.0, 3: 3.0}, "c2": {4: 1.25, 3: 1.0}},
    )
    examples = {"c0": 10, "c1": 20, "c2": 30}
    done = made.train({"c0": 1.0, "c1": 4.0, "c2": 7.0}, examples)
    assert sorted(done) == [
        *[("c0", 3, "train"), ("c0", 4, "train"), ("c1", 3, "train"), ("c1", 4, "train")],
        ("c2", 3, "train"),
    ]
    # θ of 3 is the mean over its client and those of its supporter, weighted by samples.
    assert values(made) == pytest.approx({3: (10 + 80 + 210) / 60, 4: (10 + 80) / 30})
    assert made.method.state.supported.is_settled
    assert len(made.train(INIT)) == 5


def test_a_comparison_withdraws_support() -> None:
    made = bench(4)
    made.train({})
    made.train({})
    # 1 and 2 are merged, so that all are compared again; 3 supports 4.
    far = dict.fromkeys((1, 2, 3, 4), 9.0)
    made.compare(
        {
            "c0": {**far, 1: 1.0, 2: 1.0},
            "c1": {**far, 1: 1.0, 2: 1.0},
            "c2": {**far, 3: 1.0},
            "c3": {**far, 3: 1.25, 4: 1.0},
        }
    )
    assert ("c2", 4, "train") in made.train({})
    own = {"c0": 5, "c1": 5, "c2": 3, "c3": 4}
    made.compare({c: {**dict.fromkeys((3, 4, 5), 9.0), k: 1.0} for c, k in own.items()})
    # The model of 4 has improved: that of 3 is worse now.
    assert sorted(made.train({})) == [(c, k, "train") for c, k in own.items()]


def test_clusters_are_not_compared_twice_without_training_in_between() -> None:
    made = bench()
    made.train(INIT)
    made.train(INIT)
    far = dict.fromkeys((1, 2, 3), 9.0)
    made.compare({"c0": {**far, 1: 1.0, 2: 1.0}, "c1": {**far, 1: 1.0, 2: 1.0}, "c2": far})
    # 1 and 2 are merged; then all clients of the next round fail.
    for work in made.hand_out():
        made.end(made.open_task(work))
    assert {work.kind for work in made.hand_out()} == {"train"}


def test_an_offline_client_without_a_model_keeps_the_initial_one() -> None:
    method = bench(2).method
    method.on_leave("c1")
    method.applied([update(method, "c0", 3, 3)])
    assert homes(method) == {"c0": 1, "c1": 0}
    # Once all clients have their own, the initial model is removed.
    method.on_join(Client("c1", 10))
    method.applied([update(method, "c1", 4, 4)])
    assert set(method.models) == {1, 2}


def test_only_clusters_that_are_compared_keep_their_support() -> None:
    made = bench()
    supported = made.method.state.supported
    for cluster, supporters in {1: [2, 3], 2: [1], 3: [1]}.items():
        supported.support(cluster, supporters)
    made.method._compare_all([1, 3])
    assert supported.listed() == {1: (3,), 3: (1,)}
    assert [part.clusters for part in supported.partitions] == [[1, 3]]


def test_the_merged_model_is_one_of_the_two_and_not_their_mean() -> None:
    kept = set()
    for seed in range(8):
        method = FAACL(FAACLParameters(epsilon=0.5, hierarchical=False), seed)
        made = SupportBench(method, 2)
        made.train(INIT)
        made.train(INIT)
        same = {1: 1.0, 2: 1.0}
        made.compare({"c0": same, "c1": same})
        made.hand_out()
        kept |= set(values(made).values())
    assert kept == {1.0, 2.0}


def test_partitions_grow_until_all_clients_are_in_one() -> None:
    made = bench(5, hierarchical=True)
    made.train({})
    sizes: list[int] = []
    while not made.method.state.supported.is_settled:
        # Each client finds all other models much worse.
        made.train({}, elsewhere=9.0)
        sizes.append(len(made.method.state.supported.partitions))
    assert list(dict.fromkeys(sizes)) == [5, 3, 2, 1]
    assert len(made.method.models) == 5


def test_only_partitions_that_are_not_settled_work_until_clusters_are_found() -> None:
    made = bench(3, hierarchical=True)
    made.train({})
    made.train({})
    done = made.train({})
    (waiting,) = [p for p in made.method.state.supported.partitions if len(p.clusters) == 1]
    assert len(done) == 2
    assert waiting.clusters[0] not in [cluster for _, cluster, _ in done]


def test_a_newcomer_is_a_partition_of_its_own_that_is_joined_with_the_others() -> None:
    made = bench(2, hierarchical=True)
    for _ in range(5):
        made.train(INIT, elsewhere=1.0)
    assert len(made.method.models) == 1
    fleet = made.method.progress.fleet
    fleet.clients["c9"] = Client("c9", 10, node_id=9)
    made.method.on_join(fleet.clients["c9"])
    made.idle.add("c9")
    made.train({"c9": 5.0})
    newest = made.method.clusters.main("c9")
    assert values(made)[newest] == 5.0
    for _ in range(4):
        # In the meantime all others continue to train.
        assert {client for client, *_ in made.train({}, elsewhere=1.0)} == {"c0", "c1", "c9"}
    assert len(set(homes(made.method).values())) == 1


@pytest.mark.parametrize(
    ("losses", "why"),
    [
        (np.ones((2, 4), np.float32), "4 samples for validation, and a test at level 0.05 needs 5"),
        (np.ones((1, SAMPLES), np.float32), "losses of 1 of 2 models"),
        (np.ones((3, SAMPLES), np.float32), "losses of 3 of 2 models"),
        (np.ones(SAMPLES, np.float32), "no losses"),
        (np.ones((2, SAMPLES), np.int64), "no losses"),
        (None, "no losses"),
    ],
)
def test_answers_of_no_use_are_refused(losses: Any, why: str) -> None:
    made = bench(2)
    made.train(INIT)
    made.train(INIT)
    task = made.open_task(made.hand_out()[0])
    with pytest.raises(InvalidReplyError, match=why):
        made.answer(task, {} if losses is None else {LOSSES: losses})
    made.end(task)


def test_a_client_without_an_answer_leaves_support_unchanged() -> None:
    made = bench(2)
    made.train(INIT)
    made.train(INIT)
    for work in made.hand_out():
        made.end(made.open_task(work))
    made.train(INIT)
    assert homes(made.method) == {"c0": 1, "c1": 2}
    assert made.method.state.supported.is_settled
    late = made.open_task(made.method._training("c0"))
    with pytest.raises(InvalidReplyError, match="after the round had begun"):
        made.answer(late, {LOSSES: np.ones((1, SAMPLES), np.float32)})


@pytest.mark.parametrize("hierarchical", [True, False])
def test_three_groups_are_found(hierarchical: bool) -> None:
    strategy = FAACL(FAACLParameters(hierarchical=hierarchical))
    run_on(strategy, three_groups(), 400)
    assert found(strategy) == [4, 4, 4]
    assert len(strategy.models) == 3


def test_it_can_be_restored() -> None:
    check_it_can_be_restored(FAACL)


DIGITS: dict[str, object] = {
    **{"dataset": "digits", "clients": 8, "groups": 2, "max-rounds": 12, "workers": "0"},
    **{"strategy": "faacl", "seed": 1},
}


def test_it_finds_the_groups_of_digits(tmp_path: Path) -> None:
    summary = simulate(RunConfig.from_mapping({**DIGITS, "out": str(tmp_path / "out")})).summary
    assert (summary["clusters"], summary["purity"]) == (2, 1.0)


def test_too_few_validation_samples_are_an_error_before_a_run(tmp_path: Path) -> None:
    keys = {**DIGITS, "validation-share": 0.01, "out": str(tmp_path / "out")}
    with pytest.raises(UserError, match="validation-share"):
        simulate(RunConfig.from_mapping(keys))
    none = {**keys, "validation-share": 0.0}
    with pytest.raises(UserError, match="must be above 0"):
        simulate(RunConfig.from_mapping(none))
    assert not (tmp_path / "out").exists()
