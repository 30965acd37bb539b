"""Protection against poisoned updates.

A guard judges each update w_i before the method receives it. It compares the change
Δ_i = w_i − base, with the base that the client was sent, with the last updates of other clients of
the same cluster. It needs no data on the server. Accepted updates are unchanged, bit by bit.

`norm` bounds the length of Δ_i by a multiple of the median length. `filter` also compares
directions. Like AsyncFilter (Kang and Li, Middleware 2024) it compares each update with the last
ones of other clients, whatever their staleness. Unlike AsyncFilter, it excludes no client of a
fleet that agrees, and decides by a client's record over many updates, not by one update.

`trust` is for attackers that know the other two. It bounds lengths tightly, by those of the online
clients of the same cluster. It refuses at once an update that the largest agreeing set of clients
contradicts: a majority of clients decides, as in FLAME (Nguyen et al., USENIX Security 2022). Each
client has one vote, and less if it agrees with more clients than the median client does; otherwise
a few attackers that send similar updates would outweigh all honest clients, whose updates are
nearly orthogonal late in training. Equal updates do not support each other (FoolsGold, Fung et al.,
RAID 2020). Many, but not all, updates of an attacker near the bound are contradicted, and few
updates of an honest client. A client whose updates are often contradicted is therefore refused
throughout.

If one model serves all clients, `trust` removes from accepted updates the component that points
against the mean of other clients, as conflicting gradients are projected (Yu et al., NeurIPS 2020).
With clusters, updates that would be refused are scaled to a short length instead, since an honest
client in a wrong cluster agrees with no other client, either.

If one model serves all clients and the server has samples of each distribution, these decide
instead: an update must lower the loss on one of the sets nearly as far as other clients' updates do
(Zeno++, Xie et al., ICML 2020, for one set).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from raceme.core.config import RunConfig
from raceme.core.events import UpdateJudged, Verdict
from raceme.core.feature import Feature, FeatureContext, Refusal
from raceme.core.messages import ModelSpec, Vector
from raceme.core.options import option
from raceme.core.registry import PROTECTIONS
from raceme.core.requests import Update
from raceme.features.protection import Options

Home = Callable[[str], int | None]
"""Returns the cluster of a client; None for a client without one."""
Losses = Callable[[Sequence[Vector], int], NDArray[np.float32]]
"""Returns the losses of models on the samples of one of the server's proxy sets."""
Gain = Callable[[], float]
"""Returns the largest share of the loss on a proxy set that an update removes."""

FEWEST = 5
"""Least number of other clients with known updates for a comparison."""
_STRONG = 0.35
"""Absolute cosine from which on two updates agree or disagree; unrelated ones have about 0."""
_KEPT = 0.9
"""Factor on a client's record when its next update is added."""
_FIRST_JUDGED = 3
"""Updates of a client after which its record counts."""
_MOST_KNOWN = 0.9
"""Share of the clients with a known update from which on directions are judged."""
_LONGEST_WAIT = 10
"""Updates per client after which directions are judged in any case: some clients may be silent."""
_LEAST_TYPICAL = 0.2
"""Agreement of the median client below which directions carry no information."""


_FEWEST_MATES = 3
"""Least number of other clients of a cluster; with fewer, `trust` compares with all clients."""
_TWIN = 0.99
"""Cosine from which on two clients' updates count as equal; honest ones reached at most 0.983."""
_PAIR = 0.3
"""Absolute cosine from which on two clients vote for or against each other."""
_VOTED_OUT = -0.5
"""Sum of votes c |c| below which an update is contradicted."""
_OFF_CENTRE = -0.4
"""Cosine with the mean direction of others below which an update is contradicted."""
_OPPONENT = 0.25
"""Share of contradicted updates of a client, by length, from which on all of them count as such."""
_TO_MODEL = 10.0
"""Largest length of an update, relative to its base model, if no other updates are known."""


