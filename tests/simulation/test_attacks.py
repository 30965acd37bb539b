"""Attacks of simulated clients: attackers, their updates, and unchanged honest clients."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from nodes import Settings, message, node_context

from raceme import datasets
from raceme.core.clusters import cosine
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.messages import HALF, ModelSpec
from raceme.core.registry import ATTACKS
from raceme.core.requests import Outcome, Outcomes, Request, Update
from raceme.core.scheduling import InRounds, Scheduler
from raceme.core.strategy import Method
from raceme.datasets.source import DataShape, Target
from raceme.flower.messages import identify_process
from raceme.runs import experiment
from raceme.simulation import Device
from raceme.simulation.attackers import app
from raceme.simulation.attacks import (
    Backdoor,
    BoostOptions,
    SignFlip,
    attack_of,
    attackers_of,
    evaluation_settings,
)
from raceme.training import models
from raceme.training.models import Samples
from raceme.training.work import WorkResult


def config_of(**keys: object) -> RunConfig:
    named = {key.replace("_", "-"): value for key, value in keys.items()}
    return experiment.resolve(RunConfig.from_mapping({"clients": 20, **named}))


def test_attackers_come_evenly_from_the_groups() -> None:
    config = config_of(attack="scale", seed=3)
    groups = datasets.true_groups(config)
    assert Counter(groups[client] for client in attackers_of(config)) == {0: 1, 1: 1, 2: 1, 3: 1}


def test_attackers_may_come_from_anywhere() -> None:
    drawn = [
        attackers_of(config_of(attack="scale", attackers_drawn="anywhere", seed=seed))
        for seed in range(6)
    ]
    groups = datasets.true_groups(config_of())
    assert all(len(clients) == 4 for clients in drawn)
    assert len(set(drawn)) == 6
    assert any(max(Counter(groups[c] for c in clients).values()) > 1 for clients in drawn)


VICTIMS: dict[str, object] = {
    **{"attack": "sign-flip", "attackers_drawn": "one-group", "groups": "0.5,0.2,0.15,0.15"},
}


def test_attackers_may_all_come_from_the_largest_group() -> None:
    config = config_of(**VICTIMS, attackers=0.3)
    groups = datasets.true_groups(config)
    assert [groups[client] for client in sorted(attackers_of(config))] == [0] * 6
    assert attackers_of(config) != attackers_of(config.with_values(seed=1))


def test_one_group_keeps_an_honest_client() -> None:
    assert len(attackers_of(config_of(**VICTIMS, attackers=0.45))) == 9
    config = config_of(**VICTIMS, attackers=0.5)
    with pytest.raises(UserError, match=r"largest group, which has 10 .* attackers=0\.5 are 10"):
        attackers_of(config)


def test_late_attackers_come_online_at_their_time_and_stay() -> None:
    config = config_of(**VICTIMS, attackers=0.3, attackers_join=7.5, devices="churn", workers=0)
    grid = experiment.build_grid(config)
    nodes = [grid.nodes[number].node_id for number in sorted(attackers_of(config))]
    grid.pass_time(7.0)
    assert not set(nodes) & set(grid.get_node_ids())
    # An attacker that has joined stays online, unlike its device without the option.
    for _ in range(20):
        grid.pass_time(1.0)
        assert set(nodes) <= set(grid.get_node_ids())


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
        ({"attack": "backdoor"}, [1.0, -2.0]),
        ({"attack": "backdoor", "attack_boost": 3.0}, [3.0, -6.0]),
        ({"attack": "sign-flip", "attack_boost": 3.0}, [-3.0, 6.0]),
        ({"attack": "long-good"}, [-1.0, 2.0]),
        ({"attack": "mimic", "attack_boost": 0.5}, [-0.5, 1.0]),
    ],
)
def test_attacks_change_updates_as_described(
    keys: dict[str, object], expected: list[float]
) -> None:
    delta = np.array([1.0, -2.0], np.float32)
    sent = attack_of(config_of(**keys)).update(delta, np.random.default_rng(0))
    assert sent.tolist() == expected
    assert sent.dtype == np.float32


HONEST = np.array([[3.0, 0.0], [1.0, 0.0], [2.0, 3.0]], np.float32)
"""Lengths 3, 1 and √13, of which 3 is the median; mean (2, 1)."""
PUSH = np.array([0.0, 1.0], np.float32)
RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # 2 median lengths against the mean; a common direction at 9 lengths, and at one.
        ({"attack": "edge-anti", "attack_length": 2.0}, [-12 / 5**0.5, -6 / 5**0.5]),
        ({"attack": "edge-push"}, [0.0, 27.0]),
        ({"attack": "collude"}, [0.0, 3.0]),
    ],
)
def test_informed_attackers_send_what_their_formulas_give(
    keys: dict[str, object], expected: list[float]
) -> None:
    sent = attack_of(config_of(**keys)).against(HONEST, PUSH, RNG)
    assert sent.tolist() == pytest.approx(expected, rel=1e-5)


def test_min_max_and_min_sum_go_as_far_from_honest_updates_as_these_are_apart() -> None:
    def squares(of: np.ndarray) -> np.ndarray:
        return np.sum((HONEST - of) ** 2, axis=1)

    sent = attack_of(config_of(attack="min-max")).against(HONEST, PUSH, RNG)
    # (2, 3) and each of the others are √10 apart.
    assert max(squares(sent)) == pytest.approx(10.0, rel=1e-5)
    assert (sent - HONEST.mean(axis=0)) @ [1.0, -2.0] == pytest.approx(0.0, abs=1e-5)
    assert sent @ [2.0, 1.0] < 5.0
    summed = attack_of(config_of(attack="min-sum")).against(HONEST, PUSH, RNG)
    assert squares(summed).sum() == pytest.approx(20.0, rel=1e-5)


def test_noise_has_the_deviation_of_a_share_of_the_length() -> None:
    delta = np.zeros(10_000, np.float32)
    delta[0] = 5.0
    sent = attack_of(config_of(attack="noise")).update(delta, np.random.default_rng(0))
    assert (sent - delta).std() == pytest.approx(0.2 * 5.0, rel=0.05)


def trained_on(y: np.ndarray, num_classes: int, attack: str) -> list[float]:
    """Return the labels that an attacker trains on."""
    own = Samples(np.ones((len(y), 2), np.float32), y)
    rng = np.random.default_rng(0)
    found: list[float] = (
        attack_of(config_of(attack=attack)).samples(own, num_classes, rng).y.tolist()
    )
    return found


def test_labels_are_flipped_for_training_only() -> None:
    assert trained_on(np.array([0, 3, 9]), 10, "label-flip") == [9, 6, 0]
    assert trained_on(np.array([0.5, -1.0], np.float32), 0, "label-flip") == [-0.5, 1.0]
    assert trained_on(np.array([0, 3]), 10, "scale") == [0, 3]


def test_samples_with_other_labels_share_the_inputs() -> None:
    samples = Samples(np.ones((3, 2), np.float32), np.array([0, 1, 2]))
    other = samples.with_labels(np.array([2, 1, 0]))
    assert other.x is samples.x
    assert (samples.y.tolist(), other.y.tolist()) == ([0, 1, 2], [2, 1, 0])


SMALL: dict[str, object] = {
    **{"clients": 8, "groups": "0.5,0.5", "model": "mclr", "workers": 0, "devices": "uniform"},
}


class Note(Method):
    """Records updates, and changes no model."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[int, np.ndarray] = {}

    def aggregate(self, updates: Sequence[Update]) -> Outcomes:
        for update in updates:
            self.sent[int(update.task.client.removeprefix("client-"))] = update.vector
        return {update.number: Outcome(0, 0, 0.0) for update in updates}


