"""Where data of a new task belong: the searches of C-FAACL.

Zhang, "Asymmetric Clustering in Federated Continual Learning" (C-FAACL), thesis, Waterloo 2024:
Algorithms 8 and 9. A client that has trained a model on new data looks first at what it remembers
itself: a sample of a former task, and the cluster that it belonged to. If none matches, it looks at
what clients of each of the other clusters remember. A match: the cluster's model is no worse on the
new data, and the new model is no worse on the remembered sample.

For the second search the thesis has the sample borrowed: it travels from the client that remembers
it, by way of the server, to the one that searches. With ``borrow=losses``, our own, the new model
travels to the sample instead, and no sample leaves its client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from raceme.clustering.support import no_worse
from raceme.compat import array_record
from raceme.config.options import option
from raceme.protocol.effort import forward_cost
from raceme.protocol.messages import (
    BORROWED,
    COMPUTE_SCALE,
    INPUTS,
    LABELS,
    LEND,
    LOCAL,
    MATCH,
    MEMORY,
    MEMORY_STEPS,
    ON,
    Vector,
    numbered,
    to_array,
)
from raceme.server.dispatch import InRounds, Moment
from raceme.server.method import Method
from raceme.server.replies import Answer, InvalidReplyError
from raceme.server.work import Task, Value, Work
from raceme.strategies.supported_models import losses_of, validation_share
from raceme.strategies.supported_rounds import (
    ASKING_SECONDS,
    SupportRoundsParameters,
    SupportRoundsState,
)

log = logging.getLogger("raceme")

Item = TypeVar("Item")

OWN, LENDING, OTHERS = "search-own", "lend", "search-others"
"""Stages of a search; a stage is also the phase by which its bytes are counted."""


@dataclass(frozen=True)
class SearchParameters(SupportRoundsParameters):
    """Hyper-parameters of the searches."""

    remembered: int = option(50, "|S|: samples of each task that a client remembers", low=1)
    borrow: str = option(
        "samples",
        "what travels to test a remembered sample of another client: samples (the thesis), or "
        "models, so that only losses leave it: losses (our own)",
        among=("samples", "losses"),
    )


@dataclass(frozen=True)
class Remembered:
    """A remembered sample that a client is compared on.

    Attributes
    ----------
    cluster : int
        The cluster that the sample belonged to.
    client : str
        Who remembers it.
    step : int
        Of which step of its data it is.
    """

    cluster: int
    client: str
    step: int


@dataclass
class Request:
    """What one client is asked in a stage.

    Attributes
    ----------
    clusters : list[int]
        Whose models it measures.
    clients : list[str]
        Whose local models it measures.
    steps : list[int]
        Of which steps it uses what it remembers.
    searches : bool
        Whether it measures on its new data too, being the one that searches.
    borrowed : list[Remembered]
        Samples of others that it is sent.
    """

    clusters: list[int] = field(default_factory=list)
    clients: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    searches: bool = False
    borrowed: list[Remembered] = field(default_factory=list)


@dataclass
class SearchState(SupportRoundsState):
    """What is known of former tasks, and how far a search is.

    Attributes
    ----------
    memory : dict[str, dict[int, int]]
        The cluster that a client's data of each step belonged to: the C of its {S, C}.
    local : dict[str, Vector]
        The models of clients that search.
    learned_at : dict[str, int]
        Of which step of the data they are.
    joins : dict[str, int]
        Clients that have found a cluster in this search.
    stage : str
        Empty while nobody searches.
    tested : dict[str, list[Remembered]]
        What each client is compared on in this stage, in this order.
    requests : dict[str, Request]
        Who is asked what in this stage.
    tried : dict[str, bool]
        Who has been asked in this stage.
    answers : dict[str, dict[str, NDArray]]
        What was measured, by client and set of samples: shape (models, samples).
    lent : dict[str, dict[str, NDArray]]
        Samples that clients have handed out for this search, by client and name.
    """

    memory: dict[str, dict[int, int]] = field(default_factory=dict)
    local: dict[str, Vector] = field(default_factory=dict)
    learned_at: dict[str, int] = field(default_factory=dict)
    joins: dict[str, int] = field(default_factory=dict)
    stage: str = ""
    tested: dict[str, list[Remembered]] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    tried: dict[str, bool] = field(default_factory=dict)
    answers: dict[str, dict[str, NDArray[np.float64]]] = field(default_factory=dict)
    lent: dict[str, dict[str, NDArray[Any]]] = field(default_factory=dict)


def matches(
    new: tuple[NDArray[np.float64], NDArray[np.float64]],
    old: tuple[NDArray[np.float64], NDArray[np.float64]],
    epsilon: float,
    alpha: float,
) -> bool:
    """Return whether new data are of a cluster's concept.

    Neither the hypotheses nor ε are printed. Our reading: each model is tested away from home, the
    cluster's on the new data, and the new one on the remembered sample; each must be no worse there
    by more than ε than the one at home.

    Parameters
    ----------
    new : tuple
        l1 and l2: losses of the cluster's model and of the new one on the new data, shape (n,).
    old : tuple
        l3 and l4: the same on the remembered sample, shape (s,).
    epsilon, alpha : float
        ε, and α of Wilcoxon's test.
    """
    (l1, l2), (l3, l4) = new, old
    return no_worse(l2, l1, epsilon, alpha) and no_worse(l3, l4, epsilon, alpha)


class ConceptSearch:
    """Finds the clusters that new data of clients belong to, between two rounds.

    Parameters
    ----------
    method : Method
        Its state is a :class:`SearchState`, its parameters are :class:`SearchParameters`.
    place : Callable
        Places the clients that have searched, which ends the search.
    """

    def __init__(self, method: Method, place: Callable[[], None]) -> None:
        self._method, self._place = method, place
        self._parameters: SearchParameters = method.parameters

    @property
    def _state(self) -> SearchState:
        state: SearchState = self._method.state
        return state

    def ask(self, moment: Moment) -> list[Work] | None:
        """Return who is asked what now; None if nobody searches any more."""
        state, dispatch = self._state, self._method.dispatch
        assert isinstance(dispatch, InRounds), "the method works in rounds"
        if not state.local or dispatch.state.running or moment.greeting:
            return None
        while state.local:
            asked = dispatch.ask_first(moment, self._is_asked, every=0, patience=ASKING_SECONDS)
            if asked is not None:
                return [self._work(client) for client in asked]
            self._advance()
        return None

    def _is_asked(self, client: str) -> bool:
        return client in self._state.requests and client not in self._state.tried

    # What clients are asked.

    def _work(self, client: str) -> Work:
        """Return the work of a client in this stage."""
        state, request = self._state, self._state.requests[client]
        settings: dict[str, Value] = {MEMORY_STEPS: request.steps}
        if state.stage == LENDING:
            settings[COMPUTE_SCALE] = 0.0
            return Work(client, LEND, models=(), settings=settings, phase=state.stage)
        if request.searches:
            settings[ON] = "validation"
        settings[COMPUTE_SCALE] = self._cost(client, request)
        arrays = {
            numbered(LOCAL, index): self._method.spec.pack(state.local[name])
            for index, name in enumerate(request.clients)
        }
        for index, remembered in enumerate(request.borrowed):
            arrays[numbered(BORROWED, index)] = self._lent(remembered)
        models = tuple(request.clusters)
        return Work(client, MATCH, models, arrays, settings, phase=state.stage)

    def _cost(self, client: str, request: Request) -> float:
        """Return what measuring takes, as a share of a round's computing."""
        examples = self._method.progress.fleet.clients[client].num_examples
        samples = validation_share(self._method) * examples if request.searches else 0.0
        samples += self._parameters.remembered * (len(request.steps) + len(request.borrowed))
        models = len(request.clusters) + len(request.clients)
        train_config = self._method.train_config
        return samples / max(1, examples) * forward_cost(train_config, examples, models)

    def _lent(self, remembered: Remembered) -> ArrayRecord:
        name = numbered(MEMORY, remembered.step)
        lent = self._state.lent[remembered.client]
        parts = {part: to_array(lent[f"{name}-{part}"]) for part in (INPUTS, LABELS)}
        return array_record(parts)

    def sent(self, task: Task) -> None:
        """Note that a client was asked: once in a stage, whatever becomes of it."""
        self._state.tried[task.client] = True

    def take(self, answer: Answer) -> None:
        """Take losses, or lent samples, in.

        Raises
        ------
        InvalidReplyError
            They are none, or come after the stage.
        """
        state, client = self._state, answer.task.client
        request = state.requests.get(client)
        if request is None or (answer.task.kind == LEND) != (state.stage == LENDING):
            raise InvalidReplyError("it came after the search")
        self._forget_what_is_lost(client, request, answer.numbers.keys())
        if state.stage == LENDING:
            state.lent[client] = dict(answer.numbers)
            return
        rows = len(request.clusters) + len(request.clients)
        state.answers[client] = {name: losses_of(answer, rows, name) for name in answer.numbers}

    def _forget_what_is_lost(self, client: str, request: Request, there: Iterable[str]) -> None:
        """Note that a client remembers steps no more: it was set up anew, say."""
        known = set(there)
        for step in request.steps:
            name = numbered(MEMORY, step)
            if name not in known and f"{name}-{INPUTS}" not in known:
                log.warning("%s has lost its memory of step %d.", client, step)
                self._state.memory.get(client, {}).pop(step, None)

    # From stage to stage.

    def _advance(self) -> None:
        """Draw the conclusions of a stage, and begin the next."""
        state = self._state
        if state.stage == OWN:
            self._conclude()
            self._begin_others()
        elif state.stage == LENDING:
            self._begin(OTHERS)
        elif state.stage == OTHERS:
            self._conclude()
            self._end()
        else:
            state.tested = {client: self._own(client) for client in state.local}
            self._begin(OWN)

    def _own(self, client: str) -> list[Remembered]:
        """Return what a client remembers itself, in order of time (Algorithm 8)."""
        heir, models = self._state.supported.heir, self._method.models
        known = sorted(self._state.memory.get(client, {}).items())
        found = (Remembered(heir(cluster), client, step) for step, cluster in known)
        return [remembered for remembered in found if remembered.cluster in models]

    def _begin_others(self) -> None:
        """Pick what each client that has found nothing is compared on (Algorithm 9)."""
        state = self._state
        by_cluster: dict[int, list[Remembered]] = {}
        for client in state.memory:
            if self._method.clusters.online.get(client):
                for remembered in self._own(client):
                    by_cluster.setdefault(remembered.cluster, []).append(remembered)
        state.tested = {}
        for client in state.local:
            if client in state.joins:
                continue
            state.tested[client] = []
            for _, known in sorted(by_cluster.items()):
                if others := [r for r in known if r.client != client]:
                    drawn = others[int(self._method.rng.integers(len(others)))]
                    state.tested[client].append(drawn)
        self._begin(LENDING if self._parameters.borrow == "samples" else OTHERS)

    def _begin(self, stage: str) -> None:
        """Find out who is to be asked what."""
        state, requests = self._state, self._state.requests
        state.stage, state.tried, state.answers = stage, {}, {}
        requests.clear()
        for client, tested in state.tested.items():
            for remembered in tested:
                self._add(requests, client, remembered)

    def _add(self, requests: dict[str, Request], client: str, remembered: Remembered) -> None:
        """Have a client compared on a remembered sample."""
        stage, borrows = self._state.stage, self._parameters.borrow == "samples"
        if stage in (LENDING, OTHERS) and (stage == LENDING or not borrows):
            holder = requests.setdefault(remembered.client, Request())
            _once(holder.steps, remembered.step)
            if stage == OTHERS:
                _once(holder.clusters, remembered.cluster)
                _once(holder.clients, client)
        if stage == LENDING:
            return
        own = requests.setdefault(client, Request())
        own.searches = True
        _once(own.clusters, remembered.cluster)
        _once(own.clients, client)
        if stage == OWN:
            _once(own.steps, remembered.step)
        elif borrows and self._is_lent(remembered):
            _once(own.borrowed, remembered)

    def _is_lent(self, remembered: Remembered) -> bool:
        lent, name = self._state.lent.get(remembered.client, {}), numbered(MEMORY, remembered.step)
        return f"{name}-{INPUTS}" in lent and f"{name}-{LABELS}" in lent

    def _conclude(self) -> None:
        """Let clients join the first cluster that matches."""
        for client, tested in self._state.tested.items():
            found = next((r.cluster for r in tested if self._is_match(client, r)), None)
            if found is not None:
                self._state.joins[client] = found

    def _is_match(self, client: str, remembered: Remembered) -> bool:
        """Return whether a client's new data are of the concept of a remembered sample."""
        state, name = self._state, numbered(MEMORY, remembered.step)
        holder = remembered.client
        request = state.requests.get(client)
        if request is not None and remembered in request.borrowed:
            holder, name = client, numbered(BORROWED, request.borrowed.index(remembered))
        new = self._losses(client, "validation", remembered.cluster, client)
        old = self._losses(holder, name, remembered.cluster, client)
        if new is None or old is None:
            return False
        return matches(new, old, self._parameters.epsilon, self._parameters.alpha)

    def _losses(
        self, measured_by: str, name: str, cluster: int, client: str
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """Return the losses of a cluster's model and of a client's own; None if nobody has them."""
        request, answer = (
            self._state.requests.get(measured_by),
            self._state.answers.get(measured_by),
        )
        if request is None or answer is None or name not in answer:
            return None
        if cluster not in request.clusters or client not in request.clients:
            return None
        losses = answer[name]
        local = len(request.clusters) + request.clients.index(client)
        return losses[request.clusters.index(cluster)], losses[local]

    def _end(self) -> None:
        """Forget what was only of this search; the method places the clients."""
        state = self._state
        state.stage, state.tested, state.answers, state.lent = "", {}, {}, {}
        state.requests, state.tried = {}, {}
        self._place()


def _once(values: list[Item], value: Item) -> None:
    if value not in values:
        values.append(value)
