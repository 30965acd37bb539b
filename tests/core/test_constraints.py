"""Constraints on clusters: never across the values of a label, always together with one value."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clustered import centre_losses
from fleets import MODEL, grid_of, pulled_app
from hypothesis import given, settings
from hypothesis import strategies as st

from raceme.core import events
from raceme.core.clients import Labels
from raceme.core.config import RunConfig
from raceme.core.constraints import ConstrainedMethod
from raceme.core.errors import UserError
from raceme.records.store import read_events
from raceme.runs.experiment import simulate
from raceme.simulation import Device, VirtualGrid
from raceme.strategies import CASA, STRATEGIES, CASAParameters, FedAsync, Method, Plan

SOME = ("cdfl", "fedavg", "ifca", "panicle")
ONE_START = ("casa", "cfl-async", "csafl", "fedasync", "fedavg", "fedbuff", "flexcfl", "panicle")
"""Methods whose clients all start with the run's initial model."""


def fleet(groups: list[int], kinds: list[int] | None = None) -> VirtualGrid:
    """Clients that come, go and lose work; each pulls the weights of its kind, or group, only."""
    targets = [
        np.repeat(np.arange(4) == kind, 2) * (2.0 + client)
        for client, kind in enumerate(kinds or groups)
    ]
    devices = [
        Device(jitter=0.3, drop=0.1),
        Device(seconds_per_round=3.0, jitter=0.5),
        Device(mean_online=9.0, mean_offline=3.0),
        Device(online=((4.0, 11.0), (15.0, math.inf))),
        *[Device(jitter=0.2)] * (len(groups) - 4),
    ]
    return grid_of(pulled_app(targets), devices, groups, seed=3)


def constrained(name: str, **labels: str) -> Callable[[], ConstrainedMethod]:
    return lambda: ConstrainedMethod(lambda: STRATEGIES[name](seed=3), **labels)


def play(
    make: Callable[[], Method],
    groups: list[int],
    kinds: list[int] | None = None,
    updates: int = 60,
    labels: Labels | None = None,
    saved: Any = None,
    save_at: Collection[int] = (),
) -> tuple[list[events.Event], Method, dict[int, Any]]:
    """Run a method from the start or from a state, and save it at some updates."""
    strategy, grid = make(), fleet(groups, kinds)
    if saved:
        strategy.load_state_dict(saved["strategy"])
        grid.load_state_dict(saved["grid"])
    seen: list[events.Event] = []
    states: dict[int, Any] = {}

    def stop_check() -> str:
        for due in save_at:
            if strategy.progress.updates >= due and due not in states:
                state = {"strategy": strategy.state_dict(), "grid": grid.state_dict()}
                states[due] = (state, len(seen))
        return ""

    plan = Plan(eval_every=7, concurrency=5, labels=labels or Labels())
    strategy.run(
        grid,
        MODEL,
        updates,
        20.0,
        plan=plan,
        observe=seen.append,
        stop_check=stop_check,
        probe=centre_losses,
    )
    return seen, strategy, states


def models_of(strategy: Method) -> dict[int, bytes]:
    return {k: model.vector.tobytes() for k, model in strategy.models.items()}


def placements(seen: list[events.Event]) -> Iterator[events.Membership]:
    """Yield the members of clusters after each event."""
    members = events.Membership()
    for event in seen:
        members.observe(event)
        yield members


def check_never_across(seen: list[events.Event], value: Callable[[str], object]) -> None:
    """Check that no cluster ever has members or updates of two values."""
    owner: dict[int, object] = {}
    for members, event in zip(placements(seen), seen, strict=True):
        used = [(c, k) for c, weights in members.weights.items() for k in weights]
        if isinstance(event, events.UpdateApplied):
            used.append((event.client, event.cluster))
        if isinstance(event, events.Evaluated):
            used += [(client, score[0]) for client, score in event.per_client.items()]
        for client, cluster in used:
            assert owner.setdefault(cluster, value(client)) == value(client)


def check_together(seen: list[events.Event], value: Callable[[str], object]) -> None:
    """Check that clients of a value have the same clusters whenever they have any."""
    for members in placements(seen):
        found: dict[object, object] = {}
        for client, weights in members.weights.items():
            assert found.setdefault(value(client), weights) == weights


def group_of(groups: list[int]) -> Callable[[str], object]:
    return lambda client: groups[int(client.removeprefix("c"))]


GROUPS = [0, 1, 0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("name", SOME)
def test_without_any_label_nothing_changes(name: str) -> None:
    check_nothing_changes(name)


@pytest.mark.parametrize("name", SOME)
def test_constraints_hold_also_after_a_resumption(name: str) -> None:
    check_constraints(name, GROUPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - set(SOME)))
