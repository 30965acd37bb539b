"""Schedulers of work on request and of work in time windows.

With `OnRequest` each client decides when it trains, as in CDFL; with `InWindows` selected clients
train repeatedly until a window ends, as in CSAFL. The others are in :mod:`raceme.core.scheduling`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from logging import getLogger

import numpy as np
from flwr.app import ArrayRecord

from raceme.core.clients import Client
from raceme.core.errors import about
from raceme.core.messages import ARRAYS, COMPUTE_SCALE, INVITATION, LOSSES, TRAINING
from raceme.core.options import SECONDS, Value, option
from raceme.core.requests import Answer, InFlight, InvalidReplyError, Request, Update
from raceme.core.scheduling import Scheduler, SelectionContext

log = getLogger("raceme")

# -----------------------------------------------------------------------------
# Work on request: clients decide when they train.
# -----------------------------------------------------------------------------


POISSON, FIXED, LOSS, DEVICE = "poisson", "fixed", "loss", "device"

NextRequest = Callable[[Client, float, np.random.Generator], float]
"""Returns the time of a client's next request, given the client, the time and a generator."""


@dataclass(frozen=True)
class RequestParameters:
    """Hyper-parameters of methods whose clients decide when they train."""

    requests: str = option(
        POISSON,
        "when a client asks for work: poisson or fixed waits, loss: when its loss has risen, or "
        "device: as each device decides (raceme device --when)",
        among=(POISSON, FIXED, LOSS, DEVICE),
    )
    request_seconds: float = option(
        10.0,
        "poisson: mean wait of an idle client; fixed: time between requests; loss: time between "
        "evaluations of the loss",
        unit=SECONDS,
        above=0,
    )
    loss_rise: float = option(
        0.1, "loss: relative rise of the loss at which a client asks for work", low=0
    )
    least_seconds: float = option(
        0.0, "least time between two uploads of a client", unit=SECONDS, low=0
    )


@dataclass
class RequestState:
    """Requests of clients, and their losses.

    Attributes
    ----------
    due : dict[str, float]
        Time of each idle client's next request, in seconds.
    phases : dict[str, float]
        Fixed waits: time of each client's first request, in seconds.
    asked : dict[str, float]
        Fixed waits: time of each client's last served request.
    uploaded_at : dict[str, float]
        Arrival of each client's last accepted update.
    trained : dict[str, float]
        Training loss of that update; NaN if not stated.
    steps : dict[str, int]
        Step of the data of each client's last training or loss evaluation.
    known : dict[str, float]
        Lowest evaluated loss of each client's model on its training samples since its upload.
    risen : dict[str, bool]
        Clients whose loss has risen since their last training.
    evaluating : dict[str, int]
        Task number of each open loss evaluation.
    early : dict[str, int]
        Number of requests or uploads before the minimum time, by client.
    refused : dict[str, bool]
        Clients whose last upload was refused as too early.
    """

    due: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)
    uploaded_at: dict[str, float] = field(default_factory=dict)
    trained: dict[str, float] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    known: dict[str, float] = field(default_factory=dict)
    risen: dict[str, bool] = field(default_factory=dict)
    evaluating: dict[str, int] = field(default_factory=dict)
    early: dict[str, int] = field(default_factory=dict)
    refused: dict[str, bool] = field(default_factory=dict)


