"""Schedulers: which clients are given work, and when what came back is acted on.

A method has one scheduler. With `EveryIdle` it acts on every update at once, with `InRounds` on
those of a round together. Clients that decide themselves when they work are in
:mod:`raceme.strategies.cdfl.strategy`, time cut into windows in
:mod:`raceme.strategies.csafl`. A scheduler knows clients and times, no models.
"""

from __future__ import annotations

import math
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from statistics import median
from typing import Any, ClassVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
from flwr.app import MetricRecord, RecordDict

from raceme.core.clients import Client, Fleet, Idle
from raceme.core.messages import ARRAYS, CONFIG, NUM_EXAMPLES, ROUND, TRAINING
from raceme.core.options import Value, option
from raceme.core.requests import InFlight, InvalidReplyError, Request, Update

# -----------------------------------------------------------------------------
# Queries before a round: label counts, losses, whatever a method must know first.
# -----------------------------------------------------------------------------


@dataclass
class OpenQueries:
    """The clients that are asked before a round, and have not answered yet.

    Attributes
    ----------
    unasked : dict[str, bool]
        Clients that are to be asked.
    awaited : dict[str, int]
        Clients that have been asked, to the number of the task.
    before : int
        Number of rounds that had begun when clients were asked last; −1 before the first time.
    until : float
        Until when answers are waited for, in seconds.
    held_until : float
        Until when clients that are busy are waited for before any client is asked; 0: none is.
    """

    unasked: dict[str, bool] = field(default_factory=dict)
    awaited: dict[str, int] = field(default_factory=dict)
    before: int = -1
    until: float = 0.0
    held_until: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether any client is waited for."""
        return bool(self.unasked or self.awaited)

    def is_due(self, rounds: int, every: int) -> bool:
        """Return whether clients are to be asked: so many rounds since the last time."""
        return self.before < 0 or rounds >= self.before + every

    def holds(self, now: float, patience: float) -> bool:
        """Return whether to wait for clients that are busy: so many seconds at the most."""
        self.held_until = self.held_until or now + patience
        return now < self.held_until

    def begin(self, clients: Iterable[str], rounds: int, until: float) -> None:
        """Wait for the answers of some clients, until some time."""
        self.unasked, self.awaited = dict.fromkeys(clients, True), {}
        self.before, self.until, self.held_until = rounds, until, 0.0

    def sent(self, task: InFlight) -> None:
        """Note that a client was asked."""
        if task.kind not in TRAINING and self.unasked.pop(task.client, False):
            self.awaited[task.client] = task.number

    def close(self, task: InFlight) -> None:
        """Wait no more for an answer: it has come, or never will."""
        if self.awaited.get(task.client) == task.number:
            del self.awaited[task.client]

    def drop(self, client: str) -> None:
        """Wait no more for a client: it is gone."""
        self.unasked.pop(client, None)
        self.awaited.pop(client, None)

    def wake_at(self) -> float:
        """Return until when answers are waited for; infinity if none are."""
        if self.is_open:
            return self.until
        return self.held_until or math.inf

    def give_up(self) -> None:
        """Wait no more for any client."""
        self.unasked, self.awaited = {}, {}


# -----------------------------------------------------------------------------
# Client sampling: which of the online clients take part in a round.
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
    """Pick clients that have never been picked, in order of greeting; draw only what is missing.

    What FlexCFL's published code does for its clustered methods; its FedAvg draws. A newcomer is
    picked before any other client is picked again, and a client that is offline when its turn
    comes, once it is back.

    Parameters
    ----------
    online : Sequence[Client]
        Clients that are online, in order of greeting.
    count : int
        How many to pick; at least one is.
    picked : dict[str, bool]
        Clients that have been picked before; those picked now are added.
    rng : numpy.random.Generator
        Draws the others, once all clients that are online have had their turn.
    """
    first = [client for client in online if client.client_id not in picked][: max(1, count)]
    names = {client.client_id for client in first}
    others = [client for client in online if client.client_id not in names]
    if not first or count > len(first):
        names |= {client.client_id for client in sample(others, count - len(first), rng)}
    picked.update(dict.fromkeys((client.client_id for client in first), True))
    return [client for client in online if client.client_id in names]


# -----------------------------------------------------------------------------
# Strategy state to plain trees and back: derived from the dataclasses, not written twice.
#
# A tree consists of dicts with text keys, lists, numbers, text, booleans, None and numpy arrays.
# -----------------------------------------------------------------------------


def to_tree(value: Any) -> Any:
    """Turn a dataclass, or anything made of dataclasses and containers, into a tree. Copies arrays.

    Raises
    ------
    TypeError
        For a kind of object that a tree cannot hold.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_tree(getattr(value, item.name)) for item in _kept(value)}
    if isinstance(value, Mapping):
        return {str(key): to_tree(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_tree(inner) for inner in value]
    if isinstance(value, set | frozenset):
        # In order, so that two runs write the same.
        return sorted(to_tree(inner) for inner in value)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"cannot keep a {type(value).__name__} in a state")


