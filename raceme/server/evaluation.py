"""Evaluations: the models of one moment, tested by the clients that are online then.

Where testing costs no time all clients answer at once. On real devices each client tests its model
when it is next free, before it trains again; what is reported is how many have answered.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from flwr.app import Message

from raceme.protocol.events import Evaluated
from raceme.protocol.measure import ACCURACY, Measure
from raceme.protocol.messages import CONFIG, GROUP, LOSS, NUM_EXAMPLES, STEP, UNIT, count_of
from raceme.protocol.stated import StatementError, number_of, quoted, unit_of
from raceme.server.sizes import largest_believed


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
        # Accuracies and errors have no mean: what most of the clients have measured counts.
        measure, _ = Counter(score.measure for score in self.scores.values()).most_common(1)[0]
        by_client = {name: s for name, s in self.scores.items() if s.measure == measure}
        scores = by_client.values()
        accuracy, loss = mean_scores(scores)
        per_client = {name: (s.cluster, s.accuracy, s.loss) for name, s in by_client.items()}
        groups = {name: s.group for name, s in by_client.items() if s.group is not None}
        steps = {name: score.step for name, score in by_client.items() if score.step}
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
            measure=measure,
        )


def read_score(reply: Message, cluster: int, latest: int = 0) -> ClientScore | None:
    """Take accuracy and loss out of a reply; None if it states none.

    Parameters
    ----------
    reply : Message
        What came back.
    cluster : int
        Main cluster of the client.
    latest : int
        Latest step that its data can be at.

    Raises
    ------
    StatementError
        It states what cannot be.
    """
    if reply.has_error() or len(reply.content.metric_records) != 1:
        return None
    stated: Mapping[str, object] = reply.content.config_records.get(CONFIG, {})
    step, unit = stated.get(STEP, 0), unit_of(stated.get(UNIT))
    if not isinstance(step, int) or not 0 <= step <= latest:
        raise StatementError(f"it has tested on step {quoted(step)}, and its data are at {latest}")
    metrics = next(iter(reply.content.metric_records.values()))
    return score_from(metrics, cluster, step, ACCURACY if unit is None else Measure(unit))


def score_from(
    metrics: Mapping[str, object], cluster: int, step: int = 0, measure: Measure = ACCURACY
) -> ClientScore | None:
    """Take accuracy and loss out of a client's metrics; None if there are none.

    An error may be infinite: the prediction of a model that diverged. An accuracy may be NaN, as
    that of no samples is: then it is none.

    Raises
    ------
    StatementError
        The accuracy does not lie in 0…1, the error is below 0, or a number is too large.
    """
    value, loss = metrics.get(measure.name), metrics.get(LOSS, math.nan)
    if not isinstance(value, int | float) or not isinstance(loss, int | float):
        return None
    value, loss = number_of(measure.name, value), number_of(LOSS, loss)
    if math.isnan(value):
        if not measure.is_error:
            return None
        value = math.inf
    if value < 0 or (value > 1 and not measure.is_error):
        wanted = "from 0 on" if measure.is_error else "from 0 to 1"
        raise StatementError(f"its {measure.name} is {value:g}: it must be a number {wanted}")
    examples = count_of(metrics.get(NUM_EXAMPLES)) or 0
    group = count_of(metrics.get(GROUP, -1))
    return ClientScore(cluster, value, loss, step, examples, group, measure)


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
    limit = largest_believed(sorted(score.examples for score in scores))
    counted = [(score.accuracy, min(score.examples, limit)) for score in scores]
    total = sum(examples for _, examples in counted)
    return math.fsum(accuracy * examples for accuracy, examples in counted) / total
