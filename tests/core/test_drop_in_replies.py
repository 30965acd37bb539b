"""Unexpected replies of users' ClientApps."""

from __future__ import annotations

import math
import random
import re

import numpy as np
import pytest
from adopted import grid_of
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
)
from quickstarts import initial_numpy, numpy_app

from raceme.core import events
from raceme.core.errors import UserError
from raceme.simulation import Device, Node, VirtualGrid
from raceme.strategies import CASA, STRATEGIES, FedAvg, MultiKrum, Standalone


def partition(context: Context) -> int:
    return int(context.node_config["partition-id"])


def refusals(seen: list[events.Event]) -> list[str]:
    return [event.reason for event in seen if isinstance(event, events.UpdateRejected)]


@pytest.mark.parametrize("name", ["casa", "fedavg", "fedbuff", "icfl-async"])
def test_a_client_app_that_raises_half_of_the_time(name: str) -> None:
    rng = random.Random(0)

    def spoil(reply: Message, context: Context) -> None:
        if rng.random() < 0.5:
            raise RuntimeError("out of memory\n  in some layer")

    seen: list[events.Event] = []
    strategy = STRATEGIES[name]()
    result = strategy.start(
        grid_of(numpy_app(spoil)), initial_numpy(), num_rounds=3, observe=seen.append
    )
    assert strategy.scheduling.rounds == 3 or strategy.progress.updates == 30
    assert len(refusals(seen)) > 5
    assert all("out of memory" in reason and "layer" not in reason for reason in refusals(seen))
    assert list(result.evaluate_metrics_clientapp) == [1, 2, 3]


def test_failures_end_no_run_in_which_anything_was_of_use() -> None:
    rng = random.Random(1)

    def spoil(reply: Message, context: Context) -> None:
        if rng.random() < 0.5:
            raise RuntimeError("out of memory")

    seen: list[events.Event] = []
    strategy = CASA()
    strategy.start(
        grid_of(numpy_app(spoil), nodes=3), initial_numpy(), num_rounds=12, observe=seen.append
    )
    assert strategy.progress.updates == 36
    assert len(refusals(seen)) > 12


def test_an_app_of_which_nothing_is_of_use_does_not_run_for_ever() -> None:
    def spoil(reply: Message, context: Context) -> None:
        raise RuntimeError("no such file: data.csv")

    with pytest.raises(UserError, match=r"None of 30 replies .* node-\d+: error .*data\.csv"):
        CASA().start(grid_of(numpy_app(spoil)), initial_numpy(), num_rounds=3)


def test_a_model_with_other_arrays() -> None:
    def spoil(reply: Message, context: Context) -> None:
        if partition(context) == 1:
            arrays = reply.content["arrays"].to_numpy_ndarrays()
            reply.content["arrays"] = ArrayRecord(
                {"0": Array(arrays[0]), "module.bias": Array(arrays[1])}
            )

    seen: list[events.Event] = []
    CASA().start(
        grid_of(numpy_app(spoil), nodes=4), initial_numpy(), num_rounds=2, observe=seen.append
    )
    assert set(refusals(seen)) == {
        "error 0: it returns a model without '1' and with 'module.bias', which the initial model "
        "does not have"
    }


def test_several_models_in_one_reply_are_refused() -> None:
    def spoil(reply: Message, context: Context) -> None:
        reply.content["head"] = ArrayRecord([np.zeros(2)])

    with pytest.raises(UserError, match="it returns 2 ArrayRecords: arrays, head; a model is exac"):
        CASA().start(grid_of(numpy_app(spoil)), initial_numpy())


def test_a_model_may_have_another_record_name() -> None:
    def spoil(reply: Message, context: Context) -> None:
        reply.content["model"] = reply.content.pop("arrays")
        reply.content["scores"] = reply.content.pop("metrics")

    strategy = CASA()
    strategy.start(grid_of(numpy_app(spoil)), initial_numpy(), num_rounds=1)
    assert strategy.progress.updates == 10


def test_a_weight_of_zero_counts_for_nothing() -> None:
    def spoil(reply: Message, context: Context) -> None:
        if partition(context) == 0:
            reply.content["metrics"] = MetricRecord({"num-examples": 0})

    seen: list[events.Event] = []
    strategy = Standalone()
    strategy.start(
        grid_of(numpy_app(spoil), nodes=3), initial_numpy(), num_rounds=2, observe=seen.append
    )
    assert {e.client for e in seen if isinstance(e, events.UpdateApplied)} == {
        "node-1001",
        "node-1002",
    }
    assert set(refusals(seen)) == {
        "error 0: its weight 'num-examples' is 0: the update would have no effect"
    }


def test_weights_that_are_no_numbers_of_examples() -> None:
    """Weights may be shares of 1: only their ratios count."""

    def spoil(reply: Message, context: Context) -> None:
        weight = (0.25, 0.75)[partition(context)]
        reply.content["metrics"] = MetricRecord({"trust": weight, "num-examples": 10**6})

    strategy = FedAvg(weighted_by_key="trust")
    result = strategy.start(grid_of(numpy_app(spoil), nodes=2), initial_numpy(), num_rounds=1)
    # Each client moves half way from 0, to -1 or to 1.
    expected = 0.25 * -0.5 + 0.75 * 0.5
    for array in result.arrays.to_numpy_ndarrays():
        np.testing.assert_allclose(array, expected, rtol=1e-6)
    assert result.train_metrics_clientapp[1] == {"num-examples": 10**6}