@dataclass(frozen=True)
class WindowOptions:
    """Options of every protection: the memory of former updates."""

    protection_window: int = option(
        64, "clients whose last update others are compared with", low=FEWEST + 1
    )


@dataclass(frozen=True)
class ExclusionOptions(WindowOptions):
    """Options of protections that exclude clients by their record."""

    protection_share: float = option(
        0.4, "agreement that a client needs, as a share of the median client's", above=0, below=1
    )


@dataclass(frozen=True)
class NormOptions(WindowOptions):
    """Options of `norm`."""

    protection_factor: float = option(
        10.0, "longest update that passes, in median lengths of its cluster's recent ones", low=1
    )
    protection_beyond: str = option(
        "scale", "longer ones: scale to the median length, or refuse", among=("scale", "refuse")
    )


@dataclass(frozen=True)
class FilterOptions(NormOptions, ExclusionOptions):
    """Options of `filter`."""


@dataclass(frozen=True)
class TrustOptions(ExclusionOptions):
    """Options of `trust`."""

    protection_length: float = option(
        2.0, "length to which longer updates are cut, in median lengths of their cluster", low=1
    )


@dataclass
class Record:
    """Agreement of a client's updates with those of others.

    Attributes
    ----------
    total, length : float
        Sum of agreements weighted by length, and sum of lengths; former updates decay.
    contradicted : float
        Sum of the lengths of contradicted updates, with the same decay.
    updates : int
        Number of compared updates.
    """

    total: float = 0.0
    length: float = 0.0
    contradicted: float = 0.0
    updates: int = 0

    def add(self, agreement: float, length: float, is_contradicted: bool = False) -> None:
        """Add an update, weighted by its length."""
        self.total = _KEPT * self.total + length * agreement
        self.length = _KEPT * self.length + length
        self.contradicted = _KEPT * self.contradicted + length * is_contradicted
        self.updates += 1

    @property
    def opposition(self) -> float:
        """The share of its updates, by length, that were contradicted."""
        return self.contradicted / self.length if self.length else 0.0

    @property
    def is_opponent(self) -> bool:
        """Whether the share of its contradicted updates reaches the limit."""
        return self.updates >= _FIRST_JUDGED and self.opposition > _OPPONENT

    @property
    def score(self) -> float:
        """The mean agreement, between −2 and 2."""
        return self.total / self.length if self.length else 0.0


@dataclass
class GuardState:
    """State of a guard; part of checkpoints.

    Attributes
    ----------
    lengths : dict[str, float]
        Length of each client's last update, in order of arrival.
    directions : dict[str, Vector]
        The same updates at length 1, if directions are compared. Shape (weights,).
    records : dict[str, Record]
        Agreement of clients' updates with others'.
    excluded : dict[str, bool]
        Clients whose updates are refused for their record.
    newcomers : Record
        Common record of all clients' first updates.
    gains : dict[str, float]
        Gain of each client's last update on the server's proxy sets.
    judged : int
        Number of updates with a direction so far, judged by it or not.
    """

    lengths: dict[str, float] = field(default_factory=dict)
    directions: dict[str, Vector] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    excluded: dict[str, bool] = field(default_factory=dict)
    newcomers: Record = field(default_factory=Record)
    gains: dict[str, float] = field(default_factory=dict)
    judged: int = 0


@dataclass(frozen=True, eq=False)
class Judged:
    """An update to be judged.

    Attributes
    ----------
    client : str
        Its client.
    delta : Vector
        Δ_i, its weights only. Shape (weights,).
    start : float
        Length of its base model.
    home : Callable
        Returns the cluster of a client.
    online : int
        Number of clients online.
    is_online : Callable, optional
        Returns whether a client is online; None if those of all remembered updates are.
    one_model : bool
        Whether one model serves all: the method finds no clusters.
    gain : Callable, optional
        Returns the update's gain on the server's proxy sets, if there are any.
    """

    client: str
    delta: Vector
    start: float
    home: Home
    online: int = 0
    is_online: Callable[[str], bool] | None = None
    one_model: bool = False
    gain: Gain | None = None

    @cached_property
    def length(self) -> float:
        """‖Δ_i‖."""
        return float(np.linalg.norm(self.delta))

    @cached_property
    def direction(self) -> Vector:
        """Δ_i / ‖Δ_i‖; Δ_i must not be zero. Shape (weights,)."""
        return np.asarray(self.delta / np.float32(self.length))


