"""Protected runs of any method: attacked updates, reports, and resumption."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from clustered import CENTRES, GROUPS, TIMEOUT, centre_losses, plain, whole
from fleets import grid_of, pulled_app, read, several_of, write
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from runs import of

from raceme.core import events
from raceme.core.chain import Chain
from raceme.core.events import UpdateJudged, Verdict
from raceme.core.requests import Bases, Update
from raceme.features.protection.guards import (
    FilterProtection,
    Guard,
    Judged,
    NoProtection,
    NormProtection,
    Ruling,
    TrustProtection,
)
from raceme.simulation import Device, VirtualGrid
from raceme.strategies import (
    CASA,
    CDFL,
    CFL,
    CSAFL,
    FAACL,
    IFCA,
    STRATEGIES,
    CASAPlus,
    CDFLParameters,
    CFLAsync,
    CSAFLParameters,
    FAACLAsync,
    FedAsync,
    FedAvg,
    FedBuff,
    FedDriftAsync,
    FedDriftAsyncParameters,
    FedSoftAsync,
    FlexCFLAsync,
    FlexCFLAsyncParameters,
    ICFLAsync,
    IFCAAsync,
    Method,
    Panicle,
    Plan,
)

START = write(np.full(8, 3.0))
"""The initial model, as long as the targets, so that no first update looks too long."""
ATTACKER = "c5"
UPDATES = 100
METHODS = [
    *(CASA, CASAPlus, FedAsync, FedBuff, CFLAsync, ICFLAsync, IFCAAsync, FAACLAsync, FedSoftAsync),
    partial(FedDriftAsync, FedDriftAsyncParameters(start="per-client", delta=0.02, ask_every=2)),
    partial(CDFL, CDFLParameters(k=3, request_seconds=2.0)),
    partial(FlexCFLAsync, FlexCFLAsyncParameters(groups=3, detect="direction")),
    partial(CSAFL, CSAFLParameters(groups=3)),
    Panicle,
    *(FedAvg, CFL, IFCA, FAACL),
]
"""Every asynchronous method, and some round-based ones."""


Poison = Callable[[np.ndarray], np.ndarray]
"""Returns the model that one client sends instead of its own."""
STRAY = np.tile(np.array([1.0, -1.0], np.float32), 4)


def strays(model: np.ndarray) -> np.ndarray:
    """Move in a direction that no other client takes."""
    return model + STRAY


def scales(model: np.ndarray) -> np.ndarray:
    return np.float32(1e4) * model


def poisoned_fleet(poison: Poison | None = strays, step: float = 0.1) -> VirtualGrid:
    """Twelve clients in three groups, of which one sends the given poison."""
    rng = np.random.default_rng(0)
    targets = [CENTRES[group] + 0.01 * rng.normal(size=8) for group in GROUPS]

    def change(reply: Message, index: int) -> Message:
        if f"c{index}" == ATTACKER and poison is not None:
            reply.content["arrays"] = write(poison(read(reply.content["arrays"])))
        return reply

    fleet = [Device(5.0 if index % 4 == 0 else 1.0, jitter=0.3) for index in range(12)]
    return grid_of(pulled_app(targets, step=step, change=change), fleet, GROUPS)


def started(
    strategy: Method,
    grid: VirtualGrid,
    guard: Guard | None,
    **options: Any,
) -> list[events.Event]:
    seen: list[events.Event] = []
    if guard is not None:
        strategy.features = Chain({"protection": guard})
    plan = Plan(eval_every=50)
    options = {"plan": plan, "observe": seen.append, "probe": centre_losses, **options}
    strategy.run(grid, START, UPDATES, TIMEOUT, **options)
    return seen


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_protected_run_is_bit_for_bit_the_uninterrupted_one(method: Any) -> None:
    strategy, grid = method(seed=1), poisoned_fleet()
    saved: list[tuple[int, Any]] = []
    steps = itertools.count()
    seen: list[events.Event] = []

    def save() -> str:
        if next(steps) >= 50 and not saved and strategy.progress.in_flight:
            saved.append((len(seen), whole(strategy, grid)))
        return ""

    started(strategy, grid, FilterProtection(), observe=seen.append, stop_check=save)
    (before, state), restored, again = saved[0], method(seed=99), poisoned_fleet()
    assert state["strategy"]["features"]["protection"]["lengths"]
    restored.features = Chain({"protection": FilterProtection()})
    restored.load_state_dict(state["strategy"])
    again.load_state_dict(state["grid"])
    assert started(restored, again, None) == seen[before:]
    assert plain(restored.state_dict()) == plain(strategy.state_dict())
    assert not restored.bases.vectors or restored.progress.in_flight or held(restored)


def held(strategy: Method) -> bool:
    """Whether a scheduler still holds updates, and so the models that they started from."""
    return bool(getattr(strategy.scheduling, "state", None))


def test_what_is_scaled_keeps_its_counters() -> None:
    """Counters of a model are whole numbers, which scaling must not split."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        received = message.content["arrays"]
        weight, count = (received[name].numpy() for name in ("weight", "num_batches_tracked"))
        step = 1000.0 if context.node_config["partition-id"] == 5 else 0.1
        arrays = {"weight": Array(weight + np.float32(step))}
        arrays["num_batches_tracked"] = Array(np.asarray(count + 1))
        content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 3})}
        return Message(RecordDict(content), reply_to=message)

    start = ArrayRecord(
        {
            "weight": Array(np.full(8, 3.0, np.float32)),
            "num_batches_tracked": Array(np.array(0, np.int64)),
        }
    )
    strategy, counted, guard = FedAsync(), [], NormProtection()
    strategy.features = Chain({"protection": guard})

    def observe(event: events.Event) -> None:
        if isinstance(event, events.UpdateApplied) and event.client == "node-105":
            counted.append(strategy.models[0].vector[strategy.spec.counters].item())

    grid = grid_of(app, [Device(1.0)] * 8)
    strategy.run(grid, start, 40, TIMEOUT, observe=observe)
    # Each second all eight clients return the counter that they received, plus one.
    assert counted == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert guard.state.lengths["node-105"] > 100