def test_fractions_of_examples_count_by_how_they_compare() -> None:
    def spoil(reply: Message, context: Context) -> None:
        reply.content["metrics"] = MetricRecord({"num-examples": (0.25, 0.75)[partition(context)]})

    result = FedAvg().start(grid_of(numpy_app(spoil), nodes=2), initial_numpy(), num_rounds=1)
    for array in result.arrays.to_numpy_ndarrays():
        np.testing.assert_allclose(array, 0.25 * -0.5 + 0.75 * 0.5, rtol=1e-6)


def test_metrics_are_of_the_updates_that_count() -> None:
    """Krum excludes one client of seven, including its metrics."""

    def spoil(reply: Message, context: Context) -> None:
        is_bad = partition(context) == 3
        if is_bad:
            arrays = reply.content["arrays"].to_numpy_ndarrays()
            reply.content["arrays"] = ArrayRecord([array + 100.0 for array in arrays])
        metrics = {"num-examples": 10, "loss": 1e6 if is_bad else 1.0}
        reply.content["metrics"] = MetricRecord(metrics)

    strategy = MultiKrum(num_malicious_nodes=1)
    result = strategy.start(grid_of(numpy_app(spoil), nodes=7), initial_numpy(), num_rounds=1)
    assert result.train_metrics_clientapp[1]["loss"] == pytest.approx(1.0)


def test_a_run_that_ends_before_anything_was_of_use_is_no_success() -> None:
    def spoil(reply: Message, context: Context) -> None:
        raise RuntimeError("no such file: data.csv")

    with pytest.raises(UserError, match=r"None of \d replies .* node-\d+: error .*data\.csv"):
        FedAvg().start(grid_of(numpy_app(spoil), nodes=3), initial_numpy(), num_rounds=3)


def test_a_weight_that_is_missing_is_named() -> None:
    def spoil(reply: Message, context: Context) -> None:
        reply.content["metrics"] = MetricRecord({"loss": 0.1, "n": 10})

    words = r"no number 'num-examples' \(weighted_by_key\); its metrics: loss, n"
    with pytest.raises(UserError, match=words):
        CASA().start(grid_of(numpy_app(spoil)), initial_numpy())


def test_a_negative_weight_is_reported() -> None:
    def spoil(reply: Message, context: Context) -> None:
        reply.content["metrics"] = MetricRecord({"num-examples": -5})

    with pytest.raises(UserError, match="its weight 'num-examples' is -5, not a finite number"):
        FedAvg().start(grid_of(numpy_app(spoil), nodes=3), initial_numpy(), num_rounds=1)


def test_metrics_that_not_all_clients_state_have_no_mean(caplog: pytest.LogCaptureFixture) -> None:
    def spoil(reply: Message, context: Context) -> None:
        more = {"f1": 0.5} if partition(context) else {"curve": [1.0]}
        reply.content["metrics"] = MetricRecord({"num-examples": 10, "train_loss": 1.0, **more})

    FedAvg().start(grid_of(numpy_app(spoil), nodes=3), initial_numpy(), num_rounds=2)
    said = [line for line in caplog.messages if line.startswith("No mean of these metrics")]
    assert len(said) == 1
    assert said[0].endswith("lists of other lengths: curve, f1")


def test_an_error_on_ray_is_its_last_line() -> None:
    class RayTaskError(Exception):
        """Ray's exception, whose text is a traceback with colour codes."""

    def spoil(reply: Message, context: Context) -> None:
        raise RayTaskError("\x1b[36mray::run()\x1b[39m\n  File x\nValueError: too \x1b[31mhot\n")

    with pytest.raises(UserError, match="error 2: ValueError: too hot"):
        FedAvg().start(grid_of(numpy_app(spoil), nodes=3), initial_numpy(), num_rounds=1)


@pytest.mark.parametrize(
    ("dtype", "said"), [("complex64", "'0' is complex"), (">f4", "'0' is of another byte order")]
)
def test_initial_arrays_of_another_kind_are_an_error(dtype: str, said: str) -> None:
    arrays = ArrayRecord([np.ones(3, dtype), np.ones(2, np.float32)])
    with pytest.raises(UserError, match=f"{said}.* give real numbers of this machine"):
        FedAvg().start(grid_of(numpy_app(), nodes=2), arrays, num_rounds=1)


@pytest.mark.parametrize("weight", [-5, -0.5, math.nan, math.inf])
def test_an_invalid_weight_is_reported(weight: float) -> None:
    def spoil(reply: Message, context: Context) -> None:
        reply.content["metrics"] = MetricRecord({"num-examples": weight, "train_loss": 1.0})

    said = f"its weight 'num-examples' is {weight!r}, not a finite number of at least 0"
    with pytest.raises(UserError, match=re.escape(said)):
        FedAvg().start(grid_of(numpy_app(spoil), nodes=2), initial_numpy(), num_rounds=1)


