"""What a run reports meanwhile: one small record per happening.

A strategy calls its ``observe`` function with these; the run store, the progress line and tests
are such functions. Times are seconds on the clock of the grid: virtual in the simulator, since
the start of the run on Flower's grids.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from raceme.core.errors import UserError, printable

# -----------------------------------------------------------------------------
# What evaluations tell of models: how often they are right, or by how much they are wrong.
# -----------------------------------------------------------------------------


WITHIN = 0.01
"""How near the final value counts as converged: one point of accuracy, or 1 % of an error."""

_LOSS = "loss"
"""What stands in the place of a unit where the loss stands in for an accuracy."""


@dataclass(frozen=True)
class Measure:
    """Accuracy, or where the task is a regression the mean absolute error (MAE).

    In a user's own Flower app whose clients measure neither, it is their loss.

    Everything that asks which of two evaluations is the better one, or whether a target is
    reached, asks here: of accuracies the larger one is better, of errors the smaller one.

    Attributes
    ----------
    unit : str or None
        Unit of the error; None for an accuracy.
    """

    unit: str | None = None

    @property
    def is_error(self) -> bool:
        """Whether smaller is better."""
        return self.unit is not None

    @property
    def name(self) -> str:
        """Its key in replies and summaries: ``"accuracy"``, ``"mae"`` or ``"loss"``."""
        if self.is_loss:
            return "loss"
        return "mae" if self.is_error else "accuracy"

    @property
    def is_loss(self) -> bool:
        """Whether clients measure neither, and their loss stands in."""
        return self.unit == _LOSS

    @property
    def label(self) -> str:
        """What it is called in tables and at axes, with its unit: ``"MAE (µg/m³)"``."""
        if self.unit is None or self.is_loss:
            return self.name
        return f"MAE ({self.unit})" if self.unit else "MAE"

    @property
    def word(self) -> str:
        """What it is called in a sentence and in the head of a narrow column."""
        return "MAE" if self.is_error and not self.is_loss else self.name

    @property
    def title(self) -> str:
        """What it is called at the beginning of a title."""
        return "Mean absolute error" if self.word == "MAE" else self.word.capitalize()

    @classmethod
    def of(cls, summary: Mapping[str, Any]) -> Measure:
        """Return the measure of a ``summary.json``; those of earlier versions have accuracies."""
        if summary.get("measure", "accuracy") == "accuracy":
            return cls()
        if summary["measure"] == "loss":
            return LOSS_MEASURE
        return cls(str(summary.get("unit") or ""))

    def shown(self, value: float | None) -> str:
        """Return a value for people, an error with its unit."""
        if value is None:
            return "-"
        if self.is_error and not self.is_loss:
            return f"{value:.2f} {self.unit}".rstrip()
        return f"{value:.3f}"

    def goal(self, target: float) -> str:
        """Return a target for people: ``"95.0%"`` or ``"20 µg/m³"``."""
        if self.is_loss:
            return f"{target:g}"
        return f"{target:g} {self.unit}".rstrip() if self.is_error else f"{target:.1%}"

    def bound(self, target: float) -> str:
        """Return a target for people in the form of the values beside it: ``"0.95"``."""
        return self.goal(target) if self.is_error else f"{target:g}"

    def reaches(self, value: float, target: float) -> bool:
        """Return whether a value is as good as a target; NaN never is."""
        return value <= target if self.is_error else value >= target

    def better(self, value: float, other: float) -> float:
        """Return the better one of two values."""
        return min(value, other) if self.is_error else max(value, other)

    def worst_tenth(self, values: Iterable[float]) -> float:
        """Return the mean of the worst tenth of the values, of one at least.

        Values that are NaN are left out; NaN if there are no others.
        """
        known = sorted(value for value in values if not math.isnan(value))
        if self.is_error:
            known.reverse()
        return float(np.mean(known[: math.ceil(len(known) / 10)])) if known else math.nan

    def shortfall(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return how far each of a sequence of values is behind the best one so far."""
        if self.is_error:
            return values - np.minimum.accumulate(values)
        return np.maximum.accumulate(values) - values

    def tolerance(self, final: float) -> float:
        """Return how far from its final value a curve counts as converged."""
        return WITHIN * abs(final) if self.is_error else WITHIN