def _kept(value: Any) -> list[Field[Any]]:
    """Return the fields of a dataclass that are part of a state."""
    return [item for item in fields(value) if not item.metadata.get("transient")]


_TYPES: dict[Any, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (float, int),
    str: (str,),
    dict: (dict,),
    MutableMapping: (dict,),
    list: (list,),
    tuple: (list,),
    set: (list,),
    frozenset: (list,),
    np.ndarray: (np.ndarray,),
}
"""What stands in a tree for a type."""


def from_tree(kind: Any, tree: Any) -> Any:
    """Build an object of type `kind` from the tree that :func:`to_tree` made of one.

    Raises
    ------
    ValueError
        The tree has other fields than the dataclass, or something in it is of another type.
    """
    wanted = _TYPES.get(get_origin(kind) or kind)
    if wanted and type(tree) not in wanted:
        raise ValueError(f"{str(tree)[:40]!r} is no {getattr(kind, '__name__', kind)}")
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(tree, dict):
            raise ValueError(f"not a {kind.__name__}: {str(tree)[:40]!r}")
        hints = get_type_hints(kind)
        names = [item.name for item in _kept(kind)]
        if set(names) != set(tree):
            raise ValueError(f"not a {kind.__name__}: fields {sorted(tree)}, not {sorted(names)}")
        return kind(**{name: from_tree(hints[name], tree[name]) for name in names})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if tree is None:
            return None
        return from_tree(next(arg for arg in arguments if arg is not type(None)), tree)
    if origin in (dict, MutableMapping):
        return {arguments[0](key): from_tree(arguments[1], inner) for key, inner in tree.items()}
    if origin is list:
        return [from_tree(arguments[0], inner) for inner in tree]
    if origin in (set, frozenset):
        return origin(from_tree(arguments[0], inner) for inner in tree)
    if origin is tuple:
        return tuple(from_tree(arguments[0], inner) for inner in tree)
    if isinstance(tree, np.ndarray):
        _check_dtype(tree, arguments)
        return tree.copy()
    return kind(tree) if kind in (int, float, str) else tree


def _check_dtype(array: np.ndarray[Any, Any], arguments: tuple[Any, ...]) -> None:
    """Raise ValueError if an array's numbers are not those of its annotation, NDArray[kind]."""
    wanted = get_args(arguments[1])[0] if len(arguments) == 2 else None
    if isinstance(wanted, type) and not issubclass(array.dtype.type, wanted):
        raise ValueError(f"an array of {array.dtype} where {wanted.__name__} belongs")


# -----------------------------------------------------------------------------
# Schedulers: which clients are given work, and when what came back is acted on.
# -----------------------------------------------------------------------------


_PATIENCE = 2.0
"""A client's task of a round is given up after so many times what the client was seen to need."""
_STRANGER_PATIENCE = 20.0
"""The same for a client that has not answered yet, in times of the slowest answer of any client."""
_ASKING_SECONDS = 60.0
"""How long a round waits for answers: real devices may be slow to answer, or gone."""
_MOST_DOUBLINGS = 3
"""How often a client is given twice the time after it was given up."""


