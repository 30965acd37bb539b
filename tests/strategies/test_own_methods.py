"""Users' own methods with built-in schedulers: soft clusters on request, and windows."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from budgeted import Budgeted
from clustered import CENTRES, GROUPS, centre_losses, found, last_accuracy, placed
from fleets import MODEL, grid_of, pulled_app
from soft_clusters import SoftClusters

from raceme.core import events
from raceme.core.clusters import blended
from raceme.core.events import ClusterChange
from raceme.simulation import Device, VirtualGrid
from raceme.strategies import Method, Plan


def mixtures(main: float) -> VirtualGrid:
    """Twelve clients with data mostly of one group, and otherwise of the next one."""
    shares = [main * np.eye(3)[group] + (1 - main) * np.eye(3)[(group + 1) % 3] for group in GROUPS]
    devices = [Device(seconds_per_round=5.0 if index % 4 == 0 else 1.0) for index in range(12)]
    return grid_of(pulled_app([share @ CENTRES for share in shares]), devices, GROUPS)


def run(strategy: Method, grid: VirtualGrid, updates: int) -> list[events.Event]:
    seen: list[events.Event] = []
    plan = Plan(eval_every=60)
    strategy.run(grid, MODEL, updates, plan=plan, observe=seen.append, probe=centre_losses)
    return seen


@pytest.mark.parametrize("method", [SoftClusters, Budgeted])
def test_a_sketch_is_short(method: type[Method]) -> None:
    assert len(inspect.getsource(method).splitlines()) < 60


def test_soft_clusters_find_the_mixtures() -> None:
    strategy = SoftClusters()
    seen = run(strategy, mixtures(main=0.75), 400)
    for client in strategy.progress.fleet.clients.values():
        weights = strategy.clusters.of(client.client_id)
        assert sum(weights.values()) == pytest.approx(1.0)
        # Its own group has the largest weight, then the group of its other data.
        first, second, third = (weights[(client.group + n) % 3] for n in range(3))
        assert first > second > third
    assert found(strategy) == [4, 4, 4]
    # All clients were queried about all clusters once, and moved by every update.
    assert len(placed(seen, ClusterChange.ASSIGN)) == 12
    assert len(placed(seen, ClusterChange.MOVE)) > 300
    # A single model is sent, whatever its mixture.
    updates = [event for event in seen if isinstance(event, events.UpdateApplied)]
    assert {u.bytes_down for u in updates} == {MODEL.count_bytes()}


def test_soft_clusters_serve_and_test_what_they_are_mixed_of() -> None:
    strategy = SoftClusters()
    seen = run(strategy, mixtures(main=0.75), 60)
    last = [event for event in seen if isinstance(event, events.Evaluated)][-1]
    shares = [0.75 * np.eye(3)[group] + 0.25 * np.eye(3)[(group + 1) % 3] for group in GROUPS]
    for index in range(12):
        served = blended(strategy.models, strategy.result.client_clusters[f"c{index}"])
        distance = np.linalg.norm(served - shares[index] @ CENTRES)
        assert last.per_client[f"c{index}"][1] == pytest.approx(1 / (1 + distance), abs=1e-5)


def test_an_update_goes_into_several_clusters() -> None:
    strategy = SoftClusters()
    run(strategy, mixtures(main=0.55), 200)
    versions = sum(model.version for model in strategy.models.values())
    assert versions > 1.3 * 200


def test_budgeted_groups_are_found_in_the_first_window() -> None:
    strategy = Budgeted()
    seen = run(strategy, mixtures(main=1.0), 400)
    (split,) = placed(seen, ClusterChange.SPLIT)
    assert split.time == 12.0
    assert found(strategy) == [4, 4, 4]
    assert last_accuracy(seen) > 0.9
    updates = [event for event in seen if isinstance(event, events.UpdateApplied)]
    # Work that would end after its window is cancelled, and each window has six clients.
    ends = {update.time: int(update.time // 12.0) for update in updates if update.time % 12.0}
    windows = {
        window: {u.client for u in updates if ends.get(u.time) == window}
        for window in ends.values()
    }
    assert len(windows.pop(0)) == 12
    assert all(len(clients) <= 6 for clients in windows.values())
    assert len(windows) > 3
    assert {update.staleness for update in updates} > {0, 1}
