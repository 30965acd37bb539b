"""Flower's round-based strategies under Raceme's loop.

Flower's strategy decides clients, settings and aggregation of a round; the loop sends, waits,
checks and reports as for every method.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid, strategy
from flwr.serverapp.strategy import Strategy

from raceme.core import messages as names
from raceme.core.clients import Client
from raceme.core.errors import UserError
from raceme.core.options import option, with_defaults
from raceme.core.requests import Outcome, Outcomes, Request, Update
from raceme.core.scheduling import IN_TURN, InRounds, RoundsParameters, Scheduler
from raceme.core.strategy import Method, Needs, Variant, divide_arguments
from raceme.strategies.shared import by_examples


@dataclass(frozen=True)
class FedProxParameters(RoundsParameters):
    """Hyper-parameters of FedProx."""

    proximal_mu: float = option(0.05, "weight μ of the proximal term", low=0)


@dataclass
class FlowerState:
    """Flower's strategy's decisions for the current round.

    Attributes
    ----------
    settings : dict[str, Any]
        Settings of the round's messages.
    """

    settings: dict[str, Any] = field(default_factory=dict)


class FlowerRounds(Method):
    """Runs a Flower strategy with a single model and no state of its own.

    Parameters
    ----------
    inner : Strategy
        Flower's strategy.
    parameters : RoundsParameters
        Hyper-parameters of `inner`, for reports. With sampling in turn, `inner` decides only the
        number of clients.
    seed : int
        Seed of client sampling.
    """

    parameters_type = RoundsParameters
    state_type = FlowerState
    counts_examples: ClassVar[bool] = True
    """Whether updates are weighted by examples."""
    is_mean: ClassVar[bool] = False
    """Whether the model becomes the mean, by examples, of those of a round."""
    parameters: RoundsParameters
    state: FlowerState
    scheduling: InRounds

    def __init__(
        self, inner: Strategy, parameters: Any = None, seed: int = 0, **arguments: Any
    ) -> None:
        super().__init__(parameters, seed, **arguments)
        self.inner = inner
        self._seed = seed

    @property
    def needs(self) -> Needs:
        """One model, and any setting of Flower's strategy for client mods."""
        weight = by_examples if self.is_mean else None
        return Needs(one_model=True, sums=self.is_mean, settings=None, sum_weight=weight)

    def scheduler(self) -> Scheduler:
        """Work in rounds, with participants chosen by Flower's strategy."""
        return InRounds(participants=self._participants, sampling=self.parameters.sampling)

    def _participants(self, online: Sequence[Client], rng: np.random.Generator) -> Sequence[Client]:
        """Let Flower's strategy sample, which uses Python's `random`."""
        nodes = {client.node_id: client for client in online}
        number = self.scheduling.state.number
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
        if self.parameters.sampling == IN_TURN or len(asked) < self.scheduling.least:
            return self.scheduling.pick(online, len(asked), rng)
        return [nodes[message.metadata.dst_node_id] for message in asked]

    def request_for(self, client: str) -> Request:
        """Return training with the settings of Flower's strategy."""
        return Request(client, settings=self.state.settings)

    def aggregate(self, updates: Sequence[Update]) -> Outcomes:
        """Let Flower's strategy aggregate, weighted by examples."""
        number = self.scheduling.state.number
        arrays, metrics = self.inner.aggregate_train(number, self._replies(updates))
        if arrays is not None:
            self.models[0].replace(self.spec.unpack(arrays))
        if metrics is not None:
            self.result.train_metrics_clientapp[number] = metrics
        weights = zip(updates, self.weights(updates), strict=True)
        return {update.number: Outcome(0, staleness=0, weight=weight) for update, weight in weights}

    def weights(self, updates: Sequence[Update]) -> list[float]:
        """Return the share of each update in Flower's aggregation."""
        counts = [update.num_examples if self.counts_examples else 1 for update in updates]
        return [count / sum(counts) for count in counts]

    def _replies(self, updates: Sequence[Update]) -> Iterable[Message]:
        """Return the updates as messages, with the metrics that all of them have.

        Flower's strategies end the run if replies differ, which a single client must not cause.
        """
        common = set.intersection(*(set(update.metrics) for update in updates))
        replies = []
        for update in updates:
            metrics = {name: value for name, value in update.metrics.items() if name in common}
            # An integer, as expected by Flower's weighted mean.
            metrics[names.NUM_EXAMPLES] = update.num_examples
            arrays, measured = self.spec.pack(update.vector), MetricRecord(dict(metrics))
            records = RecordDict({names.ARRAYS: arrays, names.METRICS: measured})
            node = self.progress.fleet.clients[update.task.client].node_id or 0
            replies.append(Message(records, node, MessageType.TRAIN))
        return replies

    def summary(self) -> None:
        """Let Flower's strategy log its hyper-parameters."""
        self.inner.summary()


class _Nodes:
    """The part of a grid that Flower's strategies use for sampling."""

    def __init__(self, node_ids: list[int | None]) -> None:
        self._node_ids = node_ids

    def get_node_ids(self) -> list[int | None]:
        return self._node_ids


