"""Attacks of simulated clients: who attacks, what they send, and that all others are as ever."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from raceme import datasets
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.messages import ModelSpec
from raceme.core.requests import Outcome, Update
from raceme.core.strategy import Method
from raceme.runs import experiment
from raceme.simulation.attacks import attack_of, attackers_of
from raceme.training import models
from raceme.training.models import Samples


def config_of(**keys: object) -> RunConfig:
    named = {key.replace("_", "-"): value for key, value in keys.items()}
    return experiment.resolve(RunConfig.from_mapping({"clients": 20, **named}))


def test_attackers_come_evenly_from_the_groups() -> None:
    config = config_of(attack="scale", seed=3)
    groups = datasets.true_groups(config)
    assert Counter(groups[client] for client in attackers_of(config)) == {0: 1, 1: 1, 2: 1, 3: 1}


def test_or_from_anywhere() -> None:
    drawn = [
        attackers_of(config_of(attack="scale", attackers_drawn="anywhere", seed=seed))
        for seed in range(6)
    ]
    groups = datasets.true_groups(config_of())
    assert all(len(clients) == 4 for clients in drawn)
    assert len(set(drawn)) == 6
    assert any(max(Counter(groups[c] for c in clients).values()) > 1 for clients in drawn)


def test_the_share_says_how_many_and_without_an_attack_there_are_none() -> None:
    assert len(attackers_of(config_of(attack="noise", attackers=0.5))) == 10
    assert not attackers_of(config_of(attack="noise", attackers=0.0))
    assert not attackers_of(config_of())


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"attack": "scale"}, [1000.0, -2000.0]),
        ({"attack": "scale", "attack_factor": 10.0}, [10.0, -20.0]),
        ({"attack": "sign-flip"}, [-1.0, 2.0]),
        ({"attack": "label-flip"}, [1.0, -2.0]),
        ({"attack": "noise", "attack_noise": 0.0}, [1.0, -2.0]),
    ],
)
def test_what_becomes_of_an_update(keys: dict[str, object], expected: list[float]) -> None:
    delta = np.array([1.0, -2.0], np.float32)
    sent = attack_of(config_of(**keys)).update(delta, np.random.default_rng(0))
    assert sent.tolist() == expected
    assert sent.dtype == np.float32


def test_noise_has_the_deviation_of_a_share_of_the_length() -> None:
    delta = np.zeros(10_000, np.float32)
    delta[0] = 5.0
    sent = attack_of(config_of(attack="noise")).update(delta, np.random.default_rng(0))
    assert (sent - delta).std() == pytest.approx(0.2 * 5.0, rel=0.05)


def test_labels_are_flipped_for_training_only() -> None:
    attack = attack_of(config_of(attack="label-flip"))
    assert attack.labels(np.array([0, 3, 9]), 10).tolist() == [9, 6, 0]
    assert attack.labels(np.array([0.5, -1.0], np.float32), 0).tolist() == [-0.5, 1.0]
    assert attack_of(config_of(attack="scale")).labels(np.array([0, 3]), 10).tolist() == [0, 3]


def test_samples_with_other_labels_share_the_inputs() -> None:
    samples = Samples(np.ones((3, 2), np.float32), np.array([0, 1, 2]))
    other = samples.with_labels(np.array([2, 1, 0]))
    assert other.x is samples.x
    assert (samples.y.tolist(), other.y.tolist()) == ([0, 1, 2], [2, 1, 0])


SMALL: dict[str, object] = {
    **{"clients": 8, "groups": "0.5,0.5", "model": "mclr", "workers": 0, "devices": "uniform"},
}


class Note(Method):
    """Keeps what arrives, and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[int, np.ndarray] = {}

    def aggregate(self, updates: Sequence[Update]) -> list[Outcome]:
        for update in updates:
            self.sent[int(update.task.client.removeprefix("client-"))] = update.vector
        return [Outcome(0, 0, 0.0) for _ in updates]


def replies(config: RunConfig) -> dict[int, np.ndarray]:
    """Return what each client of one round sends, less the initial model."""
    initial, method = models.initial_arrays(config), Note()
    method.run(
        experiment.build_grid(config),
        initial,
        config.num_clients,
        train_config=experiment.training_settings(config),
        plan=experiment.plan(config),
    )
    start = ModelSpec.of(initial).unpack(initial)
    return {client: vector - start for client, vector in method.sent.items()}


@pytest.mark.parametrize("attack", ["scale", "sign-flip", "label-flip", "noise"])
def test_honest_clients_send_what_they_send_without_attackers(attack: str) -> None:
    config = config_of(**SMALL, attack=attack, attackers=0.25)
    clean, attacked, bad = replies(config_of(**SMALL)), replies(config), attackers_of(config)
    assert len(bad) == 2
    for client, delta in clean.items():
        assert np.array_equal(delta, attacked[client]) == (client not in bad), client
    if attack == "sign-flip":
        np.testing.assert_allclose(attacked[min(bad)], -clean[min(bad)], atol=1e-6)
    if attack == "scale":
        np.testing.assert_allclose(attacked[min(bad)], 1000 * clean[min(bad)], rtol=1e-3, atol=1e-2)


def test_stacked_clients_are_all_honest_and_that_is_refused() -> None:
    config = config_of(attack="scale", vectorised=True)
    with pytest.raises(
        UserError, match=re.escape("attack=scale is simulated one client at a time")
    ):
        experiment.build_grid(config)
