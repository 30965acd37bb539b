"""Panicle: clusters that form at once, and that repair themselves.

Our own; a panicle is a branched raceme. Every client, slow or fast, begins with two *probes*: a few
mini-batches from the initial model w0. Directions of different clients are compared crosswise, the
first probe of one with the second of the other, so that the chance of mini-batches cancels out and
distances have an absolute scale: 0 for clients that are alike, 1 for unrelated ones (`probes.py`).
As soon as half of the fleet has answered, the partition with the highest silhouette score is looked
for, and taken if that reaches a level which does not depend on time, and is higher where groups are
small (`grouping.py`).

Whenever probes have been added, the same score may split clusters further, move clients, and merge
what is alike. A client whose updates suddenly grow is probed again, and placed anew if it does not
go where it went; where many have changed, all others are probed. Inside a cluster,
each update moves the model by the mean of all members' latest changes, the updating client's
renewed, so that no client owns the model by being fast; its share falls from CASA's to that of one
member as the cluster learns. What clients use is a mean of the model's last versions, and of a
member that is unlike the others some of its own latest model.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from raceme.core.clients import Client
from raceme.core.clusters import Clusters, Model
from raceme.core.messages import ARRAYS, Vector
from raceme.core.options import option
from raceme.core.requests import InFlight, Outcome, Request, Update
from raceme.core.strategy import InUse, Method, Needs
from raceme.flower.messages import Shelf
from raceme.strategies.panicle.probes import (
    HALVES,
    Examples,
    Labels,
    Probes,
    Sketcher,
    apartness,
    between,
    comes_from,
    decided,
    inside,
    least_score,
    nearest_group,
    own_share,
    parts_of_split,
    plan_reassignment,
    settings_of_probe,
    shown,
    silhouette,
    spread,
)
from raceme.strategies.shared import cluster_decay, contribution

# -----------------------------------------------------------------------------
# What can be set of Panicle, and switched off.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class PanicleParameters:
    """Hyper-parameters; each part can be switched off."""

    probe_steps: int = option(
        5, "mini-batches of a probe at most, of a tenth of a task (0: a whole task)", low=0
    )
    clustering: bool = option(True, "form clusters (false: one model for all)")
    level: float = option(
        0.45, "silhouette score from which on there are clusters", above=0, below=1
    )
    most: int = option(12, "clusters at most", low=1)
    reassign: bool = option(
        True, "split, move and merge after the clusters were formed", formerly="repair"
    )
    recheck: int = option(20, "own updates after which a client is probed again (0: never)", low=0)
    drift: bool = option(True, "probe clients again whose updates suddenly grow")
    together: bool = option(
        False, "let a cluster go on as it is if its members' data change the same way"
    )
    growth: float = option(2.0, "growth of an update that is sudden", above=1)
    alpha0: float = option(2.0, "α0 of a cluster's first updates: α0 / log2(members + 3)", above=0)
    ease: float = option(10.0, "updates per member after which the share has halved", above=0)
    forward: float = option(
        0.5, "share of what the model has moved meanwhile that an update keeps", low=0, high=1
    )
    stale: float = option(1.0, "power by which what was overtaken counts less (0: alike)", low=0)
    unbiased: bool = option(True, "let members count alike, however often they report")
    clip: float = option(3.0, "longest update, in medians of its cluster's (0: any)", low=0)
    average: float = option(0.1, "share of versions that a model in use averages", low=0, high=1)
    personalize: float = option(
        500.0,
        "samples from which a client uses its own model as far as it is unlike others (0: never)",
        low=0,
        formerly="own",
    )
    sketch: int = option(1024, "numbers of a direction that are kept (0: all)", low=0)
    exact_up_to: int = option(
        2000,
        "clients compared pair by pair; of a larger fleet so many, drawn at random, stand for all "
        "(0: all are compared)",
        low=0,
    )


# -----------------------------------------------------------------------------
# What a cluster's model was lately, on average: steadier than what it happens to be.
# -----------------------------------------------------------------------------


@dataclass
class Tail:
    """The average of a model's latest versions.

    Attributes
    ----------
    model : Model
        w̄: running mean of the latest versions.
    count : int
        Versions since it was begun.
    """

    model: Model
    count: int = 1


@dataclass
class ModelAverages:
    """Averages of the latest versions of each cluster's model, for the clients that use it.

    A single version leans towards the clients that reported last. The mean of the last tenth of
    all versions does not, and is hardly behind (suffix averaging: Rakhlin et al., ICML 2012).

    Attributes
    ----------
    tails : dict[int, Tail]
        Running average of each cluster's model, by cluster id.
    """

    tails: dict[int, Tail] = field(default_factory=dict)

    def take(self, cluster: int, vector: Vector, share: float, members: int) -> None:
        """Take a new version in: w̄ ← w̄ + (w − w̄) / max(1, min(share · n, m)).

        Parameters
        ----------
        cluster : int
            Id of the cluster that has the model.
        vector : Vector
            w: the new version. Shape (d,).
        share : float
            How much of the n versions so far is averaged over, about; 0: nothing is.
        members : int
            m: members of the cluster. An average over one update of each leans on none of them, and
            a longer one is of an older model.
        """
        tail = self.tails.get(cluster)
        if tail is not None:
            tail.count += 1
            tail.model.mix(vector, 1.0 / max(1.0, min(share * tail.count, members)))
        elif share:
            self.tails[cluster] = Tail(Model(vector.copy()))

    def restart(self, *clusters: int | None) -> None:
        """Begin anew: these have other members than before, or are no more."""
        for cluster in clusters:
            if cluster is not None:
                self.tails.pop(cluster, None)

    def instead_of(
        self, models: Mapping[int, Model], counters: NDArray[np.bool_] | None
    ) -> Mapping[int, Model]:
        """Return each cluster's average, or its model where there is none.

        Parameters
        ----------
        models : Mapping[int, Model]
            Latest cluster models, by cluster id.
        counters : NDArray[np.bool_], optional
            Numbers of a model of which a mean has no meaning, shape (d,): they are the model's.
        """
        shown = {}
        for cluster, model in models.items():
            shown[cluster] = tail.model if (tail := self.tails.get(cluster)) else model
            if counters is not None and tail:
                tail.model.copy_from(model.vector, counters)
        return shown


# -----------------------------------------------------------------------------
# The latest model of every member, so that none counts for more by reporting more often.
#
# As SAGA, and in federated learning CA2FL (Wang et al., ICLR 2024) and ACE (2025), remember each
# client's last contribution; here per cluster, and models instead of changes.
# -----------------------------------------------------------------------------


@dataclass
class ClientMemory:
    """Latest models, and their sum over each cluster.

    Attributes
    ----------
    models : MutableMapping[str, Vector]
        z_i of each client that has one. Shape (d,).
    homes : dict[str, int]
        The cluster that it counts in; a client that is in none is left out.
    totals : dict[int, Vector]
        Σ z_i over the clients that count in a cluster. Shape (d,).
    counts : dict[int, int]
        Number of clients in each of these sums.
    """

    models: MutableMapping[str, Vector] = field(default_factory=dict)
    homes: dict[str, int] = field(default_factory=dict)
    totals: dict[int, Vector] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # One of every client is too much for the memory of a large fleet.
        self.models = Shelf(self.models)

    def mean(self, cluster: int) -> Vector:
        """Return z̄ of a cluster in which a client has a model. Shape (d,)."""
        return np.asarray(self.totals[cluster] / np.float32(self.counts[cluster]))

    def counts_in(self, client: str, cluster: int) -> bool:
        """Return whether a client has a model that counts in a cluster."""
        return self.homes.get(client) == cluster

    def renew(self, client: str, cluster: int, vector: Vector) -> None:
        """Remember a member's latest model in place of its former one."""
        self.withdraw(client)
        self.models[client] = vector
        self._add(client, cluster)

    def withdraw(self, client: str) -> None:
        """Forget a client's latest model: it goes elsewhere, or has gone."""
        vector = self.models.pop(client, None)
        home = self.homes.pop(client, None)
        if vector is not None and home in self.totals:
            self.totals[home] -= vector
            self.counts[home] -= 1

    def recount(self, home: Callable[[str], int | None]) -> None:
        """Add all up anew where clients are now; those that are nowhere are left out."""
        self.homes, self.totals, self.counts = {}, {}, {}
        for client in self.models:
            cluster = home(client)
            if cluster is not None:
                self._add(client, cluster)

    def drop(self, cluster: int) -> None:
        """Forget an empty cluster."""
        self.totals.pop(cluster, None)
        self.counts.pop(cluster, None)

    def _add(self, client: str, cluster: int) -> None:
        vector = self.models[client]
        if cluster not in self.totals:
            self.totals[cluster], self.counts[cluster] = np.zeros_like(vector), 0
        self.homes[client] = cluster
        self.totals[cluster] += vector
        self.counts[cluster] += 1


