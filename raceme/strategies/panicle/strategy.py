"""Panicle: clusters form after short probes, and adapt to drift.

Our own method; a panicle is a branched raceme. Every client, slow or fast, begins with two
*probes*: a few mini-batches from the initial model w0. The first probe of one client is compared
with the second of another, so that the noise of mini-batches cancels out and distances have an
absolute scale: 0 for equal clients, 1 for unrelated ones. As soon as half of the fleet has
answered, and whenever probes have been added, the partition with the highest silhouette score
replaces the clusters if the score reaches a level (`probes.py`).

A client whose updates suddenly grow is probed again, and moves to the cluster of its new probe. If
many clients' updates grow, all other clients are probed, too, and clusters learn fast for a while.
Inside a cluster, each update replaces the client's latest change, and moves the model by the mean
of all members' latest changes, weighted by examples; so no client dominates the model by being
fast. Clients use a mean of the model's last versions, mixed with a model of their own if that helps
on held-out samples (`own-model`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from raceme.core.clusters import Clusters, Model, parts_of, unit
from raceme.core.events import grouped
from raceme.core.gaussian import gaussian_mu
from raceme.core.messages import ARRAYS, SKETCH, SKETCH_NOISE, TRAIN_SKETCH, Vector, array_of
from raceme.core.options import option
from raceme.core.requests import InFlight, Outcome, Request, Update
from raceme.core.sketches import SIZE, Sketcher
from raceme.core.strategy import Method, Needs
from raceme.flower.messages import VectorStore
from raceme.strategies.panicle.probes import (
    HALVES,
    LANDMARKS,
    Labels,
    Probes,
    Rows,
    ScoredGroups,
    better_partition,
    landmarks,
    plan_reassignment,
    settings_of_probe,
    silhouette,
)
from raceme.strategies.shared import by_examples, cluster_decay, contribution

PROBE = "probe"
"""Phase of a task that only places its client."""
_MOST_PROBES = 6
"""Probes after which a client is settled even if its halves disagree."""
_PATIENCE = 3
"""Consecutive unanswered probes after which a client trains without another probe."""
_ENOUGH = 8
"""Least number of settled clients for a search for groups; they must also be half of the fleet."""
_RARELY = 5
"""Updates per client after which there is a search for groups in any case."""
_ALIKE = 0.5
"""Likeness to its former direction below which a client's data have changed."""
_SUDDEN = 2.0
"""Multiple of a client's typical update length from which on its longest update is sudden."""
_KEPT = 0.7
"""Weight of former updates in the typical length."""
_MANY = 8
"""All clients are probed again if one in eight, at least two, has sudden updates."""
_SOON = 2
"""Updates per client within which sudden updates count as one event."""
_ALPHA0 = 2.0
"""CASA's α0: factor of the share of an update in a young cluster's model."""
_EASE = 10.0
"""Updates per member after which this share is halved."""
_UNDER_WAY = 7.5
"""Largest stable product of α, m and β."""
_DELTA = 1e-5
"""δ of sketches with noise."""


def sketch_noise(epsilon: float) -> float:
    """Return the standard deviation of the noise on sketches of length 1: 2 √2 / μ(ε, δ).

    Any two sketches are at most 2 apart, and a client sends one of each half of its samples.
    """
    return 2.0 * math.sqrt(HALVES) / gaussian_mu(epsilon, _DELTA)


@dataclass(frozen=True)
class PanicleParameters:
    """Hyper-parameters of Panicle."""

    probe_steps: int = option(10, "mini-batches of a probe at most", low=1)
    clustering: bool = option(True, "form clusters (false: one model for all)")
    level: float = option(0.6, "least silhouette score for several clusters", above=0, below=1)
    drift: bool = option(True, "probe clients again if their updates suddenly grow")
    forward: float = option(
        0.5,
        "share of the model's changes since the client's base that an update keeps",
        low=0,
        high=1,
    )
    average: float = option(0.1, "share of versions that a model in use averages", low=0, high=1)
    sketch_epsilon: float = option(
        0.0,
        "ε at δ = 1e-5 of a client's two probes, which leave the device as noisy sketches (0: as "
        "models)",
        low=0,
    )
    sketch_size: int = option(64, "size of a noisy sketch", low=2, high=SIZE)