class MadeOfParameters(FlowerRounds):
    """A Flower strategy made from hyper-parameters with Flower's names."""

    flower: ClassVar[type[strategy.FedAvg]]

    def __init__(self, parameters: Any = None, seed: int = 0, **arguments: Any) -> None:
        made, _ = divide_arguments(type(self).__name__, self.parameters_type, parameters, arguments)
        own = {item.name for item in fields(made)} - {
            item.name for item in fields(RoundsParameters)
        }
        settings = {name: getattr(made, name) for name in own if getattr(made, name) is not None}
        # One online client suffices: Flower would sleep on the wall clock until more join, which
        # never happens on virtual time.
        inner = self.flower(
            fraction_train=made.fraction,
            min_train_nodes=1,
            min_evaluate_nodes=1,
            min_available_nodes=1,
            **settings,
        )
        super().__init__(inner, made, seed, **arguments)


class FedAvg(MadeOfParameters):
    """Federated averaging in synchronous rounds, Flower's implementation."""

    flower = strategy.FedAvg
    is_mean = True


class FedProx(MadeOfParameters):
    """FedAvg with a proximal term that limits client drift, Flower's implementation."""

    flower = strategy.FedProx
    parameters_type = FedProxParameters
    is_mean = True


# -----------------------------------------------------------------------------
# Flower's own robust strategies in rounds: median, trimmed mean, Krum and Multi-Krum.
#
# They assume that all clients have one distribution and treat minorities as poison, so that honest
# groups of clustered data are dropped too.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class FedTrimmedAvgParameters(RoundsParameters):
    """Hyper-parameters of the trimmed mean."""

    beta: float = option(0.2, "share of the values that is cut off at each end", low=0, below=0.5)


@dataclass(frozen=True)
class MultiKrumParameters(RoundsParameters):
    """Hyper-parameters of Multi-Krum."""

    num_malicious_nodes: int = option(0, "attackers f among a round's clients", low=0)
    num_nodes_to_select: int | None = option(
        None, "updates that are averaged (auto: all but the attackers)", low=1
    )


class FedMedian(MadeOfParameters):
    """Coordinate-wise median in rounds, Flower's implementation: robust, for homogeneous data."""

    flower = strategy.FedMedian
    counts_examples = False


class FedTrimmedAvg(MadeOfParameters):
    """Coordinate-wise trimmed mean in rounds, Flower's implementation: robust."""

    flower = strategy.FedTrimmedAvg
    parameters_type = FedTrimmedAvgParameters
    counts_examples = False


class MultiKrum(MadeOfParameters):
    """Multi-Krum in rounds, the mean of mutually near updates, Flower's implementation: robust.

    An update's score is the sum of its squared distances to the n − f − 2 nearest ones.
    """

    flower = strategy.MultiKrum
    parameters_type = MultiKrumParameters
    parameters: MultiKrumParameters
    inner: strategy.MultiKrum
    needs = Needs(one_model=True)

    def __init__(self, parameters: Any = None, seed: int = 0, **arguments: Any) -> None:
        super().__init__(parameters, seed, **arguments)
        self._mean = self.inner.train_metrics_aggr_fn
        self.inner.train_metrics_aggr_fn = self._note_chosen
        self._sent: list[Message] = []
        self._chosen: list[RecordDict] = []

    def check(self, clients: int) -> None:
        """Check that the attackers can be outvoted: n ≥ 2 f + 3.

        Raises
        ------
        UserError
            They cannot be.
        """
        count = self.parameters.participants(clients)
        attackers = self.parameters.num_malicious_nodes
        if count < (least := 2 * attackers + 3):
            raise UserError(
                f"num-malicious-nodes: {attackers} attackers need rounds of at least {least} "
                f"clients, and these have {count}: take more clients or a larger fraction."
            )

    def aggregate(self, updates: Sequence[Update]) -> Outcomes:
        """Let Flower's strategy select and average."""
        wanted, attackers = self.parameters.num_nodes_to_select, self.inner.num_malicious_nodes
        if wanted is None:
            wanted = max(1, len(updates) - attackers)
        self.inner.num_nodes_to_select = wanted
        return super().aggregate(updates)

    def weights(self, updates: Sequence[Update]) -> list[float]:
        """Return the chosen updates' shares by examples, and 0 for the others."""
        chosen = [any(reply.content is one for one in self._chosen) for reply in self._sent]
        counts = [u.num_examples if is_in else 0 for u, is_in in zip(updates, chosen, strict=True)]
        return [count / max(1, sum(counts)) for count in counts]

    def _replies(self, updates: Sequence[Update]) -> Iterable[Message]:
        self._sent = list(super()._replies(updates))
        return self._sent

    def _note_chosen(self, records: list[RecordDict], key: str) -> MetricRecord:
        """Record the selection, and average its metrics as Flower does."""
        self._chosen = records
        return self._mean(records, key)


Krum = Variant(
    MultiKrum,
    with_defaults(MultiKrumParameters, num_nodes_to_select=1),
    "Krum in rounds, the update nearest to its neighbours, Flower's implementation: robust.",
)
