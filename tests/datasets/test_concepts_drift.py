"""The drift `concepts`: labels that are exchanged, at each client from steps of its own on."""

from __future__ import annotations

import numpy as np
import pytest

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.datasets.drift import exchanged


def config_of(**keys: object) -> RunConfig:
    given = {"clients": 9, "partition": "iid", "drift": "concepts", **keys}
    return RunConfig.from_mapping({key.replace("_", "-"): value for key, value in given.items()})


def test_a_concept_exchanges_two_labels() -> None:
    y = np.arange(10)
    assert exchanged(y, 0).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert exchanged(y, 1).tolist() == [0, 2, 1, 3, 4, 5, 6, 7, 8, 9]
    assert exchanged(y, 3).tolist() == [0, 1, 2, 3, 4, 6, 5, 7, 8, 9]


@pytest.mark.parametrize("count", [2, 4])
def test_every_client_meets_every_concept_once_at_steps_of_its_own(count: int) -> None:
    config = config_of(concepts=count)
    steps = np.array([datasets.true_groups(config, step) for step in range(13)])
    assert steps[0].tolist() == [0] * 9
    moments = set()
    for client, concepts in enumerate(steps.T.tolist()):
        order = list(dict.fromkeys(concepts))
        first = [1 + (client + place) % (count - 1) for place in range(count - 1)]
        assert order == [0, *first]
        # Each is there for some steps in a row, and the last one to the end.
        assert concepts == sorted(concepts, key=order.index)
        changes = np.flatnonzero(np.diff(concepts)) + 1
        assert 1 <= changes.min() <= changes.max() <= 9
        moments.add(tuple(changes.tolist()))
    assert len(moments) > 3


def test_samples_keep_their_inputs_and_follow_the_concept() -> None:
    config = config_of(concepts=4, concept_samples="same")
    for step in (0, 9):
        for client, data in enumerate(datasets.all_clients(config, step)):
            dealt = datasets.client_data(config_of(drift="none"), client)
            assert np.array_equal(data.x_train, dealt.x_train)
            assert data.group == datasets.true_groups(config, step)[client]
            assert np.array_equal(data.y_train, exchanged(dealt.y_train, data.group))
            assert np.array_equal(data.y_test, exchanged(dealt.y_test, data.group))


def test_each_step_has_training_samples_of_its_own() -> None:
    config = config_of(concept_steps=5)
    whole = datasets.client_data(config_of(drift="none"), 2).x_train
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
def test_what_the_data_cannot_do_is_an_error(keys: dict[str, object], error: str) -> None:
    with pytest.raises(UserError, match=error):
        datasets.true_groups(config_of(**keys))