class OnRequest(Scheduler):
    """Each client decides when it trains; updates are processed on arrival.

    ``poisson``
        An idle client waits for an exponential time.
    ``fixed``
        A client requests work periodically, with a uniformly random phase; requests of a busy
        client are skipped.
    ``loss``
        A client trains when it joins. After each upload it evaluates the loss of its received model
        on its present training samples, at once and then periodically. It trains again when the
        loss exceeds ``1 + loss_rise`` times the lowest one since the upload, which is that of the
        training if the data have changed before the first evaluation.
    ``device``
        Each idle client receives an invitation, and the device decides when to train. A client that
        was too early receives ordinary work instead, after the minimum time.

    Parameters
    ----------
    parameters : RequestParameters
        Mode, period and minimum time between uploads.
    next_request : Callable, optional
        Time of an idle client's next request, which replaces the mode.
    """

    state: RequestState

    def __init__(
        self,
        parameters: RequestParameters | None = None,
        next_request: NextRequest | None = None,
    ) -> None:
        self._parameters = parameters or RequestParameters()
        self._next_request = next_request
        self._mode = self._parameters.requests if next_request is None else ""
        self.state = RequestState()

    # Loss evaluations.

    @property
    def asked_kinds(self) -> frozenset[str]:
        """Kinds of requests besides training and testing a model."""
        return frozenset({LOSSES} if self._mode == LOSS else ())

    def evaluates_loss(self, client: str) -> bool:
        """Return whether a selected client evaluates its loss instead of training."""
        state = self.state
        return self._mode == LOSS and client in state.uploaded_at and client not in state.risen

    def loss_evaluation(self, client: str, held: ArrayRecord, cost: float) -> Request:
        """Return a client's loss evaluation.

        Parameters
        ----------
        held : ArrayRecord
            Model that the client has. It is sent, since clients need no memory, but does not count
            as traffic.
        cost : float
            Share of a training's virtual time; see :func:`raceme.core.messages.forward_cost`.
        """
        settings = {COMPUTE_SCALE: cost}
        arrays = {ARRAYS: held}
        return Request(client, LOSSES, (), arrays, settings, phase="look", is_held=True)

    def take_loss(self, answer: Answer) -> bool:
        """Process a loss evaluation; return False for an answer to another request.

        Raises
        ------
        InvalidReplyError
            It lacks the losses of one model.
        """
        state, client = self.state, answer.task.client
        if state.evaluating.get(client) != answer.task.number:
            return False
        losses = answer.numbers.get(LOSSES)
        if losses is None or losses.ndim != 2 or len(losses) != 1 or not losses.size:
            raise InvalidReplyError("it brings no losses of the model that it holds")
        loss = float(losses.mean(dtype=np.float64))
        known = state.known.get(client)
        if known is None:
            # Losses on former data do not apply, except the training loss.
            trained, moved = state.trained[client], answer.task.step != state.steps[client]
            known = trained if moved and math.isfinite(trained) else loss
        if loss > (1 + self._parameters.loss_rise) * known:
            state.risen[client] = True
        # The lowest loss, not the last one, so that slow rises add up.
        state.known[client] = min(known, loss)
        state.steps[client] = answer.task.step
        return True

    # Selection.

    def choose(self, context: SelectionContext) -> Sequence[Client]:
        """Return the idle clients with a due request."""
        due, chosen = self.state.due, []
        for client in context.idle.ready(context.now):
            name = client.client_id
            if name not in due:
                due[name] = self._earliest_request(name, self._next_request_time(client, context))
            if due[name] <= context.now:
                chosen.append(client)
        return chosen

    def settings(self, work: Request) -> Mapping[str, Value]:
        """Mark training as an invitation where devices decide."""
        invites = self._mode == DEVICE and work.kind in TRAINING
        invites &= work.client not in self.state.refused
        return {INVITATION: True} if invites else {}

    def sent(self, task: InFlight, now: float) -> None:
        """Remove the served request; other tasks leave it unchanged."""
        client, state = task.client, self.state
        if state.due.get(client, math.inf) > now:
            return
        asked = state.due.pop(client)
        if client in state.phases:
            state.asked[client] = asked
        if task.kind == LOSSES and self.evaluates_loss(client):
            state.evaluating[client] = task.number

    def invited(self, client: str) -> bool:
        """Return whether a client may hold an invitation, perhaps for hours."""
        return self._mode == DEVICE and client not in self.state.refused

    def accept(self, update: Update, now: float) -> Sequence[Update]:
        """Accept an update, unless an invited client is too early.

        Raises
        ------
        InvalidReplyError
            The client is too early.
        """
        state, client = self.state, update.task.client
        allowed = self._allowed_at(client)
        if self._mode == DEVICE and now < allowed:
            self._count_early(client)
            state.refused[client] = True
            since = now - state.uploaded_at[client]
            least = self._parameters.least_seconds
            raise InvalidReplyError(
                f"it came {since:.3g} s after its last upload: two uploads must be at least "
                f"{least:g} s apart (least-seconds)"
            )
        state.uploaded_at[client] = now
        state.trained[client], state.steps[client] = update.train_loss, update.task.step
        state.known.pop(client, None)
        state.risen.pop(client, None)
        state.refused.pop(client, None)
        return [update]

    def lost(self, task: InFlight, now: float) -> Sequence[Update]:
        """Remove a lost loss evaluation."""
        if self.state.evaluating.get(task.client) == task.number:
            del self.state.evaluating[task.client]
        return []

    def left(self, client: str, now: float) -> Sequence[Update]:
        """Remove the request of a client that left."""
        self.state.due.pop(client, None)
        return []

    def wake_at(self) -> float:
        """Return the time of the next request."""
        return min(self.state.due.values(), default=math.inf)

    def is_quiescent(self, client: str, step: int) -> bool:
        """Return whether a client never trains again without a change of its data.

        Its loss on them has not risen, and later evaluations would give the same.
        """
        state = self.state
        has_looked = client in state.known and state.steps[client] == step
        return self._mode == LOSS and has_looked and client not in state.risen

    # Times of requests.

    def _next_request_time(self, client: Client, context: SelectionContext) -> float:
        """Return the time of an idle client's next request."""
        name, now, state = client.client_id, context.now, self.state
        if self._next_request is not None:
            return self._next_request(client, now, context.rng)
        if self._mode == POISSON:
            return now + float(context.rng.exponential(self._parameters.request_seconds))
        # With mode ``loss``, only repeated evaluations wait.
        at_once = name not in state.known or name in state.risen
        if self._mode == DEVICE or (self._mode == LOSS and at_once):
            return now
        return self._next_periodic_time(name, now, context.rng)

    def _next_periodic_time(self, client: str, now: float, rng: np.random.Generator) -> float:
        """Return the next of a client's periodic times."""
        state, period = self.state, self._parameters.request_seconds
        if client not in state.phases:
            state.phases[client] = float(rng.uniform(0, period))
        first, last = state.phases[client], state.asked.get(client, -math.inf)
        number = max(0, math.ceil((now - first) / period))
        # Strictly later than the last time, despite rounding.
        return first + (number + (first + number * period <= last)) * period

    def _allowed_at(self, client: str) -> float:
        """Return the earliest time of a client's next upload."""
        last = self.state.uploaded_at.get(client, -math.inf)
        return last + self._parameters.least_seconds

    def _earliest_request(self, client: str, asks_at: float) -> float:
        """Return the time of a client's request, delayed if too early after its last upload."""
        allowed = self._allowed_at(client)
        if asks_at >= allowed or self.evaluates_loss(client):
            return asks_at
        if self._mode == DEVICE:
            # The time of a device's next upload is unknown, so only clients that were early before
            # wait.
            return allowed if client in self.state.early else asks_at
        self._count_early(client)
        return allowed

    def _count_early(self, client: str) -> None:
        """Count an early request or upload; warn of a client's first one."""
        early = self.state.early
        early[client] = early.get(client, 0) + 1
        if early[client] == 1:
            log.warning(
                "%s would upload less than %g s after its last upload: it has to wait "
                "(least-seconds; logged once per client)",
                client,
                self._parameters.least_seconds,
                extra=about(client),
            )