def replies(config: RunConfig) -> dict[int, np.ndarray]:
    """Return the Δ of each client in one round."""
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


ON_TRUST = "benchmarks.attacks_on_trust:"
PLUGINS = ("HiddenPush", "HiddenAnti", "HiddenGain", "Pulse", "FalseGroup", "Split")


@pytest.mark.parametrize(
    "attack",
    [*(name for name in ATTACKS if name != "none"), *(f"{ON_TRUST}{name}" for name in PLUGINS)],
)
def test_honest_clients_send_what_they_send_without_attackers(
    attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn: dict[str, object] = {"attack_turn": 0.0} if attack in ("mimic", "long-good") else {}
    if attack == f"{ON_TRUST}Pulse":
        # Requests are numbered over all clients, so that 0 to 7 are the clients' first ones.
        monkeypatch.setattr(ATTACKS[attack], "is_due", SignFlip.is_due)
    config = config_of(**SMALL, attack=attack, attackers=0.25, **turn)
    clean, attacked, bad = replies(config_of(**SMALL)), replies(config), attackers_of(config)
    assert len(bad) == 2
    for client, delta in clean.items():
        # With false claims only, an attacker trains honestly.
        honest = client not in bad or attack == "claims"
        assert np.array_equal(delta, attacked[client]) == honest, client
    if attack == "sign-flip":
        np.testing.assert_allclose(attacked[min(bad)], -clean[min(bad)], atol=1e-6)
    if attack == "scale":
        np.testing.assert_allclose(attacked[min(bad)], 1000 * clean[min(bad)], rtol=1e-3, atol=1e-2)
    if attack == "edge-anti":
        # Attackers of a group know the same: the mean of its three honest clients.
        groups = datasets.true_groups(config)
        mates = [c for c in clean if groups[c] == groups[min(bad)] and c not in bad]
        mean = np.mean([clean[mate] for mate in mates], axis=0)
        sent = attacked[min(bad)]
        cosine = sent @ mean / np.linalg.norm(sent) / np.linalg.norm(mean)
        # The attacker draws its mini-batches of their samples in another order.
        assert cosine < -0.98
        assert np.linalg.norm(sent) == pytest.approx(
            9 * np.median([np.linalg.norm(clean[mate]) for mate in mates]), rel=0.05
        )


@pytest.mark.parametrize(
    "keys", [{"attack": "collude", "attack_knows": "all"}, {"attack": "noise"}]
)
def test_only_weights_are_attacked_and_measured(keys: dict[str, object]) -> None:
    small = {**SMALL, "model": "networks:small_batch_norm"}
    config = config_of(**small, **keys)
    clean, attacked, bad = replies(config_of(**small)), replies(config), attackers_of(config)
    spec = ModelSpec.of(models.initial_arrays(config))
    assert spec.trainable is not None
    lengths = {client: np.linalg.norm(spec.compared(delta)) for client, delta in clean.items()}
    typical = np.median([length for client, length in lengths.items() if client not in bad])
    for client in bad:
        change = attacked[client] - clean[client]
        assert not change[~spec.trainable].any()
        if keys["attack"] == "noise":
            assert spec.compared(change).std() == pytest.approx(0.2 * lengths[client], rel=0.2)
        else:
            sent = np.linalg.norm(spec.compared(attacked[client]))
            assert sent == pytest.approx(typical, rel=0.1)


def run_method(method: Method, config: RunConfig, updates: int) -> None:
    """Run a strategy of the test for a number of updates per client."""
    method.run(
        experiment.build_grid(config),
        models.initial_arrays(config),
        updates * config.num_clients,
        train_config=experiment.training_settings(config),
        plan=experiment.plan(config),
    )


def sent_in_turn(config: RunConfig) -> dict[int, list[np.ndarray]]:
    """Return the models that each client sends in a run of two updates per client."""

    class NoteAll(Method):
        def aggregate(self, updates: Sequence[Update]) -> Outcomes:
            for update in updates:
                number = int(update.task.client.removeprefix("client-"))
                found.setdefault(number, []).append(update.vector)
            # Each update replaces the model.
            self.models[0].replace(updates[-1].vector)
            return {update.number: Outcome(0, 0, 1.0) for update in updates}

    found: dict[int, list[np.ndarray]] = {}
    run_method(NoteAll(), config, 3)
    return found


def test_noise_is_drawn_anew_in_each_round() -> None:
    found: dict[str, list[np.ndarray]] = {}

    class NoteRounds(Method):
        def scheduler(self) -> Scheduler:
            return InRounds()

        def aggregate(self, updates: Sequence[Update]) -> Outcomes:
            for update in updates:
                change = update.vector - self.models[0].vector
                found.setdefault(update.task.client, []).append(change)
            return {update.number: Outcome(0, 0, 0.0) for update in updates}

    config = config_of(**SMALL, attack="noise", attackers=0.25)
    run_method(NoteRounds(), config, 2)
    for attacker in attackers_of(config):
        # The noise on 650 weights has the length 0.2 √650, 5 times the honest update's.
        first, second = found[f"client-{attacker}"]
        assert abs(cosine(first, second)) < 0.5


def test_a_replaying_attacker_sends_its_first_model_always() -> None:
    config = config_of(**SMALL, attack="replay", attackers=0.25)
    spec = ModelSpec.of(initial := models.initial_arrays(config))
    for number, sent in sent_in_turn(config).items():
        same = all(np.array_equal(vector, spec.unpack(initial)) for vector in sent)
        assert same == (number in attackers_of(config))


def test_a_mimic_sends_what_its_victim_of_another_group_would_until_its_turn() -> None:
    clean = replies(config_of(**SMALL))
    mimics = {**SMALL, "attack": "mimic", "attackers": 0.25}
    early = config_of(**mimics)
    groups, seen = datasets.true_groups(early), replies(early)
    for number in attackers_of(early):
        likeness = {other: float(seen[number] @ clean[other]) for other in clean}
        assert not np.array_equal(seen[number], clean[number])
        assert groups[max(likeness, key=lambda other: likeness[other])] != groups[number]
    turned = replies(config_of(**mimics, attack_turn=0.0))
    for number in attackers_of(early):
        np.testing.assert_allclose(turned[number], -seen[number], atol=1e-6)


def test_lying_attackers_state_false_numbers() -> None:
    answer = WorkResult(
        {"num-examples": 60, "train-loss": 0.5},
        numbers={
            "label-counts": np.array([10, 20, 30]),
            # FedRC's masses have a row per model.
            "label-masses": np.array([[9.0, 1.0], [1.0, 39.0], [0.0, 10.0]]),
            "losses": np.array([[0.5, 1.0], [2.0, 4.0]], np.float32),
            "shares": np.array([0.7, 0.2, 0.1]),
        },
        told={"chosen": 2},
    )

    def stated(claim: str) -> WorkResult:
        return attack_of(config_of(attack="claims", attack_claim=claim)).stated(answer, 3)

    sizes, labels, fit = stated("sizes"), stated("labels"), stated("fit")
    assert sizes.metrics == {"num-examples": 60_000, "train-loss": 0.5}
    # The counts still sum to the number of examples.
    assert sizes.numbers["label-counts"].tolist() == [10_000, 20_000, 30_000]
    assert sizes.numbers["label-masses"].sum() == 60_000
    assert labels.numbers["label-masses"].tolist() == [[1, 9], [39, 1], [10, 0]]
    assert fit.numbers["label-masses"].tolist() == [[0, 10], [9, 1], [1, 39]]
    assert labels.metrics == answer.metrics
    assert labels.numbers["label-counts"].tolist() == [30, 20, 10]
    assert fit.numbers["losses"].tolist() == [[4.0, 3.5], [2.5, 0.5]]
    # 0.8 less each is 0.1, 0.6 and 0.7, which sum to 1.4.
    np.testing.assert_allclose(fit.numbers["shares"], np.array([0.1, 0.6, 0.7]) / 1.4)
    assert (fit.told, sizes.told, labels.told) == ({"chosen": 0}, {"chosen": 2}, {"chosen": 2})
    assert labels.numbers["losses"] is answer.numbers["losses"]


def test_liars_are_believed_up_to_what_is_plausible() -> None:
    config = config_of(**SMALL, attack="claims", attackers=0.25)
    method = Note()
    method.run(
        experiment.build_grid(config),
        models.initial_arrays(config),
        config.num_clients,
        train_config=experiment.training_settings(config),
        plan=experiment.plan(config),
    )
    fleet, liars = method.progress.fleet, attackers_of(config)
    sizes = {number: len(datasets.client_data(config, number).y_train) for number in range(8)}
    for number, size in sizes.items():
        name = f"client-{number}"
        assert fleet.clients[name].num_examples == (1000 * size if number in liars else size)
        # All clients have nearly the same size: ten times the median, and a little for the spread.
        most = 11 * size if number in liars else size
        assert size <= fleet.plausible_examples(name) <= most


def test_a_liar_states_another_model_than_it_has_trained() -> None:
    keys: dict[str, object] = {**SMALL, "strategy": "ifca-async", "max_updates": 8}
    lies: dict[str, object] = {"attack": "claims", "attack_claim": "fit", "attackers": 0.25}
    chosen = []
    for config in (config_of(**keys), config_of(**keys, **lies)):
        strategy = experiment.build_strategy(config)
        strategy.run(
            experiment.build_grid(config),
            models.initial_arrays(config),
            8,
            train_config=experiment.training_settings(config),
            plan=experiment.plan(config),
        )
        chosen.append({n: strategy.clusters.main(f"client-{n}") for n in range(8)})
    clean, attacked = chosen
    bad = attackers_of(config_of(**keys, **lies))
    for number in bad:
        assert attacked[number] == (clean[number] + 1) % 4


def test_attackers_are_honest_up_to_the_first_attacked_request() -> None:
    attacked = {**SMALL, "attack": "sign-flip", "attackers": 0.25}
    clean, later = replies(config_of(**SMALL)), replies(config_of(**attacked, attack_start=8))
    # The eight requests of a round have the numbers 0 to 7.
    assert all(np.array_equal(clean[client], later[client]) for client in clean)
    bad = attackers_of(config_of(**attacked))
    first = min(bad)
    # Requests are numbered in client order: the option is the first attacked request.
    from_first = replies(config_of(**attacked, attack_start=first))
    assert {c for c in clean if not np.array_equal(clean[c], from_first[c])} == bad
    rest = replies(config_of(**attacked, attack_start=first + 1))
    assert {c for c in clean if not np.array_equal(clean[c], rest[c])} == bad - {first}


def test_attackers_that_recognise_probes_answer_them_honestly() -> None:
    class Probes(Note):
        def request_for(self, client: str) -> Request:
            return Request(client, settings=probe)

    def sent(probe_settings: dict[str, int | float], **keys: object) -> dict[int, np.ndarray]:
        nonlocal probe
        probe, method = probe_settings, Probes()
        run_method(method, config_of(**SMALL, attackers=0.25, **keys), 1)
        return method.sent

    probe: dict[str, int | float] = {}
    flip: dict[str, object] = {"attack": "sign-flip"}
    bad = attackers_of(config_of(**SMALL, attackers=0.25, **flip))
    for asked, trains in (({HALF: 0}, False), ({HALF: 1}, False), ({}, True)):
        clean = sent(asked, **flip, attack_start=100)
        always = sent(asked, **flip)
        honest_in_probes = sent(asked, **flip, attack_probes=False)
        for number, vector in clean.items():
            assert np.array_equal(vector, always[number]) == (number not in bad)
            attacked = number in bad and trains
            assert np.array_equal(vector, honest_in_probes[number]) != attacked


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_backdoor_puts_trigger_and_target_on_a_share_of_the_images(channels_last: bool) -> None:
    x = np.zeros((4, 2, 3, 3), np.float32)
    x[0, 0, 0, 0] = 0.9
    own = Samples(x, np.array([1, 2, 3, 4]), channels_last)
    attack = attack_of(config_of(attack="backdoor", attack_poisoned=0.5, attack_target=7))
    poisoned = attack.samples(own, 10, np.random.default_rng(0))
    found = poisoned.shaped(poisoned.x).numpy()
    at = [place for place, label in enumerate(poisoned.y.tolist()) if label == 7]
    assert len(at) == 2
    for place in range(4):
        expected = x[place].copy()
        if place in at:
            # The last two rows and columns of both channels, as bright as the brightest pixel.
            expected[:, 1:, 1:] = 0.9
        assert np.array_equal(found[place], expected)
        assert poisoned.y[place] == (7 if place in at else place + 1)
    assert own.y.tolist() == [1, 2, 3, 4]
    assert np.array_equal(own.shaped(own.x).numpy(), x)


@pytest.mark.parametrize("shape", [(1, 3), (1, 2, 3)])
def test_the_trigger_of_vectors_and_sequences_is_at_their_end(shape: tuple[int, ...]) -> None:
    attack = attack_of(config_of(attack="backdoor", attack_poisoned=1.0, attack_trigger=1))
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    expected = x.copy()
    expected[..., -1] = x.max()
    own = Samples(x, np.array([1]))
    assert np.array_equal(attack.samples(own, 10, np.random.default_rng(0)).x, expected)


def test_a_backdoor_is_tested_on_samples_of_other_classes() -> None:
    attack = attack_of(config_of(attack="backdoor", attack_target=2))
    own = Samples(np.eye(3, dtype=np.float32), np.array([2, 0, 1]))
    tested = attack.triggered(own)
    assert tested is not None
    assert tested.x.tolist() == [[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]
    assert tested.y.tolist() == [2, 2]
    assert attack.triggered(Samples(np.eye(1, dtype=np.float32), np.array([2]))) is None
    assert attack_of(config_of(attack="scale")).triggered(own) is None


def test_a_backdoor_needs_a_class() -> None:
    attack = attack_of(config_of(attack="backdoor", attack_target=10))
    attack.check(DataShape((1, 8, 8), 11))
    with pytest.raises(UserError, match="attack-target must be a class from 0 to 9, got 10"):
        attack.check(DataShape((1, 8, 8), 10))
    with pytest.raises(UserError, match="attack=backdoor needs classes"):
        attack.check(DataShape((4,), 0, target=Target("°C")))
    with pytest.raises(UserError, match="from 0 to 9"):
        experiment.check_fleet(
            config := config_of(attack="backdoor", attack_target=10),
            experiment.build_strategy(config),
        )


def test_an_honest_client_tests_a_backdoor_with_the_model_and_data_it_has_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    identify_process()
    keys: dict[str, object] = {"clients": 8, "model": "mclr", "drift": "tasks", "partition": "iid"}
    config = config_of(**keys, attack="backdoor", attackers=0.25)
    spec, bad = ModelSpec.of(models.initial_arrays(config)), sorted(attackers_of(config))
    honest = next(number for number in range(8) if number not in bad)
    own = np.zeros(spec.size, np.float32)
    # Weights of 0: the model predicts the class with the largest bias for every input.
    label = int(datasets.client_data(config, honest, 1).y_test[0])
    own[label - 10] = 1.0

    def tested(number: int, **settings: int | float | bool | str) -> Mapping[str, object]:
        node = node_context({"partition-id": number, "num-partitions": 8}, config)
        node.state["own-model"] = spec.pack(own)
        told: Settings = {"step": 1, "completed-by": "pulled-model", **settings}
        asked = message("evaluate", told, models.initial_arrays(config))
        return app(asked, node).content.metric_records["metrics"]

    # With an empty trigger, the success of the attack equals the accuracy.
    monkeypatch.setattr(Backdoor, "triggered", lambda _, samples: samples)
    wanted: dict[str, bool] = {"backdoor-success": True}
    found = tested(honest, **wanted)
    assert 0 < found["accuracy"] == found["backdoor-success"]  # type: ignore[operator]
    plain = {name: value for name, value in found.items() if name != "backdoor-success"}
    assert plain == dict(tested(honest))
    assert "backdoor-success" not in tested(bad[0], **wanted)
    # Without samples for the trigger no success is reported.
    monkeypatch.setattr(Backdoor, "triggered", lambda *_: None)
    assert dict(tested(honest, **wanted)) == plain


@pytest.mark.parametrize(
    ("attack", "asked"), [("backdoor", {"backdoor-success": True}), ("scale", {}), ("none", {})]
)
def test_only_runs_with_a_backdoor_measure_its_success(attack: str, asked: dict[str, bool]) -> None:
    assert dict(evaluation_settings(config_of(attack=attack))) == asked


def test_stacked_clients_are_all_honest_and_that_is_refused() -> None:
    config = config_of(attack="scale", vectorised=True)
    with pytest.raises(
        UserError, match=re.escape("attack=scale is simulated one client at a time")
    ):
        experiment.build_grid(config)


def test_a_pulse_comes_with_every_third_request_for_each_client() -> None:
    config = config_of(attack=f"{ON_TRUST}Pulse", attack_start=100)
    due = [number for number in range(240) if attack_of(config).is_due(number, config)]
    assert due == [*range(100, 120), *range(160, 180), *range(220, 240)]
    # In rounds request numbers count rounds.
    config = config_of(attack=f"{ON_TRUST}Pulse", strategy="fedavg")
    assert [n for n in range(7) if attack_of(config).is_due(n, config)] == [2, 5]


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        # Half of 400 updates, of 20 rounds of all clients, and of 40 rounds of half of them.
        ({"strategy": "fedasync", "max_updates": 400}, 200),
        ({"strategy": "fedavg", "max_updates": 400}, 10),
        ({"strategy": "fedavg", "max_updates": 400, "fedavg.fraction": 0.5}, 20),
        ({"strategy": "fedavg", "max_rounds": 30}, 15),
    ],
)
def test_an_attacker_turns_at_its_share_of_the_run(settings: dict[str, object], first: int) -> None:
    config = config_of(attack="long-good", attack_turn=0.5, **settings)
    assert [attack_of(config).is_due(n, config) for n in (first - 1, first)] == [False, True]