@dataclass
class DriftDetector:
    """Drift detector of a client.

    Attributes
    ----------
    length : float
        Typical ‖Δ_i‖; 0 before its first update in this cluster.
    longest : float
        The largest since then.
    asked : int
        Consecutive unanswered probes.
    is_called : bool
        Whether to probe the client again, since its data may have changed.
    probed : int
        Updates of the run at its last probe.
    """

    length: float = 0.0
    longest: float = 0.0
    asked: int = 0
    is_called: bool = False
    probed: int = 0


@dataclass
class ClusterLearning:
    """State of a cluster besides its model.

    Attributes
    ----------
    mean : Model
        w̄: mean of the model's last versions, which clients use.
    total : Vector
        Σ n_i z_i: sum of the members' latest models, weighted by examples. Shape (d,).
    examples : int
        Σ n_i: examples of the models in this sum.
    counted : int
        Number of models in this sum.
    updates : int
        Updates mixed into the model.
    origins : list[int]
        Clusters from which it was split or merged, and their origins.
    """

    mean: Model
    total: Vector
    examples: int = 0
    counted: int = 0
    updates: int = 0
    origins: list[int] = field(default_factory=list)

    def add(self, vector: Vector, examples: int, times: int = 1) -> None:
        """Add a member's latest model to the sum, or subtract it (−1 times)."""
        self.total += np.float32(times * examples) * vector
        self.examples += times * examples
        self.counted += times


@dataclass
class PanicleState:
    """State of Panicle besides its clusters.

    Attributes
    ----------
    initial : Vector
        w0: the initial model. Shape (d,).
    probes : Probes
        Directions from w0.
    watches : dict[str, DriftDetector]
        Drift detector of each client.
    learned : dict[int, ClusterLearning]
        State of each cluster besides its model.
    latest : MutableMapping[str, Vector]
        z_i: latest model of each online member; before there are clusters, the model of a probe.
        Shape (d,).
    examples : dict[str, int]
        n_i: number of examples that each of these models was trained on.
    counts_in : dict[str, int]
        The cluster whose sum includes a client's latest model.
    landmarks : list[str]
        Clients that newcomers are compared with.
    sudden : dict[str, int]
        Updates of the run at the last sudden update of each client that had one lately, in order.
    changed : int
        Clients settled since the last search for groups.
    unlooked : int
        Updates applied since the last search for groups.
    """

    initial: Vector
    probes: Probes = field(default_factory=Probes)
    watches: dict[str, DriftDetector] = field(default_factory=dict)
    learned: dict[int, ClusterLearning] = field(default_factory=dict)
    latest: MutableMapping[str, Vector] = field(default_factory=dict)
    examples: dict[str, int] = field(default_factory=dict)
    counts_in: dict[str, int] = field(default_factory=dict)
    landmarks: list[str] = field(default_factory=list)
    sudden: dict[str, int] = field(default_factory=dict)
    changed: int = 0
    unlooked: int = 0

    def __post_init__(self) -> None:
        # In a file, since one model per client would exceed memory in a large fleet.
        self.latest = VectorStore(self.latest)

    def likeness(self) -> tuple[list[str], NDArray[np.float32]]:
        """Return clients and 1 − the mean of both distances; NaN if unknown."""
        clear = self.probes.clear()[:LANDMARKS]
        # The clear ones first, then the others.
        clients = list(dict.fromkeys([*clear, *self.probes.clients]))[:LANDMARKS]
        matrix = np.full((len(clients), len(clients)), np.nan, np.float32)
        if clear:
            matrix[: len(clear), : len(clear)] = 1.0 - self.probes.distances(clear).mean(axis=0)
        return clients, matrix


def share_of(members: int, rounds: float) -> float:
    """Return the share α of an update: CASA's at first, 1/m in the end.

    ``max(1 / m, min(1, 2 / log2(m + 3)) / (1 + rounds / 10))``: a young cluster moves fast, and an
    old one is a mean over all its members.

    Parameters
    ----------
    members : int
        m: number of members of the cluster, at least 1.
    rounds : float
        Updates per member mixed into the cluster's model.
    """
    first = min(1.0, cluster_decay(members, 1.0, _ALPHA0))
    return max(1.0 / members, first / (1.0 + rounds / _EASE))


