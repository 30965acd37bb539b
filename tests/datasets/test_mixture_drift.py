"""Data that change: clients whose data are a mixture of distributions, drawn anew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from drifting import all_at, config_of, same

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.datasets.partition import rotated


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
            # Whole samples: the others may differ by one of at least 100.
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
    # Each distribution is all samples as its group sees them: also those that the other client has.
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
    # Clients begin equally divided over the groups, in order; the main one has 40 to 90 %.
    for client, drawn in enumerate(data):
        assert drawn.mixture is not None
        seen = [sum(x.tobytes() in view for x in drawn.x_train) for view in views]
        assert 40 <= len(drawn.x_train) == len(drawn.x_test) <= 60
        np.testing.assert_allclose(np.array(seen) / len(drawn.x_train), drawn.mixture, atol=0.03)
        assert 0.39 <= drawn.mixture[client // 2] <= 0.91


def test_options_of_a_mixture() -> None:
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