def test_every_method_can_be_constrained(name: str) -> None:
    check_nothing_changes(name)
    check_constraints(name, GROUPS)


@settings(deadline=None, max_examples=5)
@given(
    name=st.sampled_from(ONE_START),
    groups=st.lists(st.integers(0, 3), min_size=5, max_size=9),
)
def test_constraints_hold_for_any_groups(name: str, groups: list[int]) -> None:
    check_constraints(name, groups, save_at=())


def check_nothing_changes(name: str) -> None:
    plain, before, _ = play(lambda: STRATEGIES[name](seed=3), GROUPS)
    for key in ("never_across", "together"):
        seen, after, _ = play(constrained(name, **{key: "room"}), GROUPS)
        assert list(map(repr, seen)) == list(map(repr, plain))
        assert models_of(after) == models_of(before)


def check_constraints(name: str, groups: list[int], save_at: Collection[int] = (12, 40)) -> None:
    """Check each constraint, then both at once; each also after a resumption."""
    value = group_of(groups)
    for labels in (
        {"never_across": "group"},
        {"together": "group"},
        {"never_across": "group", "together": "group"},
    ):
        make = constrained(name, **labels)
        # Without the constraint, clients of a value would have different models.
        kinds = [client % 4 for client in range(len(groups))] if "together" in labels else groups
        seen, strategy, states = play(make, groups, kinds, save_at=save_at)
        assert isinstance(strategy, ConstrainedMethod)
        trained = {event.client for event in seen if isinstance(event, events.UpdateApplied)}
        assert set(map(value, trained)) == set(groups)
        if "never_across" in labels:
            check_never_across(seen, value)
            assert sorted(strategy.state.values) == sorted(map(str, set(groups)))
            # Models that began as zeros have only been changed by clients of their own value.
            alone = name in ONE_START and kinds is groups
            for cluster, model in strategy.models.items() if alone else ():
                group = int(strategy.state.values[strategy.state.clusters[cluster][0]])
                assert not np.delete(model.vector, [2 * group, 2 * group + 1]).any()
        if "together" in labels:
            check_together(seen, value)
        assert bool(states) == bool(save_at)
        for state, observed in states.values():
            rest, resumed, _ = play(make, groups, kinds, saved=copy.deepcopy(state))
            assert list(map(repr, rest)) == list(map(repr, seen[observed:]))
            assert models_of(resumed) == models_of(strategy)


@pytest.mark.parametrize("name", ["fedasync", "fedavg"])
def test_a_device_that_is_moved_to_another_room_changes_its_clusters(
    name: str, tmp_path: Path
) -> None:
    """Client 2 comes and goes; while it is away its label becomes another one."""
    path, seen = tmp_path / "labels.toml", list[events.Event]()
    rooms = {"c0": "hall", "c1": "attic", "c2": "hall", "c3": "hall", "c4": "attic"}

    def write() -> None:
        path.write_text("".join(f"[{c}]\nroom = '{room}'\n" for c, room in rooms.items()))

    def observe(event: events.Event) -> None:
        seen.append(event)
        if isinstance(event, events.ClientLeft) and event.client == "c2":
            rooms["c2"] = "attic"
            write()

    write()
    strategy = constrained(name, never_across="room")()
    plan = Plan(eval_every=7, labels=Labels(path))
    strategy.run(fleet([0, 1, 0, 0, 1]), MODEL, 60, 20.0, plan=plan, observe=observe)
    assert rooms["c2"] == "attic"
    members = list(placements(seen))[-1]
    homes = members.clusters
    assert homes["c2"] == homes["c1"] == homes["c4"] != homes["c0"] == homes["c3"]
    # Its updates count where it was at that time.
    at_home = [e.cluster for e in seen if isinstance(e, events.UpdateApplied) and e.client == "c2"]
    assert at_home[0] == homes["c0"]
    assert at_home[-1] == homes["c2"]
    assert len(set(at_home)) == 2
    # Those that it left do not wait for it.
    applied = [event for event in seen if isinstance(event, events.UpdateApplied)]
    moved = next(e.seq for e in applied if e.client == "c2" and e.cluster == homes["c2"])
    assert {"c0", "c3"} <= {event.client for event in applied if event.seq > moved}
    assert strategy.clusters.clients(homes["c0"], online_only=False) == ["c0", "c3"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: FedAsync(seed=3),
        lambda: STRATEGIES["fedavg"](seed=3),
        # Its weights depend on the number of updates of all clients.
        lambda: CASA(CASAParameters(staleness_unit="global"), seed=3),
    ],
)
def test_each_value_has_what_a_server_of_its_own_would_have(make: Callable[[], Method]) -> None:
    def models(strategy: Method, where: str = "") -> list[bytes]:
        plan = Plan(max_time=30.0, eval_every=1000, labels=Labels(where=where))
        strategy.run(fleet(GROUPS), MODEL, 0, 20.0, plan=plan)
        return sorted(models_of(strategy).values())

    alone = [model for group in range(3) for model in models(make(), f"group={group}")]
    assert models(ConstrainedMethod(make, never_across="group")) == sorted(alone)