ACCURACY = Measure()
"""Of a classification."""
LOSS_MEASURE = Measure(_LOSS)
"""Of clients that measure nothing else."""


# -----------------------------------------------------------------------------
# What a run's protection does with updates, and how it is reported.
# -----------------------------------------------------------------------------


class Verdict(StrEnum):
    """What a run's protection does with an update."""

    ACCEPTED = "accepted"
    """It goes to the method as it came; this is not reported."""
    SCALED = "scaled"
    """It goes to the method shorter than it came."""
    REFUSED = "refused"
    """The method does not see it."""
    EXCLUDED = "excluded"
    """Nor will it see later ones of this client, which agree with no other client's."""
    READMITTED = "readmitted"
    """The client's updates agree with others' now: this one goes to the method again."""

    @property
    def keeps_out(self) -> bool:
        """Whether the method does not see the update."""
        return self in (Verdict.REFUSED, Verdict.EXCLUDED)


@dataclass(frozen=True)
class UpdateJudged:
    """A run's protection did something to a valid update, or to its client.

    What is refused is reported as `UpdateRejected` beside, what is not as `UpdateApplied`.

    Attributes
    ----------
    verdict : Verdict
        What the protection did with the update; never `ACCEPTED`, which is not reported.
    measured, bound : float
        What was measured of it, and the bound for that: lengths of updates, or how far the client's
        updates agree with others', from −2 to 2.
    reason : str
        Why, in words without numbers: the same for all that are judged alike.
    cluster : int or None
        The main cluster of the client; None if it has none yet.
    """

    time: float
    client: str
    verdict: Verdict
    measured: float
    bound: float
    reason: str
    cluster: int | None = None


# -----------------------------------------------------------------------------
# What a run reports meanwhile: one small record per happening.
# -----------------------------------------------------------------------------


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
class ClaimRefused:
    """A node said that it is a client whose key it does not have; it takes no part.

    Attributes
    ----------
    node_id : int
        Flower's id of the node.
    client : str
        The id that it states. The client of that id, online or not, is not affected.
    reason : str
        The owner of its key, in words.
    """

    time: float
    node_id: int
    client: str
    reason: str


@dataclass(frozen=True)
class KeyChanged:
    """A device's registered key has changed while the run went on.

    Attributes
    ----------
    client : str
        The device.
    change : str
        ``"registered"``, ``"revoked"`` or ``"rotated"``.
    """

    time: float
    client: str
    change: str


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
    step : int
        Step of the client's data that it trained on; 0 for data that never change.
    accuracy_before : float or None
        Of a run with ``score-uploads``: the accuracy of the uploaded model on the test data of this
        step.
    accuracy_after : float or None
        Of a run with ``score-uploads``: the accuracy of the model that the client had received, on
        the test data of its update before this one: what it got for that.
    passes : int or None
        Of a run with ``score-uploads``: passes of single samples through the network that the
        client's work took, forward counted as 1 and backward as 2.
    mixture : tuple[float, ...]
        Share of each distribution in the client's samples of this step, where they are a mixture.
    phase : str
        What the method did meanwhile, for the account of bytes; by default the kind of work.
    cpu_seconds, joules : float or None
        What the work cost the client, as it states it: seconds of computing of all its threads, and
        the energy that its board took meanwhile, where that can tell; on real devices only.
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
    step: int = 0
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    passes: int | None = None
    mixture: tuple[float, ...] = ()
    phase: str = "train"
    cpu_seconds: float | None = None
    joules: float | None = None


@dataclass(frozen=True)
class AnswerTaken:
    """A client's answer to work that was not training was taken.

    Attributes
    ----------
    kind : str
        Kind of work, as in :class:`~raceme.core.requests.Request`.
    phase : str
        What the method did meanwhile, for the account of bytes; by default the kind of work.
    bytes_down, bytes_up : int
        Size of the arrays that were sent, and of those that came back; 0 where no models travel.
    """

    time: float
    client: str
    kind: str
    phase: str
    bytes_down: int
    bytes_up: int


