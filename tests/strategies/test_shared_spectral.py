"""Laplacian, eigengap, split decision and partition of small matrices, worked out by hand."""

import warnings

import numpy as np
import pytest

from raceme.strategies import shared
from raceme.strategies.shared import (
    affinity,
    laplacian,
    largest_gap,
    noise_gap,
    partition,
    should_split,
)


def blocks(sizes: list[int], inside: float, across: float) -> np.ndarray:
    """Similarities that are `inside` within blocks and `across` between them."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    matrix = np.where(labels[:, None] == labels[None, :], inside, across)
    np.fill_diagonal(matrix, 1.0)
    return matrix


def test_laplacian_by_hand() -> None:
    # Row sums 1.5 and 1.5: L = I − S / 1.5 = [[1/3, −1/3], [−1/3, 1/3]].
    matrix = np.array([[1.0, 0.5], [0.5, 1.0]])
    expected = np.array([[1 / 3, -1 / 3], [-1 / 3, 1 / 3]])
    np.testing.assert_allclose(laplacian(matrix), expected)


def test_laplacian_with_unequal_row_sums() -> None:
    # Row sums 1.5 and 1.25 and 1.25... of three clients: off-diagonal −S_ij / √(d_i d_j).
    matrix = np.array([[1.0, 0.25, 0.25], [0.25, 1.0, 0.0], [0.25, 0.0, 1.0]])
    result = laplacian(matrix)
    assert result[0, 0] == pytest.approx(1 - 1 / 1.5)
    assert result[0, 1] == pytest.approx(-0.25 / np.sqrt(1.5 * 1.25))
    assert result[1, 2] == 0.0


def test_largest_gap_by_hand() -> None:
    # Two pairs, 0.5 inside and 0 across: row sums 1.5, S / 1.5 has eigenvalues 1 and 1/3 twice,
    # so λ = 0, 0, 2/3, 2/3. The gap after k = 2 is 2/3, the one after k = 3 is 0.
    gap = largest_gap(blocks([2, 2], inside=0.5, across=0.0))
    assert gap is not None
    assert gap.parts == 2
    assert gap.size == pytest.approx(2 / 3)


def test_the_first_gap_does_not_count() -> None:
    # Dense positive similarities: λ_2 − λ_1 is by far the largest, yet R is at least 2.
    gap = largest_gap(blocks([3, 3], inside=0.99, across=0.98))
    assert gap is not None
    assert gap.parts == 2


def test_three_blocks_suggest_three_parts() -> None:
    gap = largest_gap(blocks([4, 5, 6], inside=0.999, across=0.98))
    assert gap is not None
    assert gap.parts == 3


@pytest.mark.parametrize("size", [2, 36])
def test_ten_eigenvalues_are_looked_at(size: int) -> None:
    # With k separate groups k eigenvalues are 0, and λ_{k+1} is not: the tenth shows nine groups,
    # and ten groups seem to have no gap. 36 clients in each are enough for Lanczos.
    nine = largest_gap(blocks([size] * 9, inside=0.9, across=0.0))
    ten = largest_gap(blocks([size] * 10, inside=0.9, across=0.0))
    assert nine is not None
    assert ten is not None
    assert nine.parts == 9
    assert nine.size > 0.9
    assert ten.size < 1e-6


@pytest.mark.parametrize("size", [1, 2])
def test_too_few_clients_have_no_gap(size: int) -> None:
    assert largest_gap(np.ones((size, size))) is None


def test_split_on_both_sides_of_the_threshold() -> None:
    # 0.0008^0.15 = exp(0.15 · ln 0.0008) = exp(−1.069634) = 0.343134.
    assert should_split(0.3431, gap=0.0008, gamma=0.15)
    assert not should_split(0.3432, gap=0.0008, gamma=0.15)
    assert not should_split(0.3, gap=-1e-9, gamma=0.15)
    # √0.25 = 0.5 is not below itself.
    assert not should_split(0.5, gap=0.25, gamma=0.5)


def test_partition_finds_the_blocks_and_numbers_them_in_order() -> None:
    order = np.array([5, 0, 3, 1, 4, 2])
    matrix = blocks([3, 3], inside=0.999, across=0.9)[np.ix_(order, order)]
    labels = partition(matrix, parts=2, seed=0)
    assert labels.tolist() == [0, 1, 0, 1, 0, 1]


def test_as_many_parts_as_clients_are_one_each_without_a_warning() -> None:
    matrix = blocks([2, 2], inside=0.9, across=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert partition(matrix, parts=4, seed=0).tolist() == [0, 1, 2, 3]


def test_groups_without_any_similarity_are_divided_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        labels = partition(blocks([2, 3], inside=0.9, across=0.0), parts=2, seed=0)
    assert labels.tolist() == [0, 0, 1, 1, 1]


def test_negative_similarity_is_no_edge() -> None:
    assert affinity(np.array([[1.0, -0.5], [-0.5, 1.0]])).tolist() == [[1.0, 0.0], [0.0, 1.0]]


def noisy(sizes: list[int], across: float, seed: int) -> np.ndarray:
    """Blocks of similarity 0.99 and noise of 0.001 on every pair."""
    noise = np.random.default_rng(seed).normal(0, 0.001, (sum(sizes), sum(sizes)))
    matrix = blocks(sizes, inside=0.99, across=across) + (noise + noise.T) / np.sqrt(2)
    np.fill_diagonal(matrix, 1.0)
    return matrix


@pytest.mark.parametrize("seed", range(10))
def test_groups_show_in_a_larger_gap_than_their_similarities_have_by_chance(seed: int) -> None:
    matrix = noisy([8, 12], across=0.97, seed=seed)
    gap = largest_gap(matrix)
    assert gap is not None
    assert gap.size > 2 * noise_gap(matrix, np.random.default_rng(seed))


def test_one_group_rarely_has_a_larger_gap_than_its_similarities_have_by_chance() -> None:
    # With 11 equally distributed gaps, a given one is the largest in 1 of 11 cases.
    beaten = 0
    for seed in range(60):
        matrix = noisy([20], across=0.0, seed=seed)
        gap = largest_gap(matrix)
        assert gap is not None
        beaten += gap.size > noise_gap(matrix, np.random.default_rng(seed))
    assert beaten <= 15


def test_clients_that_are_all_alike_have_no_gap_and_take_no_time() -> None:
    rng = np.random.default_rng(0)
    noise = 1e-8 * rng.normal(size=(320, 320))
    weights = 1.0 + (noise + noise.T) / 2.0
    np.fill_diagonal(weights, 1.0)
    gap = largest_gap(weights)
    assert gap is not None
    assert abs(gap.size) < 1e-8


def test_all_eigenvalues_are_computed_if_lanczos_does_not_converge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matrix = noisy([160, 160], across=0.97, seed=0)
    expected = largest_gap(matrix)
    monkeypatch.setattr(shared, "_RESTARTS", 1)
    found = largest_gap(matrix)
    assert expected is not None
    assert found is not None
    assert found.parts == expected.parts == 2
    assert found.size == pytest.approx(expected.size)
