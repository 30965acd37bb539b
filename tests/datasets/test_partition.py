"""Partitions: the samples of each client."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.registry import PARTITIONERS
from raceme.datasets.partition import (
    MIN_SAMPLES,
    Partition,
    Scenario,
    ScenarioOptions,
    fitting_groups,
    largest_remainder,
    noisy,
    parse_groups,
)
from raceme.datasets.source import Dataset, Target

LABELS = np.repeat(np.arange(10), 80)


def deal(name: str, labels: np.ndarray = LABELS, seed: int = 0, **keys: object) -> Partition:
    # Not every partition reads all of them.
    given = {"partition": name} | {key.replace("_", "-"): value for key, value in keys.items()}
    config = RunConfig.from_mapping(given, lenient=True)
    dealt: Partition = PARTITIONERS[name](labels, config, np.random.default_rng(seed))
    return dealt


def counts(partition: Partition, labels: np.ndarray = LABELS) -> np.ndarray:
    """Samples of each label that each client has, shape (clients, labels)."""
    return np.array([np.bincount(labels[own], minlength=10) for own in partition.indices])


@given(
    name=st.sampled_from(sorted(PARTITIONERS)),
    sizes=st.sampled_from(["equal", "power-law"]),
    clients=st.integers(4, 30),
    alpha=st.sampled_from([0.01, 0.1, 1.0, 100.0]),
    classes_per_client=st.integers(3, 10),
    label_sizes=st.lists(st.integers(80, 120), min_size=10, max_size=10),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=150)
def test_every_sample_goes_to_one_client_and_every_client_gets_enough(
    name: str,
    sizes: str,
    clients: int,
    alpha: float,
    classes_per_client: int,
    label_sizes: list[int],
    seed: int,
) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(10), label_sizes))
    partition = deal(
        name,
        labels,
        seed,
        clients=clients,
        sizes=sizes,
        dirichlet_alpha=alpha,
        classes_per_client=classes_per_client,
    )
    everything = np.concatenate(partition.indices)
    assert len(partition.indices) == len(partition.groups) == clients
    assert sorted(everything.tolist()) == list(range(len(labels)))
    assert min(len(own) for own in partition.indices) >= MIN_SAMPLES


@pytest.mark.parametrize("name", sorted(PARTITIONERS))
def test_the_same_generator_deals_the_same_samples(name: str) -> None:
    first, again, other = (deal(name, seed=seed, clients=12) for seed in (3, 3, 4))
    assert all(map(np.array_equal, first.indices, again.indices))
    assert not all(map(np.array_equal, first.indices, other.indices))


def test_groups_of_the_paper_divide_clients_and_labels_by_the_same_shares() -> None:
    # Shares 0.2, 0.2, 0.3, 0.3 of 40 clients are 8, 8, 12, 12, and of 10 labels 2, 2, 3, 3.
    partition = deal("label-groups", clients=40)
    assert np.bincount(np.array(partition.groups, int)).tolist() == [8, 8, 12, 12]
    labels_of = [{0, 1}, {2, 3}, {4, 5, 6}, {7, 8, 9}]
    for own, group in zip(partition.indices, partition.groups, strict=True):
        assert group is not None
        assert set(LABELS[own]) <= labels_of[group]


def test_groups_whose_labels_overlap_divide_the_common_ones_by_their_clients() -> None:
    # 80 samples of each label; 10, 6 and 4 clients: label 4 is divided 50 to 30, 7 is 48 to 32.
    keys = {"clients": 20, "groups": "0.5,0.3,0.2", "group_labels": "0-4,4-7,7-9"}
    partition = deal("label-groups", **keys)
    table = counts(partition)
    of_group = [table[np.array(partition.groups) == group].sum(axis=0) for group in range(3)]
    assert np.array(of_group).tolist() == [
        [80, 80, 80, 80, 50, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 30, 80, 80, 48, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 32, 80, 80],
    ]


def test_naming_the_labels_of_the_default_groups_changes_nothing() -> None:
    named = deal("label-groups", clients=40, group_labels="0-1,2-3,4-6,7-9")
    assert all(map(np.array_equal, named.indices, deal("label-groups", clients=40).indices))


def test_equal_sizes_stay_equal_however_skewed_the_labels_are() -> None:
    # 800 samples of 40 clients are 20 each: 160 samples for 8 clients, 240 for 12.
    sizes = [len(own) for own in deal("label-groups", clients=40).indices]
    assert min(sizes) >= 18
    assert max(sizes) <= 22


@pytest.mark.parametrize(("alpha", "low", "high"), [(0.05, 0.7, 1.0), (1000.0, 0.1, 0.2)])
def test_a_small_alpha_gives_clients_one_label_and_a_large_one_all(
    alpha: float, low: float, high: float
) -> None:
    table = counts(deal("dirichlet", clients=10, dirichlet_alpha=alpha))
    largest_share = (table.max(axis=1) / table.sum(axis=1)).mean()
    assert low <= largest_share <= high


def test_dirichlet_by_class_stops_at_an_equal_share_of_all_samples() -> None:
    # A client gets further labels as long as it has less than 800 / 4 = 200 samples, and 80 of one
    # at most: no client has more than 279. Without the limit a small alpha gives one nearly all.
    for seed in range(20):
        keys = {"clients": 4, "dirichlet_alpha": 0.1, "dirichlet_least": 30}
        sizes = [len(own) for own in deal("dirichlet-by-class", seed=seed, **keys).indices]
        assert sum(sizes) == 800
        assert 30 <= min(sizes) <= max(sizes) <= 279


def test_classes_gives_every_client_exactly_that_many_labels_and_all_labels_holders() -> None:
    table = counts(deal("classes", clients=15, classes_per_client=2))
    assert ((table > 0).sum(axis=1) == 2).all()
    # 15 clients of 2 labels are 30 places for 10 labels: 3 holders of each.
    assert ((table > 0).sum(axis=0) == 3).all()


def test_iid_deals_equal_numbers_of_every_label_in_expectation() -> None:
    table = counts(
        deal("iid", np.repeat(np.arange(10), 1000), clients=4), np.repeat(range(10), 1000)
    )
    assert (table.sum(axis=1) == 2500).all()
    assert table.min() > 200  # 250 expected, standard deviation below 14


def test_power_law_sizes_fall_as_one_over_the_rank() -> None:
    # 1, 1/2, 1/3, 1/4 of 800 - 4 * 5 samples, on top of the 5 that everyone gets:
    # 780 / (25 / 12) = 374.4, then 187.2, 124.8 and 93.6.
    sizes = sorted(len(own) for own in deal("iid", clients=4, sizes="power-law").indices)
    assert sizes == [99, 130, 192, 379]


def test_classes_dealt_in_turn_go_round_the_labels_as_in_fedprox() -> None:
    table = counts(deal("classes", clients=20, classes_per_client=2, classes_dealt="in-turn"))
    held = [np.flatnonzero(row).tolist() for row in table]
    assert held[:3] == [[0, 1], [1, 2], [2, 3]]
    assert held[9] == [0, 9]
    assert held[10:] == held[:10]


def test_classes_dealt_in_blocks_are_groups_with_unequal_parts_as_in_pfllib() -> None:
    labels = np.repeat(np.arange(10), 7000)
    partition = deal("classes", labels, clients=20, classes_dealt="in-blocks")
    table = counts(partition, labels)
    held = [np.flatnonzero(row).tolist() for row in table]
    assert held[:4] == [[0, 1]] * 4
    assert held[4:8] == [[2, 3]] * 4
    assert held[16:] == [[8, 9]] * 4
    assert partition.groups == tuple(np.repeat(np.arange(5), 4).tolist())
    # 1,750 are an equal part of 7,000: three clients have 175 to 1,750, the last the rest.
    of_block = table.reshape(5, 4, 10)
    parts = [of_block[label // 2, :, label] for label in range(10)]
    assert all(part.sum() == 7000 for part in parts)
    drawn = np.concatenate([part[:3] for part in parts])
    assert drawn.min() >= 175
    assert drawn.max() <= 1750
    assert len(set(drawn.tolist())) > 25
    assert all(part[3] == part.max() for part in parts)


@pytest.mark.parametrize("name", ["label-groups", "dirichlet", "classes"])
def test_power_law_sizes_are_uneven_under_label_skew_too(name: str) -> None:
    keys = {"classes_per_client": 5, "clients": 20, "dirichlet_alpha": 100.0}
    sizes = sorted(len(own) for own in deal(name, sizes="power-law", **keys).indices)
    assert sizes[-1] > 3 * sizes[len(sizes) // 2]


def test_log_normal_sizes_are_uneven_as_in_the_papers_mnist() -> None:
    # FedProx reports a mean of 69 and a deviation of 106 for two classes and 1,000 clients.
    labels = np.repeat(np.arange(10), 7000)
    deviations = []
    for seed in range(5):
        partition = deal("classes", labels, seed, clients=1000, sizes="log-normal")
        sizes = np.array([len(own) for own in partition.indices])
        assert sizes.sum() == 70_000
        assert 6 <= sizes.min() < 12
        assert 25 < np.median(sizes) < 45
        deviations.append(sizes.std())
    assert 90 < np.mean(deviations) < 125


def test_only_label_groups_claim_to_know_a_true_group() -> None:
    for name in ("dirichlet", "classes", "iid"):
        assert set(deal(name, clients=10).groups) == {None}


def test_largest_remainder_by_hand() -> None:
    # 0.2, 0.2, 0.3, 0.3 of 7 are 1.4, 1.4, 2.1, 2.1: 1, 1, 2, 2 and one left, which goes to the
    # first of the remainders 0.4.
    assert largest_remainder(7, np.array([0.2, 0.2, 0.3, 0.3])).tolist() == [2, 1, 2, 2]
    assert largest_remainder(10, np.array([0.2, 0.2, 0.3, 0.3])).tolist() == [2, 2, 3, 3]
    assert largest_remainder(0, np.array([0.5, 0.5])).tolist() == [0, 0]


@given(
    total=st.integers(0, 10_000), weights=st.lists(st.floats(0.01, 100.0), min_size=1, max_size=50)
)
def test_largest_remainder_loses_nothing_and_keeps_within_one_of_the_share(
    total: int, weights: list[float]
) -> None:
    shares = np.array(weights) / np.sum(weights)
    dealt = largest_remainder(total, shares)
    assert dealt.sum() == total
    assert (np.abs(dealt - shares * total) < 1 + 1e-6).all()


def test_a_number_stands_for_so_many_equal_groups() -> None:
    assert parse_groups("3").tolist() == [1 / 3] * 3
    assert parse_groups("1").tolist() == [1.0]
    partition = deal("rotation-groups", clients=60, groups="6")
    assert np.bincount(np.array(partition.groups, int)).tolist() == [10] * 6
    assert fitting_groups("4", 2).count(",") == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-2",
        "2.5",
        "100000",
        "a,b",
        "0.5,0.6",
        "0.5,0.4",
        "1.5,-0.5",
        "0,1",
        "nan,1",
        "0.2;0.8",
    ],
)
def test_invalid_shares_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"groups must be .*0\.2,0\.2,0\.3,0\.3 or 4; got"):
        parse_groups(text)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("iid", {"clients": 161}, "161 of them need 805 samples, 5 each, but .* only 800"),
        ("dirichlet", {"clients": 161}, "Too many clients"),
        ("dirichlet-by-class", {"clients": 161}, "Too many clients"),
        ("dirichlet-by-class", {"clients": 9, "dirichlet_least": 89}, "Give at most 88, or"),
        ("classes", {"clients": 161}, "Too many clients"),
        ("label-groups", {"clients": 161}, "Too many clients"),
        ("label-groups", {"clients": 3}, "4 groups, but there are only 3 clients"),
        ("label-groups", {"clients": 40, "groups": ",".join(["0.0625"] * 16)}, "only 10 labels"),
        (
            "label-groups",
            {"clients": 40, "groups": "0.02,0.98"},
            r"share of 0\.02 of 10 labels is not even one",
        ),
        ("label-groups", {"clients": 4, "groups": "0.1,0.9"}, "0.1 of 4 clients is not even one"),
        *(
            ("label-groups", {"clients": 40, "groups": "2", "group_labels": text}, message)
            for text, message in (
                ("0-4,x", "a label or a range of labels per group, e.g. 0-4,4-7,7-9; got '0-4,x'"),
                ("0-9", "names 1 group, but groups has 2"),
                ("0-9,12", "'12' is no label of the data"),
                ("0-4,6-9", r"leaves out labels of the data: \[5\]"),
            )
        ),
        ("classes", {"clients": 4}, "4 clients of 2 labels cannot hold all 10 labels"),
        ("classes", {"clients": 20, "classes_per_client": 11}, "have only 10 labels"),
        (
            "classes",
            {"clients": 8, "classes_dealt": "in-turn"},
            "take at least 9 clients, or deal mixed",
        ),
        (
            "classes",
            {"clients": 20, "classes_per_client": 3, "classes_dealt": "in-blocks"},
            "10 labels cannot be dealt in blocks of 3: take a classes-per-client that divides 10",
        ),
        (
            "classes",
            {"clients": 4, "classes_per_client": 1, "classes_dealt": "in-blocks"},
            "4 clients of 1 label cannot hold all 10",
        ),
        (
            "classes",
            {"clients": 20, "classes_dealt": "in-blocks", "sizes": "power-law"},
            "sizes power-law does not apply to labels dealt in-blocks",
        ),
        ("iid", {"clients": 4, "sizes": "big"}, "sizes 'big'. Valid: equal, log-normal, power-law"),
    ],
)
def test_an_impossible_partition_is_reported(
    name: str, keys: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        deal(name, **keys)


def test_a_label_too_rare_for_its_holders_is_reported() -> None:
    labels = np.repeat(np.arange(4), [400, 400, 400, 3])
    with pytest.raises(UserError, match=r"Too few samples of label 3: 3 for 10 clients"):
        deal("classes", labels, clients=20, classes_per_client=2)


def test_indices_ascend() -> None:
    for own in deal("dirichlet", clients=7).indices:
        assert all(a < b for a, b in pairwise(own))


@pytest.mark.parametrize(
    ("text", "clients", "labels", "fitting"),
    [
        ("0.2,0.2,0.3,0.3", 4, 10, "0.2,0.2,0.3,0.3"),
        ("0.2, 0.2, 0.3, 0.3", 40, 10, "0.2, 0.2, 0.3, 0.3"),
        # 0.6, 0.6, 0.9 and 0.9 clients: the second gets none and joins the first.
        ("0.2,0.2,0.3,0.3", 3, 10, "0.4,0.3,0.3"),
        ("0.2,0.2,0.3,0.3", 2, 10, "0.4,0.6"),
        ("0.2,0.2,0.3,0.3", 1, None, "1"),
        ("0.2,0.2,0.3,0.3", 40, 3, "0.4,0.3,0.3"),
        # 0.2 of 4 labels is 0.8, the largest remainder; 0.1 gets none and joins the smaller side.
        ("0.5,0.1,0.2,0.2", 100, 4, "0.5,0.3,0.2"),
        ("0.02,0.98", 40, 10, "1"),
        ("1000", 1, None, "1"),
    ],
)
def test_groups_without_clients_join_a_neighbour(
    text: str, clients: int, labels: int | None, fitting: str
) -> None:
    assert fitting_groups(text, clients, labels) == fitting


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 30), st.integers(1, 12))
def test_fitting_groups_always_fit(parts: list[int], clients: int, labels: int) -> None:
    text = ",".join(f"{part / sum(parts):.17g}" for part in parts)
    shares = parse_groups(fitting_groups(text, clients, labels))
    for total in (clients, labels):
        assert largest_remainder(total, shares).min() > 0


# The scenarios of FAACL's thesis: samples of each client, and transformations of each group.


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


def test_draws_of_a_mixture_have_the_labels_of_their_group() -> None:
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
        ({"clients": 1}, "two groups, and needs two clients and two classes: got 1 and"),
        ({"clients": 400}, "Too many clients: 400"),
        ({"scenario": "s3"}, "Unknown value of scenario 's3'"),
        ({"scenario_density": 1.5}, "scenario-density must be"),
        ({"scenario_noise": "neither"}, "Unknown value of scenario-noise 'neither'"),
    ],
)
def test_an_impossible_partition_option_is_an_error(keys: dict[str, object], error: str) -> None:
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