@dataclass(frozen=True)
class UpdateRejected:
    """A reply was not used: an error, a lost task, or content that is not a valid update."""

    time: float
    client: str
    reason: str
    dispatched_at: float


@dataclass(frozen=True)
class Evaluated:
    """The models of one moment were tested by the clients that were online then.

    Each client tests the model that serves it, on its own test data.

    Attributes
    ----------
    time, updates : float, int
        The moment of the models: when it was, and the updates applied by then. On real devices
        the clients' answers come later.
    accuracy, loss : float
        Unweighted means over the clients that answered. Where the task is a regression,
        `accuracy` here and below is the mean absolute error: `measure` says which.
    clusters : int
        Number of cluster models at that moment.
    per_client : Mapping[str, tuple[int, float, float]]
        Client id to (cluster, accuracy, loss), for the clients that answered; the cluster is the
        one with the largest weight.
    asked : int
        Clients that were online at that moment.
    steps : Mapping[str, int]
        Client id to the step of the data that it was tested on, for the clients that answered;
        those at step 0 are left out.
    weighted_accuracy : float
        Mean over the clients that answered, weighted by their numbers of test examples; NaN where
        one of them does not state its number.
    groups : Mapping[str, int]
        Client id to the true group of the data that it was tested on, where data change and it is
        known.
    measure : Measure
        What `accuracy` is, and which of two values is the better one.
    """

    time: float
    updates: int
    accuracy: float
    loss: float
    clusters: int
    per_client: Mapping[str, tuple[int, float, float]] = field(default_factory=dict)
    asked: int = 0
    steps: Mapping[str, int] = field(default_factory=dict)
    weighted_accuracy: float = math.nan
    groups: Mapping[str, int] = field(default_factory=dict)
    measure: Measure = ACCURACY

    @property
    def answered(self) -> int:
        """Number of clients that answered."""
        return len(self.per_client)

    @property
    def counts(self) -> bool:
        """Whether enough of the clients answered for a target to count: nine tenths."""
        return 10 * self.answered >= 9 * self.asked


class TaskScore(NamedTuple):
    """A client's test of the model that serves it on the data of a step.

    Attributes
    ----------
    cluster : int
        The cluster of the model, of several that with the largest weight.
    accuracy : float
        Its accuracy there, or mean absolute error.
    untrained : float or None
        That of the model before any training, where it was tested too.
    """

    cluster: int
    accuracy: float
    untrained: float | None = None


@dataclass(frozen=True)
class TasksTested:
    """A step of some clients' data is over, and they tested their models on all steps so far.

    Reported by runs with ``eval-tasks``, also at the end of the run. No client has trained on the
    next step yet: what is tested there is how far models are right without (forward transfer).

    Attributes
    ----------
    time, updates : float, int
        The moment of the models: when it was, and the updates applied by then.
    step : int
        The step that is over: the last one that models were trained on.
    clusters : int
        Number of cluster models at that moment.
    per_client : Mapping[str, Mapping[int, TaskScore]]
        Client id to step to what it measured there, for the clients that answered. Steps whose data
        a client does not have any more are missing.
    asked : int
        Number of clients that were online at that moment.
    measure : Measure
        What the scores are: accuracies, or errors and their unit.
    """

    time: float
    updates: int
    step: int
    clusters: int
    per_client: Mapping[str, Mapping[int, TaskScore]]
    asked: int
    measure: Measure = ACCURACY


@dataclass(frozen=True)
class ClustersScored:
    """The clusters' models were tested by the server, each on a test set of its own.

    Reported beside an evaluation where the server has such sets, one for each distribution:
    cluster k is then of distribution k.

    Attributes
    ----------
    time, updates : float, int
        Time of the models.
    accuracies : Mapping[int, float]
        Cluster to its model's accuracy; not empty.
    """

    time: float
    updates: int
    accuracies: Mapping[int, float]

    @property
    def mean(self) -> float:
        """Unweighted mean over the clusters."""
        return math.fsum(self.accuracies.values()) / len(self.accuracies)


