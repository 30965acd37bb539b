"""Positions by similarity: distances come out, and a map stays as it lies."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raceme.records.positions import DIMENSIONS, aligned, flattened, positions, positions_of_rows


def test_two_groups_lie_apart_and_their_members_together() -> None:
    same, other = 1.0, 0.5
    matrix = np.array([[same, same, other], [same, same, other], [other, other, same]])
    points = positions(matrix)
    assert points[0] == pytest.approx(points[1])
    assert np.linalg.norm(points[0] - points[2]) > 1
    assert (points**2).sum(axis=1).mean() == pytest.approx(1.0)


def test_distances_in_a_plane_come_out_up_to_scale() -> None:
    flat = np.random.default_rng(0).normal(size=(30, 2))
    squares = ((flat[:, None] - flat[None]) ** 2).sum(axis=2)
    points = positions(1 - squares / 2)
    found = ((points[:, None] - points[None]) ** 2).sum(axis=2)
    ratio = found[np.triu_indices(30, 1)] / squares[np.triu_indices(30, 1)]
    assert ratio == pytest.approx(np.full(len(ratio), ratio[0]))


@pytest.mark.parametrize("width", [8, 80])
def test_rows_lie_as_their_cosines_say(width: int) -> None:
    rows = np.random.default_rng(1).normal(size=(30, width))
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    names = [str(number) for number in range(30)]
    # Lengths say nothing: a client may have trained longer, or be an attacker.
    found = positions_of_rows(rows * np.geomspace(1, 1e6, 30)[:, None])
    held = dict(zip(names, positions(units @ units.T).tolist(), strict=True))
    assert aligned(found, names, held) == pytest.approx(np.array(list(held.values())))


@pytest.mark.parametrize("n", [0, 1, 2])
def test_rows_that_overflowed_take_nobody_along(n: int) -> None:
    rows = np.vstack([np.eye(4)[: n + 1], np.full((1, 4), np.inf)])
    assert np.isfinite(positions_of_rows(rows)).all()
    assert positions_of_rows(np.empty((0, 4))).shape == (0, DIMENSIONS)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_few_clients_and_unknown_pairs_have_positions(n: int) -> None:
    points = positions(np.full((n, n), np.nan))
    assert points.shape == (n, DIMENSIONS)
    assert np.isfinite(points).all()


@given(angle=st.floats(0, 6.28), mirrored=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_turned_and_mirrored_map_is_turned_back(angle: float, mirrored: bool, seed: int) -> None:
    before = np.random.default_rng(seed).normal(size=(12, 2))
    before -= before.mean(axis=0)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    names = [str(number) for number in range(12)]
    now = before @ turn * ([-1, 1] if mirrored else [1, 1])
    held = dict(zip(names, before.tolist(), strict=True))
    assert aligned(now, names, held) == pytest.approx(before)


def test_four_groups_that_are_all_as_different_lie_apart_in_the_plane() -> None:
    """The corners of a tetrahedron: two principal components put two of them together."""
    corners = np.eye(4)[np.arange(24) % 4]
    noise = np.random.default_rng(0).normal(scale=0.02, size=corners.shape)
    points = positions_of_rows(corners + noise)
    names = [str(number) for number in range(24)]
    flat = flattened(points, names, {})
    assert flat.shape == (24, 2)
    centres = np.stack([flat[group::4].mean(axis=0) for group in range(4)])
    gaps = np.linalg.norm(centres[:, None] - centres[None], axis=2)[np.triu_indices(4, 1)]
    assert gaps.min() > 0.6
    spread = max(float(np.linalg.norm(flat[g::4] - centres[g], axis=1).max()) for g in range(4))
    assert spread < gaps.min() / 4
    # The next map begins there: it stays, though its dimensions have changed places.
    held = dict(zip(names, flat.tolist(), strict=True))
    again = flattened(points[:, [2, 0, 1, 3]], names, held)
    assert again == pytest.approx(flat, abs=0.05)


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_few_or_equal_points_lie_flat(n: int) -> None:
    flat = flattened(np.ones((n, DIMENSIONS)), [str(number) for number in range(n)], {})
    assert flat.shape == (n, 2)
    assert np.isfinite(flat).all()


def test_points_in_one_place_and_those_that_begin_there_lie_flat() -> None:
    clients = [str(number) for number in range(5)]
    places = {client: (1.0, float(client)) for client in clients}
    for points in (np.zeros((5, DIMENSIONS)), np.eye(5, DIMENSIONS, DIMENSIONS - 1)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not flattened(points, clients, places if not points.any() else {}).any()


def test_many_points_are_shown_by_their_first_dimensions() -> None:
    points = np.random.default_rng(0).normal(size=(500, DIMENSIONS))
    flat = flattened(points, [str(number) for number in range(500)], {})
    assert flat == pytest.approx(points[:, :2])
