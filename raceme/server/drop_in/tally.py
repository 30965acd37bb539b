"""What clients have measured, round by round, as Flower's strategies tell it."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import MetricRecord, RecordDict

from raceme.server.drop_in.arguments import FlowerArguments, MetricsFn
from raceme.server.drop_in.metrics import mean_of_replies


class Tally:
    """Gathers the metrics of training and of tests, and aggregates them.

    Parameters
    ----------
    arguments : FlowerArguments
        Say how metrics are aggregated.

    Attributes
    ----------
    round : int
        Number of the round whose models are tested, or were last.
    trained, tested : dict[int, MetricRecord]
        Number of a round to what clients have measured in it, aggregated.
    """

    def __init__(self, arguments: FlowerArguments) -> None:
        self._arguments = arguments
        # Replies that are on their way through the loop, by client: it may refuse them.
        self._returned: dict[str, list[RecordDict]] = {}
        self._applied: list[RecordDict] = []
        self._tests: list[RecordDict] = []
        self.round = 0
        self.trained: dict[int, MetricRecord] = {}
        self.tested: dict[int, MetricRecord] = {}

    def returned(self, client: str, content: RecordDict) -> None:
        """Note a client's reply to training."""
        kept = content
        if self._arguments.train_metrics_aggr_fn is None:
            # Without the model, which would be kept for a whole round.
            kept = RecordDict(dict(content.metric_records))
        self._returned.setdefault(client, []).append(kept)

    def applied(self, client: str) -> None:
        """Note that the first of a client's replies was made use of."""
        if returned := self._returned.get(client):
            self._applied.append(returned.pop(0))

    def refused(self, client: str) -> None:
        """Forget the last of a client's replies."""
        if returned := self._returned.get(client):
            returned.pop()

    def close_round(self, number: int) -> MetricRecord | None:
        """Aggregate what was measured in a round; None if nothing was."""
        made = _aggregated(self._applied, self._arguments.train_metrics_aggr_fn, self._weight)
        self._applied = []
        if made is not None:
            self.trained[number] = made
        return made

    def begin_test(self, number: int) -> None:
        """Gather the tests of the models of a round from now on."""
        self.close_test()
        self.round = number

    def answered(self, content: RecordDict) -> None:
        """Note a client's test."""
        self._tests.append(content)

    def close_test(self) -> MetricRecord | None:
        """Aggregate what was measured in the test under way; None if nothing was."""
        made = _aggregated(self._tests, self._arguments.evaluate_metrics_aggr_fn, self._weight)
        self._tests = []
        if made is not None:
            self.tested[self.round] = made
        return made

    @property
    def _weight(self) -> str:
        return self._arguments.weighted_by_key


def _aggregated(
    contents: Iterable[RecordDict], function: MetricsFn | None, weight: str
) -> MetricRecord | None:
    """Aggregate metrics with the user's function, or as their mean."""
    replies = [content for content in contents if len(content.metric_records) == 1]
    return (function or mean_of_replies)(replies, weight) if replies else None
