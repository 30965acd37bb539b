"""Flower's own round-based strategies, FedAvg and FedProx, under Raceme's loop.

Flower's strategy decides who takes part in a round, with what settings, and how the updates are
aggregated; the loop sends, waits, checks and reports as for every method.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid, strategy
from flwr.serverapp.strategy import Strategy

from raceme.config.options import option
from raceme.protocol import messages as names
from raceme.server.dispatch import Dispatch, InRounds, RoundsParameters
from raceme.server.drop_in.arguments import divided
from raceme.server.fleet import Client
from raceme.server.method import Applied, Method
from raceme.server.picking import IN_TURN
from raceme.server.replies import Update
from raceme.server.work import Work


@dataclass(frozen=True)
class FedAvgParameters(RoundsParameters):
    """Hyper-parameters of federated averaging."""


@dataclass(frozen=True)
class FedProxParameters(RoundsParameters):
    """Hyper-parameters of FedProx."""

    proximal_mu: float = option(0.05, "weight μ of the proximal term", low=0)


@dataclass
class FlowerState:
    """What Flower's strategy has said of the present round.

    Attributes
    ----------
    settings : dict[str, Any]
        What the messages of the round say.
    """

    settings: dict[str, Any] = field(default_factory=dict)


class FlowerRounds(Method):
    """Runs one of Flower's strategies, one that keeps a single model and no state of its own.

    Parameters
    ----------
    inner : Strategy
        Decides who trains, with what settings, and how updates are aggregated.
    parameters : RoundsParameters
        The hyper-parameters that `inner` was made with, for reports. Where they say that clients
        are picked in turn, `inner` decides how many, not who.
    seed : int
        Decides which clients are sampled.
    """

    parameters_type = RoundsParameters
    state_type = FlowerState
    one_model = True
    parameters: RoundsParameters
    state: FlowerState
    dispatch: InRounds

    def __init__(
        self, inner: Strategy, parameters: Any = None, seed: int = 0, **arguments: Any
    ) -> None:
        super().__init__(parameters, seed, **arguments)
        self.inner = inner
        self._seed = seed

    def policy(self) -> Dispatch:
        """Work in rounds, with the participants that Flower's strategy chooses."""
        return InRounds(participants=self._participants, picking=self.parameters.picking)

    def _participants(self, online: Sequence[Client], rng: np.random.Generator) -> Sequence[Client]:
        """Ask Flower's strategy; it samples with Python's `random`."""
        nodes = {client.node_id: client for client in online}
        number = self.dispatch.state.number
        before = random.getstate()
        random.seed(int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0]))
        try:
            asked = list(
                self.inner.configure_train(
                    number,
                    ArrayRecord(),
                    ConfigRecord(dict(self.train_config)),
                    cast(Grid, _Nodes(list(nodes))),
                )
            )
        finally:
            random.setstate(before)
        self.state.settings = dict(asked[0].content[names.CONFIG]) if asked else {}
        if self.parameters.picking == IN_TURN or len(asked) < self.dispatch.least:
            return self.dispatch.pick(online, len(asked), rng)
        return [nodes[message.metadata.dst_node_id] for message in asked]

    def work_for(self, client: str) -> Work:
        """Let a client train with the settings of Flower's strategy."""
        return Work(client, settings=self.state.settings)

    def aggregate(self, updates: Sequence[Update]) -> list[Applied]:
        """Let Flower's strategy aggregate; it weighs updates by their examples."""
        number = self.dispatch.state.number
        arrays, metrics = self.inner.aggregate_train(number, self._replies(updates))
        if arrays is not None:
            self.models[0].replace(self.spec.unpack(arrays))
        if metrics is not None:
            self.result.train_metrics_clientapp[number] = metrics
        return [Applied(0, staleness=0, weight=weight) for weight in self.weights(updates)]

    def weights(self, updates: Sequence[Update]) -> list[float]:
        """Return the share of each update in what Flower's strategy has made of them."""
        examples = sum(update.num_examples for update in updates)
        return [update.num_examples / examples for update in updates]

    def _replies(self, updates: Sequence[Update]) -> Iterable[Message]:
        """Return the updates as messages, with the metrics that all of them have.

        Flower's strategies end the run when replies differ; one odd client must not be able to.
        """
        common = set.intersection(*(set(update.metrics) for update in updates))
        replies = []
        for update in updates:
            metrics = {name: value for name, value in update.metrics.items() if name in common}
            # A count, as Flower's weighted mean expects it.
            metrics[names.NUM_EXAMPLES] = update.num_examples
            arrays, measured = self.spec.pack(update.vector), MetricRecord(dict(metrics))
            records = RecordDict({names.ARRAYS: arrays, names.METRICS: measured})
            node = self.progress.fleet.clients[update.task.client].node_id or 0
            replies.append(Message(records, node, MessageType.TRAIN))
        return replies

    def summary(self) -> None:
        """Let Flower's strategy log its hyper-parameters."""
        self.inner.summary()


class FedAvg(FlowerRounds):
    """Federated averaging, Flower's own: rounds that wait for the slowest client."""

    parameters_type = FedAvgParameters

    def __init__(
        self, parameters: FedAvgParameters | None = None, seed: int = 0, **arguments: Any
    ) -> None:
        made, _ = divided(type(self).__name__, FedAvgParameters, parameters, arguments)
        super().__init__(strategy.FedAvg(**sampling(made)), made, seed, **arguments)


class FedProx(FlowerRounds):
    """FedAvg with a proximal term that keeps clients near the global model, Flower's own."""

    parameters_type = FedProxParameters

    def __init__(
        self, parameters: FedProxParameters | None = None, seed: int = 0, **arguments: Any
    ) -> None:
        made, _ = divided(type(self).__name__, FedProxParameters, parameters, arguments)
        sampled, mu = sampling(made), made.proximal_mu
        super().__init__(strategy.FedProx(**sampled, proximal_mu=mu), made, seed, **arguments)


class _Nodes:
    """As much of a grid as Flower's strategies look at when they sample."""

    def __init__(self, node_ids: list[int | None]) -> None:
        self._node_ids = node_ids

    def get_node_ids(self) -> list[int | None]:
        return self._node_ids


def sampling(parameters: RoundsParameters) -> dict[str, Any]:
    """Return Flower's settings for a share of the clients.

    One that is online is enough: Flower would sleep on the wall clock until more come, which never
    happens on virtual time.
    """
    return {
        "fraction_train": parameters.fraction,
        "min_train_nodes": 1,
        "min_evaluate_nodes": 1,
        "min_available_nodes": 1,
    }
