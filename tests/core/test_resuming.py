"""A run that is resumed in the middle of a round equals the uninterrupted run."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from budgeted import Budgeted
from clustered import CENTRES, GROUPS, TIMEOUT, centre_losses, plain, whole
from fleets import MODEL, grid_of, pulled_app
from soft_clusters import SoftClusters

from raceme.core import events
from raceme.datasets.drift import Schedule
from raceme.simulation import Device, VirtualGrid
from raceme.strategies import (
    CASA,
    CDFL,
    CFL,
    CSAFL,
    ICFL,
    IFCA,
    CASAParameters,
    CASAPlus,
    CDFLParameters,
    CFLAsync,
    CSAFLParameters,
    FedAvg,
    FedDrift,
    FedDriftAsync,
    FedDriftAsyncParameters,
    FedDriftEager,
    FedDriftParameters,
    FedGroup,
    FedProx,
    FeSEM,
    FlexCFL,
    FlexCFLAsync,
    FlexCFLAsyncParameters,
    FlexCFLParameters,
    ICFLAsync,
    Method,
    Panicle,
    Plan,
)

UPDATED = ("semi-asynchronous", "synchronous")
METHODS = [
    *(FedAvg, FedProx, CFL, FeSEM, ICFL, IFCA, FedGroup),
    *(CASA, CASAPlus, CFLAsync, ICFLAsync, SoftClusters, Budgeted, FedDriftEager),
    Panicle,
    partial(CASA, CASAParameters(compare="changes", noise_guard=3)),
    partial(FedDrift, FedDriftParameters(start="per-client", delta=0.05, max_models=8)),
    partial(FedDriftAsync, FedDriftAsyncParameters(start="per-client", delta=0.02, ask_every=2)),
    partial(CDFL, CDFLParameters(k=3, request_seconds=2.0)),
    partial(FlexCFL, FlexCFLParameters(detect="direction")),
    partial(FlexCFLAsync, FlexCFLAsyncParameters(groups=3, detect="direction")),
    *(partial(CSAFL, CSAFLParameters(update=update, groups=3)) for update in UPDATED),
]
UPDATES = 90


def troubled_fleet() -> VirtualGrid:
    """Twelve clients in three groups that are slow, lose tasks, come and go."""
    rng = np.random.default_rng(0)
    targets = [CENTRES[group] + 0.01 * rng.normal(size=8) for group in GROUPS]
    fleet = [
        Device(
            seconds_per_round=5.0 if index % 4 == 0 else 1.0,
            jitter=0.3,
            drop=0.05,
            mean_online=20.0 if index % 5 == 0 else 0.0,
            mean_offline=3.0 if index % 5 == 0 else 0.0,
        )
        for index in range(12)
    ]
    return grid_of(pulled_app(targets), fleet, GROUPS)


def is_in_the_midst(strategy: Method) -> bool:
    """Return whether work is in flight, and in rounds whether some clients have answered."""
    state = getattr(strategy.scheduling, "state", None)
    return bool(strategy.progress.in_flight) and bool(getattr(state, "updates", True))


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(method: type[Method]) -> None:
    plan = Plan(eval_every=20, drift=Schedule("seconds", every=7.0))
    strategy, grid, seen = method(seed=1), troubled_fleet(), []
    saved: list[tuple[int, dict[str, Any]]] = []
    steps = itertools.count()

    def save() -> str:
        """Save the state once during the greetings, and twice later while work is in flight."""
        due = (7, 40, 70)[len(saved)] if len(saved) < 3 else math.inf
        if next(steps) >= due and (not saved or is_in_the_midst(strategy)):
            saved.append((len(seen), whole(strategy, grid)))
        return ""

    strategy.run(
        grid,
        MODEL,
        UPDATES,
        TIMEOUT,
        plan=plan,
        observe=seen.append,
        stop_check=save,
        probe=centre_losses,
    )
    assert len(saved) == 3
    assert saved[0][1]["strategy"]["progress"]["fleet"]["greeted"]
    for before, state in saved:
        again, restored, new_grid = [], method(seed=99), troubled_fleet()
        restored.load_state_dict(state["strategy"])
        new_grid.load_state_dict(state["grid"])
        restored.run(
            new_grid,
            MODEL,
            UPDATES,
            TIMEOUT,
            plan=plan,
            observe=again.append,
            probe=centre_losses,
        )
        assert again == seen[before:]
        assert plain(restored.state_dict()) == plain(strategy.state_dict())


def test_a_round_that_is_resumed_has_the_updates_that_were_there() -> None:
    # c0 answers at 1 s; the state is saved at 1 s, while c1 works until 3 s.
    def fleet() -> VirtualGrid:
        return grid_of(pulled_app([2 * np.ones(8), 8 * np.ones(8)]), [Device(), Device(3.0)])

    strategy, grid, saved = FedAvg(), fleet(), []
    strategy.run(
        grid,
        MODEL,
        2,
        stop_check=lambda: saved.append(whole(strategy, grid)) or "" if grid.now() == 1.0 else "",
    )
    assert [
        update["task"]["client"] for update in saved[-1]["strategy"]["dispatch"]["updates"]
    ] == ["c0"]
    restored, new_grid, seen = FedAvg(), fleet(), []
    restored.load_state_dict(saved[-1]["strategy"])
    new_grid.load_state_dict(saved[-1]["grid"])
    restored.run(new_grid, MODEL, 2, observe=seen.append)
    updates = [event for event in seen if isinstance(event, events.UpdateApplied)]
    assert [(u.client, u.time, u.dispatched_at) for u in updates] == [
        ("c0", 1.0, 0.0),
        ("c1", 3.0, 0.0),
    ]