class ClusterChange(StrEnum):
    """The verbs by which clients and clusters change; see `ClustersChanged`."""

    ASSIGN = "assign"
    """A client that had no cluster was given one, or several with weights."""
    MOVE = "move"
    """A client went to another cluster, or its weights changed."""
    SPLIT = "split"
    """A cluster was replaced by several."""
    MERGE = "merge"
    """Several clusters were replaced by one."""
    FOUND = "found"
    """A new cluster was founded beside the others."""
    RETIRE = "retire"
    """A cluster without members was given up."""


@dataclass(frozen=True)
class ClustersChanged:
    """Clients or clusters have changed: the one report of all verbs of `Clusters`.

    Attributes
    ----------
    change : ClusterChange
        The operation, such as a split or a merge.
    memberships : Mapping[str, Mapping[int, float]]
        The clients whose clusters changed, to the weight of each of their clusters from now on
        (positive, sum 1). Clients that are not named stay where they were.
    gone : tuple[int, ...]
        Clusters that do not exist any more: the parent of a split, the sources of a merge.
    made : tuple[int, ...]
        Clusters that are new: the children of a split, the target of a merge. Ids are never used
        twice.
    score, threshold : float
        What was measured, and the bound that it passed; NaN where the method measures nothing.
        CASA: the eigengap to the power γ, and α_c. CFL: the largest norm of a client's update, and
        ε2. ICFL: 1 − the smallest pairwise similarity, and 1 − α*(t).
    """

    time: float
    updates: int
    change: ClusterChange
    memberships: Mapping[str, Mapping[int, float]]
    gone: tuple[int, ...] = ()
    made: tuple[int, ...] = ()
    score: float = math.nan
    threshold: float = math.nan


@dataclass(frozen=True)
class DataChanged:
    """Clients' data moved on to another step: drift, or the next task.

    Attributes
    ----------
    client : str or None
        The client; None stands for all clients at once.
    step : int
        The step from now on.
    """

    time: float
    updates: int
    client: str | None
    step: int


@dataclass(frozen=True)
class MeasureSchema:
    """Declares once what a method measures beside what every run reports.

    From it come the rows and the SQL view of the run store, the line of the summary, the table of
    the dashboard, a CSV file and a figure.

    Attributes
    ----------
    name : str
        Short name, an identifier: part of file names and of the view ``measure_<name>``.
    title : str
        Name of the measure in tables and figures.
    columns : tuple[str, ...]
        The values of an event. With `per` there is one column, which maps keys to values.
    value : str
        The column that is summarised and drawn; by default the last one.
    unit : str
        Unit of the value, for axis labels; empty for a plain number.
    per : str
        ``"client"`` or ``"cluster"``: what the keys of the column are. Empty for single values.
    of : str
        The column that holds the whole of which the value is a part, for shares.
    summary : str
        How a run's values become one number (or one per key): ``"last"``, ``"mean"`` or ``"max"``.
        ``"column"`` is the last value, as a key of the summary named after its column;
        ``"shares"`` is the mean share and how often it is large, as keys named after the measure;
        ``"none"`` leaves it out of the summary.
    figure : str
        What is drawn: the values over time as a ``"line"``, ``"steps"`` or ``"points"``, how often
        shares are how large (``"shares"``), or at the end of the run a ``"graph"`` of clusters,
        with an arrow from each cluster in the value of another one; ``"none"`` draws nothing.

    Raises
    ------
    ValueError
        The declaration contradicts itself.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    value: str = ""
    unit: str = ""
    per: str = ""
    of: str = ""
    summary: str = "last"
    figure: str = "line"

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        object.__setattr__(self, "value", self.value or self.columns[-1])
        names = (self.name, *self.columns)
        if not all(name.isidentifier() and name.isascii() for name in names):
            raise ValueError(f"Names of a measure are identifiers, not {names}.")
        if {"event", "time", "updates"} & set(self.columns):
            raise ValueError(f"{self.name}: event, time and updates are columns of every measure.")
        if self.value not in self.columns:
            raise ValueError(f"{self.name} has no column {self.value}.")
        if self.per and len(self.columns) != 1:
            raise ValueError(f"{self.name} is measured per {self.per}: expected one column.")
        for value, allowed in (
            (self.per, ("", "client", "cluster")),
            (self.summary, ("last", "mean", "max", "column", "shares", "none")),
            (self.figure, ("line", "steps", "points", "shares", "graph", "none")),
        ):
            if value not in allowed:
                raise ValueError(f"{self.name}: expected one of {allowed}, not {value!r}.")
        if self.of not in ("", *self.columns):
            raise ValueError(f"{self.name} has no column {self.of}.")
        if "shares" in (self.summary, self.figure) and not self.of:
            raise ValueError(f"{self.name}: shares need `of`, the column with the whole.")
        if self.figure == "graph" and self.per != "cluster":
            raise ValueError(f"{self.name}: a graph needs values per cluster.")

    @property
    def heading(self) -> str:
        """The title, with a capital letter."""
        return self.title[:1].upper() + self.title[1:]

    @property
    def file(self) -> str:
        """Name of the figure's file, without its suffix."""
        return self.name if self.figure in ("shares", "graph") else f"measure-{self.name}"