@pytest.mark.parametrize("attack", ["HiddenPush", "HiddenAnti"])
def test_hidden_attackers_keep_within_the_bounds_of_trust(attack: str) -> None:
    honest = np.random.default_rng(1).standard_normal((9, 1000)).astype(np.float32) + 1
    push = np.random.default_rng(2).standard_normal(1000).astype(np.float32)
    made = attack_of(config_of(attack=f"{ON_TRUST}{attack}"))
    sent = [made.against(honest, push / np.linalg.norm(push), RNG) for _ in range(2)]
    lengths = np.linalg.norm(honest, axis=1)
    assert np.linalg.norm(sent[0]) == pytest.approx(2 * np.median(lengths), rel=1e-4)
    mean = honest.mean(axis=0)
    centre = float(sent[0] @ mean / np.linalg.norm(sent[0]) / np.linalg.norm(mean))
    assert centre == pytest.approx(0.0 if attack == "HiddenPush" else -0.35, abs=0.05)
    alike = float(sent[0] @ sent[1] / np.linalg.norm(sent[0]) / np.linalg.norm(sent[1]))
    assert 0.85 < alike < 0.99


def test_a_hidden_gain_helps_one_honest_client_and_pushes_against_all_others() -> None:
    # Mates in the first direction, as many others in the second; (1, −1) is 2 · 3 long in all.
    honest = np.array([[3.0, 0.0]] * 2 + [[0.0, 3.0]] * 2, np.float32)
    made = attack_of(config_of(attack=f"{ON_TRUST}HiddenGain"))
    np.testing.assert_allclose(made.hidden(honest, PUSH), [0.5**0.5, -(0.5**0.5)], rtol=1e-6)
    assert np.linalg.norm(made.against(honest, PUSH, RNG)) == pytest.approx(6.0, rel=1e-5)