@dataclass(frozen=True)
class SelectionContext:
    """What a scheduler is told when it chooses clients.

    Attributes
    ----------
    now : float
        Time on the grid's clock, in seconds.
    fleet : Fleet
        All clients that have been greeted, online or not.
    idle : Idle
        Those of them that have nothing to do.
    rng : numpy.random.Generator
        Draws whatever is left to chance.
    greeting : bool
        Whether nodes that have come may still introduce themselves any moment.
    places : int or None
        How many clients may be given work; None for any number. Of more that a policy chooses,
        some are drawn.
    """

    now: float
    fleet: Fleet
    idle: Idle
    rng: np.random.Generator
    greeting: bool = False
    places: int | None = None

    def busy(self) -> list[str]:
        """Return the clients that are online and have something to do: a test, say."""
        online = (client.client_id for client in self.fleet.online())
        return [client for client in online if client not in self.idle]


@dataclass
class NoState:
    """State of a scheduler that keeps nothing between two calls."""


class Scheduler(ABC):
    """Decides which clients work, and which updates are acted on together.

    Attributes
    ----------
    state : dataclass
        All that decides what follows; part of every checkpoint.
    timeout_reason : str
        Why a task that `wake` gives up is of no use any more.
    backs_off_when_late : bool
        Whether a client whose task is given up rests before it is given work again.
    """

    state: object
    timeout_reason: ClassVar[str] = "it took too long: the others waited for it"
    backs_off_when_late: ClassVar[bool] = True

    @property
    def rounds(self) -> int | None:
        """Rounds or windows that are over; None for a policy that has none."""
        return None

    @abstractmethod
    def choose(self, moment: SelectionContext) -> Sequence[Client]:
        """Return the idle clients that are given work now."""

    def queries(self, moment: SelectionContext) -> Sequence[Request] | None:
        """Return what clients are asked before they work; None if they may begin."""
        return None

    def settings(self, work: Request) -> Mapping[str, Value]:
        """Return what the message of some work says because of the policy."""
        return {}

    def sent(self, task: InFlight, now: float) -> None:  # noqa: B027
        """Note that a client was sent its work."""

    def accept(self, update: Update, now: float) -> Sequence[Update]:
        """Take an update; return those that the method is to act on now, together.

        Raises
        ------
        InvalidReplyError
            It comes too late to be of any use.
        """
        return [update]

    def lost(self, task: InFlight, now: float) -> Sequence[Update]:
        """Note that work brought no update; return what is to be acted on because of it."""
        return []

    def left(self, client: str, now: float) -> Sequence[Update]:
        """Note that a client went offline; return what is to be acted on because of it."""
        return []

    def joined(self, client: str) -> None:  # noqa: B027
        """Note that a client is there, for the first time or again."""

    def wake_at(self) -> float:
        """Return when it wants to be woken; infinity for never."""
        return math.inf

    def wake(self, now: float) -> tuple[Collection[int], Sequence[Update]]:
        """Return the numbers of tasks to be given up, and updates to be acted on."""
        return (), ()

    def invited(self, client: str) -> bool:
        """Return whether a client that was given work may wait with it, and answer meanwhile."""
        return False

    def is_quiescent(self, client: str, step: int) -> bool:
        """Return whether a client will never train again as long as its data stay at a step."""
        return False

    def hopeless(self) -> str:
        """Return why going on can bring nothing; empty as long as it may."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a tree of plain values."""
        tree: dict[str, Any] = to_tree(self.state)
        return tree

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        self.state = from_tree(type(self.state), tree)


class EveryIdle(Scheduler):
    """Every client works all the time, and every update is acted on at once: asynchrony."""

    state: NoState

    def __init__(self) -> None:
        self.state = NoState()

    def choose(self, moment: SelectionContext) -> Sequence[Client]:
        """Return all clients that are idle, or as many of them as there are places."""
        if moment.places is None:
            return moment.idle.ready(moment.now)
        return moment.idle.draw(moment.now, moment.places, moment.rng)


MetricsFn = Callable[[list[RecordDict], str], MetricRecord]
"""Aggregates the metrics of replies, given the name of the weight among them."""