@dataclass(frozen=True)
class Ruling:
    """The decision on an update.

    Attributes
    ----------
    verdict : Verdict
        Whether the update is accepted, scaled or refused, or its client excluded.
    scale : float
        Factor on Δ_i.
    measured, bound : float
        The measured value and its bound; NaN for an accepted update.
    reason : str
        Reason in words without numbers; empty for an accepted update.
    weights : Vector, optional
        Δ_i for the method, if it is not a multiple of the client's. Shape (weights,).
    """

    verdict: Verdict = Verdict.ACCEPTED
    scale: float = 1.0
    measured: float = float("nan")
    bound: float = float("nan")
    reason: str = ""
    weights: Vector | None = None


_ACCEPTED = Ruling()
_DISAGREES = "its updates agree with those of no others"
_NEW_DISAGREE = "an update of a new client, and those of new clients agree with no others"
_CONTRADICTED = "an update that those of others contradict"
_OPPOSES = "an update of a client that those of others often contradict"
_TOO_LONG = "an update that is longer than those of others"
_NO_GAIN = "an update that helps on none of the server's proxy sets as those of others do"
_BACKWARDS = "a part of an update that points against those of others"


class Guard(Feature):
    """Judges updates. A protection is a subclass.

    An excluded client counts as offline for the method, so that no other client waits for it. It
    keeps its cluster and is still tested.

    Attributes
    ----------
    state : GuardState
        Lengths, directions and records of former updates.
    """

    state_type = GuardState
    state: GuardState
    keeps_bases = True

    def judge(self, update: Judged) -> Ruling:
        """Judge an update, and store it for later comparisons."""
        return _ACCEPTED

    def restored(self, spec: ModelSpec) -> None:
        """Check the shapes of remembered updates."""
        weights = spec.compared(np.empty(spec.size, np.float32)).shape
        for vector in self.state.directions.values():
            if vector.shape != weights:
                raise ValueError(f"a remembered update of shape {vector.shape}, not {weights}")

    def on_update(self, update: Update, context: FeatureContext) -> Update | Refusal:
        """Judge an update; return it as changed by the ruling, or a refusal; report the ruling."""
        client, spec, home = update.task.client, context.spec, context.clusters.home
        base, probe = context.base(update), context.probe
        delta = np.asarray(update.vector - base)
        ruling = self.judge(
            Judged(
                client,
                spec.compared(delta),
                float(np.linalg.norm(spec.compared(base))),
                home,
                online=context.online,
                is_online=context.is_online,
                one_model=context.has_one_model,
                gain=partial(gain_of, probe, probe.sets, base, update.vector) if probe else None,
            )
        )
        verdict, reason = ruling.verdict, ruling.reason
        if verdict is Verdict.ACCEPTED:
            return update
        now, measured, bound = update.arrived_at, ruling.measured, ruling.bound
        context.report(UpdateJudged(now, client, verdict, measured, bound, reason, home(client)))
        if client in self.state.excluded:
            context.exclude(client)
        if verdict.is_withheld:
            return Refusal(reason)
        if verdict is Verdict.READMITTED:
            context.readmit(client)
        if ruling.scale == 1.0 and ruling.weights is None:
            return update
        delta *= np.float32(ruling.scale)
        if ruling.weights is not None:
            delta[... if spec.trainable is None else spec.trainable] = ruling.weights
        vector = np.asarray(base + delta, np.float32)
        spec.copy_counters(update.vector, vector)
        return replace(update, vector=vector)


