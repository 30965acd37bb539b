"""CSAFL: groups by direction and latency, and windows of time in which they update.

Zhang et al., "CSAFL: A Clustered Semi-Asynchronous Federated Learning Framework", IJCNN 2021. All
clients pre-train the initial model w0 once, and spectral clustering on latencies and cosines of
their updates makes groups (Algorithms 3 and 4). Then a communication round is a time budget: K
clients are picked at random and update the models of their groups again and again until it is
spent (Algorithm 2), each at once when it is done. After an update that is too stale the members of
its group update together once.

The variants of the paper's Table II are the same loop with parts switched: `update` and `grouping`.

In Algorithm 2 staleness is compared with the threshold before a client trains (line 15), so that no
trained update is ever dropped: one that is late by more than the threshold is mixed in like any
other, and then its group's members, when all are free, train from the same model (line 17).
``stale=dropped`` is the other reading, in which the check is of the arrival and `ModelUpdates`
(line 19) is left out for it.

What the paper leaves open, or lost, is read so: what is not back when the budget is spent does not
count; a client is idle while it waits for others before or after updates that are made together. A
client's latency for the grouping is the mean of its pre-training's, as in section IV-B3, where the
grid knows its devices; on real devices it is the one that the server measures. A client that joins
later pre-trains in its first window, and goes to the group whose mean direction its update has the
largest cosine with. A synchronous update that the budget ends is the mean of the members that are
back; ``unfinished=dropped`` leaves it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from logging import getLogger
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import pdist, squareform

from raceme.core.clients import Client
from raceme.core.clusters import Clusters, Model, cosine, cosines, parts_of, unit
from raceme.core.errors import UserError
from raceme.core.events import Measured, MeasureSchema
from raceme.core.messages import ARRAYS, LOCAL_EPOCHS, LOCAL_STEPS, Vector
from raceme.core.options import SECONDS, option, with_defaults
from raceme.core.requests import InFlight, InvalidReplyError, Outcome, Request, Update
from raceme.core.scheduling import InRounds, Scheduler, SelectionContext, sample, then
from raceme.core.strategy import Method, Needs, Variant, average_by_cluster
from raceme.strategies.shared import contribution, partition

# -----------------------------------------------------------------------------
# Windows: time is cut into stretches in which some clients work again and again.
# -----------------------------------------------------------------------------


log = getLogger("raceme")

_HOPELESS_WINDOWS = 3
"""Windows in a row in which work was given and none was done, after which none ever will be."""

Members = Callable[[Sequence[Client], np.random.Generator], Sequence[Client]]
"""Chooses the clients of a window: from the online clients, with a generator."""
GroupOf = Callable[[str], int | None]
"""Returns the group in which a client waits for others; None for a client without one."""
Idled = Callable[[str, int, float], None]
"""Told, when a window ends, how long clients waited: client, number of the window, seconds."""


@dataclass
class WindowState:
    """A window of time.

    Attributes
    ----------
    number : int
        Number of the window, from 1; 0 before the first.
    ends_at : float
        When it ends; 0 before the first.
    members : dict[str, bool]
        Clients that take part in it.
    open : dict[str, int]
        Members that work, to the number of their task.
    gathering : dict[int, bool]
        Groups whose members wait for each other, to update together.
    joint : dict[int, int]
        Tasks of updates that are made together, to their group.
    held : list[Update]
        Updates that came back and wait for those of the same group.
    waiting : dict[str, float]
        Since when a member has waited for others.
    waited : dict[str, float]
        How long it has waited in this window before that, in seconds.
    done : int
        Updates of this window so far.
    fruitless : int
        Windows in a row, up to the last, in which no client was done before the end.
    """

    number: int = 0
    ends_at: float = 0.0
    members: dict[str, bool] = field(default_factory=dict)
    open: dict[str, int] = field(default_factory=dict)
    gathering: dict[int, bool] = field(default_factory=dict)
    joint: dict[int, int] = field(default_factory=dict)
    held: list[Update] = field(default_factory=list)
    waiting: dict[str, float] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)
    done: int = 0
    fruitless: int = 0


IDLE = MeasureSchema(
    "idle",
    "how long a client waited for others in a window",
    ("client", "window", "seconds", "budget"),
    value="seconds",
    unit="s",
    of="budget",
    summary="shares",
    figure="shares",
)
"""One event for every client that took part in a window; one that never waited has 0 seconds."""


def _alone(client: str) -> int | None:
    return None


def _ignore(client: str, window: int, seconds: float) -> None:
    """Do nothing."""


class InWindows(Scheduler):
    """Time is cut into windows; in each, some clients work again and again until it ends.

    A client's budget in a window is its length: what is not back by its end is given up. Updates
    are acted on at once, but for those that a group makes together: its members first wait until
    all of them are free, then all train, and what they bring is acted on when the last is back, or
    when the window ends.

    Parameters
    ----------
    budget : float
        Length of a window in seconds.
    members : Callable
        Chooses the clients of a window: from the online clients, with a generator.
    group_of : Callable, optional
        Returns the group in which a client waits for others.
    together : bool
        All updates are made together; else those of a group after :meth:`gather`.
    idled : Callable, optional
        Told at the end of each window how long each of its members waited for others.
    """

    state: WindowState
    timeout_reason: ClassVar[str] = "its window ended first"
    backs_off_when_late: ClassVar[bool] = False

    def __init__(
        self,
        budget: float,
        members: Members,
        group_of: GroupOf = _alone,
        together: bool = False,
        idled: Idled = _ignore,
    ) -> None:
        self._budget, self._members, self._group_of = budget, members, group_of
        self._together, self._idled = together, idled
        self.state = WindowState()

    # What a method may say and ask.

    def gather(self, group: int) -> None:
        """Let the members of a group make their next updates together."""
        self.state.gathering[group] = True

    def is_joint(self, update: Update) -> bool:
        """Return whether an update that was released is one of several made together."""
        return update.task.number in self.state.joint

    @property
    def is_open(self) -> bool:
        """Whether a window is under way: else, what is released is not of all members."""
        return bool(self.state.members)

    @property
    def rounds(self) -> int:
        """Windows that are over."""
        return self.state.number - bool(self.state.members)

    # Selection.

    def choose(self, moment: SelectionContext) -> Sequence[Client]:
        """Return the window's members that are to work; begin a window if none is under way."""
        state = self.state
        if moment.now >= state.ends_at and not moment.greeting:
            online = moment.fleet.online()
            if online:
                chosen = self._members(online, moment.rng)
                number, fruitless = state.number + 1, state.fruitless
                self.state = state = WindowState(
                    number,
                    moment.now + self._budget,
                    {client.client_id: True for client in chosen},
                    fruitless=fruitless,
                )
        ready = [c for c in moment.idle.ready(moment.now) if c.client_id in state.members]
        together: dict[int, list[Client]] = {}
        alone = []
        for client in ready:
            group = self._group_of(client.client_id)
            if group is None or not (self._gathers(group) or self._is_under_way(group)):
                self._end_wait(client.client_id, moment.now)
                alone.append(client)
            else:
                state.waiting.setdefault(client.client_id, moment.now)
                together.setdefault(group, []).append(client)
        return [*alone, *self._that_start(together, moment.now)]

    def _that_start(self, together: dict[int, list[Client]], now: float) -> list[Client]:
        """Return the members of groups of which all are free now."""
        state, starting = self.state, []
        busy = {self._group_of(client) for client in state.open}
        for group, clients in together.items():
            if group in busy or self._is_under_way(group):
                continue
            for client in clients:
                self._end_wait(client.client_id, now)
            starting += clients
        return starting

    def sent(self, task: InFlight, now: float) -> None:
        """Note that a client works, and whether it does so together with others."""
        self.state.open[task.client] = task.number
        group = self._group_of(task.client)
        if group is not None and self._gathers(group):
            self.state.joint[task.number] = group

    # Updates.

    def accept(self, update: Update, now: float) -> Sequence[Update]:
        """Act on an update of this window at once, unless its group makes updates together."""
        state, client = self.state, update.task.client
        if state.open.get(client) != update.task.number:
            raise InvalidReplyError("it came after its window was over")
        del state.open[client]
        state.done += 1
        group = state.joint.get(update.task.number)
        if group is None:
            return [update]
        state.held.append(update)
        state.waiting[client] = now
        return self._released(group)

    def lost(self, task: InFlight, now: float) -> Sequence[Update]:
        """Note that a member has nothing to do."""
        state = self.state
        if state.open.get(task.client) != task.number:
            return []
        del state.open[task.client]
        group = state.joint.pop(task.number, None)
        return [] if group is None else self._released(group)

    def left(self, client: str, now: float) -> Sequence[Update]:
        """Drop a client that left."""
        state = self.state
        self._end_wait(client, now)
        number = state.open.pop(client, None)
        group = None if number is None else state.joint.pop(number, None)
        return [] if group is None else self._released(group)

    def wake_at(self) -> float:
        """Return when the window ends; infinity if none is open."""
        return self.state.ends_at if self.state.members else math.inf

    def wake(self, now: float) -> tuple[Collection[int], Sequence[Update]]:
        """End the window: what is not back by now is not counted."""
        state = self.state
        late, released = list(state.open.values()), state.held
        state.fruitless = state.fruitless + 1 if late and not state.done else 0
        if state.fruitless == 1:
            log.warning(
                "No client was done within window %d: is the budget of %g s too short?",
                state.number,
                self._budget,
            )
        for client in list(state.waiting):
            self._end_wait(client, now)
        for client in state.members:
            self._idled(client, state.number, state.waited.get(client, 0.0))
        # Which updates were made together is still asked of those that are released here.
        state.members, state.open, state.held, state.gathering = {}, {}, [], {}
        return late, released

    def hopeless(self) -> str:
        """Return that the budget is too short, when no client was ever done within it."""
        if self.state.fruitless < _HOPELESS_WINDOWS:
            return ""
        return (
            f"no update fits into the budget of {self._budget:g} s: in {self.state.fruitless} "
            "windows in a row no client was done before the end: it must be longer"
        )

    # Groups that update together.

    def _gathers(self, group: int) -> bool:
        """Return whether a group's next updates are made together."""
        return self._together or group in self.state.gathering

    def _is_under_way(self, group: int) -> bool:
        """Return whether members of a group are making updates together."""
        state = self.state
        return any(state.joint.get(number) == group for number in state.open.values())

    def _released(self, group: int) -> list[Update]:
        """Return the updates that a group has made together, if all are back."""
        state = self.state
        if self._is_under_way(group):
            return []
        released = [u for u in state.held if state.joint[u.task.number] == group]
        state.held = [u for u in state.held if state.joint[u.task.number] != group]
        state.gathering.pop(group, None)
        return released

    def _end_wait(self, client: str, now: float) -> None:
        """Count how long a client has waited, if it has."""
        state = self.state
        if client in state.waiting:
            waited = now - state.waiting.pop(client)
            state.waited[client] = state.waited.get(client, 0.0) + waited


