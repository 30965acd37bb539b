"""What a run reports while it goes on: one small record per happening.

A strategy calls its ``observe`` function with these; the run store, the progress line and tests
are such functions. Times are seconds on the clock of the grid: virtual in the simulator, since
the start of the run on Flower's grids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ClientJoined:
    """A client was greeted for the first time, or came back.

    Attributes
    ----------
    client : str
        The stable id that the client states.
    node_id : int
        Flower's id of the node where it runs now.
    num_examples : int
        Its number of training examples.
    group : int or None
        The true group of its data where that is known, for reporting purity only.
    returned : bool
        True if it was known before.
    """

    time: float
    client: str
    node_id: int
    num_examples: int
    group: int | None
    returned: bool = False


@dataclass(frozen=True)
class ClientLeft:
    """A client is no longer online."""

    time: float
    client: str


@dataclass(frozen=True)
class UpdateApplied:
    """A client's update was accepted.

    Attributes
    ----------
    seq : int
        Number of this update, from 1.
    cluster : int
        The cluster whose model it went into.
    base_version : int
        Version of the model that the client started from.
    staleness : int
        Aggregations into that model since, τ.
    weight : float
        Share of the update in the new model, α.
    dispatched_at : float
        When the client was given the work.
    train_loss : float
        Mean loss of the local training.
    started_at, finished_at : float or None
        When the client began its work and when it was done with it, by the clock of its own
        machine; on real devices only.
    """

    seq: int
    time: float
    client: str
    cluster: int
    base_version: int
    staleness: int
    weight: float
    dispatched_at: float
    train_loss: float
    bytes_down: int
    bytes_up: int
    started_at: float | None = None
    finished_at: float | None = None


@dataclass(frozen=True)
class UpdateRejected:
    """A reply was not used: an error, a lost task, or content that is not a valid update."""

    time: float
    client: str
    reason: str
    dispatched_at: float


@dataclass(frozen=True)
class Evaluated:
    """Every client's model was tested on that client's own test data.

    Attributes
    ----------
    updates : int
        Updates applied so far.
    accuracy, loss : float
        Unweighted means over the clients.
    clusters : int
        Number of cluster models now.
    per_client : Mapping[str, tuple[int, float, float]]
        Client id to (cluster, accuracy, loss).
    """

    time: float
    updates: int
    accuracy: float
    loss: float
    clusters: int
    per_client: Mapping[str, tuple[int, float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class ClusterSplit:
    """A cluster was replaced by several.

    Attributes
    ----------
    parent : int
        The cluster that is no more.
    children : Mapping[int, tuple[str, ...]]
        New cluster id to its clients.
    gap, threshold : float
        What was measured, and the bound that it exceeded. CASA: the eigengap to the power γ, and
        α_c. CFL: the largest norm of a client's update, and ε2. ICFL: 1 − the smallest pairwise
        similarity, and 1 − α*(t). NaN for methods that divide once and for all, as FeSEM and
        FedGroup do.
    """

    time: float
    updates: int
    parent: int
    children: Mapping[int, tuple[str, ...]]
    gap: float
    threshold: float


@dataclass(frozen=True)
class ClientAssigned:
    """A client was put into a cluster on its own: a newcomer, or one that moved."""

    time: float
    client: str
    cluster: int


@dataclass(frozen=True)
class RunEnded:
    """The run is over.

    Attributes
    ----------
    reason : str
        One line for the person: which limit was reached, or what ended it early.
    """

    time: float
    updates: int
    reason: str


Event = (
    ClientJoined
    | ClientLeft
    | UpdateApplied
    | UpdateRejected
    | Evaluated
    | ClusterSplit
    | ClientAssigned
    | RunEnded
)
Observer = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Observe nothing."""
