"""Client sampling: how the clients of a round are drawn, in turn first or at random."""

from __future__ import annotations

import numpy as np
import pytest
from fleets import MODEL, grid_of, pulled_app
from flwr.serverapp import strategy
from runs import ONES, devices

from raceme.core import events
from raceme.core.clients import Client
from raceme.core.scheduling import FlowerArguments, InRounds, in_turn, sample, share_of
from raceme.core.strategy import Method
from raceme.strategies import STRATEGIES, FedAvg, FedAvgParameters, Plan

ROUND_BASED = ("cfl", "fedavg", "fedprox", "fesem", "icfl", "ifca")


def clients(*numbers: int) -> list[Client]:
    return [Client(f"c{number}", 10) for number in numbers]


def names(chosen: object) -> list[str]:
    return [client.client_id for client in chosen]  # type: ignore[attr-defined]


def test_all_clients_take_part_once_before_any_is_drawn() -> None:
    rng, picked = np.random.default_rng(0), {}
    everyone = clients(*range(5))
    assert names(in_turn(everyone, 2, picked, rng)) == ["c0", "c1"]
    # c2 is offline: its turn comes when it is back.
    assert names(in_turn(clients(0, 1, 3, 4), 2, picked, rng)) == ["c3", "c4"]
    untouched = np.random.default_rng(0).bit_generator.state
    assert rng.bit_generator.state == untouched
    # c2 has its turn; the other client is drawn at random.
    third = names(in_turn(everyone, 2, picked, rng))
    assert len(third) == 2
    assert "c2" in third
    # From now on clients are drawn at random, except that a newcomer has its turn first.
    alike = np.random.default_rng(7)
    expected = names(sample(everyone, 3, np.random.default_rng(7)))
    assert names(in_turn(everyone, 3, picked, alike)) == expected
    assert "c5" in names(in_turn(clients(*range(6)), 1, picked, rng))


@pytest.mark.parametrize("count", [0, 1])
def test_at_least_one_takes_part(count: int) -> None:
    rng, picked = np.random.default_rng(0), {}
    for _ in range(4):
        assert len(in_turn(clients(0, 1), count, picked, rng)) == 1
    assert len(in_turn(clients(0, 1), 9, picked, rng)) == 2


def test_a_share_in_decimals_is_not_rounded_down_in_binary() -> None:
    # In binary, 0.29 · 100 is 28.999999999999996.
    assert [share_of(100, share) for share in (0.29, 0.289, 0.57, 1.0)] == [29, 28, 57, 100]
    assert FedAvgParameters(fraction=0.29).participants(100) == 29
    drawn = InRounds(0.29)._participants(clients(*range(100)), np.random.default_rng(0))
    assert len(drawn) == 29
    # Flower's own strategies round down to 28.
    assert FlowerArguments(fraction_train=0.29).trained(100) == 28


def method_of(name: str, **keys: object) -> Method:
    kind = STRATEGIES[name]
    method: Method = kind(kind.parameters_type(**keys), seed=3)
    return method


def rounds_of(
    method: Method, updates: int, targets: list[np.ndarray] | None = None
) -> list[set[str]]:
    """Run with six clients; return the two clients of each round."""
    seen: list[events.Event] = []
    grid = grid_of(pulled_app(targets), devices(*[1.0] * 6))
    method.run(grid, MODEL, updates, plan=Plan(eval_every=1000), observe=seen.append)
    order = [event.client for event in seen if isinstance(event, events.UpdateApplied)]
    return [set(order[start : start + 2]) for start in range(0, len(order), 2)]


@pytest.mark.parametrize("name", ROUND_BASED)
def test_it_holds_for_every_method_in_rounds(name: str) -> None:
    turns = [{"c0", "c1"}, {"c2", "c3"}, {"c4", "c5"}]
    found = rounds_of(method_of(name, fraction=0.34, sampling="in-turn"), 12)
    assert found[:3] == turns
    # After one turn each, clients are drawn at random.
    assert found[3:] != turns
    drawn = method_of(name, fraction=0.34)
    assert rounds_of(drawn, 6) != turns
    # Without turns no state of them is saved.
    assert drawn.scheduling.state.picked == {}  # type: ignore[attr-defined]


def test_pretraining_counts_as_no_participation() -> None:
    # All six pre-train in the first round, three for each group; then turns start with c0.
    keys = {"groups": 2, "pretrain": 3, "fraction": 0.34, "sampling": "in-turn"}
    found = rounds_of(method_of("fedgroup", **keys), 12, targets=[ONES, -ONES] * 3)
    assert found[3:] == [{"c0", "c1"}, {"c2", "c3"}, {"c4", "c5"}]


def test_fedavg_keeps_the_settings_of_flowers_strategy() -> None:
    method = method_of("fedprox", fraction=0.34, sampling="in-turn", proximal_mu=0.25)
    rounds_of(method, 2)
    assert method.state.settings["proximal-mu"] == 0.25
    assert isinstance(method.inner, strategy.FedProx)  # type: ignore[attr-defined]


def test_a_resumed_run_continues_with_the_remaining_clients() -> None:
    first = FedAvg(FedAvgParameters(fraction=0.34, sampling="in-turn"))
    assert rounds_of(first, 2) == [{"c0", "c1"}]
    second = FedAvg(FedAvgParameters(fraction=0.34, sampling="in-turn"))
    second.load_state_dict(first.state_dict())
    assert rounds_of(second, 6) == [{"c2", "c3"}, {"c4", "c5"}]