def test_attackers_have_devices_of_their_own() -> None:
    own = Device(3.0, seconds_per_sample=0.1, bandwidth_up=10.0, jitter=0.1)
    late_and_fast = BoostOptions(attackers_join=5.0, attackers_seconds=0.2)
    assert SignFlip(BoostOptions()).device(own, 0) is own
    assert SignFlip(late_and_fast).device(own, 0) == Device(0.2, online=((5.0, np.inf),))


def test_sybils_come_and_go_four_at_a_time() -> None:
    attack = attack_of(config_of(attack=f"{ON_TRUST}Sybils", attackers_seconds=0.5))
    periods = [attack.device(Device(), number).online for number in (0, 3, 4, 9)]
    assert periods == [((0, 3.0),), ((0, 3.0),), ((3.0, 6.0),), ((6.0, 9.0),)]


def test_rushing_attackers_send_minus_the_mean_below_the_bound_on_lengths() -> None:
    attack = attack_of(config_of(attack=f"{ON_TRUST}Rush"))
    rng = np.random.default_rng(0)
    honest = np.array([[3.0, 0.0], [0.0, 4.0], [3.0, 4.0]], np.float32)
    sent = attack.against(np.pad(honest, ((0, 0), (0, 998))), np.ones(1000, np.float32), rng)
    # The median length is 4. The mean is along 6, 8; noise of a fifth of its length is aside.
    assert np.linalg.norm(sent) == pytest.approx(1.95 * 4.0)
    aim = np.pad([-0.6, -0.8], (0, 998))
    assert cosine(sent, aim) == pytest.approx(1 / np.sqrt(1.04), abs=0.01)
