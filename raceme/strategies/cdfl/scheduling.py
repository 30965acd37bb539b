"""Clients that decide themselves when they work: by the clock, by their loss, or on the device.

A method mixes :class:`RequestParameters` into its parameters and returns ``OnRequest(parameters)``
as its policy. It needs no more unless clients may ask when their loss rises: the policy knows no
models and no data, so the method lets a client look, and hands the answer over::

    def request_for(self, client: str) -> Request:
        if self.scheduling.looks(client):
            return self.scheduling.look_at(client, self.spec.pack(self.state.held[client]), cost)
        return Request(client)

    def on_answer(self, answer: Answer) -> None:
        self.scheduling.heard(answer)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import getLogger

import numpy as np
from flwr.app import ArrayRecord

from raceme.core.clients import Client
from raceme.core.messages import ARRAYS, COMPUTE_SCALE, INVITATION, LOSSES, TRAINING
from raceme.core.options import SECONDS, Value, option
from raceme.core.requests import Answer, InFlight, InvalidReplyError, Request, Update
from raceme.core.scheduling import Scheduler, SelectionContext

log = getLogger("raceme")

POISSON, FIXED, LOSS, DEVICE = "poisson", "fixed", "loss", "device"

NextRequest = Callable[[Client, float, np.random.Generator], float]
"""Returns when a client asks next: given the client, the time now and a generator."""


@dataclass(frozen=True)
class RequestParameters:
    """What every method whose clients decide when they work can be told."""

    requests: str = option(
        POISSON,
        "when a client asks for work: poisson or fixed waits, loss: when its loss has risen, or "
        "device: as each device wishes (raceme device --when)",
        among=(POISSON, FIXED, LOSS, DEVICE),
    )
    request_seconds: float = option(
        10.0,
        "poisson: mean wait of an idle client; fixed: from one request to the next; loss: from one "
        "look at its loss to the next",
        unit=SECONDS,
        above=0,
    )
    loss_rise: float = option(
        0.1, "loss: how much of itself the loss must have risen by for a client to ask", low=0
    )
    least_seconds: float = option(
        0.0, "least time from one upload of a client to the next", unit=SECONDS, low=0
    )


@dataclass
class RequestState:
    """When each client asks next, and what it knows of its loss.

    Attributes
    ----------
    due : dict[str, float]
        When an idle client asks, in seconds.
    phases : dict[str, float]
        Fixed waits: time of each client's first request, in seconds from 0.
    asked : dict[str, float]
        Fixed waits: time of each client's last request that was met.
    uploaded_at : dict[str, float]
        When the last update of each client came that was taken.
    trained : dict[str, float]
        Loss that its client states of that update; NaN if it states none.
    steps : dict[str, int]
        Step of the data on which its client has last trained, or looked at its loss.
    known : dict[str, float]
        Loss of the model that a client holds, on its training samples, where it has looked.
    risen : dict[str, bool]
        Clients whose loss has risen, and that have not trained since.
    looking : dict[str, int]
        Clients that look at their loss, to the number of the task.
    hurried : dict[str, int]
        How often a client has asked, or uploaded, too soon; others are left out.
    refused : dict[str, bool]
        Clients whose last upload came too soon: they have said that they wish to train.
    """

    due: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)
    uploaded_at: dict[str, float] = field(default_factory=dict)
    trained: dict[str, float] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    known: dict[str, float] = field(default_factory=dict)
    risen: dict[str, bool] = field(default_factory=dict)
    looking: dict[str, int] = field(default_factory=dict)
    hurried: dict[str, int] = field(default_factory=dict)
    refused: dict[str, bool] = field(default_factory=dict)


class OnRequest(Scheduler):
    """Each client decides when it works; an update is acted on at once.

    ``poisson``
        Whenever a client has nothing to do, it waits for an exponential time.
    ``fixed``
        A client asks at its own times, a period apart, the first drawn uniformly from one period,
        so that not all ask at once. Times at which it is busy pass.
    ``loss``
        A client trains when it is first there. After each upload it looks at once, and then at
        fixed times, at the loss of the model that it holds on its present training samples. The
        lowest loss since the upload is the known one; what is above ``1 + loss_rise`` times that
        has risen, and the client trains. If its data have moved on before the first look, the loss
        of the training is the known one.
    ``device``
        Each idle client is given work at once that says it is an invitation; a device holds it
        until it wishes to train, and one that has no wishes trains at once. One that has come too
        soon is not invited again but asked, once the time has passed.

    Parameters
    ----------
    parameters : RequestParameters
        Which of them, how often, and how soon after an upload at the earliest.
    next_request : Callable, optional
        Says when an idle client asks next, instead.
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

    # What a method asks and says of looks.

    @property
    def asked_kinds(self) -> frozenset[str]:
        """Kinds of work that clients are asked for, beyond training and testing a model."""
        return frozenset({LOSSES} if self._mode == LOSS else ())

    def looks(self, client: str) -> bool:
        """Return whether a client that was chosen is to look at its loss, and not to train."""
        state = self.state
        return self._mode == LOSS and client in state.uploaded_at and client not in state.risen

    def look_at(self, client: str, held: ArrayRecord, cost: float) -> Request:
        """Return the work of a client that looks at its loss.

        Parameters
        ----------
        client : str
            The client's id.
        held : ArrayRecord
            The model that it holds. It travels, though the client has it, so that clients need no
            memory, and counts as no traffic.
        cost : float
            Share of a whole training that it takes, on virtual time; see
            :func:`raceme.core.messages.forward_cost`.
        """
        settings = {COMPUTE_SCALE: cost}
        arrays = {ARRAYS: held}
        return Request(client, LOSSES, (), arrays, settings, phase="look", is_held=True)

    def heard(self, answer: Answer) -> bool:
        """Take in what a client has seen; False for an answer to other work, which is left alone.

        Raises
        ------
        InvalidReplyError
            It does not bring the losses of one model.
        """
        state, client = self.state, answer.task.client
        if state.looking.get(client) != answer.task.number:
            return False
        losses = answer.numbers.get(LOSSES)
        if losses is None or losses.ndim != 2 or len(losses) != 1 or not losses.size:
            raise InvalidReplyError("it brings no losses of the model that it holds")
        loss = float(losses.mean(dtype=np.float64))
        known = state.known.get(client)
        if known is None:
            # What the model at hand lost on data that are gone is not known, but for the training.
            trained, moved = state.trained[client], answer.task.step != state.steps[client]
            known = trained if moved and math.isfinite(trained) else loss
        if loss > (1 + self._parameters.loss_rise) * known:
            state.risen[client] = True
        # A slow rise adds up: it is compared with the lowest loss, not with the last one.
        state.known[client] = min(known, loss)
        state.steps[client] = answer.task.step
        return True

    # Selection.

    def choose(self, moment: SelectionContext) -> Sequence[Client]:
        """Return the idle clients whose time has come."""
        due, chosen = self.state.due, []
        for client in moment.idle.ready(moment.now):
            name = client.client_id
            if name not in due:
                due[name] = self._not_too_soon(name, self._asks_at(client, moment))
            if due[name] <= moment.now:
                chosen.append(client)
        return chosen

    def settings(self, work: Request) -> Mapping[str, Value]:
        """Say that training is an invitation, where devices decide."""
        invites = self._mode == DEVICE and work.kind in TRAINING
        invites &= work.client not in self.state.refused
        return {INVITATION: True} if invites else {}

    def sent(self, task: InFlight, now: float) -> None:
        """Forget the request that was met; other work leaves it as it is."""
        client, state = task.client, self.state
        if state.due.get(client, math.inf) > now:
            return
        asked = state.due.pop(client)
        if client in state.phases:
            state.asked[client] = asked
        if task.kind == LOSSES and self.looks(client):
            state.looking[client] = task.number

    def invited(self, client: str) -> bool:
        """Return whether a client may be holding an invitation: perhaps for hours."""
        return self._mode == DEVICE and client not in self.state.refused

    def accept(self, update: Update, now: float) -> Sequence[Update]:
        """Take an update, unless its client was invited and came back too soon.

        Raises
        ------
        InvalidReplyError
            It did.
        """
        state, client = self.state, update.task.client
        allowed = self._allowed_at(client)
        if self._mode == DEVICE and now < allowed:
            self._hurries(client)
            state.refused[client] = True
            since = now - state.uploaded_at[client]
            least = self._parameters.least_seconds
            raise InvalidReplyError(
                f"it came {since:.3g} s after its last upload: at least {least:g} s must lie "
                "between two (least-seconds)"
            )
        state.uploaded_at[client] = now
        state.trained[client], state.steps[client] = update.train_loss, update.task.step
        state.known.pop(client, None)
        state.risen.pop(client, None)
        state.refused.pop(client, None)
        return [update]

    def lost(self, task: InFlight, now: float) -> Sequence[Update]:
        """Wait for no look that is over."""
        if self.state.looking.get(task.client) == task.number:
            del self.state.looking[task.client]
        return []

    def left(self, client: str, now: float) -> Sequence[Update]:
        """Forget the request of a client that is gone."""
        self.state.due.pop(client, None)
        return []

    def wake_at(self) -> float:
        """Return when the next client asks."""
        return min(self.state.due.values(), default=math.inf)

    def is_quiescent(self, client: str, step: int) -> bool:
        """Return whether a client will never train again as long as its data stay at a step.

        It has looked at them with the model that it holds, and its loss has not risen: every later
        look would see the same.
        """
        state = self.state
        has_looked = client in state.known and state.steps[client] == step
        return self._mode == LOSS and has_looked and client not in state.risen

    # When a client asks.

    def _asks_at(self, client: Client, moment: SelectionContext) -> float:
        """Return when an idle client asks next."""
        name, now, state = client.client_id, moment.now, self.state
        if self._next_request is not None:
            return self._next_request(client, now, moment.rng)
        if self._mode == POISSON:
            return now + float(moment.rng.exponential(self._parameters.request_seconds))
        # With the loss, only looks that follow another one wait.
        at_once = name not in state.known or name in state.risen
        if self._mode == DEVICE or (self._mode == LOSS and at_once):
            return now
        return self._tick(name, now, moment.rng)

    def _tick(self, client: str, now: float, rng: np.random.Generator) -> float:
        """Return the next of a client's own times."""
        state, period = self.state, self._parameters.request_seconds
        if client not in state.phases:
            state.phases[client] = float(rng.uniform(0, period))
        first, last = state.phases[client], state.asked.get(client, -math.inf)
        number = max(0, math.ceil((now - first) / period))
        # Not the same time twice, whatever rounding makes of it.
        return first + (number + (first + number * period <= last)) * period

    def _allowed_at(self, client: str) -> float:
        """Return when a client may upload again."""
        last = self.state.uploaded_at.get(client, -math.inf)
        return last + self._parameters.least_seconds

    def _not_too_soon(self, client: str, asks_at: float) -> float:
        """Let a client that wants to train too soon after its last upload wait."""
        allowed = self._allowed_at(client)
        if asks_at >= allowed or self.looks(client):
            return asks_at
        if self._mode == DEVICE:
            # When a device would come back is not known, but of one that has come too soon before.
            return allowed if client in self.state.hurried else asks_at
        self._hurries(client)
        return allowed

    def _hurries(self, client: str) -> None:
        """Count that a client is too soon; say it the first time."""
        hurried = self.state.hurried
        hurried[client] = hurried.get(client, 0) + 1
        if hurried[client] == 1:
            log.warning(
                "%s wants to upload sooner than %g s after its last upload: it has to wait "
                "(least-seconds; this is said once)",
                client,
                self._parameters.least_seconds,
            )