def test_numbers_of_examples_come_with_the_first_reply() -> None:
    def spoil(reply: Message, context: Context) -> None:
        reply.content["metrics"] = MetricRecord({"num-examples": 10 + partition(context)})

    strategy = CASA()
    strategy.start(grid_of(numpy_app(spoil), nodes=4), initial_numpy(), num_rounds=2)
    clients = strategy.progress.fleet.clients
    assert {name: client.num_examples for name, client in clients.items()} == {
        f"node-{1000 + index}": 10 + index for index in range(4)
    }
    assert sorted(strategy.state.examples[:4]) == [10, 11, 12, 13]


def test_clients_that_are_yet_to_say_how_many_examples_they_have_are_not_taken_for_small() -> None:
    """The first reply is not judged: 80 are not too many while others' numbers are unknown."""

    def spoil(reply: Message, context: Context) -> None:
        reply.content["metrics"] = MetricRecord({"num-examples": 80})

    strategy = CASA()
    strategy.start(grid_of(numpy_app(spoil)), initial_numpy(), num_rounds=1)
    fleet = strategy.progress.fleet
    assert set(fleet.sizes.values()) == {80}
    assert fleet.plausible_examples("node-1000", 80) == 80
    # Some of the ten nodes have not answered yet.
    assert len(fleet.sizes) < len(fleet.clients)


def named(reply: Message, context: Context) -> None:
    """Report a device's id, which every second node has in common."""
    identity = f"robot-{partition(context) % 2}"
    reply.content["config"] = ConfigRecord({"client-id": identity})


def test_a_client_is_known_by_the_id_that_it_states() -> None:
    seen: list[events.Event] = []
    result = CASA().start(
        grid_of(numpy_app(named), nodes=2), initial_numpy(), num_rounds=2, observe=seen.append
    )
    assert set(result.client_clusters) == {"robot-0", "robot-1"}
    applied = [event.client for event in seen if isinstance(event, events.UpdateApplied)]
    assert set(applied) == {"robot-0", "robot-1"}
    evaluated = [event for event in seen if isinstance(event, events.Evaluated)]
    assert set(evaluated[-1].per_client) == {"robot-0", "robot-1"}


def test_a_device_that_reconnects_as_another_node_is_the_same_client() -> None:
    """Node 1000 leaves at 10 s, and the same device joins as node 1002 at 20 s."""
    nodes = [
        Node(1000, Device(online=((0.0, 10.5),)), {"partition-id": 0}),
        Node(1001, Device(), {"partition-id": 1}),
        Node(1002, Device(online=((20.0, 1e9),)), {"partition-id": 2}),
    ]
    seen: list[events.Event] = []
    strategy = Standalone()
    result = strategy.start(
        VirtualGrid(numpy_app(named), nodes),
        initial_numpy(),
        max_updates=60,
        observe=seen.append,
    )
    assert set(result.client_clusters) == {"robot-0", "robot-1"}
    joined = [(e.client, e.returned) for e in seen if isinstance(e, events.ClientJoined)]
    assert joined[-1] == ("robot-0", True)
    assert "error 0: it is 'robot-0', a known client: it continues as that" in refusals(seen)
    late = [e.client for e in seen if isinstance(e, events.UpdateApplied) and e.time > 30]
    assert set(late) == {"robot-0", "robot-1"}


def test_only_one_of_two_nodes_with_the_same_id_takes_part() -> None:
    seen: list[events.Event] = []
    CASA().start(
        grid_of(numpy_app(named), nodes=3), initial_numpy(), max_updates=20, observe=seen.append
    )
    assert {e.client for e in seen if isinstance(e, events.UpdateApplied)} == {
        "robot-0",
        "robot-1",
    }
    assert "it states the id 'robot-0' of a client that is online elsewhere" in refusals(seen)[0]


def test_raceme_s_own_app_is_greeted_where_the_user_says_so() -> None:
    from nodes import CONFIG, INITIAL

    from raceme.client_app import app

    nodes = [
        Node(7 + index, Device(), {"partition-id": index, "num-partitions": 3})
        for index in range(3)
    ]
    grid = VirtualGrid(app, nodes, CONFIG.to_mapping())
    settings = ConfigRecord({"lr": 0.05, "batch-size": 10})
    result = CASA().start(grid, INITIAL, num_rounds=2, train_config=settings, greet=True)
    assert set(result.client_clusters) == {"client-0", "client-1", "client-2"}
    assert result.evaluate_metrics_clientapp[2].keys() >= {"accuracy", "loss"}
    assert result.train_metrics_clientapp[2].keys() >= {"train-loss"}
    unasked = CASA().start(
        VirtualGrid(app, nodes, CONFIG.to_mapping()), INITIAL, num_rounds=2, train_config=settings
    )
    assert set(unasked.client_clusters) == {"node-7", "node-8", "node-9"}