class Wavering(Guard):
    """Excludes a client at its first update, and readmits it at its second."""

    def judge(self, update: Judged) -> Ruling:
        client = update.client
        if client != ATTACKER:
            return Ruling()
        self.state.judged += 1
        if self.state.judged == 1:
            self.state.excluded[client] = True
            return Ruling(Verdict.EXCLUDED, 0.0)
        verdict = Verdict.READMITTED if self.state.excluded.pop(client, False) else Verdict.ACCEPTED
        return Ruling(verdict)


@pytest.mark.parametrize("method", [CASA, FedAsync])
def test_a_client_that_is_let_in_again_is_back_for_the_method(method: Any) -> None:
    strategy = method(seed=1)
    seen = started(strategy, poisoned_fleet(None), Wavering())
    assert [event.verdict for event in of(UpdateJudged, seen)] == [
        Verdict.EXCLUDED,
        Verdict.READMITTED,
    ]
    assert strategy.clusters.online[ATTACKER]


@pytest.mark.parametrize(("method", "excludes"), [(FedAsync, False), (CASA, True)])
def test_one_model_can_wait_for_slow_clients_and_clusters_cannot(
    method: Any, excludes: bool
) -> None:
    """Nine clients agree; three others form a group, of which one is fast and two are slow."""
    axes = 3.0 * np.eye(2, 8)
    targets = [3.0 + (axes[0] if index < 3 else axes[1]) for index in range(12)]
    fleet = [Device(8.0 if index in (1, 2) else 1.0) for index in range(12)]
    grid = grid_of(pulled_app(targets, step=0.1), fleet)
    seen = started(method(seed=1), grid, FilterProtection())
    judged = [(event.client, event.verdict) for event in of(UpdateJudged, seen)]
    assert (("c0", Verdict.EXCLUDED) in judged) == excludes
    assert bool(judged) == excludes