def protection(options: Options, config: RunConfig) -> Guard:
    """Return the protection that a configuration names.

    Raises
    ------
    UserError
        There is no such protection, or an option is out of its range.
    """
    kind = PROTECTIONS.options_type(options.protection)
    guard: Guard = PROTECTIONS.make(options.protection, *([config.read(kind)] if kind else []))
    return guard


class NoProtection(Guard):
    """No protection: every valid update is accepted."""

    @property
    def is_on(self) -> bool:
        """Whether it judges updates: never."""
        return False


class _Compares(Guard):
    """Common part of protections that compare an update with the last updates of other clients."""

    options: Any

    def _others(self, client: str, home: Home | None = None) -> list[str]:
        """Return the other clients with a stored update; with `home` those of the same cluster."""
        others = [other for other in self.state.lengths if other != client]
        if home is None or (cluster := home(client)) is None:
            return others
        return [other for other in others if home(other) == cluster]

    def _remember(self, update: Judged) -> None:
        state = self.state
        state.lengths.pop(update.client, None)
        state.lengths[update.client] = update.length
        if len(state.lengths) > self.options.protection_window:
            oldest = next(iter(state.lengths))
            del state.lengths[oldest]
            state.directions.pop(oldest, None)
            state.gains.pop(oldest, None)

    def _waits(self, update: Judged, others: Sequence[str]) -> bool:
        """Return whether too few of the other clients are known to judge directions."""
        state = self.state
        state.judged += 1
        known = 1 + sum(other in state.directions for other in others)
        most = _MOST_KNOWN * min(update.online, self.options.protection_window)
        return known < most and state.judged <= _LONGEST_WAIT * update.online

    def _agreement(self, direction: Vector, others: list[str]) -> float:
        """Return the agreement of an update with others, from −2 to 2.

        It is the sum of two numbers: the largest cosine, which is small if no other client sends a
        similar update; and, over the strong cosines c, the balance Σ c |c| / Σ c², which is −1 if
        the update points against the others and 1 if all agree with it.
        """
        directions = self.state.directions
        cosines = np.array([np.dot(directions[other], direction) for other in others], np.float64)
        strong = cosines[np.abs(cosines) >= _STRONG]
        balance = np.sum(strong * np.abs(strong)) / np.sum(strong**2) if len(strong) else 0.0
        return float(cosines.max() + balance)

    def _by_record(self, update: Judged, ruling: Ruling) -> Ruling:
        """Exclude the client by its record, or readmit it and apply a ruling."""
        state, client, home = self.state, update.client, update.home
        scores = self._scores(home(client), home, client)
        if len(scores) < FEWEST or client not in scores:
            scores = self._scores(None, home, client)
        was_excluded = client in state.excluded
        if len(scores) >= FEWEST and client in scores:
            typical = statistics.median(scores.values())
            bound = self.options.protection_share * typical
            if typical >= _LEAST_TYPICAL and scores[client] < bound:
                state.excluded[client] = True
                verdict = Verdict.REFUSED if was_excluded else Verdict.EXCLUDED
                return Ruling(verdict, 0.0, scores[client], bound, _DISAGREES)
            if was_excluded and typical >= _LEAST_TYPICAL:
                del state.excluded[client]
                verdict, reason = Verdict.READMITTED, "its updates agree with those of others now"
                return replace(
                    ruling, verdict=verdict, measured=scores[client], bound=bound, reason=reason
                )
        if was_excluded:
            nan = float("nan")
            return Ruling(Verdict.REFUSED, 0.0, nan, nan, _DISAGREES)
        return ruling

    def _scores(self, cluster: int | None, home: Home, client: str) -> dict[str, float]:
        """Return the scores of a client and of the cluster's clients with a record.

        Clients whose updates are often contradicted are left out, as they support each other.
        """
        records = self.state.records
        return {
            other: records[other].score
            for other in self.state.lengths
            if other in records
            and records[other].updates >= _FIRST_JUDGED
            and (other == client or not records[other].is_opponent)
            and (cluster is None or home(other) == cluster)
        }