@dataclass(frozen=True)
class Measured:
    """A method measured something.

    Attributes
    ----------
    schema : MeasureSchema
        What, as the method declares it.
    values : Mapping[str, Any]
        Column to its value: a number, a text, or with `MeasureSchema.per` a mapping from clients
        or clusters to numbers or tuples of numbers.

    Raises
    ------
    ValueError
        The columns are not those of the schema.
    UserError
        A value that is to be summarised is not a number.
    """

    time: float
    updates: int
    schema: MeasureSchema
    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        if set(self.values) != set(self.schema.columns):
            raise ValueError(
                f"{self.name} has the columns {self.schema.columns}, not {tuple(self.values)}."
            )
        measured = self.value.values() if self.schema.per else (self.value,)
        texts = (str,) if self.schema.summary in ("last", "column", "none") else ()
        for value in measured:
            if value is not None and not isinstance(value, (int, float, tuple, *texts)):
                try:
                    float(value)
                except (TypeError, ValueError):
                    raise UserError(
                        f"The measure {self.name} must have a number as {self.schema.value}; got "
                        f"{printable(value, 60)}."
                    ) from None

    @property
    def name(self) -> str:
        """Short name of the measure."""
        return self.schema.name

    @property
    def value(self) -> Any:
        """The value of the column that is summarised and drawn."""
        return self.values[self.schema.value]

    def numbers(self) -> dict[Any, float]:
        """Return the value as numbers by client or cluster, a single one by an empty key.

        With `MeasureSchema.of` they are shares of that column. None is no number, and left out.
        """
        whole = self.values[self.schema.of] if self.schema.of else 1.0
        values = self.value if self.schema.per else {"": self.value}
        return {key: float(value / whole) for key, value in values.items() if value is not None}


class Ending(StrEnum):
    """Why a run ended."""

    LIMIT = "limit"
    """The planned number of updates, or the time limit."""
    TARGET = "target"
    """The target accuracy."""
    AT_REST = "at-rest"
    """Nothing could ever have changed any more."""
    INTERRUPTED = "interrupted"
    """The user, or a signal."""
    NO_CLIENTS = "no-clients"
    """All clients are gone."""
    USELESS_REPLIES = "useless-replies"
    """Too many replies in a row were unusable."""

    @property
    def is_complete(self) -> bool:
        """Whether the run did what it was to do."""
        return self in (Ending.LIMIT, Ending.TARGET, Ending.AT_REST)


@dataclass(frozen=True)
class RunEnded:
    """The run is over.

    Attributes
    ----------
    reason : str
        One line for the person: which limit was reached, or what ended it early.
    ending : Ending
        Kind of end, for programs: limit, target, interruption and so on.
    """

    time: float
    updates: int
    reason: str
    ending: Ending = Ending.LIMIT


