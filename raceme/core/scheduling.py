"""Schedulers: selection of clients, and release of their updates.

A method has one scheduler. `EveryIdle` releases every update at once, `InRounds` those of a round
together. Work on request and in time windows is in :mod:`raceme.core.schedulers`. A scheduler
handles clients and times, not models.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, ClassVar, cast

import numpy as np
from flwr.app import MetricRecord, RecordDict

from raceme.core.clients import Client, Fleet, Idle
from raceme.core.messages import ARRAYS, CONFIG, NUM_EXAMPLES, ROUND, TRAINING
from raceme.core.options import Value, option
from raceme.core.requests import InFlight, InvalidReplyError, Request, Update
from raceme.core.state import NoState, from_tree, to_tree

# -----------------------------------------------------------------------------
# Queries before a round, such as label counts or losses.
# -----------------------------------------------------------------------------


@dataclass
class OpenQueries:
    """Clients with open queries before a round.

    Attributes
    ----------
    unasked : dict[str, bool]
        Clients still to be queried.
    awaited : dict[str, int]
        Queried clients, to the number of the task.
    before : int
        Number of started rounds at the last query; −1 before the first.
    until : float
        Time limit for answers, in seconds.
    held_until : float
        Time limit for waiting for busy clients before the query; 0: no wait.
    """

    unasked: dict[str, bool] = field(default_factory=dict)
    awaited: dict[str, int] = field(default_factory=dict)
    before: int = -1
    until: float = 0.0
    held_until: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether any answer is missing."""
        return bool(self.unasked or self.awaited)

    def is_due(self, rounds: int, every: int) -> bool:
        """Return whether a query is due, after a number of rounds."""
        return self.before < 0 or rounds >= self.before + every

    def holds(self, now: float, patience: float) -> bool:
        """Return whether to wait for busy clients, for limited time."""
        self.held_until = self.held_until or now + patience
        return now < self.held_until

    def begin(self, clients: Iterable[str], rounds: int, until: float) -> None:
        """Start a query of some clients with a time limit."""
        self.unasked, self.awaited = dict.fromkeys(clients, True), {}
        self.before, self.until, self.held_until = rounds, until, 0.0

    def sent(self, task: InFlight) -> None:
        """Record that a client was queried."""
        if task.kind not in TRAINING and self.unasked.pop(task.client, False):
            self.awaited[task.client] = task.number

    def close(self, task: InFlight) -> None:
        """Close a query: answered or lost."""
        if self.awaited.get(task.client) == task.number:
            del self.awaited[task.client]

    def drop(self, client: str) -> None:
        """Drop a client that left."""
        self.unasked.pop(client, None)
        self.awaited.pop(client, None)

    def wake_at(self) -> float:
        """Return the time limit for answers; infinity without open queries."""
        if self.is_open:
            return self.until
        return self.held_until or math.inf

    def give_up(self) -> None:
        """Give up all open queries."""
        self.unasked, self.awaited = {}, {}


# -----------------------------------------------------------------------------
# Client sampling: choice of a round's clients among those online.
# -----------------------------------------------------------------------------


RANDOM, IN_TURN = "random", "in-turn"


def sample(online: Sequence[Client], count: int, rng: np.random.Generator) -> Sequence[Client]:
    """Draw clients, at least one, in order of greeting."""
    if count >= len(online):
        return online
    drawn = rng.permutation(len(online))[: max(1, count)]
    return [online[index] for index in sorted(drawn)]


def in_turn(
    online: Sequence[Client], count: int, picked: dict[str, bool], rng: np.random.Generator
) -> Sequence[Client]:
    """Pick clients never picked before in order of greeting; draw the rest.

    As in FlexCFL's published code for clustered methods (its FedAvg draws). New clients are picked
    before others are picked again, and clients offline at their turn once they return.

    Parameters
    ----------
    online : Sequence[Client]
        Clients that are online, in order of greeting.
    count : int
        Number to pick, at least one.
    picked : dict[str, bool]
        Clients picked before; updated.
    rng : numpy.random.Generator
        Generator for the rest, once all online clients had their turn.
    """
    first = [client for client in online if client.client_id not in picked][: max(1, count)]
    names = {client.client_id for client in first}
    others = [client for client in online if client.client_id not in names]
    if not first or count > len(first):
        names |= {client.client_id for client in sample(others, count - len(first), rng)}
    picked.update(dict.fromkeys((client.client_id for client in first), True))
    return [client for client in online if client.client_id in names]