def test_one_device_of_a_group_works_at_a_time_and_all_in_turn() -> None:
    groups = [0, 0, 0, 1, 1, 2]
    grid = grid_of(pulled_app(), [Device(jitter=0.3)] * len(groups), groups)
    strategy, seen = constrained("fedasync", together="group")(), list[events.Event]()
    strategy.run(grid, MODEL, 60, plan=Plan(eval_every=1000), observe=seen.append)
    for group, clients in enumerate(("c0 c1 c2", "c3 c4", "c5")):
        own = [
            event
            for event in seen
            if isinstance(event, events.UpdateApplied) and event.client in clients
        ]
        turns = [event.client for event in own]
        assert turns == (clients.split() * len(own))[: len(own)]
        for one, following in itertools.pairwise(own):
            assert following.dispatched_at >= one.time
        assert len(own) > 15, group
    # The method sees one client for each group.
    (part,) = strategy.parts
    known = part.progress.fleet.clients
    assert {name: known[name].num_examples for name in part.clusters.members} == {
        "group\t0": 33,
        "group\t1": 27,
        "group\t2": 15,
    }


def test_clusters_and_similarities_are_those_of_all_parts() -> None:
    strategy, grid = constrained("casa", never_across="group")(), fleet(GROUPS)
    strategy.run(grid, MODEL, 60, 20.0, plan=Plan(eval_every=7))
    assert str(strategy) == "CASA"
    clients, likeness = strategy.similarity() or ([], np.empty(0))
    assert sorted(clients) == [f"c{number}" for number in range(8)]
    value = group_of(GROUPS)
    apart = np.array([[value(one) != value(other) for other in clients] for one in clients])
    assert np.isnan(likeness[apart]).all()
    assert not np.isnan(likeness[~apart]).all()
    sizes = {k: strategy.clusters.size(k, online_only=False) for k in strategy.models}
    assert sum(sizes.values()) == 8
    assert strategy.clusters.largest() in sizes
    assert set(strategy.result.clusters) == set(strategy.models)
    assert [k for k in sizes if strategy.clusters.continuations(k) != [k]] == []
    assert strategy.clusters.continuations(999) == []


@pytest.mark.parametrize("key", ["never-across", "together"])
def test_what_is_no_label_is_said_at_the_start(key: str, tmp_path: Path) -> None:
    path = tmp_path / "labels.toml"
    path.write_text("[client-1]\nroom = 'kitchen'\n[client-2]\nfloor = '1'\n[away]\nwing = '2'\n")
    for keys, expected in (
        ({key: "room=kitchen"}, "'room=kitchen' is not the name of a label"),
        ({key: "rom", "labels": str(path)}, "no client has a label 'rom': they have floor, room"),
        ({key: "room"}, "no client has a label 'room': give a file of them, labels=FILE"),
    ):
        with pytest.raises(UserError, match=f"{key}: {expected}"):
            run(tmp_path / "out", **keys)
    assert not (tmp_path / "out").exists()


def run(out: Path | None, **keys: object) -> list[events.Event]:
    """Run a simulation in a folder; without one, resume."""
    config = {"dataset": "digits", "clients": 4, "max-updates": 16, "workers": 0}
    config |= {} if out is None else {"out": str(out)}
    outcome = simulate(RunConfig.from_mapping({**config, **keys}))
    return list(read_events(outcome.out))


def test_a_simulation_with_labels_resumes_under_the_same_constraints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, whole, out = tmp_path / "labels.toml", tmp_path / "whole", tmp_path / "out"
    path.write_text("[client-1]\nroom = 'kitchen'\n[client-2]\nroom = 'kitchen'\n")
    keys = {"strategy": "fedasync", "labels": str(path), "never-across": "room"}
    keys |= {"protection": "trust", "checkpoint-every": "4"}
    seen = run(whole, **keys)
    check_never_across(seen, lambda client: client in ("client-1", "client-2"))
    assert "client-0 has no label room: it shares clusters only with" in caplog.text
    run(out, **keys, **{"max-updates": 8})
    resumed = {**keys, "resume": str(out)}
    with pytest.raises(UserError, match="never-across is 'room' there and '' here"):
        run(None, **{**resumed, "never-across": ""})
    run(None, **resumed)
    there, here = (
        {path.name: path.read_bytes() for path in (folder / "clusters").iterdir()}
        for folder in (whole, out)
    )
    assert len(there) == 2
    assert here == there