# -----------------------------------------------------------------------------
# How far one update moves a cluster's model.
# -----------------------------------------------------------------------------


_UNDER_WAY = 7.5
"""Largest product of share, members and what is carried that was seen to be steady."""


def share_of(members: int, rounds: float, alpha0: float, ease: float) -> float:
    """Return the share α of an update: CASA's at first, that of one of the members in the end.

    ``max(1 / m, min(1, α0 / log2(m + 3)) / (1 + rounds / ease))``: a young cluster moves fast, and
    one that has learnt for long is a mean over all its members.

    Parameters
    ----------
    members : int
        m: number of members of the cluster, at least 1.
    rounds : float
        Updates per member that the cluster has learnt from.
    alpha0 : float
        α0: factor of the share, as in :func:`~raceme.strategies.shared.cluster_decay`.
    ease : float
        Rounds after which the first share has halved.
    """
    first = min(1.0, cluster_decay(members, 1.0, alpha0))
    return max(1.0 / max(1, members), first / (1.0 + rounds / ease))


def freshness(staleness: int, members: int, power: float) -> float:
    """Return by what an update's share is less because it is stale: ``max(1, s / m) ** -power``.

    Of members that are equally fast each is overtaken by the m - 1 others: that is no staleness
    yet. A client that takes five times as long is overtaken five times by all, and its model, mixed
    in with a whole share, would take the others back to where they were then.

    Parameters
    ----------
    staleness : int
        s: updates since the client was given its model, by all whose updates are counted.
    members : int
        m: how many these are.
    power : float
        0: staleness does not matter.
    """
    return float(max(1.0, staleness / max(1, members)) ** -power)