# -----------------------------------------------------------------------------
# Windows: time slices in which selected clients train repeatedly.
# -----------------------------------------------------------------------------


_HOPELESS_WINDOWS = 3
"""Consecutive windows without a finished update after which the run stops."""

Members = Callable[[Sequence[Client], np.random.Generator], Sequence[Client]]
"""Selects the clients of a window from the online clients, with a random generator."""
GroupOf = Callable[[str], int | None]
"""Returns the group of a client; None for a client without one."""
Idled = Callable[[str, int, float], None]
"""Reports a client's idle time at the end of a window: client, window number, seconds."""


@dataclass
class WindowState:
    """A time window.

    Attributes
    ----------
    number : int
        Number of the window, from 1; 0 before the first.
    ends_at : float
        Its end; 0 before the first.
    members : dict[str, bool]
        Clients of the window.
    open : dict[str, int]
        Task number of each training member.
    gathering : dict[int, bool]
        Groups whose next update is synchronous.
    joint : dict[int, int]
        Group of each task of a synchronous update.
    held : list[Update]
        Updates that wait for others of their synchronous update.
    waiting : dict[str, float]
        Start of each member's present idle time.
    waited : dict[str, float]
        Earlier idle time of each member in this window, in seconds.
    done : int
        Updates received in this window.
    fruitless : int
        Consecutive windows, up to the last, without an update in time.
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


def _alone(client: str) -> int | None:
    return None


def _ignore(client: str, window: int, seconds: float) -> None:
    """Do nothing."""


class InWindows(Scheduler):
    """Time windows in which selected clients train repeatedly.

    Tasks that are open at the end of a window time out. Updates are aggregated on arrival, except
    synchronous ones of a group: its members wait until all of them are idle, then all train, and
    their updates are aggregated after the last arrival or at the end of the window.

    Parameters
    ----------
    budget : float
        Length of a window in seconds.
    members : Callable
        Selects the clients of a window from the online clients, with a random generator.
    group_of : Callable, optional
        Returns the group of a client.
    together : bool
        Whether all updates are synchronous; else only those of a group after :meth:`gather`.
    idled : Callable, optional
        Reports the idle time of each member at the end of each window.
    """

    state: WindowState
    timeout_reason = "its window ended first"
    backs_off_when_late = False

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

    # Interface of the method.

    def gather(self, group: int) -> None:
        """Make the next update of a group synchronous."""
        self.state.gathering[group] = True

    def is_joint(self, update: Update) -> bool:
        """Return whether a released update is part of a synchronous one."""
        return update.task.number in self.state.joint

    @property
    def is_open(self) -> bool:
        """Whether a window is open; updates released at its end lack members."""
        return bool(self.state.members)

    @property
    def rounds(self) -> int:
        """Number of completed windows."""
        return self.state.number - bool(self.state.members)

    @property
    def together(self) -> bool:
        """Whether all updates are synchronous."""
        return self._together

    # Selection.

    def choose(self, context: SelectionContext) -> Sequence[Client]:
        """Return the members that train next; open a window if none is open."""
        state = self.state
        if context.now >= state.ends_at and not context.greeting:
            online = context.fleet.online()
            if online:
                chosen = self._members(online, context.rng)
                number, fruitless = state.number + 1, state.fruitless
                self.state = state = WindowState(
                    number,
                    context.now + self._budget,
                    {client.client_id: True for client in chosen},
                    fruitless=fruitless,
                )
        ready = [c for c in context.idle.ready(context.now) if c.client_id in state.members]
        together: dict[int, list[Client]] = {}
        alone = []
        for client in ready:
            group = self._group_of(client.client_id)
            if group is None or not (self._gathers(group) or self._is_under_way(group)):
                self._end_wait(client.client_id, context.now)
                alone.append(client)
            else:
                state.waiting.setdefault(client.client_id, context.now)
                together.setdefault(group, []).append(client)
        return [*alone, *self._complete_groups(together, context.now)]

    def _complete_groups(self, together: dict[int, list[Client]], now: float) -> list[Client]:
        """Return the members of the groups whose members are all idle."""
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
        """Record a member's task, and whether it is part of a synchronous update."""
        self.state.open[task.client] = task.number
        group = self._group_of(task.client)
        if group is not None and self._gathers(group):
            self.state.joint[task.number] = group

    # Updates.

    def accept(self, update: Update, now: float) -> Sequence[Update]:
        """Release an update of this window, unless it is part of a synchronous one."""
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
        """Record that a member is idle."""
        state = self.state
        if state.open.get(task.client) != task.number:
            return []
        del state.open[task.client]
        group = state.joint.pop(task.number, None)
        return [] if group is None else self._released(group)

    def left(self, client: str, now: float) -> Sequence[Update]:
        """Remove a client that left."""
        state = self.state
        self._end_wait(client, now)
        number = state.open.pop(client, None)
        group = None if number is None else state.joint.pop(number, None)
        return [] if group is None else self._released(group)

    def wake_at(self) -> float:
        """Return the end of the window; infinity if none is open."""
        return self.state.ends_at if self.state.members else math.inf

    def wake(self, now: float) -> tuple[Collection[int], Sequence[Update]]:
        """Close the window: open tasks time out."""
        state = self.state
        late, released = list(state.open.values()), state.held
        state.fruitless = state.fruitless + 1 if late and not state.done else 0
        if state.fruitless == 1:
            log.warning(
                "No client finished within window %d: is the budget of %g s too short?",
                state.number,
                self._budget,
            )
        for client in list(state.waiting):
            self._end_wait(client, now)
        for client in state.members:
            self._idled(client, state.number, state.waited.get(client, 0.0))
        # `joint` is kept, since `is_joint` is called for the updates released here.
        state.members, state.open, state.held, state.gathering = {}, {}, [], {}
        return late, released

    def no_progress_reason(self) -> str:
        """Return an error if the window is too short for any update."""
        if self.state.fruitless < _HOPELESS_WINDOWS:
            return ""
        return (
            f"no update fits into the budget of {self._budget:g} s: in {self.state.fruitless} "
            "consecutive windows no client finished; raise the budget"
        )

    # Synchronous updates of a group.

    def _gathers(self, group: int) -> bool:
        """Return whether a group's next update is synchronous."""
        return self._together or group in self.state.gathering

    def _is_under_way(self, group: int) -> bool:
        """Return whether a group has an open synchronous update."""
        state = self.state
        return any(state.joint.get(number) == group for number in state.open.values())

    def _released(self, group: int) -> list[Update]:
        """Return a group's synchronous update if it is complete, else none."""
        state = self.state
        if self._is_under_way(group):
            return []
        released = [u for u in state.held if state.joint[u.task.number] == group]
        state.held = [u for u in state.held if state.joint[u.task.number] != group]
        state.gathering.pop(group, None)
        return released

    def _end_wait(self, client: str, now: float) -> None:
        """End a client's idle time, if any, and count it."""
        state = self.state
        if client in state.waiting:
            waited = now - state.waiting.pop(client)
            state.waited[client] = state.waited.get(client, 0.0) + waited
