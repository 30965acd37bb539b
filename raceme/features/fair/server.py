"""Fast clients wait while their influence on models exceeds their share.

In an asynchronous method a fast client has more influence than others: it sends more updates, and
fresher ones, which methods weight more. The influence x_i of a client is the sum of the weights α
of its updates. It is bounded by the client's share s_i of the total influence that all clients
would have if they were as fast as the median one:

    x_i ≤ s_i V, with V the weighted upper median of x_j / s_j over the active clients, of the
    cluster or of the run: the lower one.

The sum Σ x_j does not work as a bound: it would force all clients to have equal influence, and a
fast client could raise it at will. V is the highest level that no minority can raise; the median of
the run bounds attackers that have a cluster to themselves. Clients with half of the shares are at V
or above, so that no client has more than twice its share of Σ x_j.

Updates are not scaled, as methods compare the updates that arrive. Instead, a client that is ahead
gets its next request when V has risen. The bound applies to a sliding window, the smallest one in
which the shares are whole updates, one for each client. So a client may be one update ahead when it
gets a request, and a slower client saves up at most one update.

A method in rounds gives each client one update in a round, and needs no bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from raceme.core.config import RunConfig
from raceme.core.events import MeasureSchema
from raceme.core.feature import Feature, FeatureContext
from raceme.core.messages import TRAINING
from raceme.core.requests import InFlight, Outcome, Request, Update
from raceme.core.scheduling import PATIENCE, STRANGER_PATIENCE
from raceme.features.fair import Options

INFLUENCE = MeasureSchema(
    "influence",
    "largest share of a client in the weights of all updates",
    ("client", "share"),
    value="share",
)


@dataclass
class Account:
    """Influence of a client.

    Attributes
    ----------
    level : float
        x_i / s_i, in typical updates of the cluster's clients.
    weight : float
        α of its last update; 0 before the first.
    share : float
        s_i, up to a factor that all clients have in common.
    total : float
        Sum of the weights of all its updates.
    idle_since : int
        Number of the run's updates when it became idle.
    sent_at, longest : float
        Time of its last request, and its longest time to a valid update; 0 before the first.
    works, waits, answers : bool
        Whether it has a request, whether it waits for other clients, and whether its last request
        led to an update.
    """

    level: float = 0.0
    weight: float = 0.0
    share: float = 1.0
    total: float = 0.0
    idle_since: int = 0
    sent_at: float = 0.0
    longest: float = 0.0
    works: bool = False
    waits: bool = False
    answers: bool = True


@dataclass
class FairState:
    """State of the feature.

    Attributes
    ----------
    accounts : dict[str, Account]
        Influence of each client that was asked to train.
    valid : dict[int, bool]
        Numbers of the open requests with a valid update.
    """

    accounts: dict[str, Account] = field(default_factory=dict)
    valid: dict[int, bool] = field(default_factory=dict)


class Fair(Feature):
    """Bounds each client's influence over time by its share."""

    options_type = Options
    state_type = FairState
    options: Options
    state: FairState

    def __init__(self, options: Options | None = None, config: RunConfig | None = None) -> None:
        super().__init__(options, config)
        # Derived from the state: the active clients by cluster, and the medians computed so far, by
        # cluster and for all clients (None).
        self._active: dict[int, dict[str, Account]] = {}
        self._medians: dict[int | None, float] = {}
        self._changes, self._looked = 0, (-1, 0, 0, 0.0)

    @property
    def is_on(self) -> bool:
        """Whether the key ``fair`` names a share, and the method is asynchronous."""
        config = self.config or RunConfig()
        chosen = self.options.fair
        wanted = config.value("protection") == "trust" if chosen == "auto" else chosen != "none"
        return wanted and not getattr(config.parameters(), "in_rounds", False)

    def holds(self, client: str, context: FeatureContext) -> bool:
        """Return whether a client is more than one update ahead of the median one."""
        account = self.state.accounts.get(client)
        if account is None:
            return False
        account.waits = account.level > self._median(client, context) + 1.0
        return account.waits

    def on_request(self, request: Request, context: FeatureContext) -> Request:
        """Open an account for a new client, at the level of the client furthest ahead.

        A lower level would reward clients that take a new identity.
        """
        if request.kind in TRAINING:
            client = request.client
            account = self.state.accounts.get(client)
            if account is None:
                mates = self._cluster_accounts(client, context).values()
                account = Account(max((mate.level for mate in mates), default=0.0))
                self.state.accounts[client] = account
            account.works, account.waits, account.sent_at = True, False, context.now()
            if self.options.fair == "examples":
                account.share = float(max(1, context.examples(client)))
            self._update_active(context)
            if account.answers:
                # A working client is active, so the active clients need not be determined anew.
                self._active.setdefault(context.clusters.main(client), {})[client] = account
            self._medians.clear()
        return request

    def on_update(self, update: Update, context: FeatureContext) -> Update:
        """Record that the update is valid."""
        self.state.valid[update.task.number] = True
        return update

    def on_closed(self, task: InFlight, context: FeatureContext) -> None:
        """Record that a client is idle, and whether it answered."""
        if task.kind in TRAINING and (account := self.state.accounts.get(task.client)):
            account.works, account.idle_since = False, context.updates
            self._changes += 1
            account.answers = self.state.valid.pop(task.number, False)
            if account.answers:
                account.longest = max(account.longest, context.now() - account.sent_at)

    def on_applied(
        self, updates: Sequence[Update], outcomes: Sequence[Outcome], context: FeatureContext
    ) -> None:
        """Add the weights of updates to their clients' influence."""
        for update, outcome in zip(updates, outcomes, strict=True):
            account = self.state.accounts.get(update.task.client)
            if account is not None and outcome.weight > 0:
                self._add(account, update.task.client, outcome.weight, context)
        if context.updates % max(1, context.online) == 0:
            self._report(context)

    def _add(self, account: Account, client: str, weight: float, context: FeatureContext) -> None:
        """Add the weight of an update, in units of a typical update of the cluster."""
        account.weight = weight
        account.total += weight
        mates = self._cluster_accounts(client, context) or {client: account}
        weights = [mate.weight for mate in mates.values() if mate.weight] or [weight]
        unit = median(weights) / median(mate.share for mate in mates.values())
        saved = self._median(client, context) - 1.0
        account.level = max(account.level, saved if math.isfinite(saved) else 0.0)
        account.level += weight / account.share / unit
        self._medians.clear()

    def _cluster_accounts(self, client: str, context: FeatureContext) -> dict[str, Account]:
        """Return the accounts of the active clients in a client's cluster."""
        self._update_active(context)
        return self._active.get(context.clusters.main(client), {})

    def _median(self, client: str, context: FeatureContext) -> float:
        """Return V: the lower median, of a client's cluster or of all clients."""
        self._update_active(context)
        known, cluster = self._medians, context.clusters.main(client)
        if None not in known:
            everyone = [one for inside in self._active.values() for one in inside.values()]
            known[None] = upper_median(everyone)
        if cluster not in self._active:
            return known[None]
        if cluster not in known:
            # With one cluster, its median is that of all clients.
            is_only = len(self._active) == 1
            known[cluster] = (
                known[None] if is_only else upper_median(self._active[cluster].values())
            )
        return min(known[None], known[cluster])

    def _update_active(self, context: FeatureContext) -> None:
        """Find the active clients of each cluster, once after each change.

        Clients that do not answer, or that the method leaves idle, are not active.
        """
        now, updates, online = context.now(), context.updates, context.online
        looked = (self._changes, updates, online, now)
        if self._looked == looked:
            return
        accounts, clusters = self.state.accounts, context.clusters
        present = clusters.online
        slowest = max((account.longest for account in accounts.values()), default=0.0)
        stranger = STRANGER_PATIENCE * slowest or math.inf
        self._active, self._looked = {}, looked
        self._medians.clear()
        for client, account in accounts.items():
            if not account.answers or not present.get(client):
                continue
            if account.works:
                takes_part = now - account.sent_at <= (PATIENCE * account.longest or stranger)
            else:
                takes_part = account.waits or updates - account.idle_since <= online
            if takes_part:
                self._active.setdefault(clusters.main(client), {})[client] = account

    def _report(self, context: FeatureContext) -> None:
        """Measure the largest share of a client."""
        totals = {client: account.total for client, account in self.state.accounts.items()}
        if whole := sum(totals.values()):
            client = max(totals, key=lambda client: totals[client])
            context.measure(INFLUENCE, client=client, share=totals[client] / whole)


def upper_median(accounts: Iterable[Account]) -> float:
    """Return the highest level that no minority can raise: the upper median, weighted by shares.

    Without accounts it is infinite, so that no client is bounded.
    """
    ordered = sorted([(account.level, account.share) for account in accounts])
    half, below = sum([share for _, share in ordered]) / 2, 0.0
    for level, share in ordered:
        below += share
        if below > half:
            return level
    return ordered[-1][0] if ordered else math.inf