class NormProtection(_Compares):
    """Updates much longer than the median of their cluster are scaled to it, or refused."""

    options_type: ClassVar[type[Any]] = NormOptions
    options: NormOptions

    def judge(self, update: Judged) -> Ruling:
        """Judge an update by its length alone, against those of other clients."""
        ruling = self._by_length(update)
        # Refused updates are stored, too: fewer than half of the clients cannot shift the median.
        self._remember(update)
        return ruling

    def _by_length(self, update: Judged) -> Ruling:
        known, length = self.state.lengths, update.length
        others = self._others(update.client, update.home)
        if len(others) < FEWEST:
            others = self._others(update.client)
        if len(others) < FEWEST:
            # Without other updates, the length is compared with that of the base model.
            bound = self.options.protection_factor * update.start
            if not 0.0 < bound < length:
                return _ACCEPTED
            reason = "a first update that is far longer than the model that it started from"
            return Ruling(Verdict.REFUSED, 0.0, length, bound, reason)
        typical = statistics.median(known[other] for other in others)
        bound = self.options.protection_factor * typical
        if not typical or length <= bound:
            return _ACCEPTED
        reason = "an update that is far longer than those of others"
        if self.options.protection_beyond == "refuse":
            return Ruling(Verdict.REFUSED, 0.0, length, bound, reason)
        return Ruling(Verdict.SCALED, typical / length, length, bound, reason)


class FilterProtection(NormProtection):
    """Clients whose updates agree with no others, or point against them, are excluded."""

    options_type = FilterOptions
    options: FilterOptions

    def judge(self, update: Judged) -> Ruling:
        """Judge the length, and then the client's record of directions, including this update's.

        An excluded client still gets work, and its updates are still judged: if they agree with
        others again, it is readmitted.
        """
        ruling = super().judge(update)
        if ruling.verdict is Verdict.REFUSED or not update.length:
            return ruling
        client, directions = update.client, self.state.directions
        others = [other for other in self._others(client, update.home) if other in directions]
        # With clusters directions are judged at once, as clusters form from the first updates.
        if update.one_model and self._waits(update, self._others(client)):
            others = []
        if len(others) >= FEWEST:
            # In the record an update weighs at most as much as its scaled version.
            record = self.state.records.setdefault(client, Record())
            record.add(self._agreement(update.direction, others), update.length * ruling.scale)
        directions[client] = update.direction
        return self._by_record(update, ruling)