class Listener(Guard):
    """Records the changes of the fleet that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: set[tuple[int, bool]] = set()

    def judge(self, update: Judged) -> Ruling:
        self.told.add((update.online, update.one_model))
        return super().judge(update)


@pytest.mark.parametrize(("method", "one_model"), [(FedAsync, True), (CASA, False)])
def test_a_guard_is_told_of_the_clients_online_and_of_one_model(
    method: Any, one_model: bool
) -> None:
    guard = Listener()
    started(method(seed=1), poisoned_fleet(None), guard)
    assert guard.told == {(12, one_model)}


@pytest.mark.parametrize("method", METHODS)
def test_an_honest_fleet_is_bit_for_bit_the_same_with_a_bound_on_lengths(method: Any) -> None:
    runs = []
    for guard in (NoProtection(), NormProtection()):
        strategy = method(seed=1)
        runs.append((started(strategy, poisoned_fleet(None), guard), strategy.state_dict()))
    (seen, state), (again, guarded) = runs
    assert again == seen
    assert plain(guarded["clusters"]) == plain(state["clusters"])
    assert plain(guarded["state"]) == plain(state["state"])


class Notes(NormProtection):
    """Accepts all updates, and records the Δ that it is given for each client."""

    def __init__(self) -> None:
        super().__init__()
        self.deltas: list[tuple[str, np.ndarray]] = []

    def judge(self, update: Judged) -> Ruling:
        self.deltas.append((update.client, update.delta.copy()))
        return Ruling()


def growing_fleet() -> VirtualGrid:
    """The twelve honest clients, of which every third joins late."""
    rng = np.random.default_rng(0)
    targets = [CENTRES[group] + 0.01 * rng.normal(size=8) for group in GROUPS]
    late = Device(jitter=0.3, online=((8.0, math.inf),))
    fleet = [late if index % 3 == 1 else Device(jitter=0.3) for index in range(12)]
    return grid_of(pulled_app(targets, step=0.1), fleet, GROUPS)


FEW_FIRST = {
    name: {"pretrain": 2, "groups": 2} for name in ("flexcfl", "flexcfl-async", "fedgroup")
}
"""Parameters with which some clients are not placed yet when others have groups."""


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_update_is_judged_from_the_model_that_was_sent(name: str) -> None:
    """A method may send its cluster's model, the initial one, one of several, or a mixture."""
    strategy = STRATEGIES[name](seed=1, **FEW_FIRST.get(name, {}))
    guard, grid = Notes(), growing_fleet()
    sent: dict[str, RecordDict] = {}
    changed: list[tuple[str, np.ndarray]] = []
    push, base_of = grid.push_messages, strategy.base_of

    def pushed(messages: Any) -> Any:
        listed = list(messages)
        for message in listed:
            if message.metadata.message_type.startswith("train"):
                sent[f"c{message.metadata.dst_node_id - 100}"] = message.content
        return push(listed)

    def started_from(update: Update) -> np.ndarray:
        content, task = sent[update.task.client], update.task
        if "arrays" in content:
            base = read(content["arrays"])
        elif task.kind == "train-best":
            base = several_of(content)[list(task.candidates).index(task.cluster)]
        elif task.kind == "train-mixed":
            # Reported shares sum to 1 up to rounding.
            shares = np.asarray(update.numbers["shares"], np.float64)
            base = np.tensordot(shares / shares.sum(), several_of(content), axes=1)
        else:
            (base,) = several_of(content)
        changed.append((task.client, update.vector - base.astype(np.float32)))
        return base_of(update)

    grid.push_messages = pushed  # type: ignore[method-assign]
    strategy.base_of = started_from  # type: ignore[method-assign]
    strategy.features = Chain({"protection": guard})
    strategy.run(grid, START, UPDATES, TIMEOUT, probe=centre_losses)
    assert len(changed) >= UPDATES
    for (client, told), (same, true) in zip(guard.deltas, changed, strict=True):
        assert client == same
        assert np.allclose(told, true, rtol=1e-6, atol=1e-6)
    # No base is kept after its task has ended.
    assert not strategy.bases.vectors or strategy.progress.in_flight or held(strategy)


