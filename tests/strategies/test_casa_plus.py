"""CASA+ and the ablations: masks and sparsity by hand, and the time saved."""

import numpy as np
import pytest
from clustered import (
    at_version,
    check_it_can_be_restored,
    found,
    last_accuracy,
    run_on,
    three_groups,
)
from fleets import MODEL, grid_of, pulled_app

from raceme.core import events
from raceme.core.clients import Client
from raceme.core.clusters import Model
from raceme.core.events import ClusterChange
from raceme.core.messages import ModelSpec
from raceme.core.requests import InFlight, Request, Update
from raceme.simulation import Device
from raceme.strategies import CASA, CASAC, CASAD, CASAPlus, CASAPlusParameters
from raceme.strategies.casa.strategy import magnitude_mask, sparsity

ONES = np.ones(8, np.float32)


def test_sparsity_by_hand() -> None:
    # S0/2 (α_c − α_i) (1 + cos((t − 1) π / R)) with S0 = 0.8, α_c − α_i = 0.3, R = 100:
    # t = 1: 0.4 · 0.3 · 2; t = 51: 0.4 · 0.3 · (1 + cos(π / 2)); t = 101: at the end of it, 0.
    values = [sparsity(0.8, alpha_c=0.4, alpha_i=0.1, t=t, end=100) for t in (1, 51, 101, 151)]
    assert values == pytest.approx([0.24, 0.12, 0.0, 0.0])
    assert sparsity(0.8, alpha_c=0.4, alpha_i=0.4, t=1, end=100) == 0.0


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.0, [1, 1, 1, 1]),
        (0.24, [1, 1, 1, 1]),
        (0.25, [1, 1, 1, 0]),
        (0.5, [0, 1, 1, 0]),
        (0.99, [0, 1, 0, 0]),
    ],
)
def test_the_smallest_weights_are_masked(share: float, expected: list[int]) -> None:
    weights = np.array([0.1, -0.5, 0.3, 0.05], np.float32)
    assert magnitude_mask(weights, share).astype(int).tolist() == expected


def test_masked_mixing_by_hand() -> None:
    model = Model(np.array([1.0, 2.0, 3.0], np.float32))
    w_i = np.array([3.0, 4.0, 0.0], np.float32)
    # 0.75 · 1 + 0.25 · 3 = 1.5; the second stays; 0.75 · 3 = 2.25.
    model.mix(w_i, 0.25, where=np.array([True, False, True]))
    assert model.vector.tolist() == [1.5, 2.0, 2.25]
    assert model.version == 1


def test_the_way_of_a_mask() -> None:
    strategy = CASAPlus(CASAPlusParameters(sparsity=1.0, rounds=1000))
    strategy._spec = ModelSpec.of(MODEL)  # start() sets it
    strategy.initialize(np.zeros(8, np.float32))
    strategy.on_join(Client("c0", num_examples=10))

    def in_flight(number: int, version: int) -> InFlight:
        task = InFlight(number, "c0", 0, version, 0, sent_at=0.0, bytes_down=0)
        strategy.on_sent(task)
        return task

    # The first task has no mask; its update is fresh and mixed in completely.
    assert strategy.request_for("c0") == Request("c0")
    task = in_flight(0, version=0)
    strategy.applied([Update(task, np.arange(1, 9, dtype=np.float32), 10, 0.0)])
    strategy.on_closed(task)
    assert strategy.request_for("c0") == Request("c0")
    # The second is 16 versions late: |C| = 1, α_c = 2 Ω / log2(4) = Ω(2) = 0.99994, α_i a quarter
    # of it, S = 0.99994 · 0.75 = 0.75: six of the eight weights are not trained next time.
    at_version(strategy, 17)
    task = in_flight(1, version=1)
    strategy.applied([Update(task, np.arange(8, 0, -1).astype(np.float32), 10, 0.0)])
    strategy.on_closed(task)
    work = strategy.request_for("c0")
    assert work.settings == {"compute-scale": pytest.approx(3 / 8)}
    mask = work.arrays["mask"]
    assert {name: array.shape for name, array in mask.items()} == {"w": (4,), "b": (2, 2)}
    assert {array.dtype for array in mask.values()} == {"uint8"}
    assert mask["w"].numpy().tolist() == [1, 1, 1, 0]
    assert mask["b"].numpy().tolist() == [[0, 0], [0, 0]]
    # The third update only changes the weights where the mask is set.
    before = strategy.models[0].vector.copy()
    task = in_flight(2, version=18)
    assert list(strategy.state.sent) == [2]
    strategy.applied([Update(task, before + 1, 10, 0.0)])
    strategy.on_closed(task)
    changed = strategy.models[0].vector != before
    assert changed.tolist() == [True] * 3 + [False] * 5
    assert strategy.state.sent == {}
    assert strategy.request_for("c0") == Request("c0")