# -----------------------------------------------------------------------------
# Schedulers: selection of clients, and release of their updates.
# -----------------------------------------------------------------------------


PATIENCE = 2.0
"""Multiple of a client's observed time after which its task in a round times out."""
STRANGER_PATIENCE = 20.0
"""The same for new clients, in multiples of the slowest answer of any client."""
_ASKING_SECONDS = 60.0
"""Time limit for answers before a round, as real devices may be slow or gone."""
_MOST_DOUBLINGS = 3
"""Maximum number of doublings of a client's time limit after timeouts."""


@dataclass(frozen=True)
class SelectionContext:
    """Context of a client selection.

    Attributes
    ----------
    now : float
        Time on the grid's clock, in seconds.
    fleet : Fleet
        All clients that have been greeted, online or not.
    idle : Idle
        Idle clients.
    rng : numpy.random.Generator
        Generator of random choices.
    greeting : bool
        Whether new nodes may still answer their greeting.
    places : int or None
        Number of clients that may get work; None for any. If a scheduler chooses more, some are
        drawn.
    """

    now: float
    fleet: Fleet
    idle: Idle
    rng: np.random.Generator
    greeting: bool = False
    places: int | None = None

    def busy(self) -> list[str]:
        """Return the online clients that are busy, e.g. with a test."""
        online = (client.client_id for client in self.fleet.online())
        return [client for client in online if client not in self.idle]


class Scheduler(ABC):
    """Decides which clients work, and which updates are aggregated together.

    Attributes
    ----------
    state : dataclass
        Complete state; part of every checkpoint.
    timeout_reason : str
        Reason for tasks that `wake` gives up.
    backs_off_when_late : bool
        Whether a client whose task timed out backs off.
    """

    state: object
    timeout_reason: str = "it took too long: the others waited for it"
    backs_off_when_late: bool = True

    @property
    def rounds(self) -> int | None:
        """Completed rounds or windows; None without rounds."""
        return None

    @property
    def together(self) -> bool:
        """Whether updates wait for all clients at work, and are released together."""
        return False

    @abstractmethod
    def choose(self, context: SelectionContext) -> Sequence[Client]:
        """Return the idle clients to give work to."""

    def queries(self, context: SelectionContext) -> Sequence[Request] | None:
        """Return the queries before work; None if work may begin."""
        return None

    def settings(self, work: Request) -> Mapping[str, Value]:
        """Return the scheduler's settings in the message of a work item."""
        return {}

    def sent(self, task: InFlight, now: float) -> None:  # noqa: B027
        """Record that work was sent to a client."""

    def accept(self, update: Update, now: float) -> Sequence[Update]:
        """Accept an update; return those to aggregate now.

        Raises
        ------
        InvalidReplyError
            It comes too late to be aggregated.
        """
        return [update]

    def lost(self, task: InFlight, now: float) -> Sequence[Update]:
        """Record work without an update; return the updates to aggregate now."""
        return []

    def left(self, client: str, now: float) -> Sequence[Update]:
        """Record that a client went offline; return the updates to aggregate now."""
        return []

    def joined(self, client: str) -> None:  # noqa: B027
        """Record that a client joined, for the first time or again."""

    def wake_at(self) -> float:
        """Return the next wake-up time; infinity for none."""
        return math.inf

    def wake(self, now: float) -> tuple[Collection[int], Sequence[Update]]:
        """Return the numbers of tasks to give up, and the updates to aggregate."""
        return (), ()

    def invited(self, client: str) -> bool:
        """Return whether a client may hold its work as an invitation, and answer meanwhile."""
        return False

    def is_quiescent(self, client: str, step: int) -> bool:
        """Return whether a client will never train again while its data stay at a step."""
        return False

    def no_progress_reason(self) -> str:
        """Return why the run cannot progress, or an empty text."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a tree of plain values."""
        tree: dict[str, Any] = to_tree(self.state)
        return tree

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        self.state = from_tree(type(self.state), tree)