# -----------------------------------------------------------------------------
# CSAFL: groups by direction and latency, and windows of time in which they update.
# -----------------------------------------------------------------------------


UPDATES = ("semi-asynchronous", "asynchronous", "synchronous")
GROUPINGS = ("spectral", "random", "none")


@dataclass(frozen=True)
class CSAFLParameters:
    """Hyper-parameters of CSAFL; the paper's are lost, but for the budget."""

    update: str = option("semi-asynchronous", "how the members of a group update", among=UPDATES)
    grouping: str = option("spectral", "how clients are grouped", among=GROUPINGS)
    groups: int = option(4, "m: number of groups", low=1)
    budget: float = option(10.0, "T: time budget of a communication round", unit=SECONDS, above=0)
    picked: int = option(20, "K: clients picked at random for a communication round", low=1)
    threshold: int = option(5, "staleness δ beyond which a group updates together", low=0)
    stale: str = option(
        "mixed",
        "treatment of an update beyond the threshold: mixed in like any other (Algorithm 2), or "
        "dropped",
        among=("mixed", "dropped"),
    )
    rho: float = option(0.1, "ρ: weight of the latency relative to the cosines", low=0)
    width: float = option(0.0, "width of the Gaussian kernel (0: the median distance)", low=0)
    pretrain_epochs: int = option(2, "passes over the samples in pre-training", low=1)
    unfinished: str = option(
        "averaged",
        "treatment of a synchronous update if members are missing at the end of the budget: the "
        "others are averaged, or it is dropped",
        among=("averaged", "dropped"),
    )
    mixing: str = option(
        "model",
        "part of an update mixed into its group: the share of the model, or of its change",
        among=("model", "change"),
    )

    def participants(self, clients: int) -> int:
        """Return how many of so many clients are picked for a communication round."""
        return min(self.picked, clients)


