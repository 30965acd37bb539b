"""C-FAACL: FAACL for clients that meet one task after another.

Zhang, "Asymmetric Clustering in Federated Continual Learning" (C-FAACL), thesis, Waterloo 2024. At
first clusters are found as by FAACL. Whenever a client has new data (a step of data that change) it
trains a model of its own on them, and looks for the cluster that they belong to: among those of its
own former tasks first, then among all, comparing models on its new data and on a remembered sample
of that task (Algorithms 8 and 9). A match: the cluster's model is no worse on the new data, and the
new model is no worse on the remembered sample; on a sample only its own cluster's model and the new
one are measured, so that a search among K clusters takes time in proportion to K. If none fits, the
data are a new concept, and its model is that of a new cluster (Algorithm 10). Then clusters are
trained, compared and merged as in FAACL.

Each client remembers a sample of its validation data of every task, and the server which cluster
they belonged to. By default, as in the thesis, such a sample is lent to other clients, by way of
the server: it leaves its client. With ``borrow=losses``, our own, the new model travels to the
sample instead, and only losses leave a client.

Where the thesis is silent (our readings): a cluster without clients keeps its model, which is not
trained, and may be found again; clusters founded in a search are not searched by others of the same
search; what follows a search is Flat FAACL from the clusters as they are then. A client tests, and
is tested on, a former task with the model of the cluster that it had then. A test without an answer
says nothing: a client that has found no cluster and lacks an answer founds none; it trains a model
of its own again in the next round, and searches again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

import raceme.strategies.faacl as keys
from raceme.core.clusters import Model, Weights
from raceme.core.errors import UserError
from raceme.core.messages import COMPUTE_SCALE, LOSSES, ON, Vector, forward_cost, numbered, to_array
from raceme.core.options import option
from raceme.core.requests import Answer, InFlight, InvalidReplyError, Outcome, Request, Update
from raceme.core.scheduling import SelectionContext
from raceme.core.strategy import InUse, Needs
from raceme.flower.messages import array_record
from raceme.strategies.faacl.strategy import (
    ASKING_SECONDS,
    FAACL,
    START,
    FAACLParameters,
    FAACLState,
    fewest_samples,
    log,
    losses_of,
    no_worse,
    validation_share,
)

Item = TypeVar("Item")

_SEARCHING = (keys.MATCH, keys.LEND)

VALIDATION = "validation"
OWN, LENDING, OTHERS = "search-own", "lend", "search-others"
"""Stages of a search; a stage is also the phase by which its bytes are counted."""


@dataclass(frozen=True)
class CFAACLParameters(FAACLParameters):
    """Hyper-parameters of C-FAACL."""

    remembered: int = option(50, "|S|: samples of each task that a client remembers", low=1)
    borrow: str = option(
        "samples",
        "content sent to test another client's remembered sample: samples (the thesis), or "
        "models, so that only losses leave it: losses (our own)",
        among=("samples", "losses"),
    )
    learn_epochs: int = option(
        20, "passes over the samples of a new task with which a client trains its own model", low=1
    )


@dataclass(frozen=True)
class Remembered:
    """A remembered sample that a client is compared on.

    Attributes
    ----------
    cluster : int
        The cluster that the sample belonged to.
    client : str
        The client that remembers it.
    step : int
        Of which step of its data it is.
    """

    cluster: int
    client: str
    step: int


@dataclass
class ConceptRequest:
    """What one client is asked in a stage.

    Attributes
    ----------
    clusters : dict[str, list[int]]
        Ids of the clusters whose models it measures, by set of samples: ``validation`` (its new
        data), ``memory-0`` (what it remembers of a step), ``borrowed-0`` (samples of others).
    clients : dict[str, list[str]]
        Clients whose local models it measures, by set of samples.
    steps : list[int]
        Of which steps it uses what it remembers.
    borrowed : list[Remembered]
        Samples of others that it is sent.
    """

    clusters: dict[str, list[int]] = field(default_factory=dict)
    clients: dict[str, list[str]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    borrowed: list[Remembered] = field(default_factory=list)

    def measure(self, name: str, cluster: int, client: str) -> None:
        """Have the models of a cluster and of a client measured on a set of samples."""
        _once(self.clusters.setdefault(name, []), cluster)
        _once(self.clients.setdefault(name, []), client)

    @property
    def sets(self) -> list[str]:
        """The sets of samples, in the order in which a client has them."""
        remembered = [numbered(keys.MEMORY, step) for step in self.steps]
        borrowed = [numbered(keys.BORROWED, index) for index in range(len(self.borrowed))]
        return [name for name in (VALIDATION, *remembered, *borrowed) if name in self.clusters]

    def models(self) -> tuple[list[int], list[str]]:
        """Return all clusters, and all clients, whose models are measured on some set."""
        clusters: list[int] = []
        clients: list[str] = []
        for name in self.sets:
            for cluster in self.clusters[name]:
                _once(clusters, cluster)
            for client in self.clients[name]:
                _once(clients, client)
        return clusters, clients

    def rows(self, name: str) -> list[int]:
        """Return the positions among :meth:`models` of those measured on a set."""
        clusters, clients = self.models()
        first = [clusters.index(cluster) for cluster in self.clusters[name]]
        return first + [len(clusters) + clients.index(client) for client in self.clients[name]]


@dataclass
class CFAACLState(FAACLState):
    """What C-FAACL knows beside FAACL's state: former tasks, and how far a search is.

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
    unanswered : dict[str, bool]
        Clients that lack an answer of this search: a cluster may still be theirs.
    stage : str
        Empty while no client searches.
    tested : dict[str, list[Remembered]]
        What each client is compared on in this stage, in this order.
    requests : dict[str, ConceptRequest]
        What each client is asked in this stage.
    tried : dict[str, bool]
        Clients that have been asked in this stage.
    answers : dict[str, dict[str, NDArray]]
        What was measured, by client and set of samples: shape (models, samples).
    lent : dict[str, dict[str, NDArray]]
        Samples that clients have handed out for this search, by client and name.
    """

    memory: dict[str, dict[int, int]] = field(default_factory=dict)
    local: dict[str, Vector] = field(default_factory=dict)
    learned_at: dict[str, int] = field(default_factory=dict)
    joins: dict[str, int] = field(default_factory=dict)
    unanswered: dict[str, bool] = field(default_factory=dict)
    stage: str = ""
    tested: dict[str, list[Remembered]] = field(default_factory=dict)
    requests: dict[str, ConceptRequest] = field(default_factory=dict)
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


def _once(values: list[Item], value: Item) -> None:
    if value not in values:
        values.append(value)


class CFAACL(FAACL):
    """FAACL for task sequences: recognises known concepts and detects new ones (C-FAACL)."""

    parameters_type = CFAACLParameters
    state_type = CFAACLState
    parameters: CFAACLParameters
    state: CFAACLState

    @property
    def needs(self) -> Needs:
        """Requirements of the method."""
        return Needs(
            kinds=frozenset({keys.LEARN, keys.LEND, LOSSES, keys.MATCH}),
            settings=frozenset({keys.MEMORY_STEPS, keys.PAIRS, keys.REMEMBERED}),
            validation=True,
            fits_clients=self._check_clients,
            fits_validation=self._check_samples,
        )

    def _check_clients(self, clients: int) -> None:
        """Raise UserError if clients are to remember too few samples for any test to be passed."""
        remembered, alpha = self.parameters.remembered, self.parameters.alpha
        if remembered < (needed := fewest_samples(alpha)):
            raise UserError(
                f"c-faacl.remembered is {remembered}, and a test at level {alpha:g} needs {needed} "
                "samples: no task would ever be recognised. Take more, or a larger c-faacl.alpha."
            )

    @property
    def in_use(self) -> InUse:
        """The clusters that former tasks belong to."""
        return InUse(on_step=self._cluster_of)

    def _cluster_of(self, client: str, step: int) -> Weights:
        """Return the cluster that a client's data of a step belonged to, or what it has become."""
        known = self.state.memory.get(client, {})
        cluster = self.state.supported.heir(known[step]) if step in known else None
        if cluster is None or cluster not in self.models:
            return {}
        return {cluster: 1.0}

    # Before a round: searches, then Cluster Support and Cluster Merge.

    def _queries(self, moment: SelectionContext) -> Sequence[Request] | None:
        """Find out where new data belong, have clusters compared, then let participants train."""
        asked: Sequence[Request] | None = self._search(moment)
        if asked is None:
            asked = super()._queries(moment)
        if asked is None and not self.scheduling.state.running:
            self._notice_new_data(self.state.memory)
        return asked

    def _notice_new_data(self, clients: Iterable[str]) -> None:
        """Let clients whose data have moved on train a model of their own next."""
        for client in clients:
            known = self.state.memory.get(client)
            if known is not None and (self.step_of(client) or 0) not in known:
                self.state.cold[client] = True

    def on_sent(self, task: InFlight) -> None:
        """Note what a client trains, or that it was asked: once in a stage, whatever follows."""
        super().on_sent(task)
        if task.kind in _SEARCHING:
            self.state.tried[task.client] = True

    def on_answer(self, answer: Answer) -> None:
        """Take losses, or lent samples, in."""
        if answer.task.kind in _SEARCHING:
            self._take_search(answer)
        else:
            super().on_answer(answer)

    # A round.

    def request_for(self, client: str) -> Request:
        """Let a client with new data train θ on them and remember a sample; others as in FAACL."""
        self._notice_new_data([client])
        if client not in self.state.cold:
            return self._training(client)
        epochs = self.parameters.learn_epochs if self._has_clusters else self.parameters.init_epochs
        work = self._initial_training(client, epochs)
        settings = {**work.settings, keys.REMEMBERED: self.parameters.remembered}
        return Request(client, keys.LEARN, (), work.arrays, settings, work.phase)

    def _is_new(self, update: Update) -> bool:
        """Return whether a client was asked to learn; its data may have moved on since."""
        return update.task.kind == keys.LEARN

    def _take_new(self, updates: Sequence[Update]) -> list[Outcome]:
        """Make clusters of the first clients (cold start, Algorithm 7); let later ones search."""
        if self._has_clusters:
            return self._learned(updates)
        founded = super()._take_new(updates)
        for update, applied in zip(updates, founded, strict=True):
            self._remember(update.task.client, update.task.step, applied.cluster)
        return founded

    @property
    def _has_clusters(self) -> bool:
        return bool(self.state.supported.partitions)

    def _learned(self, updates: Sequence[Update]) -> list[Outcome]:
        """Keep the models of clients with new data: they search with them."""
        for update in updates:
            self.state.local[update.task.client] = update.vector.copy()
            self.state.learned_at[update.task.client] = update.task.step
        places = [self.clusters.main(update.task.client) for update in updates]
        return [Outcome(cluster, staleness=0, weight=0.0) for cluster in places]

    # The searches, Algorithms 8 and 9: the clusters that new data belong to, between two rounds.

    def _search(self, moment: SelectionContext) -> list[Request] | None:
        """Return what clients are asked now; None if none searches any more."""
        state, rounds = self.state, self.scheduling
        if not state.local or rounds.state.running or moment.greeting:
            return None
        while state.local:
            asked = rounds.ask_first(moment, self._is_asked, every=0, patience=ASKING_SECONDS)
            if asked is not None:
                return [self._work(client) for client in asked]
            self._advance()
        return None

    def _is_asked(self, client: str) -> bool:
        return client in self.state.requests and client not in self.state.tried

    # What clients are asked.

    def _work(self, client: str) -> Request:
        """Return the work of a client in this stage."""
        state, request = self.state, self.state.requests[client]
        settings: dict[str, float | str | list[int]] = {keys.MEMORY_STEPS: request.steps}
        if state.stage == LENDING:
            settings[COMPUTE_SCALE] = 0.0
            return Request(client, keys.LEND, models=(), settings=settings, phase=state.stage)
        if VALIDATION in request.clusters:
            settings[ON] = VALIDATION
        settings[COMPUTE_SCALE] = self._cost(client, request)
        rows = [request.rows(name) for name in request.sets]
        settings[keys.PAIRS] = [x for at, own in enumerate(rows) for row in own for x in (at, row)]
        clusters, clients = request.models()
        arrays = {
            numbered(keys.LOCAL, index): self.spec.pack(state.local[name])
            for index, name in enumerate(clients)
        }
        for index, remembered in enumerate(request.borrowed):
            arrays[numbered(keys.BORROWED, index)] = self._lent(remembered)
        return Request(client, keys.MATCH, tuple(clusters), arrays, settings, phase=state.stage)

    def _cost(self, client: str, request: ConceptRequest) -> float:
        """Return what measuring takes, as a share of a round's computing.

        On each set of samples only the models that are compared on it are measured.
        """
        examples = self.progress.fleet.clients[client].num_examples
        passed = 0.0
        for name in request.sets:
            is_new = name == VALIDATION
            samples = validation_share(self) * examples if is_new else self.parameters.remembered
            passed += samples * len(request.rows(name))
        return passed / max(1, examples) * forward_cost(self.train_config, examples)

    def _lent(self, remembered: Remembered) -> ArrayRecord:
        name = numbered(keys.MEMORY, remembered.step)
        lent = self.state.lent[remembered.client]
        parts = {part: to_array(lent[f"{name}-{part}"]) for part in (keys.INPUTS, keys.LABELS)}
        return array_record(parts)

    def _take_search(self, answer: Answer) -> None:
        """Take losses, or lent samples, in.

        Raises
        ------
        InvalidReplyError
            They are none, or come after the stage.
        """
        state, client = self.state, answer.task.client
        request = state.requests.get(client)
        if request is None or (answer.task.kind == keys.LEND) != (state.stage == LENDING):
            raise InvalidReplyError("it came after the search")
        self._forget_what_is_lost(client, request, answer.numbers.keys())
        if state.stage == LENDING:
            state.lent[client] = dict(answer.numbers)
            return
        state.answers[client] = {
            name: losses_of(answer, len(request.rows(name)), name)
            for name in request.sets
            if name in answer.numbers
        }

    def _forget_what_is_lost(
        self, client: str, request: ConceptRequest, there: Iterable[str]
    ) -> None:
        """Note that a client remembers steps no more: it was set up anew, say."""
        known = set(there)
        for step in request.steps:
            name = numbered(keys.MEMORY, step)
            if name not in known and f"{name}-{keys.INPUTS}" not in known:
                log.warning("%s has lost its memory of step %d.", client, step)
                self.state.memory.get(client, {}).pop(step, None)

    # From stage to stage.

    def _advance(self) -> None:
        """Draw the conclusions of a stage, and begin the next."""
        state = self.state
        if state.stage == OWN:
            self._conclude()
            self._begin_others()
        elif state.stage == LENDING:
            self._begin(OTHERS)
        elif state.stage == OTHERS:
            self._conclude()
            self._place_searching()
        else:
            state.tested = {client: self._own(client) for client in state.local}
            self._begin(OWN)

    def _own(self, client: str) -> list[Remembered]:
        """Return what a client remembers itself, in order of time (Algorithm 8)."""
        heir, models = self.state.supported.heir, self.models
        known = sorted(self.state.memory.get(client, {}).items())
        found = (Remembered(heir(cluster), client, step) for step, cluster in known)
        return [remembered for remembered in found if remembered.cluster in models]

    def _begin_others(self) -> None:
        """Pick what each client that has found nothing is compared on (Algorithm 9)."""
        state = self.state
        by_cluster: dict[int, list[Remembered]] = {}
        for client in state.memory:
            if self.clusters.online.get(client):
                for remembered in self._own(client):
                    by_cluster.setdefault(remembered.cluster, []).append(remembered)
        state.tested = {}
        for client in state.local:
            if client in state.joins:
                continue
            state.tested[client] = []
            for _, known in sorted(by_cluster.items()):
                if others := [r for r in known if r.client != client]:
                    drawn = others[int(self.rng.integers(len(others)))]
                    state.tested[client].append(drawn)
        self._begin(LENDING if self.parameters.borrow == "samples" else OTHERS)

    def _begin(self, stage: str) -> None:
        """Find out what clients are to be asked."""
        state = self.state
        state.stage, state.tried, state.answers, state.requests = stage, {}, {}, {}
        for client, tested in state.tested.items():
            for remembered in tested:
                self._request_comparison(client, remembered)

    def _request_comparison(self, client: str, remembered: Remembered) -> None:
        """Have a client compared on a remembered sample."""
        requests, stage = self.state.requests, self.state.stage
        borrows = self.parameters.borrow == "samples"
        if stage in (LENDING, OTHERS) and (stage == LENDING or not borrows):
            holder = requests.setdefault(remembered.client, ConceptRequest())
            _once(holder.steps, remembered.step)
            if stage == OTHERS:
                holder.measure(numbered(keys.MEMORY, remembered.step), remembered.cluster, client)
        if stage == LENDING:
            return
        own = requests.setdefault(client, ConceptRequest())
        own.measure(VALIDATION, remembered.cluster, client)
        if stage == OWN:
            _once(own.steps, remembered.step)
            own.measure(numbered(keys.MEMORY, remembered.step), remembered.cluster, client)
        elif borrows and self._is_lent(remembered):
            _once(own.borrowed, remembered)
            name = numbered(keys.BORROWED, own.borrowed.index(remembered))
            own.measure(name, remembered.cluster, client)

    def _is_lent(self, remembered: Remembered) -> bool:
        lent, name = (
            self.state.lent.get(remembered.client, {}),
            numbered(keys.MEMORY, remembered.step),
        )
        return f"{name}-{keys.INPUTS}" in lent and f"{name}-{keys.LABELS}" in lent

    def _conclude(self) -> None:
        """Let clients join the first cluster that matches; note those that lack an answer."""
        for client, tested in self.state.tested.items():
            matching = {remembered: self._is_match(client, remembered) for remembered in tested}
            found = next((one.cluster for one, fits in matching.items() if fits), None)
            if found is not None:
                self.state.joins[client] = found
            elif None in matching.values():
                self.state.unanswered[client] = True

    def _is_match(self, client: str, remembered: Remembered) -> bool | None:
        """Return whether a client's new data are of the concept of a remembered sample.

        None if that is not known, for lack of an answer.
        """
        state, name = self.state, numbered(keys.MEMORY, remembered.step)
        if remembered.step not in state.memory.get(remembered.client, {}):
            return False  # The sample is lost: there is nothing to compare on.
        holder = remembered.client
        request = state.requests.get(client)
        if request is not None and remembered in request.borrowed:
            holder, name = client, numbered(keys.BORROWED, request.borrowed.index(remembered))
        new = self._losses(client, VALIDATION, remembered.cluster, client)
        old = self._losses(holder, name, remembered.cluster, client)
        if new is None or old is None:
            return None
        return matches(new, old, self.parameters.epsilon, self.parameters.alpha)

    def _losses(
        self, measured_by: str, name: str, cluster: int, client: str
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """Return the losses of a cluster's model and of a client's own; None if not known."""
        request, answer = (
            self.state.requests.get(measured_by),
            self.state.answers.get(measured_by),
        )
        if request is None or answer is None or name not in answer:
            return None
        clusters, clients, losses = request.clusters[name], request.clients[name], answer[name]
        local = len(clusters) + clients.index(client)
        return losses[clusters.index(cluster)], losses[local]

    # After a search.

    def _place_searching(self) -> None:
        """Let clients join the clusters that they have found; others found one (Algorithm 10).

        Only an answer can say that none matches: without one a client is to learn, and to search,
        again.
        """
        state = self.state
        state.stage, state.tested, state.answers, state.lent = "", {}, {}, {}
        state.requests, state.tried = {}, {}
        for client, local in state.local.items():
            cluster = state.joins.get(client)
            if cluster is None and client in state.unanswered:
                log.warning("%s lacks an answer of its search: it will search again.", client)
                continue
            if cluster is None:
                cluster = self.clusters.found(Model(local, 1), [client])
            else:
                self.clusters.assign(client, cluster)
            state.cold.pop(client, None)
            self._remember(client, state.learned_at[client], cluster)
        state.local, state.joins, state.unanswered, state.learned_at = {}, {}, {}, {}
        with_clients = [k for k in self.models if k != START and self.clusters.clients(k, False)]
        self._compare_all(with_clients)

    def _remember(self, client: str, step: int, cluster: int) -> None:
        self.state.memory.setdefault(client, {})[step] = cluster
