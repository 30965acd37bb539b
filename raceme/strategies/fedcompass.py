"""FedCompass: fast clients take more local steps, so that groups of clients arrive together.

Li et al., "FedCompass: Efficient Cross-Silo Federated Learning on Heterogeneous Client Devices
Using a Computing Power-Aware Scheduler", ICLR 2024. When a group is complete, ``w ← w + (α/N) Σ
st(s_i) (w_i − w)``, with ``st(s) = (1 + s)^−a``: N clients, s_i staleness, all against the same w.

The authors' code has st(s) = (1 + s)^a, which increases the weight of stale updates and which we
consider an error. N is the number of clients online. The paper's local optimiser is Adam, with
mini-batches of 64. Base models of clients are not kept.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from raceme.core.clients import Client
from raceme.core.errors import UserError
from raceme.core.messages import short_task
from raceme.core.options import option
from raceme.core.requests import InFlight, Outcome, Outcomes, Request, Update
from raceme.core.scheduling import Scheduler, SelectionContext, sample
from raceme.core.strategy import Method, Needs

# -----------------------------------------------------------------------------
# Groups that arrive together: each client gets as many steps as it can do in the common time.
# -----------------------------------------------------------------------------


@dataclass
class ArrivalGroup:
    """Clients expected at one time.

    Attributes
    ----------
    expected : float
        T: expected arrival time in seconds.
    latest : float
        L: latest arrival time.
    fastest : float
        Seconds for a step of its fastest member.
    open : dict[str, bool]
        Working members.
    held : list[Update]
        Updates of the others.
    """

    expected: float
    latest: float
    fastest: float
    open: dict[str, bool] = field(default_factory=dict)
    held: list[Update] = field(default_factory=list)


@dataclass
class ArrivalState:
    """State of arrival groups.

    Attributes
    ----------
    seconds : dict[str, float]
        v_i: seconds that a client needs for a step, transfers included.
    steps : dict[str, int]
        Q_i: steps of a client's latest work.
    sent_at : dict[str, float]
        Time in seconds at which each client's latest work was sent.
    groups : dict[int, ArrivalGroup]
        Open groups.
    made : int
        Number of groups so far.
    home : dict[str, int]
        Group of each working or waiting client.
    late : list[Update]
        Late updates, aggregated with the next group's.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    sent_at: dict[str, float] = field(default_factory=dict)
    groups: dict[int, ArrivalGroup] = field(default_factory=dict)
    made: int = 0
    home: dict[str, int] = field(default_factory=dict)
    late: list[Update] = field(default_factory=list)


class ByArrival(Scheduler):
    """Schedules groups that arrive together: faster clients take more steps.

    A client's first work has the standard length, and its update is applied alone. Then each client
    joins the group in which it can take most steps, or founds one. Early clients wait; when the
    last arrives, or at the group's latest time, its updates are aggregated together with late ones
    of other groups (Li et al., "FedCompass", ICLR 2024, Algorithms 1 and 2).

    Parameters
    ----------
    fewest, most : int
        Q_min and Q_max: steps of a client's work.
    patience : float
        λ: latest time of a group, in multiples of its first member's expected time.
    renewal : float
        Weight of the last measurement in a client's speed estimate.
    """

    state: ArrivalState

    def __init__(self, fewest: int, most: int, patience: float, renewal: float) -> None:
        self._fewest, self._most = fewest, most
        self._patience, self._renewal = patience, renewal
        self.state = ArrivalState()

    def steps_of(self, client: str) -> int:
        """Return the number of steps of a selected client's work."""
        return self.state.steps[client]

    # Selection.

    def choose(self, context: SelectionContext) -> Sequence[Client]:
        """Return the idle clients not waiting in a group, the fastest first."""
        state = self.state
        ready = [c for c in context.idle.ready(context.now) if c.client_id not in state.home]
        if context.places is not None:
            ready = list(sample(ready, context.places, context.rng))
        ready.sort(key=lambda client: state.seconds.get(client.client_id, math.inf))
        for client in ready:
            self._assign(client.client_id, context.now)
        return ready

    def _assign(self, client: str, now: float) -> None:
        """Decide a client's number of steps and group."""
        state = self.state
        seconds = state.seconds.get(client)
        if seconds is None:
            state.steps[client] = self._most
            return
        joins = {
            number: steps
            for number, group in state.groups.items()
            if self._fewest <= (steps := steps_until(group.expected, now, seconds)) <= self._most
        }
        if joins:
            number = max(joins, key=joins.__getitem__)
            group, state.steps[client] = state.groups[number], joins[number]
            group.fastest = min(group.fastest, seconds)
        else:
            steps = state.steps[client] = self._steps_of_founder(now, seconds)
            number, needed = state.made, steps * seconds
            group = ArrivalGroup(now + needed, now + self._patience * needed, seconds)
            state.groups[number] = group
            state.made += 1
        state.home[client] = number
        group.open[client] = True

    def _steps_of_founder(self, now: float, seconds: float) -> int:
        """Return the steps after which a new group meets the next work of an existing one."""
        meets = [
            steps_until(group.latest + self._most * group.fastest, now, seconds)
            for group in self.state.groups.values()
            if now < group.latest
        ]
        return max(self._fewest, max((q for q in meets if q <= self._most), default=self._most))

    def sent(self, task: InFlight, now: float) -> None:
        """Record the time of sending work to a client."""
        self.state.sent_at[task.client] = now

    # Updates.

    def accept(self, update: Update, now: float) -> Sequence[Update]:
        """Hold an update until its group is complete; a client's first one is applied alone."""
        state, client = self.state, update.task.client
        measured = (now - state.sent_at[client]) / state.steps[client]
        known = state.seconds.get(client)
        state.seconds[client] = (
            measured if known is None else (1.0 - self._renewal) * known + self._renewal * measured
        )
        if known is None:
            return [update]
        group = state.groups.get(state.home.get(client, -1))
        if group is None:
            state.late.append(update)
            return self._remove_member(client)
        group.held.append(update)
        group.open.pop(client)
        return self._released_if_complete(state.home[client])

    def lost(self, task: InFlight, now: float) -> Sequence[Update]:
        """Do not wait for a client whose work failed."""
        return self._remove_member(task.client)

    def left(self, client: str, now: float) -> Sequence[Update]:
        """Do not wait for a client that left; keep its updates."""
        return self._remove_member(client)

    def _remove_member(self, client: str) -> Sequence[Update]:
        """Remove a working client from its group; return the group's number."""
        state = self.state
        number = state.home.get(client, -1)
        group = state.groups.get(number)
        if group is None:
            state.home.pop(client, None)
            return []
        if client not in group.open:
            return []
        del group.open[client], state.home[client]
        return self._released_if_complete(number)

    def _released_if_complete(self, number: int) -> Sequence[Update]:
        """Return a group's updates if no client of it is at work any more."""
        return [] if self.state.groups[number].open else self._close_group(number)

    def _close_group(self, number: int) -> list[Update]:
        """End a group; return the updates of its members, and late updates of other groups."""
        state = self.state
        group = state.groups.pop(number)
        for update in group.held:
            state.home.pop(update.task.client, None)
        released, state.late = [*group.held, *state.late], []
        return released

    def wake_at(self) -> float:
        """Return the earliest of the groups' latest times."""
        return min((group.latest for group in self.state.groups.values()), default=math.inf)

    def wake(self, now: float) -> tuple[Collection[int], Sequence[Update]]:
        """End the groups whose latest time has passed; clients still at work will be late."""
        over = [n for n, group in self.state.groups.items() if group.latest <= now]
        return (), [update for number in over for update in self._close_group(number)]