@dataclass
class CSAFLState:
    """What CSAFL knows beside its groups.

    Attributes
    ----------
    initial : Vector
        w0: weights of the initial model. Shape (d,).
    grouped : bool
        Whether clients have been divided into groups.
    directions : dict[int, Vector]
        Mean of the unit updates of each group's members, for clients that join later.
    """

    initial: Vector
    grouped: bool = False
    directions: dict[int, Vector] = field(default_factory=dict)


class CSAFL(Method):
    """Groups by update direction and latency, semi-asynchronous in time windows (CSAFL)."""

    parameters_type = CSAFLParameters
    state_type = CSAFLState
    parameters: CSAFLParameters
    state: CSAFLState

    @property
    def needs(self) -> Needs:
        """Requirements of the method."""
        return Needs(bases=True, latencies=True, fits_clients=self._check_clients)

    def scheduler(self) -> Scheduler:
        """Pre-train all clients in one round, then work in windows."""
        self.windows = InWindows(
            self.parameters.budget,
            self._pick,
            self._group_of,
            together=self.parameters.update == "synchronous",
            idled=self._idled,
        )
        return then(InRounds(), self.windows, lambda: self.state is None or self.state.grouped)

    def _check_clients(self, clients: int) -> None:
        """Raise UserError if there are more groups than clients."""
        if self.parameters.grouping != "none" and self.parameters.groups > clients:
            raise UserError(
                f"csafl makes {self.parameters.groups} groups, and there are only {clients} "
                "clients: take fewer groups or more clients."
            )

    def initialize(self, vector: Vector) -> None:
        """Start from w0; only spectral clustering needs pre-training."""
        self.clusters = Clusters({0: Model(vector)})
        self.state = CSAFLState(vector.copy(), grouped=self.parameters.grouping != "spectral")

    # Algorithms 3 and 4: grouping clients.

    def request_for(self, client: str) -> Request:
        """Let a client without a group pre-train w0, and others train their group's model."""
        if self.state.grouped and self.clusters.is_placed(client):
            return Request(client)
        settings = {LOCAL_EPOCHS: self.parameters.pretrain_epochs, LOCAL_STEPS: 0}
        w0 = self.record_of(self.state.initial)
        return Request(client, models=(), arrays={ARRAYS: w0}, settings=settings)

    def _form_groups(self, updates: Sequence[Update]) -> list[Outcome]:
        """Group the clients that have pre-trained: cosines and latency, spectral clustering."""
        clients = [update.task.client for update in updates]
        deltas = np.stack([self._change(update) for update in updates])
        seconds = np.array([latency_of(update) for update in updates])
        count = min(self.parameters.groups, len(clients))
        if count < self.parameters.groups:
            log.warning(
                "Only %d clients have pre-trained, which limits the number of groups.", count
            )
        weights = affinity_of(deltas, seconds, self.parameters.rho, self.parameters.width)
        labels = np.zeros(len(clients), np.int64)
        if count > 1:
            labels = partition(weights, count, seed=int(self.rng.integers(2**31)))
        for part, group in enumerate(self.clusters.split(0, parts_of(clients, labels))):
            members = deltas[labels == part]
            self.state.directions[group] = np.mean([unit(delta) for delta in members], axis=0)
        self.state.grouped = True
        return [Outcome(self.clusters.main(client), staleness=0, weight=0.0) for client in clients]

    def _place(self, update: Update) -> Outcome:
        """Let a client that came later join the group of the nearest direction."""
        delta, directions = self._change(update), self.state.directions
        group = max(directions, key=lambda group: cosine(directions[group], delta))
        self.clusters.assign(update.task.client, group)
        return Outcome(group, staleness=0, weight=0.0)

    def _change(self, update: Update) -> Vector:
        return self.compared(np.asarray(update.vector - self.state.initial))

    def _group_at_random(self, clients: Sequence[Client]) -> None:
        """Deal clients without a group out to equally large groups, for R-FedAvg."""
        if 0 in self.clusters.models:
            count = min(self.parameters.groups, len(clients))
            labels = self.rng.permutation(np.arange(len(clients)) % count)
            self.clusters.split(0, parts_of([client.client_id for client in clients], labels))
            return
        for client in clients:
            if not self.clusters.is_placed(client.client_id):
                group = int(self.rng.choice(list(self.clusters.models)))
                self.clusters.assign(client.client_id, group)

    # Algorithm 2: training.

    def _pick(self, online: Sequence[Client], rng: np.random.Generator) -> Sequence[Client]:
        """Pick K clients of all, whatever their group."""
        if self.parameters.grouping == "random":
            self._group_at_random(online)
        return sample(online, self.parameters.picked, rng)

    def _idled(self, client: str, window: int, seconds: float) -> None:
        """Report how long a client has waited for others in a window."""
        budget = self.parameters.budget
        values = {"client": client, "window": window, "seconds": seconds, "budget": budget}
        self.report(Measured(self.now(), self.progress.updates, IDLE, values))

    def _group_of(self, client: str) -> int | None:
        return self.clusters.main(client) if self.clusters.is_placed(client) else None

    def aggregate(self, updates: Sequence[Update]) -> list[Outcome]:
        """Form the groups first; later mix each update in at once, or average those of a group."""
        if not self.state.grouped:
            return self._form_groups(updates)
        if self.parameters.unfinished == "dropped" and not self.windows.is_open:
            return [Outcome(self.clusters.main(u.task.client), u.staleness, 0.0) for u in updates]
        joint = [update for update in updates if self.windows.is_joint(update)]
        averaged = average_by_cluster(self.clusters, joint)
        by_client = {u.task.client: a for u, a in zip(joint, averaged, strict=True)}
        single = super().aggregate
        return [by_client.get(u.task.client) or single([u])[0] for u in updates]

    def on_update(self, update: Update) -> Outcome:
        """Mix one update in with its client's share of the group's samples (Algorithm 2, line 19).

        ``w_g ← w_g + n_i / Σ n_j · (w_i − w_g)``, the sum over the members picked for the window.
        An update of a staleness beyond δ also lets the members update together next (line 17).
        """
        client = update.task.client
        if not self.clusters.is_placed(client):
            return self._place(update)
        group = self.clusters.main(client)
        model = self.models[group]
        staleness = update.staleness
        is_semi = self.parameters.update == "semi-asynchronous"
        if is_semi and staleness > self.parameters.threshold:
            self.windows.gather(group)
            if self.parameters.stale == "dropped":
                return Outcome(group, staleness, weight=0.0)
        share = update.num_examples / max(self._examples(group), update.num_examples)
        if self.parameters.mixing == "model":
            model.mix(update.vector, share)
        else:
            mixed = update.vector - model.vector
            step = contribution(update.delta, mixed, self.trainable)
            model.move(np.float32(share) * step)
        return Outcome(group, staleness, share)

    def _examples(self, group: int) -> int:
        """Return Σ n_j over the members of a group that take part in this window."""
        fleet, picked = self.progress.fleet, self.windows.state.members
        return sum(fleet.counted(c) for c in picked if self._group_of(c) == group)


