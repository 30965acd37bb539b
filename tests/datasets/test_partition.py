from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.registry import PARTITIONERS
from raceme.datasets.partition import (
    MIN_SAMPLES,
    Partition,
    fitting_groups,
    largest_remainder,
    parse_groups,
)

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
@settings(max_examples=150, deadline=None)
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
    # FedProx tells a mean of 69 and a deviation of 106 for two classes and 1,000 clients.
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
def test_shares_that_are_no_shares_are_refused(text: str) -> None:
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
                ("0-9", "names 1 groups, but groups has 2"),
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
            "4 clients of 1 labels cannot hold all 10",
        ),
        (
            "classes",
            {"clients": 20, "classes_dealt": "in-blocks", "sizes": "power-law"},
            "sizes power-law does not apply to labels dealt in-blocks",
        ),
        ("iid", {"clients": 4, "sizes": "big"}, "sizes 'big'. Valid: equal, log-normal, power-law"),
    ],
)
def test_what_cannot_be_dealt_out_is_said(name: str, keys: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        deal(name, **keys)


def test_a_label_too_rare_for_its_holders_is_said() -> None:
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
def test_groups_that_would_get_nobody_join_a_neighbour(
    text: str, clients: int, labels: int | None, fitting: str
) -> None:
    assert fitting_groups(text, clients, labels) == fitting


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 30), st.integers(1, 12))
def test_fitting_groups_always_fit(parts: list[int], clients: int, labels: int) -> None:
    text = ",".join(f"{part / sum(parts):.17g}" for part in parts)
    shares = parse_groups(fitting_groups(text, clients, labels))
    for total in (clients, labels):
        assert largest_remainder(total, shares).min() > 0