def calibration(alpha: float, members: int) -> float:
    """Return how much of a client's former change is taken back: 1 where α is one member's share.

    With a larger share the model moves on so far before a member reports again that its former
    change says less: 1 / (α m).
    """
    return min(1.0, 1.0 / (alpha * max(1, members)))


def carried(alpha: float, members: int, most: float) -> float:
    """Return how much of what the model has moved meanwhile is added to a member's model.

    0 mixes models in, which takes the model back towards where the member started; 1 adds changes,
    which overshoots where many members are under way at a time: at most 7.5 / (α m).

    Parameters
    ----------
    alpha : float
        α: share of the update in the cluster's model.
    members : int
        m: members of its cluster, all of which may be under way.
    most : float
        Upper bound of the result, whatever α and m are.
    """
    return min(most, _UNDER_WAY / (alpha * max(1, members)))


def cut(vector: Vector, delta: Vector, length: float, bound: float) -> Vector:
    """Return a client's model with its change cut to a length, if that is longer. Shape (d,).

    Parameters
    ----------
    vector, delta : Vector
        z, and z − w₀. Shape (d,).
    length : float
        ‖z − w₀‖, of its weights.
    bound : float
        Length at most; 0: any.
    """
    if not 0.0 < bound < length:
        return vector
    return np.asarray(vector - np.float32(1.0 - bound / length) * delta)


# -----------------------------------------------------------------------------
# Medians of numbers of which one changes at a time: kept in order, not sorted anew.
# -----------------------------------------------------------------------------


class RunningMedians:
    """A positive number of each client, in order within its cluster."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[int, float]] = {}
        self._ordered: dict[int, list[float]] = {}

    def put(self, client: str, cluster: int | None, length: float) -> None:
        """Set a client's number in a cluster; with no cluster, or 0, it has none."""
        before = self._of.pop(client, None)
        if before is not None:
            ordered = self._ordered[before[0]]
            del ordered[bisect_left(ordered, before[1])]
        if cluster is not None and length > 0.0:
            self._of[client] = cluster, length
            insort(self._ordered.setdefault(cluster, []), length)

    def median_of_others(self, client: str, cluster: int, fewest: int) -> float:
        """Return the median in a cluster without a client's own; 0 of fewer than `fewest`."""
        ordered = self._ordered.get(cluster, [])
        home, length = self._of.get(client, (None, 0.0))
        own = bisect_left(ordered, length) if home == cluster else len(ordered)
        count = len(ordered) - (home == cluster)
        if count < fewest:
            return 0.0

        def at(place: int) -> float:
            return ordered[place if place < own else place + 1]

        half = count // 2
        return at(half) if count % 2 else (at(half - 1) + at(half)) / 2


# -----------------------------------------------------------------------------
# The drift detector: what clients' updates have been like, and when many of them change at once.
# -----------------------------------------------------------------------------


_LONG = 1.5
"""Medians of the others' updates below which no update is suddenly long."""
_KEPT = 0.7
"""Share of the typical length of a client's changes that its next one leaves."""
_MANY = 8
"""An eighth of the clients whose data have changed speaks for all."""
_FEWEST_CHANGES = 2
_SOON = 2
"""Updates per client within which changes count as one event."""
FEWEST_LENGTHS = 3
"""Other clients whose updates tell how long one may be."""
_FEWEST_SETTLED = 8
"""Clients that are looked at before all of the fleet have answered."""
PATIENCE = 3
"""Probes in a row without an answer after which a client is given ordinary work."""


@dataclass
class DriftDetector:
    """What a client's updates have been like.

    Attributes
    ----------
    length : float
        Typical ‖Δ_i‖; 0 before its first update in this cluster.
    growth : float
        Growth that is sudden; more after a false alarm.
    since : int
        Its updates since its last probe.
    every : int
        Its updates after which it is probed again.
    asked : int
        Probes in a row that it has not answered.
    suspected : bool
        Whether a probe is to tell if its data have changed.
    called : bool
        Whether it is to be probed because many others' data have changed.
    probed : int
        Updates of the run at its last probe.
    trained : bool
        Whether its latest model is that of a whole task, not of a probe.
    steady : int
        Updates of the run when it was given its last task whose update was not sudden.
    is_stale : bool
        Whether its probes are of data that all of its cluster no longer have.
    """

    length: float = 0.0
    growth: float = 0.0
    since: int = 0
    every: int = 0
    asked: int = 0
    suspected: bool = False
    called: bool = False
    probed: int = 0
    trained: bool = False
    steady: int = -1
    is_stale: bool = False

    def is_sudden(self, length: float, typical: float) -> bool:
        """Return whether an update is suddenly long.

        Parameters
        ----------
        length : float
            Euclidean length of the update.
        typical : float
            That of the others' updates; 0 if it is not known.
        """
        return self.length > 0.0 and length > max(self.growth * self.length, _LONG * typical)

    @property
    def is_silent(self) -> bool:
        """Whether so many probes in a row were sent that no answer is waited for any more."""
        return self.asked >= PATIENCE

    def learn(self, length: float) -> None:
        """Take the length of one more update in."""
        self.length = _KEPT * self.length + (1 - _KEPT) * length if self.length else length