def test_without_protection_nothing_is_kept_for_it() -> None:
    strategy = FedAsync()
    started(strategy, poisoned_fleet(), None)
    assert strategy.bases == Bases()
    assert not strategy.state_dict()["features"]


def test_a_long_update_reaches_the_method_at_the_median_length() -> None:
    strategy = FedAsync()
    seen = started(strategy, poisoned_fleet(scales), NormProtection())
    judged = of(UpdateJudged, seen)
    assert {event.client for event in judged} == {ATTACKER}
    assert {event.verdict for event in judged} <= {Verdict.SCALED, Verdict.REFUSED}
    scaled = [event for event in judged if event.verdict is Verdict.SCALED]
    assert scaled
    # A scaled update is applied, and the model stays near the honest clients' targets.
    applied = [event for event in of(events.UpdateApplied, seen) if event.client == ATTACKER]
    assert len(applied) >= len(scaled)
    assert np.linalg.norm(strategy.models[0].vector) < 10 * np.linalg.norm(CENTRES, axis=1).max()
    unprotected = FedAsync()
    started(unprotected, poisoned_fleet(scales), None)
    assert np.linalg.norm(unprotected.models[0].vector) > 1e3


class Halves(Guard):
    """Halves updates: as a multiple, or weight by weight."""

    def __init__(self, by_weight: bool) -> None:
        super().__init__()
        self.by_weight = by_weight

    def judge(self, update: Judged) -> Ruling:
        if self.by_weight:
            return Ruling(Verdict.SCALED, weights=np.asarray(update.delta * np.float32(0.5)))
        return Ruling(Verdict.SCALED, 0.5)


def test_a_method_gets_the_weights_of_a_ruling() -> None:
    models = []
    for guard in (Halves(True), Halves(False), None):
        strategy = FedAsync()
        started(strategy, poisoned_fleet(), guard)
        models.append(strategy.models[0].vector)
    assert np.array_equal(models[0], models[1])
    assert not np.array_equal(models[0], models[2])


@pytest.mark.parametrize("method", [CASA, FedAsync, FedBuff])
def test_an_excluded_client_is_refused_reported_and_gone_for_the_method(method: Any) -> None:
    strategy = method(seed=1)
    guard = FilterProtection()
    seen = started(strategy, poisoned_fleet(), guard)
    judged = of(UpdateJudged, seen)
    first = next(event for event in judged if event.verdict is Verdict.EXCLUDED)
    assert first.client == ATTACKER
    assert first.measured < first.bound
    assert ATTACKER in guard.state.excluded
    assert ATTACKER not in strategy.clusters.online or not strategy.clusters.online[ATTACKER]
    late = [e for e in of(events.UpdateApplied, seen) if e.client == ATTACKER]
    assert all(event.time <= first.time for event in late)
    refused = [e for e in of(events.UpdateRejected, seen) if e.client == ATTACKER]
    assert len(refused) == sum(e.verdict.is_withheld for e in judged if e.client == ATTACKER)


def retreats(model: np.ndarray) -> np.ndarray:
    """Reflect the model at the centre of all groups."""
    return np.asarray(2 * np.mean(CENTRES, axis=0) - model, np.float32)


@pytest.mark.parametrize("method", [FedAsync, FedBuff])
def test_the_servers_samples_refuse_what_helps_on_no_set(method: Any) -> None:
    strategy = method(seed=1)
    seen = started(strategy, poisoned_fleet(retreats, step=0.5), TrustProtection())
    refused = [event for event in of(UpdateJudged, seen) if event.verdict is Verdict.REFUSED]
    assert {event.client for event in refused} == {ATTACKER}
    assert len([event for event in refused if "proxy" in event.reason]) > 2