def test_a_fresh_update_is_not_sparse_whatever_alpha0_is() -> None:
    strategy = CASAPlus(CASAPlusParameters(sparsity=1.0, rounds=1000, alpha0=3.0))
    strategy._spec = ModelSpec.of(MODEL)  # start() sets it
    strategy.initialize(np.zeros(8, np.float32))
    strategy.on_join(Client("c0", num_examples=10))
    weights = np.arange(1, 9, dtype=np.float32)

    def applied(number: int, version: int) -> float:
        task = InFlight(number, "c0", 0, version, 0, sent_at=0.0, bytes_down=0)
        strategy.on_sent(task)
        weight = strategy.applied([Update(task, weights, 10, 0.0)])[0].weight
        strategy.on_closed(task)
        return weight

    # |C| = 1: α0 Ω / log2(4) = 1.5 Ω, a share of 1 at most; α_i is the same, so that S = 0.
    assert applied(0, version=0) == 1.0
    assert strategy.request_for("c0") == Request("c0")
    # τ = 16: α_i = 1 / 4, S(2) = 0.75 − 2e-6 of eight weights: five (with 1.5 and 1.5 / 4 all).
    at_version(strategy, 17)
    assert applied(1, version=1) == pytest.approx(0.25)
    assert strategy.request_for("c0").settings == {"compute-scale": pytest.approx(3 / 8)}


def test_slow_clients_get_faster_and_the_mask_is_counted() -> None:
    def run(**parameters: float) -> tuple[list[float], set[int]]:
        strategy = CASAPlus(CASAPlusParameters(rounds=10_000, **parameters))  # type: ignore[arg-type]
        devices = [Device(seconds_per_round=20.0), *[Device() for _ in range(3)]]
        grid = grid_of(pulled_app([index * ONES for index in (1, 2, 3, 4)]), devices)
        seen = run_on(strategy, grid, 240)
        slow = [e for e in seen if isinstance(e, events.UpdateApplied) and e.client == "c0"]
        return [e.time - e.dispatched_at for e in slow], {e.bytes_down for e in slow}

    durations, sizes = run(sparsity=1.0)
    # |C| = 4: α_c = 2 / log2(7) = 0.712; τ = 60, α_i = α_c / √60 = 0.092; S = 0.62, four of eight.
    assert durations[0] == 20.0
    assert durations[1] == pytest.approx(20.0 * 4 / 8)
    mask = MODEL.count_bytes() - 8 * 3
    assert sizes == {MODEL.count_bytes(), MODEL.count_bytes() + mask}
    whole, sizes = run(sparsity=0.0)
    assert whole == [20.0] * len(whole)
    assert sizes == {MODEL.count_bytes()}


def test_without_sparsity_it_is_casa() -> None:
    plus, casa = CASAPlus(CASAPlusParameters(sparsity=0.0)), CASA()
    assert run_on(plus, three_groups(), 200) == run_on(casa, three_groups(), 200)


def test_the_groups_are_found() -> None:
    strategy = CASAPlus()
    seen = run_on(strategy, three_groups(), 400)
    assert found(strategy) == [4, 4, 4]
    assert last_accuracy(seen) > 0.9


def test_casa_c_keeps_one_model_and_casa_d_one_weight() -> None:
    seen = run_on(CASAC(), three_groups(), 200)
    changes = [event for event in seen if isinstance(event, events.ClustersChanged)]
    assert {event.change for event in changes} == {ClusterChange.ASSIGN}
    weights = {e.weight for e in run_on(CASAD(), three_groups(), 200) if hasattr(e, "weight")}
    assert weights == {0.3}


@pytest.mark.parametrize("method", [CASAPlus, CASAC, CASAD])
def test_it_can_be_restored(method: type[CASA]) -> None:
    check_it_can_be_restored(method)
