"""What clients report of the models that they test on their own data."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict

from raceme.events import Evaluated
from raceme.messages import ACCURACY, ARRAYS, CONFIG, LOSS
from raceme.strategies.fleet import Fleet


@dataclass(frozen=True)
class ClientScore:
    """A client's test of its cluster's model.

    Attributes
    ----------
    cluster : int
        Whose model it was.
    accuracy, loss : float
        On the client's own test data.
    """

    cluster: int
    accuracy: float
    loss: float


def sweep(
    fleet: Fleet, record_for: Callable[[str], ArrayRecord], config: ConfigRecord, ttl: float
) -> list[Message]:
    """Make one evaluation message for every online client.

    Parameters
    ----------
    fleet : Fleet
        The clients.
    record_for : Callable[[str], ArrayRecord]
        The model that a client is to be tested with.
    config : ConfigRecord
        Sent along.
    ttl : float
        Time to live of the messages, in seconds.
    """
    made = []
    for client in fleet.online():
        assert client.node_id is not None, "online clients have a node"
        content = RecordDict({ARRAYS: record_for(client.client_id), CONFIG: config})
        made.append(Message(content, client.node_id, MessageType.EVALUATE, ttl=ttl))
    return made


def read_scores(
    replies: Iterable[Message], fleet: Fleet, cluster_of: Callable[[str], int]
) -> dict[str, ClientScore]:
    """Take the clients' scores out of the replies to a sweep; who has none is left out."""
    scores: dict[str, ClientScore] = {}
    for reply in replies:
        client = fleet.by_node.get(reply.metadata.src_node_id)
        if client is not None:
            score = read_score(reply, cluster_of(client))
            if score is not None:
                scores[client] = score
    return scores


def evaluated(
    time: float, updates: int, clusters: int, scores: Mapping[str, ClientScore]
) -> Evaluated:
    """Make the report of an evaluation."""
    accuracy, loss = mean_scores(scores.values())
    per_client = {
        name: (score.cluster, score.accuracy, score.loss) for name, score in scores.items()
    }
    return Evaluated(time, updates, accuracy, loss, clusters, per_client)


def as_record(report: Evaluated) -> MetricRecord:
    """Return the means of an evaluation as Flower keeps them in a Result."""
    return MetricRecord({ACCURACY: report.accuracy, LOSS: report.loss})


def read_score(reply: Message, cluster: int) -> ClientScore | None:
    """Take accuracy and loss out of a reply; None if it has none that are numbers."""
    if reply.has_error() or len(reply.content.metric_records) != 1:
        return None
    return score_from(next(iter(reply.content.metric_records.values())), cluster)


def score_from(metrics: Mapping[str, object], cluster: int) -> ClientScore | None:
    """Take accuracy and loss out of a client's metrics; None if there is no finite accuracy."""
    accuracy, loss = metrics.get(ACCURACY), metrics.get(LOSS, math.nan)
    if not isinstance(accuracy, int | float) or not isinstance(loss, int | float):
        return None
    try:
        score = ClientScore(cluster, float(accuracy), float(loss))
    except OverflowError:
        return None
    return score if math.isfinite(score.accuracy) else None


def mean_scores(scores: Collection[ClientScore]) -> tuple[float, float]:
    """Return the unweighted means of accuracy and loss over clients.

    The paper's accuracy: every client counts the same, however little data it has. Losses that
    are not finite are left out of the mean loss.
    """
    accuracy = math.fsum(score.accuracy for score in scores) / len(scores)
    losses = [score.loss for score in scores if math.isfinite(score.loss)]
    return accuracy, math.fsum(losses) / len(losses) if losses else math.nan
