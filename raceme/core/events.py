"""Events of a run, one small record each.

A strategy passes them to its ``observe`` function, such as the run store, the progress line or
tests. Times are seconds on the clock of the grid: virtual in simulations, since the start of the
run on Flower's grids.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean
from typing import Any, NamedTuple, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from raceme.core.errors import UserError, printable

# -----------------------------------------------------------------------------
# The measure of an evaluation: accuracy or error.
# -----------------------------------------------------------------------------


_Key = TypeVar("_Key")
_Item = TypeVar("_Item")


def grouped(pairs: Iterable[tuple[_Key, _Item]]) -> dict[_Key, list[_Item]]:
    """Return the items of each key, keys and items in the order of the pairs."""
    found: dict[_Key, list[_Item]] = {}
    for key, item in pairs:
        found.setdefault(key, []).append(item)
    return found


WITHIN = 0.01
"""Tolerance of convergence: one point of accuracy, or 1 % of an error."""

_LOSS = "loss"
"""Placeholder unit if the loss replaces an accuracy."""


@dataclass(frozen=True)
class Measure:
    """Accuracy, or the mean absolute error (MAE) of a regression.

    In a user's own Flower app whose clients measure neither, it is their loss.

    Comparisons of evaluations with each other and with targets use this class: a larger accuracy is
    better, a smaller error is better.

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
        return "loss" if self.is_loss else "mae" if self.is_error else "accuracy"

    @property
    def is_loss(self) -> bool:
        """Whether the loss replaces the measure."""
        return self.unit == _LOSS

    @property
    def label(self) -> str:
        """Name in tables and at axes, with its unit: ``"MAE (µg/m³)"``."""
        if self.unit is None or self.is_loss:
            return self.name
        return f"MAE ({self.unit})" if self.unit else "MAE"

    @property
    def word(self) -> str:
        """Name in sentences and narrow columns."""
        return "MAE" if self.is_error and not self.is_loss else self.name

    @property
    def title(self) -> str:
        """Name at the beginning of a title."""
        return "Mean absolute error" if self.word == "MAE" else self.word.capitalize()

    @classmethod
    def of(cls, summary: Mapping[str, Any]) -> Measure:
        """Return the measure of a ``summary.json``; earlier versions have accuracies."""
        if summary.get("measure", "accuracy") == "accuracy":
            return cls()
        if summary["measure"] == "loss":
            return LOSS_MEASURE
        return cls(str(summary.get("unit") or ""))

    def shown(self, value: float | None) -> str:
        """Format a value, an error with its unit."""
        if value is None:
            return "-"
        if self.is_error and not self.is_loss:
            return f"{value:.2f} {self.unit}".rstrip()
        return f"{value:.3f}"

    def goal(self, target: float) -> str:
        """Format a target: ``"95.0%"`` or ``"20 µg/m³"``."""
        if self.is_loss:
            return f"{target:g}"
        return f"{target:g} {self.unit}".rstrip() if self.is_error else f"{target:.1%}"

    def bound(self, target: float) -> str:
        """Format a target like values: ``"0.95"``."""
        return self.goal(target) if self.is_error else f"{target:g}"

    def reaches(self, value: float, target: float) -> bool:
        """Return whether a value reaches a target; NaN never does."""
        return value <= target if self.is_error else value >= target

    def better(self, value: float, other: float) -> float:
        """Return the better one of two values."""
        return min(value, other) if self.is_error else max(value, other)

    def worst_tenth(self, values: Iterable[float]) -> float:
        """Return the mean of the worst tenth of the values, at least one.

        NaN values are left out; NaN without others.
        """
        known = sorted(value for value in values if not math.isnan(value))
        if self.is_error:
            known.reverse()
        return float(np.mean(known[: math.ceil(len(known) / 10)])) if known else math.nan

    def shortfall(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the distance of each value in a sequence from the best so far."""
        if self.is_error:
            return values - np.minimum.accumulate(values)
        return np.maximum.accumulate(values) - values

    def tolerance(self, final: float) -> float:
        """Return the tolerance of convergence for a final value."""
        return WITHIN * abs(final) if self.is_error else WITHIN


ACCURACY = Measure()
"""Measure of a classification."""
LOSS_MEASURE = Measure(_LOSS)
"""Measure of clients with a loss only."""


# -----------------------------------------------------------------------------
# Equality of events.
# -----------------------------------------------------------------------------


class _Record:
    """Base of the events: two are equal if they have the same type and values.

    NaN stands for a missing number, and equals NaN. Subclasses are dataclasses with ``eq=False``,
    since the generated equality treats NaN differently from one version of Python to another.
    """

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and _are_equal(vars(self), vars(other))

    __hash__ = None  # type: ignore[assignment]


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether values are equal, with NaN equal to NaN, also inside of containers."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and type(one) is type(other):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return bool(one == other or (one != one and other != other))


# -----------------------------------------------------------------------------
# Verdicts of features on updates, and their reports.
# -----------------------------------------------------------------------------


class Verdict(StrEnum):
    """Verdict of a feature on an update."""

    ACCEPTED = "accepted"
    """Passed unchanged; not reported."""
    SCALED = "scaled"
    """Scaled down."""
    REFUSED = "refused"
    """Refused."""
    EXCLUDED = "excluded"
    """Refused, and later updates of the client too, as they agree with no other client's."""
    READMITTED = "readmitted"
    """Accepted again, as the client's updates now agree with others'."""

    @property
    def is_withheld(self) -> bool:
        """Whether the update is withheld from the method."""
        return self in (Verdict.REFUSED, Verdict.EXCLUDED)


@dataclass(frozen=True, eq=False)
class UpdateJudged(_Record):
    """A verdict of a feature other than acceptance.

    Refused updates are also reported as `UpdateRejected`, others as `UpdateApplied`.

    Attributes
    ----------
    verdict : Verdict
        The verdict, never `ACCEPTED`.
    measured, bound : float
        Measured value and bound: lengths of updates, or agreement with others from −2 to 2.
    reason : str
        Reason in words without numbers.
    cluster : int or None
        Main cluster of the client; None without one.
    """

    time: float
    client: str
    verdict: Verdict
    measured: float
    bound: float
    reason: str
    cluster: int | None = None


# -----------------------------------------------------------------------------
# Events of a run, one small record each.
# -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ClientJoined(_Record):
    """A client joined, for the first time or again.

    Attributes
    ----------
    client : str
        Stable id of the client.
    node_id : int
        Flower's id of its node.
    num_examples : int
        Its number of training examples.
    group : int or None
        True group of its data, if known; only for reporting purity.
    returned : bool
        Whether it was known before.
    labels : str
        Its labels: ``room=kitchen,floor=1``.
    """

    time: float
    client: str
    node_id: int
    num_examples: int
    group: int | None
    returned: bool = False
    labels: str = ""


@dataclass(frozen=True, eq=False)
class ClientLeft(_Record):
    """A client is no longer online."""

    time: float
    client: str


@dataclass(frozen=True, eq=False)
class ClaimRefused(_Record):
    """A node without the key of its stated id was refused.

    Attributes
    ----------
    node_id : int
        Flower's id of the node.
    client : str
        Stated id. The client of that id is not affected.
    reason : str
        Owner of its key, in words.
    """

    time: float
    node_id: int
    client: str
    reason: str


@dataclass(frozen=True, eq=False)
class KeyChanged(_Record):
    """A device's registered key changed during the run.

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


@dataclass(frozen=True, eq=False)
class VersionDecided(_Record):
    """A version of a cluster's model came into use on the devices, or was held back.

    Attributes
    ----------
    cluster, version : int
        The cluster, and the number of the version there.
    outcome : str
        ``"in-use"`` or ``"held"``.
    score : float or None
        Its validation; None if it was not tested.
    reason : str
        Why it was held, or an operator's choice; empty if it passed its tests.
    """

    time: float
    cluster: int
    version: int
    outcome: str
    score: float | None
    reason: str = ""


@dataclass(frozen=True, eq=False)
class UpdateApplied(_Record):
    """A client's update was accepted.

    Attributes
    ----------
    seq : int
        Number of this update, from 1.
    cluster : int
        The cluster whose model it changed.
    base_version : int
        Version of the client's base model.
    staleness : int
        τ: changes of that model since then.
    weight : float
        Share of the update in the new model, α.
    dispatched_at : float
        Time at which the work was sent.
    train_loss : float
        Mean loss of the local training.
    started_at, finished_at : float or None
        Start and end of the client's work by its own clock; on real devices only.
    step : int
        Step of the client's training data; 0 without drift.
    accuracy_before : float or None
        With ``score-uploads``: accuracy of the uploaded model on the test data of this step.
    accuracy_after : float or None
        With ``score-uploads``: accuracy of the received model on the test data of the client's
        previous update.
    passes : int or None
        With ``score-uploads``: sample passes of the client's work, forward counted as 1 and
        backward as 2.
    mixture : tuple[float, ...]
        Share of each distribution in the client's samples of this step, if a mixture.
    phase : str
        Phase of the method for traffic accounting; by default the kind of work.
    cpu_seconds : float or None
        Stated CPU seconds of the work, summed over threads; on real devices only.
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


@dataclass(frozen=True, eq=False)
class AnswerTaken(_Record):
    """A client's answer to work other than training was accepted.

    Attributes
    ----------
    kind : str
        Kind of work, as in :class:`~raceme.core.requests.Request`.
    phase : str
        Phase of the method for traffic accounting; by default the kind of work.
    bytes_down, bytes_up : int
        Sizes of sent and returned arrays; 0 if no models travel.
    """

    time: float
    client: str
    kind: str
    phase: str
    bytes_down: int
    bytes_up: int


@dataclass(frozen=True, eq=False)
class UpdateRejected(_Record):
    """A reply was not used: an error, a lost task, or an invalid update."""

    time: float
    client: str
    reason: str
    dispatched_at: float


@dataclass(frozen=True, eq=False)
class Evaluated(_Record):
    """The online clients tested the models of one time.

    Each client tests the model that serves it, on its own test data.

    Attributes
    ----------
    time, updates : float, int
        Time of the models and applied updates. On real devices the answers arrive later.
    accuracy, loss : float
        Unweighted means over the clients that answered. For a regression, `accuracy` here and below
        is the mean absolute error; see `measure`.
    clusters : int
        Number of cluster models at that time.
    per_client : Mapping[str, tuple[int, float, float]]
        Client id to (cluster, accuracy, loss), for the clients that answered; the cluster is the
        one with the largest weight.
    asked : int
        Number of clients online at that time.
    steps : Mapping[str, int]
        Step of the test data of the clients that answered, if not 0.
    weighted_accuracy : float
        Mean over the clients that answered, weighted by test examples; NaN if one does not state
        its number.
    groups : Mapping[str, int]
        True group of the clients' test data under drift, if known.
    measure : Measure
        Measure of `accuracy`.
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
    def by_cluster(self) -> dict[int, list[float]]:
        """The clients' accuracies, by cluster."""
        return grouped((cluster, accuracy) for cluster, accuracy, _ in self.per_client.values())

    @property
    def worst_tenth(self) -> float:
        """Mean accuracy of the worst tenth of the clients."""
        return self.measure.worst_tenth(accuracy for _, accuracy, _ in self.per_client.values())

    @property
    def counts(self) -> bool:
        """Whether enough clients (nine tenths) answered for reaching a target."""
        return 10 * self.answered >= 9 * self.asked


class TaskScore(NamedTuple):
    """A client's test of its model on the data of a step.

    Attributes
    ----------
    cluster : int
        The cluster of the model; for several clusters, the one with the largest weight.
    accuracy : float
        Its accuracy there, or mean absolute error.
    untrained : float or None
        Accuracy of the untrained model, if tested.
    """

    cluster: int
    accuracy: float
    untrained: float | None = None


@dataclass(frozen=True, eq=False)
class TasksTested(_Record):
    """At the end of a step, clients tested their models on all steps so far.

    Reported by runs with ``eval-tasks``, also at the end of the run. No client has trained on the
    next step, which measures forward transfer.

    Attributes
    ----------
    time, updates : float, int
        Time of the models, and number of updates applied by then.
    step : int
        The completed step, the last one trained on.
    clusters : int
        Number of cluster models at that time.
    per_client : Mapping[str, Mapping[int, TaskScore]]
        Results by client id and step, for the clients that answered. Steps without data are
        missing.
    asked : int
        Number of clients online at that time.
    measure : Measure
        Measure of the scores.
    """

    time: float
    updates: int
    step: int
    clusters: int
    per_client: Mapping[str, Mapping[int, TaskScore]]
    asked: int
    measure: Measure = ACCURACY


@dataclass(frozen=True, eq=False)
class ClustersScored(_Record):
    """The server tested each cluster's model on a test set.

    Reported with an evaluation if the server has a test set per distribution; cluster k corresponds
    to distribution k.

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
        return fmean(self.accuracies.values())


class ClusterChange(StrEnum):
    """Kinds of changes of clients and clusters; see `ClustersChanged`."""

    ASSIGN = "assign"
    """A client without a cluster was assigned one, or several with weights."""
    MOVE = "move"
    """A client moved to another cluster, or its weights changed."""
    SPLIT = "split"
    """A cluster was replaced by several."""
    MERGE = "merge"
    """Several clusters were replaced by one."""
    FOUND = "found"
    """A new cluster was added."""
    RETIRE = "retire"
    """A cluster without members was removed."""


@dataclass(frozen=True, eq=False)
class ClustersChanged(_Record):
    """Clients or clusters changed, by any operation of `Clusters`.

    Attributes
    ----------
    change : ClusterChange
        The operation, such as a split or a merge.
    memberships : Mapping[str, Mapping[int, float]]
        New cluster weights (positive, sum 1) of the clients that changed.
    gone : tuple[int, ...]
        Removed clusters: the parent of a split, the sources of a merge.
    made : tuple[int, ...]
        New clusters: the children of a split, the target of a merge. Ids are never reused.
    score, threshold : float
        Measured value and passed bound; NaN if none.
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


@dataclass(frozen=True, eq=False)
class DataChanged(_Record):
    """Clients' data changed to another step: drift, or the next task.

    Attributes
    ----------
    client : str or None
        The client; None for all clients.
    step : int
        The new step.
    """

    time: float
    updates: int
    client: str | None
    step: int


@dataclass(frozen=True)
class MeasureSchema:
    """Declaration of a method's own measure.

    It defines rows and SQL view of the run store, the summary line, the dashboard's table, a CSV
    file and a figure.

    Attributes
    ----------
    name : str
        Short name, an identifier: part of file names and of the view ``measure_<name>``.
    title : str
        Name of the measure in tables and figures.
    columns : tuple[str, ...]
        The values of an event. With `per` there is one column, which maps keys to values.
    value : str
        Summarised and drawn column; required if several columns are numbers, by default the last.
    unit : str
        Unit of the value, for axis labels; empty for a plain number.
    per : str
        Keys of the column: ``"client"`` or ``"cluster"``; empty for single values.
    of : str
        Column with the total, if the value is to be shown as a share of it.
    summary : str
        Aggregation of a run's values to one number (or one per key): ``"last"``, ``"mean"`` or
        ``"max"``. ``"column"`` is the last value, as a key of the summary named after its column;
        ``"shares"`` is the mean share and how often it is large, as keys named after the measure;
        ``"none"`` leaves it out of the summary.
    figure : str
        Figure: values over time as ``"line"``, ``"steps"`` or ``"points"``, or distribution of
        ``"shares"``; ``"none"`` for no figure.

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
        object.__setattr__(self, "_names_value", bool(self.value))
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
            (self.figure, ("line", "steps", "points", "shares", "none")),
        ):
            if value not in allowed:
                raise ValueError(f"{self.name}: expected one of {allowed}, not {value!r}.")
        if self.of not in ("", *self.columns):
            raise ValueError(f"{self.name} has no column {self.of}.")
        if "shares" in (self.summary, self.figure) and not self.of:
            raise ValueError(f"{self.name}: shares need `of`, the column with the total.")

    def check(self, values: Mapping[str, Any]) -> None:
        """Check the values of an event beside the summarised one.

        Raises
        ------
        ValueError
            The columns are others.
        UserError
            A column is a list; or there are several numbers and no `value`.
        """
        if set(values) != set(self.columns):
            raise ValueError(f"{self.name} has the columns {self.columns}, not {tuple(values)}.")
        for column in self.columns:
            value = values[column]
            if column == self.value or value is None or isinstance(value, str):
                continue
            if not _is_number(value):
                raise UserError(
                    f"The measure {self.name} must have a number or a text as {column}; got "
                    f"{printable(value, 60)}."
                )
            if not getattr(self, "_names_value", True):
                raise UserError(
                    f"The measure {self.name} has several numbers: declare which one is "
                    f'summarised, e.g. value="{self.value}".'
                )

    @property
    def heading(self) -> str:
        """The title, with a capital letter."""
        return self.title[:1].upper() + self.title[1:]

    @property
    def file(self) -> str:
        """Name of the figure's file, without its suffix."""
        return self.name if self.figure == "shares" else f"measure-{self.name}"


@dataclass(frozen=True, eq=False)
class Measured(_Record):
    """A measurement of a method.

    Attributes
    ----------
    schema : MeasureSchema
        Declaration of the measure.
    values : Mapping[str, Any]
        Column to its value: a number, a text, or with `MeasureSchema.per` a mapping from clients
        or clusters to numbers or tuples of numbers.

    Raises
    ------
    ValueError
        The columns are not those of the schema.
    UserError
        A summarised value is not a number; also as for :meth:`MeasureSchema.check`.
    """

    time: float
    updates: int
    schema: MeasureSchema
    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.schema.check(self.values)
        measured = self.value.values() if self.schema.per else (self.value,)
        texts = (str,) if self.schema.summary in ("last", "column", "none") else ()
        for value in measured:
            if value is None or isinstance(value, (tuple, *texts)) or _is_number(value):
                continue
            raise UserError(
                f"The measure {self.name} must have a number as {self.schema.value}; got "
                f"{printable(value, 60)}."
            )

    @property
    def name(self) -> str:
        """Short name of the measure."""
        return self.schema.name

    @property
    def value(self) -> Any:
        """The value of the summarised and drawn column."""
        return self.values[self.schema.value]

    def numbers(self) -> dict[Any, float]:
        """Return the value as numbers by client or cluster, a single one by an empty key.

        With `MeasureSchema.of` they are shares of that column. None values are left out.
        """
        whole = self.values[self.schema.of] if self.schema.of else 1.0
        values = self.value if self.schema.per else {"": self.value}
        return {key: float(value / whole) for key, value in values.items() if value is not None}


def _is_number(value: Any) -> bool:
    """Return whether a value is a single number, including numpy's; text never is."""
    if isinstance(value, int | float):
        return True
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str) and not getattr(value, "shape", ())


