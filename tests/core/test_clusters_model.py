"""A server's model owns its array and its version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from raceme.core.clusters import Model, NonFiniteModelError


def model(*values: float, version: int = 0) -> Model:
    return Model(np.array(values, np.float32), version)


def test_mixing_matches_numbers_computed_by_hand() -> None:
    one = model(1.0, 2.0, version=4)
    # 0.75 · (1, 2) + 0.25 · (5, −2).
    one.mix(np.array([5.0, -2.0], np.float32), 0.25)
    assert one.vector.tolist() == [2.0, 1.0]
    assert one.version == 5


def test_mixing_a_part_of_the_weights() -> None:
    one = model(1.0, 2.0, 3.0)
    one.mix(np.array([3.0, 4.0, 5.0], np.float32), 0.5, where=np.array([True, False, True]))
    assert one.vector.tolist() == [2.0, 2.0, 4.0]
    assert one.version == 1


def test_a_model_larger_than_a_block_is_mixed_whole() -> None:
    size = 3 * (1 << 16) + 5
    one, w_i = Model(np.zeros(size, np.float32)), np.arange(size, dtype=np.float32)
    mask = np.arange(size) % 3 == 0
    one.mix(w_i, 0.5, where=mask)
    assert np.array_equal(one.vector, np.where(mask, 0.5 * w_i, 0.0))


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_zero_and_one_are_valid_shares(alpha: float) -> None:
    one = model(1.0)
    one.mix(np.array([3.0], np.float32), alpha)
    assert one.vector.tolist() == [1.0 + 2.0 * alpha]


@pytest.mark.parametrize("alpha", [-0.01, 1.26, np.nan])
def test_numbers_outside_of_zero_to_one_are_no_shares(alpha: float) -> None:
    one = model(1.0)
    with pytest.raises(ValueError, match="must be between 0 and 1, got"):
        one.mix(np.array([3.0], np.float32), alpha)
    assert (one.vector.tolist(), one.version) == ([1.0], 0)


def test_other_changes_match_numbers_computed_by_hand() -> None:
    one = model(1.0, 2.0)
    one.move(np.array([0.5, -1.0], np.float32))
    assert (one.vector.tolist(), one.version) == ([1.5, 1.0], 1)
    one.replace(np.array([4.0, 8.0]))
    assert (one.vector.tolist(), one.version) == ([4.0, 8.0], 2)
    one.average([np.float32([0, 4]), np.float32([4, 0])], [1.0, 3.0])
    assert (one.vector.tolist(), one.version) == ([3.0, 1.0], 3)
    # Copied counters belong to the last change, so that the version stays 3.
    one.copy_from(np.float32([9, 9]), np.array([False, True]))
    assert (one.vector.tolist(), one.version) == ([3.0, 9.0], 3)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39])
@pytest.mark.parametrize(
    "change",
    [
        lambda one, v: one.move(v),
        lambda one, v: one.replace(v),
        lambda one, v: one.average([v, np.zeros(2)], [1.0, 1.0]),
    ],
    ids=["move", "replace", "average"],
)
@pytest.mark.filterwarnings("error")
def test_a_change_that_is_not_finite_is_refused_and_changes_nothing(
    change: Callable[[Model, np.ndarray], None], value: float
) -> None:
    one = model(1.0, 2.0, version=3)
    with pytest.raises(NonFiniteModelError, match="NaN or infinity"):
        change(one, np.array([0.0, value]))
    assert (one.vector.tolist(), one.version) == ([1.0, 2.0], 3)


def test_only_the_model_changes_its_numbers() -> None:
    mine = np.array([1.0, 2.0], np.float32)
    one = Model(mine, version=6)
    with pytest.raises(ValueError, match="read-only"):
        one.vector[0] = 9.0
    with pytest.raises(ValueError, match="read-only"):
        one.vector += 1.0
    copied = one.copy()
    assert copied.version == one.version == 6
    copied.replace(np.array([7.0, 7.0]))
    assert one.vector.tolist() == [1.0, 2.0]
    # The model copies the array that it is given.
    w_i = np.array([3.0, 3.0], np.float32)
    one.replace(w_i)
    w_i[...] = 0.0
    assert one.vector.tolist() == [3.0, 3.0]


def test_nobody_can_set_the_version_or_the_vector() -> None:
    one = model(1.0)
    with pytest.raises(FrozenInstanceError):
        one.version = 5  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        one.version += 1  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        one.vector = np.zeros(1, np.float32)  # type: ignore[misc]
    assert one.version == 0


def test_a_model_holds_float32_whatever_its_source() -> None:
    one = Model(np.arange(6).reshape(2, 3).T[0])
    assert one.vector.dtype == np.float32
    one.mix(np.float32([2, 1]), 0.5)
    assert one.vector.tolist() == [1.0, 2.0]