@dataclass(frozen=True)
class FlowerArguments:
    """What Flower's strategies are told about clients and messages, with Flower's defaults."""

    fraction_train: float = option(
        1.0,
        "share of the connected nodes that train: in a round, or at a time where there are none",
        above=0,
        high=1,
    )
    fraction_evaluate: float = option(
        1.0, "share of the connected nodes that test models after each round", low=0, high=1
    )
    min_train_nodes: int = option(2, "nodes that train at least, as far as connected", low=0)
    min_evaluate_nodes: int = option(2, "nodes that test at least, as far as connected", low=0)
    min_available_nodes: int = option(
        2, "nodes that must be connected before the run begins", low=0
    )
    weighted_by_key: str = option(
        NUM_EXAMPLES, "the metric that says how much a client counts: its number of examples"
    )
    arrayrecord_key: str = option(ARRAYS, "name of the record with the model in messages")
    configrecord_key: str = option(CONFIG, "name of the record with the settings in messages")
    train_metrics_aggr_fn: MetricsFn | None = option(  # noqa: RUF009
        None, "aggregates what clients measured in training; by default the mean by weight"
    )
    evaluate_metrics_aggr_fn: MetricsFn | None = option(  # noqa: RUF009
        None, "aggregates what clients measured in tests; by default the mean by weight"
    )
    accuracy_key: str = option(
        "", "the metric of a test that is the accuracy; by default it is found by its name"
    )

    def trained(self, online: int) -> int:
        """Return how many of so many nodes train: at a time, or in a round."""
        return _share(online, self.fraction_train, max(1, self.min_train_nodes))

    def tested(self, online: int) -> int:
        """Return how many of so many nodes test models after a round."""
        if not self.fraction_evaluate:
            return 0
        return _share(online, self.fraction_evaluate, self.min_evaluate_nodes)


def _share(online: int, fraction: float, least: int) -> int:
    return min(online, max(int(fraction * online), least))


@dataclass(frozen=True)
class RoundsParameters:
    """What every round-based method can be told."""

    in_rounds: ClassVar[bool] = True
    """Such a method's updates come in whole rounds, of which a suite may plan another number."""

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
        """Return how many of so many clients take part in a round."""
        return max(1, int(self.fraction * clients))