def latency_of(update: Update) -> float:
    """Return a client's update latency: its mean (section IV-B3) if known, else as measured.

    Returns
    -------
    float
        Seconds, ``D (a + 1/μ)`` for the computation and the update's size by the rate for the
        transfer.
    """
    measured = update.arrived_at - update.task.sent_at
    return measured if update.task.expected is None else update.task.expected


def affinity_of(
    deltas: NDArray[np.float32], seconds: NDArray[np.float64], rho: float, width: float = 0.0
) -> NDArray[np.float64]:
    """Return how alike clients are: a Gaussian kernel of rows of latency and cosines.

    Row i is ``[ρ z_i, cos(i, 1), …, cos(i, n)]``, with z_i the latency in standard deviations from
    the mean; the affinity of two clients is ``exp(−‖row_i − row_j‖² / (2 σ²))``.

    Parameters
    ----------
    deltas : NDArray[np.float32]
        An update per client. Shape (n, d).
    seconds : NDArray[np.float64]
        A latency per client. Shape (n,).
    rho : float
        ρ, weight of the latency.
    width : float
        σ; 0 for the median distance of two rows.

    Returns
    -------
    NDArray[np.float64]
        Shape (n, n), symmetric, 1 on the diagonal.
    """
    z = (seconds - seconds.mean()) / (seconds.std() or 1.0)
    rows = np.column_stack([rho * z, cosines(deltas, deltas)])
    distances = pdist(rows)
    sigma = width or (float(np.median(distances)) if len(distances) else 0.0) or 1.0
    return np.asarray(np.exp(-np.square(squareform(distances)) / (2.0 * sigma**2)))


def _variant(summary: str, **defaults: str) -> Variant[CSAFL]:
    return Variant(CSAFL, with_defaults(CSAFLParameters, **defaults), summary)


TFedAvg = _variant(
    "CSAFL's baseline: synchronous updates, one group (T-FedAvg).",
    update="synchronous",
    grouping="none",
)
TAFedAvg = _variant(
    "CSAFL's baseline: asynchronous updates, one group (TA-FedAvg).",
    update="asynchronous",
    grouping="none",
)
GFedAvg = _variant("CSAFL with synchronous updates (G-FedAvg).", update="synchronous")
GAFedAvg = _variant("CSAFL with asynchronous updates (GA-FedAvg).", update="asynchronous")
RFedAvg = _variant("CSAFL with random groups (R-FedAvg).", grouping="random")
NoGFedAvg = _variant("CSAFL without groups (NoG-FedAvg).", grouping="none")