class TrustProtection(_Compares):
    """For attackers that know the filter: close bounds on lengths, votes, and records."""

    options_type = TrustOptions
    options: TrustOptions

    def judge(self, update: Judged) -> Ruling:
        """Judge the length, then contradiction by other clients, then the client's record.

        Also with clusters, directions count only once updates of most clients are known: before,
        all known clients may oppose a fast client whose similar clients are slow. Lengths are
        bounded from the start.
        """
        state, client, length = self.state, update.client, update.length
        others, mates = self._present(update), self._present(update, update.home)
        if len(mates) < _FEWEST_MATES:
            mates = others
        bound = self._longest(mates, update.start)
        self._remember(update)
        if not length:
            return _ACCEPTED
        ruling, direction = _ACCEPTED, update.direction
        if 0.0 < bound < length:
            ruling = Ruling(Verdict.SCALED, bound / length, length, bound, _TOO_LONG)
        if update.one_model and (by_gain := self._by_gain(update, others, ruling)):
            state.directions[client] = direction
            return by_gain
        mates = [other for other in mates if other in state.directions]
        waits, refusal = self._waits(update, others), None
        if len(mates) >= _FEWEST_MATES:
            known = np.stack([state.directions[other] for other in mates])
            if update.one_model or not waits:
                votes, agreeing = contradiction(np.vstack([direction, known]))
                if votes:
                    refusal = Ruling(Verdict.REFUSED, 0.0, votes, _VOTED_OUT, _CONTRADICTED)
                out = {other for other, left in zip(mates, agreeing[1:], strict=True) if not left}
                mates = [other for other in mates if other not in out]
                others = [other for other in others if other not in out]
            if update.one_model:
                against, cosine = opposed(direction, known[agreeing[1:]])
                if cosine < 0.0:
                    weights = np.float32(length * ruling.scale) * (direction - against)
                    ruling = Ruling(Verdict.SCALED, ruling.scale, cosine, 0.0, _BACKWARDS, weights)
            if not waits:
                # A client in a wrong cluster agrees with clients of other clusters.
                agreement = max(
                    self._distinct_agreement(direction, near) for near in (mates, others)
                )
                record = state.records.setdefault(client, Record())
                seen = agreement, length * ruling.scale, refusal is not None
                record.add(*seen)
                if record.updates < _FIRST_JUDGED:
                    state.newcomers.add(*seen)
                if record.is_opponent and refusal is None:
                    measured = record.opposition
                    refusal = Ruling(Verdict.REFUSED, 0.0, measured, _OPPONENT, _OPPOSES)
        state.directions[client] = direction
        if refusal is None or client not in state.excluded:
            # No client is readmitted with an update that others contradict.
            ruling = self._by_record(update, ruling)
        if refusal is not None and not ruling.verdict.is_withheld:
            ruling = refusal
        if update.one_model or ruling.verdict is not Verdict.REFUSED:
            return ruling
        return self._shortened(update, bound / self.options.protection_length, ruling)

    def _present(self, update: Judged, home: Home | None = None) -> list[str]:
        """Return the other clients that are online, as abandoned identities must not vote."""
        others, is_online = self._others(update.client, home), update.is_online
        return [other for other in others if is_online is None or is_online(other)]

    def _shortened(self, update: Judged, typical: float, ruling: Ruling) -> Ruling:
        """Accept a refused update, scaled to a short length.

        With clusters, an honest client in a wrong cluster agrees with no other client, either. If
        its updates were always refused, it could never change that cluster's model.
        """
        scale = min(1.0, self.options.protection_share * typical / update.length)
        return replace(ruling, verdict=Verdict.SCALED, scale=scale)

    def _by_record(self, update: Judged, ruling: Ruling) -> Ruling:
        """Judge a client that is too new for a record by the common record of new clients.

        Without it, each new identity could send two updates of any direction.
        """
        ruled, state = super()._by_record(update, ruling), self.state
        record = state.records.get(update.client)
        if ruled is not ruling or record is None or record.updates >= _FIRST_JUDGED:
            return ruled
        if state.newcomers.updates < _FIRST_JUDGED:
            return ruling
        scores = self._scores(None, update.home, update.client)
        if len(scores) < FEWEST:
            return ruling
        typical, newcomers = statistics.median(scores.values()), state.newcomers
        bound = self.options.protection_share * typical
        disagrees = typical >= _LEAST_TYPICAL and newcomers.score < bound
        if not disagrees and not newcomers.is_opponent:
            return ruling
        return Ruling(Verdict.REFUSED, 0.0, newcomers.score, bound, _NEW_DISAGREE)

    def _by_gain(self, update: Judged, others: list[str], ruling: Ruling) -> Ruling | None:
        """Refuse an update with a far smaller gain than others; None if gains show nothing."""
        if update.gain is None:
            return None
        records, gain = self.state.gains, update.gain()
        gains = [records[other] for other in others if other in records]
        records[update.client] = gain
        if len(gains) < FEWEST or (typical := statistics.median(gains)) < _LEAST_TYPICAL:
            return None
        bound = self.options.protection_share * typical
        return ruling if gain >= bound else Ruling(Verdict.REFUSED, 0.0, gain, bound, _NO_GAIN)

    def _distinct_agreement(self, direction: Vector, others: list[str]) -> float:
        """Return the agreement with some clients' updates, without equal ones."""
        known = self.state.directions
        single = [name for name in others if name in known and known[name] @ direction < _TWIN]
        return self._agreement(direction, single) if single else 0.0

    def _longest(self, others: list[str], start: float) -> float:
        """Return the largest permitted length of an update; of few others the shortest counts."""
        lengths = [self.state.lengths[other] for other in others]
        if not lengths:
            return _TO_MODEL * start
        measure = statistics.median(lengths) if len(lengths) >= _FEWEST_MATES else min(lengths)
        return self.options.protection_length * measure