class EveryIdle(Scheduler):
    """Asynchronous scheduling: every client always works, and every update is applied at once."""

    state: NoState

    def __init__(self) -> None:
        self.state = NoState()

    def choose(self, context: SelectionContext) -> Sequence[Client]:
        """Return all idle clients, up to the number of places."""
        if context.places is None:
            return context.idle.ready(context.now)
        return context.idle.draw(context.now, context.places, context.rng)


MetricsFn = Callable[[list[RecordDict], str], MetricRecord]
"""Aggregates the metrics of replies, given the name of the weight."""


@dataclass(frozen=True)
class FlowerArguments:
    """Arguments of Flower's strategies about clients and messages, with Flower's defaults."""

    fraction_train: float = option(
        1.0,
        "share of the connected nodes that train in a round, or at a time if there are no rounds",
        above=0,
        high=1,
    )
    fraction_evaluate: float = option(
        1.0, "share of the connected nodes that test models after each round", low=0, high=1
    )
    min_train_nodes: int = option(2, "least number of nodes that train, if connected", low=0)
    min_evaluate_nodes: int = option(2, "least number of nodes that test, if connected", low=0)
    min_available_nodes: int = option(
        2, "nodes that must be connected before the run begins", low=0
    )
    weighted_by_key: str = option(
        NUM_EXAMPLES, "the metric with a client's weight: its number of examples"
    )
    arrayrecord_key: str = option(ARRAYS, "name of the record with the model in messages")
    configrecord_key: str = option(CONFIG, "name of the record with the settings in messages")
    train_metrics_aggr_fn: MetricsFn | None = option(
        None, "aggregates clients' training metrics; by default the weighted mean"
    )
    evaluate_metrics_aggr_fn: MetricsFn | None = option(
        None, "aggregates clients' test metrics; by default the weighted mean"
    )
    accuracy_key: str = option(
        "", "the metric of a test that is the accuracy; by default accuracy or eval_acc"
    )
    loss_key: str = option("", "the metric that is the loss; by default loss or eval_loss")

    def trained(self, online: int) -> int:
        """Return how many of the online nodes train at a time, or in a round."""
        return _share(online, self.fraction_train, max(1, self.min_train_nodes))

    def tested(self, online: int) -> int:
        """Return how many of the online nodes test models after a round."""
        if not self.fraction_evaluate:
            return 0
        return _share(online, self.fraction_evaluate, self.min_evaluate_nodes)


def _share(online: int, fraction: float, least: int) -> int:
    # Rounded as in Flower, so that as many nodes take part as with Flower's own strategy.
    return min(online, max(int(fraction * online), least))


def share_of(clients: int, fraction: float) -> int:
    """Return a share of some clients, rounded down."""
    # Rounded first, or 0.29 of 100 would be 28.
    return int(round(fraction * clients, 9))


@dataclass(frozen=True)
class RoundsParameters:
    """Parameters of every round-based method."""

    in_rounds: ClassVar[bool] = True
    """Updates come in whole rounds, so that a suite may set their number."""

    fraction: float = option(
        1.0, "share of the online clients that train in a round", above=0, high=1
    )

    sampling: str = option(
        RANDOM,
        "how the clients of a round are drawn: random, or in-turn: every client once, in order of "
        "greeting, before any is drawn at random (FlexCFL's code)",
        among=(RANDOM, IN_TURN),
        formerly="picking",
    )

    def participants(self, clients: int) -> int:
        """Return how many of the clients take part in a round."""
        return max(1, share_of(clients, self.fraction))