class Ending(StrEnum):
    """Why a run ended."""

    LIMIT = "limit"
    """The planned number of updates, or the time limit."""
    TARGET = "target"
    """The target accuracy."""
    AT_REST = "at-rest"
    """Quiescence: nothing could change any more."""
    INTERRUPTED = "interrupted"
    """The user, or a signal."""
    NO_CLIENTS = "no-clients"
    """All clients are gone."""
    USELESS_REPLIES = "useless-replies"
    """Too many replies in a row were unusable."""

    @property
    def is_complete(self) -> bool:
        """Whether the run reached its planned end."""
        return self in (Ending.LIMIT, Ending.TARGET, Ending.AT_REST)


@dataclass(frozen=True, eq=False)
class Warned(_Record):
    """A warning that matters for the interpretation of the results.

    Attributes
    ----------
    text : str
        One line; a run reports each text once.
    """

    time: float
    text: str


@dataclass(frozen=True, eq=False)
class RunEnded(_Record):
    """The run ended.

    Attributes
    ----------
    reason : str
        One line with the reached limit or the reason of an early end.
    ending : Ending
        Machine-readable kind of end.
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
    | VersionDecided
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
    | Warned
    | RunEnded
)
Observer = Callable[[Event], None]

_METHODS = {
    kind: "on" + re.sub("[A-Z]", lambda capital: f"_{capital[0].lower()}", kind.__name__)
    for kind in get_args(Event)
}
"""Names of handler methods by class of event: UpdateApplied to on_update_applied."""


class EventHandler:
    """An observer with a method per handled kind of event; other events are ignored.

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
        """Pass an event to its method, and return its result; None without a method."""
        method = getattr(self, _METHODS[type(event)], None)
        return method(event) if method is not None else None