def steps_until(end: float, now: float, seconds: float) -> int:
    """Return the number of steps that fit into the time until an end."""
    # A client that needs no time can take any number of steps; this exceeds every limit.
    return int((end - now) / seconds) if seconds > 0.0 else 2**31


# -----------------------------------------------------------------------------
# FedCompass: fast clients take more local steps, so that groups of clients arrive together.
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class FedCompassParameters:
    """Hyper-parameters; the defaults are those of the authors' code."""

    min_steps: int = option(20, "Q_min: least mini-batches of a client's work", low=1)
    max_steps: int = option(100, "Q_max: most mini-batches of a client's work", low=1)
    patience: float = option(
        1.5, "λ: latest time of a group, in multiples of its first member's time", low=1
    )
    renewal: float = option(
        0.9, "weight of the last measurement in a client's speed", above=0, high=1
    )
    alpha: float = option(0.9, "α: step of the model for all clients together", above=0, high=1)
    a: float = option(0.5, "a: exponent of the staleness weight (1 + s)^−a", low=0)

    def __post_init__(self) -> None:
        if self.min_steps > self.max_steps:
            raise UserError(
                f"fedcompass: min-steps is {self.min_steps} and max-steps {self.max_steps}: the "
                "former must not be larger."
            )


class FedCompass(Method):
    """Groups scheduled to arrive together: faster clients take more local steps (FedCompass)."""

    parameters_type = FedCompassParameters
    needs = Needs(one_model=True)
    parameters: FedCompassParameters
    scheduling: ByArrival

    def scheduler(self) -> Scheduler:
        """Schedule groups of clients that arrive together."""
        own = self.parameters
        return ByArrival(own.min_steps, own.max_steps, own.patience, own.renewal)

    def request_for(self, client: str) -> Request:
        """Return training with as many steps as the client can take until its group arrives."""
        examples = self.progress.fleet.clients[client].num_examples
        steps = self.scheduling.steps_of(client)
        return Request(client, settings=short_task(self.train_config, examples, steps))

    def aggregate(self, updates: Sequence[Update]) -> Outcomes:
        """Move the model towards those of a group: w ← w + (α/N) Σ st(s_i) (w_i − w)."""
        model, own = self.models[0], self.parameters
        clients = max(len(updates), self.clusters.size(0))
        step, outcomes = np.zeros_like(model.vector), Outcomes()
        for update in updates:
            share = own.alpha / clients * (1.0 + update.staleness) ** -own.a
            step += np.float32(share) * (update.vector - model.vector)
            outcomes[update.number] = Outcome(0, update.staleness, share)
        model.move(step)
        return outcomes