def gain_of(losses: Losses, sets: int, before: Vector, after: Vector) -> float:
    """Return the largest share of the loss on a proxy set that an update removes; −1 at least.

    Parameters
    ----------
    losses : Callable
        Returns the losses of models on the samples of a set. Shape (models, samples).
    sets : int
        Number of sets.
    before, after : Vector
        The model without the update, and with it. Shape (d,).
    """
    means = np.array([losses([before, after], k).mean(axis=1, dtype=float) for k in range(sets)])
    with np.errstate(invalid="ignore"):
        shares = 1.0 - means[:, 1] / np.maximum(means[:, 0], 1e-9)
    return float(np.max(np.maximum(np.nan_to_num(shares, nan=-1.0), -1.0)))


def opposed(direction: Vector, others: Vector) -> tuple[Vector, float]:
    """Return a direction's component along the mean of others, and its cosine with that mean.

    Another client with cosine c has the weight 1 − max(c, 0), so that colluding clients do not
    support each other, whatever noise they add.

    Parameters
    ----------
    direction : Vector
        Of length 1. Shape (weights,).
    others : Vector
        Directions of other clients. Shape (clients, weights).
    """
    centre = (1 - np.maximum(others @ direction, 0.0)) @ others
    centre /= max(float(np.linalg.norm(centre)), 1e-6)
    cosine = float(centre @ direction)
    return np.asarray(np.float32(cosine) * centre), cosine


def contradiction(directions: Vector) -> tuple[float, NDArray[np.bool_]]:
    """Return how far the first direction is contradicted, and the directions that agree.

    The most contradicted direction is removed until none is contradicted, so that the result does
    not depend on removed directions or on the order of clients. A direction is contradicted if the
    sum of the votes c |c|, over its cosines c with the others, or the cosine with their mean is
    below a bound. In both a direction has the weight min(1, median(b) / b), where
    b = 1 + Σ max(c, 0)² is the number of clients that it represents.

    Parameters
    ----------
    directions : Vector
        One for each client, of length 1. Shape (clients, weights).

    Returns
    -------
    float
        The sum of the votes, or a number as far below its bound; 0 if the direction belongs to the
        largest agreeing set.
    NDArray
        Mask of the directions that remain when the first is judged. Shape (clients,).
    """
    cosines = (directions @ directions.T).astype(np.float64)
    np.fill_diagonal(cosines, 0.0)
    votes = np.where(np.abs(cosines) >= _PAIR, cosines * np.abs(cosines), 0.0)
    borne = 1.0 + np.sum(np.maximum(cosines, 0.0) ** 2, axis=1)
    each = np.minimum(1.0, np.median(borne) / borne)
    left = np.ones(len(cosines), np.bool_)
    while left.sum() > FEWEST:
        weights = each * left
        sums = cosines @ weights
        # For the mean without one direction: |Σ w u|² minus the contribution of this direction.
        squares = weights @ sums + weights @ weights - 2 * each * sums - each**2
        central = sums / np.sqrt(np.maximum(squares, 1e-3))
        worst = np.maximum(votes @ weights / _VOTED_OUT, central / _OFF_CENTRE)
        worst[~left] = 0.0
        most = int(np.argmax(worst))
        if worst[most] <= 1.0:
            break
        if most == 0:
            return float(worst[most] * _VOTED_OUT), left
        left[most] = False
    return 0.0, left
