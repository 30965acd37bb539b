"""Skipped split checks: bounds on eigenvalues, and unchanged decisions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raceme.core.clients import Client
from raceme.core.events import ClusterChange
from raceme.core.requests import InFlight, Update
from raceme.strategies import CASA, CASAParameters
from raceme.strategies.casa.buffers import SplitWatch
from raceme.strategies.shared import affinity, laplacian, largest_gap


def similarities(rng: np.random.Generator, clients: int) -> np.ndarray:
    models = 1.0 + 0.3 * rng.normal(size=(clients, 12))
    unit = models / np.linalg.norm(models, axis=1, keepdims=True)
    return (unit @ unit.T).astype(np.float32)


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), clients=st.integers(3, 25), size=st.floats(1e-5, 0.5))
def test_no_eigenvalue_moves_further_than_the_bound(seed: int, clients: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    matrix = similarities(rng, clients)
    computed = np.ones((clients, clients), bool)
    watch = SplitWatch.for_members(np.arange(clients), computed, clients)
    weights = affinity(matrix)
    gap = largest_gap(weights)
    assert gap is not None
    watch.record_computation(weights, gap.size)
    before = np.linalg.eigvalsh(laplacian(weights))
    for _ in range(5):
        i = int(rng.integers(clients))
        others = np.flatnonzero((rng.uniform(size=clients) < 0.6) & (np.arange(clients) != i))
        new = (matrix[i, others] + size * rng.normal(size=len(others))).astype(np.float32)
        watch.change(i, others, new, matrix, computed)
        matrix[i, others] = matrix[others, i] = new
        now = affinity(matrix)
        moved = np.abs(np.linalg.eigvalsh(laplacian(now)) - before).max()
        assert moved <= watch.drift + 1e-9
        found = largest_gap(now)
        assert found is not None
        assert found.size <= watch.bound()


def test_missing_pairs_are_counted_once() -> None:
    computed = np.eye(4, dtype=bool)
    matrix = np.eye(4, dtype=np.float32)
    watch = SplitWatch.for_members(np.array([0, 1, 2]), computed, clients=4)
    assert watch.missing == 3
    watch.change(0, np.array([1, 3]), np.array([0.5, 0.5], np.float32), matrix, computed)
    computed[0, 1] = computed[1, 0] = True
    # Client 3 is no member; the pair (0, 1) is known from now on.
    assert watch.missing == 2
    watch.change(1, np.array([0]), np.array([0.4], np.float32), matrix, computed)
    assert watch.missing == 2


def test_the_bound_by_hand() -> None:
    matrix, computed = np.ones((4, 4), np.float32), np.ones((4, 4), bool)
    watch = SplitWatch.for_members(np.arange(4), computed, clients=4)
    assert watch.bound() == np.inf
    watch.record_computation(affinity(matrix), 0.5)
    watch.change(0, np.array([1, 2]), np.zeros(2, np.float32), matrix, computed)
    # All degrees are 4, then 2, 3, 3, 4. The change is −1 twice, and of norm √(1/6 + 1/6); client
    # 0's factor is √(4/2) − 1 = 0.414214 and its row's norm √(4 · 1/16) = 1/2; the largest factor
    # of the others is √(4/3) − 1 = 0.154701:
    # 0.577350 + 2 · 0.414214 / 2 + 2 · 0.154701 + 0.414214² = 1.472538.
    assert watch.degrees.tolist() == [2, 3, 3, 4]
    assert watch.drift == pytest.approx(1.472538, abs=1e-6)
    assert watch.bound() == pytest.approx(0.5 + 2 * 1.472538, abs=1e-5)
    watch.record_computation(affinity(matrix), 0.0)
    assert watch.bound() == 1e-10


class Eager(CASA):
    """CASA that computes the eigenvalues at every update."""

    def on_update(self, update: Update):  # type: ignore[no-untyped-def]
        self.state.watches.clear()
        return super().on_update(update)


@pytest.mark.parametrize("seed", range(4))
def test_every_decision_is_that_of_always_looking(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = {CASA: 0, Eager: 0}
    outcomes = []
    for kind in (CASA, Eager):
        rng = np.random.default_rng(seed)
        centres = 1.0 + rng.normal(size=(3, 30))
        strategy = kind(CASAParameters(kappa=0.02))
        strategy.initialize(np.zeros(30, np.float32))
        at, splits = [0], []
        strategy.clusters.report_to(
            lambda change, at=at, splits=splits: splits.append((at[0], change))
        )
        for client in range(12):
            strategy.on_join(Client(f"c{client}", 10))

        def counted(weights, kind=kind):  # type: ignore[no-untyped-def]
            looks[kind] += 1
            return largest_gap(weights)

        monkeypatch.setattr("raceme.strategies.shared.largest_gap", counted)
        for step in range(600):
            at[0] = step
            client = f"c{int(rng.integers(12))}"
            cluster = strategy.clusters.main(client)
            version = strategy.models[cluster].version
            task = InFlight(step, client, cluster, version, step, 0.0, 0)
            strategy.on_sent(task)
            # Clients converge to their group's centre over time.
            noise = 2.0 * 0.99**step
            vector = centres[int(client[1:]) % 3] + noise * rng.normal(size=30)
            strategy.applied([Update(task, vector.astype(np.float32), 10, 0.0)])
        outcomes.append(
            [
                (step, change.made, change.memberships)
                for step, change in splits
                if change.change is ClusterChange.SPLIT
            ]
        )
    assert outcomes[0] == outcomes[1] != []
    assert looks[CASA] < looks[Eager]