@dataclass
class RoundState:
    """A round.

    Attributes
    ----------
    number : int
        Number of the round, from 1; 0 before the first.
    running : bool
        Whether it is in progress.
    unsent : dict[str, bool]
        Participants without their work so far, in order.
    open : dict[str, int]
        Working participants, to the number of their task.
    sent_at : dict[str, float]
        Times of sending their tasks.
    away : dict[str, bool]
        Participants that went offline; they rejoin if they return in time.
    updates : list[Update]
        Updates so far, in order of arrival.
    longest : dict[str, float]
        Longest time from sending work to its update, of each client, in seconds.
    timeouts : dict[str, int]
        Timed-out tasks since a client's last update; clients without any are left out.
    backs_off_until : dict[str, int]
        First round in which a client that timed out may take part again.
    picked : dict[str, bool]
        Clients that took part in any round, for sampling in turn.
    begun : dict[str, dict[int, bool]]
        Models that each participant trains or has trained, if participants train several.
    asking : OpenQueries
        Open queries before the next round.
    """

    number: int = 0
    running: bool = False
    unsent: dict[str, bool] = field(default_factory=dict)
    open: dict[str, int] = field(default_factory=dict)
    sent_at: dict[str, float] = field(default_factory=dict)
    away: dict[str, bool] = field(default_factory=dict)
    updates: list[Update] = field(default_factory=list)
    longest: dict[str, float] = field(default_factory=dict)
    timeouts: dict[str, int] = field(default_factory=dict)
    backs_off_until: dict[str, int] = field(default_factory=dict)
    picked: dict[str, bool] = field(default_factory=dict)
    begun: dict[str, dict[int, bool]] = field(default_factory=dict)
    asking: OpenQueries = field(default_factory=OpenQueries)