@dataclass(frozen=True)
class Jump:
    """A sudden update.

    Attributes
    ----------
    cluster : int
        The cluster that its client was in.
    when : int
        Updates of the run by then.
    sent : int
        Updates of the run when its client was given the task.
    direction : Vector
        Of the change, at unit length. Shape (size,).
    is_common : bool
        Whether its cluster has changed with it.
    """

    cluster: int
    when: int
    sent: int
    direction: Vector
    is_common: bool = False


class SettledClients:
    """The clients that are online, and those of them that are settled; derived, no state.

    Attributes
    ----------
    there, settled : set[str]
        Clients online that are waited for, and those of them whose place is known.
    lengths : RunningMedians
        Typical lengths of their updates.
    """

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.settled: set[str] = set()
        self.lengths = RunningMedians()

    def note(self, client: str, is_there: bool, is_settled: bool) -> None:
        """Count a client as it is now."""
        (self.there.add if is_there else self.there.discard)(client)
        (self.settled.add if is_there and is_settled else self.settled.discard)(client)

    def are_enough(self, is_late: bool) -> bool:
        """Return whether the place of enough clients is known: of all, or of half and eight.

        Parameters
        ----------
        is_late : bool
            Whether no client is waited for any more: two are enough.
        """
        settled, there = len(self.settled), len(self.there)
        if settled < 2:
            return False
        are_many = settled >= _FEWEST_SETTLED and 2 * settled >= there
        return is_late or settled == there or are_many


def call_others(
    detectors: Mapping[str, DriftDetector], changes: dict[str, int], now: int, clients: int
) -> None:
    """Have all others probed, if the data of many have changed within a short time.

    Parameters
    ----------
    detectors : Mapping[str, DriftDetector]
        Of each client; those that are to be probed are marked.
    changes : dict[str, int]
        When each client's data were last found to have changed, in updates of the run. What is
        long past is removed.
    now : int
        Updates applied in the run so far.
    clients : int
        Number of clients that are compared with each other.
    """
    for client in [c for c, then in changes.items() if not _is_recent(then, now, clients)]:
        del changes[client]
    # Once for each event: those that come after it were called with the others.
    if len(changes) == max(_FEWEST_CHANGES, math.ceil(clients / _MANY)):
        first = min(changes.values())
        for detector in detectors.values():
            detector.called |= detector.probed < first


def are_changing(changes: Mapping[str, int], now: int, clients: int) -> bool:
    """Return whether a client's data were found to have changed within two updates per client.

    Parameters
    ----------
    changes : Mapping[str, int]
        When each client's data were last found to have changed, in updates of the run.
    now : int
        Updates applied in the run so far.
    clients : int
        Number of clients that are compared with each other.
    """
    return any(_is_recent(then, now, clients) for then in changes.values())


def _is_recent(then: int, now: int, clients: int) -> bool:
    return then >= now - _SOON * clients


# -----------------------------------------------------------------------------
# Panicle: clusters that form at once, and that repair themselves.
# -----------------------------------------------------------------------------


PROBE = "probe"
"""Phase of the work that only places a client."""
_MOST_PROBES = 6
"""Probes after which a client that does not agree with itself is given up."""
_ALIKE = 0.5
"""Likeness to its own former direction below which a client's data have changed."""
_FEW_SPEAK_FOR_ALL = 3
"""A third of a cluster that changes together, where none of it is seen not to, is all of it."""
_RARELY = 5
"""Updates per client after which clusters are looked at even if nothing new is known."""
_MORE_PROBES = 4
"""Probes of each client where two leave it open if there are clusters."""


@dataclass
class PanicleState:
    """What Panicle knows beside its clusters.

    Attributes
    ----------
    initial : Vector
        w0: weights of the initial model. Shape (d,).
    probes : Probes
        Directions from w0, and how alike clients are.
    detectors : dict[str, DriftDetector]
        What each client's updates have been like.
    changes : dict[str, int]
        When each client's data were last found to have changed, in updates of the run.
    latest : ClientMemory
        z_i: latest model of each member that is online.
    averages : ModelAverages
        The models that clients use.
    examples : Examples
        Members that stand for their clusters in a large fleet.
    learned : dict[int, int]
        Updates that went into a cluster since it was formed.
    origins : dict[int, list[int]]
        Clusters that a cluster came from.
    changed : int
        Clients of which something new is known since clusters were looked at.
    formed : bool
        Whether they were looked at.
    unlooked : int
        Updates applied since clusters were looked at.
    wanted : int
        Probes that each client is to answer; more where two leave it open if there are clusters.
    withheld : dict[str, Vector]
        Models that moved nothing, of clients whose data may have changed. Shape (d,).
    jumps : dict[str, Jump]
        The last sudden update of each client within two updates per client.
    """

    initial: Vector
    probes: Probes = field(default_factory=Probes)
    detectors: dict[str, DriftDetector] = field(default_factory=dict)
    changes: dict[str, int] = field(default_factory=dict)
    latest: ClientMemory = field(default_factory=ClientMemory)
    averages: ModelAverages = field(default_factory=ModelAverages)
    examples: Examples = field(default_factory=Examples)
    learned: dict[int, int] = field(default_factory=dict)
    origins: dict[int, list[int]] = field(default_factory=dict)
    changed: int = 0
    formed: bool = False
    unlooked: int = 0
    wanted: int = HALVES
    withheld: dict[str, Vector] = field(default_factory=dict)
    jumps: dict[str, Jump] = field(default_factory=dict)

    def likeness(self) -> tuple[list[str], NDArray[np.float32]]:
        """Return how far clients agree, free of chance; NaN where that is not known."""
        return self.probes.similarity()