Event = (
    ClientJoined
    | ClientLeft
    | ClaimRefused
    | KeyChanged
    | UpdateApplied
    | AnswerTaken
    | UpdateRejected
    | UpdateJudged
    | Evaluated
    | TasksTested
    | ClustersScored
    | ClustersChanged
    | DataChanged
    | Measured
    | RunEnded
)
Observer = Callable[[Event], None]

_METHODS = {
    kind: "on" + re.sub("[A-Z]", lambda capital: f"_{capital[0].lower()}", kind.__name__)
    for kind in get_args(Event)
}
"""Class of event to the name of the methods that handle it: UpdateApplied to on_update_applied."""


class EventHandler:
    """An observer with a method for each kind of event that it acts on; all other events pass.

    ``on_update_applied(self, event)`` is called with each `UpdateApplied`, ``on_run_ended`` with
    each `RunEnded`, and so on. Two kinds share a method as ``on_client_joined =
    on_clusters_changed``. To do something with every event, override `__call__` and call
    ``super().__call__(event)`` in it. A method ``on_...`` of a kind that does not exist is a
    TypeError of the class definition.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        methods = {name for name in vars(cls) if name.startswith("on_")}
        if unknown := sorted(methods.difference(_METHODS.values())):
            raise TypeError(f"{cls.__name__} handles events that do not exist: {unknown}.")

    def __call__(self, event: Event) -> Any:
        """Hand an event to its method, and return what that returns; None without a method."""
        method = getattr(self, _METHODS[type(event)], None)
        return method(event) if method is not None else None


def ignore(event: Event) -> None:
    """Observe nothing."""


# -----------------------------------------------------------------------------
# Membership: which client is in which clusters, followed through the events of a run.
# -----------------------------------------------------------------------------


Composition = Counter[int | None]
"""Number of a cluster's members by true group."""


@dataclass(frozen=True)
class Placement:
    """A client's clusters from a moment on.

    Attributes
    ----------
    time : float
        Time in seconds from which the weights hold.
    weights : Mapping[int, float]
        Cluster to its weight: positive, sum 1. Empty if its cluster was given up and the client
        was given no other.
    """

    time: float
    client: str
    weights: Mapping[int, float]

    @property
    def home(self) -> int | None:
        """The cluster with the largest weight; None if there is none."""
        return home(self.weights)


def home(weights: Mapping[int, float]) -> int | None:
    """Return the cluster with the largest weight, of equal ones the smallest; None of nothing."""
    if len(weights) == 1:
        return next(iter(weights))
    return min(weights, key=lambda cluster: (-weights[cluster], cluster), default=None)


