"""Flower's own round-based strategies, under Raceme's limits, schedule and reports."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, strategy
from flwr.serverapp.strategy import Strategy

from raceme import messages as names
from raceme.messages import Vector
from raceme.options import option
from raceme.strategies.model import Applied, Model
from raceme.strategies.replies import Update
from raceme.strategies.rounds import Rounds, RoundsParameters


@dataclass(frozen=True)
class FedAvgParameters(RoundsParameters):
    """Hyper-parameters of federated averaging."""


@dataclass(frozen=True)
class FedProxParameters(RoundsParameters):
    """Hyper-parameters of FedProx."""

    proximal_mu: float = option(0.05, "weight μ of the proximal term", low=0)


@dataclass
class GlobalState:
    """The global model."""

    model: Model


class FlowerRounds(Rounds):
    """Runs one of Flower's strategies, one that keeps a single model and no state of its own.

    Parameters
    ----------
    inner : Strategy
        Decides who trains, with what settings, and how updates are aggregated.
    parameters : RoundsParameters
        The hyper-parameters that `inner` was made with, for reports.
    seed : int
        Decides which clients are sampled.
    """

    state_type = GlobalState
    state: GlobalState

    def __init__(self, inner: Strategy, parameters: RoundsParameters, seed: int = 0) -> None:
        super().__init__(parameters, seed)
        self.inner = inner
        self._seed = seed

    def initialize(self, vector: Vector) -> None:
        """Start from the initial model."""
        self.state = GlobalState(Model(vector))

    def cluster_of(self, client: str) -> int:
        """Everybody gets the global model."""
        return 0

    @property
    def models(self) -> Mapping[int, Model]:
        """The global model."""
        return {0: self.state.model}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask Flower's strategy which clients train, and with what settings."""
        made = []
        for message in self._asked(server_round, arrays, config, grid):
            client = self.progress.fleet.by_node.get(message.metadata.dst_node_id)
            if client is not None:  # Flower samples nodes that were refused, too.
                self._drafts[message.metadata.dst_node_id] = self._parcel(client)[0]
                made.append(message)
        return made

    def _asked(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return the messages that Flower's strategy makes; it samples with Python's `random`."""
        before = random.getstate()
        random.seed(int(np.random.SeedSequence([self._seed, server_round]).generate_state(1)[0]))
        try:
            return list(self.inner.configure_train(server_round, arrays, config, grid))
        finally:
            random.setstate(before)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let Flower's strategy aggregate."""
        replies = list(replies)
        arrays, metrics = self.inner.aggregate_train(server_round, _uniform(replies))
        if arrays is not None:
            vector = self._spec.unpack(arrays)
            self.state.model = Model(vector, self.state.model.version + 1)
        super().aggregate_train(server_round, replies)
        return arrays, metrics

    def aggregate(self, updates: Sequence[Update]) -> list[Applied]:
        """Say how much each update weighs in the mean that Flower has taken: by its examples."""
        examples = sum(update.num_examples for update in updates)
        return [Applied(0, staleness=0, weight=u.num_examples / examples) for u in updates]

    def summary(self) -> None:
        """Let Flower's strategy log its hyper-parameters."""
        self.inner.summary()


class FedAvg(FlowerRounds):
    """Federated averaging, Flower's own: rounds that wait for the slowest client."""

    parameters_type = FedAvgParameters

    def __init__(self, parameters: FedAvgParameters | None = None, seed: int = 0) -> None:
        parameters = parameters or FedAvgParameters()
        super().__init__(strategy.FedAvg(**_sampling(parameters)), parameters, seed)


class FedProx(FlowerRounds):
    """FedAvg with a proximal term that keeps clients near the global model, Flower's own."""

    parameters_type = FedProxParameters

    def __init__(self, parameters: FedProxParameters | None = None, seed: int = 0) -> None:
        parameters = parameters or FedProxParameters()
        sampling, mu = _sampling(parameters), parameters.proximal_mu
        super().__init__(strategy.FedProx(**sampling, proximal_mu=mu), parameters, seed)


def _sampling(parameters: RoundsParameters) -> dict[str, Any]:
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


def _uniform(replies: list[Message]) -> list[Message]:
    """Reduce replies to the metrics that all of them have, in records of the same names.

    Flower's strategies end the run when replies differ; one odd client must not be able to.
    """
    metrics = [next(iter(reply.content.metric_records.values())) for reply in replies]
    common = set.intersection(
        *({name for name, value in m.items() if not isinstance(value, list)} for m in metrics)
    )
    for reply, measured in zip(replies, metrics, strict=True):
        kept = {name: value for name, value in measured.items() if name in common}
        arrays = next(iter(reply.content.array_records.values()))
        reply.content = RecordDict({names.ARRAYS: arrays, names.METRICS: MetricRecord(kept)})
    return replies