class Panicle(Method):
    """Immediate clustering by short probes; evidence-based splits, moves and merges (our own)."""

    parameters_type = PanicleParameters
    state_type = PanicleState
    needs = Needs(bases=True)
    parameters: PanicleParameters
    state: PanicleState

    def initialize(self, vector: Vector) -> None:
        """All clients start in one cluster."""
        self.clusters = Clusters({0: Model(vector)})
        self.state = PanicleState(vector.copy(), Probes(exact_up_to=self.parameters.exact_up_to))
        self.restored()

    def restored(self) -> None:
        """Make what shortens directions, and count."""
        self._sketcher = Sketcher(self.parameters.sketch)
        self._settled = SettledClients()
        for client in self.clusters.online:
            self._recount(client)

    def on_join(self, client: Client) -> None:
        """Take a client in, or back."""
        super().on_join(client)
        self._recount(client.client_id)

    def on_leave(self, client: str) -> None:
        """A client that has gone no longer moves its cluster."""
        super().on_leave(client)
        self.state.latest.withdraw(client)
        self.state.withheld.pop(client, None)
        self._recount(client)

    def _recount(self, client: str) -> None:
        """Note whether a client is there, is settled, and how long its updates are."""
        is_there, is_settled = self.clusters.online.get(client, False), self._is_settled(client)
        detector = self.state.detectors.get(client, DriftDetector())
        self._settled.note(client, is_there and (is_settled or not detector.is_silent), is_settled)
        self._settled.lengths.put(client, self._home(client), detector.length * is_there)

    # What a client is asked.

    def request_for(self, client: str) -> Request:
        """Let a client take a few steps from w0 if it is to be placed, or train its model."""
        if not self._is_to_be_probed(client):
            return Request(client)
        examples = self.progress.fleet.clients[client].num_examples
        settings = settings_of_probe(self.train_config, examples, self.parameters.probe_steps)
        arrays = {ARRAYS: self.record_of(self.state.initial)}
        return Request(client, models=(), arrays=arrays, settings=settings, phase=PROBE)

    def _is_to_be_probed(self, client: str) -> bool:
        if not self.parameters.clustering:
            return False
        detector, probes = self._detector(client), self.state.probes
        if detector.is_silent:
            return False
        due = self.parameters.recheck and detector.since >= detector.every
        few = probes.is_known(client) and probes.count(client) < self.state.wanted
        asked = detector.suspected or detector.called or bool(due) or few
        return asked or not self._is_settled(client)

    def _is_settled(self, client: str) -> bool:
        """Return whether a client's place is known by its probes, or never will be."""
        probes = self.state.probes
        return probes.is_clear(client) or probes.count(client) >= _MOST_PROBES

    def on_sent(self, task: InFlight) -> None:
        """Count probes until they are answered."""
        if task.phase == PROBE:
            self._detector(task.client).asked += 1
            self._recount(task.client)

    def on_update(self, update: Update) -> Outcome:
        """Place a client by its probes; let a member's update move its cluster's model."""
        if update.task.phase == PROBE:
            return self._take_probe(update)
        return self._learn_from(update)

    # Likeness of clients.

    def _take_probe(self, update: Update) -> Outcome:
        """Take a direction from w0 in, and act on what it says."""
        client, probes = update.task.client, self.state.probes
        detector, delta = self._detector(client), self.compared(update.vector - self.state.initial)
        direction = self._sketcher.direction(delta)
        detector.asked, detector.since, detector.probed = 0, 0, self.progress.updates
        if detector.is_stale:
            detector.is_stale = False
            probes.forget(client)
        elif probes.is_clear(client) and probes.likeness(client, direction) < _ALIKE:
            probes.forget(client)
            self.state.latest.withdraw(client)
            detector.every = self.parameters.recheck
            self._note_change(client)
        elif detector.suspected:
            detector.growth *= 1.5
        elif self._is_settled(client) and not detector.called:
            detector.every *= 2
        detector.suspected, detector.called, detector.length = False, False, 0.0
        was_settled = self._is_settled(client)
        probes.add(client, direction)
        self._recount(client)
        if not was_settled:
            self._place(client)
        if self._is_settled(client):
            self.state.withheld.pop(client, None)
            self.state.changed += 1
            self._look_if_due()
        latest, k = self.state.latest, self.clusters.main(client)
        if client not in latest.models and not self.state.formed and self.clusters.online[client]:
            latest.renew(client, k, update.vector)
            detector.trained = False
        return Outcome(self.clusters.main(client), staleness=0, weight=0.0)

    def _note_change(self, client: str) -> None:
        """Note that a client's data have changed; many such speak for the others."""
        state, now = self.state, self.progress.updates
        if self.parameters.drift:
            state.changes[client] = now
            call_others(state.detectors, state.changes, now, len(state.probes.clients))

    def _place(self, client: str) -> None:
        """Put a client whose probes are new where it belongs, once there are clusters.

        One probe is enough to join a cluster, to be alone takes two. Of one that has no place, and
        does not agree with itself after all of its probes, the mean of these has to do.
        """
        probes, clusters = self.state.probes, self.clusters
        is_known, is_open = probes.is_known(client), not clusters.is_placed(client)
        is_unclear = is_known and not probes.is_clear(client)
        if len(self.models) == 1 or (is_unclear and not (is_open and self._is_settled(client))):
            return
        names, labels, distances = self.state.examples.seen_from(
            client, probes, clusters, self._clear, self.rng
        )
        if not len(names) or self._waits_for_probes(client, names):
            return
        has_room = clusters.is_alone(client) or len(self.models) < self.parameters.most
        group = nearest_group(distances, labels, may_be_alone=has_room)
        if self._may_have_changed_with_others(client, group, distances, labels):
            return
        if group is not None:
            self._move(client, int(names[group]))
        elif is_known and not clusters.is_alone(client):
            self._found(client)
            self.state.changed = len(probes.clients)

    def _may_have_changed_with_others(
        self, client: str, group: int | None, distances: NDArray[np.float64], labels: Labels
    ) -> bool:
        """Return whether a client that changed suddenly is to wait for its cluster's other members.

        It goes at once where it clearly belongs, and founds a cluster once one of the others has
        been seen not to have changed the same way.
        """
        belongs = group is not None and (
            silhouette(distances, labels, group) >= self.parameters.level
        )
        return not belongs and self._awaits_others(client)

    def _look_if_due(self) -> None:
        """Look for other clusters if enough is new, and enough is known."""
        state, known = self.state, len(self.state.probes.clients)
        # Cheap questions first: of a large fleet, few probes are followed by a look.
        is_late = state.unlooked >= _RARELY * known
        is_due = is_late or state.changed >= max(1, known // 16)
        if not is_due or (state.formed and not self.parameters.reassign):
            return
        if self._settled.are_enough(is_late):
            state.changed, state.unlooked, state.formed = 0, 0, True
            self._look()

    def _look(self) -> None:
        """Have clusters split, merged and clients moved if what is known of them says so."""
        clients = self._clear()
        now = np.array([self.clusters.main(client) for client in clients], np.int64)
        rows = shown(now, self.parameters.exact_up_to, self.rng)
        names, probes, own = [clients[i] for i in rows], self.state.probes, self.parameters
        found = decided(probes.distances(names), now[rows], own.level, own.most)
        # While data change, what is known of some clients is of data that they no longer have.
        if found.is_open and not are_changing(self.state.changes, self.progress.updates, len(now)):
            self.state.wanted = _MORE_PROBES
        if found.wanted is not None:
            wanted = spread(probes, clients, names, found.wanted)
            self._rearrange(clients, now, wanted, found.score)

    def _clear(self) -> list[str]:
        """Return the clients online that agree with themselves, by probes of their present data."""
        online, detectors = self.clusters.online, self.state.detectors
        clear = (client for client in self.state.probes.clear() if online[client])
        return [c for c in clear if c not in detectors or not detectors[c].is_stale]

    def _waits_for_probes(self, client: str, known: NDArray[np.int64]) -> bool:
        """Return whether nothing is known yet of the present data of a client's own cluster."""
        home = self._home(client)
        if not self.parameters.together or home is None or home in known:
            return False
        others = [other for other in self.clusters.clients(home) if other != client]
        return any(self._detector(c).is_stale or not self._is_settled(c) for c in others)

    # From the clusters that there are to those that there should be.

    def _rearrange(
        self,
        clients: list[str],
        now: NDArray[np.int64],
        wanted: NDArray[np.int64],
        score: float,
    ) -> None:
        """Merge, split and move."""
        clusters = self.clusters
        level = least_score(self.parameters.level, len(np.unique(wanted)), len(wanted))
        repair = plan_reassignment(now, wanted)
        heirs = {cluster: cluster for cluster in clusters.models}
        for sources in repair.merges:
            merged = clusters.merge(sources, score=score, threshold=level)
            heirs |= dict.fromkeys(sources, merged)
            self._inherit(merged, sources)
        group_of = dict(zip(clients, wanted.tolist(), strict=True))
        cluster_of = {group: heirs[home] for group, home in repair.home.items()}
        for parent, groups in repair.splits.items():
            source = heirs[parent]
            home = [group for group, cluster in cluster_of.items() if cluster == source]
            inside = clusters.clients(source, online_only=False)
            parts = parts_of_split(inside, group_of, groups, self._is_settled)
            children = clusters.split(source, parts, score=score, threshold=level)
            cluster_of |= dict(zip([*home, *groups], children, strict=True))
            for child, part in zip(children, parts, strict=True):
                self._inherit(child, [source])
                self._start(child, part)
        for client, group in group_of.items():
            self._move(client, cluster_of[group])
        for cluster in sorted(set(clusters.models) - set(cluster_of.values())):
            if not clusters.size(cluster, online_only=False):
                self._retire(cluster)
        self.state.latest.recount(self._home)
        self.state.examples.forget()
        for client in clusters.online:
            self._recount(client)

    def _inherit(self, cluster: int, sources: list[int]) -> None:
        """Note where a new cluster comes from; it learns as fast as a young one."""
        state = self.state
        state.origins[cluster], state.learned[cluster] = sources, 0
        state.averages.restart(*sources)
        for source in sources:
            state.learned.pop(source, None)

    def _start(self, cluster: int, members: list[str]) -> None:
        """Let a new cluster's model begin as the mean of its members' latest models."""
        latest = [self.state.latest.models[c] for c in members if c in self.state.latest.models]
        if latest:
            self.models[cluster].average(latest, [1.0] * len(latest))

    def _found(self, client: str) -> None:
        """Give a client that is far from all clusters one of its own."""
        source = self.clusters.main(client)
        self.state.averages.restart(self._home(client))
        self.state.latest.withdraw(client)
        # What it has made of its new data is nearer to them than what it started from.
        own = self.state.withheld.pop(client, None)
        model = self.models[source]
        model = model.copy() if own is None else Model(own, model.version + 1)
        cluster = self.clusters.found(model, [client])
        self.state.origins[cluster], self.state.learned[cluster] = [source], 0
        self._recount(client)

    def _move(self, client: str, cluster: int) -> None:
        """Move a client; an empty cluster is given up."""
        clusters = self.clusters
        if clusters.is_placed(client) and clusters.main(client) == cluster:
            return
        former = self._home(client)
        self.state.averages.restart(cluster, former)
        self.state.latest.withdraw(client)
        self.state.withheld.pop(client, None)
        clusters.assign(client, cluster)
        self._detector(client).length = 0.0
        self._recount(client)
        if former is not None and not clusters.size(former, online_only=False):
            self._retire(former)

    def _retire(self, cluster: int) -> None:
        self.clusters.retire(cluster)
        self.state.learned.pop(cluster, None)
        self.state.latest.drop(cluster)

    # What a cluster learns.

    def _learn_from(self, update: Update) -> Outcome:
        """Let a member's update move the model of its cluster."""
        client, state = update.task.client, self.state
        detector = self._detector(client)
        detector.since += 1
        is_late = not self._is_settled(client) or detector.since >= self.parameters.recheck
        if detector.is_silent and is_late:
            # It works again: it is asked once more, and not waited for.
            detector.asked = PATIENCE - 1
            self._recount(client)
        state.unlooked += 1
        # Before clusters are looked at first, clients that were waited for may have gone.
        if not state.formed or state.unlooked >= _RARELY * len(state.probes.clients):
            self._look_if_due()
        k = self.clusters.main(client)
        if len(self.models) == 1:
            self._move(client, k)  # There is no other: its place need not be known.
        has_moved = update.task.cluster != k
        # A part of a cluster that was split begins anew.
        staleness = update.age if has_moved else update.staleness
        is_placed = self.clusters.is_placed(client)
        if not is_placed or not comes_from(k, update.task.cluster, state.origins):
            return Outcome(k, staleness, weight=0.0)
        delta = update.delta
        length = float(np.linalg.norm(self.compared(delta)))
        typical = self._settled.lengths.median_of_others(client, k, FEWEST_LENGTHS)
        is_watched = self.parameters.drift and self.parameters.clustering
        if is_watched and detector.is_sudden(length, typical):
            alike = self._jumping_alike(update, k) if self.parameters.together else []
            if not alike:
                detector.suspected, state.withheld[client] = True, update.vector
                return Outcome(k, staleness, weight=0.0)
            if any(other in state.withheld for other in alike):
                return self._begin_anew(update, k, alike, staleness)
        else:
            detector.steady = update.task.updates
        detector.learn(length)
        self._recount(client)
        vector = cut(update.vector, delta, length, self.parameters.clip * typical)
        # Of a client that has moved the updates of all clusters are counted.
        counted = len(self.clusters.members) if has_moved else self.clusters.size(k)
        fresh = freshness(staleness, counted, self.parameters.stale)
        return Outcome(k, staleness, self._mix(update, k, vector, fresh, carries=not has_moved))

    # What becomes of a cluster whose data change together.

    def _jumping_alike(self, update: Update, k: int) -> list[str]:
        """Return the members of a cluster that lately changed as suddenly, and the same way.

        None unless they are, with the client itself, a third of the cluster, and more than the
        members that are seen since the first of them not to have changed that way.
        """
        client, now, jumps = update.task.client, self.progress.updates, self.state.jumps
        clients, direction = len(self.clusters.online), self.compared(update.delta)
        direction = self._sketcher.direction(direction)
        for gone in [c for c, jump in jumps.items() if not _is_recent(jump.when, now, clients)]:
            del jumps[gone]
        jumps[client] = Jump(k, now, update.task.updates, direction)
        here = [c for c, jump in jumps.items() if jump.cluster == k == self._home(c)]
        alike = [c for c in here if float(jumps[c].direction @ direction) >= _ALIKE]
        unlike = self._unlike(client, jumps[alike[0]].sent)
        is_third = _FEW_SPEAK_FOR_ALL * len(alike) >= self.clusters.size(k)
        is_most = len(alike) > max(1, len(unlike))
        if not (is_third and is_most):
            return []
        for one in alike:
            jumps[one] = replace(jumps[one], is_common=True)
        return [c for c in alike if c != client]

    def _awaits_others(self, client: str) -> bool:
        """Return whether a client has changed, and none of its cluster is seen not to have."""
        jump, clients = self.state.jumps.get(client), len(self.clusters.online)
        now = self.progress.updates
        if jump is None or jump.is_common or not _is_recent(jump.when, now, clients):
            return False
        is_here = jump.cluster == self._home(client) and not self.clusters.is_alone(client)
        return is_here and not self._unlike(client, jump.sent)

    def _unlike(self, client: str, since: int) -> set[str]:
        """Return the others of a client's cluster that changed in another way, or not at all.

        Parameters
        ----------
        client : str
            One that has changed.
        since : int
            Updates of the run from which on a task is of data as new as the client's.
        """
        jumps, unlike = self.state.jumps, set()
        own = jumps[client]
        for other in self.clusters.clients(own.cluster):
            jump = jumps.get(other)
            if jump is None:
                is_unlike = self._detector(other).steady >= since
            else:
                # One that changed elsewhere has come because its new data are like this cluster's.
                has_come = jump.cluster != own.cluster
                is_unlike = has_come or float(jump.direction @ own.direction) < _ALIKE
            if is_unlike and other != client:
                unlike.add(other)
        return unlike

    def _begin_anew(self, update: Update, k: int, alike: list[str], staleness: int) -> Outcome:
        """Let a cluster's model begin as the mean of its members' models of their new data.

        The members' probes are of their former data: they are compared no more, until each has
        answered another. No client moves meanwhile.
        """
        state, client = self.state, update.task.client
        models = {c: state.withheld.pop(c) for c in alike if c in state.withheld}
        models[client] = update.vector
        for member in self.clusters.clients(k, online_only=False):
            detector = self._detector(member)
            detector.is_stale, detector.since, detector.every = True, 0, self.parameters.recheck
            state.latest.withdraw(member)
        for member, vector in models.items():
            state.latest.renew(member, k, vector)
            detector = self._detector(member)
            detector.suspected, detector.trained, detector.length = False, True, 0.0
            self._recount(member)
        self.models[k].average(list(models.values()), [1.0] * len(models))
        state.learned[k] = len(models)
        state.averages.restart(k)
        state.examples.forget()
        return Outcome(k, staleness, weight=1.0 / len(models))

    def _mix(self, update: Update, k: int, vector: Vector, fresh: float, carries: bool) -> float:
        """Mix a member's model into its cluster's: w ← (1 − α) w + α (z + β (w − w₀) − λ (z' − z̄)).

        z is its model now and z' the one before, z̄ the mean of all members', w₀ where it started.
        """
        client, model, latest = update.task.client, self.models[k], self.state.latest
        members = max(1, self.clusters.size(k))
        own, learned = self.parameters, self.state.learned.get(k, 0)
        alpha = share_of(members, learned / members, own.alpha0, own.ease)
        target = vector
        if own.unbiased and latest.counts_in(client, k):
            strength = np.float32(calibration(alpha, members))
            target = np.asarray(target - strength * (latest.models[client] - latest.mean(k)))
        alpha *= fresh
        if carries and own.forward:
            beta = np.float32(carried(alpha, members, own.forward))
            target = np.asarray(target + beta * (model.vector - update.base))
        # Not a mean of models any more, but for statistics: checked to be finite.
        target = contribution(target, vector, self.trainable)
        model.move(np.float32(alpha) * (target - model.vector))
        if (own.unbiased or own.personalize) and self.clusters.online[client]:
            latest.renew(client, k, vector)
            self._detector(client).trained = True
        self.state.learned[k] = learned + 1
        self.state.averages.take(k, model.vector, own.average, members)
        return alpha

    def _home(self, client: str) -> int | None:
        """Return the cluster that a client is in; None if it is in none."""
        return self.clusters.main(client) if self.clusters.is_placed(client) else None

    def _detector(self, client: str) -> DriftDetector:
        detectors, own = self.state.detectors, self.parameters
        if client not in detectors:
            detectors[client] = DriftDetector(growth=own.growth, every=own.recheck)
        return detectors[client]

    @property
    def in_use(self) -> InUse:
        """What clients use: a mean of each model's last versions, which no update leans on."""
        averages = self.state.averages.instead_of(self.models, self.spec.counters)
        return InUse(averages, self._own_models)

    def _own_models(self, clients: Collection[str]) -> Iterator[tuple[str, Vector]]:
        """Yield what clients use that are unlike the others of their cluster, or have changed."""
        prior, latest, served = self.parameters.personalize, self.state.latest.models, self.served
        withheld = self.state.withheld
        # A long update may also be one that went wrong, unless many others' data have changed.
        detectors = {c: self._detector(c) for c in clients if c in withheld}
        changed = [
            c for c, detector in detectors.items() if detector.called or not detector.suspected
        ]
        yield from ((client, withheld[client]) for client in changed)
        own = {c for c in clients if self._detector(c).trained and c in latest} if prior else set()
        own.difference_update(changed)
        members = inside(self.clusters, self._clear()) if own else {}
        for client, apart in apartness(self.state.probes, members, own).items():
            samples = self.progress.fleet.clients[client].num_examples
            shared = served[self.clusters.main(client)].vector
            mixed = between(shared, latest[client], own_share(apart, samples, prior))
            self.spec.copy_counters(shared, mixed)
            yield client, mixed