class InRounds(Scheduler):
    """Round-based scheduling: some clients work, and their updates are aggregated together.

    A round waits for its slowest participant, with a limit: work times out after twice its client's
    longest time (for new clients, twenty times the slowest answer of any client), or when its
    client goes offline. Without the limit, a lost message would delay a round by the whole timeout
    of a task. Bonawitz et al. (MLSys 2019, section 2.2) also close rounds at a time limit.

    A client that timed out gets twice the time at its next attempt, at most eight times, since it
    may have become slower; after the m-th consecutive timeout it is excluded for 2^(m−1) − 1
    rounds, so that an unresponsive client does not delay every round. An update resets both.

    Parameters
    ----------
    fraction : float
        Share of the online clients that take part.
    participants : Callable, optional
        Chooses the participants instead, from the online clients with a generator.
    prepares : Callable, optional
        Whether an update only prepares its client and is applied at once.
    returns : Callable, optional
        Whether a prepared client, given by its id, works again in the same round.
    sampling : str
        How :meth:`pick` draws clients: ``"random"`` or ``"in-turn"``.
    models : Callable, optional
        Returns the models that a participant, given by its id, trains one after another in a round,
        for methods whose clients train several; see :meth:`next_model`.
    queries : Callable, optional
        Returns the queries before the next round; None if it may begin.
    """

    state: RoundState
    least: int = 1
    """Minimum number of participants, if online."""

    def __init__(
        self,
        fraction: float = 1.0,
        participants: Callable[[Sequence[Client], np.random.Generator], Sequence[Client]]
        | None = None,
        prepares: Callable[[Update], bool] = lambda update: False,
        returns: Callable[[str], bool] = lambda client: False,
        sampling: str = RANDOM,
        models: Callable[[str], Iterable[int]] | None = None,
        queries: Callable[[SelectionContext], Sequence[Request] | None] = lambda context: None,
    ) -> None:
        self._fraction, self._sampling = fraction, sampling
        self._participants = participants or self._share
        self._prepares, self._returns = prepares, returns
        self._models, self._queries = models, queries
        self.state = RoundState()

    def queries(self, context: SelectionContext) -> Sequence[Request] | None:
        """Return the queries before the next round; None if it may begin."""
        return self._queries(context)

    @property
    def rounds(self) -> int:
        """Number of completed rounds."""
        return self.state.number - self.state.running

    @property
    def together(self) -> bool:
        """A round waits for its participants."""
        return True

    def _share(self, online: Sequence[Client], rng: np.random.Generator) -> Sequence[Client]:
        return self.pick(online, share_of(len(online), self._fraction), rng)

    def pick(
        self, online: Sequence[Client], count: int, rng: np.random.Generator
    ) -> Sequence[Client]:
        """Pick at least one client, at random or in turn; in order of greeting."""
        count = max(count, self.least)
        if self._sampling == IN_TURN:
            return in_turn(online, count, self.state.picked, rng)
        return sample(online, count, rng)

    def ask_first(
        self,
        context: SelectionContext,
        wanted: Callable[[str], bool] = lambda client: True,
        every: int = 1,
        patience: float = _ASKING_SECONDS,
    ) -> list[str] | None:
        """Return the clients to query before the next round; None if it may begin.

        Waits while a client to query is busy with a test.

        Parameters
        ----------
        context : SelectionContext
            The loop's selection context.
        wanted : Callable
            Whether to query a client, given by its id; by default all idle ones.
        every : int
            Interval in rounds; 0: repeatedly, as long as a client is wanted.
        patience : float
            Time limit for answers in seconds.
        """
        state = self.state
        if state.running or context.greeting:
            return None
        if not state.asking.is_open and state.asking.is_due(state.number, every):
            if any(wanted(client) for client in context.busy()) and state.asking.holds(
                context.now, patience
            ):
                return []
            ready = [client.client_id for client in context.idle.ready(context.now)]
            state.asking.begin(filter(wanted, ready), state.number, context.now + patience)
        if not state.asking.is_open:
            return None
        return [client for client in state.asking.unasked if client in context.idle]

    def choose(self, context: SelectionContext) -> Sequence[Client]:
        """Begin a round if necessary; return the participants to send work to."""
        state = self.state
        if not state.running:
            self._begin(context)
        chosen = [
            context.fleet.clients[client]
            for client in state.unsent
            if client in context.idle and context.fleet.clients[client].ready_at <= context.now
        ]
        return chosen

    def _begin(self, context: SelectionContext) -> None:
        """Choose participants among the online clients without a back-off that are not held."""
        if context.greeting:
            return
        state = self.state
        rested = (c for c in context.fleet.online() if c.ready_at <= context.now)
        online = context.idle.not_held(rested)
        # Without other clients, no client is delayed.
        late = {c for c, number in state.backs_off_until.items() if number > state.number + 1}
        online = [c for c in online if c.client_id not in late] or online
        if not online:
            return
        state.number += 1
        state.running = True
        state.begun = {}
        chosen = self._participants(online, context.rng)
        state.unsent = {client.client_id: True for client in chosen}

    def settings(self, work: Request) -> Mapping[str, Value]:
        """Return the number of the round, as in messages of Flower's own strategies.

        They have no task number, so that with one seed a client trains alike under all round-based
        methods.
        """
        return {ROUND: self.state.number}

    def sent(self, task: InFlight, now: float) -> None:
        """Record the task of a participant; other work does not belong to the round."""
        state = self.state
        state.asking.sent(task)
        if state.unsent.pop(task.client, None) is None:
            return
        state.away.pop(task.client, None)
        state.open[task.client], state.sent_at[task.client] = task.number, now
        if self._models is not None and task.kind in TRAINING:
            state.begun.setdefault(task.client, {})[task.cluster] = True

    def next_model(self, client: str) -> int | None:
        """Return the first of a client's models that it has not begun to train in this round."""
        begun = self.state.begun.get(client, {})
        models = () if self._models is None else self._models(client)
        return next((model for model in models if model not in begun), None)

    def accept(self, update: Update, now: float) -> Sequence[Update]:
        """Keep an update until the end of the round; then return all updates."""
        state, client = self.state, update.task.client
        if state.open.get(client) != update.task.number:
            raise InvalidReplyError("it came after its round was over")
        del state.open[client]
        state.away.pop(client, None)
        took = now - state.sent_at.pop(client)
        state.longest[client] = max(took, state.longest.get(client, 0.0))
        state.timeouts.pop(client, None)
        state.backs_off_until.pop(client, None)
        if self._prepares(update):
            if self._returns(client):
                state.unsent[client] = True
            return [update, *self._released()]
        state.updates.append(update)
        if self.next_model(client) is not None:
            state.unsent[client] = True
        return self._released()

    def work_again(self, client: str) -> None:
        """Let a participant that answered work again in the round."""
        if self.state.running:
            self.state.unsent[client] = True

    def lost(self, task: InFlight, now: float) -> Sequence[Update]:
        """Drop a client from the round, or its open query."""
        state = self.state
        state.asking.close(task)
        if state.open.get(task.client) == task.number:
            del state.open[task.client], state.sent_at[task.client]
        return self._released()

    def left(self, client: str, now: float) -> Sequence[Update]:
        """Do not wait for a client; if it returns during the round, it may take part."""
        state = self.state
        state.asking.drop(client)
        if client in state.open or client in state.unsent:
            state.away[client] = True
            state.unsent.pop(client, None)
        return self._released()

    def joined(self, client: str) -> None:
        """Let a returning participant take part again."""
        state = self.state
        if state.running and state.away.pop(client, False):
            state.open.pop(client, None)
            state.sent_at.pop(client, None)
            state.unsent[client] = True

    def wake_at(self) -> float:
        """Return the time limit of answers, or of the last task."""
        if (due := self.state.asking.wake_at()) < math.inf:
            return due
        waited_for = [client for client in self.state.open if client not in self.state.away]
        if not waited_for:
            return math.inf
        # Computed once for all clients, since this method is called at every answer of a round.
        longest = self.state.longest.values()
        middle = median(longest) if longest else math.inf
        slowest = max(longest, default=math.inf)
        return max(self._given_up_at(client, middle, slowest) for client in waited_for)

    def wake(self, now: float) -> tuple[Collection[int], Sequence[Update]]:
        """Begin without late answers, or give up late tasks."""
        state = self.state
        if state.asking.is_open:
            state.asking.give_up()
            return (), ()
        late = [client for client in state.open if client not in state.away]
        for client in late:
            timeouts = state.timeouts[client] = state.timeouts.get(client, 0) + 1
            state.backs_off_until[client] = state.number + 2 ** min(timeouts - 1, 30)
        return [state.open[client] for client in late], ()

    def _given_up_at(self, client: str, middle: float, slowest: float) -> float:
        """Return the time limit of a client's task, by the median and the longest answer."""
        longest = self.state.longest
        if client in longest:
            patience = PATIENCE * max(longest[client], middle)
        else:
            patience = STRANGER_PATIENCE * slowest
        doublings = min(self.state.timeouts.get(client, 0), _MOST_DOUBLINGS)
        return self.state.sent_at[client] + math.ldexp(patience, doublings)

    def _released(self) -> Sequence[Update]:
        """Return the round's updates if complete, and reset for the next."""
        state = self.state
        if not state.running or state.unsent or any(c not in state.away for c in state.open):
            return []
        released = state.updates
        state.running, state.updates = False, []
        state.open, state.sent_at, state.away = {}, {}, {}
        return released


# -----------------------------------------------------------------------------
# A sequence of two schedulers, e.g. pre-training and then the method proper.
# -----------------------------------------------------------------------------


class _Then:
    """The proxy that `then` returns."""

    def __init__(self, first: Scheduler, second: Scheduler, is_over: Callable[[], bool]) -> None:
        self._first, self._second, self._is_over = first, second, is_over

    def __getattr__(self, name: str) -> Any:
        return getattr(self._second if self._is_over() else self._first, name)

    @property
    def rounds(self) -> int | None:
        return self._second.rounds

    def state_dict(self) -> dict[str, Any]:
        return {"first": self._first.state_dict(), "second": self._second.state_dict()}

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        self._first.load_state_dict(tree["first"])
        self._second.load_state_dict(tree["second"])


def then(first: Scheduler, second: Scheduler, is_over: Callable[[], bool]) -> Scheduler:
    """Return a scheduler that switches from the first to the second on a condition.

    The second one accepts or refuses open tasks of the first. Rounds or windows are those of the
    second.

    Parameters
    ----------
    is_over : Callable
        Returns whether to switch, derived from the method's state.
    """
    return cast(Scheduler, _Then(first, second, is_over))
