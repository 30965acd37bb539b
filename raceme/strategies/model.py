"""What the server keeps: models with versions, and the bookkeeping of the event loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from raceme.messages import Vector
from raceme.strategies.evaluation import ClientScore
from raceme.strategies.fleet import Fleet
from raceme.strategies.replies import Task


@dataclass
class Model:
    """A model on the server.

    Attributes
    ----------
    vector : Vector
        The parameters, flat; aggregation changes them in place.
    version : int
        Number of aggregations into it since the start, its ancestors' included.
    """

    vector: Vector
    version: int = 0


@dataclass(frozen=True)
class Applied:
    """What a method did with an update.

    Attributes
    ----------
    cluster : int
        The cluster whose model it went into.
    staleness : int
        τ: aggregations into that model since the client received its own.
    weight : float
        α: share of the client's model in the new one.
    """

    cluster: int
    staleness: int
    weight: float


@dataclass
class Progress:
    """Bookkeeping of the event loop, whatever the method.

    Attributes
    ----------
    updates, tasks, rejected : int
        Updates applied, tasks handed out and replies refused so far.
    rounds : int
        Rounds begun, by a round-based method.
    rejected_in_a_row : int
        Replies refused since the last valid one.
    useless_rounds : int
        Rounds in a row without a valid update, of a round-based method.
    checked_at, somebody_at : float
        When the list of online nodes was last looked at, and when last anybody was there.
    evaluated_at : int
        Number of updates at the last evaluation; -1 before the first.
    in_flight : dict[str, Task]
        Open tasks by message id.
    scores : dict[str, ClientScore]
        What each client last measured, where clients evaluate on their own.
    fleet : Fleet
        The clients.
    """

    updates: int = 0
    tasks: int = 0
    rejected: int = 0
    rounds: int = 0
    rejected_in_a_row: int = 0
    useless_rounds: int = 0
    checked_at: float = 0.0
    somebody_at: float = 0.0
    evaluated_at: int = -1
    in_flight: dict[str, Task] = field(default_factory=dict)
    scores: dict[str, ClientScore] = field(default_factory=dict)
    fleet: Fleet = field(default_factory=Fleet)
