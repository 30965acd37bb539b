"""Client embedding: inner products of changes from sketches, whichever models were sent."""

from __future__ import annotations

import numpy as np
import pytest

from raceme.core.clusters import Model
from raceme.features.client_map.sketches import SKETCH_SIZE, ClientEmbedding, Sketch

LENGTH = 1000
RNG = np.random.default_rng(0)
START, EAST, WEST = RNG.normal(size=(3, LENGTH)).astype(np.float32)


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def everybody_in(cluster: int) -> dict[str, dict[int, float]]:
    return {name: {cluster: 1.0} for name in "abcd"}


@pytest.mark.parametrize("length", [1, 100, SKETCH_SIZE, LENGTH, 300_000])
def test_products_come_out_nearly(length: int) -> None:
    """The standard error of a cosine is about 1/√128 = 0.09; short models are exact."""
    one, other = np.random.default_rng(1).normal(size=(2, length)).astype(np.float32)
    mixed = (one + other).astype(np.float32)
    sketch = Sketch(length)
    bound = 1e-5 if length <= SKETCH_SIZE else 0.3
    assert cosine(sketch(one), sketch(mixed)) == pytest.approx(cosine(one, mixed), abs=bound)


def test_a_sketch_is_linear_and_sees_weights_only() -> None:
    weights = np.arange(LENGTH) % 10 != 0
    sketch = Sketch(LENGTH, weights)
    whole = sketch(START + 2 * EAST)
    assert whole == pytest.approx(sketch(START) + 2 * sketch(EAST), abs=1e-3)
    counted = START.copy()
    counted[~weights] += 1e6
    assert (sketch(counted) == sketch(START)).all()


def test_clients_with_similar_updates_lie_together_while_the_model_changes() -> None:
    embedding, models = ClientEmbedding(Sketch(LENGTH)), {0: Model(START.copy())}
    ways = {"a": EAST, "b": WEST, "c": EAST, "d": WEST}
    for number, (client, way) in enumerate(ways.items()):
        embedding.send(number, models, {0: 1.0}, False)
        start = models[0].vector.copy()
        # Progress of the model by other clients' updates does not count as this client's.
        models[0].move(5 * RNG.normal(size=LENGTH).astype(np.float32))
        embedding.take(number, client, 0, start + np.float32(0.1) * way)
        embedding.close(number)
    clients, rows = embedding.relative_to_mean(models, everybody_in(0).__getitem__)
    assert clients == list("abcd")
    assert cosine(rows[0], rows[2]) > 0.99
    assert cosine(rows[1], rows[3]) > 0.99
    assert cosine(rows[0], rows[1]) < 0.5


def test_clients_of_different_clusters_lie_apart_though_they_change_nothing() -> None:
    embedding = ClientEmbedding(Sketch(LENGTH))
    models = {1: Model(START + EAST), 2: Model(START + WEST)}
    placement = {"a": {1: 1.0}, "b": {2: 1.0}, "c": {1: 0.5, 2: 0.5}}
    for number, (client, weights) in enumerate(placement.items()):
        embedding.send(number, models, weights, False)
        served = sum(share * models[k].vector for k, share in weights.items())
        embedding.take(number, client, 0, np.asarray(served, np.float32))
    _, rows = embedding.relative_to_mean(models, placement.__getitem__)
    assert cosine(rows[0], rows[1]) < -0.9
    # A mixture of half of each direction equals the mean of all.
    assert np.linalg.norm(rows[2]) < 0.01 * np.linalg.norm(rows[0])


def test_a_client_that_chooses_started_from_its_choice() -> None:
    embedding = ClientEmbedding(Sketch(LENGTH))
    models = {1: Model(START + EAST), 2: Model(START + WEST)}
    embedding.send(0, models, {1: 1.0, 2: 1.0}, True)
    embedding.take(0, "a", 2, models[2].vector)
    _, rows = embedding.relative_to_mean(models, {"a": {2: 1.0}}.__getitem__)
    assert rows[0] == pytest.approx(np.zeros(SKETCH_SIZE), abs=1e-3)


def test_a_new_client_is_taken_at_once_and_then_in_its_turn() -> None:
    embedding, models = ClientEmbedding(Sketch(LENGTH)), {0: Model(START.copy())}
    taken: list[str] = []
    rows = {}
    for look in range(5):
        for number, client in enumerate("abab"):
            if embedding.wants(client):
                taken.append(f"{client}{look}")
                embedding.send(number, models, {0: 1.0}, False)
            embedding.take(number, client, 0, START + (EAST if look == 0 else WEST))
            embedding.close(number)
        clients, found = embedding.relative_to_mean(models, everybody_in(0).__getitem__)
        rows = dict(zip(clients, found, strict=True))
    assert taken == ["a0", "b0", "b3", "a4"]
    # 0.3 of the latest, and 0.7 of the previous mean.
    sketch = Sketch(LENGTH)
    assert rows["a"] == pytest.approx(0.7 * sketch(EAST) + 0.3 * sketch(WEST), abs=1e-3)


def test_a_task_from_before_a_restart_is_left_out() -> None:
    embedding = ClientEmbedding(Sketch(LENGTH))
    embedding.take(7, "a", 0, START)
    embedding.close(7)
    clients, rows = embedding.relative_to_mean({0: Model(START)}, everybody_in(0).__getitem__)
    assert clients == []
    assert rows.shape == (0, SKETCH_SIZE)
