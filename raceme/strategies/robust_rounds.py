"""Flower's own robust strategies in rounds: median, trimmed mean, Krum and Multi-Krum.

They take it that all clients have data of one distribution: what few of them send is poison. On
clients with groups of their own they drop honest groups, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp import strategy

from raceme.config.errors import UserError
from raceme.config.options import option
from raceme.server.dispatch import RoundsParameters
from raceme.server.drop_in.arguments import divided
from raceme.server.method import Applied, Variant
from raceme.server.replies import Update
from raceme.strategies.flower_rounds import FlowerRounds, sampling


@dataclass(frozen=True)
class FedMedianParameters(RoundsParameters):
    """Hyper-parameters of the median."""


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


@dataclass(frozen=True)
class KrumParameters(MultiKrumParameters):
    """Hyper-parameters of Krum: those of Multi-Krum that chooses one."""

    num_nodes_to_select: int | None = option(1, "updates that are averaged", low=1)


class FedMedian(FlowerRounds):
    """Rounds that take the median of each weight, Flower's own: robust, for data of one kind."""

    parameters_type = FedMedianParameters

    def __init__(
        self, parameters: FedMedianParameters | None = None, seed: int = 0, **arguments: Any
    ) -> None:
        made, _ = divided(type(self).__name__, self.parameters_type, parameters, arguments)
        super().__init__(strategy.FedMedian(**sampling(made)), made, seed, **arguments)

    def weights(self, updates: Sequence[Update]) -> list[float]:
        """Return the same weight for all: the median counts no examples."""
        return [1 / len(updates)] * len(updates)


class FedTrimmedAvg(FlowerRounds):
    """Rounds that average each weight without its extremes, Flower's own: for data of one kind."""

    parameters_type = FedTrimmedAvgParameters

    def __init__(
        self, parameters: FedTrimmedAvgParameters | None = None, seed: int = 0, **arguments: Any
    ) -> None:
        made, _ = divided(type(self).__name__, self.parameters_type, parameters, arguments)
        inner = strategy.FedTrimmedAvg(**sampling(made), beta=made.beta)
        super().__init__(inner, made, seed, **arguments)

    def weights(self, updates: Sequence[Update]) -> list[float]:
        """Return the same weight for all: the trimmed mean counts no examples."""
        return [1 / len(updates)] * len(updates)


class MultiKrum(FlowerRounds):
    """Rounds that average the updates nearest to most others, Flower's own: for data of one kind.

    An update's score is the sum of its squared distances to the n − f − 2 nearest ones.
    """

    parameters_type = MultiKrumParameters
    parameters: MultiKrumParameters
    inner: strategy.MultiKrum

    def __init__(
        self, parameters: MultiKrumParameters | None = None, seed: int = 0, **arguments: Any
    ) -> None:
        made, _ = divided(type(self).__name__, self.parameters_type, parameters, arguments)
        attackers = made.num_malicious_nodes
        inner = strategy.MultiKrum(**sampling(made), num_malicious_nodes=attackers)
        super().__init__(inner, made, seed, **arguments)
        self._mean = inner.train_metrics_aggr_fn
        inner.train_metrics_aggr_fn = self._note_chosen
        self._sent: list[Message] = []
        self._chosen: list[RecordDict] = []

    def check(self, clients: int) -> None:
        """Find out whether so many attackers can be outvoted: n ≥ 2 f + 3.

        Raises
        ------
        UserError
            They cannot.
        """
        count = math.floor(self.parameters.fraction * clients)
        attackers = self.parameters.num_malicious_nodes
        if count < 2 * attackers + 3:
            raise UserError(
                f"num-malicious-nodes: rounds of {count} clients bear at most "
                f"{max(0, (count - 3) // 2)} attackers, got {attackers}."
            )

    def aggregate(self, updates: Sequence[Update]) -> list[Applied]:
        """Let Flower's strategy choose and average."""
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
        """Note what was chosen, and average the metrics of these as Flower does."""
        self._chosen = records
        return self._mean(records, key)


Krum = Variant(
    MultiKrum,
    KrumParameters,
    "Rounds that take the one update nearest to most others, Flower's own: for data of one kind.",
)
