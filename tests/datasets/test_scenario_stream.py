"""The drift `scenario-stream`: new samples at every step, of one of two concepts."""

from __future__ import annotations

import numpy as np
import pytest

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.datasets.drift import schedule_of
from raceme.datasets.partition import Scenario, ScenarioOptions

SCENARIOS = ["s1", "s2", "a1", "a2"]


def config_of(scenario: str = "s2", **keys: object) -> RunConfig:
    given = {
        "clients": 6,
        "partition": "iid",
        "drift": "scenario-stream",
        "scenario": scenario,
        "scenario_little": 0.5,
        "stream_steps": 5,
        **keys,
    }
    if scenario != "a2":
        del given["scenario_little"]
    return RunConfig.from_mapping({key.replace("_", "-"): value for key, value in given.items()})


def rows(x: np.ndarray) -> list[bytes]:
    return [sample.tobytes() for sample in x]


def concepts_of(config: RunConfig, steps: int = 5) -> np.ndarray:
    """The concept of each client at each step, shape (steps, clients)."""
    return np.array([datasets.true_groups(config, step) for step in range(steps)])


@pytest.mark.parametrize("seed", range(4))
def test_who_has_which_concept(seed: int) -> None:
    table = concepts_of(config_of(seed=seed, stream_steps=10), 10)
    assert (table == table[:, :1]).all()
    assert set(table[:, 0].tolist()) == {0, 1}
    table = concepts_of(config_of(seed=seed, stream_steps=10, stream_mode="multi-task"), 10)
    assert all(set(column.tolist()) == {0, 1} for column in table.T)
    assert len({tuple(column.tolist()) for column in table.T}) > 3


def test_both_concepts_occur_however_few_the_steps() -> None:
    for seed in range(8):
        table = concepts_of(config_of(drift_seed=seed, stream_steps=2), 2)
        assert sorted(table[:, 0].tolist()) == [0, 1]