class Membership(EventHandler):
    """The clusters' members now, an observer of the run.

    A client of several clusters is counted where its weight is largest.

    Attributes
    ----------
    weights : dict[str, Mapping[int, float]]
        Client id to the weights of its clusters, for every client that has one.
    groups : dict[str, int or None]
        Client id to the true group of its data, for every client that joined; where data change,
        that of the latest evaluation.
    composition : dict[int, Counter]
        Cluster to the number of its members of each true group, for every cluster with members;
        the group None counts those whose group is not known.
    existing : set[int]
        Clusters that an event has named and that are not gone, with or without members.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Mapping[int, float]] = {}
        self.groups: dict[str, int | None] = {}
        self.composition: dict[int, Composition] = {}
        self.existing: set[int] = set()
        # Of the clients that have a cluster and a known group: how many, and how many of them are
        # of their cluster's most common group. Kept, since each change touches few clusters.
        self._known = 0
        self._agreeing = 0

    @property
    def clusters(self) -> dict[str, int]:
        """Client id to its cluster, that with the largest weight."""
        homes = ((client, home(weights)) for client, weights in self.weights.items())
        return {client: cluster for client, cluster in homes if cluster is not None}

    def observe(self, event: Event) -> list[Placement]:
        """Process an event.

        Returns
        -------
        list[Placement]
            The clients whose clusters or weights are others because of it.
        """
        return self(event) or []

    def on_client_joined(self, event: ClientJoined) -> None:
        """Note the true group of a client."""
        self._observe_group(event.client, event.group)

    def on_evaluated(self, event: Evaluated) -> None:
        """Note the true groups that are others now."""
        for client, group in event.groups.items():
            if group != self.groups.get(client):
                self._observe_group(client, group)

    def purity(self) -> float | None:
        """Return the clusters' purity now; None if no true groups are known."""
        return self._agreeing / self._known if self._known else None

    def sizes(self) -> dict[int, int]:
        """Return the number of members of each cluster that has any, by cluster."""
        return {cluster: self.composition[cluster].total() for cluster in sorted(self.composition)}

    def _observe_group(self, client: str, group: int | None) -> None:
        cluster = home(self.weights.get(client, {}))
        if cluster is not None:
            self._count(cluster, client, -1)
        self.groups[client] = group
        if cluster is not None:
            self._count(cluster, client, +1)

    def on_clusters_changed(self, event: ClustersChanged) -> list[Placement]:
        """Move the clients that it names, and those whose cluster is gone."""
        self.existing.update(event.made)
        placements = [
            self._place(event.time, client, dict(weights))
            for client, weights in event.memberships.items()
            if self.weights.get(client) != weights
        ]
        gone = set(event.gone)
        self.existing -= gone
        # No client can be in a cluster that does not exist.
        if not gone.isdisjoint(self.composition):
            left = [c for c, weights in self.weights.items() if home(weights) in gone]
            placements += [self._place(event.time, client, {}) for client in left]
        return placements

    def _place(self, time: float, client: str, weights: Mapping[int, float]) -> Placement:
        old, new = home(self.weights.get(client, {})), home(weights)
        if old is not None:
            self._count(old, client, -1)
        if new is not None:
            self._count(new, client, +1)
        if weights:
            self.weights[client] = weights
        else:
            # Of a resumed run, events are observed from the middle on: it may not be known yet.
            self.weights.pop(client, None)
        self.existing.update(weights)
        return Placement(time, client, weights)

    def _count(self, cluster: int, client: str, change: int) -> None:
        """Add a client to the composition of a cluster, or take it out."""
        composition = self.composition.setdefault(cluster, Counter())
        group = self.groups.get(client)
        before = _largest(composition)
        composition[group] += change
        if not composition[group]:
            del composition[group]
        if not composition:
            del self.composition[cluster]
        self._known += change if group is not None else 0
        self._agreeing += _largest(composition) - before


def _largest(composition: Composition) -> int:
    """Return the number of members of the most common known group."""
    return max((count for group, count in composition.items() if group is not None), default=0)


# -----------------------------------------------------------------------------
# Changes of clusters in words, for progress lines.
# -----------------------------------------------------------------------------


def is_news(event: ClustersChanged) -> bool:
    """Return whether a change of clusters is told: what a run begins with, and moves, are not."""
    if event.change in (ClusterChange.SPLIT, ClusterChange.MERGE):
        return True
    return event.change in (ClusterChange.FOUND, ClusterChange.RETIRE) and event.updates > 0


def change_line(event: ClustersChanged) -> str:
    """Describe a change of clusters in one line: with clients, where they are named."""
    sizes = Counter(home(weights) for weights in event.memberships.values())
    made = ", ".join(f"{k} ({sizes[k]})" if sizes else str(k) for k in event.made)
    gone = ", ".join(map(str, event.gone))
    # "cluster 2 → clusters 3 (2), 4 (1)", "clusters 3, 4 → cluster 5 (3)", "new cluster 6".
    before = f"cluster{'' if len(event.gone) == 1 else 's'} {gone}"
    after = f"cluster{'' if len(event.made) == 1 else 's'} {made}"
    what = f"{before} → {after}" if gone and made else f"new {after}" if made else f"{before} ended"
    return f"{what} at update {event.updates}"
