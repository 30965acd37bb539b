"""The scenarios of FAACL's thesis: who has which samples, and how a group sees them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.datasets.partition import Scenario, ScenarioOptions, noisy
from raceme.datasets.source import Dataset, Target


def config_of(scenario: str, **keys: object) -> RunConfig:
    given = {"clients": 6, "partition": "scenario", "scenario": scenario, **keys}
    return RunConfig.from_mapping({key.replace("_", "-"): value for key, value in given.items()})


def scenario_of(name: str, seed: int = 0, **options: Any) -> Scenario:
    return Scenario(ScenarioOptions(name, **options), seed)


def everything(config: RunConfig) -> list[tuple[np.ndarray, np.ndarray]]:
    """Inputs and labels of each client, training and test samples together."""
    return [
        (np.concatenate([d.x_train, d.x_test]), np.concatenate([d.y_train, d.y_test]))
        for d in datasets.all_clients(config)
    ]


def true_labels(config: RunConfig, client: int) -> np.ndarray:
    """The dataset's labels of a client's samples, training samples first."""
    train, test = datasets._drift_of_all(datasets.with_clients(config)).dealt.indices(client)
    return datasets.load(config).y[np.concatenate([train, test])]


def test_every_other_client_is_of_the_second_group() -> None:
    assert datasets.true_groups(config_of("s0")) == (0, 0, 0, 0, 0, 0)
    for name in ("s1", "s2", "a1", "a2"):
        assert datasets.true_groups(config_of(name)) == (0, 1, 0, 1, 0, 1)


def test_s1_divides_the_classes_and_s0_and_s2_give_all_to_everybody() -> None:
    kinds = [set(y.tolist()) for _, y in everything(config_of("s1"))]
    assert kinds == [{0, 1, 2, 3, 4}, {5, 6, 7, 8, 9}] * 3
    for name in ("s0", "s2"):
        assert all(len(np.unique(y)) == 10 for _, y in everything(config_of(name)))
    # Of an odd number the first group has one more.
    assert scenario_of("s1").classes(np.arange(5), 0).tolist() == [0, 1, 2]
    assert scenario_of("s1").classes(np.arange(5), 1).tolist() == [3, 4]


def test_s2_shifts_the_labels_of_the_second_group() -> None:
    config = config_of("s2")
    for client, (_, y) in enumerate(everything(config)):
        expected = true_labels(config, client)
        assert np.array_equal(y, (expected + 1) % 10 if client % 2 else expected)
    assert scenario_of("s2").labels(np.array([0, 8, 9]), 1, 10).tolist() == [1, 9, 0]


@pytest.mark.parametrize(
    ("keys", "much", "little"),
    [
        # 1,797 samples less the 5 of everybody, by weights 1 and 0.1 of three clients each:
        # 5 + 1767 / 3.3 = 540.5 and 5 + 53.5 = 58.5.
        ({"scenario_little": 0.1}, 540.5, 58.5),
        # By default 0.3: 5 + 1767 / 3.9 = 458.1 and 5 + 135.9 = 140.9.
        ({}, 458.1, 140.9),
    ],
)
def test_a2_gives_the_second_group_little_data_and_other_labels_for_a_tenth_of_the_classes(
    keys: dict[str, object], much: float, little: float
) -> None:
    config = config_of("a2", **keys)
    own = everything(config)
    assert [len(y) for _, y in own] == pytest.approx([much, little] * 3, abs=1)
    for client, (_, y) in enumerate(own):
        expected = true_labels(config, client)
        if client % 2:
            assert 0 in expected
            expected = np.where(expected == 0, 1, expected)
        assert np.array_equal(y, expected)


def test_a_predictor_differs_on_so_many_classes() -> None:
    y = np.array([0, 1, 5, 6, 61])
    assert scenario_of("a2").labels(y, 0, 62).tolist() == [0, 1, 5, 6, 61]
    # A tenth of 62 classes are six, 0 to 5.
    assert scenario_of("a2").labels(y, 1, 62).tolist() == [1, 2, 6, 6, 61]
    assert scenario_of("a2", scenario_differs=0.0).labels(y, 1, 62).tolist() == y.tolist()
    # At least one of few classes; all of them is S2.
    assert scenario_of("a2").labels(np.arange(3), 1, 3).tolist() == [1, 1, 2]
    assert scenario_of("a2", scenario_differs=1.0).labels(np.arange(3), 1, 3).tolist() == [1, 2, 0]


def test_noise_is_gaussian_then_salt_and_pepper_within_the_range_of_pixels() -> None:
    grey = np.full((100, 100), 0.5, np.float32)
    assert np.array_equal(noisy(grey, 0.0, 0.0, np.random.default_rng(0)), grey)
    spots = noisy(grey, 0.0, 0.7, np.random.default_rng(0))
    # 10,000 pixels: 0.35 each of pepper and salt, with a standard deviation of 0.005.
    assert np.mean(spots == 0) == pytest.approx(0.35, abs=0.02)
    assert np.mean(spots == 1) == pytest.approx(0.35, abs=0.02)
    assert np.mean(spots == 0.5) == pytest.approx(0.3, abs=0.02)
    fog = noisy(grey, 0.01, 0.0, np.random.default_rng(0))
    assert fog.mean() == pytest.approx(0.5, abs=0.005)
    assert fog.var() == pytest.approx(0.01, rel=0.1)
    # With a deviation of 0.5 about 0.5, 16 % lie beyond either end, where they are cut.
    storm = noisy(grey, 0.25, 0.0, np.random.default_rng(0))
    assert (storm.min(), storm.max()) == (0.0, 1.0)
    assert np.mean(storm == 0) == pytest.approx(0.16, abs=0.02)


def test_a1_makes_the_second_groups_images_noisy_for_training_and_testing_alike() -> None:
    still, changed = everything(config_of("s0")), everything(config_of("a1"))
    dataset = datasets.load(config_of("a1"))
    for client, ((before, y), (after, same_y)) in enumerate(zip(still, changed, strict=True)):
        assert np.array_equal(y, same_y)
        pixels = after * dataset.std + dataset.mean
        if client % 2 == 0:
            assert np.array_equal(before, after)
            continue
        assert pixels.min() == pytest.approx(0.0, abs=1e-6)
        assert pixels.max() == pytest.approx(1.0, abs=1e-6)
        for x in (pixels[:100], pixels[-20:]):
            # 0.35 by salt and pepper each, and of the other 0.3 what the Gaussian noise cuts off.
            extreme = (np.abs(x) < 1e-6) | (np.abs(x - 1) < 1e-6)
            assert 0.75 < extreme.mean() < 0.9


def test_a_noisy_image_can_have_either_kind_of_noise() -> None:
    dataset, samples = datasets.load(config_of("a1")), np.arange(400)
    clean = dataset.inputs(samples)

    def changed(**options: float) -> np.ndarray:
        scenario = scenario_of("a1", scenario_noise="either", **options)
        return (scenario.inputs(dataset, samples, 1) != clean).any(axis=(1, 2, 3))

    spotted, foggy = changed(scenario_variance=0.0), changed(scenario_density=0.0)
    # Half of 400, with a standard deviation of 10; an image without the one kind has the other.
    assert 160 < spotted.sum() < 240
    assert np.array_equal(foggy, ~spotted)


def test_the_noise_of_a_sample_is_its_own_whoever_asks_for_it() -> None:
    dataset = datasets.load(RunConfig(clients=6))
    scenario = scenario_of("a1")
    both = scenario.inputs(dataset, np.array([7, 300]), 1)
    assert np.array_equal(scenario.inputs(dataset, np.array([300]), 1)[0], both[1])
    other = scenario_of("a1", seed=1).inputs(dataset, np.array([7, 300]), 1)
    assert not np.array_equal(other, both)
    assert np.array_equal(scenario.inputs(dataset, np.array([7]), 0), dataset.inputs(np.array([7])))


def test_what_others_make_of_the_samples_has_the_labels_of_the_group() -> None:
    # A server's samples of the second distribution, and a mixture's draws.
    held = datasets.proxy_sets(config_of("s2", proxy="50"))
    first, second = held.proxies
    assert np.array_equal(second.y, (first.y + 1) % 10)
    config = config_of("s2", drift="mixture", mixture_main_low=0.9)
    rows = {x.tobytes(): y for x, y in zip(*everything(config_of("s0", clients=1))[0], strict=True)}
    for client in range(6):
        data = datasets.client_data(config, client, 1)
        true = np.array([rows[x.tobytes()] for x in data.x_train])
        assert data.mixture is not None
        assert np.mean(data.y_train == (true + 1) % 10) == pytest.approx(data.mixture[1])
        assert np.mean(data.y_train == true) == pytest.approx(data.mixture[0])


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"clients": 1}, "scenario s1 has two groups, and there are 1 clients"),
        ({"clients": 400}, "Too many clients: 400"),
        ({"scenario": "s3"}, "Unknown value of scenario 's3'"),
        ({"scenario_density": 1.5}, "scenario-density must be"),
        ({"scenario_noise": "neither"}, "Unknown value of scenario-noise 'neither'"),
    ],
)
def test_what_cannot_be_is_an_error(keys: dict[str, object], error: str) -> None:
    with pytest.raises(UserError, match=error):
        datasets.true_groups(config_of(**{"scenario": "s1", **keys}))


def test_a_dataset_that_has_no_such_scenario_is_an_error() -> None:
    numbers = Dataset(np.zeros((4, 5), np.float32), np.arange(4), num_classes=4)
    scenario_of("s1").check(numbers, "numbers")
    with pytest.raises(UserError, match=r"adds noise to pixels from 0 to 1, and numbers has"):
        scenario_of("a1").check(numbers, "numbers")
    images = replace(numbers, x=np.zeros((4, 1, 2, 2), np.float32))
    scenario_of("a1").check(images, "images")
    with pytest.raises(UserError, match="adds noise to pixels from 0 to 1"):
        scenario_of("a1").check(replace(images, x=images.x - 0.5), "scaled")
    with pytest.raises(UserError, match="needs two or more classes, and air has none"):
        scenario_of("s2").check(replace(numbers, num_classes=0, target=Target("°C")), "air")