@pytest.mark.parametrize("mode", ["sequential", "multi-task"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_sample_is_met_twice_and_all_are_met(scenario: str, mode: str) -> None:
    config = config_of(scenario, stream_mode=mode, scenario_variance=0.0, scenario_density=0.0)
    for client in (0, 5):
        dealt = datasets.client_data(RunConfig(clients=6, partition="iid"), client)
        steps = [datasets.client_data(config, client, step) for step in range(5)]
        for name in ("x_train", "x_test"):
            whole = rows(np.round(getattr(dealt, name), 4))
            met = [row for data in steps for row in rows(np.round(getattr(data, name), 4))]
            assert len(set(met)) == len(met)
            assert set(met) <= set(whole)
            if scenario != "a2":
                assert len(met) == len(whole)
        # After the last step the first samples come again.
        again = datasets.client_data(config, client, 5)
        assert np.array_equal(again.x_train, steps[0].x_train)
        assert again.group == steps[0].group


def test_equal_parts_of_the_samples_and_of_a_concepts_own_classes() -> None:
    # 1,797 samples of six clients are 299 or 300: 239 or 240 to train with, of five steps 47 or 48.
    for step in range(5):
        sizes = {len(data.y_train) for data in datasets.all_clients(config_of("s2"), step)}
        assert sizes <= {47, 48}
    config = config_of("s1")
    concepts = concepts_of(config)[:, 0]
    for concept in (0, 1):
        of_concept = np.flatnonzero(concepts == concept)
        parts = [datasets.client_data(config, 2, int(step)).y_train for step in of_concept]
        kinds = set(np.concatenate(parts).tolist())
        assert kinds == ({0, 1, 2, 3, 4} if concept == 0 else {5, 6, 7, 8, 9})
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_concept_with_little_data_has_its_share_of_a_step() -> None:
    config, whole = config_of("a2", scenario_little=0.25), config_of("s2")
    for step, concept in enumerate(concepts_of(config)[:, 0].tolist()):
        count = len(datasets.client_data(whole, 1, step).y_train)
        few = len(datasets.client_data(config, 1, step).y_train)
        assert few == (round(0.25 * count) if concept else count)


@pytest.mark.parametrize("scenario", ["s1", "s2", "a2"])
def test_the_fewest_samples_of_any_step_are_known_before(scenario: str) -> None:
    config = config_of(scenario, stream_mode="multi-task")
    for client in range(config.num_clients):
        sizes = [len(datasets.client_data(config, client, step).y_train) for step in range(5)]
        assert datasets.fewest_training(config, client) == min(sizes)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_samples_are_seen_as_the_concept_of_the_step_shows_them(scenario: str) -> None:
    config = config_of(scenario, stream_mode="multi-task")
    dataset = datasets.load(config)
    seen = Scenario(ScenarioOptions(scenario), config.seed)
    number = {row: i for i, row in enumerate(rows(dataset.inputs(np.arange(len(dataset.y)))))}
    clean = config_of(scenario, stream_mode="multi-task", scenario_variance=0, scenario_density=0)
    found = set()
    for step in range(5):
        data = datasets.client_data(config, 3, step)
        assert data.group == datasets.true_groups(config, step)[3]
        found.add(data.group)
        assert data.group is not None
        if scenario == "a1":
            quiet = datasets.client_data(clean, 3, step)
            own = np.array([number.get(row, -1) for row in rows(quiet.x_test)])
            # Through pixels and back, rounding may hide which sample it is.
            known = own >= 0
            assert known.sum() > 5
            expected = seen.inputs(dataset, own[known], data.group)
            assert np.array_equal(data.x_test[known], expected)
            continue
        own = np.array([number[row] for row in rows(data.x_test)])
        labels = seen.labels(dataset.y[own], data.group, 10)
        assert np.array_equal(data.y_test, labels)
    assert found == {0, 1}


@pytest.mark.parametrize(
    ("keys", "moments"),
    [
        # Five equal parts of the run: of its rounds, if these limit it.
        ({"max_rounds": 50}, [(9, 0), (10, 1), (49, 4)]),
        ({"max_rounds": 50, "drift_at": "every 10 rounds"}, [(9, 0), (10, 1), (49, 4), (50, 5)]),
        ({"max_rounds": 7}, [(0, 0), (1, 1), (2, 2), (6, 4)]),
        ({"max_updates": 100}, [(19, 0), (20, 1), (99, 4)]),
        ({}, [(99, 0), (100, 1), (499, 4), (500, 4)]),
        ({"max_updates": 5}, [(0, 0), (4, 4)]),
    ],
)
def test_every_step_has_an_equal_part_of_the_run(
    keys: dict[str, object], moments: list[tuple[int, int]]
) -> None:
    schedule = schedule_of(config_of(strategy="fedavg", **keys))
    assert schedule is not None
    assert schedule.in_rounds == ("max_rounds" in keys)
    assert [(n, schedule.step(0.0, n, n, n)) for n, _ in moments] == moments


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"max_rounds": 50, "drift_at": "every 20 rounds"}, "this run of 50 rounds meet 3 of them"),
        ({"max_rounds": 40, "drift_at": "every 10 rounds"}, "this run of 40 rounds meet 4 of them"),
        ({"max_updates": 4}, "5 steps, and drift-at lets this run of 4 updates meet 4"),
        ({"max_time": 40.0, "drift_at": "every 10s"}, "this run of 40 seconds meet 4 of them"),
        ({"drift_at": "100 updates"}, "this run of 500 updates meet 2 of them"),
    ],
)
def test_a_run_that_ends_before_the_last_step_is_an_error(
    keys: dict[str, object], error: str
) -> None:
    with pytest.raises(UserError, match=error):
        schedule_of(config_of(strategy="fedavg", **keys))


def test_a_run_whose_end_is_not_known_may_be_long_enough() -> None:
    for keys in ({"drift_at": "every 20 rounds"}, {"drift_at": "every upload"}, {"drift_at": "9s"}):
        assert schedule_of(config_of(strategy="fedavg", **keys)) is not None
    exact = config_of(max_rounds=50, drift_at="10 rounds, 20 rounds, 30 rounds, 49 rounds")
    assert schedule_of(exact) is not None


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"scenario": "s0"}, "scenario s0 has one concept only"),
        ({"partition": "label-groups"}, "and partition label-groups makes groups: take partition"),
        ({"partition": "scenario"}, "and partition scenario makes groups"),
        (
            {"stream_steps": 200},
            "240 training samples for 200 steps of scenario s2, concept 0, too few",
        ),
        ({"scenario": "a2", "scenario_little": 0.01}, "concept 1, too few for 2 at each"),
    ],
)
def test_what_the_data_cannot_do_is_an_error(keys: dict[str, object], error: str) -> None:
    with pytest.raises(UserError, match=error):
        datasets.true_groups(config_of(**keys))