class Panicle(Method):
    """Clustering by short probes; splits, moves and merges by silhouette scores (our own)."""

    parameters_type = PanicleParameters
    state_type = PanicleState
    parameters: PanicleParameters
    state: PanicleState

    @property
    def needs(self) -> Needs:
        """Requirements of the method."""
        is_probing = self.parameters.clustering
        has_noise = is_probing and self.parameters.sketch_epsilon > 0
        return Needs(
            kinds=frozenset({TRAIN_SKETCH} if has_noise else ()),
            settings=frozenset({SKETCH_NOISE} if has_noise else ()),
            bases=True,
            features={"own-model": True},
            sum_weight=by_examples,
            sketches=is_probing,
        )

    def initialize(self, vector: Vector) -> None:
        """All clients start in one cluster."""
        self.clusters = Clusters({0: Model(vector)})
        self.state = PanicleState(vector.copy())
        self.restored()

    def restored(self) -> None:
        """Derive the sketcher, which is not part of the state."""
        epsilon = self.parameters.sketch_epsilon
        self._noise = sketch_noise(epsilon) if epsilon else 0.0
        self._sketcher = Sketcher(self.parameters.sketch_size if epsilon else SIZE)

    def _check_loaded(self, others: Iterable[Vector] = ()) -> None:
        state = self.state
        sums = [part for one in state.learned.values() for part in (one.mean.vector, one.total)]
        super()._check_loaded([*others, state.initial, *sums, *state.latest.values()])

    def on_leave(self, client: str) -> None:
        """Remove the model of a client that left from its cluster's sum."""
        super().on_leave(client)
        self._drop_latest(client)

    # 1. Probes.

    def request_for(self, client: str) -> Request:
        """Return a probe (a few steps from w0) for a client without a place; else training."""
        if not self._should_probe(client):
            return Request(client)
        examples = self.progress.fleet.clients[client].num_examples
        former, most = self.state.probes.count(client), self.parameters.probe_steps
        settings = settings_of_probe(self.train_config, examples, most, former)
        arrays = {ARRAYS: self.record_of(self.state.initial)}
        settings |= {SKETCH: self._sketcher.size}
        probe = Request(client, models=(), arrays=arrays, settings=settings, phase=PROBE)
        if not self._noise:
            return probe
        noisy = {**settings, SKETCH_NOISE: self._noise}
        return replace(probe, kind=TRAIN_SKETCH, settings=noisy)

    def _should_probe(self, client: str) -> bool:
        watch = self._watch(client)
        is_asked = self.parameters.clustering and watch.asked < _PATIENCE
        return is_asked and (watch.is_called or not self._is_settled(client))

    def _is_settled(self, client: str) -> bool:
        """Return whether a client needs no probe: it is clear, or has had the maximum number."""
        probes = self.state.probes
        most = HALVES if self._noise else _MOST_PROBES
        return probes.is_clear(client) or probes.count(client) >= most

    def on_sent(self, task: InFlight) -> None:
        """Count unanswered probes."""
        if task.phase == PROBE:
            self._watch(task.client).asked += 1

    def on_update(self, update: Update) -> Outcome:
        """Place a client by its probe, or mix a member's update into its cluster's model."""
        is_probe = update.task.phase == PROBE
        return self._process_probe(update) if is_probe else self._learn_from(update)

    def _process_probe(self, update: Update) -> Outcome:
        """Add a probe's direction, place its client, and search for groups if due."""
        client, probes, now = update.task.client, self.state.probes, self.progress.updates
        watch = self._watch(client)
        direction = self._direction(update)
        is_called = watch.is_called and probes.is_clear(client)
        if is_called and probes.likeness(client, direction) < _ALIKE:
            probes.forget(client)
            self._drop_latest(client)
        watch.asked, watch.probed, watch.is_called, watch.length = 0, now, False, 0.0
        is_model = SKETCH not in update.numbers
        if is_model and not self.state.landmarks and client not in self.state.latest:
            self._replace_latest(update, self.clusters.main(client))
        was_settled = self._is_settled(client)
        probes.add(client, direction)
        if not was_settled:
            self._place(client)
        if self._is_settled(client):
            self.state.changed += 1
            self._search_groups_if_due()
        return Outcome(self.clusters.main(client), staleness=0, weight=0.0)

    def _direction(self, update: Update) -> Vector:
        """Return a probe's direction at unit length, from its model or from the device's sketch."""
        if not self._noise and SKETCH not in update.numbers:
            return self._sketcher.direction(self.compared(update.vector - self.state.initial))
        length = self._sketcher.length(len(self.compared(self.state.initial)))
        return unit(array_of(update.numbers, SKETCH, (length,)).astype(np.float32))

    # 2. Placement of single clients, and of all.

    def _place(self, client: str) -> None:
        """Assign a newcomer to the nearest cluster; move a changed client if it is clear.

        One probe suffices. A client that fits no cluster is placed by the next search for groups.
        """
        home, probes = self.clusters.home(client), self.state.probes
        is_open = probes.is_known(client) and not self._is_settled(client)
        if len(self.models) == 1 or is_open or not (groups := self._landmarks_beside(client)):
            return
        distances = probes.distances_to_groups([client], list(groups.values()))[0]
        nearest = int(np.argmin(distances))
        # A cluster without landmarks counts as unrelated.
        a, b = distances[nearest], min([1.0, *np.delete(distances, nearest)])
        target = list(groups)[nearest]
        if home is None or silhouette(a, b) >= self.parameters.level:
            self._move(client, target)
        if a >= 0.5 and probes.is_known(client):
            self.state.changed = len(probes.clients)

    def _landmarks_beside(self, client: str) -> dict[int, list[str]]:
        """Return the landmarks of each cluster, except the client itself."""

        def found() -> dict[int, list[str]]:
            landmarks = [c for c in self.state.landmarks if c != client and self._comparable(c)]
            return grouped((self.clusters.main(other), other) for other in landmarks)

        if (groups := found()).keys() != self.models.keys():
            # All landmarks of a cluster may have left, while other members are online.
            self._draw_landmarks()
            groups = found()
        return groups

    def _draw_landmarks(self) -> tuple[list[str], Labels, Rows]:
        """Draw landmarks; return all comparable clients, their clusters and the landmarks' rows."""
        clients = [client for client in self.state.probes.clear() if self._comparable(client)]
        now = np.array([self.clusters.main(client) for client in clients], np.int64)
        rows = landmarks(now, self.rng)
        self.state.landmarks = [clients[row] for row in rows]
        return clients, now, rows

    def _comparable(self, client: str) -> bool:
        """Return whether a client is online, with clear probes of its present data."""
        is_clear = self.clusters.online[client] and self.state.probes.is_clear(client)
        return is_clear and not self._watch(client).is_called

    def _search_groups_if_due(self) -> None:
        """Search for groups if enough clients are newly settled, and most are settled."""
        state, known = self.state, len(self.state.probes.clients)
        is_late = state.unlooked >= _RARELY * known
        if not known or (not is_late and state.changed < max(1, known // 16)):
            return
        if known > LANDMARKS:
            # Not after every probe of a large fleet, since the search counts all clients.
            state.changed = 0
        online = [client for client, is_online in self.clusters.online.items() if is_online]
        settled = {c for c in online if self._is_settled(c) and not self._watch(c).is_called}
        waited = sum(c in settled or self._watch(c).asked < _PATIENCE for c in online)
        are_most = len(settled) >= min(_ENOUGH, waited) and 2 * len(settled) >= waited
        if len(settled) >= 2 and (is_late or are_most):
            state.changed = state.unlooked = 0
            self._search_groups()

    def _search_groups(self) -> None:
        """Replace the clusters if another partition is better."""
        clients, now, rows = self._draw_landmarks()
        probes, drawn = self.state.probes, self.state.landmarks
        level, is_quantity = self.parameters.level, self.spec.outputs == 1
        better = better_partition(probes.distances(drawn), now[rows], level, is_quantity)
        if better is None:
            return
        labels = better.labels
        if len(drawn) < len(clients):
            groups = parts_of(drawn, labels)
            labels = probes.distances_to_groups(clients, groups).argmin(axis=1).astype(np.int64)
            labels[rows] = better.labels
        self._rearrange(clients, now, ScoredGroups(labels, better.score))

    def _rearrange(self, clients: list[str], now: Labels, wanted: ScoredGroups) -> None:
        """Merge and split clusters, and move clients, until the groups are the wanted ones."""
        clusters, level = self.clusters, self.parameters.level
        plan = plan_reassignment(now, wanted.labels)
        heirs = {cluster: cluster for cluster in clusters.models}
        for sources in plan.merges:
            merged = clusters.merge(sources, score=wanted.score, threshold=level)
            heirs |= dict.fromkeys(sources, merged)
            self._begin(merged, sources)
        group_of = dict(zip(clients, wanted.labels.tolist(), strict=True))
        cluster_of = {group: heirs[home] for group, home in plan.home.items()}
        for parent, groups in plan.splits.items():
            source = heirs[parent]
            home = [group for group, cluster in cluster_of.items() if cluster == source]
            inside = clusters.clients(source, online_only=False)
            leaving = [[c for c in inside if group_of.get(c) == group] for group in groups]
            gone = {client for part in leaving for client in part}
            staying = [c for c in inside if c not in gone and self._is_settled(c)]
            parts = [staying, *leaving]
            children = clusters.split(source, parts, score=wanted.score, threshold=level)
            cluster_of |= dict(zip([*home, *groups], children, strict=True))
            for child, part in zip(children, parts, strict=True):
                self._begin(child, [source], part)
        for client, group in group_of.items():
            self._move(client, cluster_of[group])
        for cluster in sorted(set(clusters.models) - set(cluster_of.values())):
            if not clusters.size(cluster, online_only=False):
                clusters.retire(cluster)
        state = self.state
        state.learned = {k: learned for k, learned in state.learned.items() if k in self.models}
        for client in state.latest:
            now_in = self.clusters.home(client)
            if now_in is not None and state.counts_in.get(client) != now_in:
                self._count(client, now_in)

    def _begin(self, cluster: int, sources: list[int], members: Sequence[str] = ()) -> None:
        """Start a new cluster, from the mean of its members' latest models if there are any."""
        state, model = self.state, self.models[cluster]
        latest = [state.latest[client] for client in members if client in state.latest]
        if latest:
            model.average(latest, [state.examples[c] for c in members if c in state.latest])
        former = [state.learned[source] for source in sources if source in state.learned]
        origins = [origin for learned in former for origin in learned.origins]
        # Each origin once: parts of a split share origins, and may be merged again.
        self._learned(cluster).origins = list(dict.fromkeys([*sources, *origins]))

    def _move(self, client: str, cluster: int) -> None:
        """Move a client; retire its former cluster if that is empty then."""
        former = self.clusters.home(client)
        if former == cluster:
            return
        self._drop_latest(client)
        self.clusters.assign(client, cluster)
        self._watch(client).length = 0.0
        if former is not None and not self.clusters.size(former, online_only=False):
            self.clusters.retire(former)
            self.state.learned.pop(former, None)

    # 3. Drift.

    def _is_sudden(self, client: str, length: float) -> bool:
        """Return whether an update is suddenly longer than its client's former ones."""
        watch = self._watch(client)
        if not watch.length:
            watch.length = watch.longest = length
        is_sudden = length > max(watch.longest, _SUDDEN * watch.length)
        watch.longest = max(watch.longest, length)
        watch.length = _KEPT * watch.length + (1 - _KEPT) * length
        return is_sudden and self.parameters.drift and self.parameters.clustering

    def _request_new_probes(self, client: str) -> None:
        """Request a new probe of a client with a sudden update; of all clients if many have one."""
        state, clients = self.state, len(self.state.probes.clients)
        since = max(0, self.progress.updates - _SOON * clients)
        is_new = state.sudden.pop(client, -1) < since
        state.sudden = {other: at for other, at in state.sudden.items() if at >= since}
        state.sudden[client] = self.progress.updates
        self._watch(client).is_called = True
        # Once per event: for later clients of the same event the probe is already requested.
        if is_new and len(state.sudden) == max(2, math.ceil(clients / _MANY)):
            first = next(iter(state.sudden.values()))
            for watch in state.watches.values():
                watch.is_called |= watch.probed < first
            for learned in state.learned.values():
                # Clusters count as young again, so that their models move fast.
                learned.updates = 0

    # 4. Learning.

    def _learn_from(self, update: Update) -> Outcome:
        """Mix a member's model in: w ← (1 − α) w + α (z + β (w − w₀) − λ (z' − z̄))."""
        client = update.task.client
        self._probe_again(client)
        self.state.unlooked += 1
        self._search_groups_if_due()
        k = self.clusters.main(client)
        if len(self.models) == 1:
            self._move(client, k)  # The only cluster needs no probe.
        learned, base = self._learned(k), update.task.cluster
        staleness = update.staleness if base == k else update.age
        is_usable = base == k or base in learned.origins
        if not self.clusters.is_placed(client) or not is_usable:
            return Outcome(k, staleness, weight=0.0)
        if self._is_sudden(client, float(np.linalg.norm(self.compared(update.delta)))):
            self._request_new_probes(client)
        m = max(1, self.clusters.size(k))
        alpha = share_of(m, learned.updates / m)
        target = self._target(update, k, alpha * m)
        # A staleness up to m is normal, as members of equal speed overtake each other.
        alpha *= min(1.0, m / max(1, staleness))
        self._replace_latest(update, k)
        alpha = self._by_examples(alpha, update, k)
        # The result is no mean of models, except for statistics; `move` checks that it is finite.
        target = contribution(target, update.vector, self.trainable)
        self._move_model(k, alpha, target, m)
        return Outcome(k, staleness, alpha)

    def _probe_again(self, client: str) -> None:
        """Request another probe of an unsettled client that answers again."""
        watch = self._watch(client)
        if watch.asked >= _PATIENCE and not self._is_settled(client):
            watch.asked = _PATIENCE - 1

    def _target(self, update: Update, cluster: int, shares: float) -> Vector:
        """Return z + β (w − w₀) − λ (z' − z̄), towards which an update moves the model w.

        z is the member's model and z' its former one, z̄ the mean of all members' latest ones by
        examples, w₀ the model that it has trained.

        Parameters
        ----------
        shares : float
            α m: sum of the shares of all members.
        """
        client, learned = update.task.client, self._learned(cluster)
        target: Vector = update.vector
        if self.state.counts_in.get(client) == cluster:
            mean = np.asarray(learned.total / np.float32(learned.examples))
            gone = np.float32(min(1.0, 1.0 / shares)) * (self.state.latest[client] - mean)
            target = np.asarray(target - gone)
        if update.task.cluster == cluster:
            beta = np.float32(min(self.parameters.forward, _UNDER_WAY / shares))
            target = np.asarray(target + beta * (self.models[cluster].vector - update.base))
        return target

    def _by_examples(self, alpha: float, update: Update, cluster: int) -> float:
        """Return α, multiplied by a member's examples relative to the members' mean."""
        learned = self._learned(cluster)
        # No model is in the sum if the cluster's only member has gone offline.
        if not learned.counted:
            return alpha
        return min(1.0, alpha * (update.num_examples * learned.counted / learned.examples))

    def _move_model(self, cluster: int, alpha: float, target: Vector, members: int) -> None:
        """Move a cluster's model towards a target, and update the mean of its last versions."""
        model, learned = self.models[cluster], self._learned(cluster)
        model.move(np.float32(alpha) * (target - model.vector))
        learned.updates += 1
        versions = min(self.parameters.average * learned.updates, members)
        learned.mean.mix(model.vector, 1.0 / max(1.0, versions))

    def _replace_latest(self, update: Update, cluster: int) -> None:
        """Replace a member's latest model, if it is online."""
        client, state = update.task.client, self.state
        self._drop_latest(client)
        if self.clusters.online[client]:
            state.latest[client], state.examples[client] = update.vector, update.num_examples
            self._count(client, cluster)

    def _count(self, client: str, cluster: int) -> None:
        """Add a client's latest model to its cluster's sum."""
        self._learned(cluster).add(self.state.latest[client], self.state.examples[client])
        self.state.counts_in[client] = cluster

    def _drop_latest(self, client: str) -> None:
        """Drop a client's latest model, and subtract it from its cluster's sum."""
        vector, examples = self.state.latest.pop(client, None), self.state.examples.pop(client, 0)
        learned = self.state.learned.get(self.state.counts_in.pop(client, -1))
        if vector is not None and learned is not None:
            learned.add(vector, examples, times=-1)

    # 5. Models in use.

    @property
    def served(self) -> dict[int, Model]:
        """The mean of each model's last versions, smoother than the model itself."""
        means = {cluster: self._learned(cluster).mean for cluster in self.models}
        if self.spec.counters is not None:
            for cluster, mean in means.items():
                mean.copy_from(self.models[cluster].vector, self.spec.counters)
        return means

    # Helpers.

    def _watch(self, client: str) -> DriftDetector:
        return self.state.watches.setdefault(client, DriftDetector())

    def _learned(self, cluster: int) -> ClusterLearning:
        """Return the state of a cluster, created for a new one."""
        if cluster not in self.state.learned:
            model = self.models[cluster]
            self.state.learned[cluster] = ClusterLearning(model.copy(), np.zeros_like(model.vector))
        return self.state.learned[cluster]