def ignore(event: Event) -> None:
    """Observe nothing."""


# -----------------------------------------------------------------------------
# Membership of clients in clusters, tracked by the events of a run.
# -----------------------------------------------------------------------------


Composition = Counter[int | None]
"""Number of a cluster's members by true group."""


@dataclass(frozen=True)
class Placement:
    """A client's clusters from a time on.

    Attributes
    ----------
    time : float
        Time in seconds from which the weights hold.
    weights : Mapping[int, float]
        Weights by cluster: positive, sum 1. Empty if its cluster was removed without another.
    """

    time: float
    client: str
    weights: Mapping[int, float]

    @property
    def home(self) -> int | None:
        """The cluster with the largest weight; None if there is none."""
        return home(self.weights)


def home(weights: Mapping[int, float]) -> int | None:
    """Return the cluster with the largest weight, the smallest id at ties; None if empty."""
    if len(weights) == 1:
        return next(iter(weights))
    return min(weights, key=lambda cluster: (-weights[cluster], cluster), default=None)


class Membership(EventHandler):
    """The clusters' current members, as an observer of the run.

    A client of several clusters counts in the one with the largest weight.

    Attributes
    ----------
    weights : dict[str, Mapping[int, float]]
        Cluster weights by client id, for clients with a cluster.
    groups : dict[str, int or None]
        True group by client id; under drift that of the latest evaluation.
    composition : dict[int, Counter]
        Number of members per true group, by cluster with members; None counts unknown groups.
    existing : set[int]
        Existing clusters, with or without members.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Mapping[int, float]] = {}
        self.groups: dict[str, int | None] = {}
        self.composition: dict[int, Composition] = {}
        self.existing: set[int] = set()
        # Numbers of clients with cluster and known group, and of those in their cluster's majority
        # group; updated incrementally.
        self._known = 0
        self._agreeing = 0

    @property
    def clusters(self) -> dict[str, int]:
        """Cluster with the largest weight by client id."""
        homes = ((client, home(weights)) for client, weights in self.weights.items())
        return {client: cluster for client, cluster in homes if cluster is not None}

    def observe(self, event: Event) -> list[Placement]:
        """Process an event.

        Returns
        -------
        list[Placement]
            Clients whose clusters or weights changed.
        """
        return self(event) or []

    def on_client_joined(self, event: ClientJoined) -> None:
        """Record the true group of a client."""
        self._observe_group(event.client, event.group)

    def on_evaluated(self, event: Evaluated) -> None:
        """Record changed true groups."""
        for client, group in event.groups.items():
            if group != self.groups.get(client):
                self._observe_group(client, group)

    def purity(self) -> float | None:
        """Return the clusters' current purity; None without known groups."""
        return self._agreeing / self._known if self._known else None

    def sizes(self) -> dict[int, int]:
        """Return the number of members of each non-empty cluster."""
        return {cluster: self.composition[cluster].total() for cluster in sorted(self.composition)}

    def _observe_group(self, client: str, group: int | None) -> None:
        cluster = home(self.weights.get(client, {}))
        if cluster is not None:
            self._count(cluster, client, -1)
        self.groups[client] = group
        if cluster is not None:
            self._count(cluster, client, +1)

    def on_clusters_changed(self, event: ClustersChanged) -> list[Placement]:
        """Move the named clients and those of removed clusters."""
        self.existing.update(event.made)
        placements = [
            self._place(event.time, client, dict(weights))
            for client, weights in event.memberships.items()
            if self.weights.get(client) != weights
        ]
        gone = set(event.gone)
        self.existing -= gone
        # No client can be in a missing cluster.
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
            # In a resumed run, earlier events may be unknown.
            self.weights.pop(client, None)
        self.existing.update(weights)
        return Placement(time, client, weights)

    def _count(self, cluster: int, client: str, change: int) -> None:
        """Add a client to the composition of a cluster, or remove it."""
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
    """Return whether to log a change of clusters: all except initial clusters and moves."""
    if event.change in (ClusterChange.SPLIT, ClusterChange.MERGE):
        return True
    return event.change in (ClusterChange.FOUND, ClusterChange.RETIRE) and event.updates > 0


def change_line(event: ClustersChanged) -> str:
    """Describe a change of clusters in one line, with the number of clients where known."""
    sizes = Counter(home(weights) for weights in event.memberships.values())
    made = ", ".join(f"{k} ({sizes[k]})" if sizes else str(k) for k in event.made)
    gone = ", ".join(map(str, event.gone))
    # "cluster 2 → clusters 3 (2), 4 (1)", "clusters 3, 4 → cluster 5 (3)", "new cluster 6".
    before = f"cluster{'' if len(event.gone) == 1 else 's'} {gone}"
    after = f"cluster{'' if len(event.made) == 1 else 's'} {made}"
    what = f"{before} → {after}" if gone and made else f"new {after}" if made else f"{before} ended"
    return f"{what} at update {event.updates}"
