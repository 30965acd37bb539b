"""Evaluations: the models of one moment, tested by the clients that are online then.

Where testing costs no time all clients answer at once. On real devices each client tests its model
when it is next free, before it trains again; what is reported is how many have answered.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from flwr.app import Message

from raceme.protocol.events import Evaluated
from raceme.protocol.measure import ACCURACY, Measure
from raceme.protocol.messages import CONFIG, GROUP, LOSS, NUM_EXAMPLES, STEP, UNIT, count_of


@dataclass(frozen=True)
class ClientScore:
    """A client's test of the model that serves it.

    Attributes
    ----------
    cluster : int
        Its main cluster.
    accuracy, loss : float
        On the client's own test data; of a regression the mean absolute error.
    step : int
        Step of these data.
    examples : int
        How many they are; 0 if the client does not say.
    group : int or None
        True group of the data now, where data change and it is known; for reports only.
    measure : Measure
        What `accuracy` is.
    """

    cluster: int
    accuracy: float
    loss: float
    step: int = 0
    examples: int = 0
    group: int | None = None
    measure: Measure = ACCURACY


@dataclass
class Sweep:
    """An evaluation under way.

    Attributes
    ----------
    time, updates, clusters : float, int, int
        The moment of the models, updates applied by then, and how many models there were.
    asked : int
        Clients that were online then.
    waiting : dict[str, int]
        Clients that have not been asked yet, to their main cluster.
    open : dict[str, str]
        Message id to the client that was asked and has not answered.
    placed : dict[str, int]
        Main cluster of each client that was asked.
    scores : dict[str, ClientScore]
        What the clients have answered.
    """

    time: float
    updates: int
    clusters: int
    asked: int
    waiting: dict[str, int] = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)
    placed: dict[str, int] = field(default_factory=dict)
    scores: dict[str, ClientScore] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether nobody is left who could answer."""
        return not self.waiting and not self.open

    def report(self) -> Evaluated:
        """Make the report, of those who have answered; at least one has."""
        scores = self.scores.values()
        accuracy, loss = mean_scores(scores)
        per_client = {
            name: (score.cluster, score.accuracy, score.loss) for name, score in self.scores.items()
        }
        groups = {name: s.group for name, s in self.scores.items() if s.group is not None}
        steps = {name: score.step for name, score in self.scores.items() if score.step}
        return Evaluated(
            time=self.time,
            updates=self.updates,
            accuracy=accuracy,
            loss=loss,
            clusters=self.clusters,
            per_client=per_client,
            asked=self.asked,
            steps=steps,
            weighted_accuracy=weighted_accuracy(scores),
            groups=groups,
            measure=next(iter(scores)).measure,
        )


def read_score(reply: Message, cluster: int) -> ClientScore | None:
    """Take accuracy and loss out of a reply; None if it has none that are numbers."""
    if reply.has_error() or len(reply.content.metric_records) != 1:
        return None
    stated = reply.content.config_records.get(CONFIG)
    step = None if stated is None else stated.get(STEP)
    step = step if isinstance(step, int) else 0
    unit = None if stated is None else stated.get(UNIT)
    measure = Measure(unit) if isinstance(unit, str) else ACCURACY
    return score_from(next(iter(reply.content.metric_records.values())), cluster, step, measure)


def score_from(
    metrics: Mapping[str, object], cluster: int, step: int = 0, measure: Measure = ACCURACY
) -> ClientScore | None:
    """Take accuracy and loss out of a client's metrics; None if there is no finite accuracy.

    An error may be infinite: the prediction of a model that diverged.
    """
    accuracy, loss = metrics.get(measure.name), metrics.get(LOSS, math.nan)
    if not isinstance(accuracy, int | float) or not isinstance(loss, int | float):
        return None
    examples = count_of(metrics.get(NUM_EXAMPLES)) or 0
    try:
        group = count_of(metrics.get(GROUP, -1))
        value = float(accuracy)
        if measure.is_error and math.isnan(value):
            value = math.inf
        score = ClientScore(cluster, value, float(loss), step, examples, group, measure)
    except OverflowError:
        return None
    usable = value >= 0 if measure.is_error else math.isfinite(value)
    return score if usable else None


def mean_scores(scores: Collection[ClientScore]) -> tuple[float, float]:
    """Return the unweighted means of accuracy and loss over clients.

    The papers' accuracy: every client counts the same, however little data it has. Losses that
    are not finite are left out of the mean loss.
    """
    accuracy = math.fsum(score.accuracy for score in scores) / len(scores)
    losses = [score.loss for score in scores if math.isfinite(score.loss)]
    return accuracy, math.fsum(losses) / len(losses) if losses else math.nan


def weighted_accuracy(scores: Collection[ClientScore]) -> float:
    """Return the mean accuracy weighted by the clients' numbers of test examples.

    What CSAFL's and FlexCFL's papers report. NaN if a client does not say how many it has.
    """
    if any(not score.examples for score in scores):
        return math.nan
    total = sum(score.examples for score in scores)
    return math.fsum(score.accuracy * score.examples for score in scores) / total
