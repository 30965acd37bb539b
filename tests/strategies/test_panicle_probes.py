"""Probes: cross-comparisons of halves, without the bias of chance."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raceme.core.messages import BATCH_SIZE, HALF, LOCAL_EPOCHS, LOCAL_STEPS, TASK_SHARE
from raceme.core.sketches import Sketcher
from raceme.core.state import from_tree, to_tree
from raceme.strategies.panicle.probes import Probes, landmarks, settings_of_probe


def of(**directions: list[tuple[float, float]]) -> Probes:
    probes = Probes()
    for client, ones in directions.items():
        for one in ones:
            probes.add(client, np.array(one, np.float32))
    return probes


def test_halves_of_different_clients_are_compared_crosswise() -> None:
    probes = of(a=[(1, 0), (0.6, 0.8)], b=[(0, 1), (0, 1)])
    # a agrees with itself by (1, 0)·(0.6, 0.8) = 0.6, b by 1; with each other by ½ (0 + 0.8).
    assert probes.reliability("a") == pytest.approx(0.6)
    # Two estimates: a's first with b's second half is 0, b's first with a's second half 0.8.
    assert probes.distances(["a", "b"])[:, 0, 1] == pytest.approx(
        [1.0, 1 - min(1.0, 0.8 / np.sqrt(0.6))]
    )
    expected = 1 - 0.4 / np.sqrt(0.6)
    assert probes.distances_to_groups(["a"], [["b"]])[0, 0] == pytest.approx(expected)


def test_one_probe_is_compared_with_both_halves_of_others() -> None:
    probes = of(a=[(1, 0)], b=[(1, 0), (0.6, 0.8)])
    # The mean of (1, 0) and (0.6, 0.8) is 0.8 along a's; a is taken to agree with itself as b: 0.6.
    assert not probes.is_known("a")
    assert probes.distances_to_groups(["a"], [["b"]])[0, 0] == pytest.approx(1 - 1.0)
    c = of(a=[(0.8, -0.6)], b=[(1, 0), (0.6, 0.8)])
    # ½ (1 + 0.6) · 0.8 − ½ · 0.8 · 0.6 = 0.4 along c's.
    assert c.distances_to_groups(["a"], [["b"]])[0, 0] == pytest.approx(1 - 0.4 / 0.6)


def test_the_distance_from_a_group_is_the_mean_over_its_members() -> None:
    kinds = {"a": (1, 0), "b": (0.6, 0.8), "c": (0, 1), "d": (0.8, 0.6)}
    probes = of(**{client: [one, one] for client, one in kinds.items()})
    found = probes.distances_to_groups(["a", "d"], [["a", "b"], ["c"]])
    # 1 − cos: a from itself and b (0 + 0.4) / 2; d from a and b (0.2 + 0.04) / 2, from c 0.4.
    assert found == pytest.approx(np.array([[0.2, 1.0], [0.12, 0.4]]))


def test_chance_cancels_out() -> None:
    # Two clients of one group, with noise four times as long as their common direction.
    rng = np.random.default_rng(0)
    common = np.eye(4000)[0]
    probes = Probes()
    for client in "ab":
        for _ in range(2):
            noisy = common + 4 * rng.normal(size=4000) / np.sqrt(4000)
            probes.add(client, (noisy / np.linalg.norm(noisy)).astype(np.float32))
    # 1/17 of every direction is signal: too little to decide, so that no client is clear.
    assert probes.reliability("a") == pytest.approx(1 / 17, abs=0.05)
    for _ in range(60):
        for client in "ab":
            noisy = common + 4 * rng.normal(size=4000) / np.sqrt(4000)
            probes.add(client, (noisy / np.linalg.norm(noisy)).astype(np.float32))
    # With thirty more probes in each half, the clients are clearly alike.
    assert probes.is_clear("a")
    assert probes.distances(["a", "b"])[0, 0, 1] < 0.1


def test_what_a_client_did_before_tells_whether_its_data_have_changed() -> None:
    probes = of(a=[(1, 0), (1, 0)])
    assert probes.likeness("a", np.array([1, 0], np.float32)) == pytest.approx(1.0)
    assert probes.likeness("a", np.array([0, 1], np.float32)) == pytest.approx(0.0)
    probes.forget("a")
    assert probes.count("a") == 0
    assert probes.reliability("a") == 0.0
    # Nothing is left of the former directions.
    for _ in range(2):
        probes.add("a", np.array([0, 1], np.float32))
    assert probes.likeness("a", np.array([0, 1], np.float32)) == pytest.approx(1.0)


def test_likeness_is_relative_to_the_clients_reliability() -> None:
    direction = np.array([1, 0], np.float32)
    # r = 0.6: the sum (1.6, 0.8) has a cosine of 1.6 / √3.2, over 0.6 / √0.8.
    probes = of(a=[(1, 0), (0.6, 0.8)])
    assert probes.likeness("a", direction) == pytest.approx(4 / 3)
    # r = 0 counts as 0.1: 1 / √2, over 0.1 / √0.55.
    probes = of(a=[(1, 0), (0, 1)])
    assert probes.likeness("a", direction) == pytest.approx((0.55 / 2) ** 0.5 / 0.1)
    # Opposite halves have no mean direction, which any direction is like.
    assert of(a=[(1, 0), (-1, 0)]).likeness("a", direction) == 1.0


@pytest.mark.parametrize(("reliability", "is_clear"), [(0.1, True), (0.099, False)])
def test_clients_are_clear_from_the_least_reliability_on(
    reliability: float, is_clear: bool
) -> None:
    probes = of(a=[(1, 0), (1, 0)], b=[(1, 0)])
    probes.selves[:] = reliability
    # b has one half only.
    assert [probes.is_clear(client) for client in "ab"] == [is_clear, False]
    assert probes.clear() == ["a"] * is_clear


def test_directions_of_zero_say_nothing() -> None:
    probes = of(a=[(0, 0), (0, 0)])
    assert probes.is_known("a")
    assert not probes.is_clear("a")


@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 99)), min_size=1, max_size=60))
def test_the_order_in_which_clients_come_changes_no_distance(
    order: list[tuple[int, int]],
) -> None:
    def made(pairs: list[tuple[int, int]]) -> Probes:
        probes = Probes()
        for client, seed in pairs:
            direction = np.random.default_rng([client, seed]).normal(size=5) + client
            probes.add(str(client), (direction / np.linalg.norm(direction)).astype(np.float32))
        return probes

    # A client's own probes keep their order, because sorting by client is stable.
    one, other = made(order), made(sorted(order, key=lambda pair: pair[0]))
    clear = [client for client in one.clients if one.is_clear(client)]
    if clear:
        distances = one.distances(clear)
        # The order of the two estimates depends on the order of the clients.
        assert np.allclose(distances.mean(0), other.distances(clear).mean(0), atol=1e-5)
        assert np.array_equal(distances, distances.transpose(0, 2, 1))
        assert distances.min() >= 0
        assert distances.max() <= 2


def test_a_restored_state_goes_on_as_the_original() -> None:
    probes = of(a=[(1, 0), (0.6, 0.8)], b=[(0, 1)])
    restored = from_tree(Probes, to_tree(probes))
    for one in (probes, restored):
        one.add("b", np.array([0.6, 0.8], np.float32))
    assert probes.distances(["a", "b"]).tolist() == restored.distances(["a", "b"]).tolist()
    assert probes.clients == restored.clients


def test_a_sketch_keeps_cosines_nearly() -> None:
    rng = np.random.default_rng(1)
    one = rng.normal(size=20_000).astype(np.float32)
    other = np.asarray(one + rng.normal(size=20_000), np.float32)
    sketcher = Sketcher()
    cosine = float(sketcher.direction(one) @ sketcher.direction(other))
    # The true cosine is 1/√2; one standard deviation is 1/√1024 = 0.03.
    assert cosine == pytest.approx(0.707, abs=0.1)
    assert len(sketcher.direction(one)) == 1024
    assert len(sketcher.direction(one[:2048])) == 2048


def test_landmarks_are_of_every_cluster() -> None:
    now, rng = np.repeat([4, 7], [992, 8]), np.random.default_rng(0)
    rows = landmarks(now, rng)
    # 500 of all clients, and eight of each cluster, which may be among them.
    assert 500 <= len(rows) == len(set(rows.tolist())) <= 516
    assert np.count_nonzero(now[rows] == 7) == 8
    assert landmarks(now[:500], rng).tolist() == list(range(500))


def test_a_probe_is_at_most_an_ordinary_task() -> None:
    settings = {BATCH_SIZE: 10, LOCAL_EPOCHS: 1}
    # 50 of 560 samples.
    long = settings_of_probe(settings, 560, 5, 0)
    assert long[LOCAL_STEPS] == 5
    assert long[TASK_SHARE] == pytest.approx(50 / 560)
    # 30 samples are three mini-batches; fewer than ten samples are two, the minimum.
    assert settings_of_probe(settings, 30, 5, 0)[LOCAL_STEPS] == 3
    assert settings_of_probe(settings, 3, 5, 0)[LOCAL_STEPS] == 2
    assert settings_of_probe(settings, 3, 5, 0)[TASK_SHARE] == 1.0
    # The halves of the samples alternate.
    assert [settings_of_probe(settings, 30, 5, former)[HALF] for former in range(3)] == [0, 1, 0]