@dataclass
class RoundState:
    """A round.

    Attributes
    ----------
    number : int
        Number of the round, from 1; 0 before the first.
    running : bool
        Whether it is under way.
    unsent : dict[str, bool]
        Participants that have not been sent their work yet, in order.
    open : dict[str, int]
        Participants that work, to the number of their task.
    sent_at : dict[str, float]
        When they were sent it.
    away : dict[str, bool]
        Participants that went offline; one that comes back in time takes part again.
    updates : list[Update]
        What has come back so far, in order of arrival.
    longest : dict[str, float]
        Longest time from sending work to its update, of each client, in seconds.
    timeouts : dict[str, int]
        Tasks that were given up since a client's last update; clients without any are left out.
    backs_off_until : dict[str, int]
        Number of the round from which on a client that was given up may take part again.
    picked : dict[str, bool]
        Clients that have taken part in any round; only where they are picked in turn.
    asking : OpenQueries
        The queries whose answers are awaited before the next round.
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
    asking: OpenQueries = field(default_factory=OpenQueries)


class InRounds(Scheduler):
    """Some clients work, and when all are back their updates are acted on together.

    A round waits for the slowest of its participants, but not for ever: work that takes twice as
    long as its client ever needed is taken for lost (twenty times the slowest answer of any, for
    a client that has never answered), as is that of a client that went offline. Without this rule
    one lost message would cost a round the whole timeout of a task, which no deployment would wait
    for (Bonawitz et al., MLSys 2019, section 2.2, closes rounds at a time limit too).

    A client that was given up has twice the time at its next attempt, at most eight times, since
    it may have become slower; after the m-th time in a row it sits out 2^(m−1) − 1 rounds, so that
    one that is online but answers no more does not hold up every round. An update clears both.

    Parameters
    ----------
    fraction : float
        Share of the online clients that take part.
    participants : Callable, optional
        Chooses them, instead: from the online clients, with a generator.
    prepares : Callable, optional
        Tells updates that only prepare their client for what follows: they are acted on at once.
    returns : Callable, optional
        Whether a client that was prepared, given by its id, works once more in the same round.
    sampling : str
        How :meth:`pick` draws clients: ``"random"`` or ``"in-turn"``.
    again : Callable, optional
        Whether a client that has answered, given by its id, has more to do in the same round.
    queries : Callable, optional
        Returns what clients are asked before the next round; None if that may begin.
    """

    state: RoundState
    least: int = 1
    """How many take part at least, as far as they are online."""

    def __init__(
        self,
        fraction: float = 1.0,
        participants: Callable[[Sequence[Client], np.random.Generator], Sequence[Client]]
        | None = None,
        prepares: Callable[[Update], bool] = lambda update: False,
        returns: Callable[[str], bool] = lambda client: False,
        sampling: str = RANDOM,
        again: Callable[[str], bool] = lambda client: False,
        queries: Callable[[SelectionContext], Sequence[Request] | None] = lambda moment: None,
    ) -> None:
        self._fraction, self._sampling = fraction, sampling
        self._participants = participants or self._share
        self._prepares, self._returns, self._again = prepares, returns, again
        self._queries = queries
        self.state = RoundState()

    def queries(self, moment: SelectionContext) -> Sequence[Request] | None:
        """Return what clients are asked before the next round; None if that may begin."""
        return self._queries(moment)

    @property
    def rounds(self) -> int:
        """Rounds that are over."""
        return self.state.number - self.state.running

    def _share(self, online: Sequence[Client], rng: np.random.Generator) -> Sequence[Client]:
        return self.pick(online, int(self._fraction * len(online)), rng)

    def pick(
        self, online: Sequence[Client], count: int, rng: np.random.Generator
    ) -> Sequence[Client]:
        """Pick so many clients, at least one, at random or in turn; in order of greeting."""
        count = max(count, self.least)
        if self._sampling == IN_TURN:
            return in_turn(online, count, self.state.picked, rng)
        return sample(online, count, rng)

    def ask_first(
        self,
        moment: SelectionContext,
        wanted: Callable[[str], bool] = lambda client: True,
        every: int = 1,
        patience: float = _ASKING_SECONDS,
    ) -> list[str] | None:
        """Return the clients to be asked now, before the next round; None if that may begin.

        As long as a client that is to be asked is being tested, none is asked yet.

        Parameters
        ----------
        moment : SelectionContext
            Time, fleet and idle clients, as the loop hands them to a scheduler.
        wanted : Callable
            Whether a client, given by its id, is to be asked; all idle ones by default.
        every : int
            Rounds from one time to the next; 0: again and again, as long as a client is wanted.
        patience : float
            Seconds for which answers are waited for.
        """
        state = self.state
        if state.running or moment.greeting:
            return None
        if not state.asking.is_open and state.asking.is_due(state.number, every):
            if any(wanted(client) for client in moment.busy()) and state.asking.holds(
                moment.now, patience
            ):
                return []
            ready = [client.client_id for client in moment.idle.ready(moment.now)]
            state.asking.begin(filter(wanted, ready), state.number, moment.now + patience)
        if not state.asking.is_open:
            return None
        return [client for client in state.asking.unasked if client in moment.idle]

    def choose(self, moment: SelectionContext) -> Sequence[Client]:
        """Begin a round if none is under way; return its participants that can be sent work."""
        state = self.state
        if not state.running:
            self._begin(moment)
        chosen = [
            moment.fleet.clients[client]
            for client in state.unsent
            if client in moment.idle and moment.fleet.clients[client].ready_at <= moment.now
        ]
        return chosen

    def _begin(self, moment: SelectionContext) -> None:
        """Choose participants among those online that need no rest."""
        if moment.greeting:
            return
        state = self.state
        online = [c for c in moment.fleet.online() if c.ready_at <= moment.now]
        # If there is no other client, none is held up.
        online = [c for c in online if self._may_take_part(c)] or online
        if not online:
            return
        state.number += 1
        state.running = True
        chosen = self._participants(online, moment.rng)
        state.unsent = {client.client_id: True for client in chosen}

    def settings(self, work: Request) -> Mapping[str, Value]:
        """State the number of the round, as the messages of Flower's own strategies do.

        They carry no number of a task, so that with one seed a client trains alike under all
        round-based methods.
        """
        return {ROUND: self.state.number}

    def _may_take_part(self, client: Client) -> bool:
        """Return whether a client need not sit out the next round."""
        return self.state.number + 1 >= self.state.backs_off_until.get(client.client_id, 0)

    def sent(self, task: InFlight, now: float) -> None:
        """Note the task of a participant; work for other clients is not the round's."""
        state = self.state
        state.asking.sent(task)
        if state.unsent.pop(task.client, None) is None:
            return
        state.away.pop(task.client, None)
        state.open[task.client], state.sent_at[task.client] = task.number, now

    def accept(self, update: Update, now: float) -> Sequence[Update]:
        """Keep an update until the round is over; then return all of them."""
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
        if self._again(client):
            state.unsent[client] = True
        return self._released()

    def work_again(self, client: str) -> None:
        """Let a participant of the round that has answered work once more in it."""
        if self.state.running:
            self.state.unsent[client] = True

    def lost(self, task: InFlight, now: float) -> Sequence[Update]:
        """Leave a client out of the round, or wait no more for its answer."""
        state = self.state
        state.asking.close(task)
        if state.open.get(task.client) == task.number:
            del state.open[task.client], state.sent_at[task.client]
        return self._released()

    def left(self, client: str, now: float) -> Sequence[Update]:
        """Wait no more for a client; if it comes back while the round runs, it may take part."""
        state = self.state
        state.asking.drop(client)
        if client in state.open or client in state.unsent:
            state.away[client] = True
            state.unsent.pop(client, None)
        return self._released()

    def joined(self, client: str) -> None:
        """Let a participant that was away take part again."""
        state = self.state
        if state.running and state.away.pop(client, False):
            state.open.pop(client, None)
            state.sent_at.pop(client, None)
            state.unsent[client] = True

    def wake_at(self) -> float:
        """Return until when answers are awaited, or when the last task is taken for lost."""
        if (due := self.state.asking.wake_at()) < math.inf:
            return due
        waited_for = [client for client in self.state.open if client not in self.state.away]
        if not waited_for:
            return math.inf
        # Both once, and not once a client: a round of all clients asks this at every answer.
        longest = self.state.longest.values()
        middle = median(longest) if longest else math.inf
        slowest = max(longest, default=math.inf)
        return max(self._given_up_at(client, middle, slowest) for client in waited_for)

    def wake(self, now: float) -> tuple[Collection[int], Sequence[Update]]:
        """Begin without the answers, or give up the tasks, that were waited for long enough."""
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
        """Return when a client's task is taken for lost, by the median and the longest answer."""
        longest = self.state.longest
        if client in longest:
            patience = _PATIENCE * max(longest[client], middle)
        else:
            patience = _STRANGER_PATIENCE * slowest
        doublings = min(self.state.timeouts.get(client, 0), _MOST_DOUBLINGS)
        return self.state.sent_at[client] + math.ldexp(patience, doublings)

    def _released(self) -> Sequence[Update]:
        """Return the round's updates if it is over, and be ready for the next."""
        state = self.state
        if not state.running or state.unsent or any(c not in state.away for c in state.open):
            return []
        released = state.updates
        state.running, state.updates = False, []
        state.open, state.sent_at, state.away = {}, {}, {}
        return released


# -----------------------------------------------------------------------------
# One policy after another: a round of pre-training, say, and then what the method is about.
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
    """Return a policy that is the first one until something has happened, and then the second.

    What is still open of the first when the second begins is for the second to take or to refuse.
    The rounds or windows that count are those of the second.

    Parameters
    ----------
    is_over : Callable
        Returns whether the first one's time is over; it follows from the method's state.
    """
    return cast(Scheduler, _Then(first, second, is_over))
