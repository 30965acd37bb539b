"""Drifts: schedules, and the data of every step."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from drifting import all_at, config_of, same
from hypothesis import given, settings
from hypothesis import strategies as st

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.registry import DRIFTS
from raceme.datasets.dealt import Dealt
from raceme.datasets.drift import (
    Evolution,
    Schedule,
    SwapPart,
    drift_of,
    exchanged,
    parse_schedule,
    schedule_of,
)
from raceme.datasets.partition import Partition, Scenario, ScenarioOptions, rotated
from raceme.datasets.source import Dataset, Target

# `in-order` needs data with a time, and `scenario-stream` a partition without groups.
CHANGING = sorted(set(DRIFTS) - {"none", "in-order", "scenario-stream"})


# Schedules of steps.


def test_the_step_rises_by_one_at_each_given_time() -> None:
    schedule = parse_schedule("120s, 240s")
    steps = [schedule.step(time, 9999, 9999) for time in (0.0, 119.9, 120.0, 239.9, 240.0, 1e9)]
    assert steps == [0, 0, 1, 1, 2, 2]
    assert [schedule.next_time(time) for time in (0.0, 120.0, 240.0)] == [120.0, 240.0, math.inf]


def test_the_step_rises_after_each_period() -> None:
    schedule = parse_schedule("every 60s")
    assert [schedule.step(t, 0, 0) for t in (0, 59.9, 60, 179, 180)] == [0, 0, 1, 2, 3]
    # 0.3 / 0.1 is 2.9999999999999996.
    assert parse_schedule("every 0.1s").step(0.3, 0, 0) == 3
    assert parse_schedule("every 60s").next_time(60.0) == 120.0


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("500 updates", Schedule("updates", (500.0,))),
        ("1 update, 20 updates", Schedule("updates", (1.0, 20.0))),
        ("every upload", Schedule("uploads", every=1.0)),
        ("Every 3 Uploads", Schedule("uploads", every=3.0)),
        ("every round", Schedule("rounds", every=1.0)),
        ("50 rounds, 100 rounds", Schedule("rounds", (50.0, 100.0))),
        ("2min,1h", Schedule("seconds", (120.0, 3600.0))),
        ("1.5 s", Schedule("seconds", (1.5,))),
    ],
)
def test_all_forms_of_a_schedule_are_read(text: str, schedule: Schedule) -> None:
    assert parse_schedule(text) == schedule


def test_only_uploads_are_counted_by_client() -> None:
    updates, uploads = parse_schedule("every 3 updates"), parse_schedule("every 3 uploads")
    assert (updates.per_client, uploads.per_client) == (False, True)
    assert (updates.step(7.0, 6, 1), uploads.step(7.0, 6, 1)) == (2, 0)
    assert uploads.next_time(0.0) == math.inf


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("soon", "cannot be read: write moments"),
        ("60", "cannot be read"),
        ("60 days", "units: s, min, h, updates, uploads, rounds"),
        ("upload", "cannot be read"),
        ("60s, 500 updates", "mixes seconds and updates"),
        ("every 60s, 70s", "more than one period"),
        ("240s, 120s", "ascending order"),
        ("0s", "a number above 0 of seconds"),
        ("2.5 updates", "a whole number from 1 of updates"),
        ("every 0 uploads", "a whole number from 1 of uploads"),
        ("-5s", "cannot be read"),
        ("round", "cannot be read"),
        ("2.5 rounds", "a whole number from 1 of rounds"),
        ("every round, 70s", "mixes rounds and seconds"),
    ],
)
def test_an_impossible_schedule_is_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_schedule(text)
    assert "\n" not in str(caught.value)
    assert text in str(caught.value)


def test_rounds_that_are_over_are_counted() -> None:
    moments = parse_schedule("2 rounds, 5 rounds")
    steps = [moments.step(9.0, 99, 99, rounds) for rounds in (0, 1, 2, 4, 5, 300)]
    assert steps == [0, 0, 1, 1, 2, 2]
    assert parse_schedule("every round").step(9.0, 99, 99, 7) == 7
    assert moments.next_time(0.0) == math.inf
    assert moments.in_rounds
    assert not moments.per_client
    with pytest.raises(UserError, match="drift-at counts rounds, and the method has none"):
        moments.step(9.0, 99, 99, None)


def test_every_drift_but_none_has_a_default_schedule() -> None:
    assert schedule_of(RunConfig(clients=12)) is None
    for name in CHANGING:
        assert isinstance(schedule_of(config_of(name)), Schedule)
    assert schedule_of(config_of("mixture")) == Schedule("uploads", every=1.0)
    assert schedule_of(config_of("swap-all")) == Schedule("updates", every=12.0)
    assert schedule_of(config_of("rotate", drift_at="9s")) == Schedule("seconds", (9.0,))


def test_a_schedule_without_a_drift_is_refused() -> None:
    with pytest.raises(UserError, match=r"drift-at is read by drift .*; this run has drift none"):
        RunConfig.from_mapping({"drift-at": "60s"})


# Properties of all drifts.


@pytest.mark.parametrize("name", CHANGING)
def test_a_step_is_the_same_whoever_asks_and_whatever_was_asked_before(name: str) -> None:
    config = config_of(name)
    straight = datasets.client_data(config, 3, 2)
    datasets._drift.cache_clear()
    for step in (5, 0, 1, 4):
        datasets.client_data(config, 3, step)
    assert same(datasets.client_data(config, 3, 2), straight)


@pytest.mark.parametrize("name", ["swap-all", "swap-part", "rotate", "label-shift", "noise"])
def test_step_zero_has_the_original_data(name: str) -> None:
    # The others start with a part of the data: incremental, mixture and tasks.
    still = datasets.all_clients(RunConfig(clients=12))
    for before, after in zip(still, all_at(config_of(name, drift_seed=5), 0), strict=True):
        assert same(before, after)


@pytest.mark.parametrize("name", ["swap-all", "incremental", "noise", "mixture", "tasks"])
def test_a_drift_draws_from_its_own_seed_or_else_from_that_of_the_run(name: str) -> None:
    keys = {"swap_chance": 1.0} if name == "swap-all" else {}
    default, run, other = (
        all_at(config_of(name, **keys, **seeds), 1)
        for seeds in ({}, {"drift_seed": 0}, {"drift_seed": 1})
    )
    assert all(map(same, default, run))
    assert not all(map(same, default, other))


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("partition", ["label-groups", "rotation-groups", "classes"])
def test_every_client_can_train_and_test_at_every_step(name: str, partition: str) -> None:
    config = config_of(name, partition=partition, drift_seed=3)
    try:
        datasets.true_groups(config)
    except UserError:
        return
    for step in range(4):
        for data in all_at(config, step):
            assert len(data.x_train) == len(data.y_train) > 0
            assert len(data.x_test) == len(data.y_test) > 0
            assert data.x_train.dtype == np.float32


# Exchanges.


def test_swap_all_moves_whole_clients_with_their_groups_and_loses_nothing() -> None:
    config = config_of("swap-all", swap_chance=1.0)
    before, after = all_at(config, 0), all_at(config, 1)
    origins = [next(i for i, old in enumerate(before) if same(old, new)) for new in after]
    # All clients are in pairs: exchanging twice restores the order, and no client keeps its data.
    assert all(origins[origins[client]] == client != origins[client] for client in range(12))
    assert [data.group for data in after] == [before[origin].group for origin in origins]
    assert datasets.true_groups(config, 1) == tuple(data.group for data in after)


def test_about_one_pair_in_twenty_swaps_per_step_by_default() -> None:
    config = config_of("swap-all", clients=100, partition="iid")
    drift = datasets._drift(
        config.narrowed(*datasets._CHANGING), config.narrowed(*datasets._DEALING), None
    )
    count = sum(len(drift.pairs(100, step)) for step in range(400))  # type: ignore[attr-defined]
    # 400 steps of 50 pairs: 1,000 expected, deviation 31.
    assert 880 < count < 1120


def test_swap_part_exchanges_a_label_of_its_own_for_one_of_the_other() -> None:
    config = config_of("swap-part", clients=2, groups="0.5,0.5", swap_chance=1.0)
    before, after = all_at(config, 0), all_at(config, 1)
    had = [set(data.y_train) | set(data.y_test) for data in before]
    has = [set(data.y_train) | set(data.y_test) for data in after]
    assert had == [{0, 1, 2, 3, 4}, {5, 6, 7, 8, 9}]
    (given,), (taken,) = had[0] - has[0], has[0] - had[0]
    assert (given < 5, taken >= 5) == (True, True)
    assert (has[1] - had[1], had[1] - has[1]) == ({given}, {taken})
    # All samples of the label are moved, and none is lost.
    for part in ("y_train", "y_test"):
        old, new = (np.concatenate([getattr(d, part) for d in all_]) for all_ in (before, after))
        assert np.bincount(old).tolist() == np.bincount(new).tolist()
    moved = {x.tobytes() for x in before[0].x_train[before[0].y_train == given]}
    assert moved == {x.tobytes() for x in after[1].x_train[after[1].y_train == given]}


def test_swap_part_goes_on_from_what_the_clients_have() -> None:
    config = config_of("swap-part", swap_chance=1.0)
    everything = sorted(np.concatenate([d.y_train for d in all_at(config, 0)]).tolist())
    for step in (1, 2, 7):
        assert sorted(np.concatenate([d.y_train for d in all_at(config, step)])) == everything


def test_swap_part_counts_what_everybody_has() -> None:
    config = config_of("swap-part", swap_chance=1.0)
    parts = (config.narrowed(*datasets._CHANGING), config.narrowed(*datasets._DEALING), None)
    drift = datasets._drift(*parts)
    assert isinstance(drift, SwapPart)
    train, test = drift._held(drift._holders.at(6))
    for client, data in enumerate(all_at(config, 6)):
        assert np.bincount(data.y_train, minlength=10).tolist() == train[client].tolist()
        assert np.bincount(data.y_test, minlength=10).tolist() == test[client].tolist()


def test_no_exchange_leaves_a_client_without_test_samples(tmp_path: Path) -> None:
    # Each client has test samples of one label only, and cannot exchange it for one without any.
    for client, (tested, other) in enumerate([(0, 1), (2, 3)]):
        x = np.full((2, 1), client)
        parts = {"x_train": x, "y_train": [tested, other], "x_test": x[:1], "y_test": [tested]}
        np.savez(tmp_path / f"{client}.npz", **parts)
    data_file = str(tmp_path / "{client}.npz")
    exchanged = 0
    for seed in range(12):
        keys = {"dataset": "npz", "data_file": data_file, "clients": 2, "swap_chance": 1.0}
        both = all_at(config_of("swap-part", drift_seed=seed, **keys), 1)
        assert [len(data.y_test) for data in both] == [1, 1]
        exchanged += both[0].y_train.tolist() != [0, 1]
    assert 0 < exchanged < 12


def test_a_drift_stores_few_states_and_reaches_any_step() -> None:
    made: list[int] = []

    def advance(state: int, step: int) -> int:
        made.append(step)
        return state + step

    evolution = Evolution(0, advance)
    assert [evolution.at(step) for step in (3, 4, 1, 4)] == [6, 10, 1, 10]
    # From 3 to 4 is one step; back to 1 restarts from the beginning; 4 comes from the cache.
    assert made == [1, 2, 3, 4, 1]
    assert evolution.at(2000) == 2000 * 2001 // 2
    assert len(evolution._kept) == 4


# Changes of a client's own data.


def test_images_turn_by_so_many_degrees_per_step() -> None:
    config = config_of("rotate", rotate_degrees=90)
    before, after = all_at(config, 0)[4], all_at(config, 3)[4]
    assert np.array_equal(after.x_train, rotated(before.x_train, 270.0))
    assert np.array_equal(after.x_test, np.rot90(before.x_test, 3, axes=(2, 3)))
    assert np.array_equal(after.y_train, before.y_train)
    assert same(all_at(config, 4)[4], before)


def test_labels_shift_in_a_circle_in_training_and_test_samples_alike() -> None:
    config = config_of("label-shift", label_shift=3)
    before, after = all_at(config, 0)[11], all_at(config, 2)[11]
    # Shifted twice by 3: 7, 8 and 9 become 3, 4 and 5.
    assert np.array_equal(after.y_train, before.y_train - 4)
    assert np.array_equal(after.y_test, before.y_test - 4)
    assert np.array_equal(after.x_train, before.x_train)


def test_noise_grows_with_the_step_and_is_another_one_for_training_and_test() -> None:
    config = config_of("noise", noise_growth=0.5)
    still, one, four = (all_at(config, step)[2] for step in (0, 1, 4))
    first, fourth = one.x_train - still.x_train, four.x_train - still.x_train
    assert first.std() == pytest.approx(0.5, rel=0.05)
    np.testing.assert_allclose(fourth, 4 * first, atol=1e-5)
    tested = one.x_test - still.x_test
    assert not np.allclose(tested, first[: len(tested)])


def test_a_share_of_the_clients_drifts_and_stays_the_same_share() -> None:
    config = config_of("label-shift", drift_share=0.25)
    before = all_at(config, 0)
    changed = [
        [i for i, now in enumerate(all_at(config, step)) if not same(before[i], now)]
        for step in (1, 2)
    ]
    assert len(changed[0]) == 3
    assert changed[0] == changed[1]


def test_a_quarter_more_training_samples_come_with_every_step_and_none_goes() -> None:
    config = config_of("incremental")
    whole = datasets.client_data(RunConfig(clients=12), 5)
    count = len(whole.y_train)
    seen: set[bytes] = set()
    for step, share in enumerate((0.25, 0.5, 0.75, 1.0, 1.0)):
        data = datasets.client_data(config, 5, step)
        assert len(data.y_train) == round(share * count)
        now = {x.tobytes() for x in data.x_train}
        assert seen <= now
        seen = now
        assert np.array_equal(data.x_test, whole.x_test)
    assert same(data, whole)


def test_training_samples_that_remain_become_fewer_with_every_step() -> None:
    config = config_of("incremental", incremental_of="rest")
    count = len(datasets.client_data(RunConfig(clients=12), 5).y_train)
    seen: set[bytes] = set()
    # 0.25, then half of it, three quarters of that, and all of that.
    for step, share in enumerate((0.25, 0.125, 0.09375, 0.09375, 0.09375)):
        data = datasets.client_data(config, 5, step)
        assert len(data.y_train) == max(1, round(share * count))
        now = {x.tobytes() for x in data.x_train}
        assert step == 0 or now <= seen
        seen = now


# Tasks.


def test_tasks_split_the_labels_and_come_one_after_another() -> None:
    config = config_of("tasks", partition="iid", tasks_order="same")
    whole = datasets.client_data(RunConfig(clients=12, partition="iid"), 0)
    met = [set(datasets.client_data(config, 0, step).y_train.tolist()) for step in range(6)]
    assert [len(labels) for labels in met[:5]] == [2] * 5
    assert set().union(*met[:5]) == set(range(10))
    assert met[5] == met[0]
    for step in range(5):
        data = datasets.client_data(config, 0, step)
        own = np.isin(whole.y_train, list(met[step]))
        assert np.array_equal(data.x_train, whole.x_train[own])
        assert set(data.y_test.tolist()) <= met[step]
    other = [set(datasets.client_data(config, 7, step).y_train.tolist()) for step in range(5)]
    assert other == met[:5]


def test_each_of_the_tasks_that_are_asked_for_has_its_part_of_the_run() -> None:
    config = config_of("tasks", partition="iid", max_updates=100)
    assert schedule_of(config) == Schedule("updates", every=20.0)
    ten = config_of("tasks", partition="iid", max_updates=100, tasks_count=10)
    assert schedule_of(ten) == Schedule("updates", every=10.0)


def test_the_fewest_samples_of_any_task_are_known_before() -> None:
    config = config_of("tasks", partition="iid")
    for client in range(3):
        sizes = [len(datasets.client_data(config, client, step).y_train) for step in range(5)]
        assert len(set(sizes)) > 1
        assert datasets.fewest_training(config, client) == min(sizes)


def test_every_client_has_its_own_order_of_the_same_tasks() -> None:
    config = config_of("tasks", partition="iid")
    orders = [
        [frozenset(datasets.client_data(config, client, s).y_train.tolist()) for s in range(5)]
        for client in (0, 1, 2)
    ]
    assert set(orders[0]) == set(orders[1]) == set(orders[2])
    assert len({tuple(order) for order in orders}) > 1


def test_as_many_tasks_as_the_client_with_the_fewest_labels_has() -> None:
    # The smallest of the four label groups has two labels.
    config = config_of("tasks")
    met = [frozenset(datasets.client_data(config, 11, s).y_train.tolist()) for s in range(4)]
    assert met[0] == met[2] != met[1] == met[3]


def test_a_task_without_a_test_sample_of_its_own_borrows_one(tmp_path: Path) -> None:
    y_train, y_test = np.repeat([0, 1], [4, 4]), np.array([0, 0])
    x = np.arange(10, dtype=np.float32)[:, None]
    parts = {"x_train": x[:8], "y_train": y_train, "x_test": x[8:], "y_test": y_test}
    np.savez(tmp_path / "own.npz", **parts)
    config = config_of("tasks", clients=1, dataset="npz", data_file=str(tmp_path / "own.npz"))
    steps = [datasets.client_data(config, 0, step) for step in (0, 1)]
    counts = {int(d.y_train[0]): (len(d.y_train), len(d.y_test)) for d in steps}
    assert counts == {0: (4, 2), 1: (3, 1)}


# Data that cannot change this way.


@pytest.mark.parametrize(
    ("drift", "keys", "message"),
    [
        ("swap-all", {"clients": 1}, "needs at least 2 clients"),
        ("swap-part", {"partition": "iid"}, "there are no two such clients"),
        ("rotate", {"dataset": "synthetic"}, r"synthetic has inputs of shape \(60,\)"),
        ("label-shift", {"label_shift": 10}, "does not change the labels of 10 classes"),
        ("mixture", {"partition": "iid"}, "these clients have no groups"),
        ("mixture", {"groups": "1"}, "these clients have only one"),
        ("mixture", {"mixture_main_low": 0.95}, "mixture-main-low 0.95 is above"),
        ("mixture", {"mixture_size_high": 2}, "mixture-size-low .* is above mixture-size-high 2"),
        ("tasks", {"tasks_count": 3}, r"needs 3 labels .* client \d+ has 2"),
        ("rotat", {}, "Unknown drift 'rotat'. Did you mean 'rotate'"),
    ],
)
def test_data_that_a_drift_cannot_change_are_one_clear_line(
    drift: str, keys: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        datasets.true_groups(config_of(drift, **keys))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("drift", ["mixture", "swap-part"])
def test_no_partition_is_advised_for_clients_of_the_data(drift: str, tmp_path: Path) -> None:
    for name in "ab":
        x, y = np.ones((10, 3), np.float32), np.arange(10) % 2
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)
    config = config_of(drift, clients=2, dataset="npz-folder", data_root=str(tmp_path))
    with pytest.raises(UserError, match=r": take (data with groups|swap-all)\."):
        datasets.true_groups(config)


def test_an_option_of_another_drift_is_refused() -> None:
    with pytest.raises(UserError, match="swap-chance is read by drift swap-all and swap-part"):
        config_of("rotate", swap_chance=0.5)


def test_a_device_that_has_only_its_own_file_can_drift_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 3)).astype(np.float32), np.arange(6) % 3
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    keys = {"dataset": "npz", "data_file": str(tmp_path / "own.npz"), "clients": 5}
    data = datasets.client_data(config_of("label-shift", **keys), 3, 1)
    assert data.y_train.tolist() == [1, 2, 0, 1, 2, 0]
    with pytest.raises(UserError, match="one file for 5 clients"):
        datasets.client_data(config_of("swap-all", **keys), 3, 1)


@given(st.integers(0, 30), st.integers(0, 2**31))
@settings(max_examples=20)
def test_swaps_are_a_permutation_at_any_step(step: int, seed: int) -> None:
    config = config_of("swap-all", swap_chance=0.5, drift_seed=seed)
    drift = datasets._drift(
        config.narrowed(*datasets._CHANGING), config.narrowed(*datasets._DEALING), None
    )
    origins = drift._origins.at(step)  # type: ignore[attr-defined]
    assert sorted(origins.tolist()) == list(range(12))


# The drift `concepts`: exchanged labels, from different steps on for each client.


def concepts_config(**keys: object) -> RunConfig:
    given = {"clients": 9, "partition": "iid", "drift": "concepts", **keys}
    return RunConfig.from_mapping({key.replace("_", "-"): value for key, value in given.items()})


def test_a_concept_exchanges_two_labels() -> None:
    y = np.arange(10)
    assert exchanged(y, 0).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert exchanged(y, 1).tolist() == [0, 2, 1, 3, 4, 5, 6, 7, 8, 9]
    assert exchanged(y, 3).tolist() == [0, 1, 2, 3, 4, 6, 5, 7, 8, 9]


@pytest.mark.parametrize("count", [2, 4])
def test_every_client_meets_every_concept_once_at_steps_of_its_own(count: int) -> None:
    config = concepts_config(concepts=count)
    steps = np.array([datasets.true_groups(config, step) for step in range(13)])
    assert steps[0].tolist() == [0] * 9
    moments = set()
    for client, concepts in enumerate(steps.T.tolist()):
        order = list(dict.fromkeys(concepts))
        first = [1 + (client + place) % (count - 1) for place in range(count - 1)]
        assert order == [0, *first]
        # Each concept lasts some consecutive steps, the last one until the end.
        assert concepts == sorted(concepts, key=order.index)
        changes = np.flatnonzero(np.diff(concepts)) + 1
        assert 1 <= changes.min() <= changes.max() <= 9
        moments.add(tuple(changes.tolist()))
    assert len(moments) > 3


def test_samples_keep_their_inputs_and_follow_the_concept() -> None:
    config = concepts_config(concepts=4, concept_samples="same")
    for step in (0, 9):
        for client, data in enumerate(datasets.all_clients(config, step)):
            dealt = datasets.client_data(concepts_config(drift="none"), client)
            assert np.array_equal(data.x_train, dealt.x_train)
            assert data.group == datasets.true_groups(config, step)[client]
            assert np.array_equal(data.y_train, exchanged(dealt.y_train, data.group))
            assert np.array_equal(data.y_test, exchanged(dealt.y_test, data.group))


def test_each_step_has_training_samples_of_its_own() -> None:
    config = concepts_config(concept_steps=5)
    whole = datasets.client_data(concepts_config(drift="none"), 2).x_train
    parts = [datasets.client_data(config, 2, step).x_train for step in range(5)]
    rows = [row.tobytes() for part in parts for row in part]
    assert sorted(rows) == sorted(row.tobytes() for row in whole)
    # After the last step the first samples come again.
    assert np.array_equal(datasets.client_data(config, 2, 5).x_train, parts[0])


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"concepts": 6}, "6 concepts exchange the labels 1 to 10, and there are labels 0 to 9"),
        ({"concepts": 4, "concept_steps": 3}, "4 concepts at 4 different steps, and concept-steps"),
        ({"concept_steps": 500}, "too few for a new one at each of 500 steps"),
    ],
)
def test_a_drift_that_the_data_cannot_have_is_an_error(keys: dict[str, object], error: str) -> None:
    with pytest.raises(UserError, match=error):
        datasets.true_groups(concepts_config(**keys))


# Data that are a mixture of distributions, drawn again at each step.


def test_a_mixture_has_its_main_group_and_the_others_share_what_is_left() -> None:
    config = config_of("mixture", clients=4, mixture_size_low=100, mixture_size_high=200)
    labels = [{0, 1}, {2, 3}, {4, 5, 6}, {7, 8, 9}]
    mains = []
    for step in range(40):
        for client, data in enumerate(all_at(config, step)):
            assert 100 <= len(data.y_train) == len(data.y_test) <= 200
            assert data.mixture is not None
            assert sum(data.mixture) == pytest.approx(1.0)
            for part in (data.y_train, data.y_test):
                shares = [np.isin(part, list(own)).mean() for own in labels]
                np.testing.assert_allclose(shares, data.mixture, atol=1e-12)
            others = np.delete(data.mixture, client)
            # Shares are rounded to whole samples: they may differ by one of at least 100.
            assert others.max() - others.min() <= 0.0101
            mains.append(data.mixture[client])
    assert 0.39 < min(mains) < 0.45
    assert 0.85 < max(mains) < 0.91
    # 160 draws from 0.4 to 0.9: deviation of the mean 0.011.
    assert np.mean(mains) == pytest.approx(0.65, abs=0.04)


def test_every_upload_brings_another_draw_and_no_test_sample_is_trained_with() -> None:
    config = config_of("mixture")
    first, second = (datasets.client_data(config, 1, step) for step in (0, 1))
    assert not same(first, second)
    trained, tested = set(), set()
    for step in range(3):
        for data in all_at(config, step):
            trained |= {x.tobytes() for x in data.x_train}
            tested |= {x.tobytes() for x in data.x_test}
    assert not trained & tested


def test_of_groups_that_see_things_differently_a_mixture_holds_all_views() -> None:
    config = config_of("mixture", clients=2, groups="0.5,0.5", partition="rotation-groups")
    data = datasets.client_data(config, 0)
    images = datasets.load(config)
    whole = images.inputs(np.arange(len(images.y)))
    upright = {x.tobytes() for x in whole}
    turned = {x.tobytes() for x in rotated(whole, 180.0)}
    seen = np.mean([x.tobytes() in upright for x in data.x_train])
    assert data.mixture is not None
    # A few digits look the same upside down.
    assert seen == pytest.approx(data.mixture[0], abs=0.01)
    assert all(x.tobytes() in upright | turned for x in data.x_train)
    # Samples of a distribution come from all clients'
    # data, seen as the distribution's group sees them.
    others = datasets.client_data(replace(config, drift="none"), 1).x_train
    own = {x.tobytes() for x in data.x_train}
    assert any(rotated(x[None], 180.0).tobytes() in own for x in others)


def test_a_mixture_of_images_turned_by_angles_that_are_no_right_ones() -> None:
    config = config_of(
        "mixture",
        clients=6,
        groups=3,
        partition="rotation-groups",
        mixture_size_low=40,
        mixture_size_high=60,
    )
    images = datasets.load(config)
    whole = images.inputs(np.arange(len(images.y)))
    views = [
        {x.tobytes() for x in rotated(whole, degrees, images.blank)} for degrees in (0, 120, 240)
    ]
    data = [datasets.client_data(config, client) for client in range(6)]
    # Clients are assigned to the groups in order; the main distribution has 40 to 90 %.
    for client, drawn in enumerate(data):
        assert drawn.mixture is not None
        seen = [sum(x.tobytes() in view for x in drawn.x_train) for view in views]
        assert 40 <= len(drawn.x_train) == len(drawn.x_test) <= 60
        np.testing.assert_allclose(np.array(seen) / len(drawn.x_train), drawn.mixture, atol=0.03)
        assert 0.39 <= drawn.mixture[client // 2] <= 0.91


def test_invalid_options_of_a_mixture_are_refused() -> None:
    redrawn = config_of("mixture", mixture_main="redrawn")
    mains = {datasets.client_data(redrawn, 0, step).group for step in range(30)}
    assert mains == {0, 1, 2, 3}
    assert datasets.true_groups(redrawn, 7)[0] == datasets.client_data(redrawn, 0, 7).group
    uneven = datasets.client_data(config_of("mixture", mixture_rest="dirichlet"), 0).mixture
    assert uneven is not None
    assert max(uneven[1:]) - min(uneven[1:]) > 0.05


def test_client_data_can_be_told_apart_by_their_mixture() -> None:
    data = datasets.client_data(RunConfig(clients=12), 0)
    assert data.mixture is None
    assert same(data, replace(data, group=None))


# The drift `scenario-stream`: new samples at every step, of one of two concepts.


SCENARIOS = ["s1", "s2", "a1", "a2"]


def stream_config(scenario: str = "s2", **keys: object) -> RunConfig:
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
def test_concepts_are_assigned_to_clients_at_random(seed: int) -> None:
    table = concepts_of(stream_config(seed=seed, stream_steps=10), 10)
    assert (table == table[:, :1]).all()
    assert set(table[:, 0].tolist()) == {0, 1}
    table = concepts_of(stream_config(seed=seed, stream_steps=10, stream_mode="multi-task"), 10)
    assert all(set(column.tolist()) == {0, 1} for column in table.T)
    assert len({tuple(column.tolist()) for column in table.T}) > 3


def test_both_concepts_occur_however_few_the_steps() -> None:
    for seed in range(8):
        table = concepts_of(stream_config(drift_seed=seed, stream_steps=2), 2)
        assert sorted(table[:, 0].tolist()) == [0, 1]


@pytest.mark.parametrize("mode", ["sequential", "multi-task"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_sample_is_met_twice_and_all_are_met(scenario: str, mode: str) -> None:
    config = stream_config(scenario, stream_mode=mode, scenario_variance=0.0, scenario_density=0.0)
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
    # Six clients have 299 or 300 of 1,797 samples, 239
    # or 240 for training: 47 or 48 in each of 5 steps.
    for step in range(5):
        sizes = {len(data.y_train) for data in datasets.all_clients(stream_config("s2"), step)}
        assert sizes <= {47, 48}
    config = stream_config("s1")
    concepts = concepts_of(config)[:, 0]
    for concept in (0, 1):
        of_concept = np.flatnonzero(concepts == concept)
        parts = [datasets.client_data(config, 2, int(step)).y_train for step in of_concept]
        kinds = set(np.concatenate(parts).tolist())
        assert kinds == ({0, 1, 2, 3, 4} if concept == 0 else {5, 6, 7, 8, 9})
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_concept_with_little_data_has_its_share_of_a_step() -> None:
    config, whole = stream_config("a2", scenario_little=0.25), stream_config("s2")
    for step, concept in enumerate(concepts_of(config)[:, 0].tolist()):
        count = len(datasets.client_data(whole, 1, step).y_train)
        few = len(datasets.client_data(config, 1, step).y_train)
        assert few == (round(0.25 * count) if concept else count)


@pytest.mark.parametrize("scenario", ["s1", "s2", "a2"])
def test_the_fewest_samples_of_any_step_are_known_before(scenario: str) -> None:
    config = stream_config(scenario, stream_mode="multi-task")
    for client in range(config.num_clients):
        sizes = [len(datasets.client_data(config, client, step).y_train) for step in range(5)]
        assert datasets.fewest_training(config, client) == min(sizes)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_samples_have_the_labels_of_the_concept_of_their_step(scenario: str) -> None:
    config = stream_config(scenario, stream_mode="multi-task")
    dataset = datasets.load(config)
    seen = Scenario(ScenarioOptions(scenario), config.seed)
    number = {row: i for i, row in enumerate(rows(dataset.inputs(np.arange(len(dataset.y)))))}
    clean = stream_config(
        scenario, stream_mode="multi-task", scenario_variance=0, scenario_density=0
    )
    found = set()
    for step in range(5):
        data = datasets.client_data(config, 3, step)
        assert data.group == datasets.true_groups(config, step)[3]
        found.add(data.group)
        assert data.group is not None
        if scenario == "a1":
            quiet = datasets.client_data(clean, 3, step)
            own = np.array([number.get(row, -1) for row in rows(quiet.x_test)])
            # Rounding to pixels may make a sample unrecognisable.
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
        # Five equal parts of the run, measured in rounds if these limit it.
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
    schedule = schedule_of(stream_config(strategy="fedavg", **keys))
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
        schedule_of(stream_config(strategy="fedavg", **keys))


def test_a_run_whose_end_is_not_known_may_be_long_enough() -> None:
    for keys in ({"drift_at": "every 20 rounds"}, {"drift_at": "every upload"}, {"drift_at": "9s"}):
        assert schedule_of(stream_config(strategy="fedavg", **keys)) is not None
    exact = stream_config(max_rounds=50, drift_at="10 rounds, 20 rounds, 30 rounds, 49 rounds")
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
def test_what_the_data_cannot_do_is_an_error_stream(keys: dict[str, object], error: str) -> None:
    with pytest.raises(UserError, match=error):
        datasets.true_groups(stream_config(**keys))


# Data recorded over a long time, which clients process in order.


def recorded(root: Path, **keys: object) -> RunConfig:
    """Return a run on five clients, each with 8, 4 and 6 samples of three periods."""
    for client in range(5):
        period = np.repeat([0, 1, 2], [8, 4, 6])
        x = np.column_stack([5.0 * period, client * 100 + np.arange(18.0)])
        np.savez(root / f"client-{client}.npz", x=x, y=np.arange(18) % 2, period=period)
    (root / "dataset.toml").write_text("mean = 0.0\nstd = 1.0\n")
    given = {"dataset": "npz-folder", "data-root": str(root), "drift": "in-order", **keys}
    return datasets.with_clients(RunConfig.from_mapping(given))


def test_in_order_a_step_is_a_period_for_training_and_testing_alike(tmp_path: Path) -> None:
    config = recorded(tmp_path)
    whole = datasets.client_data(config.with_values(drift="none"), 3)
    sizes = []
    for step, period in ((0, 0), (1, 1), (2, 2), (3, 2), (50, 2)):
        data = datasets.client_data(config, 3, step)
        for part in (data.x_train, data.x_test):
            assert set(part[:, 0]) == {5.0 * period}
        sizes.append(len(data.y_train) + len(data.y_test))
        trained, tested = (set(part[:, 1]) for part in (data.x_train, data.x_test))
        assert not trained & tested
        # A period whose samples are all for training gives one for testing.
        assert trained <= set(whole.x_train[:, 1])
        assert data.group is None
    assert sizes == [8, 4, 6, 6, 6]


def test_with_a_lag_clients_are_in_different_periods_which_are_their_groups(tmp_path: Path) -> None:
    config = recorded(tmp_path, **{"in-order-lag": 1})
    # Of five clients the last two are one period behind.
    assert datasets.true_groups(config, 0) == (0, 0, 0, 0, 0)
    assert datasets.true_groups(config, 1) == (1, 1, 1, 0, 0)
    assert datasets.true_groups(config, 2) == (2, 2, 2, 1, 1)
    assert datasets.true_groups(config, 3) == (2, 2, 2, 2, 2)
    assert datasets.client_data(config, 4, 1).group == 0
    assert set(datasets.client_data(config, 4, 1).x_train[:, 0]) == {0.0}


def test_data_that_cannot_come_in_order(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the data have 3 periods"):
        datasets.true_groups(recorded(tmp_path, **{"in-order-lag": 3}))
    with pytest.raises(UserError, match="digits has none: take npz-folder, with an array period"):
        datasets.true_groups(RunConfig(drift="in-order"))
    few = np.array([0, 0, 1, 2, 2])
    np.savez(tmp_path / "client-2.npz", x=np.zeros((5, 2)), y=few % 2, period=few)
    datasets.forget()
    with pytest.raises(UserError, match=r"client 2 has 1 of period 1, from 0: take fewer"):
        datasets.true_groups(recorded_as_is(tmp_path))


def recorded_as_is(root: Path) -> RunConfig:
    keys = {"dataset": "npz-folder", "data-root": str(root), "drift": "in-order"}
    return datasets.with_clients(RunConfig.from_mapping(keys))


@pytest.mark.parametrize("drift", ["label-shift", "tasks", "swap-part", "concepts"])
def test_drifts_of_classes_need_classes(drift: str) -> None:
    config = RunConfig.from_mapping({"clients": 2, "drift": drift})
    y = np.linspace(0, 1, 20, dtype=np.float32)
    whole = Dataset(np.zeros((20, 3), np.float32), y, num_classes=0, target=Target("K"))
    dealt = Dealt(config, whole, Partition((np.arange(10), np.arange(10, 20)), (None, None)))
    with pytest.raises(UserError, match=f"drift {drift} needs classes, and the labels of digits"):
        drift_of(config, dealt).check()
